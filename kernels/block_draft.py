"""The small work of drafting a block of tokens in one forward: what it keeps of the text, the convolutions over its
slots, and the tokens that follow a token in a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import jit, operation, tl, triton
from kernels.choice import NOTHING, rank_of
from kernels.draft import store_paths, store_root


@jit
def context_kernel(
    kv, weights, cos, sin, cache, slots, T, S, layer_stride, value_stride, eps, HKV: tl.constexpr, HD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`write_context` of one head of one row. Grid (B T, n 2 Hkv)."""
    row = tl.program_id(0)
    unit = tl.program_id(1)
    layer = unit // (2 * HKV)
    d = tl.arange(0, BLOCK)
    ok = d < HD
    at = kv + (row.to(tl.int64) * tl.num_programs(1) + unit) * HD
    x = tl.load(at + d, mask=ok, other=0)
    slot = tl.load(slots + row)
    to = cache + layer * layer_stride + ((row // T * HKV + unit % HKV).to(tl.int64) * S + slot) * HD
    if unit // HKV % 2 == 1:
        tl.store(to + value_stride + d, x, mask=ok)
    else:
        half: tl.constexpr = HD // 2
        other = tl.where(d < half, d + half, d - half)
        a = x.to(tl.float32)
        c = tl.load(at + other, mask=ok, other=0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, 0) / HD + eps)
        DT: tl.constexpr = cache.dtype.element_ty
        wa = tl.load(weights + layer * HD + d, mask=ok, other=0).to(tl.float32)
        wc = tl.load(weights + layer * HD + other, mask=ok, other=0).to(tl.float32)
        a = ((a * inverse).to(DT).to(tl.float32) * wa).to(DT).to(tl.float32)
        c = ((c * inverse).to(DT).to(tl.float32) * wc).to(DT).to(tl.float32)
        co = tl.load(cos + row * half + d % half, mask=ok, other=0)
        si = tl.load(sin + row * half + d % half, mask=ok, other=0)
        tl.store(to + d, (a * co + tl.where(d < half, -1.0, 1.0) * c * si).to(DT), mask=ok)


def _context_triton(_none, kv, weights, eps, cos, sin, cache, slots) -> None:
    B, T, layers, _, kv_heads, dim = kv.shape
    context_kernel[B * T, layers * 2 * kv_heads](
        kv.contiguous(), weights, cos.contiguous(), sin.contiguous(), cache, slots.contiguous(), T, cache.shape[4],
        cache.stride(0), cache.stride(1), eps, HKV=kv_heads, HD=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


@operation(
    "write_context", "rope_write_kv", _context_triton, lambda *args: None, mutates=("cache",),
    problem=lambda kv, weights, *rest: "" if weights.dtype == kv.dtype == rest[3].dtype else "the dtypes differ",
)  # fmt: skip
def write_context(
    kv: Tensor, weights: Tensor, eps: float, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """Norm and rotate the keys of all layers, and write keys and values into their caches in place. No host sync.

    kv [B,T,n,2,Hkv,hd]: keys, then values, of n layers. weights [n,hd], eps: of the RMS norm of a head's key. cos, sin
    [B,T,hd/2] float32. cache [n,2,B,Hkv,S,hd], which may be the first rows of a larger batch. slots [B,T] int64.
    """
    k, v = kv.unbind(3)
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    k = wide.to(k.dtype) * weights[:, None]
    low, high = k.chunk(2, -1)
    cos, sin = cos[:, :, None, None], sin[:, :, None, None]
    k = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(v.dtype)
    rows = torch.stack((k, v), 3).permute(2, 3, 0, 4, 1, 5)  # [n, 2, B, Hkv, T, hd]
    if kv.shape[0] == 1:
        cache.index_copy_(4, slots[0], rows.contiguous())
    else:
        cache.scatter_(4, slots[None, None, :, None, :, None].expand_as(rows), rows)


@jit
def convolve_kernel(
    y, delta, base, residual, out, T, H, GROUP, SIDE: tl.constexpr, TAPS: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`convolve` of one row. Grid (B T, blocks of H)."""
    row = tl.program_id(0)
    i = row % T
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = d < H
    total = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        total = tl.load(residual + row * H + d, mask=ok, other=0).to(tl.float32)
    for t in tl.static_range(TAPS):
        tap = SIDE * TAPS + t
        weight = tl.load(base + tap * H + d, mask=ok, other=0).to(tl.float32)
        weight += tl.load(delta + (row * 2 * TAPS + tap) * (H // GROUP) + d // GROUP, mask=ok, other=0).to(tl.float32)
        total += weight * tl.load(y + (row - t) * H + d, mask=d < tl.where(i >= t, H, 0), other=0).to(tl.float32)
    tl.store(out + row * H + d, total.to(out.dtype.element_ty), mask=ok)


def _convolve_triton(out, y, delta, base, side, residual) -> None:
    y, delta = y.contiguous(), delta.contiguous()
    B, T, H = y.shape
    taps = base.shape[1]
    block = min(1024, triton.next_power_of_2(H))
    convolve_kernel[B * T, triton.cdiv(H, block)](
        y, delta, base, y if residual is None else residual.contiguous(), out, T, H, 2 * taps * H // delta.shape[2],
        SIDE=side, TAPS=taps, ADD=residual is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


@operation("convolve", "rms_norm", _convolve_triton, lambda y, *rest: y.new_empty(y.shape))
def convolve(y: Tensor, delta: Tensor, base: Tensor, side: int, residual: Tensor | None = None) -> Tensor:
    """A convolution over the slots of a block, whose kernel every row makes anew: y [B,T,H] -> [B,T,H] (+ residual).

    out[i, c] = sum_t (base[side, t, c] + delta[i, side, t, c // group]) y[i - t, c], and rows before the first are 0.

    delta [B,T,2*taps*H/group]; base [2,taps,H]; side: 0 before a sublayer, 1 after it.
    """
    T, H = y.shape[1:]
    taps = base.shape[1]
    rows = delta.unflatten(-1, (2, taps, -1)).select(2, side)
    out = residual
    for t in range(min(taps, T)):
        weight = rows.select(2, t).repeat_interleave(H * 2 * taps // delta.shape[2], -1) + base[side, t]
        part = torch.nn.functional.pad(weight[:, t:] * y[:, : T - t], (0, 0, t, 0))
        out = part if out is None else out + part
    return out


class Parents(NamedTuple):
    """The tokens that others are to follow, as what corrects the logits after each of them: factors [R].

    They are given as they are, or as rows of a table, which the slot may multiply.
    """

    successor: Tensor  # [V, R]: the factor's product with a row is added to the logit of a token
    factor: Tensor | None  # [B, W, R]; None: made of the others
    tokens: Tensor | None  # [B, W] int64
    predecessor: Tensor | None  # [V of the target, R]
    mixed: Tensor | None  # [B, D, R]: of each slot; None: 1


@jit
def follow_kernel(
    scores, ids, successor, factor, tokens, predecessor, mixed, softness, best_ids, best_scores, W, D, DEPTH, K, R, COUNT,
    CP: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr, LOOKED_UP: tl.constexpr, MIXED: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """`follow` of one row. Grid (B W,)."""
    row = tl.program_id(0)
    b = row // W
    k = tl.arange(0, KP)
    r = tl.arange(0, RP)
    there = k < K
    at = (b * D + DEPTH) * K + k
    z = tl.load(scores + at, mask=there, other=float("-inf"))
    z = tl.where(z == z, z, float("-inf"))
    token = tl.load(ids + at, mask=there, other=0)
    if LOOKED_UP:
        own = tl.load(predecessor + tl.load(tokens + row) * R + r, mask=r < R, other=0).to(tl.float32)
    else:
        own = tl.load(factor + row * R + r, mask=r < R, other=0).to(tl.float32)
    if MIXED:
        own *= tl.load(mixed + (b * D + DEPTH) * R + r, mask=r < R, other=0).to(tl.float32)
    inside = there[:, None] & (r < R)[None, :]
    rows = tl.load(successor + token[:, None] * R + r[None, :], mask=inside, other=0).to(tl.float32)
    bias = tl.sum(rows * own[None, :], 1)
    if SOFT:
        bias /= tl.load(softness + b)
    rest = tl.maximum(1 - tl.sum(tl.where(there, tl.exp(z), 0.0), 0), 0.0)
    u = tl.where(there, z + bias, float("-inf"))
    u = tl.where(u == u, u, float("-inf"))
    top = tl.maximum(tl.max(u, 0), 0.0)
    total = top + tl.log(tl.sum(tl.exp(u - top), 0) + rest * tl.exp(-top))
    rank = tl.where(there, rank_of(u, k), NOTHING)
    c = tl.arange(0, CP)
    place = tl.zeros((CP,), tl.int64)
    value = tl.zeros((CP,), tl.float32)
    for i in range(COUNT):
        best = tl.max(rank, 0)
        hit = rank == best
        place = tl.where(c == i, tl.sum(tl.where(hit, token, 0), 0), place)
        value = tl.where(c == i, tl.max(tl.where(hit, u, float("-inf")), 0), value)
        rank = tl.where(hit, NOTHING, rank)
    tl.store(best_ids + row * COUNT + c, place, mask=c < COUNT)
    tl.store(best_scores + row * COUNT + c, value - total, mask=c < COUNT)


def _follow_triton(out, scores, ids, parents, softness, depth, count) -> None:
    B, D, K = scores.shape
    W, R = out[0].shape[1], parents.successor.shape[1]
    given = [scores if t is None else t.contiguous() for t in (*parents, softness)]
    follow_kernel[B * W,](
        scores.contiguous(), ids.contiguous(), *given, *out, W, D, depth, K, R, count, CP=triton.next_power_of_2(count),
        KP=triton.next_power_of_2(K), RP=triton.next_power_of_2(R), LOOKED_UP=parents.factor is None,
        MIXED=parents.mixed is not None, SOFT=softness is not None, num_warps=4,
        maxnreg=128,  # without a number, ptxas would rather spill
    )  # fmt: skip


def _follow_shapes(scores, ids, parents, *rest) -> tuple[Tensor, Tensor]:
    shape = *(parents.tokens if parents.factor is None else parents.factor).shape[:2], rest[-1]
    return ids.new_empty(shape), scores.new_empty(shape)


@operation("follow", "draft_tree", _follow_triton, _follow_shapes)
def follow(
    scores: Tensor, ids: Tensor, parents: Parents, softness: Tensor | None, depth: int, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` best tokens after each of W tokens, from the shortlist of their slot: ids and log-probabilities
    [B,W,count].

    The logit of a token is that of its slot, plus the product of its successor row and the parent's factor. Outside the
    shortlist nothing is added.

    scores, ids [B,D,K]: log-probabilities of the shortlists of all slots, fp32 or wider, and their successor rows. depth:
    the slot. softness [B,1,1]: by what logits were divided in the scores, None: by 1.
    """
    z, token = scores.select(1, depth)[:, None], ids.select(1, depth)
    z = torch.where(z.isnan(), -torch.inf, z)
    factor = parents.predecessor[parents.tokens] if parents.factor is None else parents.factor
    if parents.mixed is not None:
        factor = factor * parents.mixed.select(1, depth)[:, None]
    bias = factor.to(z.dtype) @ parents.successor[token].to(z.dtype).mT
    u = z + (bias if softness is None else bias / softness)
    u = torch.where(u.isnan(), -torch.inf, u)
    rest = (1 - z.exp().sum(-1, keepdim=True)).clamp_min(0).log().expand(-1, u.shape[1], -1)
    total = torch.cat((u, rest), -1).logsumexp(-1, keepdim=True)
    values, order = u.sort(dim=-1, descending=True, stable=True)
    best = token[:, None].expand_as(u).gather(-1, order[..., :count])
    return best, values[..., :count] - total


@jit
def prefixes_kernel(
    tokens, scores, root, out_tokens, out_parent, out_depth, ancestors, valid, out_scores, N, D, K, NP: tl.constexpr
):
    """`growing.best_prefixes` of one sequence, by a heap that lies in the lanes of a program. Grid (B,).

    A lane holds the best prefix that is not in the tree yet of those with one parent. Sums are in float64.
    """
    b = tl.program_id(0)
    j = tl.arange(0, NP)
    tokens += b * D * K
    scores += b * D * K
    NONE: tl.constexpr = float("-inf")
    first = tl.load(scores).to(tl.float64)
    total = tl.where(j == 0, tl.where(first == first, first, NONE), NONE)
    base = tl.zeros((NP,), tl.float64)
    above = j * 0
    level = j * 0
    rank = j * 0
    store_root(b, root, out_tokens, out_parent, out_scores, ancestors, N, NP)
    tl.store(valid + b * N + j, j == 0, mask=j == 0)
    for i in range(1, N):
        best = tl.max(total, 0)
        here = j == tl.min(tl.where(total == best, j, NP), 0)
        ok = best > NONE
        d = tl.sum(tl.where(here, level, 0), 0)
        r = tl.sum(tl.where(here, rank, 0), 0)
        w = tl.sum(tl.where(here, base, 0.0), 0)
        up = tl.sum(tl.where(here, above, 0), 0)
        tl.store(out_tokens + b * N + i, tl.where(ok, tl.load(tokens + d * K + r), 0))
        tl.store(out_parent + b * N + i, tl.where(ok, up, 0).to(tl.int64))
        tl.store(out_scores + b * N + i, best.to(tl.float32))
        tl.store(valid + b * N + i, ok)
        beside = tl.load(scores + d * K + r + 1, mask=r + 1 < tl.where(ok, K, 0), other=NONE).to(tl.float64)
        below = tl.load(scores + (d + 1) * K, mask=d + 1 < tl.where(ok, D, 0), other=NONE).to(tl.float64)
        total = tl.where(here, tl.where(beside == beside, w + beside, NONE), total)
        rank = tl.where(here, r + 1, rank)
        new = j == i
        total = tl.where(new, tl.where(below == below, best + below, NONE), total)
        base = tl.where(new, best, base)
        above = tl.where(new, i, above)
        level = tl.where(new, d + 1, level)
        rank = tl.where(new, 0, rank)
    tl.debug_barrier()  # what other threads wrote is read from here on
    live = tl.load(valid + b * N + j, mask=j < N, other=0) != 0
    store_paths(b, live, out_parent, out_depth, ancestors, N, D, NP)


def best_prefixes(out: Sequence[Tensor], tokens: Tensor, scores: Tensor, root: Tensor, N: int) -> None:
    """The fields of a `growing.Draft` from those of `growing.best_prefixes`."""
    B, D, K = tokens.shape
    prefixes_kernel[B,](
        tokens.contiguous(), scores.contiguous(), root.contiguous(), *out, N, D, K, NP=triton.next_power_of_2(N),
        num_warps=1 if N <= 64 else 4,
    )  # fmt: skip
