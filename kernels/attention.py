"""Attention of the rows of a draft tree, a prompt chunk or one token over a static KV cache."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EXACT, dot, jit, native, operation, tl, triton
from kernels.kv import cache_problem, cpu_problem, dequantize_rows, load_rows, scales_of


def shaped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with what torch's own function lacks: q [B,Hq,T,hd], k and v [B,Hkv,R,hd] -> [B,Hq,T,hd].

    mask [T,R]: what is added to the scores. cap, sinks: as for `tree_attention`.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (grouped @ k[:, :, None].mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = (cap * torch.tanh(scores / cap) if cap else scores) + mask
    if sinks is not None:
        own = sinks.to(scores.dtype).view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, own), -1)
    weights = scores.softmax(-1).to(v.dtype)[..., : k.shape[2]]
    return (weights @ v[:, :, None]).flatten(1, 2)


def _attend_one(
    q: Tensor, kv: Tensor, visible: Tensor, positions: Tensor, start: int, window: int, scale: float, cap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """The reference for one sequence: q [1,Hq,T,hd], kv [2,1,Hkv,S,hd], visible [T,R], positions [T]."""
    _, query_heads, T, dim = q.shape
    kv_heads, S = kv.shape[2:4]
    R = visible.shape[1]
    low = max(0, min(start, int(positions.min()) - window + 1)) if window > 0 else 0
    if start + R <= S:
        kv = kv.narrow(3, low, start + R - low)
    else:  # The last rows of the region share the trash row.
        slots = torch.cat((torch.arange(low, start), torch.arange(start, start + R).clamp_(max=S - 1)))
        kv = kv[:, :, :, slots.to(kv.device)]
    if kv.dtype == torch.int8:
        kv = dequantize_rows(kv, q.dtype)
    k, v = kv.to(q.dtype).unbind(0)
    group = query_heads // kv_heads
    if T == 1 and window <= 0 and not cap and sinks is None and (R == 1 or bool(visible.all())):
        out = F.scaled_dot_product_attention(q.reshape(1, kv_heads, group, dim), k, v, scale=scale)
        return out.view(q.shape)
    # Queries that share a key head become the heads of one batch entry, so neither keys nor mask are copied.
    grouped = q.reshape(kv_heads, group, T, dim)
    mask = torch.zeros(T, start - low + R, dtype=q.dtype, device=q.device)
    if window > 0:
        outside = torch.arange(low, start, device=q.device) <= positions[:, None] - window
        mask[:, : start - low].masked_fill_(outside, -math.inf)
    mask[:, start - low :].masked_fill_(~visible, -math.inf)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        if cap or sinks is not None:
            return shaped_attention(q, k, v, mask, scale, cap, sinks)
        k, v = (x.transpose(0, 1).expand(-1, group, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)

    out = attend(k, v)
    if math.isfinite(out.sum()):
        return out
    # 0 x NaN = NaN, so rows that are not finite are read as zero. Then the queries that see one become NaN.
    poisoned = ~(torch.isfinite(k) & torch.isfinite(v)).all(-1)
    bad = (poisoned[..., None, :] & (mask == 0)).any(-1).repeat_interleave(group, 1)
    out = attend(k.masked_fill(poisoned[..., None], 0), v.masked_fill(poisoned[..., None], 0))
    return out.masked_fill(bad[..., None], float("nan"))


@jit
def _row_geometry(start, positions, b, m, T, R, ROWS, REGION: tl.constexpr):
    """For query rows m = g * T + t of sequence b: (whether the row exists, t, first slot n of the region,
    position p, end of the keys that the chunk kernel handles)."""
    ok = m < ROWS
    t = m % T
    n = tl.load(start + b).to(tl.int32)
    p = tl.load(positions + b * T + t, mask=ok, other=0).to(tl.int32)
    if REGION:
        limit = tl.zeros_like(p) + n + R
    else:
        limit = tl.minimum(tl.maximum(p - 16, 0) // 16 * 16, n)
    return ok, t, n, p, tl.where(ok, limit, 0)


@jit
def _own_rows(segments, bh, b, S, HKV: tl.constexpr, POOLED: tl.constexpr):
    """(the row of the cache where slot 0 of a head of sequence b lies, the slot that takes every write past the end)"""
    if POOLED:
        first = (bh % HKV).to(tl.int64) * S + tl.load(segments + 2 * b)
        trash = tl.load(segments + 2 * b + 1).to(tl.int32)
    else:
        first = bh.to(tl.int64) * S
        trash = S - 1
    return first, trash


@jit
def _split_bounds(split):
    """The keys [first, last) of a split: 8 splits of 128, 8 of 256, 8 of 512, 8 of 1024, then all of 2048.

    So short contexts fill the GPU and long ones have few partial sums. The size of the cache S plays no part,
    because drafters allocate caches of different sizes.
    """
    octave = tl.minimum(split // 8, 4)
    first = 1024 * ((1 << octave) - 1) + (split - 8 * octave) * (128 << octave)
    return first, first + (128 << octave)


@jit
def _rescale(top, other):
    """A step of an online softmax: (joint maximum, what to subtract from scores, factor of earlier sums).

    Earlier sums were taken under the maximum `top`. What to subtract is the joint maximum, or 0 for -inf.
    """
    new = tl.maximum(top, other)
    safe = tl.where(new == float("-inf"), 0.0, new)
    return new, safe, tl.exp(top - safe)


@jit
def _capped(score, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), or the score without a cap."""
    if CAP > 0:
        score = CAP * (2 / (1 + tl.exp(score * (-2 / CAP))) - 1)
    return score


