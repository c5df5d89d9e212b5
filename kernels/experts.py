"""Mixture of experts: the router's choice, and linear layers of which each token uses a few."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import EXACT, jit, operation, tl, triton
from kernels.choice import NOTHING, rank_of
from kernels.linear import GATES, epilogue, finish, launch_arguments, packed_linear, product, product_rows
from kernels.norm_rope import row_options
from kernels.packing import PackedTensors, PackedWeight, dequantize, from_parts, kernel_views, panel_words
from kernels.panels import weight_words


class Routes(NamedTuple):
    """Which experts T tokens use, k each. Pair t k + j is slot j of token t."""

    weights: Tensor  # [T, k] of the experts, in the dtype of the router's logits
    ids: Tensor  # [T, k] int64
    pairs: Tensor  # [T k] int32, ordered by expert
    used: Tensor  # [E] int32: the experts that have pairs, and behind them the idle ones
    offsets: Tensor  # [E + 1] int32: expert used[i] has pairs[offsets[i] : offsets[i + 1]]


@jit
def sort_pairs_kernel(ids, pairs, used, offsets, P, E, EP: tl.constexpr, BLOCK: tl.constexpr):
    """`Routes` from ids [P], by counting: by one program, or at the end of the only one of `route_kernel`."""
    e = tl.arange(0, EP)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((EP,), tl.int32)
    for start in range(0, P, BLOCK):
        own = tl.load(ids + start + lane, mask=start + lane < P, other=-1)
        counts += tl.sum((own[:, None] == e[None, :]).to(tl.int32), 0)
    first = tl.cumsum(counts, 0) - counts
    busy = (counts > 0).to(tl.int32)
    before = tl.cumsum(busy, 0) - busy
    place = tl.where(counts > 0, before, tl.sum(busy, 0) + e - before)
    tl.store(used + place, e, mask=e < E)
    tl.store(offsets + place, tl.where(counts > 0, first, P), mask=e < E)
    tl.store(offsets + E, P)
    for start in range(0, P, BLOCK):
        own = tl.load(ids + start + lane, mask=start + lane < P, other=-1)
        mine = (own[:, None] == e[None, :]).to(tl.int32)
        to = tl.sum(mine * (first[None, :] + tl.cumsum(mine, 0) - mine), 1)
        tl.store(pairs + to, start + lane, mask=start + lane < P)
        first += tl.sum(mine, 0)


# M is not specialized: the number of tokens must not choose the instructions that add.
@(triton.jit(do_not_specialize=["M"]) if triton else jit)
def route_kernel(
    logits, weights, ids, pairs, used, offsets, M, E, K, EP: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, NORMALISED: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """`choose_experts` of R rows, whatever M is. With SORT, where one program does all rows, it sorts the pairs, too."""
    e = tl.arange(0, EP)
    k = tl.arange(0, KP)
    r = tl.program_id(0) * R + tl.arange(0, R)
    live = r < M
    z = tl.load(logits + r[:, None] * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=float("-inf"))
    z = z.to(tl.float32)
    share = tl.exp(z - tl.max(z, 1)[:, None])
    share /= tl.sum(share, 1)[:, None]
    rank = tl.where((e < E)[None, :], rank_of(z, e[None, :]), NOTHING)
    found = tl.zeros((R, KP), tl.float32)
    for i in range(K):
        best = tl.max(rank, 1)
        tl.store(ids + r * K + i, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=live)
        chosen = rank == best[:, None]
        found = tl.where(k[None, :] == i, tl.sum(tl.where(chosen, share, 0.0), 1)[:, None], found)
        rank = tl.where(chosen, NOTHING, rank)
    if NORMALISED:
        found /= tl.sum(found, 1)[:, None]
    at = r[:, None] * K + k[None, :]
    tl.store(weights + at, found.to(weights.dtype.element_ty), mask=live[:, None] & (k < K)[None, :])
    if SORT:
        tl.debug_barrier()
        sort_pairs_kernel(ids, pairs, used, offsets, M * K, E, EP, BLOCK)


def choose_experts(logits: Tensor, count: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The weights of the `count` best experts of each row, in the dtype of the logits [T,E], and their ids int64, both
    [T,count]. The softmax is computed in float32. Of equal logits the lower id comes first."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True) if normalised else weights).to(logits.dtype), ids


def sort_pairs(weights: Tensor, ids: Tensor, experts: int) -> Routes:
    """The routes of tokens that use the experts ids [T,k] int64 of so many with the weights [T,k]."""
    flat = ids.flatten()
    counts = (flat == torch.arange(experts, device=ids.device)[:, None]).sum(1)
    used = (counts == 0).to(torch.int32).argsort(stable=True)
    offsets = torch.cat((counts.new_zeros(1), counts[used].cumsum(0))).to(torch.int32)
    return Routes(weights, ids, flat.argsort(stable=True).to(torch.int32), used.to(torch.int32), offsets)


def _triton_route(routes, logits, count, normalised) -> None:
    logits, (T, E) = logits.contiguous(), logits.shape
    wide = max(2, triton.next_power_of_2(E))
    rows, block = max(1, min(64, 2048 // wide)), max(16, 4096 // wide)
    tables = routes.ids, routes.pairs, routes.used, routes.offsets
    grid = triton.cdiv(T, rows)
    route_kernel[grid,](
        logits, routes.weights, *tables, T, E, count, EP=wide, KP=triton.next_power_of_2(count), R=rows, BLOCK=block,
        NORMALISED=normalised, SORT=grid == 1, **EXACT,
    )  # fmt: skip
    if grid > 1:
        sort_pairs_kernel[1,](*tables, T * count, E, EP=wide, BLOCK=block)


def _route_shapes(logits, count, normalised) -> Routes:
    T, E = logits.shape
    ids, few = logits.new_empty(T, count, dtype=torch.int64), dict(dtype=torch.int32)
    lists = (logits.new_empty(size, **few) for size in (T * count, E, E + 1))
    return Routes(logits.new_empty(T, count), ids, *lists)


@operation("route", "packed_experts", _triton_route, _route_shapes)
def route(logits: Tensor, count: int, normalised: bool) -> Routes:
    """The `count` experts that each row of the router's logits [T,E] uses (`choose_experts`). No host sync."""
    return sort_pairs(*choose_experts(logits, count, normalised), logits.shape[1])


