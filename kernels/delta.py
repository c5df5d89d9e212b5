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

from kernels.backend import operation
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


def _delta_problem(rows, conv, a_log, dt_bias, layer, walk) -> str:
    if {t.dtype for t in (conv, a_log, dt_bias, layer.memory)} != {torch.float32}:
        return "the dtype is not float32"
    if conv.shape[2] != CPU_WIDTH:
        return f"a convolution is not over {CPU_WIDTH} rows"
    return "a head is not a multiple of 8 values" if any(size % 8 for size in layer.memory.shape[2:]) else ""


def _norm_cpu(x, gate, weight, eps) -> Tensor:
    rows = gate.reshape(-1, gate.shape[-1])
    return torch.ops.eaglet_cpu.gated_norm.default(x.contiguous(), rows, weight, eps).view(gate.shape)


def _norm_problem(x, gate, weight, eps) -> str:
    if {x.dtype, weight.dtype} != {torch.float32}:
        return "the dtype is not float32"
    return "a head is not a multiple of 8 values" if len(weight) % 8 else ""


def _not_yet(*args) -> Tensor:
    raise NotImplementedError


@operation(
    "delta_rule", "delta_rule", _not_yet,
    lambda rows, conv, a_log, dt_bias, layer, walk: layer.memory.new_empty(
        *rows.shape[:2], layer.memory.shape[1], layer.memory.shape[3]
    ),
    cpu=_delta_cpu, cpu_problem=_delta_problem, mutates=("layer",), plain=False,
    problem=lambda *args: "the layer is recurrent",
)  # fmt: skip
def delta_rule(
    rows: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, layer: Memory, walk: Tensor | None
) -> Tensor:
    """Walk T rows through the memory of one layer, and return what each of them reads, [B, T, Hv, dv]. No host sync.

    rows [B, T, R]: the C inputs of the convolution (queries, keys, values), then beta and decay of every value head
    before their functions. conv [C, 1, K]; a_log, dt_bias [Hv].
    walk [B, T, 3] (`depth_first`): the rows are a tree behind the accepted path, along which the memory is advanced.
    None: they are a text, and the memory also takes the first `layer.keep` of them.
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
    behind = pending[:, None] + torch.arange(K - 1, device=rows.device)
    before = path.gather(1, behind[..., None].expand(-1, -1, path.shape[2]))
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


@operation(
    "gated_norm", "delta_rule", _not_yet, lambda x, gate, weight, eps: gate.new_empty(gate.shape), at=(1,), plain=False,
    cpu=_norm_cpu, cpu_problem=_norm_problem, problem=lambda *args: "the layer is recurrent",
)  # fmt: skip
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis of x [..., Hv, dv] with weight [dv], times silu(gate) [..., Hv dv]; in gate's dtype and
    shape."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
    gate_wide = gate.to(x.dtype)
    return (normed.flatten(-2) * gate_wide * sigmoid(gate_wide)).to(gate.dtype)


def next_window(layer: Memory, rows: Tensor, width: int) -> Tensor:
    """The last `width` rows [B, width, R] of the text whose last `layer.keep` rows are the first ones of rows [B, T, R].

    width is at most K - 1, the rows that lie before the accepted path.
    """
    known = torch.cat((layer.path, rows), 1)
    length = layer.path.shape[1] - width
    place = torch.arange(width, device=rows.device) + (layer.pending + layer.keep)[:, None]
    place = torch.where(place < width + layer.pending[:, None], place, place + (length - layer.pending)[:, None])
    return known.gather(1, place[..., None].expand(-1, -1, rows.shape[2]))