@jit
def _live_splits(end):
    """How many splits begin below `end`, the inverse of `_split_bounds`."""
    last = tl.maximum(end - 1, 0)
    octave = 0
    for i in tl.static_range(1, 5):
        octave += tl.where(last >= 1024 * ((1 << i) - 1), 1, 0)
    first = 1024 * ((1 << octave) - 1)
    return tl.where(end > 0, 8 * octave + (last - first) // (128 << octave) + 1, 0)


@jit
def _attend_chunks(
    query, kv, kv_scales, visible, own, trash, b, split, ok, t, n, p, limit, v_offset, T, R, scale, HD: tl.constexpr,
    HDP: tl.constexpr, WINDOW: tl.constexpr, REGION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    INT8: tl.constexpr, CAP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The part on matrix units: (maximum, sum, weighted values) over the keys of a split below `limit`. With REGION
    over all keys.

    Key blocks begin at multiples of BK, and a block that is masked changes no bit. So the partial sum of a
    row depends on its position and its keys alone.
    """
    end = tl.max(limit, 0)
    low, last = _split_bounds(split)
    high = end if REGION else tl.minimum(last, end)
    if WINDOW > 0:
        low = tl.maximum(low, (tl.min(tl.where(ok, p, 2147483647), 0) - WINDOW + 1) // BK * BK)
    d = tl.arange(0, HDP)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, HDP), tl.float32)
    for j0 in range(low, high, BK):
        j = j0 + tl.arange(0, BK)
        at = (own + tl.minimum(j, trash)) * (HD + 4 * INT8)
        k = load_rows(kv, kv_scales, at, d, j < end, query.dtype, HD, INT8)
        v = load_rows(kv, kv_scales, at + v_offset, d, j < end, query.dtype, HD, INT8)
        spoilt = tl.zeros((BK,), tl.int32)
        if WINDOW > 0 or REGION:  # Queries of a tile see different keys, and 0 x NaN must not reach the others.
            usable = tl.abs(v.to(tl.float32)) < float("inf")
            spoilt = tl.max(tl.where(usable, 0, 1), 1)
            v = tl.where(usable, v, 0.0).to(v.dtype)
        see = j[None, :] < limit[:, None]
        if WINDOW > 0:
            see = see & ((j[None, :] > p[:, None] - WINDOW) | (j[None, :] >= n))
        if REGION:
            r = j - n
            inside = ok[:, None] & ((r >= 0) & (r < R))[None, :]
            vis = tl.load(visible + (b * T + t[:, None]) * R + r[None, :], mask=inside, other=0)
            see = see & ((r < 0)[None, :] | (vis != 0))
        dots = dot(query, tl.trans(k), tl.zeros((BM, BK), tl.float32), NATIVE)
        score = tl.where(see, _capped(dots * scale, CAP), float("-inf"))
        new, safe, shrink = _rescale(top, tl.max(score, 1))
        weight = tl.exp(score - safe[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = dot(weight.to(v.dtype), v, acc * shrink[:, None], NATIVE)
        if WINDOW > 0 or REGION:
            hit = tl.max(tl.where(see & (spoilt != 0)[None, :], 1, 0), 1)
            acc = tl.where((hit != 0)[:, None], float("nan"), acc)
        top = new
    return top, total, acc


@jit
def _attend_tail(
    query, kv, kv_scales, visible, own, trash, b, ok, t, n, p, limit, v_offset, T, R, scale, HD: tl.constexpr,
    HDP: tl.constexpr, RP: tl.constexpr, WINDOW: tl.constexpr, RT: tl.constexpr, INT8: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """The same over the tail, the keys from `limit` on, for RT rows.

    Key i of the tail is position limit + i, whichever slot holds it: history, or the i-th visible row of the
    region. So verification and plain decoding reduce the same operands in the same places. Every query
    gathers only rows that it sees. Others are loaded as zero. A tail has at most 32 keys where rows see their own path
    alone, so that there is one step.
    """
    base = own * (HD + 4 * INT8)
    values = kv + base + v_offset
    d = tl.arange(0, HDP)
    r = tl.arange(0, RP)
    seen = ok[:, None] & (r < R)[None, :]
    vis = tl.load(visible + (b * T + t[:, None]) * R + r[None, :], mask=seen, other=0).to(tl.int32)
    # 1, 2, ... for the visible rows of the region. Their slots are in the order of their positions.
    rank = tl.cumsum(vis, 1) * vis
    count = tl.sum(vis, 1)
    top = tl.full((RT,), float("-inf"), tl.float32)
    total = tl.zeros((RT,), tl.float32)
    acc = tl.zeros((RT, HDP), tl.float32)
    for step in range(tl.cdiv(tl.max(tl.where(ok, n - limit + count, 0), 0), 32)):
        j = limit[:, None] + step * 32 + tl.arange(0, 32)[None, :]
        nth = j - n
        row = tl.sum(tl.where(rank[:, None, :] == nth[:, :, None] + 1, r[None, None, :], 0), 2)
        slot = tl.where(nth < 0, j, tl.minimum(n + row, trash))
        see = ok[:, None] & (nth < count[:, None])
        if WINDOW > 0:
            see = see & ((nth >= 0) | (j > p[:, None] - WINDOW))
        at = slot * (HD + 4 * INT8)
        k = load_rows(kv + base, kv_scales + base // 4, at, d, see, tl.float32, HD, INT8)
        v = load_rows(values, kv_scales + (base + v_offset) // 4, at, d, see, tl.float32, HD, INT8)
        score = tl.where(see, _capped(tl.sum(query[:, None, :] * k, 2) * scale, CAP), float("-inf"))
        new, safe, shrink = _rescale(top, tl.max(score, 1))
        weight = tl.exp(score - safe[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * v, 1)
        top = new
    return top, total, acc


@jit
def _store_partial(acc_part, ml_part, at, m, d, top, total, acc, ok, real, HD: tl.constexpr):
    """Store what rows m of a part have added up, in the rows from `at` on."""
    tl.store(acc_part + (at + m)[:, None] * HD + d[None, :], acc, mask=real)
    tl.store(ml_part + (at + m) * 2, top, mask=ok)
    tl.store(ml_part + (at + m) * 2 + 1, total, mask=ok)


@jit
def _load_partial(acc_part, ml_part, i, splits, last, m, d, limit, ok, real, ROWS, HD: tl.constexpr):
    """(maxima, sums, weighted values) of rows m in part i: a split, then the tail, then nothing."""
    first = tl.where(i < splits, _split_bounds(i)[0], tl.where(i == splits, -1, 2147483647))
    live = ok & (first < limit)
    row = tl.where(i < splits, i * ROWS, last) + m
    top = tl.load(ml_part + row * 2, mask=live, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(ml_part + row * 2 + 1, mask=live, other=0, cache_modifier=".cg")
    rows = acc_part + row[:, None] * HD + d[None, :]
    return top, total, tl.load(rows, mask=live[:, None] & real, other=0, cache_modifier=".cg")


@jit
def _merge(top, total, acc, part):
    """The sums of `_load_partial` added to those of the parts before it. A part without keys changes no bit."""
    new, safe, shrink = _rescale(top, part[0])
    weight = tl.exp(part[0] - safe)
    return new, total * shrink + part[1] * weight, acc * shrink[:, None] + part[2] * weight[:, None]


@jit
def attend_kernel(
    q, kv, kv_scales, segments, start, visible, positions, acc_part, ml_part, arrived, out, sinks, v_offset, S, T, R,
    ROWS, PARTS, scale, HKV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, RP: tl.constexpr, WINDOW: tl.constexpr,
    REGION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, RT: tl.constexpr, INT8: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, NATIVE: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Attention of BM query rows: keys [0, limit) on matrix units, limit = 16 floor((p - 16) / 16), then the tail.
    Grid (B Hkv, row tiles, up to BM / RT programs for tails and one per split).

    The program of a row tile that arrives last merges the partial sums of each row in the order of its keys. With
    REGION, for prefill, one program does a row tile alone, and there is no tail.
    """
    bh = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    b = bh // HKV
    TAILS = tl.minimum(tl.cdiv(ROWS, RT), BM // RT)
    if not REGION:
        # The grid follows the size of the cache. A split behind the history ends here, after one load.
        if (part >= TAILS) & (_split_bounds(tl.maximum(part - TAILS, 0))[0] >= tl.load(start + b)):
            return
        # Offsets within the partial sums of one head fit in 32 bits. Those of a large batch do not.
        acc_part += bh.to(tl.int64) * PARTS * ROWS * HD
        ml_part += bh.to(tl.int64) * PARTS * ROWS * 2
    own, trash = _own_rows(segments, bh, b, S, HKV, POOLED)
    d = tl.arange(0, HDP)
    m = tile * BM + tl.arange(0, BM)
    ok, t, n, p, limit = _row_geometry(start, positions, b, m, T, R, ROWS, REGION)
    at = (bh * ROWS + m)[:, None] * HD + d[None, :]
    real = ok[:, None] & (d < HD)[None, :]
    sink = tl.full((BM,), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + bh % HKV * (ROWS // T) + m // T, mask=ok, other=float("-inf")).to(tl.float32)
    if REGION:
        query = tl.load(q + at, mask=real, other=0)
        top, total, acc = _attend_chunks(query, kv, kv_scales, visible, own, trash, b, 0, ok, t, n, p, limit, v_offset, T,
                                         R, scale, HD, HDP, WINDOW, REGION, BM, BK, INT8, CAP, NATIVE)  # fmt: skip
        if SINKS:
            top, total, acc = _merge(top, total, acc, (sink, tl.where(ok, 1.0, 0.0), tl.zeros((BM, HDP), tl.float32)))
    else:
        splits = _live_splits(tl.max(limit, 0))
        tails = tl.cdiv(tl.minimum(ROWS - tile * BM, BM), RT)
        if part >= tl.where(part < TAILS, tails, TAILS + splits):
            return
        last = (PARTS - 1) * ROWS  # the tails' partial sums lie behind those of the splits
        if part < TAILS:
            few = tile * BM + part * RT + tl.arange(0, RT)
            ok_few, t_few, n_few, p_few, limit_few = _row_geometry(start, positions, b, few, T, R, ROWS, REGION)
            at_few = few[:, None] * HD + d[None, :]
            real_few = ok_few[:, None] & (d < HD)[None, :]
            query_few = tl.load(q + bh * ROWS * HD + at_few, mask=real_few, other=0).to(tl.float32)
            top_few, total_few, acc_few = _attend_tail(
                query_few, kv, kv_scales, visible, own, trash, b, ok_few, t_few, n_few, p_few, limit_few, v_offset, T, R,
                scale, HD, HDP, RP, WINDOW, RT, INT8, CAP)  # fmt: skip
            _store_partial(acc_part, ml_part, last, few, d, top_few, total_few, acc_few, ok_few, real_few, HD)
        else:
            query = tl.load(q + at, mask=real, other=0)
            top_s, total_s, acc_s = _attend_chunks(
                query, kv, kv_scales, visible, own, trash, b, part - TAILS, ok, t, n, p, limit, v_offset, T, R, scale,
                HD, HDP, WINDOW, REGION, BM, BK, INT8, CAP, NATIVE)  # fmt: skip
            mine = (part - TAILS) * ROWS
            _store_partial(acc_part, ml_part, mine, m, d, top_s, total_s, acc_s, ok, real, HD)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + bh * tl.num_programs(1) + tile, 1, sem="acq_rel", scope="gpu")
        if before != splits + tails - 1:
            return
        tl.store(arrived + bh * tl.num_programs(1) + tile, 0)
        top = sink
        total = tl.where(ok, 1.0, 0.0) if SINKS else tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, HDP), tl.float32)
        for i in range(0, splits + 1, 2):  # two at a time, so that their loads wait together
            one = _load_partial(acc_part, ml_part, i, splits, last, m, d, limit, ok, real, ROWS, HD)
            two = _load_partial(acc_part, ml_part, i + 1, splits, last, m, d, limit, ok, real, ROWS, HD)
            top, total, acc = _merge(top, total, acc, one)
            top, total, acc = _merge(top, total, acc, two)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    # Row m is token t of the query head m // T among those that share the keys. out is [B,T,Hq,hd].
    to = ((b * T + t) * HKV + bh % HKV) * (ROWS // T) + m // T
    tl.store(out + to[:, None] * HD + d[None, :], acc.to(out.dtype.element_ty), mask=real)


def lacks_fences(capability: tuple[int, int]) -> bool:
    """Whether Triton may put no fence between copies into shared memory and the wgmma that reads them."""
    return capability[0] == 9 and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)


def attention_tiles(dim: int, region: bool, int8: bool, window: int, nodes: int, wgmma: bool = True) -> dict:
    """Constants and compiler options of the kernel.

    The tiles are the largest that neither spill nor need more than 99 KB of shared memory. They do not depend
    on T. A tile of another height means other matrix instructions (sm_90 uses wgmma from 64 rows) and sums in
    another order, so verification would differ from plain decoding. Prefill (region) is the same for both.
    nodes: rows of the region. wgmma: whether tiles may be so high that sm_90 uses it (`lacks_fences`).
    """
    tiles = dict(
        BM=64 if region and not int8 and wgmma else 32,
        BK=64 >> ((region or int8) + (dim > 128)),
        RT=2 if dim <= 128 else 1,
    )
    wide = dim > 128 and (window > 0 or int8)
    # Without a limit ptxas may stop at 128 or 168 registers, too few for a window, short heads or many nodes. Heads of
    # 256 without a window need no more, and with a limit they spill on sm_90.
    if region or dim > 128 and not wide:
        limit = None
    else:
        limit = 255 if window > 0 or dim > 64 or nodes > 64 else 168
    return tiles | dict(num_warps=8 if region or wide else 4, num_stages=2, maxnreg=limit, **EXACT)


def _tree_attention_triton(
    q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int, scale: float,
    arrived: Tensor | None, cap: float, sinks: Tensor | None, segments: Tensor | None, longest: int, step: bool,
) -> Tensor:  # fmt: skip
    """`tree_attention` in one launch, whose grid depends on the longest sequence's slots and T alone."""
    batch, query_heads, T, dim = q.shape
    kv_heads, S = kv.shape[2:4]
    R = visible.shape[2]
    rows = query_heads // kv_heads * T
    region = not step and (T >= 32 or R > 128)  # so is every chunk of a prompt, however wide (`prefill.CHUNKS`)
    int8 = kv.dtype == torch.int8
    longest = longest or S
    octave = min((longest // 1024 + 1).bit_length() - 1, 4)
    splits = 8 * octave + triton.cdiv(longest - 1024 * (2**octave - 1), 128 << octave)
    wgmma = not (region and q.is_cuda and lacks_fences(torch.cuda.get_device_capability(q.device)))
    tiles = attention_tiles(dim, region, int8, window, R, wgmma)
    tails = min(triton.cdiv(rows, tiles["RT"]), tiles["BM"] // tiles["RT"])
    grid = batch * kv_heads, triton.cdiv(rows, tiles["BM"]), 1 if region else tails + splits
    parts = 0 if region else splits + 1
    acc = q.new_empty(batch * kv_heads, parts, rows, dim, dtype=torch.float32)
    ml = q.new_empty(batch * kv_heads, parts, rows, 2, dtype=torch.float32)
    if arrived is None:
        arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=q.device)
    out = q.new_empty(batch, T, query_heads, dim)
    visible = visible.contiguous().view(torch.uint8)
    attend_kernel[grid](
        q.contiguous(), kv, scales_of(kv), start if segments is None else segments, start, visible,
        positions.contiguous(), acc, ml, arrived, out, out if sinks is None else sinks, kv.stride(0), S, T, R, rows,
        parts, scale, HKV=kv_heads, HD=dim, HDP=max(16, triton.next_power_of_2(dim)),
        RP=1 if region else triton.next_power_of_2(R), WINDOW=max(window, 0), REGION=region, INT8=int8, CAP=cap,
        SINKS=sinks is not None, NATIVE=native(q.dtype), POOLED=segments is not None, **tiles,
    )  # fmt: skip
    return out


def _attention_problem(q: Tensor, kv: Tensor, *_rest) -> str:
    return cache_problem(kv) if kv.dtype in (q.dtype, torch.int8) else "queries and cache differ in dtype"


def _attention_cpu(
    q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int, scale: float,
    _arrived: None, cap: float, sinks: Tensor | None, segments: Tensor | None, *_of_triton: int | bool,
) -> Tensor:  # fmt: skip
    visible = visible.expand(q.shape[0], -1, -1).contiguous()
    rows = q.transpose(1, 2).contiguous(), kv, start, visible, positions.contiguous()
    return torch.ops.eaglet_cpu.tree_attention.default(*rows, window, scale, cap, sinks, segments)


@operation(
    "tree_attention", "tree_attention", _tree_attention_triton, lambda q, *rest: q.new_empty(q.transpose(1, 2).shape),
    problem=_attention_problem, cpu=_attention_cpu, cpu_problem=lambda q, kv, *rest: cpu_problem(q, kv), plain=False,
    by_hand=True,
)  # fmt: skip
def tree_attention(
    q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int, scale: float,
    arrived: Tensor | None = None, cap: float = 0.0, sinks: Tensor | None = None, segments: Tensor | None = None,
    longest: int = 0, step: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of T rows over a static cache -> [B,T,Hq,hd] in q's dtype. There is no backward.

    q [B,Hq,T,hd].
    kv [2,B,Hkv,S,hd] or int8 [2,B,Hkv,S,hd+4]: one layer, which already holds the rows of this forward. With segments
    [2,1,Hkv,S,...], which all sequences share.
    start [B] int64: the first slot of the region. Row r of the region lies in slot min(start + r, S-1).
    visible [B,T,R] bool: whether query t may see row r of the region, with the window already applied.
    positions [B,T] int64: the position of each query.
    window: of the slots j < start, which are history, a query sees all if window <= 0, else those with
    j > position - window.
    arrived: counters at zero, as `rope_write_kv` returns them. They are zero again afterwards. Without them the
    operator makes its own, which is one launch more.
    cap: scores s become cap * tanh(s / cap), if it is not 0.
    sinks [Hq]: scores of one more key per head, whose value is zero.
    segments, longest, step: as of `Nodes`. With segments the slots of a sequence lie behind each other from its first
    place on, and S-1 stands for its last one.

    A row that a query may not see never influences it, even if it holds NaN. Plain code reads `start` on the host, so
    its cost follows the live length.
    """
    starts = start.tolist()
    if segments is None:
        caches = kv.split(1, 1)
    else:
        caches = [kv.narrow(3, first, behind + 1) for first, behind in segments.tolist()]
    rows = [
        _attend_one(q[b : b + 1], cache, visible[b], positions[b], n, window, scale, cap, sinks)
        for b, (n, cache) in enumerate(zip(starts, caches, strict=True))
    ]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).transpose(1, 2).contiguous()
