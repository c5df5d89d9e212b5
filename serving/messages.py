"""Messages and tools of a request in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from serving.errors import unsupported, wrong
from serving.fields import Fields

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")
TOOL_NAME = 64  # characters


def chat_messages(values: list[Any]) -> list[dict[str, Any]]:
    """The messages of /v1/chat/completions. A message has a role, a content, and what belongs to tools."""
    if not values:
        raise wrong("messages", "is empty")
    return [_message(Fields(value, f"messages[{i}].")) for i, value in enumerate(values)]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.required("role", str)
    if role not in ROLES:
        raise wrong(fields.name("role"), f"is {role!r:.40}; allowed: {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": ROLES[role], "content": _content(fields)}
    fields.refuse("function_call", (), "use tool_calls.")
    if role == "assistant" and (calls := fields.get("tool_calls", list, [])):
        message["tool_calls"] = [_call(Fields(call, fields.name(f"tool_calls[{i}]."))) for i, call in enumerate(calls)]
    elif role != "tool" and not fields.given("content") and role != "assistant":
        raise wrong(fields.name("content"), "is missing")
    if role == "tool":
        message |= {name: fields.get(name, str) for name in ("tool_call_id", "name") if fields.given(name)}
    return message


def _content(fields: Fields) -> str:
    """A message's content: a text, or a list of parts that all are text."""
    value = fields.values.get("content")
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for i, part in enumerate(fields.get("content", list)):
        inside = Fields(part, fields.name(f"content[{i}]."))
        kind = inside.required("type", str)
        if kind not in TEXT_PARTS:
            raise unsupported(inside.name("type"), f"{kind!r:.40}; this model reads text only.")
        texts.append(inside.required("text", str))
    return "".join(texts)


def _call(fields: Fields) -> dict[str, Any]:
    """A tool call that the model made earlier. Templates take its arguments as an object."""
    function = Fields(fields.required("function", dict), fields.name("function."))
    call = {"name": function.required("name", str), "arguments": _arguments(function.values.get("arguments"))}
    return {"id": fields.get("id", str, ""), "type": "function", "function": call}


def _arguments(value: Any) -> Any:
    """The arguments of a call: the object that a JSON text holds, or the text if it holds none."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value or {}


def chat_tools(values: list[Any], flat: bool = False) -> list[dict[str, Any]]:
    """The tools of a request as templates take them: {"type": "function", "function": {name, description, parameters}}.

    flat: as /v1/responses has them, where the function's fields stand in the tool itself.
    """
    tools = []
    for i, value in enumerate(values):
        where = f"tools[{i}]."
        fields = Fields(value, where)
        kind = fields.required("type", str)
        if kind != "function":
            raise unsupported(f"{where}type", f"{kind!r:.40}; tools must be functions.")
        function = fields if flat else Fields(fields.required("function", dict), f"{where}function.")
        name = function.required("name", str)
        if not 1 <= len(name) <= TOOL_NAME:
            raise wrong(function.name("name"), f"has {len(name)} characters; allowed: 1 to {TOOL_NAME}")
        described = {"name": name, "description": function.get("description", str, "")}
        described["parameters"] = function.get("parameters", dict, {"type": "object", "properties": {}})
        tools.append({"type": "function", "function": described})
    return tools


def input_messages(instructions: str | None, value: Any) -> list[dict[str, Any]]:
    """The messages that the instructions and the input of /v1/responses stand for."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise wrong("input", "must be a text or a list of items, and not empty")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(items):
        fields = Fields(item, f"input[{i}].")
        kind = fields.get("type", str, "message")
        if kind == "message":
            messages.append(_message(fields))
        elif kind == "function_call":
            call = {"name": fields.required("name", str), "arguments": _arguments(fields.values.get("arguments"))}
            made = {"id": fields.get("call_id", str, ""), "type": "function", "function": call}
            if messages and messages[-1]["role"] == "assistant":  # its text, or an earlier call of the same answer
                messages[-1].setdefault("tool_calls", []).append(made)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
        elif kind == "function_call_output":
            output = {"role": "tool", "content": fields.required("output", str)}
            messages.append(output | {"tool_call_id": fields.get("call_id", str, "")})
        elif kind != "reasoning":
            raise unsupported(fields.name("type"), f"{kind!r:.40}; allowed: messages and function calls.")
    if not messages:
        raise wrong("input", "has no messages")
    return messages
