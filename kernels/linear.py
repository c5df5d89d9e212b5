"""Quantized linear layers: x @ W^T with its epilogue, and the top-k of a language-model head.

In our kernel the bits of a row depend neither on the other rows nor on their number M, so that verification
and plain decoding compute the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.cpu as cpu
from kernels.backend import EXACT, dot, jit, native, operation, round_activations, tl, triton, use_cpu, use_triton
from kernels.norm_rope import turn_rows
from kernels.packing import PackedTensors, PackedWeight, decode, dequantize, from_parts, kernel_views, panel_words
from kernels.panels import kernel_forms, panel_sums
from kernels.topk import merge_topk
from kernels.tuned import SMALL_M, SPLIT_M, TILE_M

# What may gate a product whose second half is multiplied with an activation of the first: its number in the kernels.
# The third is gpt-oss's, of which no kernel is the epilogue.
GATES = {"silu": 1, "gelu_tanh": 2, "swiglu_clamped": 3}


@jit
def _row_places(rn, K, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """Where rows rn of a weight, their first scales and their first zero points lie, in elements of each
    (`kernels.packing` describes the layout). Placeholders stand for what the weight lacks."""
    if BITS == 16:
        return rn * K, rn, rn
    else:
        SIZE: tl.constexpr = panel_words(BITS, GROUP, ZEROS)
        row = rn % 32
        panel = rn // 128 * (tl.cdiv(K, 128) * 4 * SIZE) + rn % 128 // 32 * SIZE
        zero = (panel + 512 + 16 * (128 // GROUP)) * 4 + row if ZEROS else row
        return panel + row * (4 * BITS), (panel + 512) * 2 + row, zero


@jit
def _group_rows(s, rows, block, GROUP: tl.constexpr, STRIDE: tl.constexpr, USED: tl.constexpr):
    """The 1, 2 or 4 rows of scales (or zeros) of one K block, as four values. Not USED: placeholders.

    They are loaded two turns before they are used, because loads of 2 bytes cannot be asynchronous copies.
    """
    if USED:
        COUNT: tl.constexpr = 128 // GROUP
        at = s + block * STRIDE + rows
        a = tl.load(at)
        b = tl.load(at + 32) if COUNT > 1 else a
        c = tl.load(at + 64) if COUNT > 2 else a
        d = tl.load(at + 96) if COUNT > 2 else a
        return a, b, c, d
    else:
        return rows, rows, rows, rows


@jit
def _wide(scales, ACC: tl.constexpr, USED: tl.constexpr):
    """What `_group_rows` loaded, in float32. Codes whose sums are fp16 are divided by 16, and scales make up for it."""
    if USED:
        factor: tl.constexpr = 16.0 if ACC == tl.float16 else 1.0
        a, b = scales[0].to(tl.float32) * factor, scales[1].to(tl.float32) * factor
        return a, b, scales[2].to(tl.float32) * factor, scales[3].to(tl.float32) * factor
    else:
        return scales


@jit
def _multiply_block(
    acc, w, scales, zeros, x, rows, live, at, b, K, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr, ACC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc[BN, BT] += W @ x[rows]^T over K block b, for the weight rows that begin at `at`. Tokens are the narrow
    side N of the matrix instruction, because there are few of them."""
    DT: tl.constexpr = x.dtype.element_ty
    PLANES: tl.constexpr = 32 // BITS if BITS < 16 else 1
    KP: tl.constexpr = 128 // PLANES
    STRIDE: tl.constexpr = 128 if BITS == 16 else 4 * panel_words(BITS, GROUP, ZEROS)
    kp = tl.arange(0, KP)
    wp = w + at[:, None] + (b * STRIDE + kp)[None, :]
    if EVEN_K or BITS < 16:
        words = tl.load(wp, eviction_policy="evict_first")
    else:
        words = tl.load(wp, mask=(b * 128 + kp < K)[None, :], other=0, eviction_policy="evict_first")
    SMALL: tl.constexpr = BITS == 4 and ACC == tl.float16
    q = decode(words, BITS, DT, NATIVE, SMALL) if BITS < 16 else (words,)
    part = acc
    for p in tl.static_range(PLANES):
        k = b * 128 + p * KP + kp
        mask = live[None, :] if EVEN_K else live[None, :] & (k < K)[:, None]
        xp = tl.load(x + rows[None, :] * K + k[:, None], mask=mask, other=0, eviction_policy="evict_last")
        if BITS != 4:  # One scale per output row is applied at the end.
            part = dot(q[p], xp, part, NATIVE)
        else:
            if p * KP % GROUP == 0:
                part = tl.zeros(acc.shape, ACC)
            a = q[p]
            if ZEROS:  # Exact: these are small integers.
                zero = (zeros[p * KP // GROUP].to(tl.float32) - 8) * (0.0625 if SMALL else 1.0)
                a = a - zero.to(DT)[:, None] if NATIVE else (a.to(tl.float32) - zero[:, None]).to(DT)
            part = dot(a, xp, part, NATIVE)
            if (p + 1) * KP % GROUP == 0:  # Each group is added up in fp32.
                acc = tl.fma(part.to(tl.float32), scales[p * KP // GROUP][:, None], acc)
    return acc if BITS == 4 else part


@jit
def product_rows(tile, N_OUT, BN: tl.constexpr, GATED: tl.constexpr):
    """The weight rows that a tile of BN output columns multiplies.

    If GATED these are 2 BN: 8 rows of the gate, the 8 rows of up that belong to them, the next 8 of the gate and so on.
    In the result of a matrix instruction rows i and i + 8 lie in one thread, so that `finish` finds them together.
    """
    if GATED:
        i = tl.arange(0, 2 * BN)
        return tile * BN + i // 16 * 8 + i % 8 + i // 8 % 2 * N_OUT
    else:
        return tile * BN + tl.arange(0, BN)


@jit
def main_loop(
    x, w, s, z, rows, live, rn, first, last, K, N, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr, ACC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The products of weight rows rn with x[rows] over the K blocks [first, last).

    s and z: the scales and the zero points of int4, which are the weight itself, seen as fp16 and as bytes.
    """
    FOUR: tl.constexpr = BITS == 4
    SIZE: tl.constexpr = panel_words(BITS, GROUP, ZEROS)
    # Rows past the end are read as the last row. Their products are not stored.
    at, s_at, z_at = _row_places(tl.minimum(rn, N - 1), K, BITS, GROUP, ZEROS)
    acc = tl.zeros((rn.shape[0], rows.shape[0]), tl.float32)
    end = last - 1
    scales = _wide(_group_rows(s, s_at, first, GROUP, 8 * SIZE, FOUR), ACC, FOUR)
    zeros = _group_rows(z, z_at, first, GROUP, 16 * SIZE, ZEROS)
    next_scales = _group_rows(s, s_at, tl.minimum(first + 1, end), GROUP, 8 * SIZE, FOUR)
    for b in range(first, last):
        loaded = _group_rows(s, s_at, tl.minimum(b + 2, end), GROUP, 8 * SIZE, FOUR)
        zeros_b = zeros
        zeros = _group_rows(z, z_at, tl.minimum(b + 1, end), GROUP, 16 * SIZE, ZEROS)
        acc = _multiply_block(acc, w, scales, zeros_b, x, rows, live, at, b, K,
                              BITS, GROUP, ZEROS, EVEN_K, ACC, NATIVE)  # fmt: skip
        # Triton makes no asynchronous copies in a loop that hands a value on unchanged. So it is widened here.
        scales = _wide(next_scales, ACC, FOUR)
        next_scales = loaded
    return acc


@jit
def finish(
    acc, s, bias, residual, out, tile, rn, out_rows, live, N, N_OUT, BITS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, GATED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The epilogue: scale of a weight row, bias, gate, residual. All in fp32, rounded once to DT.

    acc: the products of weight rows rn, which are the `product_rows` of this tile.
    """
    if BITS == 8:
        acc *= tl.load(s + rn, mask=rn < N, other=0).to(tl.float32)[:, None]
    if BIAS:
        acc += tl.load(bias + rn, mask=rn < N, other=0).to(tl.float32)[:, None]
    if GATED:
        BN: tl.constexpr = acc.shape[0] // 2
        BT: tl.constexpr = acc.shape[1]
        gate, up = tl.split(acc.reshape(BN // 8, 2, 8, BT).permute(0, 2, 3, 1))
        if GATED == 1:
            acc = gate / (1 + tl.exp(-gate)) * up
        else:  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
            acc = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
        acc = acc.reshape(BN, BT)
        rn = product_rows(tile, N_OUT, BN, False)
    at = out_rows[None, :] * N_OUT + rn[:, None]
    mask = live[None, :] & (rn < N_OUT)[:, None]
    if RESIDUAL:
        acc += tl.load(residual + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, acc.to(DT).to(out.dtype.element_ty), mask=mask)


@jit
def _finish_topk(acc, x, s, out, ids, tile, rn, rm, live, M, N, BITS: tl.constexpr, TOPK: tl.constexpr):
    """The epilogue of a language-model head, for one tile of its vocabulary.

    For each token it stores the TOPK best logits, the maximum and the sum of exp(logit - maximum) in out
    [tiles, M, TOPK + 2], and the token ids of the best in ids [tiles, M, TOPK]. Logits are rounded like
    stored ones. NaN counts as -inf. Of equal logits the lower id comes first.
    """
    ok = rn < N
    if BITS == 8:
        acc *= tl.load(s + rn, mask=ok, other=0).to(tl.float32)[:, None]
    acc = acc.to(x.dtype.element_ty).to(tl.float32)
    acc = tl.where(ok[:, None] & (acc == acc), acc, float("-inf"))
    row = tile * M + rm
    top = tl.max(acc, 0)
    total = tl.sum(tl.exp(acc - tl.where(top == float("-inf"), 0.0, top)[None, :]), 0)
    tl.store(out + row * (TOPK + 2) + TOPK, top, mask=live)
    tl.store(out + row * (TOPK + 2) + TOPK + 1, total, mask=live)
    free = ok[:, None] & live[None, :]
    for i in range(TOPK):
        best = tl.max(tl.where(free, acc, float("-inf")), 0)
        which = tl.min(tl.where(free & (acc == best[None, :]), rn[:, None], 2147483647), 0)
        tl.store(out + row * (TOPK + 2) + i, best, mask=live)
        tl.store(ids + row * TOPK + i, which, mask=live)
        free = free & (rn[:, None] != which[None, :])


@jit
def _by_threads(sums):
    """Sums [ROWS, BT] as one row of numbers, in the order in which the threads of a matrix instruction hold them: 4 rows
    of a token in each. Partial sums in any other order would go through shared memory, one after the other."""
    HALF: tl.constexpr = sums.shape[0] // 32
    parts = sums.reshape(2, HALF, 2, 8, sums.shape[1] // 8, 4, 2).permute(4, 6, 1, 3, 5, 0, 2)
    return parts.reshape(sums.shape[0] * sums.shape[1])


@jit
def _by_rows(numbers, ROWS: tl.constexpr, BT: tl.constexpr):
    """The inverse of `_by_threads`."""
    return numbers.reshape(BT // 8, 2, ROWS // 32, 8, 4, 2, 2).permute(5, 2, 6, 3, 0, 4, 1).reshape(ROWS, BT)


@jit
def product(
    x, w, s, z, rm, live, rn, tile, first, last, K, N, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    FORMS: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The products of weight rows rn, those of a tile, with x[rm] over the K blocks [first, last)."""
    if len(FORMS) > 0:
        return panel_sums(x, w, s, rm, live, rn, tile, first, last, K, N, FORMS, EVEN_K, NATIVE)
    else:
        return main_loop(x, w, s, z, rm, live, rn, first, last, K, N, BITS, GROUP, ZEROS, EVEN_K, ACC, NATIVE)


# M and T are not specialized: one binary per token tile also serves M = 1.
@(triton.jit(do_not_specialize=["M", "T"]) if triton else jit)
def linear_kernel(
    x, w, s, z, bias, residual, out, turned, ids, part, count, cos, sin, kv, kv_scales, slots, q_weight, k_weight,
    arrived, M, N, K, N_OUT, T, S, v_offset, arrivals, eps, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, TOPK: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, HD: tl.constexpr, LEVELS: tl.constexpr,
    QK_NORM: tl.constexpr, INT8: tl.constexpr, POOLED: tl.constexpr, FORMS: tl.constexpr, EVEN_K: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, SPLIT: tl.constexpr, SERIAL: tl.constexpr, ACC: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """out[M, N_OUT], or the best of it if TOPK > 0 (`_finish_topk`). Grid (token tiles, row tiles, SPLIT).

    The token tiles of one weight tile are neighbours in launch order, so its weights come from DRAM once. Programs that
    share a sum store their parts. The one that ends last adds them in split order. It also resets the counter, so that
    the buffer is ready for the next launch or the next replay of a graph. If SERIAL, where there are rows enough to keep
    the GPU busy, one program makes all parts of a sum and adds them in the same order.

    With HD > 0 the weight is that of queries, keys and values. Then the program that stores the last columns of a head
    also turns this head of its token tile (`turn_rows`), with q in `turned`, and the first program sets the counters
    `arrived` to zero.
    """
    slab = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    rn = product_rows(tile, N_OUT, BN, GATED)
    rm = slab * BT + tl.arange(0, BT)
    live = rm < M
    finished = count + tl.num_programs(0) * tl.num_programs(1)  # behind the counters of the sums
    blocks = tl.cdiv(K, 128)
    if HD > 0:
        if slab + tile + split == 0:
            for i in range(0, arrivals, 128):
                tl.store(arrived + i + tl.arange(0, 128), 0, mask=i + tl.arange(0, 128) < arrivals)
    if SERIAL:
        acc = tl.zeros((rn.shape[0], BT), tl.float32)
        for j in range(SPLIT):
            acc += product(x, w, s, z, rm, live, rn, tile, blocks * j // SPLIT, blocks * (j + 1) // SPLIT, K, N,
                           BITS, GROUP, ZEROS, FORMS, EVEN_K, ACC, NATIVE)  # fmt: skip
    else:
        acc = product(x, w, s, z, rm, live, rn, tile, blocks * split // SPLIT, blocks * (split + 1) // SPLIT, K, N,
                      BITS, GROUP, ZEROS, FORMS, EVEN_K, ACC, NATIVE)  # fmt: skip
    if SPLIT > 1 and not SERIAL:
        ROWS: tl.constexpr = rn.shape[0]
        FLIGHT: tl.constexpr = min(SPLIT, 4 if BT == 32 else max(1, 64 // BT))  # parts that are loaded together
        i = tl.arange(0, ROWS * BT)
        token = slab * BT + i // (8 * ROWS) * 8 + i // 4 % 4 * 2 + i // (4 * ROWS) % 2  # as `_by_threads` orders them
        place = slab * tl.num_programs(1) + tile
        count += place
        part += place * (SPLIT * ROWS * BT) + i
        tl.store(part + split * (ROWS * BT), _by_threads(acc), mask=token < M)
        tl.debug_barrier()
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        tl.store(count, 0)
        total = tl.zeros((ROWS * BT,), tl.float32)
        for begin in range(0, SPLIT, FLIGHT):
            for k in tl.static_range(FLIGHT):
                j = begin + k
                live_j = token < tl.where(j < SPLIT, M, 0)
                total += tl.load(part + j * (ROWS * BT), mask=live_j, other=0, cache_modifier=".cg")
        acc = _by_rows(total, ROWS, BT)
    if TOPK > 0:
        _finish_topk(acc, x, s, out, ids, tile, rn, rm, live, M, N, BITS, TOPK)
    else:
        finish(acc, s, bias, residual, out, tile, rn, rm, live, N, N_OUT, BITS, BIAS, RESIDUAL, GATED,
               x.dtype.element_ty)  # fmt: skip
    if HD > 0:
        tl.debug_barrier()
        finished += slab * (HQ + 2 * HKV)
        for head in range(tile * BN // HD, tl.minimum(tl.cdiv(tile * BN + BN, HD), HQ + 2 * HKV)):
            tiles = tl.cdiv(head * HD + HD, BN) - head * HD // BN
            if tl.atomic_add(finished + head, 1, sem="acq_rel", scope="gpu") == tiles - 1:
                FEW: tl.constexpr = 8 if QK_NORM or INT8 else 16  # as many as registers allow
                for begin in range(slab * BT, tl.minimum(slab * BT + BT, M), FEW):
                    rows = begin + tl.arange(0, FEW)
                    turn_rows(out, rows, rows < M, head, cos, sin, kv, kv_scales, slots, q_weight, k_weight, turned,
                              v_offset, T, S, eps, HQ, HKV, HD, LEVELS, QK_NORM, INT8, POOLED)  # fmt: skip
                tl.store(finished + head, 0)


def no_rope(x: Tensor) -> dict:
    """The arguments of `linear_kernel` for rotary positions, where there are none."""
    names = "cos sin kv kv_scales slots q_weight k_weight arrived".split()
    constants = dict.fromkeys(("HQ", "HKV", "HD", "LEVELS"), 0) | dict.fromkeys(("QK_NORM", "INT8", "POOLED"), False)
    return dict.fromkeys(names, x) | dict.fromkeys(("T", "S", "v_offset", "arrivals"), 1) | constants


def launch_tile(weight: PackedWeight, tokens: int, gated: int, norms: bool) -> tuple[int, int, dict]:
    """(output columns BN and tokens BT of a program, compiler options) of a launch on `tokens` rows.

    A gate-up layer halves BN, because an output column takes two weight rows. A program has 32 weight rows or more
    (`_by_threads`). With zero points each warp needs as many, otherwise decoded weights go through shared memory. Groups
    below 128, two warps, int8 and the types of a file (forms) have so many sums, scales and addresses that more than 32
    tokens would spill even with all 255 registers. On Hopper 32 tokens are the quickest in any case.
    norms: heads are normed behind the product.
    """
    config, group, zeros, forms = weight.config.on(tokens), weight.group_size, weight.has_zeros, bool(weight.forms)
    warps, small_groups = config.warps, 0 < group < 128
    if tokens > SPLIT_M:
        # For the rows of a prompt a program also keeps the sum of its parts, so it has eight warps. On Hopper 128 tokens
        # are the quickest. Groups of 32, zero points and the types of a file leave registers for 32 or 16.
        rows, tile, warps = 128, 32 if group == 32 else 128 if config.wide_n and group != 64 else 64, 8
        if zeros or forms:
            warps = config.warps
            rows, tile = max(config.block_n, 32 * warps), 16 if zeros and group == 32 else 32
        stages, registers = min(config.stages, 3), 255
    else:
        rows = max(config.block_n, 32 * warps if zeros else 32)
        many = small_groups or warps < 4 or weight.bits == 8 or forms or config.wide_n
        tile = min(32 if many else TILE_M, max(8, triton.next_power_of_2(tokens)))
        # With 64 tokens a fourth stage takes so much shared memory that a multiprocessor runs one program less.
        stages = min(config.stages, 3) if tile == 64 else config.stages
        # Without a number, ptxas would rather spill than use more than 128 registers.
        registers = None
        if (forms or norms) and tile <= 16:
            registers = 255 if forms and config.wide_n else 168
        elif tile == 32 or small_groups:
            registers = 255 if small_groups or weight.bits != 4 or forms else 168
        elif tile == 16 and warps < 4:
            registers = 168
    options = dict(num_warps=warps, num_stages=stages, maxnreg=registers, **EXACT)
    return rows // (1 + (gated > 0)), tile, options


def launch_arguments(
    x: Tensor, weight: PackedWeight, gated: int, tokens: int, norms: bool = False
) -> tuple[tuple[int, int, int], Tensor, dict]:
    """(grid, buffer for partial sums, constants and compiler options) of a launch on x [M, K].

    tokens: for how many rows the tile is chosen. norms: as of `launch_tile`.
    """
    block_n, tile, options = launch_tile(weight, tokens, gated, norms)
    n_out = weight.n // 2 if gated else weight.n
    split = weight.config.split_k if tokens <= SPLIT_M else 1
    grid = triton.cdiv(x.shape[0], tile), triton.cdiv(n_out, block_n), split
    room = math.prod(grid) * (1 + (gated > 0)) * block_n * tile if split > 1 else 0
    partial = x.new_empty(room, dtype=torch.float32)
    half = weight.config.accumulate == "float16" and x.dtype == torch.float16
    constants = dict(
        BITS=0 if weight.forms else weight.bits, GROUP=weight.group_size, ZEROS=weight.has_zeros, GATED=gated,
        FORMS=kernel_forms(weight.forms), EVEN_K=weight.k % 128 == 0, BN=block_n, BT=tile,
        ACC=tl.float16 if half else tl.float32, NATIVE=native(x.dtype),
    )  # fmt: skip
    return grid, partial, options | constants


def gate(y: Tensor, gated: int) -> Tensor:
    """One of GATES: activation(first half) * second half of y [..., 2 I].

    torch's own SiLU, GELU and sigmoid give an element other bits at the end of a tensor than inside.
    """
    if use_cpu("packed_linear", y):
        rows = torch.ops.eaglet_cpu.gate.default(y.reshape(-1, y.shape[-1]).contiguous(), gated)
        return rows.view(*y.shape[:-1], -1)
    first, up = y.chunk(2, -1)
    if gated == GATES["swiglu_clamped"]:
        first = first.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * (first * torch.sigmoid(first * 1.702))
    return (F.silu(first) if gated == GATES["silu"] else F.gelu(first, approximate="tanh")) * up


def epilogue(y: Tensor, bias: Tensor | None, residual: Tensor | None, gated: int) -> Tensor:
    """What `packed_linear` does after the product, in y's dtype."""
    y = y if bias is None else y + bias
    y = gate(y, gated) if gated else y
    return y if residual is None else y + residual


def packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, residual: Tensor | None = None,
    gated: int = 0, wide: bool = False,
) -> Tensor:  # fmt: skip
    """x [..., K] @ W^T [+ bias], [`gate`, if gated], [+ residual] -> [..., N or N/2], in x's dtype, or if wide the same
    values in float32 or wider.

    No host sync. With layout 'planes' our kernel runs, SMALL_M rows at a time. Bias and epilogue are computed in float32
    in our kernel, and in x's dtype elsewhere.
    """
    clamped = gated == GATES["swiglu_clamped"] and weight.layout != "tiles"
    if clamped or gated and len(weight.forms) > 1:  # a program multiplies rows of one format
        return _widened(epilogue(packed_linear(x, weight, bias), None, residual, gated), wide)
    x = weight.reorder(x)
    if weight.layout == "planes":
        return planes_linear(x, *weight.parts(), bias, residual, gated, wide)
    if weight.layout == "tiles":
        # Activations of another dtype, as torch.autocast makes them, are computed with in float32.
        rows, stored = x.reshape(-1, weight.k).float().contiguous(), (weight.weight, weight.scales, weight.mins)
        if weight.n % (cpu.TILE << (gated > 0)):  # the last tile is not full, or one holds rows of both halves
            y = torch.ops.eaglet_cpu.linear.default(rows, *stored, None, None, 0, round_activations())
            y = y[:, : weight.n].unflatten(0, x.shape[:-1]).to(x.dtype)
            return _widened(epilogue(y, bias, residual, gated), wide)
        residual = None if residual is None else residual.reshape(len(rows), -1).float().contiguous()
        y = torch.ops.eaglet_cpu.linear.default(rows, *stored, bias, residual, gated, round_activations())
        return _widened(y.unflatten(0, x.shape[:-1]).to(x.dtype), wide)
    if not torch.compiler.is_compiling():
        # The layout decides. This call only notes that the reference runs, or refuses it under 'triton'.
        use_triton("packed_linear", x, f"weights are packed as '{weight.layout}', for another backend")
    rows = x.reshape(-1, weight.k)
    if weight.layout == "cpu":
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight.weight, weight.group_size, weight.scales)
    elif weight.bits == 8 and weight.layout == "plain" and rows.dtype == torch.bfloat16 and not rows.is_cuda:
        y = torch.ops.aten._weight_int8pack_mm(rows, weight.weight, weight.scales.to(rows.dtype))
    else:
        y = rows @ dequantize(weight, x.dtype).mT
    return _widened(epilogue(y.unflatten(0, x.shape[:-1]), bias, residual, gated), wide)


def _widened(y: Tensor, wide: bool) -> Tensor:
    return y.to(torch.promote_types(y.dtype, torch.float32)) if wide else y


def _triton_linear(out, x, tensors, numbers, bias, residual, gated, wide) -> None:
    weight = from_parts(tensors, numbers)
    rows = x.reshape(-1, weight.k).contiguous()
    added = rows if residual is None else residual.contiguous()
    parts = (t.view(len(rows), -1).split(SMALL_M) for t in (rows, added, out))
    for own, other, place in zip(*parts, strict=True):
        grid, partial, constants = launch_arguments(own, weight, gated, len(own))
        linear_kernel[grid](
            own, *kernel_views(weight), own if bias is None else bias, other, place, place, place, partial,
            weight.counters, M=len(own), N=weight.n, K=weight.k, N_OUT=place.shape[1], eps=0.0, BIAS=bias is not None,
            RESIDUAL=residual is not None, TOPK=0, SPLIT=weight.config.split_k,
            SERIAL=grid[2] < weight.config.split_k, **constants, **no_rope(own),
        )  # fmt: skip


def _linear_shapes(x, tensors, numbers, bias, residual, gated, wide) -> Tensor:
    n, dtype = from_parts(tensors, numbers).n, torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
    return x.new_empty((*x.shape[:-1], n // 2 if gated else n), dtype=dtype)


@operation("planes_linear", "packed_linear", _triton_linear, _linear_shapes)
def planes_linear(
    x: Tensor, tensors: PackedTensors, numbers: list[int], bias: Tensor | None, residual: Tensor | None, gated: int,
    wide: bool,
) -> Tensor:  # fmt: skip
    """`packed_linear` for layout 'planes'. The counters are zero before and after, so they count as unchanged."""
    weight = from_parts(tensors, numbers)
    y = x.reshape(-1, weight.k) @ dequantize(weight, x.dtype).mT
    return _widened(epilogue(y.unflatten(0, x.shape[:-1]), bias, residual, gated), wide)


class TopK(NamedTuple):
    """The best logits of each row.

    values [..., K] float32, descending, with NaN as -inf; ids [..., K] int64, the lower one first where
    values are equal; log_total [...] float32, the log-sum-exp of the whole row; scores [..., K], the
    log-probabilities values - log_total, with NaN as -inf.
    """

    values: Tensor
    ids: Tensor
    log_total: Tensor
    scores: Tensor


def topk_reference(logits: Tensor, count: int) -> TopK:
    """The `TopK` of stored logits [..., N], in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = torch.where(logits.isnan(), -math.inf, logits)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    values, log_total = values[..., :count], logits.logsumexp(-1)
    scores = values - log_total[..., None]
    return TopK(values, ids[..., :count], log_total, scores.masked_fill(scores.isnan(), -math.inf))


def packed_topk(x: Tensor, weight: PackedWeight, count: int) -> TopK:
    """The `count` largest of each row of packed_linear(x [..., K], weight), 1 <= count <= N. No host sync.

    On Triton the logits are never stored. Every weight tile gives its own best ones, and these are merged in the order of
    the tiles.
    """
    if weight.layout != "planes":
        return topk_reference(packed_linear(x, weight), count)
    top = planes_topk(weight.reorder(x).reshape(-1, weight.k), *weight.parts(), count)
    return TopK(*(t.unflatten(0, x.shape[:-1]) for t in top))


def _triton_topk(out, x, tensors, numbers, count) -> None:
    weight = from_parts(tensors, numbers)
    for rows, *place in zip(*(t.split(SPLIT_M) for t in (x.contiguous(), *out)), strict=True):
        grid, partial, constants = launch_arguments(rows, weight, 0, min(32, len(rows)))
        values = x.new_empty(grid[1], len(rows), count + 2, dtype=torch.float32)
        ids = x.new_empty(grid[1], len(rows), count, dtype=torch.int32)
        linear_kernel[grid](
            rows, *kernel_views(weight), rows, rows, values, values, ids, partial, weight.counters, M=len(rows),
            N=weight.n, K=weight.k, N_OUT=weight.n, eps=0.0, BIAS=False, RESIDUAL=False, TOPK=count, SPLIT=grid[2],
            SERIAL=False, **constants, **no_rope(rows),
        )  # fmt: skip
        merge_topk(place, values, ids)


def _topk_problem(x, tensors, numbers, count) -> str:
    rows = from_parts(tensors, numbers).config.block_n
    return f"{count} candidates exceed a tile of {rows} rows" if count > rows else ""


def _topk_shapes(x, tensors, numbers, count) -> TopK:
    rows, dtype = len(x), torch.promote_types(x.dtype, torch.float32)
    values, total = x.new_empty(rows, count, dtype=dtype), x.new_empty(rows, dtype=dtype)
    return TopK(values, x.new_empty(rows, count, dtype=torch.int64), total, torch.empty_like(values))


@operation("planes_topk", "packed_topk", _triton_topk, _topk_shapes, problem=_topk_problem, copies=True)
def planes_topk(x: Tensor, tensors: PackedTensors, numbers: list[int], count: int) -> TopK:
    """`packed_topk` for layout 'planes' and rows x [M, K]."""
    return topk_reference(x @ dequantize(from_parts(tensors, numbers), x.dtype).mT, count)
