"""The gated delta rule of recurrent layers: a memory per head, which every token fades, corrects and reads.

The nodes of a draft tree are walked depth first. Each one starts from the memory of its parent, with the operations of
plain decoding in the same order, so it has the bits that it would have alone. Only the memory of the committed text is
kept. A step begins by advancing it along the path that was accepted last.

Shape letters: B batch, T rows, K width of the convolution, P = D + 1 rows of a path, Hv value heads, dk and dv sizes of
a head's keys and values, C channels of the convolution, R = C + 2 Hv numbers of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import EXACT, jit, operation, tl, triton
from kernels.memory import last_rows
from kernels.norm_rope import sum_by_halves
from kernels.records import Memory

TINY = 1e-6  # added to the squared length of a query or key
CPU_WIDTH = 4  # rows under the convolution in C++. As in cpu_delta.cpp


def depth_first(ancestors: Tensor) -> Tensor:
    """The walk [B, T, 3] int64 of trees with ancestors [B, T, T] bool, each node its own: the nodes, each behind its
    parent and the subtrees of earlier siblings; how many ancestors each has; and whether it has more than one child, so
    that the walk comes back to the memory behind it. No host sync."""
    T = ancestors.shape[1]
    ids = torch.arange(T, device=ancestors.device)
    above = ancestors & (ids != ids[:, None])
    parent = torch.where(above, ids, -1).amax(-1)
    sizes = ancestors.long().sum(1)  # of the subtrees
    older = (parent[:, :, None] == parent[:, None]) & (ids < ids[:, None])
    behind_parent = (older * sizes[:, None]).sum(-1) + (parent >= 0)
    order = (ancestors * behind_parent[:, None]).sum(-1).argsort(stable=True, dim=-1)
    several = (parent[:, None] == ids[:, None]).sum(-1) > 1
    return torch.stack([order, *(facts.long().gather(1, order) for facts in (above.sum(-1), several))], -1)


def sigmoid(x: Tensor) -> Tensor:
    """sigmoid(x), rounded once. On a CPU exp has the same bits for a row alone and among others, sigmoid has not."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (1 / (1 + torch.exp(-wide))).to(x.dtype)


def _inputs(window: Tensor, weights: tuple[Tensor, Tensor, Tensor], memory: Tensor) -> tuple[Tensor, ...]:
    """Rows window [B, K, R], oldest first, of which the last is the token's own -> its query and key [B, Hv, dk], value
    [B, Hv, dv], and beta and decay [B, Hv]."""
    conv, a_log, dt_bias = (w.to(memory.dtype) for w in weights)
    heads, dk, dv = memory.shape[1:]
    C, window = len(conv), window.to(memory.dtype)
    mixed = window[:, 0, :C] * conv[:, 0, 0]
    for j in range(1, conv.shape[2]):
        mixed = mixed + window[:, j, :C] * conv[:, 0, j]
    mixed = mixed * sigmoid(mixed)
    keys = (C - heads * dv) // 2
    q, k = (x.unflatten(1, (-1, dk)) for x in mixed[:, : 2 * keys].split(keys, 1))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + TINY) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q * dk**-0.5, k))
    b, a = window[:, -1, C:].split(heads, 1)
    a = a + dt_bias
    soft = torch.where(a > 20, a, torch.log1p(torch.exp(a.clamp(max=20))))
    return q, k, mixed[:, 2 * keys :].unflatten(1, (heads, dv)), sigmoid(b), torch.exp(-a_log.exp() * soft)


