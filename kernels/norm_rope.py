"""RMS norm, and rotary positions together with the write into the KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EXACT, jit, operation, tl
from kernels.kv import cache_problem, cpu_problem, scales_of, store_rows, write_kv


@jit
def sum_by_halves(x, LEVELS: tl.constexpr):
    """The sum of x [2^LEVELS]. Every addition has two operands that the layout of x does not choose, so kernels
    with other numbers of warps give the same bits. The first three levels add neighbours, which a thread holds."""
    for i in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), 1) if i < 3 else tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
    return tl.sum(x, 0)


@jit
def sum_rows_by_halves(x, LEVELS: tl.constexpr):
    """The sum of each row of x [R, 2^LEVELS], in an order that does not depend on R or on the number of warps."""
    for _level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.sum(x, 1)


@jit
def rms_norm_kernel(x, w, out, SIZE, eps, LEVELS: tl.constexpr):
    """`rms_norm` with one program per row."""
    d = tl.arange(0, 2**LEVELS)
    at = tl.program_id(0) * SIZE + d
    row = tl.load(x + at, mask=d < SIZE, other=0).to(tl.float32)
    weight = tl.load(w + d, mask=d < SIZE, other=0).to(tl.float32)
    row = (row * tl.rsqrt(sum_by_halves(row * row, LEVELS) / SIZE + eps)).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (row * weight).to(out.dtype.element_ty), mask=d < SIZE)


def row_options(size: int) -> dict[str, int]:
    """Constants and compiler options of a kernel whose programs norm a row of `size` values each."""
    levels = (size - 1).bit_length()
    return dict(LEVELS=levels, num_warps=min(16, max(4, 2**levels // 1024)), **EXACT)


def _norm_triton(out, x, weight, eps) -> None:
    size = x.shape[-1]
    rms_norm_kernel[x.numel() // size,](x.contiguous(), weight, out, size, eps, **row_options(size))


@operation(
    "rms_norm", "rms_norm", _norm_triton, lambda x, weight, eps: x.new_empty(x.shape), at=(0, 1),
    cpu=lambda x, weight, eps: torch.ops.eaglet_cpu.rms_norm.default(x.contiguous(), weight, eps),
    cpu_problem=lambda x, weight, eps: "a row is not a multiple of 8 values" if x.shape[-1] % 8 else "",
    problem=lambda x, weight, eps: "" if weight.dtype == x.dtype else "the weight has another dtype",
)  # fmt: skip
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis of x [..., H], with weight [H].

    The variance is computed in float32 or wider, and x is rounded before the weight, as LLaMA does it. A row
    does not depend on other rows. With gradients, plain code always runs.
    """
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)  # Nothing is rounded in between.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@jit
def turn_rows(
    qkv, rows, live, head, cos, sin, kv, kv_scales, slots, q_weight, k_weight, out, v_offset, T, S, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, HD: tl.constexpr, LEVELS: tl.constexpr, QK_NORM: tl.constexpr,
    INT8: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Norm one head of the rows (b T + t) [R] if QK_NORM, rotate it, and write it to q, the key cache or the value cache.
    Values are not rotated, and normed if QK_NORM is 2.

    Other programs of the same launch may have written qkv. The bits do not depend on R or on the number of warps.
    """
    d = tl.arange(0, 2**LEVELS)
    ok = live[:, None] & (d < HD)[None, :]
    b = rows // T
    t = rows % T
    at = qkv + ((rows * (HQ + 2 * HKV) + head) * HD)[:, None]
    x = tl.load(at + d[None, :], mask=ok, other=0, cache_modifier=".cg")
    DT: tl.constexpr = qkv.dtype.element_ty
    slot = tl.load(slots + rows, mask=live, other=0)
    of_all = (0 if POOLED else b * HKV) + (head - HQ) % max(HKV, 1)  # the head among those of all sequences
    cache = (of_all.to(tl.int64) * S + slot) * (HD + 4 * INT8)
    if head >= HQ + HKV:
        value = x.to(tl.float32)
        if QK_NORM == 2:
            inverse = tl.rsqrt(sum_rows_by_halves(value * value, LEVELS) / HD + eps)[:, None]
            value = (value * inverse).to(DT).to(tl.float32)
        store_rows(kv, kv_scales, cache + v_offset, d, value, live, HD, INT8)
    else:
        half: tl.constexpr = HD // 2
        other = tl.where(d < half, d + half, d - half)
        a = x.to(tl.float32)
        c = tl.load(at + other[None, :], mask=ok, other=0, cache_modifier=".cg").to(tl.float32)
        if QK_NORM:
            w = q_weight if head < HQ else k_weight
            inverse = tl.rsqrt(sum_rows_by_halves(a * a, LEVELS) / HD + eps)[:, None]
            wa = tl.load(w + d, mask=d < HD, other=0).to(tl.float32)[None, :]
            wc = tl.load(w + other, mask=d < HD, other=0).to(tl.float32)[None, :]
            a = ((a * inverse).to(DT).to(tl.float32) * wa).to(DT).to(tl.float32)
            c = ((c * inverse).to(DT).to(tl.float32) * wc).to(DT).to(tl.float32)
        angle = (rows * half)[:, None] + (d % half)[None, :]
        co = tl.load(cos + angle, mask=ok, other=0).to(tl.float32)
        si = tl.load(sin + angle, mask=ok, other=0).to(tl.float32)
        y = tl.fma(a, co, tl.where(d < half, -1.0, 1.0)[None, :] * c * si)  # rounded twice, wherever it is compiled
        if head < HQ:
            to = ((b * HQ + head) * T + t) * HD
            tl.store(out + to[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=ok)
        else:
            y = tl.where(ok, y.to(qkv.dtype.element_ty).to(tl.float32), 0.0)
            store_rows(kv, kv_scales, cache, d, y, live, HD, INT8)


@jit
def rope_kernel(
    qkv, cos, sin, kv, kv_scales, slots, q_weight, k_weight, out, arrived, tiles, v_offset, T, S, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, HD: tl.constexpr, LEVELS: tl.constexpr, QK_NORM: tl.constexpr,
    INT8: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """`turn_rows` with one program per head of one token. The first programs set a counter to zero.
    Grid (B T, HQ + 2 HKV)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    number = row * (HQ + 2 * HKV) + head
    tl.store(arrived + number, 0, mask=number < tiles)
    one = row + tl.arange(0, 1)
    turn_rows(qkv, one, one >= 0, head, cos, sin, kv, kv_scales, slots, q_weight, k_weight, out, v_offset, T, S, eps,
              HQ, HKV, HD, LEVELS, QK_NORM, INT8, POOLED)  # fmt: skip


def rope_constants(qkv: Tensor, kv: Tensor, norm: bool, value_norm: bool = False, shares: bool = False) -> dict:
    """The constants of `turn_rows` for qkv [B,T,Hq+2Hkv,hd] and the cache kv."""
    heads, dim, kv_heads = *qkv.shape[2:], 0 if shares else kv.shape[2]
    sizes = dict(HQ=heads - 2 * kv_heads, HKV=kv_heads, HD=dim, LEVELS=(dim - 1).bit_length())
    return sizes | dict(QK_NORM=norm + value_norm, INT8=kv.dtype == torch.int8, POOLED=kv.shape[1] == 1)


def rope_outputs(qkv: Tensor, kv: Tensor, shares: bool = False) -> tuple[Tensor, Tensor]:
    """Memory for q, and for a counter of every key head of a sequence."""
    B, T, heads, dim = qkv.shape
    kv_heads = kv.shape[2]
    query_heads = heads if shares else heads - 2 * kv_heads
    return qkv.new_empty(B, query_heads, T, dim), qkv.new_empty(B * kv_heads, dtype=torch.int32)


def _rope_triton(out, qkv, cos, sin, kv, slots, q_weight, k_weight, eps, value_norm, shares) -> None:
    B, T, heads, _ = qkv.shape
    qkv = qkv.contiguous()
    norm = q_weight is not None
    rope_kernel[B * T, heads](
        qkv, cos.contiguous(), sin.contiguous(), kv, scales_of(kv), slots.contiguous(),
        *(qkv if w is None else w for w in (q_weight, k_weight)), *out, out[1].numel(), kv.stride(0), T, kv.shape[3],
        eps, num_warps=1, **rope_constants(qkv, kv, norm, value_norm, shares), **EXACT,
    )  # fmt: skip


def _rope_cpu(qkv, cos, sin, kv, slots, *norm) -> tuple[Tensor, None]:
    rows = qkv.contiguous(), cos.contiguous(), sin.contiguous(), kv, slots.contiguous()
    return torch.ops.eaglet_cpu.rope_write_kv.default(*rows, *norm).transpose(1, 2), None


@operation(
    "rope_write_kv", "rope_write_kv", _rope_triton, lambda qkv, cos, sin, kv, *rest: rope_outputs(qkv, kv, rest[-1]),
    cpu=_rope_cpu, cpu_problem=lambda qkv, cos, sin, kv, *rest: cpu_problem(qkv, kv),
    problem=lambda qkv, cos, sin, kv, *rest: cache_problem(kv), mutates=("kv",), copies=True,
    # Inductor cannot fuse the bytes of the scales of an int8 cache.
    plain=lambda qkv, cos, sin, kv, *rest: kv.dtype != torch.int8,
)  # fmt: skip
def rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 0.0, value_norm: bool = False, shares: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k, write k and v into the cache in place, and return q [B,Hq,T,hd] and the counters at zero
    that `tree_attention` needs, of which C++ gives none. No host sync.

    qkv [B,T,Hq+2Hkv,hd], or [B,T,Hq,hd] if this layer shares the keys and values that another one wrote.
    cos, sin [B,T,hd/2] float32: dimension i is paired with i + hd/2.
    kv [2,B,Hkv,S,hd] or int8 [2,B,Hkv,S,hd+4] (`quantize_rows`), or [2,1,Hkv,S,...], which all sequences share: keys and
    values must each be contiguous.
    slots [B,T] int64: where the cache takes the rows.
    q_weight, k_weight [hd]: weights of an RMS norm of each head of q and k before they are rotated.
    value_norm: whether each head of v gets such a norm, too, without weights.
    """
    kv_heads = 0 if shares else kv.shape[2]
    q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), 2)
    if q_weight is not None:
        q = rms_norm.reference(q, q_weight, eps)
        k = k if shares else rms_norm.reference(k, k_weight, eps)
    if value_norm and not shares:
        v = rms_norm.reference(v, v.new_ones(v.shape[-1]), eps)
    # q and k turn together: first x cos, then each half gets the share of the other half in place. The usual
    # form, which rotates the halves into a new tensor, takes three times as many calls.
    x = torch.cat((q, k), 2) if q_weight is not None else qkv.narrow(2, 0, q.shape[2] + kv_heads)
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = x.unflatten(-1, (2, -1)) * cos[:, :, :, None]
    turned.select(3, 0).addcmul_(high, -sin)
    turned.select(3, 1).addcmul_(low, sin)
    q, k = turned.flatten(3).to(x.dtype).transpose(1, 2).split((q.shape[2], kv_heads), 1)
    if not shares:
        write_kv(kv, k, v.transpose(1, 2), slots)
    return q, qkv.new_zeros(len(qkv) * kv.shape[2], dtype=torch.int32)
