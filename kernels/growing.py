"""Growing draft trees on the device: fixed shapes, no value is read back to the host.

A dynamic tree (EAGLE-2) collects candidates in a pool. `first_level` starts the pool, `expand` adds the candidates of
one more draft forward, and `select` keeps the best of them as the tree. These functions stand apart from tree.py because
a compiled step traces them, and TorchDynamo never traces a file called tree.py (it takes it for the dm-tree package).

Shape letters: B batch, N nodes, D depth, K candidates per row, R draft rows so far, P size of the pool. Ids are int64.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import block_draft, draft
from kernels.backend import operation

LARGEST_POOL = 8192  # candidates that one program of the kernel can hold


def ancestors_from_parents(parent: Tensor, D: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ancestor masks and depths of the trees given by parent [B, N], of depth at most D.

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


class Draft(NamedTuple):
    """A proposed tree, and for multi-round verification the draft's probabilities.

    Nodes with valid False are padding: parent 0, depth 0, and they see only themselves.
    """

    tokens: Tensor  # [B, N]
    parent: Tensor  # [B, N]
    depth: Tensor  # [B, N]
    ancestors: Tensor  # [B, N, N] bool
    valid: Tensor  # [B, N] bool
    scores: Tensor  # [B, N] cumulative draft score, root 0; `Drafter.scoring` says what it means
    q: Tensor | None = None  # [B, run_rows, V]


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
    return _grow([], tokens, scores, ids)


def expand(pool: Pool, tokens: Tensor, scores: Tensor, ids: Tensor | None = None) -> Pool:
    """The pool after one expansion. The next frontier is the best K of the new K * K candidates by cumulative score.

    tokens and scores [B, K, K] are the K candidates of each frontier row and their log-probabilities. The caller chooses
    the candidates, because with shared noise they are selected by other keys than they are scored by. ids as in
    `first_level`.
    """
    return _grow([pool.tokens, pool.scores, pool.parent, pool.frontier, pool.visible], tokens, scores, ids)


@operation("expand", "draft_tree", draft.expand, draft.expand_shapes, at=(2,), copies=True)
def _grow(before: list[Tensor], tokens: Tensor, scores: Tensor, ids: Tensor | None) -> Pool:
    """`expand` of the tokens, scores, parents, frontier and visible rows of a pool, or `first_level` of none."""
    tokens = tokens if ids is None else ids[tokens]
    B, K = tokens.shape[0], tokens.shape[-1]
    own = torch.eye(K, dtype=torch.bool, device=tokens.device).expand(B, K, K)
    if not before:
        places = torch.arange(K, device=tokens.device).expand(B, K)
        root = torch.zeros_like(places)
        return Pool(tokens, _usable(scores), root - 1, places, tokens, root, own)
    pool_tokens, pool_scores, parent, frontier, visible = before
    base = pool_scores.gather(1, frontier)[..., None]
    # A child scores no higher than its parent and has a higher flat id, so `select` never keeps it without its parent.
    total = torch.minimum(_usable(_usable(scores) + base), base).flatten(1)
    best = _best(total, K)
    flat = tokens.flatten(1)
    inherited = visible.gather(1, (best // K)[..., None].expand(-1, -1, visible.shape[2]))
    return Pool(
        tokens=torch.cat([pool_tokens, flat], 1),
        scores=torch.cat([pool_scores, total], 1),
        parent=torch.cat([parent, frontier.repeat_interleave(K, 1)], 1),
        frontier=pool_tokens.shape[1] + best,
        frontier_tokens=flat.gather(1, best),
        source=best // K,
        visible=torch.cat([inherited, own], 2),
    )


def select(pool: Pool, root: Tensor, N: int, D: int, live: Tensor | None = None, ids: Tensor | None = None) -> Draft:
    """EAGLE-2's re-ranking: the tree of the root and the best N - 1 candidates, parents first.

    root [B] is the root's token, D is one more than the number of expansions. live [B] int64 keeps only that many nodes
    (root included) and pads up to N, so that a smaller tree fits a larger captured size. ids [Vd] are the target's ids of
    the pool's tokens, None if these are the target's already. Raises ValueError if the pool is smaller than N - 1.
    """
    P = pool.tokens.shape[1]
    if not 1 <= N <= P + 1:
        raise ValueError(f"dynamic tree: N is {N}, allowed 1 to {P + 1} for a pool of {P} candidates")
    grow = _select.reference if live is not None or N == 1 else _select
    return grow(pool.tokens, pool.scores, pool.parent, root, ids, N, D, live)


def _pool_problem(tokens: Tensor, *_rest) -> str:
    return f"the pool has more than {LARGEST_POOL} candidates" if tokens.shape[1] > LARGEST_POOL else ""


@operation(
    "select", "draft_tree", draft.select,
    lambda tokens, scores, parent, root, ids, N, *rest: draft.tree_shapes(tokens, scores, root, N),
    problem=_pool_problem, at=(1,), copies=True,
)  # fmt: skip
def _select(
    tokens: Tensor, scores: Tensor, parent: Tensor, root: Tensor, ids: Tensor | None, N: int, D: int,
    live: Tensor | None,
) -> Draft:  # fmt: skip
    P = tokens.shape[1]
    flat = _best(scores, N - 1)
    if live is not None:
        flat = flat.where(torch.arange(1, N, device=root.device) < live[:, None], P)
    flat = flat.sort(dim=-1).values
    valid = pad(flat < P, (1, 0), value=True)
    flat = flat.clamp(max=P - 1)
    above = parent.gather(1, flat)
    parent = pad(torch.where((above < 0) | ~valid[:, 1:], 0, torch.searchsorted(flat, above) + 1), (1, 0))
    ancestors, depth = ancestors_from_parents(parent, D, valid)
    tokens = tokens.gather(1, flat)
    tokens = torch.cat([root[:, None], tokens if ids is None else ids[tokens]], 1)
    return Draft(tokens, parent, depth, ancestors, valid, pad(scores.gather(1, flat), (1, 0)))


@operation("best_prefixes", "draft_tree", block_draft.best_prefixes, draft.tree_shapes, at=(1,), copies=True)
def best_prefixes(tokens: Tensor, scores: Tensor, root: Tensor, N: int) -> Draft:
    """The tree of the root and the N - 1 likeliest prefixes, where every depth has candidates of its own, which do not
    depend on the parent (DDTree).

    tokens, scores [B, D, K]: the candidates at each depth and their log-probabilities, descending; root [B]. The sums are
    in float64. Where there are fewer prefixes that are possible at all, nodes at the end are padding.
    """
    D, K = tokens.shape[1:]
    gains = _usable(scores).double()
    above, place, size = gains.new_zeros(root.shape[0], 1), root[:, None] * 0 - 1, 0
    levels = []
    for depth in range(D):  # of each depth, the best N - 1 are enough
        total = (above[:, :, None] + gains[:, depth, None]).flatten(1)
        best = _best(total, N - 1)
        above = total.gather(1, best)
        levels.append((tokens[:, depth].gather(1, best % K), above, place.gather(1, best // K)))
        place = torch.arange(size, size + best.shape[1], device=root.device).expand_as(best)
        size += best.shape[1]
    pool, totals, parent = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    live = 1 + (totals > -torch.inf).sum(1)
    tree = Draft(*_select.reference(pool, totals, parent, root, None, N, D, live))
    shown = torch.where(tree.valid, tree.scores, -torch.inf).to(torch.promote_types(scores.dtype, torch.float32))
    return tree._replace(scores=shown, tokens=tree.tokens.where(tree.valid, 0))
