"""What the answers of every endpoint have in common: a writer turns parts of answers into the objects of one API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from runtime.results import GenerationResult
from serving.answers import Part, TokenInfo, timings, usage_counts
from serving.preparing import Prepared
from tokenizer import Tokenizer


class Message(NamedTuple):
    """One event of a stream: its data, and the name that only some APIs give to events."""

    data: dict[str, Any] | str
    name: str = ""

    def encode(self) -> bytes:
        """The event as it goes over the line (SSE)."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        named = f"event: {self.name}\n" if self.name else ""
        return f"{named}data: {text}\n\n".encode("utf-8", "replace")


class Writer:
    """Writes one request's answers. A subclass knows one API."""

    prefix = ""  # of the answer's id

    def __init__(self, prepared: Prepared, model: str, tokenizer: Tokenizer | None):
        self.prepared = prepared
        self.ask = prepared.ask
        self.model = model
        self.tokenizer = tokenizer
        self.id = new_id(self.prefix)
        self.created = int(time.time())
        self.queue_seconds = 0.0  # how long the request waited, set when it has ended

    def start(self) -> Iterator[Message]:
        """What a stream begins with."""
        yield from ()

    def part(self, part: Part) -> Iterator[Message]:
        """What a stream says when something became certain."""
        raise NotImplementedError

    def end(self) -> Iterator[Message]:
        """What a stream ends with."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        raise NotImplementedError

    @property
    def results(self) -> list[GenerationResult]:
        """The results of the choices that have ended."""
        return [answer.result for answer in self.prepared.answers if answer.result is not None]

    def timings(self) -> dict[str, Any]:
        return timings(self.results, self.queue_seconds)

    def usage(self) -> dict[str, Any]:
        """Token counts as /v1/chat/completions and /v1/completions name them."""
        prompt, cached, new = usage_counts(self.results, self.ask.n)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    def token(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its log-probability, as /v1/chat/completions and /v1/responses write it."""
        text, data = self.piece(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    def piece(self, token: int) -> tuple[str, bytes]:
        """The text and the bytes of a token. Half a character has a text of U+FFFD."""
        if self.tokenizer is None:
            return str(token), str(token).encode()
        data = self.tokenizer.pieces.get(token, b"")
        return data.decode("utf-8", "replace"), data

    def logprobs(self, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
        """Tokens with their alternatives."""
        return [
            self.token(info.token, info.logprob) | {"top_logprobs": [self.token(t, p) for t, p in info.top]}
            for info in tokens
        ]


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: that of an impossible token is minus infinity."""
    return max(logprob, -9999.0)
