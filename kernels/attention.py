"""Attention of the rows of a draft tree, a prompt chunk or one token over a static KV cache."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EXACT, dot, jit, native, operation, tl, triton
from kernels.kv import cache_problem, cpu_problem, dequantize_rows, load_rows, scales_of

FEWEST = 16  # programs of a block of rows at least, if there are as many splits
ENOUGH = 2048  # programs of a launch, more than run at the same time on any GPU of today


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


def _attend_one(q, kv, visible, positions, start, window, scale, cap, sinks, ring) -> Tensor:
    """The reference for one sequence: q [1,Hq,T,hd], kv [2,1,Hkv,S,hd], visible [T,R], positions [T]."""
    _, query_heads, T, dim = q.shape
    kv_heads, S = kv.shape[2:4]
    R = visible.shape[1]
    low = max(0, min(start, int(positions.min()) - window + 1)) if window > 0 else 0
    if ring:
        kv = kv[:, :, :, torch.arange(low, start + R, device=kv.device) % (S - 1)]
    elif start + R <= S:
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
def _limit(n, p, CHAIN: tl.constexpr):
    """The end of the keys that the rows at positions p read in chunks. n: the first slot of the region."""
    limit = tl.maximum(p - 16, 0) // 16 * 16
    if not CHAIN:  # Only the rows of a chain lie where their positions say. Nodes are at most 16 deep.
        limit = tl.minimum(limit, n)
    return limit


@jit
def _split_bounds(split):
    """The keys [first, last) of a split: 16 splits of 128, 16 of 256, 16 of 512, 16 of 1024, then all of 2048.

    So short contexts fill the GPU and long ones have few partial sums. The size of the cache S plays no part,
    because drafters allocate caches of different sizes.
    """
    octave = tl.minimum(split // 16, 4)
    first = 2048 * ((1 << octave) - 1) + (split - 16 * octave) * (128 << octave)
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
def _live_splits(end):
    """How many splits begin below `end`, the inverse of `_split_bounds`."""
    last = tl.maximum(end - 1, 0)
    octave = 0
    for i in tl.static_range(1, 5):
        octave += tl.where(last >= 2048 * ((1 << i) - 1), 1, 0)
    first = 2048 * ((1 << octave) - 1)
    return tl.where(end > 0, 16 * octave + (last - first) // (128 << octave) + 1, 0)


@jit
def _first_split(p, WINDOW: tl.constexpr):
    """The first split with keys that a row at position p sees."""
    return tl.maximum(_live_splits(p - WINDOW + 1) - 1, 0) if WINDOW > 0 else 0


@jit
def _weigh(query, k, see, scale, top, total, CAP: tl.constexpr, NATIVE: tl.constexpr):
    """One more block of keys in an online softmax: (maximum, sum, factor of earlier values, weights of the new ones)."""
    score = dot(query, tl.trans(k), tl.zeros(see.shape, tl.float32), NATIVE) * scale
    if CAP > 0:  # CAP * tanh(score / CAP)
        score = CAP * (2 / (1 + tl.exp(score * (-2 / CAP))) - 1)
    score = tl.where(see, score, float("-inf"))
    new, safe, shrink = _rescale(top, tl.max(score, 1))
    weight = tl.exp(score - safe[:, None])
    return new, total * shrink + tl.sum(weight, 1), shrink, weight.to(query.dtype)


@jit
def _attend_chunks(
    query, keys, key_scales, values, value_scales, trash, base, split, ok, n, p, limit, scale, HD: tl.constexpr,
    HDP: tl.constexpr, WINDOW: tl.constexpr, CHAIN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    INT8: tl.constexpr, CAP: tl.constexpr, NATIVE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, weighted values) over the keys of a split below `limit`.

    Key blocks begin at multiples of BK, and a block that is masked changes no bit. So the partial sum of a
    row depends on its position and its keys alone.
    """
    end = tl.minimum(tl.max(limit, 0), trash)  # Only rows that fill up a chunk of a prompt lie behind the cache.
    low, last = _split_bounds(split)
    if WINDOW > 0:
        low = tl.maximum(low, (tl.min(tl.where(ok, p, 2147483647), 0) - WINDOW + 1) // BK * BK)
    d = tl.arange(0, HDP)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, HDP), tl.float32)
    for j0 in range(low, tl.minimum(last, end), BK):
        j = j0 + tl.arange(0, BK)
        at = ((base + j) % trash if RING else j) * (HD + 4 * INT8)
        see = j[None, :] < limit[:, None]
        if WINDOW > 0:
            near = j[None, :] > p[:, None] - WINDOW
            see = see & (near if CHAIN else near | (j[None, :] >= n))
        k = load_rows(keys, key_scales, at, d, j < end, query.dtype, HD, INT8)
        top, total, shrink, weight = _weigh(query, k, see, scale, top, total, CAP, NATIVE)
        v = load_rows(values, value_scales, at, d, j < end, query.dtype, HD, INT8)
        acc = acc * shrink[:, None]
        if WINDOW > 0 or CHAIN:  # Queries of a tile see different keys, and 0 x NaN must not reach the others.
            spoilt = tl.max(tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0, 1), 1)
            v = tl.where((spoilt == 0)[:, None], v, 0.0).to(v.dtype)
            hit = tl.max(tl.where(see & (spoilt != 0)[None, :], 1, 0), 1)
            acc = tl.where((hit != 0)[:, None], float("nan"), acc)
        acc = dot(weight, v, acc, NATIVE)
    return top, total, acc


