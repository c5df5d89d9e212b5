"""Answers of /v1/responses: one response whose output is a list of items, and events that build it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serving.answers import Part, TokenInfo, ToolCall, usage_counts
from serving.completions import Message, Writer, new_id
from serving.scheduler import Job

REPEATED = ("instructions", "metadata", "tools", "user")  # fields of the request that the response repeats


class ResponseWriter(Writer):
    """/v1/responses. The text is one message item, which ends last, and every tool call is an item of its own."""

    prefix = "resp_"

    def __init__(self, job: Job):
        super().__init__(job)
        self._number = 0  # of the next event
        self._message = new_id("msg_")
        self._items: list[dict[str, Any]] = []  # those that have begun
        self._place: int | None = None  # of the message item among them, None: it has not begun
        self._held: list[TokenInfo] = []  # tokens of white space, which alone makes no message beside a call

    def start(self) -> Iterator[Message]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def part(self, part: Part) -> Iterator[Message]:
        if self._place is not None:
            if part.text or part.tokens:
                yield self._delta(part.text, part.tokens)
        elif self.answer.text.strip():
            yield from self._begin_message([*self._held, *part.tokens])
        else:
            self._held += part.tokens
        for call in part.calls:
            yield from self._call_events(call)

    def end(self) -> Iterator[Message]:
        if not self._items:
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
        text = self.answer.text
        items = [self._message_item(text)] if text.strip() or not calls else []
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

    def _call_events(self, call: ToolCall) -> Iterator[Message]:
        index, item = len(self._items), self._call_item(call)
        begun = item | {"arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": index}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        done = {"name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **where, **done)
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._items.append(item)

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
            "model": self.model,
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
        prompt, cached, new = usage_counts(self.job.results)
        counts = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}}
        counts |= {"output_tokens": new, "output_tokens_details": {"reasoning_tokens": 0}}
        return counts | {"total_tokens": prompt + new}
