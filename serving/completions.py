"""Answers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serving.answers import Part, TokenInfo
from serving.tool_calls import ToolCall
from serving.writers import Message, Writer, finite

DONE = Message("[DONE]")


class ChunkWriter(Writer):
    """What both endpoints share: chunks with choices, then the usage if it is asked for, then [DONE]."""

    whole_object = chunk_object = ""

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> Message:
        no_usage = {"usage": None} if self.ask.include_usage else {}
        return Message(self.head(self.chunk_object) | {"choices": choices} | no_usage | more)

    def last(self, index: int) -> dict[str, Any]:
        """The timings, for the last chunk of the last choice."""
        if index + 1 < len(self.prepared.answers):
            return {}
        return {"timings": self.timings()}

    def end(self) -> Iterator[Message]:
        if self.ask.include_usage:
            yield self.chunk([], usage=self.usage(), timings=self.timings())
        yield DONE

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(answer.index) for answer in self.prepared.answers]
        end = {"choices": choices, "usage": self.usage(), "timings": self.timings()}
        return self.head(self.whole_object) | end

    def choice(self, index: int) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError


class ChatWriter(ChunkWriter):
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, *made_of: Any):
        super().__init__(*made_of)
        self._calls = [0] * len(self.prepared.answers)  # how many each choice has had

    def start(self) -> Iterator[Message]:
        for answer in self.prepared.answers:
            yield self.chunk([self._delta(answer.index, {"role": "assistant", "content": ""})])

    def part(self, part: Part) -> Iterator[Message]:
        if part.text or part.tokens or part.seen:
            chosen = self._delta(part.index, {"content": part.text})
            yield self.chunk([chosen | self._logprobs(part.tokens)], **part.seen)
        for call in part.calls:
            number = self._calls[part.index]
            self._calls[part.index] += 1
            yield self.chunk([self._delta(part.index, {"tool_calls": [{"index": number} | _call(call)]})])
        if part.finish:
            yield self.chunk([self._delta(part.index, {}, part.finish)], **self.last(part.index))

    def choice(self, index: int) -> dict[str, Any]:
        answer = self.prepared.answers[index]
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message["content"] = answer.text.strip() or None
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            **self._logprobs(answer.tokens),
            "finish_reason": answer.finish,
        }

    def _delta(self, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        if self.ask.logprobs is None:
            return {}
        return {"logprobs": {"content": self.logprobs(tokens), "refusal": None}}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionWriter(ChunkWriter):
    """/v1/completions."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, *made_of: Any):
        super().__init__(*made_of)
        self._offsets = [0] * len(self.prepared.answers)  # where the next token's text begins

    def part(self, part: Part) -> Iterator[Message]:
        if part.text or part.tokens or part.seen:
            yield self.chunk([self._choice(part.index, part.text, part.tokens)], **part.seen)
        if part.finish:
            yield self.chunk([self._choice(part.index, "", [], part.finish)], **self.last(part.index))

    def choice(self, index: int) -> dict[str, Any]:
        answer = self.prepared.answers[index]
        return self._choice(index, answer.text, answer.tokens, answer.finish)

    def _choice(self, index: int, text: str, tokens: Sequence[TokenInfo], finish: str | None = None) -> dict[str, Any]:
        logprobs = None if self.ask.logprobs is None else self._columns(index, tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _columns(self, index: int, tokens: Sequence[TokenInfo]) -> dict[str, list]:
        """Log-probabilities as this endpoint writes them: one list for each kind of figure."""
        columns: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for info in tokens:
            text = self.piece(info.token)[0]
            columns["tokens"].append(text)
            columns["token_logprobs"].append(finite(info.logprob))
            columns["top_logprobs"].append({self.piece(t)[0]: finite(p) for t, p in info.top})
            columns["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
        return columns
