"""N-gram lookup: the text's own repetitions as drafts, alone or grafted onto another drafter's tree.

Source: prompt lookup decoding and LLMA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import Draft, Drafter, DraftInput, PlainDrafter
from kernels.growing import ancestors_from_parents
from model import Transformer
from tree import MAX_DEPTH, MAX_NODES

CANDIDATES = 32  # earlier matches that are looked at
LONGEST = 3  # tokens of the longest suffix that is looked for


def graft(base: Draft, paths: Tensor, valid: Tensor, K: int, D: int) -> Draft:
    """`base` with K more nodes that spell the paths. Fixed shapes, no host sync.

    paths [B, C, L] are token ids below the root, of which those with valid [B, C] count and the first come first. Paths
    share the nodes of common beginnings with each other and with the base. Nodes that are not needed become invalid
    padding. No tree may be deeper than D, and K <= C * L. The score of a new node is 0, because lookup has no
    probabilities.
    """
    B, C, L = paths.shape
    N = base.tokens.shape[1]
    level = torch.arange(L, device=paths.device)
    path = torch.arange(C, device=paths.device)
    # route[b, l, i]: token l on the way from below the root to node i of the base
    there = base.ancestors[:, :, None] & (base.depth[:, None, None] == level[:, None] + 1)
    route = (there * base.tokens[:, None, None]).sum(-1)
    held = (paths[:, :, None] == route[:, None]).int().cumprod(-1) > 0
    held &= (base.valid[..., None] & (base.depth[..., None] == level + 1))[:, None]
    in_base = held.any(2)
    base_node = held.int().argmax(2)
    # first[b, c, l]: the lowest path that begins with the same l + 1 tokens; the new node belongs to that path
    alike = ((paths[:, :, None] == paths[:, None]).int().cumprod(-1) > 0) & valid[:, None, :, None]
    first = alike.int().argmax(2)
    fresh = (valid[..., None] & ~in_base & (first == path[:, None])).flatten(1)
    # a stable sort goes along each path, so parents come before their children
    chosen = (~fresh).int().sort(dim=1, stable=True).indices[:, :K]
    added = fresh.gather(1, chosen)
    own = (N - 1 + fresh.int().cumsum(1)).gather(1, (first * L + level).flatten(1)).view(B, C, L)
    node = torch.where(in_base, base_node, own)
    above = F.pad(node[..., :-1], (1, 0)).flatten(1).gather(1, chosen)
    tokens = torch.where(added, paths.flatten(1).gather(1, chosen), base.tokens[:, :1])
    parent = torch.cat((base.parent, above * added), 1)
    live = torch.cat((base.valid, added), 1)
    ancestors, depth = ancestors_from_parents(parent, D, live)
    tokens = torch.cat((base.tokens, tokens), 1)
    return Draft(tokens, parent, depth, ancestors, live, F.pad(base.scores, (0, K)))


def lookup(tokens: Tensor, n: Tensor, D: int, count: int) -> tuple[Tensor, Tensor]:
    """Continuations [B, count, D] of earlier matches of the text's last tokens, and which of them exist [B, count].

    tokens [B, S] are known up to and including position n [B], the root. A match of the last three tokens (LONGEST)
    comes before one of two, and that before one of one. Among equals the most recent comes first. A continuation that
    reaches the end of the text goes on as if the text repeated itself from the match on.
    """
    end = torch.arange(tokens.shape[1], device=tokens.device)
    same = end < n[:, None]
    length = torch.zeros_like(tokens)
    for back in range(LONGEST):
        wanted = tokens.gather(1, (n[:, None] - back).clamp(min=0))
        same = same & (tokens.roll(back, 1) == wanted) & (end >= back)
        length = length + same
    rank, at = torch.where(length > 0, length * tokens.shape[1] + end, -1).topk(count)
    period = (n[:, None] - at).clamp(min=1)[..., None]
    ahead = (at[..., None] + 1 + torch.arange(D, device=n.device) % period).clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, ahead.flatten(1)).view(*at.shape, D), rank >= 0


class WithNGrams(Drafter):
    """Another drafter's tree with up to K n-gram nodes grafted on (`--ngram-nodes K`)."""

    def __init__(self, drafter: Drafter, K: int):
        if drafter.multi_round:
            raise ValueError("--ngram-nodes needs --verify match: n-grams are not drawn from the draft's distribution.")
        if not 1 <= K <= MAX_NODES - drafter.N:
            raise ValueError(f"--ngram-nodes is {K}; allowed: 1 to {MAX_NODES - drafter.N} here.")
        super().__init__(*self.shape(drafter.N, drafter.D, K), drafter.feature_size, drafter.taps)
        self.drafter = drafter
        self.K = K
        self.caches = drafter.caches
        self.cached_models = drafter.cached_models
        self.scoring = drafter.scoring
        self.grafted = True
        self.ring, self.kept = drafter.ring, drafter.kept

    @staticmethod
    def shape(N: int, D: int, K: int) -> tuple[int, int]:
        """N and D of a tree of N and D with K n-gram nodes. The depth has room for one run of K tokens."""
        return N + K, max(D, min(K, MAX_DEPTH))

    def first(self, rows: int) -> WithNGrams:
        view = super().first(rows)
        view.drafter = self.drafter.first(rows)
        return view

    def bytes_per_step(self) -> float:
        return self.drafter.bytes_per_step()

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor, keep: Tensor) -> None:
        self.drafter.prefill(row, tokens, features, start, keep)

    def resume(self, length: int, drafted: int, start: int) -> int:
        return self.drafter.resume(length, drafted, start)

    def draft(self, inputs: DraftInput) -> Draft:
        count = min(max(CANDIDATES, -(-self.K // self.D)), inputs.tokens.shape[1])
        paths, valid = lookup(inputs.tokens, inputs.n, self.D, count)
        return graft(self.drafter.draft(inputs), paths, valid, self.K, self.D)


class NGramDrafter(WithNGrams):
    """Prompt lookup: a tree of N nodes (root included) and depth D from the text alone, without a model."""

    def __init__(self, model: Transformer, N: int, D: int):
        if not (2 <= N <= MAX_NODES and 1 <= D <= MAX_DEPTH):
            raise ValueError(f"n-gram tree: N is {N} and D is {D}; allowed: 2 to {MAX_NODES}, 1 to {MAX_DEPTH}.")
        super().__init__(PlainDrafter(model), N - 1)
        self.D = D
