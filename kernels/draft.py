"""The small work of a draft in one launch each: where rows go, what a head reads, growing a dynamic tree.

The kernels compute what `model.Transformer.nodes` and `growing` say in plain PyTorch, bit for bit. One program owns one
sequence, or one row of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import jit, operation, tl, triton
from kernels.choice import NOTHING, largest, rank_of
from kernels.records import Rotary


@jit
def place_kernel(
    n, count, depth, tokens, cos_table, sin_table, segments, positions, slots, cos, sin, fed, R, FED, S, LAST_SLOT,
    LENGTH, LEAD, DEPTH_STRIDE, HALF: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """`place_rows` of one row. Grid (B R,)."""
    pid = tl.program_id(0)
    b = pid // R
    r = pid % R
    base = tl.load(n + b) + LEAD
    place = r - FED
    if r < FED:
        base -= tl.load(count + b)
        place = r
        tl.store(fed + b * FED + r, tl.load(tokens + b * S + tl.minimum(base - LEAD + 1 + r, S - 1)))
        position = base + r
    else:
        position = base + tl.load(depth + b * DEPTH_STRIDE + place)
    tl.store(positions + pid, position)
    if POOLED:
        tl.store(slots + pid, tl.load(segments + 2 * b) + tl.minimum(base + place, tl.load(segments + 2 * b + 1)))
    elif RING:
        tl.store(slots + pid, (base + place) % LAST_SLOT)
    else:
        tl.store(slots + pid, tl.minimum(base + place, LAST_SLOT))
    d = tl.arange(0, BLOCK)
    at = tl.minimum(position, LENGTH - 1) * HALF + d
    tl.store(cos + pid * HALF + d, tl.load(cos_table + at, mask=d < HALF), mask=d < HALF)
    tl.store(sin + pid * HALF + d, tl.load(sin_table + at, mask=d < HALF), mask=d < HALF)


def _place_shapes(n, depth, rotary, _slots, fed, *_rest) -> tuple[Tensor, ...]:
    B, R, half = n.shape[0], fed + depth.shape[1], rotary.cos.shape[1]
    cos, sin = rotary.cos.new_empty(B, R, half), rotary.cos.new_empty(B, R, half)
    return n.new_empty(B, R), n.new_empty(B, R), cos, sin, n.new_empty(B, fed)


def _place_triton(out, n, depth, rotary, slots, fed, count, tokens, lead, segments, ring=False) -> None:
    (B, R), T, (length, half) = out[0].shape, depth.shape[1], rotary.cos.shape
    known = n if tokens is None else tokens
    place_kernel[B * R,](
        n, n if count is None else count, depth.contiguous(), known, *rotary, n if segments is None else segments, *out,
        R, fed, known.shape[-1], slots - 1, length, lead, T * (depth.shape[0] > 1), HALF=half,
        BLOCK=triton.next_power_of_2(half), POOLED=segments is not None, RING=ring, num_warps=1,
    )  # fmt: skip


@operation(
    "place_rows", "draft_tree", _place_triton, _place_shapes,
    cpu=lambda n, depth, *rest: torch.ops.eaglet_cpu.place_rows.default(n, depth.contiguous(), *rest),
    cpu_problem=lambda n, depth, rotary, *rest: "" if rotary.cos.dtype == torch.float32 else "the dtype is not float32",
    problem=lambda n, depth, rotary, *rest: "the dtype is float64" if rotary.cos.dtype == torch.float64 else "",
)  # fmt: skip
def place_rows(
    n: Tensor, depth: Tensor, rotary: Rotary, slots: int, fed: int = 0, count: Tensor | None = None,
    tokens: Tensor | None = None, lead: int = 0, segments: Tensor | None = None, ring: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(positions, slots, cos, sin, tokens) of `fed` rows that are fed again, and then of T others. No host sync.

    Of the others, row t stands at position n + lead + depth[b, t], and in slot n + lead + t. Fed row r stands at position
    and slot n + lead - count + r, and its token is the one at n - count + 1 + r.

    n, count int64 [B]; depth int64 [B or 1,T]; tokens int64 [B,S]; slots: of the cache, whose last one takes all
    rows past the end. segments: as of `Nodes`, where sequences share a cache. Slots are then places of that cache.
    ring: as of `Nodes`. Slot s then stands for s mod (slots - 1).
    Returns int64 [B,fed+T], int64 [B,fed+T], [B,fed+T,hd/2] twice, and int64 [B,fed].
    """
    T = depth.shape[1]
    start = n[:, None] + lead
    place = start + torch.arange(T, device=n.device)
    positions = start + depth
    again = n.new_empty(n.shape[0], 0)
    if fed:
        first = n[:, None] - count[:, None] + torch.arange(fed, device=n.device)
        again = tokens.gather(1, (first + 1).clamp(max=tokens.shape[1] - 1))
        place, positions = (torch.cat((first + lead, rest), 1) if T else first + lead for rest in (place, positions))
    flat = positions.clamp(max=rotary.cos.shape[0] - 1)
    if ring:
        place = place % (slots - 1)
    else:
        place = place.clamp(max=slots - 1) if segments is None else segments[:, :1] + place.minimum(segments[:, 1:])
    return positions, place, rotary.cos[flat], rotary.sin[flat], again


