"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from sampling import SamplingParams


class Chunk(NamedTuple):
    """What a step added to one sequence, after truncation by stop rules."""

    row: int
    token_ids: list[int]
    text: str  # '' without a tokenizer; never half a character, never part of a stop string


def n_alpha(emitted: Sequence[int], depth: int = 5) -> list[float]:
    """k-alpha, k < depth, from the lengths of whole steps: of those that accepted k drafts of a chain, the share that
    accepted one more (eagle.md 6.2). Ends where none accepted so many."""
    deeper = [sum(e > d for e in emitted) for d in range(depth + 1)]
    return [b / a for a, b in zip(deeper, deeper[1:], strict=False) if a]


@dataclass
class GenerationResult:
    """One sequence's outcome. tokens_per_step lists the ids of every step; token 1 comes from the prompt's forward, so
    new_tokens = 1 + sum of their lengths. tau is the mean of those that checked a draft (the target's own included)."""

    prompt_tokens: int
    temperature: float
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = "unfinished"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_step: list[list[int]] = field(default_factory=list)
    plain_steps: list[int] = field(default_factory=list)  # those without drafting, because it did not pay
    chain: int = 0  # depth of the chain that was drafted; 0: another tree, or none
    cached_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def steps(self) -> int:
        return len(self.tokens_per_step)

    @property
    def plain_tokens(self) -> int:
        """Tokens of the plain steps."""
        return sum(len(self.tokens_per_step[i]) for i in self.plain_steps)

    @property
    def drafted(self) -> list[int]:
        """Lengths of the steps that had a draft (all steps, where there is no drafter): what tau is about."""
        plain = set(self.plain_steps)
        return [len(t) for i, t in enumerate(self.tokens_per_step) if i not in plain]

    @property
    def tau(self) -> float:
        """Tokens per target forward that checked a draft, the target's own included; 0 when there was none."""
        return sum(self.drafted) / len(self.drafted) if self.drafted else 0.0

    @property
    def accepted_by_depth(self) -> list[float]:
        """Share of those steps that emitted more than d tokens, d = 1, 2, ...; tau = 1 + their sum."""
        emitted = self.drafted
        return [sum(e > d for e in emitted) / len(emitted) for d in range(1, max(emitted, default=0))]

    @property
    def n_alpha(self) -> list[float]:
        """On a chain: k-alpha, k = 0..4, the share of drafts at depth k + 1 accepted once all shallower ones were; []
        for other trees. Without the last step, which a stop may have cut short."""
        whole = self.drafted if self.steps - 1 in self.plain_steps else self.drafted[:-1]
        return n_alpha(whole, min(self.chain, 5))

    @property
    def tokens_per_second(self) -> float:
        """Ids after the first over decode time."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        names = (
            "new_tokens",
            "steps",
            "tau",
            "accepted_by_depth",
            "n_alpha",
            "plain_tokens",
            "tokens_per_second",
        )
        return asdict(self) | {name: getattr(self, name) for name in names}


class SequenceOutput:
    """Host side of one sequence: truncates at stop ids, stop strings and the length limit; decodes text."""

    def __init__(self, result: GenerationResult, params: SamplingParams, stop_ids: set[int], tokenizer):
        self.result, self.params, self.stop_ids = result, params, stop_ids
        self.decoder = tokenizer.stream(continuation=True) if tokenizer is not None else None
        self.text, self.shown, self.finished = "", 0, False

    def push(self, ids: Sequence[int], step: bool = True) -> Chunk:
        """Take a step's ids; returns what of them counts."""
        kept: list[int] = []
        for token in ids:
            if self.finished:
                break
            kept.append(token)
            self._take(token, self.result.new_tokens + len(kept))
        self.result.token_ids += kept
        if step and kept:
            self.result.tokens_per_step.append(kept)
        if self.finished and self.decoder is not None and self.result.stop_reason != "stop":
            self.text += self.decoder.flush()
            self._cut_at_stop_string()
        return Chunk(0, kept, self._show())

    def _take(self, token: int, produced: int) -> None:
        if token in self.stop_ids:
            self.finish("eos")
            return
        if self.decoder is not None:
            self.text += self.decoder.push([token])
            if self._cut_at_stop_string():
                return
        if produced >= self.params.max_new_tokens:
            self.finish("length")

    def _cut_at_stop_string(self) -> bool:
        found = [at for at in (self.text.find(s, max(0, self.shown)) for s in self.params.stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish("stop")
        return bool(found)

    def finish(self, reason: str) -> None:
        self.finished, self.result.stop_reason = True, reason

    def _show(self) -> str:
        """New text, without a tail that could still become a stop string."""
        hold = 0
        if not self.finished:
            for stop in self.params.stop:
                for size in range(min(len(stop) - 1, len(self.text)), hold, -1):
                    if self.text.endswith(stop[:size]):
                        hold = size
                        break
        end = max(self.shown, len(self.text) - hold)
        new, self.shown, self.result.text = self.text[self.shown : end], end, self.text
        return new
