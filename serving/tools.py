"""Tools: reading them, writing them for templates without a place for them, forcing a call, and finding calls in answers.

Every family of models writes tool calls in a format of its own, which its chat template shows.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.grammar import checked_grammar
from runtime.results import Chunk
from serving.fields import Fields, unsupported, wrong
from serving.formats import grammar_of, quoted
from tokenizer import Tokenizer

TOOL_NAME = 64  # characters
NO_PARAMETERS = {"type": "object", "properties": {}}


class ToolCall(NamedTuple):
    """A call that the model asks for. The arguments are JSON text, as in OpenAI's API."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls: between two marks, or from a mark to the end of the answer.

    bare: an answer that begins with "{" is a call, too.
    """

    begin: str
    end: str = ""
    bare: bool = False


HERMES = ToolFormat("<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("[TOOL_CALLS]")
LLAMA = ToolFormat("<|python_tag|>", bare=True)
FORCED = ToolFormat("")  # the whole answer is a call


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """The format that the model's chat template uses. Hermes' is the most common one, so it is the default."""
    if tokenizer.template_writes(HERMES.begin):
        return HERMES
    if tokenizer.template_writes(MISTRAL.begin):
        return MISTRAL
    if tokenizer.template_writes("python_tag") or tokenizer.template_writes('"parameters"'):
        return LLAMA
    return HERMES


class ToolCallParser:
    """Splits an answer into text and tool calls while it arrives.

    Text before a call is handed out at once, apart from an end that may begin a mark. A call is handed out when it is
    complete. What looks like a call and is none, or names no tool of the request, is text.
    """

    def __init__(self, form: ToolFormat, names: set[str], tokenizer: Tokenizer | None = None):
        """names: of the tools that may be called. tokenizer: what `read` needs."""
        self.form = form
        self.names = names
        self.tokenizer = tokenizer
        special = tokenizer.special_ids if tokenizer else ()
        # the id of the mark that begins a call, if it is a special token, which the engine's text leaves out
        begins = form.begin.encode()
        self.mark = next((i for i in special if begins and tokenizer.pieces.get(i) == begins), None)
        self.waiting = ""  # text that may belong to a call
        self.inside = False
        self.begun = False  # whether the answer has anything but white space

    def read(self, chunk: Chunk) -> tuple[str, list[ToolCall]]:
        """Take what a step emitted, with the mark where its token stands."""
        if self.mark not in chunk.token_ids:
            return self.push(chunk.text)
        after = chunk.token_ids[chunk.token_ids.index(self.mark) + 1 :]
        at = max(0, len(chunk.text) - len(self.tokenizer.decode(after, continuation=True)))
        return self.push(chunk.text[:at] + self.form.begin + chunk.text[at:])

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take more of the answer. Returns the text and the calls that are certain now."""
        self.waiting += text
        shown, calls = "", []
        while True:
            if not self.inside:
                shown += self._text()
                if not self.inside:
                    return shown, calls
            at = self.waiting.find(self.form.end) if self.form.end else -1
            if at < 0:
                return shown, calls
            written, self.waiting = self.waiting[:at], self.waiting[at + len(self.form.end) :]
            complete = self._calls(written[len(self.form.begin) :])
            shown += "" if complete else written + self.form.end
            calls += complete
            self.inside = False

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the answer."""
        written, self.waiting = self.waiting, ""
        calls = self._calls(written.removeprefix(self.form.begin)) if self.inside else []
        return ("" if calls else written), calls

    def _text(self) -> str:
        """Take the text before the next call out of what waits. It sets `inside` if a call begins."""
        begin = self.form.begin
        if self.form.bare and not self.begun:
            rest = self.waiting.lstrip()
            if rest.startswith("{"):
                self.inside = True
                return ""
            if not rest:
                return ""
        at = self.waiting.find(begin)
        self.inside = at >= 0
        if at < 0:
            sizes = (size for size in range(min(len(begin) - 1, len(self.waiting)), 0, -1))
            held = next((size for size in sizes if self.waiting.endswith(begin[:size])), 0)
            at = len(self.waiting) - held
        shown, self.waiting = self.waiting[:at], self.waiting[at:]
        self.begun |= bool(shown.strip())
        return shown

    def _calls(self, written: str) -> list[ToolCall]:
        """The calls that a text between the marks holds; [] if any part of it is something else."""
        calls = [self._call(value) for value in _objects(written, self.form.begin)]
        return [call for call in calls if call] if all(calls) else []

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        # Mistral's templates want exactly nine characters; longer ones would serve the others no better.
        return ToolCall(secrets.token_hex(5)[:9], value["name"], json.dumps(arguments, ensure_ascii=False))


def _objects(text: str, mark: str) -> list[Any]:
    """The JSON values in a text: one, a list, several with ";" or a mark between them, or NAME[ARGS]{...}."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    at = 0
    while at < len(text):
        gap = re.compile(rf"(?:\s|;|,|{re.escape(mark)})*").match(text, at)
        at = gap.end() if gap else at
        named = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]").match(text, at)
        try:
            value, end = decoder.raw_decode(text, named.end() if named else at)
        except (ValueError, RecursionError):
            return [] if text[at:].strip() else values
        at = end
        if named:
            value = {"name": named[1], "arguments": value}
        values += value if isinstance(value, list) else [value]
    return values


