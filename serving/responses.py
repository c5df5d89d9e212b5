"""Answers of /v1/responses: one response whose output is a list of items, and events that build it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serving.answers import Part, TokenInfo, ToolCall
from serving.completions import Message, Writer, new_id
from serving.scheduler import Job

REPEATED = ("instructions", "metadata", "tools", "user")  # fields of the request that the response repeats


class ResponseWriter(Writer):
    """/v1/responses. The text is one message item, which ends last. The thought and every tool call are items, too."""

    prefix = "resp_"

    def __init__(self, job: Job):
        super().__init__(job)
        self._number = 0  # of the next event
        self._message = new_id("msg_")
        self._items: list[dict[str, Any]] = []  # those that have begun
        self._place: int | None = None  # of the message item among them, None: it has not begun
        self._open: dict[str, Any] | None = None  # the item of a thought or a call that has begun and not ended
        self._held: list[TokenInfo] = []  # tokens of white space, which alone makes no message beside a call

    def start(self) -> Iterator[Message]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def part(self, part: Part) -> Iterator[Message]:
        if part.thought:
            if not self._items:
                yield from self._begin({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []})
                yield self._in_item("content_part.added", part=_thought(""), content_index=0)
            yield self._in_item("reasoning_text.delta", delta=part.thought, content_index=0)
        if part.text.strip() or part.calls:
            yield from self._end_thought()
        if self._place is not None:
            if part.text or part.tokens:
                yield self._delta(part.text, part.tokens)
        elif self.answer.text.strip():
            yield from self._begin_message([*self._held, *part.tokens])
        else:
            self._held += part.tokens
        for number, call in part.calls:
            if call.name:
                yield from self._end_call(number - 1)
                yield from self._begin(self._call_item(call))
            else:
                yield self._in_item("function_call_arguments.delta", delta=call.arguments)

    def end(self) -> Iterator[Message]:
        yield from self._end_thought()
        yield from self._end_call(-1)
        if not self.answer.calls and self._place is None:
            yield from self._begin_message(self._held)
        if self._place is not None:
            item = self._items[self._place] = self._message_item(self.answer.text)
            done = item["content"][0]
            yield self._in_text("response.output_text.done", text=done["text"], logprobs=done["logprobs"])
            yield self._in_text("response.content_part.done", part=done)
            yield self._event("response.output_item.done", output_index=self._place, item=item)
        response = self._response(self._status(), self._items)
        yield self._event(f"response.{response['status']}", response=response)

    def whole(self) -> dict[str, Any]:
        calls = [self._call_item(call) for call in self.answer.calls]
        text, thought = self.answer.text, self.answer.thought
        items = [self._message_item(text)] if text.strip() or not calls else []
        if thought:
            items.insert(0, {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": [_thought(thought)]})
        return self._response(self._status(), items + calls)

    def _status(self) -> str:
        return "incomplete" if self.answer.finish == "length" else "completed"

    def _event(self, kind: str, /, **data: Any) -> Message:
        self._number += 1
        return Message({"type": kind, "sequence_number": self._number - 1} | data, kind)

    def _in_text(self, name: str, **data: Any) -> Message:
        return self._event(name, item_id=self._message, output_index=self._place, content_index=0, **data)

    def _begin_message(self, tokens: Sequence[TokenInfo]) -> Iterator[Message]:
        """Begin the message item with all text so far. tokens: of that text."""
        self._place = len(self._items)
        item = {"type": "message", "id": self._message, "status": "in_progress", "role": "assistant", "content": []}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=self._place, item=item)
        yield self._in_text("response.content_part.added", part=self._text_part(""))
        if self.answer.text or tokens:
            yield self._delta(self.answer.text, tokens)

    def _delta(self, text: str, tokens: Sequence[TokenInfo]) -> Message:
        logprobs = self.logprobs(tokens) if self.ask.logprobs is not None else []
        return self._in_text("response.output_text.delta", delta=text, logprobs=logprobs)

    def _begin(self, item: dict[str, Any]) -> Iterator[Message]:
        """Begin the item of a thought or a call."""
        self._open = item
        self._items.append(item)
        begun = item | {"status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun)

    def _in_item(self, kind: str, /, **data: Any) -> Message:
        where = {"item_id": self._open["id"], "output_index": self._items.index(self._open)}
        return self._event(f"response.{kind}", **where, **data)

    def _end_thought(self) -> Iterator[Message]:
        if self._open and self._open["type"] == "reasoning":
            done = _thought(self.answer.thought)
            yield self._in_item("reasoning_text.done", text=done["text"], content_index=0)
            yield self._in_item("content_part.done", part=done, content_index=0)
            yield from self._end_item({"content": [done]})

    def _end_call(self, number: int) -> Iterator[Message]:
        """End the item of a call, which has all arguments now. number: of the call in the answer."""
        if self._open:
            done = {"name": self._open["name"], "arguments": self.answer.calls[number].arguments}
            yield self._in_item("function_call_arguments.done", **done)
            yield from self._end_item({"arguments": done["arguments"], "status": "completed"})

    def _end_item(self, more: dict[str, Any]) -> Iterator[Message]:
        self._open.update(more)
        yield self._in_item("output_item.done", item=self._open)
        self._open = None

    def _text_part(self, text: str) -> dict[str, Any]:
        logprobs = self.logprobs(self.answer.tokens) if self.ask.logprobs is not None and text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _message_item(self, text: str) -> dict[str, Any]:
        item = {"type": "message", "id": self._message, "status": "completed", "role": "assistant"}
        return item | {"content": [self._text_part(text)]}

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        item = {"type": "function_call", "id": new_id("fc_"), "call_id": call.id, "name": call.name}
        return item | {"arguments": call.arguments, "status": "completed"}

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The response object. It has no usage before its end."""
        ended = status != "in_progress"
        params, raw = self.job.params, self.ask.raw
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.job.model,
            "output": list(items),
            "max_output_tokens": raw.get("max_output_tokens"),
            "parallel_tool_calls": not self.ask.one_call,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"}},
            "tool_choice": raw.get("tool_choice") or "auto",
            "truncation": "auto" if self.ask.drop_oldest else "disabled",
            "usage": self._usage() if ended else None,
        }
        repeated = {name: raw.get(name) for name in REPEATED}
        repeated["tools"] = repeated["tools"] or []
        return response | repeated | ({"timings": self.timings()} if ended else {})

    def _usage(self) -> dict[str, Any]:
        prompt, cached, new = self.usage()
        counts = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}}
        counts |= {"output_tokens": new, "output_tokens_details": {"reasoning_tokens": self.thought_tokens()}}
        return counts | {"total_tokens": prompt + new}


def _thought(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}
