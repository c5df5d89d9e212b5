"""Mixture of experts: linear layers of which each token uses a few."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.backend import jit, operation, tl, triton, wait_for_the_kernel_before
from kernels.linear import epilogue, finish, launch_arguments, main_loop, packed_linear
from kernels.packing import PackedTensors, PackedWeight, dequantize, from_parts, kernel_views, panel_words
from kernels.tuned import unsplit


@jit
def expert_kernel(
    x, w, s, z, out, pairs, offsets, N, K, N_OUT, DIV, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr,
    NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The products of all experts in one launch. Grid (token tiles, row tiles, experts).

    `pairs` lists the (token, slot) pairs sorted by expert. Expert e owns pairs[offsets[e] : offsets[e + 1]],
    and pair p reads row p // DIV. Programs of idle experts end at once. The token tiles of one weight tile
    are neighbours in launch order, so its weights come from DRAM once.
    """
    wait_for_the_kernel_before(OVERLAP)
    e = tl.program_id(2)
    first = tl.load(offsets + e) + tl.program_id(0) * BT
    end = tl.load(offsets + e + 1)
    if first < end:
        at = first + tl.arange(0, BT)
        live = at < end
        pair = tl.load(pairs + at, mask=live, other=0)
        rows = pair // DIV
        rn = tl.program_id(1) * BN + tl.arange(0, BN)
        if BITS == 16:
            w += e.to(tl.int64) * N * K
        else:
            size = e.to(tl.int64) * tl.cdiv(N, 128) * tl.cdiv(K, 128) * (4 * panel_words(BITS, GROUP, ZEROS))
            w += size
            s += size * 2 if BITS == 4 else e * N
            z += size * 4
        acc, up = main_loop(x, w, s, z, rows, live, rn, 0, tl.cdiv(K, 128), K, N, N_OUT,
                            BN, BT, BITS, GROUP, ZEROS, GATED, EVEN_K, ACC, NATIVE)  # fmt: skip
        finish(acc, up, s, s, s, out, rn, pair, live, N, N_OUT, BITS, False, False, GATED, x.dtype.element_ty)


def packed_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: PackedWeight, down: PackedWeight
) -> Tensor:
    """Mixture-of-experts MLP: the sum of expert_weights[t, j] * MLP_{expert_ids[t, j]}(x[t]) in slot order j.

    x [T,H]; expert_ids [T,k] int64; expert_weights [T,k]; gate_up packs [E,2I,H], down packs [E,H,I]. Returns
    [T,H] in x's dtype, summed in float32 or wider. On Triton there is no host sync and the weights of an
    active expert are read once. Elsewhere the host reads which experts are active.
    """
    hidden = _experts(x, expert_ids, gate_up, True)
    y = _experts(hidden, expert_ids, down, False)
    weights = expert_weights.to(torch.promote_types(x.dtype, torch.float32))[..., None]
    out = y[:, 0] * weights[:, 0]
    for slot in range(1, expert_ids.shape[1]):
        out = out + y[:, slot] * weights[:, slot]
    return out.to(x.dtype)


def _experts(x: Tensor, expert_ids: Tensor, weight: PackedWeight, gated: bool) -> Tensor:
    apart = gated and weight.has_zeros  # as in `packed_linear`
    y = expert_linear(weight.reorder(x), expert_ids, *weight.parts(), gated and not apart)
    return epilogue(y, None, None, True) if apart else y


def _expert_rows(x: Tensor, slots: int) -> tuple[Tensor, int]:
    """x as rows [rows, K], and how many (token, slot) pairs read one row."""
    return x.reshape(-1, x.shape[-1]).contiguous(), slots if x.dim() == 2 else 1


def _triton_experts(x, expert_ids, tensors, numbers, gated) -> Tensor:
    weight = from_parts(tensors, numbers)
    # Neither the tile nor the split depends on the number of tokens.
    weight = replace(weight, config=unsplit(weight.config))
    experts, out = expert_ids.flatten(), _expert_shapes(x, expert_ids, tensors, numbers, gated)
    rows, shared = _expert_rows(x, expert_ids.shape[1])
    pairs = experts.argsort(stable=True).to(torch.int32)
    bounds = torch.arange(weight.weight.shape[0] + 1, device=x.device)
    offsets = (experts[None, :] < bounds[:, None]).sum(1, dtype=torch.int32)
    grid, _, constants = launch_arguments(rows, weight, gated, 16)
    expert_kernel[triton.cdiv(len(x), constants["BT"]), grid[1], weight.weight.shape[0]](
        rows, *kernel_views(weight), out, pairs, offsets, weight.n, weight.k, out.shape[-1], shared, **constants
    )
    return out


def _experts_problem(x, expert_ids, tensors, numbers, gated) -> str:
    layout = from_parts(tensors, numbers).layout
    return "" if layout == "planes" else f"weights are packed as '{layout}', for another backend"


def _expert_shapes(x, expert_ids, tensors, numbers, gated) -> Tensor:
    n = from_parts(tensors, numbers).n
    return x.new_empty(*expert_ids.shape, n // 2 if gated else n)


@operation("expert_linear", "packed_experts", _triton_experts, _expert_shapes, problem=_experts_problem, plain=False)
def expert_linear(x: Tensor, expert_ids: Tensor, tensors: PackedTensors, numbers: list[int], gated: bool) -> Tensor:
    """x [T,K] or [T,k,K] -> [T,k,N]: row (t, j) is expert expert_ids[t, j] applied to x[t] or x[t, j]."""
    weight, out = from_parts(tensors, numbers), _expert_shapes(x, expert_ids, tensors, numbers, gated)
    rows, shared = _expert_rows(x, expert_ids.shape[1])
    experts = expert_ids.flatten()
    for e in experts.unique().tolist():
        own = [None if t is None else t[e] for t in (weight.weight, weight.scales, weight.zeros)]
        pairs = (experts == e).nonzero().squeeze(1)
        one = replace(weight, weight=own[0], scales=own[1], zeros=own[2])
        if weight.layout == "tiles":
            y = packed_linear(rows[pairs // shared], one, gated=gated)
        else:
            y = epilogue(rows[pairs // shared] @ dequantize(one, x.dtype).mT, None, None, gated)
        out.view(-1, out.shape[-1])[pairs] = y
    return out
