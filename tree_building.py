"""Growing draft trees on the device: fixed shapes, no value is read back to the host.

A dynamic tree (EAGLE-2) collects candidates in a pool. `first_level` starts the pool, `expand` adds the candidates of
one more draft forward, and `select` keeps the best of them as the tree. These functions stand apart from tree.py because
a compiled step traces them, and TorchDynamo never traces a file called tree.py (it takes it for the dm-tree package).

Shape letters: B batch, N nodes, D depth, K candidates per row, R draft rows so far, P size of the pool. Ids are int64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import kernels

LARGEST_POOL = 8192  # candidates that one program of the kernel can hold


def ancestors_from_parents(parent: Tensor, D: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Who sees whom in trees given by parent [B, N], none of them deeper than D.

    Returns ancestors [B, N, N] bool (every node sees itself) and depth [B, N]. Nodes that are not valid [B, N] get depth
    0 and see only themselves, because a softmax needs one key. Pointer doubling takes ceil(log2(D + 1)) rounds.
    """
    B, N = parent.shape
    itself = torch.eye(N, dtype=torch.bool, device=parent.device)
    seen = itself.expand(B, N, N)
    for _ in range(D.bit_length()):  # after round k, `seen` holds the nearest 2^k ancestors
        seen = seen | seen.gather(1, parent[..., None].expand(B, N, N))
        parent = parent.gather(1, parent)
    if valid is not None:
        seen = (seen & valid[..., None]) | itself
    return seen, seen.sum(-1) - 1


class Pool(NamedTuple):
    """The candidates of a dynamic tree so far, parents first, and the frontier that is drafted from next.

    A candidate's flat id is its place in the pool.
    """

    tokens: Tensor  # [B, P]
    scores: Tensor  # [B, P] cumulative, fp32 or wider
    parent: Tensor  # [B, P] flat id, -1 for the root
    frontier: Tensor  # [B, K] flat ids
    frontier_tokens: Tensor  # [B, K]
    source: Tensor  # [B, K] the row of the previous forward that drafted it, whose feature it takes
    visible: Tensor  # [B, K, R] bool over the rows of all expansion forwards, the next one included


class DraftTree(NamedTuple):
    """A dynamic tree. Nodes with valid False are padding: parent 0, depth 0, and they see only themselves."""

    tokens: Tensor  # [B, N]
    parent: Tensor  # [B, N]
    depth: Tensor  # [B, N]
    ancestors: Tensor  # [B, N, N] bool
    valid: Tensor  # [B, N] bool
    scores: Tensor  # [B, N] cumulative draft score, root 0


def _usable(scores: Tensor) -> Tensor:
    """Scores in fp32 or wider, because in half precision confident children tie with their parents. NaN is the worst."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.where(~scores.isnan(), -torch.inf)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest scores. Ties go to the lower index, which torch.topk does not promise."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def first_level(tokens: Tensor, scores: Tensor, ids: Tensor | None = None) -> Pool:
    """The pool after the root's prediction: tokens and scores [B, K] of the root's candidates, all of them frontier.

    ids [Vd]: the target's ids of the tokens, None if these are the target's already.
    """
    if kernels.skip_operator(tokens, None):
        return _first_level(tokens, scores, ids)
    return Pool(*torch.ops.eaglet.expand([], tokens, scores, ids))


def _first_level(tokens: Tensor, scores: Tensor, ids: Tensor | None = None) -> Pool:
    tokens = tokens if ids is None else ids[tokens]
    B, K = tokens.shape
    ids = torch.arange(K, device=tokens.device).expand(B, K)
    visible = torch.eye(K, dtype=torch.bool, device=tokens.device).expand(B, K, K)
    root = torch.zeros_like(ids)
    return Pool(tokens, _usable(scores), root - 1, ids, tokens, root, visible)


def expand(pool: Pool, tokens: Tensor, scores: Tensor, ids: Tensor | None = None) -> Pool:
    """The pool after one expansion. The next frontier is the best K of the new K * K candidates by cumulative score.

    tokens and scores [B, K, K] are the K candidates of each frontier row and their log-probabilities. The caller chooses
    the candidates, because with shared noise they are selected by other keys than they are scored by. ids as in
    `first_level`.
    """
    if kernels.skip_operator(tokens, None):
        return _expand(pool, tokens, scores, ids)
    before = pool.tokens, pool.scores, pool.parent, pool.frontier, pool.visible
    return Pool(*torch.ops.eaglet.expand(before, tokens, scores, ids))


def _expand(pool: Pool, tokens: Tensor, scores: Tensor, ids: Tensor | None = None) -> Pool:
    tokens = tokens if ids is None else ids[tokens]
    B, K = pool.frontier.shape
    base = pool.scores.gather(1, pool.frontier)[..., None]
    # A child scores no higher than its parent and has a higher flat id, so `select` never keeps it without its parent.
    total = torch.minimum(_usable(_usable(scores) + base), base).flatten(1)
    best = _best(total, K)
    flat = tokens.flatten(1)
    inherited = pool.visible.gather(1, (best // K)[..., None].expand(-1, -1, pool.visible.shape[2]))
    own = torch.eye(K, dtype=torch.bool, device=tokens.device).expand(B, K, K)
    return Pool(
        tokens=torch.cat([pool.tokens, flat], 1),
        scores=torch.cat([pool.scores, total], 1),
        parent=torch.cat([pool.parent, pool.frontier.repeat_interleave(K, 1)], 1),
        frontier=pool.tokens.shape[1] + best,
        frontier_tokens=flat.gather(1, best),
        source=best // K,
        visible=torch.cat([inherited, own], 2),
    )


@torch.library.custom_op("eaglet::expand", mutates_args=())
def _expand_operator(
    before: list[Tensor], tokens: Tensor, scores: Tensor, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`expand` of the tokens, scores, parents, frontier and visible rows of a pool, or `first_level` of none."""
    if kernels.use_triton("draft_tree", scores):
        return kernels.draft.expand(before, tokens, scores, ids)
    if not before:
        pool = _first_level(tokens, scores, ids)
    else:
        *fields, frontier, visible = before
        pool = Pool(*fields, frontier, frontier_tokens=frontier, source=frontier, visible=visible)
        pool = _expand(pool, tokens, scores, ids)
    return tuple(field.clone() for field in pool)  # An operator may not return views.


