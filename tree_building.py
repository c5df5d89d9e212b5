"""TODO."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


def ancestors_from_parents(parent: Tensor, D: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ancestors [B, N, N] bool (each node sees itself) and depth [B, N] of trees given by parent [B, N], none
    deeper than D. Pointer doubling in ceil(log2(D+1)) steps. Nodes that are not valid [B, N] (optional) get
    depth 0 and see themselves alone (a softmax needs one key)."""
    B, N = parent.shape
    itself = torch.eye(N, dtype=torch.bool, device=parent.device)
    seen = itself.expand(B, N, N)
    for _ in range(D.bit_length()):  # step k: seen holds the nearest 2^k ancestors, parent is the 2^k-th
        seen = seen | seen.gather(1, parent[..., None].expand(B, N, N))
        parent = parent.gather(1, parent)
    if valid is not None:
        seen = (seen & valid[..., None]) | itself
    return seen, seen.sum(-1) - 1


class Pool(NamedTuple):
    """A dynamic tree's candidates so far (flat ids, parents first) and the frontier that is drafted from next."""

    tokens: Tensor  # [B, P]
    scores: Tensor  # [B, P] cumulative, fp32 or wider
    parent: Tensor  # [B, P] flat id, -1 = the root
    frontier: Tensor  # [B, K] flat ids
    frontier_tokens: Tensor  # [B, K]
    source: Tensor  # [B, K] which row of the forward before drafted each: whose feature it takes
    visible: Tensor  # [B, K, R] bool over the rows of all expansion forwards, the next one included


class DraftTree(NamedTuple):
    """A dynamic tree. Nodes with valid False are padding: parent 0, depth 0, they see only themselves."""

    tokens: Tensor  # [B, N]
    parent: Tensor  # [B, N]
    depth: Tensor  # [B, N]
    ancestors: Tensor  # [B, N, N] bool
    valid: Tensor  # [B, N] bool
    scores: Tensor  # [B, N] cumulative draft score, root 0


def _usable(scores: Tensor) -> Tensor:
    # At least fp32: in half precision confident children tie with their parents. NaN is the worst score.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.where(~scores.isnan(), -torch.inf)


def _best(scores: Tensor, count: int) -> Tensor:
    # Ties go to the lower id; torch.topk promises no order among them.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def first_level(tokens: Tensor, scores: Tensor) -> Pool:
    """The pool after the root's prediction. tokens, scores [B, K]: the root's candidates and their
    log-probabilities, chosen by the caller; all of them are the first frontier."""
    B, K = tokens.shape
    ids = torch.arange(K, device=tokens.device).expand(B, K)
    visible = torch.eye(K, dtype=torch.bool, device=tokens.device).expand(B, K, K)
    root = torch.zeros_like(ids)
    return Pool(tokens, _usable(scores), root - 1, ids, tokens, root, visible)


def expand(pool: Pool, tokens: Tensor, scores: Tensor) -> Pool:
    """The pool after one expansion. tokens, scores [B, K, K]: the K candidates of each frontier row and their
    log-probabilities, chosen by the caller (shared noise selects by other keys than it scores by). The next
    frontier is the best K of these K*K by cumulative score (EAGLE-2, expansion phase)."""
    B, K = pool.frontier.shape
    base = pool.scores.gather(1, pool.frontier)[..., None]
    # A child scores no higher than its parent and has a higher flat id, so it never outlives it in `select`.
    total = torch.minimum(_usable(_usable(scores) + base), base).flatten(1)
    best, flat = _best(total, K), tokens.flatten(1)
    inherited = pool.visible.gather(1, (best // K)[..., None].expand(-1, -1, pool.visible.shape[2]))
    own = torch.eye(K, dtype=torch.bool, device=tokens.device).expand(B, K, K)
    parent = torch.cat([pool.parent, pool.frontier.repeat_interleave(K, 1)], 1)
    scores, visible = torch.cat([pool.scores, total], 1), torch.cat([inherited, own], 2)
    pool_tokens, frontier = torch.cat([pool.tokens, flat], 1), pool.tokens.shape[1] + best
    return Pool(pool_tokens, scores, parent, frontier, flat.gather(1, best), best // K, visible)


def select(pool: Pool, root: Tensor, N: int, D: int, live: Tensor | None = None) -> DraftTree:
    """EAGLE-2's re-ranking: keep the best N-1 of the pool, numbered in flat order, parents first. root [B]: the root's
    token. D: one more than the expansions. live [B] int64: keep only that many nodes, root included, and pad up to N
    (a smaller tree in a larger captured size). ValueError if the pool is smaller than N-1."""
    P = pool.tokens.shape[1]
    if not 1 <= N <= P + 1:
        raise ValueError(f"dynamic tree: N is {N}, allowed 1 to {P + 1} for a pool of {P} candidates")
    flat = _best(pool.scores, N - 1)
    if live is not None:
        flat = flat.where(torch.arange(1, N, device=root.device) < live[:, None], P)
    flat = flat.sort(dim=-1).values
    valid, flat = pad(flat < P, (1, 0), value=True), flat.clamp(max=P - 1)
    above = pool.parent.gather(1, flat)
    parent = pad(torch.where((above < 0) | ~valid[:, 1:], 0, torch.searchsorted(flat, above) + 1), (1, 0))
    ancestors, depth = ancestors_from_parents(parent, D, valid)
    tokens = torch.cat([root[:, None], pool.tokens.gather(1, flat)], 1)
    return DraftTree(tokens, parent, depth, ancestors, valid, pad(pool.scores.gather(1, flat), (1, 0)))
