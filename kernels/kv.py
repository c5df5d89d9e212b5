"""The KV cache: rows in and out, quantized to int8 if the cache is int8, and the move of an accepted path."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import jit, operation, tl, triton

# Bytes of the float32 scale behind the hd codes of an int8 row. Moving a row moves its scale as well.
KV_SCALE = 4
CPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)  # of caches that the C++ kernels take


def quantize_rows(x: Tensor) -> Tensor:
    """Keys or values [..., hd] -> int8 rows [..., hd + 4]: codes, then a scale (the largest magnitude / 127).

    A row depends on itself alone, so speculative and plain decoding store the same rows. A row with a NaN or
    an infinity is read back as NaN.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / torch.where(scale == 0, 1, scale) + 0.5).floor().nan_to_num(0).to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), -1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_rows`: int8 [..., hd + 4] -> [..., hd] in `dtype`, in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    scale = rows[..., -KV_SCALE:].contiguous().view(torch.float32)
    return (rows[..., :-KV_SCALE].to(wide) * scale.to(wide)).to(dtype)


@jit
def store_rows(kv, kv_scales, at, d, y, live, HD: tl.constexpr, INT8: tl.constexpr):
    """Store key or value rows y [R, BLOCK] (fp32) at elements `at` [R] of the cache; if INT8, as `quantize_rows` does."""
    if INT8:
        scale = tl.max(tl.abs(y), 1) / 127
        y = tl.floor(y / tl.where(scale == 0, 1.0, scale)[:, None] + 0.5)
        y = tl.where(tl.abs(y) < 128, y, 0.0)
        tl.store(kv_scales + (at + HD) // 4, scale, mask=live)
    there = live[:, None] & (d < HD)[None, :]
    tl.store(kv + at[:, None] + d[None, :], y.to(kv.dtype.element_ty), mask=there)


@jit
def load_rows(kv, kv_scales, at, d, mask, DT: tl.constexpr, HD: tl.constexpr, INT8: tl.constexpr):
    """Columns d of the rows at elements `at` [...] of the cache -> [..., hd] in DT, zero where not mask."""
    there = tl.expand_dims(mask, -1) & (d < HD)
    rows = tl.load(kv + tl.expand_dims(at, -1) + d, mask=there, other=0)
    if INT8:
        scale = tl.load(kv_scales + (at + HD) // 4, mask=mask, other=0)
        rows = rows.to(tl.float32) * tl.expand_dims(scale, -1)
    return rows.to(DT)


def scales_of(kv: Tensor) -> Tensor:
    """The argument `kv_scales` of a kernel: the memory of an int8 cache read as float32. A cache of another
    dtype has no scales and takes their place itself."""
    return kv.view(torch.float32) if kv.dtype == torch.int8 else kv


def cache_problem(kv: Tensor) -> str:
    """Why kernels cannot use a layer's cache kv [2,B,Hkv,S,hd], or "". Keys and values must each be contiguous."""
    return "" if kv.select(0, 0).is_contiguous() else "the cache of one layer is not contiguous"


def cpu_problem(heads: Tensor, kv: Tensor) -> str:
    """Why C++ cannot use heads [..., hd] with the cache kv of one layer, or ""."""
    if heads.dtype != torch.float32 or kv.dtype not in CPU_DTYPES:
        return "the dtype is not float32, or the cache's is none of float32, float16, bfloat16 and int8"
    return "a head is not a multiple of 16 values" if heads.shape[-1] % 16 else cache_problem(kv)


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write the rows of one forward into the cache of one layer, in place.

    kv_layer [2,B,Hkv,S,hd], or int8 [...,hd+4], or [2,1,Hkv,S,hd], which all sequences share; k, v [B,Hkv,T,hd], which
    are cast to the dtype of the cache or quantized; slots [B,T] int64 in 0..S-1. The caller clamps slots to a trash row,
    the only row that may occur twice. No host sync, traceable.
    """
    rows = torch.stack((k, v))
    rows = quantize_rows(rows) if kv_layer.dtype == torch.int8 else rows.to(kv_layer.dtype)
    if kv_layer.shape[1] == 1:
        kv_layer.index_copy_(3, slots.flatten(), rows.transpose(1, 2).flatten(2, 3)[:, None])
    else:
        kv_layer.scatter_(3, slots[None, :, None, :, None].expand(rows.shape), rows)


@jit
def move_kernel(
    kv, source, target, BH, H, S, P, ROW, STRIDE, PP: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr
):
    """`commit_kv` for one head of one layer. Grid (L 2 B H,). All rows are read before any is written."""
    pid = tl.program_id(0)
    b = pid % BH // H
    p = tl.arange(0, PP)
    d = tl.arange(0, BLOCK)[None, :]
    there = p < P
    before = tl.load(source + b * P + p, mask=there, other=0)
    after = tl.load(target + b * P + p, mask=there, other=0)
    kv += (pid // BH).to(tl.int64) * STRIDE + (pid % (H if POOLED else BH)).to(tl.int64) * S * ROW
    mask = there[:, None] & (d < ROW)
    rows = tl.load(kv + before[:, None] * ROW + d, mask=mask)
    tl.debug_barrier()
    tl.store(kv + after[:, None] * ROW + d, rows, mask=mask & (after != before)[:, None])


def _move_triton(_none, kv, source, target) -> None:
    layers, _, _, heads, slots, row = kv.shape
    batch, count = source.shape
    wide = triton.next_power_of_2(count)
    move_kernel[layers * 2 * batch * heads,](
        kv, source.contiguous(), target.contiguous(), batch * heads, heads, slots, count, row, kv.stride(1),
        PP=wide, BLOCK=triton.next_power_of_2(row), POOLED=kv.shape[2] < batch, num_warps=4,
    )  # fmt: skip


def _move_problem(kv: Tensor, _source: Tensor, _target: Tensor) -> str:
    contiguous = kv.stride(0) == 2 * kv.stride(1) and not cache_problem(kv.select(0, 0))
    return "" if contiguous else "the cache is not contiguous"


@operation(
    "commit_kv", "commit", _move_triton, lambda kv, source, target: None, mutates=("kv",),
    problem=_move_problem, cpu=lambda *args: torch.ops.eaglet_cpu.commit_kv.default(*args),
    cpu_problem=lambda kv, *places: "" if kv.dtype in CPU_DTYPES and not _move_problem(kv, *places) else None, at=(1,),
)  # fmt: skip
def commit_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Move the rows of the accepted path to their final slots in all layers, in place.

    All rows are gathered before any is written, so source and target may overlap. kv [L,2,B,Hkv,S,hd], which may be
    the first rows of a larger batch, or [L,2,1,Hkv,S,hd], which all sequences share;
    source, target [B,P] int64 slots, with a fixed P (= D+1). A row past the accepted count should have the
    same slot in both, or the trash row as its target. No host sync.
    """
    layers, _, batch, heads, _, dim = kv.shape
    if batch == 1:
        kv.index_copy_(4, target.flatten(), kv.index_select(4, source.flatten()))
        return
    shape = (layers, 2, batch, heads, source.shape[1], dim)
    rows = kv.gather(4, source[None, None, :, None, :, None].expand(shape))
    kv.scatter_(4, target[None, None, :, None, :, None].expand(shape), rows)
