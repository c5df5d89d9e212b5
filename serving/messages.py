"""/v1/messages, Anthropic's API: reading a request, and answers made of blocks of text and tool calls."""

import json
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from engine.intake import Intake
from serving.answers import Part, ToolCall
from serving.completions import Message, Writer
from serving.fields import ApiError, Fields, unsupported
from serving.prompts import prompts_of
from serving.requests import Ask, choose_tools, common, functions_of, read_text, set_thinking
from serving.scheduler import Job, ServeSettings

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
THINKING = {"enabled": True, "adaptive": True, "disabled": False}  # whether the model thinks first
MODES = {"auto": "auto", "any": "required", "none": "none", "tool": "required"}  # their tool_choice -> OpenAI's


def message_ask(body: dict[str, Any]) -> Ask:
    """Read a request to /v1/messages."""
    fields = Fields(body)
    fields.required("max_tokens", int)
    ask = common(fields, "max_tokens", holder="output_config")
    if fields.given("stop_sequences"):
        ask.given["stop"] = tuple(fields.get("stop_sequences", list))
    thinking = fields.inner("thinking")
    kind = thinking.choice("type", THINKING, "")
    budget = thinking.integer("budget_tokens", 1, 2**31, 2**31) if kind == "enabled" else -1
    set_thinking(ask, {}, THINKING.get(kind), budget)
    for name in ("container", "mcp_servers"):
        fields.refuse(name, ([],), "this server runs nothing but the model.")
    messages = fields.some("messages")
    if fields.given("system"):
        ask.messages.append({"role": "system", "content": read_text(fields, "system", ask)})
    for message in messages:
        ask.messages += _messages(message, ask)
    _read_tools(ask, fields)
    return ask


def _read_tools(ask: Ask, fields: Fields) -> None:
    """The tools and which of them may or must be called."""
    tools = functions_of(ask, fields, "custom", "input_schema", ignores=True)
    choice = fields.inner("tool_choice")
    kind = choice.choice("type", MODES, "auto")
    name = choice.required("name", str) if kind == "tool" else None
    ask.one_call = choice.get("disable_parallel_tool_use", bool, False)
    choose_tools(ask, tools, MODES[kind], name, choice.name("name"))


def _messages(fields: Fields, ask: Ask) -> list[dict[str, Any]]:
    """The messages, as chat templates take them, that one of theirs stands for: results of tools are messages there."""
    role = fields.choice("role", ("user", "assistant", "system"))
    if isinstance(fields.values.get("content"), str):
        return [{"role": role, "content": fields.values["content"]}]
    fields.required("content", list)
    text, thought, calls, results = "", "", list[dict[str, Any]](), list[dict[str, Any]]()
    for block in fields.items("content"):
        kind = block.required("type", str)
        if kind == "text":
            text += block.required("text", str)
        elif kind == "tool_use" and role == "assistant":
            called = {"name": block.required("name", str), "arguments": block.get("input", dict, {})}
            calls.append({"id": block.required("id", str), "type": "function", "function": called})
        elif kind == "tool_result" and role == "user":
            result = {"role": "tool", "content": read_text(block, "content", ask, of_tool=True)}
            results.append(result | {"tool_call_id": block.required("tool_use_id", str)})
        elif kind == "thinking" and role == "assistant":
            thought += block.required("thinking", str)
        elif kind != "redacted_thinking":
            raise unsupported(block.name("type"), f"{kind!r:.40}; allowed here: text and tool calls.")
    if results and not text:
        return results
    more = {"thought": thought, "tool_calls": calls}
    return [*results, {"role": role, "content": text} | {key: value for key, value in more.items() if value}]


def count_tokens(engine: Intake, settings: ServeSettings, body: dict[str, Any]) -> dict[str, Any]:
    """POST /v1/messages/count_tokens: the tokens of the prompt that a request would have."""
    (ids,) = prompts_of(engine, message_ask({"max_tokens": 1} | body))
    return {"input_tokens": len(ids)}


class MessageWriter(Writer):
    """/v1/messages. White space between calls is no block of its own."""

    prefix = "msg_"

    def __init__(self, job: Job):
        super().__init__(job)
        self._blocks = 0  # that have begun
        self._open = ""  # the kind of the block that has begun and not ended: "text", "thinking" or "tool_use"
        self._held = ""  # white space that is sent if text follows

    def start(self) -> Iterator[Message]:
        yield self._event("message_start", message=self._message([], None, None))

    def part(self, part: Part) -> Iterator[Message]:
        more = list(takewhile(lambda told: not told[1].name, part.calls))  # of the call that is open, before any text
        for _, call in more:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if part.thought:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.thought})
        self._held += part.text
        if self._held and (self._open == "text" or self._held.strip()):
            yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": self._held})
            self._held = ""
        for _, call in part.calls[len(more) :]:
            if call.name:
                yield from self._begin(_call(call), new=True)
            else:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self) -> Iterator[Message]:
        yield from self._end_block()
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield self._event("message_delta", delta=delta, usage=self._usage(), timings=self.timings())
        yield self._event("message_stop")

    def whole(self) -> dict[str, Any]:
        text, thought = self.answer.text, self.answer.thought
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text.strip() else []
        if thought:
            blocks.insert(0, {"type": "thinking", "thinking": thought, "signature": ""})
        blocks += [_call(call) for call in self.answer.calls]
        return self._message(blocks, *self._stop()) | {"timings": self.timings()}

    def error(self, error: ApiError) -> Message:
        return Message(error.body(), "error")

    def _event(self, kind: str, /, **data: Any) -> Message:
        return Message({"type": kind} | data, kind)

    def _begin(self, block: dict[str, Any], new: bool = False) -> Iterator[Message]:
        """Begin a block, unless one of this kind is open, and end the one before it. new: begin it in any case."""
        if new or block["type"] != self._open:
            yield from self._end_block()
            self._open = block["type"]
            self._blocks += 1
            yield self._event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> Message:
        return self._event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _end_block(self) -> Iterator[Message]:
        if self._open:
            self._open = ""
            yield self._event("content_block_stop", index=self._blocks - 1)

    def _stop(self) -> tuple[str, str | None]:
        """Why the answer ended, and the stop sequence that ended it."""
        result = self.answer.result
        if result.stop_reason != "stop" or self.job.tokenizer is None or self.answer.calls:
            return STOP_REASONS[self.answer.finish], None
        written = self.job.tokenizer.decode(result.token_ids, continuation=True)
        return "stop_sequence", next((text for text in self.job.params.stop if text in written), None)

    def _message(self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.job.model, "content": blocks}
        return message | {"stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt, cached, new = self.usage()
        counts = {"input_tokens": prompt - cached, "output_tokens": new}
        return counts | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _call(call: ToolCall) -> dict[str, Any]:
    """The block of a call. Arguments that a limit cut off are no object, so the block has none of them."""
    try:
        given = json.loads(call.arguments)
    except ValueError:
        given = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given if isinstance(given, dict) else {}}
