"""TODO."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import sampling
from model import Transformer


def root_draft(root: Tensor) -> Draft:
    """The tree of one node per sequence: root [B]."""
    zero = torch.zeros_like(root)[:, None]
    return Draft(root[:, None], zero, zero, (zero == 0)[..., None], zero == 0, zero.float())


class CachelessDrafter:
    """What drafters without a cache of the text share. This one drafts nothing: n-grams alone are grafted onto it."""

    N, D, taps, multi_round = 1, 0, (), ""

    def __init__(self, model: Transformer):
        self.feature_size = model.config.hidden_size

    def bytes_per_step(self, model: Transformer) -> float:
        """Weight bytes one draft reads."""
        return 0.0

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        pass

    def draft(self, request: DraftInput) -> Draft:
        return root_draft(request.root)


class Draft(NamedTuple):
    """A proposed tree (see tree.py for shapes) and, for multi-round verification, the draft's probabilities."""

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    ancestors: Tensor
    valid: Tensor
    scores: Tensor  # [B, N] cumulative draft score (`sampling.draft_keys`; at T > 0 with the shared noise), root 0
    q: Tensor | None = None  # [B, run_rows, V]


class DraftInput(NamedTuple):
    """What a drafter may look at in one step: static buffers of the engine, and the step's noise."""

    tokens: Tensor  # [B, S] committed ids; tokens[n] is the root
    n: Tensor  # [B] cached target tokens = the root's position
    root: Tensor  # [B]
    features: Tensor  # [B, D + 1, F] of positions n - count .. n - 1
    count: Tensor  # [B] valid rows of features
    noise: Tensor | None  # [B, D + 1, V] shared noise, or None
    state: sampling.SamplingState
    mode: sampling.SamplingMode
    seen: Tensor  # [B, V] bool, prompt and output
    counts: Tensor  # [B, V] generated so far, root included


class Drafter(Protocol):
    """What the step needs of a drafter. All of it is of fixed shape and never waits for the host."""

    N: int  # nodes, root included
    D: int  # greatest depth below the root
    taps: tuple[int, ...]  # layers of the target whose input it wants; () = the post-norm hidden state
    feature_size: int

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        """One sequence's known tokens [1, T + 1] from position start [1]; features [1, T, F] of all but the last."""

    def draft(self, request: DraftInput) -> Draft: ...

    # Optional: def observe(self, choice: Tensor) -> None, told the target's token after every row [B, N] of the step,
    # invalid rows included. For drafters that guess with such rows (lookahead).
    # Optional: always_on: str, why plain steps may not replace it for a while ('' = they may: prefill catches up).


class PlainDrafter:
    """Drafts nothing: the root alone, padded to `width` rows that never match (--prove keeps the forward's width)."""

    D, taps, multi_round = 0, (), ""

    def __init__(self, model: Transformer, batch_size: int, width: int = 1):
        self.N, self.feature_size = width, model.config.hidden_size
        zeros = torch.zeros(batch_size, width, dtype=torch.int64, device=model.device)
        self.zeros, self.scores, self.valid = zeros, zeros.float(), (zeros == 1)
        self.valid[:, 0] = True
        self.ancestors = torch.eye(width, dtype=torch.bool, device=model.device).expand(batch_size, -1, -1)

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        pass

    def draft(self, request: DraftInput) -> Draft:
        tokens = request.root[:, None].expand(-1, self.N)
        return Draft(tokens, self.zeros, self.zeros, self.ancestors, self.valid, self.scores)