# ------------------------------------------------------------------ the tools of a request


class Tools(NamedTuple):
    """The tools that may be called, as chat templates take them, and the grammar of a call that must come."""

    described: list[dict[str, Any]]
    grammar: str | None


def read_tools(fields: Fields, flat: bool = False) -> Tools:
    """The tools that tool_choice leaves.

    flat: as /v1/responses has them, where a function's fields stand in the tool itself.
    """
    tools = [_tool(tool, flat) for tool in fields.items("tools")]
    names = [tool["function"]["name"] for tool in tools]
    choice = fields.values.get("tool_choice") or ("auto" if tools else "none")
    if choice in ("none", "auto"):
        return Tools(tools if choice == "auto" else [], None)
    if choice != "required":
        named = fields.inner("tool_choice")
        if (kind := named.required("type", str)) != "function":
            raise unsupported(named.name("type"), f"{kind!r:.40}; allowed: function.")
        holder = named if flat else named.inner("function")
        name = holder.required("name", str)
        if name not in names:
            raise wrong(holder.name("name"), f"is {name!r:.80}, which is none of the tools")
        tools = [tools[names.index(name)]]
    if not tools:
        raise wrong("tool_choice", "is required, and there are no tools")
    return Tools(tools, call_grammar([tool["function"] for tool in tools]))


def _tool(fields: Fields, flat: bool) -> dict[str, Any]:
    """A tool: {"type": "function", "function": {name, description, parameters}}."""
    kind = fields.required("type", str)
    if kind != "function":
        raise unsupported(fields.name("type"), f"{kind!r:.40}; tools must be functions.")
    return tool_of(fields if flat else fields.inner("function"), "parameters")


def tool_of(function: Fields, parameters: str) -> dict[str, Any]:
    """A tool as chat templates take it. parameters: the name of the field with the schema of its arguments."""
    name = function.required("name", str)
    if not 1 <= len(name) <= TOOL_NAME:
        raise wrong(function.name("name"), f"has {len(name)} characters; allowed: 1 to {TOOL_NAME}")
    described = {"name": name, "description": function.get("description", str, "")}
    described["parameters"] = function.get(parameters, dict, NO_PARAMETERS)
    return {"type": "function", "function": described}


def call_grammar(functions: Sequence[dict[str, Any]]) -> str:
    """The grammar of one call of one of these functions, whose arguments follow its schema."""
    rules = [f"start: {' | '.join(f'call{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        begin = f'{{"name":{quoted(function["name"])},"arguments":'
        # compact, as everywhere: a model could otherwise write white space for ever
        schema = json.dumps(function["parameters"] | {"x-guidance": {"whitespace_flexible": False}})
        rules += [f'call{i}: {quoted(begin)} arguments{i} "}}"', f"arguments{i}: %json {schema}"]
    return grammar_of("tools", checked_grammar, "\n".join(rules))


def as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their tools, calls and results as plain text in Hermes' format, for a template without a place
    for them. The tools stand at the beginning of the first message, because not every template has system messages."""
    written: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        for call in message.get("tool_calls", ()):
            text += f"{HERMES.begin}{json.dumps(call['function'], ensure_ascii=False)}{HERMES.end}"
        if role == "tool":
            role, text = "user", f"<tool_response>{text}</tool_response>"
            if written and written[-1]["role"] == "user":  # the results of several calls
                written[-1]["content"] += f"\n{text}"
                continue
        written.append({"role": role, "content": text})
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        form = f'{HERMES.begin}{{"name": NAME, "arguments": {{...}}}}{HERMES.end}'
        about = f"You can call these functions:\n{functions}\nTo call one, write {form} and wait for its result."
        written[0]["content"] = f"{about}\n\n{written[0]['content']}"
    return written
