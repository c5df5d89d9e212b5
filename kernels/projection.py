"""The projection of queries, keys and values, with rotary positions and the write into the KV cache behind it."""

from typing import Any

import torch
from torch import Tensor

from kernels.backend import operation, use_triton
from kernels.kv import cache_problem, scales_of
from kernels.linear import launch_arguments, linear_kernel, packed_linear, planes_linear
from kernels.norm_rope import rope_constants, rope_outputs, rope_write_kv
from kernels.packing import PackedTensors, PackedWeight, from_parts, kernel_views
from kernels.tuned import SPLIT_M


def packed_linear_rope(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, head_dim: int, *turn: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rope_write_kv` of packed_linear(x [B,T,K], weight, bias) with all of its other arguments `turn`, in one launch
    for up to SPLIT_M rows. No host sync.

    Heads are turned by the programs that compute them, each of which has at most TILE_M rows to turn.
    """
    if weight.layout != "planes":
        return rope_write_kv(packed_linear(x, weight, bias).unflatten(-1, (-1, head_dim)), *turn)
    return planes_linear_rope(weight.reorder(x), *weight.parts(), bias, head_dim, *turn)


def _triton_linear_rope(out, x, tensors, numbers, bias, head_dim, *turn) -> tuple[Tensor, Tensor] | None:
    cos, sin, kv, slots, q_weight, k_weight, eps, value_norm, shares = turn
    # float32 activations are turned in a launch of their own, because a compiler may round the squares of a norm in
    # different ways. So are those of a long prompt, whose programs have too many rows to turn.
    apart = x.dtype == torch.float32 or x.shape[1] > SPLIT_M
    if apart or not use_triton("rope_write_kv", x, cache_problem(kv)):
        return planes_linear_rope.reference(x, tensors, numbers, bias, head_dim, *turn)
    weight, (B, T), norm = from_parts(tensors, numbers), x.shape[:2], q_weight is not None
    qkv = x.new_empty(B, T, weight.n // head_dim, head_dim)
    q, arrived = out
    heads = rope_constants(qkv, kv, norm, value_norm, shares)
    each = SPLIT_M // T  # sequences of a launch
    for b in range(0, B, each):
        one = slice(b, b + each)
        rows, counts = x[one].reshape(-1, weight.k).contiguous(), arrived.view(B, -1)[one]
        cache = kv if heads["POOLED"] else kv[:, one]
        grid, partial, constants = launch_arguments(rows, weight, 0, len(rows), norm)
        linear_kernel[grid](
            rows, *kernel_views(weight), rows if bias is None else bias, rows, qkv[one], q[one], qkv, partial,
            weight.counters, cos[one].contiguous(), sin[one].contiguous(), cache, scales_of(cache),
            slots[one].contiguous(), *(rows if w is None else w for w in (q_weight, k_weight)), counts, len(rows),
            weight.n, weight.k, weight.n, T, kv.shape[3], kv.stride(0), counts.numel(), eps, BIAS=bias is not None,
            RESIDUAL=False, TOPK=0, SPLIT=grid[2], SERIAL=False, **constants, **heads,
        )  # fmt: skip
    return None


def _linear_rope_shapes(x, tensors, numbers, bias, head_dim, cos, sin, kv, *turn) -> tuple[Tensor, Tensor]:
    return rope_outputs(x.new_empty(*x.shape[:2], from_parts(tensors, numbers).n // head_dim, head_dim), kv, turn[-1])


@operation("planes_linear_rope", "packed_linear", _triton_linear_rope, _linear_rope_shapes, mutates=("kv",))
def planes_linear_rope(
    x: Tensor, tensors: PackedTensors, numbers: list[int], bias: Tensor | None, head_dim: int, cos: Tensor, sin: Tensor,
    kv: Tensor, slots: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float = 0.0,
    value_norm: bool = False, shares: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`packed_linear_rope` of few rows for layout 'planes'."""
    qkv = planes_linear(x, tensors, numbers, bias, None, 0, False).unflatten(-1, (-1, head_dim))
    return torch.ops.eaglet.rope_write_kv(qkv, cos, sin, kv, slots, q_weight, k_weight, eps, value_norm, shares)
