"""What the choices of a request give: text, tool calls and log-probabilities as they come, and figures at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from runtime.results import Chunk, GenerationResult, acceptance
from serving.tool_calls import ToolCall, ToolCallParser, tool_format
from tokenizer import Tokenizer


class TokenInfo(NamedTuple):
    """A token of the answer with its log-probability, and the most likely tokens in its place."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


class Part(NamedTuple):
    """What became certain of one choice."""

    index: int
    text: str = ""
    calls: Sequence[ToolCall] = ()
    tokens: Sequence[TokenInfo] = ()
    finish: str | None = None  # "stop", "length" or "tool_calls" in the last part
    seen: Mapping[str, Any] = MappingProxyType({})  # of the steps, where the request asks for it


class Answer:
    """One choice while it is decoded, and afterwards."""

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, stop_ids: Sequence[int], tools: set[str], one_call: bool = False
    ):
        """tools: names of the tools that the model may call. one_call: later calls of the answer are left out."""
        self.index = index
        self.text = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[TokenInfo] = []
        self.finish = ""
        self.result: GenerationResult | None = None
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._one_call = one_call
        self._parser = ToolCallParser(tool_format(tokenizer), tools) if tools and tokenizer else None
        self._mark = self._special_mark()

    def take(self, chunks: Sequence[Chunk], logprobs: bool = False) -> Part:
        """Add what some steps emitted."""
        tokens: list[TokenInfo] = []
        text, calls = "", []
        for chunk in chunks:
            if logprobs:
                known = zip(chunk.token_ids, chunk.logprobs, strict=True)
                tokens += [TokenInfo(t, p.logprob, p.top) for t, p in known if t not in self._stop_ids]
            if self._parser is None:
                text += chunk.text
            else:
                more, found = self._parser.push(self._with_mark(chunk))
                text += more
                calls += found
        return self._add(text, calls, tokens)

    def end(self, result: GenerationResult) -> Part:
        """Complete the answer with the engine's result."""
        self.result = result
        part = self._add(*self._parser.finish(), []) if self._parser else Part(self.index)
        self.finish = "length" if result.stop_reason in ("length", "interrupted") else "stop"
        self.finish = "tool_calls" if self.calls else self.finish
        return part._replace(finish=self.finish)

    def _add(self, text: str, calls: list[ToolCall], tokens: list[TokenInfo]) -> Part:
        if self._one_call:
            calls = calls[: 1 - len(self.calls)]
        self.text += text
        self.calls += calls
        self.tokens += tokens
        return Part(self.index, text, calls, tokens)

    def _special_mark(self) -> int | None:
        """The id of the mark that begins a call, if it is a special token. The engine's text leaves these out."""
        if self._parser is None or self._tokenizer is None:
            return None
        mark = self._parser.form.begin.encode()
        return next((i for i in self._tokenizer.special_ids if self._tokenizer.pieces.get(i) == mark), None)

    def _with_mark(self, chunk: Chunk) -> str:
        """A chunk's text with the mark where its token stands."""
        if self._mark is None or self._mark not in chunk.token_ids or self._parser is None or self._tokenizer is None:
            return chunk.text
        after = chunk.token_ids[chunk.token_ids.index(self._mark) + 1 :]
        at = max(0, len(chunk.text) - len(self._tokenizer.decode(after, continuation=True)))
        return chunk.text[:at] + self._parser.form.begin + chunk.text[at:]


def usage_counts(results: Sequence[GenerationResult], choices: int = 1) -> tuple[int, int, int]:
    """(prompt tokens, those of them that were cached, new tokens). A prompt counts once for all of its choices."""
    prompts = results[::choices]
    cached = sum(result.cached_tokens for result in prompts)
    return sum(r.prompt_tokens for r in prompts), cached, sum(r.new_tokens for r in results)


def timings(results: Sequence[GenerationResult], queue_seconds: float) -> dict[str, Any]:
    """The figures of a request, with the names of llama.cpp's server where it has the same ones."""
    prompt_seconds = sum(r.prefill_seconds for r in results)
    seconds = sum(r.decode_seconds for r in results)
    cached = sum(r.cached_tokens for r in results)
    run = sum(r.prompt_tokens for r in results) - cached
    new = sum(r.new_tokens for r in results)
    decoded = new - len(results)  # the first token comes from the prompt's forward
    return {
        "queue_ms": round(1000 * queue_seconds, 3),
        "cache_n": cached,
        "prompt_n": run,
        "prompt_ms": round(1000 * prompt_seconds, 3),
        "prompt_per_second": round(run / prompt_seconds, 3) if prompt_seconds else 0.0,
        "predicted_n": new,
        "predicted_ms": round(1000 * seconds, 3),
        "predicted_per_second": round(decoded / seconds, 3) if seconds else 0.0,
        "steps": sum(r.steps for r in results),
        "tau": round(acceptance([count for r in results for count in r.drafted])[0], 4),
        "seed": results[0].seed if results else 0,
    }