@jit
def expert_kernel(
    x, w, s, z, out, pairs, used, offsets, N, K, N_OUT, DIV, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    GATED: tl.constexpr, FORMS: tl.constexpr, EVEN_K: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    ACC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The products of all experts in one launch. Grid (token tiles, row tiles, experts in use at most).

    Pair p of `Routes` reads row p // DIV. Programs of idle experts end at once. The token tiles of one weight tile
    are neighbours in launch order, so its weights come from DRAM once.
    """
    place = tl.program_id(2)
    first = tl.load(offsets + place) + tl.program_id(0) * BT
    end = tl.load(offsets + place + 1)
    if first < end:
        e = tl.load(used + place)
        at = first + tl.arange(0, BT)
        live = at < end
        pair = tl.load(pairs + at, mask=live, other=0)
        rows = pair // DIV
        tile = tl.program_id(1)
        rn = product_rows(tile, N_OUT, BN, GATED)
        if len(FORMS) > 0:
            size = e.to(tl.int64) * weight_words(N, K, FORMS)
            w += size
            s += size * 2
        elif BITS == 16:
            w += e.to(tl.int64) * N * K
        else:
            size = e.to(tl.int64) * tl.cdiv(N, 128) * tl.cdiv(K, 128) * (4 * panel_words(BITS, GROUP, ZEROS))
            w += size
            s += size * 2 if BITS == 4 else e * N
            z += size * 4
        acc = product(x, w, s, z, rows, live, rn, tile, 0, tl.cdiv(K, 128), K, N, BITS, GROUP, ZEROS, FORMS,
                      EVEN_K, ACC, NATIVE)  # fmt: skip
        finish(acc, s, s, s, out, tile, rn, pair, live, N, N_OUT, BITS, False, False, GATED, x.dtype.element_ty)


@jit
def mix_kernel(y, weights, residual, out, SIZE, K, LEVELS: tl.constexpr, RESIDUAL: tl.constexpr):
    """`mix` of one row."""
    row = tl.program_id(0)
    DT: tl.constexpr = out.dtype.element_ty
    d = tl.arange(0, 2**LEVELS)
    at = row * SIZE + d
    total = tl.zeros((2**LEVELS,), tl.float32)
    for j in range(K):
        part = tl.load(y + (row * K + j) * SIZE + d, mask=d < SIZE, other=0).to(tl.float32)
        total += tl.load(weights + row * K + j).to(tl.float32) * part
    total = total.to(DT)
    if RESIDUAL:
        total = (total.to(tl.float32) + tl.load(residual + at, mask=d < SIZE, other=0).to(tl.float32)).to(DT)
    tl.store(out + at, total, mask=d < SIZE)


def _triton_mix(out, y, weights, residual) -> None:
    T, k, size = y.shape
    mix_kernel[T,](
        y.contiguous(), weights.contiguous(), out if residual is None else residual.contiguous(), out, size, k,
        RESIDUAL=residual is not None, **row_options(size),
    )  # fmt: skip


@operation("mix", "packed_experts", _triton_mix, lambda y, *rest: y.new_empty(len(y), y.shape[-1]))
def mix(y: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """The sum of weights [T,k] * y [T,k,N] in slot order, in float32 or wider, rounded to y's dtype, + residual [T,N]."""
    factors = weights.to(torch.promote_types(y.dtype, torch.float32))[..., None]
    out = y[:, 0] * factors[:, 0]
    for slot in range(1, y.shape[1]):
        out = out + y[:, slot] * factors[:, slot]
    out = out.to(y.dtype)
    return out if residual is None else residual + out


def packed_experts(
    x: Tensor, routes: Routes, gate_up: PackedWeight, down: PackedWeight, residual: Tensor | None = None, gated: int = 1,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Mixture-of-experts MLP: `mix` of MLP_e(x[t]) over the experts e that token t uses.

    x [T,H]; gate_up packs [E,2I,H], down packs [E,H,I]; biases [E,2I] and [E,H]; gated: one of GATES. Returns [T,H] in
    x's dtype. On Triton there is no host sync, and of each expert in use the weights are read once.
    Elsewhere the host reads which experts are in use.
    """
    hidden = _experts(x, routes, gate_up, gated, biases[0])
    return mix(_experts(hidden, routes, down, 0, biases[1]), routes.weights, residual)


def _experts(x: Tensor, routes: Routes, weight: PackedWeight, gated: int, bias: Tensor | None) -> Tensor:
    # as in `packed_linear`
    apart = gated and (len(weight.forms) > 1 or bias is not None or gated == GATES["swiglu_clamped"])
    y = expert_linear(weight.reorder(x), routes, *weight.parts(), 0 if apart else gated)
    if bias is None and not apart:
        return y
    return epilogue(y, None if bias is None else bias[routes.ids], None, gated if apart else 0)


def _expert_rows(x: Tensor, slots: int) -> tuple[Tensor, int]:
    """x as rows [rows, K], and how many (token, slot) pairs read one row."""
    return x.reshape(-1, x.shape[-1]).contiguous(), slots if x.dim() == 2 else 1


def _triton_experts(out, x, routes, tensors, numbers, gated) -> None:
    weight = from_parts(tensors, numbers)
    # The experts are tiles enough without splits. Nor does the tile depend on the number of tokens.
    weight = replace(weight, config=weight.config._replace(split_k=1, wide_n=0, wide_warps=0))
    rows, shared = _expert_rows(x, routes.ids.shape[1])
    grid, _, constants = launch_arguments(rows, weight, gated, 16)
    most = min(weight.weight.shape[0], routes.ids.numel())
    expert_kernel[triton.cdiv(len(x), constants["BT"]), grid[1], most](
        rows, *kernel_views(weight), out, routes.pairs, routes.used, routes.offsets, weight.n, weight.k, out.shape[-1],
        shared, **constants,
    )  # fmt: skip


def _experts_problem(x, routes, tensors, numbers, gated) -> str:
    layout = from_parts(tensors, numbers).layout
    return "" if layout == "planes" else f"weights are packed as '{layout}', for another backend"


def _expert_shapes(x, routes, tensors, numbers, gated) -> Tensor:
    n = from_parts(tensors, numbers).n
    return x.new_empty(*routes.ids.shape, n // 2 if gated else n)


@operation("expert_linear", "packed_experts", _triton_experts, _expert_shapes, problem=_experts_problem, plain=False)
def expert_linear(x: Tensor, routes: Routes, tensors: PackedTensors, numbers: list[int], gated: int) -> Tensor:
    """x [T,K] or [T,k,K] -> [T,k,N]: row (t, j) is expert routes.ids[t, j] applied to x[t] or x[t, j]."""
    weight, out = from_parts(tensors, numbers), _expert_shapes(x, routes, tensors, numbers, gated)
    rows, shared = _expert_rows(x, routes.ids.shape[1])
    offsets = routes.offsets.tolist()
    for e, first, end in zip(routes.used.tolist(), offsets, offsets[1:], strict=False):
        if first == end:
            break  # only idle experts are left
        one, pairs = weight.expert(e), routes.pairs[first:end].long()
        if weight.layout == "tiles":
            y = packed_linear(rows[pairs // shared], one, gated=gated)
        else:
            y = epilogue(rows[pairs // shared] @ dequantize(one, x.dtype).mT, None, None, gated)
        out.view(-1, out.shape[-1])[pairs] = y
    return out