@jit
def rms(x, weight, d, SIZE, eps, DT: tl.constexpr):
    """`rms_norm` of a row x in fp32 whose columns past SIZE are 0."""
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(DT).to(tl.float32)
    return x * tl.load(weight + d, mask=d < SIZE, other=0).to(tl.float32)


@jit
def join_kernel(
    table, tokens, features, source, table_norm, feature_norm, residual, joined, W, ROWS, SIZE, eps,
    BLOCK: tl.constexpr, PICK: tl.constexpr, NORM: tl.constexpr, KEEP_NORMED: tl.constexpr,
):  # fmt: skip
    """`join_rows` of one row. Grid (B W,)."""
    pid = tl.program_id(0)
    row = tl.load(source + pid) if PICK else pid % W
    d = tl.arange(0, BLOCK)
    mask = d < SIZE
    e = tl.load(table + tl.load(tokens + pid) * SIZE + d, mask=mask, other=0)
    f = tl.load(features + (pid // W * ROWS + row) * SIZE + d, mask=mask, other=0)
    DT: tl.constexpr = joined.dtype.element_ty
    if NORM:
        e = rms(e.to(tl.float32), table_norm, d, SIZE, eps, DT).to(DT)
        normed = rms(f.to(tl.float32), feature_norm, d, SIZE, eps, DT).to(DT)
        tl.store(residual + pid * SIZE + d, normed if KEEP_NORMED else f, mask=mask)
        f = normed
    tl.store(joined + pid * 2 * SIZE + d, e, mask=mask)
    tl.store(joined + pid * 2 * SIZE + SIZE + d, f, mask=mask)


def join_rows(out, table, tokens, features, source, table_norm, feature_norm, eps, keep_normed) -> None:
    """(residual [B,W,H], joined [B,W,2H]): the embeddings of tokens [B,W] from table [V,H] beside rows of features
    [B,R,H], those with the numbers source [B,W] if given. In one launch.

    table_norm, feature_norm: weights [H] of RMS norms of embeddings and features. The residual is the feature, if
    keep_normed after its norm. Without norms nobody reads the residual, which is then empty.
    """
    B, W = tokens.shape
    H = table.shape[1]
    features = features.contiguous()
    norm = table_norm is not None
    block = triton.next_power_of_2(H)
    join_kernel[B * W,](
        table, tokens.contiguous(), features, tokens if source is None else source.contiguous(),
        table_norm if norm else table, feature_norm if norm else table, *out, W, features.shape[1], H, eps, BLOCK=block,
        PICK=source is not None, NORM=norm, KEEP_NORMED=keep_normed, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


def join_shapes(_table, tokens, features, _source, table_norm, *_rest) -> tuple[Tensor, Tensor]:
    """Empty outputs of `join_rows`."""
    (B, W), H = tokens.shape, features.shape[2]
    return features.new_empty(B, 0 if table_norm is None else W, H), features.new_empty(B, W, 2 * H)


# ---- growing a tree ----------------------------------------------------------------------------------------


@jit
def expand_kernel(
    pool_tokens, pool_scores, pool_parent, frontier, visible, tokens, scores, ids, out_tokens, out_scores, out_parent,
    out_frontier, out_frontier_tokens, out_source, out_visible, P, R, K, KP: tl.constexpr, CP: tl.constexpr,
    RP: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, TRIMMED: tl.constexpr,
):  # fmt: skip
    """`growing.expand` of one sequence, or `first_level` if FIRST. Grid (B,)."""
    b = tl.program_id(0)
    k = tl.arange(0, KP)
    c = tl.arange(0, CP)
    count = K if FIRST else K * K
    there = c < count
    total = tl.load(scores + b * count + c, mask=there, other=0)
    total = tl.where(total == total, total, float("-inf"))
    above = tl.full((CP,), -1, tl.int64)
    best = k
    if not FIRST:
        above = tl.load(frontier + b * K + c // K, mask=there, other=0)
        base = tl.load(pool_scores + b * P + above, mask=there, other=0)
        total += base
        total = tl.minimum(tl.where(total == total, total, float("-inf")), base)
        best = largest(tl.where(there, rank_of(total, c), NOTHING), K, KP)
    size = P + count
    token = tl.load(tokens + b * count + c, mask=there, other=0)
    next_token = tl.load(tokens + b * count + best, mask=k < K, other=0)
    if TRIMMED:
        token = tl.load(ids + token, mask=there, other=0)
        next_token = tl.load(ids + next_token, mask=k < K, other=0)
    tl.store(out_tokens + b * size + P + c, token, mask=there)
    tl.store(out_scores + b * size + P + c, total, mask=there)
    tl.store(out_parent + b * size + P + c, above, mask=there)
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out_tokens + b * size + i, tl.load(pool_tokens + b * P + i, mask=i < P), mask=i < P)
        tl.store(out_scores + b * size + i, tl.load(pool_scores + b * P + i, mask=i < P), mask=i < P)
        tl.store(out_parent + b * size + i, tl.load(pool_parent + b * P + i, mask=i < P), mask=i < P)
    tl.store(out_frontier + b * K + k, (P + best).to(tl.int64), mask=k < K)
    tl.store(out_frontier_tokens + b * K + k, next_token, mask=k < K)
    source = best * 0 if FIRST else best // K
    tl.store(out_source + b * K + k, source.to(tl.int64), mask=k < K)
    r = tl.arange(0, RP)[None, :]
    inside = (k < K)[:, None] & (r < R)
    inherited = tl.load(visible + (b * K + source[:, None]) * R + r, mask=inside, other=0) != 0
    own = r - R == k[:, None]
    at = (b * K + k[:, None]) * (R + K) + r
    tl.store(out_visible + at, tl.where(r < R, inherited, own), mask=(k < K)[:, None] & (r < R + K))


def expand(out: Sequence[Tensor], pool: Sequence[Tensor], tokens: Tensor, scores: Tensor, ids: Tensor | None) -> None:
    """The fields of the next `growing.Pool` from (tokens, scores, parent, frontier, visible) of the last one.

    tokens, scores [B,K,K], or of the first level [B,K] and an empty pool. The tokens are places in `ids` if given.
    """
    B, K = tokens.shape[0], tokens.shape[-1]
    first = not pool
    before = (tokens, scores, *[tokens] * 3) if first else pool
    P, R = (0, 0) if first else (pool[0].shape[1], pool[-1].shape[2])
    count = K if first else K * K
    expand_kernel[B,](
        *(t.contiguous() for t in (*before, tokens, scores)), tokens if ids is None else ids, *out, P, R, K,
        KP=triton.next_power_of_2(K), CP=triton.next_power_of_2(count), RP=triton.next_power_of_2(R + K), BLOCK=512,
        FIRST=first, TRIMMED=ids is not None,
    )  # fmt: skip


def expand_shapes(pool: Sequence[Tensor], tokens: Tensor, scores: Tensor, *_rest) -> tuple[Tensor, ...]:
    """Empty fields of a `growing.Pool` after `expand`."""
    P, R = (pool[0].shape[1], pool[-1].shape[2]) if pool else (0, 0)
    scores = scores.new_empty(0, dtype=torch.promote_types(scores.dtype, torch.float32))
    B, K = tokens.shape[0], tokens.shape[-1]
    size = P + tokens.shape[1:].numel()
    rows = [tokens.new_empty(B, K) for _ in range(3)]
    visible = tokens.new_empty(B, K, R + K, dtype=torch.bool)
    return tokens.new_empty(B, size), scores.new_empty(B, size), tokens.new_empty(B, size), *rows, visible


@jit
def store_root(b, root, tokens, parent, scores, ancestors, N, NP: tl.constexpr):
    """Store node 0 of a `growing.Draft`, and no ancestors yet."""
    tl.store(tokens + b * N, tl.load(root + b))
    tl.store(scores + b * N, 0.0)
    tl.store(parent + b * N, tl.full((), 0, tl.int64))
    j = tl.arange(0, NP)
    for row in range(N):
        tl.store(ancestors + (b * N + row) * N + j, j < 0, mask=j < N)


@jit
def store_paths(b, live, parent, out_depth, ancestors, N, D, NP: tl.constexpr):
    """Store the depths and ancestors of nodes. Those not `live` are padding. The program has stored their parents, and a
    barrier lies behind that."""
    j = tl.arange(0, NP)
    seen = ancestors + b * N * N
    way = j
    depth = tl.zeros((NP,), tl.int64)
    for _ in range(D + 1):
        tl.store(seen + j * N + way, j >= 0, mask=(j < N) & (live | (way == j)))
        depth += ((way > 0) & live).to(tl.int64)
        way = tl.load(parent + b * N + way, mask=j < N, other=0).to(tl.int32)
    tl.store(out_depth + b * N + j, depth, mask=j < N)


@jit
def select_kernel(
    tokens, scores, parent, root, ids, out_tokens, out_parent, out_depth, ancestors, valid, out_scores, node_of, P, N, D,
    PP: tl.constexpr, NP: tl.constexpr, TRIMMED: tl.constexpr,
):  # fmt: skip
    """`growing.select` of one sequence. Grid (B,). node_of [B,P] is scratch memory."""
    b = tl.program_id(0)
    c = tl.arange(0, PP)
    j = tl.arange(0, NP)
    there = c < P
    score = tl.load(scores + b * P + c, mask=there, other=0)
    rank = tl.where(there, rank_of(score, c), NOTHING)
    least = tl.max(rank, 0)
    for _ in range(N - 2):
        least = tl.max(tl.where(rank < least, rank, NOTHING), 0)
    kept = there & (rank >= least)
    node = tl.cumsum(kept.to(tl.int32), 0)  # the root is node 0
    at = b * N + node
    token = tl.load(tokens + b * P + c, mask=kept, other=0)
    if TRIMMED:
        token = tl.load(ids + token, mask=kept, other=0)
    tl.store(out_tokens + at, token, mask=kept)
    tl.store(out_scores + at, score, mask=kept)
    tl.store(node_of + b * P + c, node, mask=kept)
    store_root(b, root, out_tokens, out_parent, out_scores, ancestors, N, NP)
    tl.store(valid + b * N + j, j < N, mask=j < N)
    tl.debug_barrier()  # what other threads wrote is read from here on
    above = tl.load(parent + b * P + c, mask=kept, other=-1)
    up = tl.load(node_of + b * P + above, mask=kept & (above >= 0), other=0)
    tl.store(out_parent + at, up.to(tl.int64), mask=kept)
    tl.debug_barrier()
    store_paths(b, j < N, out_parent, out_depth, ancestors, N, D, NP)


def select(out, tokens, scores, parent, root, ids, N, D, _live) -> None:
    """The fields of a `growing.Draft` from those of a pool [B,P], whose tokens are places in `ids` if given."""
    B, P = tokens.shape
    scratch = tokens.new_empty(B, P, dtype=torch.int32)
    wide = triton.next_power_of_2(P)
    select_kernel[B,](
        tokens.contiguous(), scores.contiguous(), parent.contiguous(), root.contiguous(), root if ids is None else ids,
        *out, scratch, P, N, D, PP=wide, NP=triton.next_power_of_2(N), TRIMMED=ids is not None,
        num_warps=max(1, min(8, wide // 128)),
    )  # fmt: skip


def tree_shapes(tokens: Tensor, scores: Tensor, root: Tensor, N: int) -> tuple[Tensor, ...]:
    """Empty fields of a `growing.Draft` of N nodes, from tokens and scores of candidates and root [B]."""
    B = root.shape[0]
    rows = [tokens.new_empty(B, N) for _ in range(3)]
    seen, valid = (tokens.new_empty(shape, dtype=torch.bool) for shape in ((B, N, N), (B, N)))
    return *rows, seen, valid, scores.new_empty(B, N)
