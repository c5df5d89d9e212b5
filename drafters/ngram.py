"""TODO."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import CachelessDrafter, Draft, DraftInput
from model import Transformer
from tree import MAX_DEPTH, MAX_NODES
from tree_building import ancestors_from_parents

CANDIDATES, LONGEST = 32, 3  # earlier matches looked at, and tokens of the longest suffix that is looked for


def graft(base: Draft, paths: Tensor, valid: Tensor, K: int, D: int) -> Draft:
    """`base` and K more nodes that spell the paths [B, C, L] (valid [B, C]; the first come first), common beginnings
    merged among the paths and with the base; what is not needed becomes invalid padding. No tree deeper than D;
    K <= C L. Fixed shapes, no host sync. The new nodes' score is 0: lookup has no probabilities."""
    (B, C, L), N = paths.shape, base.tokens.shape[1]
    level, path = torch.arange(L, device=paths.device), torch.arange(C, device=paths.device)
    # route[b, i]: the tokens from below the root to node i of the base
    there = base.ancestors[:, :, None] & (base.depth[:, None, None] == level[:, None] + 1)
    route = (there * base.tokens[:, None, None]).sum(-1)
    held = (paths[:, :, None] == route[:, None]).int().cumprod(-1) > 0
    held &= (base.valid[..., None] & (base.depth[..., None] == level + 1))[:, None]
    in_base, base_node = held.any(2), held.int().argmax(2)
    # first[b, c, l]: the lowest path that begins with the same l + 1 tokens; that one gets the node
    alike = ((paths[:, :, None] == paths[:, None]).int().cumprod(-1) > 0) & valid[:, None, :, None]
    first = alike.int().argmax(2)
    fresh = (valid[..., None] & ~in_base & (first == path[:, None])).flatten(1)
    chosen = (
        (~fresh).int().sort(dim=1, stable=True).indices[:, :K]
    )  # along each path: parents before children
    kept = fresh.gather(1, chosen)
    own = (N - 1 + fresh.int().cumsum(1)).gather(1, (first * L + level).flatten(1)).view(B, C, L)
    node = torch.where(in_base, base_node, own)
    above = F.pad(node[..., :-1], (1, 0)).flatten(1).gather(1, chosen)
    tokens = torch.where(kept, paths.flatten(1).gather(1, chosen), base.tokens[:, :1])
    parent, live = torch.cat((base.parent, above * kept), 1), torch.cat((base.valid, kept), 1)
    ancestors, depth = ancestors_from_parents(parent, D, live)
    return Draft(
        torch.cat((base.tokens, tokens), 1), parent, depth, ancestors, live, F.pad(base.scores, (0, K))
    )


def lookup(tokens: Tensor, n: Tensor, D: int, count: int, longest: int = LONGEST) -> tuple[Tensor, Tensor]:
    """Continuations [B, count, D] of earlier matches of the text's last tokens, and which of them exist [B, count].

    tokens [B, S], of which [0, n] are known (n [B]: the root). A match of the last 3 tokens comes before one of 2,
    before one of 1 (`longest`); of equals the most recent. A continuation that reaches the end of the text goes on
    periodically, as if the text repeated itself from the match on. Source: prompt lookup (eagle.md 10.4), LLMA."""
    end = torch.arange(tokens.shape[1], device=tokens.device)
    same, length = end < n[:, None], torch.zeros_like(tokens)
    for back in range(longest):
        wanted = tokens.gather(1, (n[:, None] - back).clamp(min=0))
        same = same & (tokens.roll(back, 1) == wanted) & (end >= back)
        length = length + same
    rank, at = torch.where(length > 0, length * tokens.shape[1] + end, -1).topk(count)
    period = (n[:, None] - at).clamp(min=1)[..., None]
    ahead = (at[..., None] + 1 + torch.arange(D, device=n.device) % period).clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, ahead.flatten(1)).view(*at.shape, D), rank >= 0


class WithNGrams:
    """Another drafter's tree with up to K n-gram nodes grafted on (`--ngram-nodes K`)."""

    multi_round = ""

    def __init__(self, drafter, K: int):
        if drafter.multi_round:
            raise ValueError(
                "--ngram-nodes needs --verify match: n-grams are not drawn from the draft's distribution."
            )
        if not 1 <= K <= MAX_NODES - drafter.N:
            raise ValueError(f"--ngram-nodes is {K}; allowed: 1 to {MAX_NODES - drafter.N} here.")
        self.drafter, self.K = drafter, K
        self.taps, self.feature_size = drafter.taps, drafter.feature_size
        self.always_on = getattr(drafter, "always_on", "")
        self.N, self.D = self.shape(drafter.N, drafter.D, K)

    @staticmethod
    def shape(N: int, D: int, K: int) -> tuple[int, int]:
        """N and D of a tree of N and D with K n-gram nodes: one run of K tokens must fit."""
        return N + K, max(D, min(K, MAX_DEPTH))

    def bytes_per_step(self, model: Transformer) -> float:
        return self.drafter.bytes_per_step(model)

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        self.drafter.prefill(row, tokens, features, start)

    def draft(self, request: DraftInput) -> Draft:
        count = min(max(CANDIDATES, -(-self.K // self.D)), request.tokens.shape[1])
        found = lookup(request.tokens, request.n, self.D, count)
        return graft(self.drafter.draft(request), *found, self.K, self.D)

    def observe(self, choice: Tensor) -> None:
        if hasattr(self.drafter, "observe"):
            self.drafter.observe(choice[:, : self.drafter.N])


class NGramDrafter(WithNGrams):
    """Prompt lookup / LLMA: the text's own repetitions as a tree of N nodes, root included, and depth D. No model."""

    def __init__(self, model: Transformer, N: int, D: int):
        if not (2 <= N <= MAX_NODES and 1 <= D <= MAX_DEPTH):
            raise ValueError(
                f"n-gram tree: N is {N} and D is {D}; allowed: 2 to {MAX_NODES}, 1 to {MAX_DEPTH}."
            )
        super().__init__(CachelessDrafter(model), N - 1)
        self.D = D