def _advance(memory: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The memory [B, Hv, dk, dv] after a token, and what the token reads of it [B, Hv, dv]."""
    q, k, v, beta, decay = inputs
    memory = memory * decay[..., None, None]
    correction = beta[..., None] * (v - (memory * k[..., None]).sum(-2))
    memory = memory + k[..., None] * correction[:, :, None]
    return memory, (memory * q[..., None]).sum(-2)


def _delta_cpu(rows, conv, a_log, dt_bias, layer, walk) -> Tensor:
    walk = None if walk is None else walk.contiguous()
    return torch.ops.eaglet_cpu.delta_rule.default(rows.contiguous(), conv, a_log, dt_bias, list(layer), walk)


def _delta_cpu_problem(rows, conv, a_log, dt_bias, layer, walk) -> str:
    if {t.dtype for t in (conv, a_log, dt_bias, layer.memory)} != {torch.float32}:
        return "the dtype is not float32"
    if conv.shape[2] != CPU_WIDTH:
        return f"a convolution is not over {CPU_WIDTH} rows"
    return "a head is not a multiple of 8 values" if any(size % 8 for size in layer.memory.shape[2:]) else ""


def _norm_cpu(x, gate, weight, eps) -> Tensor:
    rows = gate.reshape(-1, gate.shape[-1])
    return torch.ops.eaglet_cpu.gated_norm.default(x.contiguous(), rows, weight, eps).view(gate.shape)


def _norm_cpu_problem(x, gate, weight, eps) -> str:
    if {x.dtype, weight.dtype} != {torch.float32}:
        return "the dtype is not float32"
    return "a head is not a multiple of 8 values" if len(weight) % 8 else ""


@jit
def sum_columns(x, LEVELS: tl.constexpr):
    """The sum of each column of x [2^LEVELS, BV], in an order that no layout chooses."""
    for _level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0)
    return tl.sum(x, 0)


@jit
def load_three(row0, row1, row2, c):
    """Numbers c of three rows."""
    x0 = tl.load(row0 + c).to(tl.float32)
    x1 = tl.load(row1 + c).to(tl.float32)
    return x0, x1, tl.load(row2 + c).to(tl.float32)


@jit
def convolved(above, x, conv, tap):
    """silu of the convolution over three rows and the row x behind them, with weights that are given in the same way."""
    y = tl.fma(above[2], conv[2], tl.fma(above[1], conv[1], above[0] * conv[0]))
    y = tl.fma(x, tap, y)
    return y / (1 + tl.exp(-y))


@jit
def decay_of(a, rate):
    """exp(-rate softplus(a)). A GPU's logarithm is inexact near 1. So log1p(y) = 2 artanh(y / (2 + y)) is a series."""
    y = tl.exp(-tl.abs(a))
    z = y / (2 + y)
    series = z * 0 + 1 / 13
    for n in tl.static_range(6):
        series = tl.fma(series, z * z, 1 / (11 - 2 * n))
    return tl.exp(-rate * tl.fma(series, 2 * z, tl.maximum(a, 0.0)))


@jit
def row_of(walk, rows, before, step, place, R: tl.constexpr):
    """Where the row of a step of the walk begins, or for step -1 the row at `place` of those before the tree."""
    node = tl.load(walk + 3 * step, mask=step >= 0, other=0)
    return tl.where(step >= 0, rows + node * R, before + place * R)


@jit
def rows_above(walk, rows, before, step, depth, R: tl.constexpr):
    """Where the rows of the three ancestors of a step of the walk begin: of the last nodes of their depths before it."""
    i = tl.arange(0, 64)
    far = step * 0 - 1
    middle = far
    near = far
    for first in range(0, step, 64):
        level = tl.load(walk + 3 * (first + i) + 1, mask=first + i < step, other=-9).to(tl.int32) - depth
        far = tl.maximum(far, tl.max(tl.where(level == -3, first + i, -1), 0))
        middle = tl.maximum(middle, tl.max(tl.where(level == -2, first + i, -1), 0))
        near = tl.maximum(near, tl.max(tl.where(level == -1, first + i, -1), 0))
    row0 = row_of(walk, rows, before, far, depth, R)
    row1 = row_of(walk, rows, before, middle, depth + 1, R)
    return row0, row1, row_of(walk, rows, before, near, depth + 2, R)


@(triton.jit(do_not_specialize=["T", "tree", "places", "layers", "slots"]) if triton else jit)
def delta_kernel(
    rows, conv, a_log, dt_bias, memory, path, pending, frozen, keep, walk, out, saved, T, tree, places, layers, slots,
    HK: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr, LEVELS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`delta_rule` of BV columns of one head. Grid (DV / BV, HV, B).

    One loop, compiled once, advances the memory along the path, then along the branches of a tree or along a text, and
    the layout chooses the order of no sum. So a row has the same bits in a step of one node, of many, and in a prompt.
    Each turn also convolves the row of the next turn, which needs no memory and fills the pauses.
    """
    DK: tl.constexpr = 2**LEVELS
    C: tl.constexpr = 2 * HK * DK + HV * DV
    R: tl.constexpr = C + 2 * HV
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * BV + tl.arange(0, BV)
    cell = tl.arange(0, DK).to(tl.int64)[:, None] * DV + d[None, :]  # int64: addresses differ by constants
    memory += (b * layers * HV + h) * (DK * DV)
    saved += (b * HV + h) * slots * (DK * DV)
    rows += b * T * R
    path += b * places * R
    walk += b * T * 3
    out += (b * T * HV + h) * DV
    of_q = h // (HV // HK) * DK + tl.arange(0, DK)
    of_k = HK * DK + of_q
    of_v = 2 * HK * DK + h * DV + d
    q_conv = load_three(conv, conv + 1, conv + 2, 4 * of_q)
    k_conv = load_three(conv, conv + 1, conv + 2, 4 * of_k)
    v_conv = load_three(conv, conv + 1, conv + 2, 4 * of_v)
    q_tap = tl.load(conv + 3 + 4 * of_q).to(tl.float32)
    k_tap = tl.load(conv + 3 + 4 * of_k).to(tl.float32)
    v_tap = tl.load(conv + 3 + 4 * of_v).to(tl.float32)
    rate = tl.exp(tl.load(a_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h).to(tl.float32)

    behind = tl.load(pending + b).to(tl.int32)
    skipped = tl.where(tl.load(frozen + b) != 0, behind, 0)
    advanced = behind - skipped
    steps = tl.where(tree != 0, T, tl.load(keep + b).to(tl.int32))
    total = advanced + steps
    taken = tl.where(tree != 0, advanced, total)  # rows that the memory takes
    before = path + behind * R
    path += skipped * R
    q_above = load_three(path, path + R, path + 2 * R, of_q)
    k_above = load_three(path, path + R, path + 2 * R, of_k)
    v_above = load_three(path, path + R, path + 2 * R, of_v)
    now = tl.load(memory + cell)
    nothing = tl.zeros((DK,), tl.float32)
    turn = nothing, nothing, tl.zeros((BV,), tl.float32), 0.0, 1.0, 0, -1, 0, 0
    for j in range(total + 1):
        q, k, v, beta, decay, node, depth, several, elsewhere = turn
        if elsewhere != 0:
            tl.debug_barrier()
            parent = tl.minimum(depth, slots)
            now = tl.load(tl.where(parent > 0, saved + (parent - 1) * (DK * DV), memory) + cell)
        step = tl.minimum(j - advanced, T - 1)
        in_tree = (step >= 0) & (tree != 0) & (j < total)
        at = walk + 3 * tl.maximum(step, 0)
        next_node = tl.load(at, mask=in_tree, other=step).to(tl.int32)
        next_depth = tl.load(at + 1, mask=in_tree, other=-1).to(tl.int32)
        next_several = tl.load(at + 2, mask=in_tree, other=0).to(tl.int32)
        next_elsewhere = (in_tree & (next_depth != depth + 1)).to(tl.int32)
        if next_elsewhere != 0:
            row0, row1, row2 = rows_above(walk, rows, before, step, next_depth, R)
            q_above = load_three(row0, row1, row2, of_q)
            k_above = load_three(row0, row1, row2, of_k)
            v_above = load_three(row0, row1, row2, of_v)
        row = tl.where(step >= 0, rows + next_node * R, path + (3 + j) * R)
        q_own = tl.load(row + of_q).to(tl.float32)
        k_own = tl.load(row + of_k).to(tl.float32)
        v_own = tl.load(row + of_v).to(tl.float32)
        next_beta = 1 / (1 + tl.exp(-tl.load(row + C + h).to(tl.float32)))
        next_decay = decay_of(tl.load(row + C + HV + h).to(tl.float32) + bias, rate)
        next_q = convolved(q_above, q_own, q_conv, q_tap)
        next_q *= tl.rsqrt(sum_by_halves(next_q * next_q, LEVELS) + 1e-6) * DK**-0.5
        next_k = convolved(k_above, k_own, k_conv, k_tap)
        next_k *= tl.rsqrt(sum_by_halves(next_k * next_k, LEVELS) + 1e-6)
        next_v = convolved(v_above, v_own, v_conv, v_tap)
        q_above = q_above[1], q_above[2], q_own
        k_above = k_above[1], k_above[2], k_own
        v_above = v_above[1], v_above[2], v_own
        turn = next_q, next_k, next_v, next_beta, next_decay, next_node, next_depth, next_several, next_elsewhere

        now *= decay
        change = beta * (v - sum_columns(now * k[:, None], LEVELS))
        now = tl.fma(k[:, None], change[None, :], now)
        read = sum_columns(now * q[:, None], LEVELS)
        tl.store(out + node * (HV * DV) + d, read, mask=d < tl.where(j > advanced, DV, 0))
        if several * (depth < slots) != 0:
            tl.store(saved + depth * (DK * DV) + cell, now)
        if (j == taken) & (taken > 0):
            tl.store(memory + cell, now)
    for t in range(steps, T):
        tl.store(out + t * (HV * DV) + d, tl.zeros((BV,), tl.float32))


def _delta_triton(out, rows, conv, a_log, dt_bias, layer, walk) -> None:
    memory, path, _, pending, frozen, keep = layer
    (B, heads, dk, dv), (T, R) = memory.shape, rows.shape[1:]
    block, slots = min(16, dv & -dv), path.shape[1] - 4
    delta_kernel[dv // block, heads, B](
        rows.contiguous(), conv, a_log, dt_bias, memory, path, pending, frozen, keep,
        pending if walk is None else walk.contiguous(), out, memory.new_empty(B, heads, slots, dk, dv), T,
        int(walk is not None), path.stride(0) // R, memory.stride(0) // (heads * dk * dv), slots,
        HK=(len(conv) - heads * dv) // (2 * dk), HV=heads, DV=dv, LEVELS=dk.bit_length() - 1, BV=block, num_warps=1,
        **EXACT,
    )  # fmt: skip


def _delta_shapes(rows, conv, a_log, dt_bias, layer, walk) -> Tensor:
    return layer.memory.new_empty(*rows.shape[:2], layer.memory.shape[1], layer.memory.shape[3])


def _delta_problem(rows, conv, a_log, dt_bias, layer, walk) -> str:
    dk, dv = layer.memory.shape[2:]
    if conv.shape[2] != 4 or dk & (dk - 1) or dv % 4:
        return "the convolution is not 4 wide, the size of a key no power of 2, or that of a value no multiple of 4"
    inner = [t.select(0, 0).is_contiguous() for t in layer[:2]]
    return "" if all(inner) else "the memory of a sequence is not contiguous"


@operation(
    "delta_rule", "delta_rule", _delta_triton, _delta_shapes, mutates=("layer",), plain=False, problem=_delta_problem,
    cpu=_delta_cpu, cpu_problem=_delta_cpu_problem,
)  # fmt: skip
def delta_rule(
    rows: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, layer: Memory, walk: Tensor | None
) -> Tensor:
    """Walk T rows through the memory of one layer, and return what each of them reads, [B, T, Hv, dv]. No host sync.

    rows [B, T, R]: the C inputs of the convolution (queries, keys, values), then beta and decay of every value head
    before their functions. conv [C, 1, K]; a_log, dt_bias [Hv].
    walk [B, T, 3] (`depth_first`): the rows are a tree behind the accepted path, along which the memory is advanced.
    None: they are a text, and the memory also takes the first `layer.keep` of them. Other rows read anything finite.
    """
    memory, path, _, pending, frozen, keep = layer
    weights, K = (conv, a_log, dt_bias), conv.shape[2]
    P, T = path.shape[1] - K + 1, rows.shape[1]

    def chosen(where: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(where[:, None, None, None], new, old)

    now = memory
    for j in range(P):
        new, _ = _advance(now, _inputs(path[:, j : j + K], weights, memory))
        now = chosen((pending > j) & ~frozen, new, now)
    before = last_rows(path, pending, K - 1)
    out = memory.new_zeros(*rows.shape[:2], memory.shape[1], memory.shape[3])
    if walk is None:
        text = torch.cat((before, rows), 1)
        for j in range(T):
            new, out[:, j] = _advance(now, _inputs(text[:, j : j + K], weights, memory))
            now = chosen(keep > j, new, now)
    memory.copy_(now)
    if walk is None:
        return out
    one = torch.arange(len(rows), device=rows.device)
    stack = torch.stack([now] * (P + 1), 1)  # the memory before the root, and behind the last node of each depth
    branch = torch.cat((before, rows.new_zeros(len(rows), P, rows.shape[2])), 1)  # the rows of these nodes
    for j in range(T):
        node, depth = walk[:, j, 0], walk[:, j, 1].clamp(max=P - 1)
        branch[one, K - 1 + depth] = rows[one, node]
        window = branch[one[:, None], depth[:, None] + torch.arange(K, device=rows.device)]
        new, read = _advance(stack[one, depth], _inputs(window, weights, memory))
        stack[one, depth + 1] = new
        out[one, node] = read
    return out


@jit
def gated_norm_kernel(x, gate, weight, out, stride, eps, HV: tl.constexpr, DV: tl.constexpr, LEVELS: tl.constexpr):
    """`gated_norm` of one head of one row. Grid (HV, rows)."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, 2**LEVELS)
    ok = d < DV
    at = (row * HV + tl.program_id(0)) * DV + d
    a = tl.load(x + at, mask=ok, other=0)
    z = tl.load(gate + row * stride + tl.program_id(0) * DV + d, mask=ok, other=0).to(tl.float32)
    a = a * tl.rsqrt(sum_by_halves(a * a, LEVELS) / DV + eps) * tl.load(weight + d, mask=ok, other=0).to(tl.float32)
    tl.store(out + at, (a * z / (1 + tl.exp(-z))).to(out.dtype.element_ty), mask=ok)


def _gated_triton(out, x, gate, weight, eps) -> None:
    flat, (heads, dv) = gate.flatten(0, -2), x.shape[-2:]
    gated_norm_kernel[heads, len(flat)](
        x.contiguous(), flat, weight, out, flat.stride(0), eps, HV=heads, DV=dv, LEVELS=(dv - 1).bit_length(),
        num_warps=1, **EXACT,
    )  # fmt: skip


@operation(
    "gated_norm", "delta_rule", _gated_triton, lambda x, gate, weight, eps: gate.new_empty(gate.shape), at=(1,),
    plain=False, cpu=_norm_cpu, cpu_problem=_norm_cpu_problem,
)  # fmt: skip
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis of x [..., Hv, dv] with weight [dv], times silu(gate) [..., Hv dv]; in gate's dtype and
    shape."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
    gate_wide = gate.to(x.dtype)
    return (normed.flatten(-2) * gate_wide * sigmoid(gate_wide)).to(gate.dtype)