@jit
def _seen_rows(visible, first, R, RP: tl.constexpr):
    """Which of the region's rows `first`, `first` + 1, ... a query sees: their numbers [RP], and 0 or 1 [RP]."""
    r = first + tl.arange(0, RP)
    return r, tl.load(visible + r, mask=r < R, other=0).to(tl.int32)


@jit
def _attend_tail(
    query, keys, key_scales, values, value_scales, visible, trash, base, t, n, p, limit, R, scale, HD: tl.constexpr,
    HDP: tl.constexpr, RP: tl.constexpr, WINDOW: tl.constexpr, CHAIN: tl.constexpr, GP: tl.constexpr,
    INT8: tl.constexpr, CAP: tl.constexpr, NATIVE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The same over the tail, the keys from `limit` on, for the GP queries of one token. visible: its row of the region.

    Key i of the tail is position limit + i, whichever slot holds it: history, or the i-th visible row of the
    region. So verification, plain decoding and prompts reduce the same operands in the same places. Only keys that the
    token sees are loaded. A tail has at most 32 where rows see their own path alone, so that there is one step, or two
    of 16 where heads are wide.
    """
    KEYS: tl.constexpr = 32 if HDP <= 256 else 16  # of a step, as many as registers allow
    d = tl.arange(0, HDP)
    count = 0  # of the region's rows that the token sees
    if CHAIN:
        count += t + 1
    else:
        for first in range(0, R, RP):
            count += tl.sum(_seen_rows(visible, first, R, RP)[1], 0)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, HDP), tl.float32)
    for j0 in range(limit, n + count, KEYS):
        j = j0 + tl.arange(0, KEYS)
        nth = j - n
        slot = tl.minimum(j, trash)
        if not CHAIN:  # The slots of the visible rows are in the order of their positions.
            row = tl.zeros((KEYS,), tl.int32)
            before = 0
            for first in range(0, R, RP):
                r, seen = _seen_rows(visible, first, R, RP)
                rank = (before + tl.cumsum(seen, 0)) * seen  # 1, 2, ... for the visible rows
                row += tl.sum(tl.where(rank[None, :] == nth[:, None] + 1, r[None, :], 0), 1)
                before += tl.sum(seen, 0)
            slot = tl.where(nth < 0, j, tl.minimum(n + row, trash))
        see = nth < count
        if WINDOW > 0:
            near = j > p - WINDOW
            see = see & (near if CHAIN else near | (nth >= 0))
        at = ((base + slot) % trash if RING else slot) * (HD + 4 * INT8)
        all_see = see[None, :] & (tl.arange(0, GP) >= 0)[:, None]
        k = load_rows(keys, key_scales, at, d, see, query.dtype, HD, INT8)
        v = load_rows(values, value_scales, at, d, see, query.dtype, HD, INT8)
        top, total, shrink, weight = _weigh(query, k, all_see, scale, top, total, CAP, NATIVE)
        acc = dot(weight, v, acc * shrink[:, None], NATIVE)
    return top, total, acc


@jit
def _nothing(sinks, head, ok, HDP: tl.constexpr, SINKS: tl.constexpr):
    """(maxima, sums, weighted values) of rows of the query heads `head` before the first key: those of the sink, if there
    is one."""
    acc = tl.zeros((head.shape[0], HDP), tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=ok, other=float("-inf")).to(tl.float32)
        total = tl.where(ok, 1.0, 0.0)
    else:
        top = tl.full((head.shape[0],), float("-inf"), tl.float32)
        total = tl.zeros((head.shape[0],), tl.float32)
    return top, total, acc


@jit
def _store_partial(acc_part, ml_part, rows, d, top, total, acc, ok, HD: tl.constexpr):
    """Store what rows of a part have added up."""
    tl.store(acc_part + rows[:, None] * HD + d[None, :], acc, mask=ok[:, None] & (d < HD)[None, :])
    tl.store(ml_part + rows * 2, top, mask=ok)
    tl.store(ml_part + rows * 2 + 1, total, mask=ok)


@jit
def _load_partial(acc_part, ml_part, rows, d, live, HD: tl.constexpr):
    """(maxima, sums, weighted values) of rows of a part. Those of no keys where not live."""
    top = tl.load(ml_part + rows * 2, mask=live, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(ml_part + rows * 2 + 1, mask=live, other=0, cache_modifier=".cg")
    there = live[:, None] & (d < HD)[None, :]
    return top, total, tl.load(acc_part + rows[:, None] * HD + d[None, :], mask=there, other=0, cache_modifier=".cg")


@jit
def _merge(top, total, acc, part):
    """Two partial sums added up. A part without keys changes no bit."""
    new, safe, shrink = _rescale(top, part[0])
    weight = tl.exp(part[0] - safe)
    return new, total * shrink + part[1] * weight, acc * shrink[:, None] + part[2] * weight[:, None]


@jit
def attend_kernel(
    q, kv, kv_scales, segments, start, visible, positions, acc_part, ml_part, arrived, out, sinks, v_offset, S, T, R,
    ROWS, SPLITS, PROGRAMS, scale, HKV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, RP: tl.constexpr,
    WINDOW: tl.constexpr, CHAIN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, GP: tl.constexpr,
    GM: tl.constexpr, FLIGHT: tl.constexpr, INT8: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    NATIVE: tl.constexpr, POOLED: tl.constexpr, RING: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Attention of the query rows of a key head: keys [0, limit) in splits, limit = 16 floor((p - 16) / 16), then the
    tail. Grid (B Hkv, PROGRAMS for BM rows, and then one program for each token). Program i takes split i,
    and if SHARED also i + PROGRAMS and so on, as far as there is history, and with a window those that it reaches.

    The program of a token waits until all splits of its key head have arrived. Then it merges the partial sums of its
    rows in the order of their keys, and loads FLIGHT of them at a time. The programs that it waits for have lower
    numbers, so a GPU starts them first. With CHAIN, where there are many rows, one program merges all splits of its rows
    as it goes. The order is the same, so a token has the same bits in a prompt and in a step.

    In a ring, positions are counted from the first block that the region's first row sees. So the grid follows the
    window, wherever in a text it is.
    """
    bh = tl.program_id(0)
    work = tl.program_id(1)
    b = bh // HKV
    tiles = tl.cdiv(ROWS, BM)
    n = tl.load(start + b).to(tl.int32)
    base = 0
    if RING:
        base = tl.maximum(n - WINDOW + 1, 0) // BK * BK
        n -= base
    # The row of the cache where slot 0 of this head lies, and the slot that takes every write past the end.
    if POOLED:
        first = (bh % HKV).to(tl.int64) * S + tl.load(segments + 2 * b)
        trash = tl.load(segments + 2 * b + 1).to(tl.int32)
    else:
        first = bh.to(tl.int64) * S
        trash = S - 1
    keys = kv + first * (HD + 4 * INT8)  # Offsets within the rows of one sequence fit in 32 bits.
    values = keys + v_offset
    key_scales = kv_scales + first * (HD + 4 * INT8) // 4
    value_scales = key_scales + v_offset // 4
    d = tl.arange(0, HDP)
    splits = tl.minimum(_live_splits(n), SPLITS)  # with history
    if work < tiles * PROGRAMS:
        program = work // tiles
        if not CHAIN:
            if program >= splits:  # The grid follows the size of the cache.
                return
        m = (tiles - 1 - work % tiles) * BM + tl.arange(0, BM)  # In a prompt the last rows have most to do.
        ok = m < ROWS
        p = tl.load(positions + b * T + m % T, mask=ok, other=0).to(tl.int32) - base
        limit = tl.where(ok, _limit(n, p, CHAIN), 0)
        query = tl.load(q + (bh * ROWS + m)[:, None] * HD + d[None, :], mask=ok[:, None] & (d < HD)[None, :], other=0)
        seen = _first_split(tl.min(tl.where(ok, p, 2147483647), 0), WINDOW)
        rows = bh.to(tl.int64) * (SPLITS + 1) * ROWS + m
        if CHAIN:
            top, total, acc = _nothing(sinks, bh % HKV * (ROWS // T) + m // T, ok, HDP, SINKS)
            for s in range(seen, _live_splits(tl.max(limit, 0))):
                one = _attend_chunks(query, keys, key_scales, values, value_scales, trash, base, s, ok, n, p, limit,
                                     scale, HD, HDP, WINDOW, CHAIN, BM, BK, INT8, CAP, NATIVE, RING)  # fmt: skip
                top, total, acc = _merge(top, total, acc, one)
            _store_partial(acc_part, ml_part, rows, d, top, total, acc, ok, HD)
        elif SHARED:
            for s in range(program + tl.cdiv(tl.maximum(seen - program, 0), PROGRAMS) * PROGRAMS, splits, PROGRAMS):
                top, total, acc = _attend_chunks(
                    query, keys, key_scales, values, value_scales, trash, base, s, ok, n, p, limit, scale, HD, HDP,
                    WINDOW, CHAIN, BM, BK, INT8, CAP, NATIVE, RING)  # fmt: skip
                _store_partial(acc_part, ml_part, rows + s * ROWS, d, top, total, acc, ok, HD)
        else:
            top, total, acc = _attend_chunks(
                query, keys, key_scales, values, value_scales, trash, base, program, ok, n, p, limit, scale, HD, HDP,
                WINDOW, CHAIN, BM, BK, INT8, CAP, NATIVE, RING)  # fmt: skip
            _store_partial(acc_part, ml_part, rows + program * ROWS, d, top, total, acc, ok, HD)
        tl.debug_barrier()
        tl.atomic_add(arrived + bh, 1, sem="release", scope="gpu")
        return
    t = work - tiles * PROGRAMS
    p = tl.load(positions + b * T + t).to(tl.int32) - base
    limit = _limit(n, p, CHAIN)
    g = tl.arange(0, GP)  # The queries of one token that share a key head see the same keys.
    m = g * T + t
    ok = m < ROWS
    query = tl.load(q + (bh * ROWS + m)[:, None] * HD + d[None, :], mask=ok[:, None] & (d < HD)[None, :], other=0)
    top, total, acc = _attend_tail(
        query, keys, key_scales, values, value_scales, visible + (b * T + t) * R, trash, base, t, n, p, limit, R, scale,
        HD, HDP, RP, WINDOW, CHAIN, GP, INT8, CAP, NATIVE, RING)  # fmt: skip
    before = bh.to(tl.int64) * (SPLITS + 1) * ROWS  # the partial sums of other heads
    last = before + SPLITS * ROWS  # Those of tails lie behind the others.
    _store_partial(acc_part, ml_part, last + m, d, top, total, acc, ok, HD)
    tl.debug_barrier()
    arrivals = tiles * (1 if CHAIN else tl.minimum(splits, PROGRAMS))
    there = tl.atomic_add(arrived + bh, 0, sem="acquire", scope="gpu")
    while there < arrivals:
        there = tl.atomic_add(arrived + bh, 0, sem="acquire", scope="gpu")
    group = tl.arange(0, GM)
    rows = group * T + t
    live = rows < ROWS
    head = bh % HKV * (ROWS // T) + group
    if CHAIN:
        top, total, acc = _load_partial(acc_part, ml_part, before + rows, d, live, HD)
    else:
        top, total, acc = _nothing(sinks, head, live, HDP, SINKS)
        for i in range(_first_split(p, WINDOW), splits, FLIGHT):  # several at a time, so that their loads wait together
            several = ()
            for k in tl.static_range(FLIGHT):
                begin = tl.where(i + k < splits, _split_bounds(i + k)[0], 2147483647)
                used = begin < tl.where(live, limit, 0)
                several += (_load_partial(acc_part, ml_part, before + (i + k) * ROWS + rows, d, used, HD),)
            for k in tl.static_range(FLIGHT):
                top, total, acc = _merge(top, total, acc, several[k])
    top, total, acc = _merge(top, total, acc, _load_partial(acc_part, ml_part, last + rows, d, live, HD))
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    # out is [B,T,Hq,hd].
    to = (b * T + t) * (HKV * (ROWS // T)) + head
    tl.store(out + to[:, None] * HD + d[None, :], acc.to(out.dtype.element_ty), mask=live[:, None] & (d < HD)[None, :])
    # The last token of a head sets its counter to zero for the next launch.
    if tl.atomic_add(arrived + bh, 1, sem="relaxed", scope="gpu") == arrivals + T - 1:
        tl.store(arrived + bh, 0)


def attention_tiles(dim: int, group: int, int8: bool, chain: bool, window: int, hopper: bool = False) -> dict:
    """Constants and compiler options of the kernel. group: the query heads that share a key head.

    The tiles are the largest that neither spill nor need more than 99 KB of shared memory. They do not depend
    on the number of rows. A tile of another height means other matrix instructions (sm_90 uses wgmma from 64 rows) and
    sums in another order, so verification would differ from plain decoding.
    """
    merged, warps = triton.next_power_of_2(group), 8 if dim > 128 else 4
    crowded = (dim > 128) + int8 + (window > 0)  # what takes registers
    tiles = dict(BM=32, BK=(64, 32, 32, 16)[crowded]) if dim <= 256 else dict(BM=16, BK=16)
    tiles |= dict(RP=64, GP=max(16, merged), GM=merged, FLIGHT=max(1, min(16, 512 * warps // (merged * dim))))
    # A prompt with a window, or with wide heads, has no registers left for a second stage. Without a number, ptxas would
    # rather spill than use more than 128 or 168 of them. Hopper has shared memory for three programs with 168.
    options = dict(num_stages=1 if chain and (window > 0 or dim > 256) else 2)
    options |= dict(maxnreg=168 if hopper and not chain and dim <= 256 and not window and crowded < 2 else 255)
    return tiles | dict(num_warps=warps, **options, **EXACT)


def _tree_attention_triton(
    out, q, kv, start, visible, positions, window, scale, arrived, cap, sinks, segments, longest, chain, ring=False
) -> None:
    """`tree_attention` in one launch, whose grid depends on the longest sequence's slots and T alone."""
    batch, query_heads, T, dim = q.shape
    kv_heads, S = kv.shape[2:4]
    group, int8 = query_heads // kv_heads, kv.dtype == torch.int8
    longest = longest or S
    octave = min((longest // 2048 + 1).bit_length() - 1, 4)
    splits = 1 if chain else 16 * octave + triton.cdiv(longest - 2048 * (2**octave - 1), 128 << octave)
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    tiles = attention_tiles(dim, group, int8, chain, window, hopper)
    heads, blocks = batch * kv_heads, triton.cdiv(group * T, tiles["BM"])
    # Splits are for long texts, and share programs where there are many anyhow. A window reaches few of them.
    programs = min(splits, max(FEWEST, triton.cdiv(ENOUGH, heads * blocks)))
    programs = min(programs, triton.cdiv(window, 128) + 2) if window > 0 else programs
    if programs < splits:  # the loop over splits needs more registers
        tiles["maxnreg"] = 255
    grid = heads, blocks * programs + T
    acc, ml = (q.new_empty(grid[0], splits + 1, group * T, size, dtype=torch.float32) for size in (dim, 2))
    if arrived is None:
        arrived = torch.zeros(grid[0], dtype=torch.int32, device=q.device)
    visible = visible.contiguous().view(torch.uint8)
    attend_kernel[grid](
        q.contiguous(), kv, scales_of(kv), start if segments is None else segments, start, visible,
        positions.contiguous(), acc, ml, arrived, out, out if sinks is None else sinks, kv.stride(0), S, T,
        visible.shape[2], group * T, splits, programs, scale, HKV=kv_heads, HD=dim, WINDOW=max(window, 0), CHAIN=chain,
        HDP=max(16, triton.next_power_of_2(dim)), INT8=int8, CAP=cap, SINKS=sinks is not None, NATIVE=native(q.dtype),
        POOLED=segments is not None, RING=ring, SHARED=programs < splits, **tiles,
    )  # fmt: skip


def _attention_problem(q: Tensor, kv: Tensor, *_rest) -> str:
    return cache_problem(kv) if kv.dtype in (q.dtype, torch.int8) else "queries and cache differ in dtype"


def _attention_cpu(
    q, kv, start, visible, positions, window, scale, _arrived, cap, sinks, segments, _longest, _chain, ring
) -> Tensor:
    visible = visible.expand(q.shape[0], -1, -1).contiguous()
    rows = q.transpose(1, 2).contiguous(), kv, start, visible, positions.contiguous()
    return torch.ops.eaglet_cpu.tree_attention.default(*rows, window, scale, cap, sinks, segments, ring)


@operation(
    "tree_attention", "tree_attention", _tree_attention_triton, lambda q, *rest: q.new_empty(q.transpose(1, 2).shape),
    problem=_attention_problem, cpu=_attention_cpu, cpu_problem=lambda q, kv, *rest: cpu_problem(q, kv), plain=False,
)  # fmt: skip
def tree_attention(
    q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int, scale: float,
    arrived: Tensor | None = None, cap: float = 0.0, sinks: Tensor | None = None, segments: Tensor | None = None,
    longest: int = 0, chain: bool = False, ring: bool = False,
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
    segments, longest, chain, ring: as of `Nodes`. With segments the slots of a sequence lie behind each other from its
    first place on, and S-1 stands for its last one. A ring has room for the window and for the region.

    A row that a query may not see never influences it, even if it holds NaN. Plain code reads `start` on the host, so
    its cost follows the live length.
    """
    if segments is None:
        caches = kv.split(1, 1)
    else:
        caches = [kv.narrow(3, first, behind + 1) for first, behind in segments.tolist()]
    rows = [
        _attend_one(q[b : b + 1], cache, visible[b], positions[b], n, window, scale, cap, sinks, ring)
        for b, (n, cache) in enumerate(zip(start.tolist(), caches, strict=True))
    ]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).transpose(1, 2).contiguous()
