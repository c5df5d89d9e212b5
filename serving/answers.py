"""What the choices of a request give: text, tool calls and log-probabilities as they come, and figures at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.results import Chunk, GenerationResult, TokenLogprob, acceptance
from serving.tools import FORCED, ToolCall, ToolCallParser, tool_format
from tokenizer import Tokenizer


@dataclass
class Event:
    """What the engine says of one choice: steps, and the result when it has ended."""

    index: int
    chunks: list[Chunk]
    result: GenerationResult | None = None
    seen: dict[str, Any] = field(default_factory=dict)  # of the steps, where the request asks for it

    def add(self, later: Event) -> None:
        """Add what came later of the same choice."""
        self.chunks += later.chunks
        self.result = later.result
        if later.seen:
            steps = self.seen.get("steps", [])
            steps += later.seen["steps"]
            self.seen |= later.seen | {"steps": steps}


TokenInfo = tuple[int, TokenLogprob]  # a token of the answer, and how likely it and others were


class Part(NamedTuple):
    """What an event made certain of a choice."""

    index: int
    text: str
    calls: Sequence[ToolCall]
    tokens: Sequence[TokenInfo]
    finish: str  # "stop", "length" or "tool_calls" in the last part, else ""
    seen: Mapping[str, Any]


class Answer:
    """One choice while it is decoded, and afterwards."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        stop_ids: Sequence[int],
        tools: set[str],
        one_call: bool = False,
        logprobs: bool = False,
        forced: bool = False,
    ):
        """
        Args:
            tools: names of the tools that the model may call.
            forced: the answer is one call and nothing else.
            one_call: later calls of the answer are left out.
            logprobs: whether the tokens are kept with their log-probabilities.
        """
        self.index = index
        self.text = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[TokenInfo] = []
        self.finish = ""
        self.result: GenerationResult | None = None
        self._stop_ids = frozenset(stop_ids)
        self._one_call = one_call
        self._logprobs = logprobs
        self._parser = None
        if tools and tokenizer:
            self._parser = ToolCallParser(FORCED if forced else tool_format(tokenizer), tools, tokenizer)

    def take(self, event: Event) -> Part:
        """Add what the engine said of this choice."""
        text, calls = "", list[ToolCall]()
        tokens: list[TokenInfo] = []
        for chunk in event.chunks:
            more, complete = self._parser.read(chunk) if self._parser else (chunk.text, [])
            text += more
            calls += complete
            if self._logprobs:
                pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
                tokens += [(token, chances) for token, chances in pairs if token not in self._stop_ids]
        if event.result is not None and self._parser:
            more, complete = self._parser.finish()
            text += more
            calls += complete
        if self._one_call:
            calls = calls[: 1 - len(self.calls)]
        self.text += text
        self.calls += calls
        self.tokens += tokens
        if event.result is not None:
            self.result = event.result
            cut = event.result.stop_reason in ("length", "interrupted")
            self.finish = "tool_calls" if self.calls else "length" if cut else "stop"
        return Part(self.index, text, calls, tokens, self.finish, event.seen)


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
