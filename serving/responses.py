"""Answers of /v1/responses: one response whose output is a list of items, and events that build it up."""

from collections.abc import Iterator, Sequence
from typing import Any

from serving.answers import Part, TokenInfo
from serving.completions import Message, Writer, new_id
from serving.scheduler import Job

FIXED = {"object": "response", "error": None, "previous_response_id": None, "store": False}
FIXED |= {"text": {"format": {"type": "text"}}}
REPEATED = ("instructions", "metadata", "tools", "user")  # fields of the request that the response repeats


class ResponseWriter(Writer):
    """/v1/responses. The text is one message item, which ends last. Thoughts and every tool call are items, too."""

    prefix = "resp_"

    def __init__(self, job: Job):
        super().__init__(job)
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []  # those that have begun
        self._message: dict[str, Any] | None = None  # the message item among them
        self._open: dict[str, Any] | None = None  # the item of a thought or a call that has begun and not ended
        self._written = ""  # its text or its arguments
        self._held: list[TokenInfo] = []  # tokens of white space, which alone makes no message beside a call

    def start(self) -> Iterator[Message]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress", []))

    def part(self, part: Part) -> Iterator[Message]:
        if part.thought:
            if not self._thinks:
                yield from self._end_open()
                self._open = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
                yield from self._begin(self._open, _thought(""))
            yield self._in_item(self._open, "reasoning_text.delta", delta=part.thought, content_index=0)
            self._written += part.thought
        if self._thinks and (part.text.strip() or part.calls):
            yield from self._end_open()
        if self._message is None:
            self._held += part.tokens
            if self.answer.text.strip():
                yield from self._begin_message()
        elif part.text or part.tokens:
            yield self._delta(part.text, part.tokens)
        for _, call in part.calls:
            if call.name:
                yield from self._end_open()
                namespace, name = self.ask.namespaces.get(call.name, ("", call.name))
                self._open = {"type": "function_call", "id": new_id("fc_"), "call_id": call.id, "name": name}
                self._open |= {"arguments": "", "status": "completed"} | ({"namespace": namespace} if namespace else {})
                yield from self._begin(self._open)
            else:
                yield self._in_item(self._open, "function_call_arguments.delta", delta=call.arguments)
            self._written += call.arguments

    def end(self) -> Iterator[Message]:
        yield from self._end_open()
        if not self.answer.calls and self._message is None:
            yield from self._begin_message()
        if self._message is not None:
            yield from self._end_text(self._message, self._text_part(self.answer.text))
        response = self._response("incomplete" if self.answer.finish == "length" else "completed", self._items)
        yield self._event(response["status"], response=response)

    def whole(self) -> dict[str, Any]:
        text, thought, calls = self.answer.text, self.answer.thought, list(enumerate(self.answer.calls))
        everything = Part(0, text, thought, calls, self.answer.tokens, self.answer.finish, {})
        *_, last = *self.part(everything), *self.end()
        return last.data["response"]

    def _event(self, kind: str, /, **data: Any) -> Message:
        self._number += 1
        kind = f"response.{kind}"
        return Message({"type": kind, "sequence_number": self._number - 1} | data, kind)

    def _in_item(self, item: dict[str, Any], kind: str, /, **data: Any) -> Message:
        return self._event(kind, item_id=item["id"], output_index=self._items.index(item), **data)

    def _begin(self, item: dict[str, Any], part: dict[str, Any] | None = None) -> Iterator[Message]:
        """Begin an item. part: its content, which is empty so far, if it has any."""
        self._items.append(item)
        begun = item | {"status": "in_progress"}
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=begun)
        if part is not None:
            yield self._in_item(item, "content_part.added", part=part, content_index=0)

    def _begin_message(self) -> Iterator[Message]:
        """Begin the message item with all text so far."""
        self._message = {"type": "message", "id": new_id("msg_"), "status": "completed"}
        self._message |= {"role": "assistant", "content": []}
        yield from self._begin(self._message, self._text_part(""))
        if self.answer.text or self._held:
            yield self._delta(self.answer.text, self._held)

    def _delta(self, text: str, tokens: Sequence[TokenInfo]) -> Message:
        told = {"delta": text, "logprobs": self.logprobs(tokens)}
        return self._in_item(self._message, "output_text.delta", **told, content_index=0)

    @property
    def _thinks(self) -> bool:
        return self._open is not None and self._open["type"] == "reasoning"

    def _end_open(self) -> Iterator[Message]:
        """End the item of a thought or a call, if there is one."""
        if self._thinks:
            yield from self._end_text(self._open, _thought(self._written))
        elif self._open is not None:
            self._open["arguments"] = self._written
            done = {"name": self._open["name"], "arguments": self._written}
            yield self._in_item(self._open, "function_call_arguments.done", **done)
            yield self._in_item(self._open, "output_item.done", item=self._open)
        self._open, self._written = None, ""

    def _end_text(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[Message]:
        """End an item whose content is this text."""
        item["content"] = [part]
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._in_item(item, f"{part['type']}.done", content_index=0, **told)
        yield self._in_item(item, "content_part.done", part=part, content_index=0)
        yield self._in_item(item, "output_item.done", item=item)

    def _text_part(self, text: str) -> dict[str, Any]:
        logprobs = self.logprobs(self.answer.tokens) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The response object. It has no usage before its end."""
        ended = status != "in_progress"
        params, raw = self.job.params, self.ask.raw
        response = {
            "id": self.id,
            "created_at": self.created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.job.model,
            "output": list(items),
            "max_output_tokens": raw.get("max_output_tokens"),
            "parallel_tool_calls": not self.ask.one_call,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tool_choice": raw.get("tool_choice") or "auto",
            "truncation": "auto" if self.ask.drop_oldest else "disabled",
            "usage": self._usage() if ended else None,
        }
        repeated = {name: raw.get(name) for name in REPEATED}
        repeated["tools"] = repeated["tools"] or []
        return response | FIXED | repeated | ({"timings": self.timings()} if ended else {})

    def _usage(self) -> dict[str, Any]:
        prompt, cached, new = self.usage()
        counts = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}}
        counts |= {"output_tokens": new, "output_tokens_details": {"reasoning_tokens": self.thought_tokens()}}
        return counts | {"total_tokens": prompt + new}


def _thought(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}