@_expand_operator.register_fake
def _(before, tokens, scores, ids):
    wide = scores.new_empty(scores.shape, dtype=torch.promote_types(scores.dtype, torch.float32))
    P, R = (before[0].shape[1], before[-1].shape[2]) if before else (0, 0)
    return kernels.draft.expand_shapes(tokens, wide, P, R)


def select(
    pool: Pool, root: Tensor, N: int, D: int, live: Tensor | None = None, ids: Tensor | None = None
) -> DraftTree:
    """EAGLE-2's re-ranking: the tree of the root and the best N - 1 candidates, parents first.

    root [B] is the root's token, D is one more than the number of expansions. live [B] int64 keeps only that many nodes
    (root included) and pads up to N, so that a smaller tree fits a larger captured size. ids [Vd] are the target's ids of
    the pool's tokens, None if these are the target's already. Raises ValueError if the pool is smaller than N - 1.
    """
    P = pool.tokens.shape[1]
    if not 1 <= N <= P + 1:
        raise ValueError(f"dynamic tree: N is {N}, allowed 1 to {P + 1} for a pool of {P} candidates")
    if live is not None or N == 1 or kernels.skip_operator(root, None):
        return _select(pool, root, ids, N, D, live)
    return DraftTree(*torch.ops.eaglet.select(pool.tokens, pool.scores, pool.parent, root, ids, N, D))


def _select(pool: Pool, root: Tensor, ids: Tensor | None, N: int, D: int, live: Tensor | None) -> DraftTree:
    P = pool.tokens.shape[1]
    flat = _best(pool.scores, N - 1)
    if live is not None:
        flat = flat.where(torch.arange(1, N, device=root.device) < live[:, None], P)
    flat = flat.sort(dim=-1).values
    valid = pad(flat < P, (1, 0), value=True)
    flat = flat.clamp(max=P - 1)
    above = pool.parent.gather(1, flat)
    parent = pad(torch.where((above < 0) | ~valid[:, 1:], 0, torch.searchsorted(flat, above) + 1), (1, 0))
    ancestors, depth = ancestors_from_parents(parent, D, valid)
    tokens = pool.tokens.gather(1, flat)
    tokens = torch.cat([root[:, None], tokens if ids is None else ids[tokens]], 1)
    return DraftTree(tokens, parent, depth, ancestors, valid, pad(pool.scores.gather(1, flat), (1, 0)))


@torch.library.custom_op("eaglet::select", mutates_args=())
def _select_operator(
    tokens: Tensor, scores: Tensor, parent: Tensor, root: Tensor, ids: Tensor | None, N: int, D: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = f"the pool has more than {LARGEST_POOL} candidates" if tokens.shape[1] > LARGEST_POOL else ""
    if kernels.use_triton("draft_tree", scores, problem):
        return kernels.draft.select(tokens, scores, parent, root, ids, N, D)
    pool = Pool(tokens, scores, parent, parent, parent, parent, parent)
    return tuple(field.clone() for field in _select(pool, root, ids, N, D, None))


@_select_operator.register_fake
def _(tokens, scores, parent, root, ids, N, D):
    return kernels.draft.select_shapes(tokens, scores, N)
