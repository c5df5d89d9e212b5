"""What a request gives: tokens and text with the stop rules applied, times and acceptance. All of it is on the host."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from decoding.sampling import Logprobs


class TokenLogprob(NamedTuple):
    """How likely a token was for the model itself, before all settings. Natural logarithms."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities, as many as the request asked for


class Chunk(NamedTuple):
    """What a step added to one sequence, after truncation by stop rules."""

    row: int
    token_ids: list[int]
    text: str  # never half a character and never part of a stop string; "" without a tokenizer
    logprobs: Sequence[TokenLogprob] = ()  # one per token, if the request asked for them


def acceptance(emitted: Sequence[int]) -> tuple[float, list[float]]:
    """tau, and for d = 1, 2, ... the share of steps that emitted more than d tokens, from the lengths of the steps.

    tau is 1 + the sum of the shares. Without steps it is 0.
    """
    steps = max(1, len(emitted))
    return sum(emitted) / steps, [sum(e > d for e in emitted) / steps for d in range(1, max(emitted, default=0))]


def n_alpha(emitted: Sequence[int], depth: int = 5) -> list[float]:
    """k-alpha for k < depth, from the lengths of whole steps that drafted a chain (EAGLE paper, section 4.1).

    k-alpha is the share of the steps with k accepted drafts that accepted one more. The list ends where no step accepted
    so many.
    """
    deeper = [sum(e > d for e in emitted) for d in range(depth + 1)]
    return [b / a for a, b in zip(deeper, deeper[1:], strict=False) if a]


@dataclass
class GenerationResult:
    """The outcome of one sequence.

    tokens_per_step lists the ids that every step emitted. The first token comes from the prompt's forward, so new_tokens
    is 1 + the sum of their lengths. tau is the mean length of the steps that checked a draft, the target's own token
    included.
    """

    prompt_tokens: int
    temperature: float
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = "unfinished"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_step: list[list[int]] = field(default_factory=list)
    plain_steps: list[int] = field(default_factory=list)  # steps without a draft, because drafting did not pay
    nodes_per_step: list[int] = field(default_factory=list)  # drafted by the other steps
    chain: int = 0  # depth of the chain that was drafted, 0 for another tree or none
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)  # None for the first token, if asked for

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def steps(self) -> int:
        return len(self.tokens_per_step)

    @property
    def plain_tokens(self) -> int:
        """Tokens that plain steps emitted."""
        return sum(len(self.tokens_per_step[i]) for i in self.plain_steps)

    @property
    def drafted(self) -> list[int]:
        """Lengths of the steps that tau is about: those with a draft, or all steps where there is no drafter."""
        plain = set(self.plain_steps)
        return [len(t) for i, t in enumerate(self.tokens_per_step) if i not in plain]

    @property
    def tau(self) -> float:
        """Tokens per target forward that checked a draft, the target's own token included. 0 without such a forward."""
        return acceptance(self.drafted)[0]

    @property
    def drafted_nodes(self) -> float:
        """The mean number of nodes that those steps drafted, of all sequences in one step the largest number."""
        return sum(self.nodes_per_step) / max(1, len(self.nodes_per_step))

    @property
    def accepted_by_depth(self) -> list[float]:
        """The share of those steps that emitted more than d tokens, for d = 1, 2, ... tau is 1 + their sum."""
        return acceptance(self.drafted)[1]

    @property
    def n_alpha(self) -> list[float]:
        """k-alpha of a chain for k = 0 to 4, [] for other trees. The last step may be cut short and does not count."""
        whole = self.drafted if self.steps - 1 in self.plain_steps else self.drafted[:-1]
        return n_alpha(whole, min(self.chain, 5))

    @property
    def tokens_per_second(self) -> float:
        """Ids after the first one, divided by the decode time."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        names = "new_tokens steps tau drafted_nodes accepted_by_depth n_alpha plain_tokens tokens_per_second".split()
        values = asdict(self) | {name: getattr(self, name) for name in names}
        told = {name: getattr(self, name) for name in ("logprobs", "prompt_logprobs")}
        return values | {name: [entry and entry._asdict() for entry in entries] for name, entries in told.items()}


def on_host(logprobs: Logprobs | None, tokens: int | None, likeliest: int | None) -> list[TokenLogprob]:
    """The first entries of Logprobs [P], or all, with as many of the likeliest tokens as the request asked for."""
    if logprobs is None or likeliest is None:
        return []
    rows = zip(*(column[:tokens].tolist() for column in logprobs), strict=True)
    return [TokenLogprob(chosen, list(zip(ids, top, strict=True))[:likeliest]) for chosen, top, ids in rows]
