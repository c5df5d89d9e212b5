"""The projection of queries, keys and values, with rotary positions and the write into the KV cache behind it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.backend import use_triton
from kernels.kv import cache_problem, scales_of
from kernels.linear import launch_arguments, linear_kernel, packed_linear
from kernels.norm_rope import rope_constants, rope_outputs, rope_write_kv
from kernels.packing import PackedWeight, kernel_views
from kernels.tuned import TILE_M, LinearConfig


def packed_linear_rope(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, head_dim: int, cos: Tensor, sin: Tensor, kv: Tensor,
    slots: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`rope_write_kv` of packed_linear(x [B,T,K], weight, bias), in one launch for up to TILE_M rows. No host sync.

    Heads are turned by the programs that compute them, each of which has few rows to turn. The bits do not depend on who
    turns them. More rows, a prompt's, would keep the last program of a head busy for longer than a launch takes.
    """
    turn = cos, sin, kv, slots, q_weight, k_weight, eps
    if weight.layout != "planes" or weight.correction is not None or math.prod(x.shape[:-1]) > TILE_M:
        return rope_write_kv(packed_linear(x, weight, bias).unflatten(-1, (-1, head_dim)), *turn)
    return torch.ops.eaglet.planes_linear_rope(
        weight.reorder(x), weight.weight, weight.scales, weight.counters, bias, weight.bits, weight.group_size, weight.n,
        weight.config[:4], weight.config.accumulate, head_dim, *turn,
    )  # fmt: skip


@torch.library.custom_op("eaglet::planes_linear_rope", mutates_args=("kv",))
def _planes_linear_rope(
    x: Tensor, words: Tensor, scales: Tensor | None, counters: Tensor, bias: Tensor | None, bits: int, group: int, n: int,
    config: list[int], accumulate: str, head_dim: int, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`packed_linear_rope` of few rows for layout 'planes'. float32 activations are turned in a launch of their own,
    because a compiler may round the squares of a norm in different ways."""
    B, T, k = x.shape
    tiling = LinearConfig(*config, accumulate)
    weight = PackedWeight("planes", bits, group, n, k, words, scales, counters=counters, config=tiling)
    ours = use_triton("packed_linear", x) and use_triton("rope_write_kv", x, cache_problem(kv))
    if not ours or x.dtype == torch.float32:
        qkv = packed_linear(x, weight, bias).unflatten(-1, (-1, head_dim))
        return torch.ops.eaglet.rope_write_kv(qkv, cos, sin, kv, slots, q_weight, k_weight, eps)
    rows = x.reshape(-1, k).contiguous()
    qkv = x.new_empty(B, T, n // head_dim, head_dim)
    q, arrived = rope_outputs(qkv, kv)
    norm = q_weight is not None
    grid, partial, constants = launch_arguments(rows, weight, False, len(rows))
    linear_kernel[grid](
        rows, *kernel_views(words, scales, bits), rows if bias is None else bias, rows, rows, qkv, q, qkv, partial,
        counters, cos.contiguous(), sin.contiguous(), kv, scales_of(kv), slots.contiguous(), q_weight if norm else rows,
        k_weight if norm else rows, arrived, len(rows), n, k, n, T, kv.shape[3], kv.stride(0), arrived.numel(), eps,
        BIAS=bias is not None, RESIDUAL=False, NORM=0, TOPK=0, SPLIT=grid[2], **constants,
        **rope_constants(qkv, kv, norm),
    )  # fmt: skip
    return q, arrived


@_planes_linear_rope.register_fake
def _(x, words, scales, counters, bias, bits, group, n, config, accumulate, head_dim, cos, sin, kv, *turn):
    return rope_outputs(x.new_empty(*x.shape[:2], n // head_dim, head_dim), kv)
