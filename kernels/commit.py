"""Accepting a path of the tree, and committing it.

The kernels compute what `verify.accept` and `step._write` say in plain PyTorch, bit for bit. One program owns one
sequence, or one row of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import jit, tl, triton
from kernels.records import Accepted, StepBuffers


@jit
def accept_kernel(
    tokens, parent, depth, ancestors, valid, choice, path, count, bonus, emitted, N, D, parent_stride, depth_stride,
    ancestors_stride, valid_stride, NP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """`verify.accept` of one sequence. Grid (B,)."""
    b = tl.program_id(0)
    i = tl.arange(0, NP)
    mask = i < N
    above = tl.load(parent + b * parent_stride + i, mask=mask, other=0)
    chosen = tl.load(choice + b * N + above, mask=mask, other=0)
    live = tl.load(valid + b * valid_stride + i, mask=mask, other=0) != 0
    match = (live & (tl.load(tokens + b * N + i, mask=mask, other=0) == chosen)) | (i == 0)
    ancestors += b * ancestors_stride
    sees = tl.load(ancestors + i[:, None] * N + i[None, :], mask=mask[:, None] & mask[None, :], other=0) != 0
    missed = tl.sum((sees & (match[None, :] == 0)).to(tl.int32), 1)
    deep = tl.load(depth + b * depth_stride + i, mask=mask, other=0).to(tl.int32)
    # the deepest, the lowest of equals; without any it is node 0
    farthest = tl.max(tl.where(mask & (missed == 0), deep * NP + NP - 1 - i, NP - 1), 0)
    last = NP - 1 - farthest % NP
    length = farthest // NP
    own = tl.load(choice + b * N + i, mask=mask, other=0)
    taken = (tl.load(ancestors + last * N + i, mask=mask, other=0) != 0) & mask
    tl.store(path + b * (D + 1) + deep, i.to(tl.int64), mask=taken)
    tl.store(emitted + b * (D + 1) + deep, own, mask=taken)
    level = tl.arange(0, DP)
    after = tl.load(choice + b * N + last)
    padding = (level > length) & (level <= D)
    tl.store(path + b * (D + 1) + level, tl.zeros((DP,), tl.int64) + last, mask=padding)
    tl.store(emitted + b * (D + 1) + level, tl.zeros((DP,), tl.int64) + after, mask=padding)
    tl.store(count + b, (length + 1).to(tl.int64))
    tl.store(bonus + b, after)


def accept(out, tokens, parent, depth, ancestors, valid, choice, D) -> None:
    """The fields of `verify.Accepted`: path [B,D+1], count [B], bonus [B], emitted [B,D+1]."""
    B, N = tokens.shape
    tables = [t if t[0].is_contiguous() else t.contiguous() for t in (parent, depth, ancestors, valid)]
    wide = triton.next_power_of_2(N)
    accept_kernel[B,](
        tokens.contiguous(), *tables, choice.contiguous(), *out, N, D, *(t.stride(0) for t in tables), NP=wide,
        DP=triton.next_power_of_2(D + 1), num_warps=16 if wide > 64 else 4,
    )  # fmt: skip


def accept_shapes(tokens: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty fields of `verify.Accepted`."""
    shape = tokens.shape[0], rest[-1] + 1
    return tokens.new_empty(shape), tokens.new_empty(shape[:1]), tokens.new_empty(shape[:1]), tokens.new_empty(shape)


@jit
def commit_kernel(
    path, count, bonus, emitted, usable, tokens, n, root, valid_rows, produced, limit, done, stop_ids, ring, step,
    segments, out_count, finite, source, target, N, P, S, RING, WIDTH, STRIDE, STOPS: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """The small part of `decoding.step._write` for one sequence. Grid (B,)."""
    b = tl.program_id(0)
    level = tl.arange(0, PP)
    inside = level < P
    start = tl.load(n + b)
    finished = tl.load(done + b) != 0
    accepted = tl.load(count + b)
    many = tl.where(finished, 0, accepted)
    new = level < many
    node = tl.load(path + b * P + level, mask=inside, other=0)
    token = tl.load(emitted + b * P + level, mask=inside, other=0)
    first = tl.load(segments + 2 * b)
    before = first + tl.minimum(start + node, tl.load(segments + 2 * b + 1))
    tl.store(source + b * P + level, before, mask=inside)
    tl.store(target + b * P + level, tl.where(new, first + start + level, before), mask=inside)
    tl.store(tokens + b * S + start + 1 + level, token, mask=new)
    tl.store(root + b, tl.load(bonus + b), mask=finished == 0)
    tl.store(n + b, start + many)
    tl.store(valid_rows + b, accepted, mask=finished == 0)
    made = tl.load(produced + b) + many
    tl.store(produced + b, made)
    stops = tl.load(stop_ids + b * STOPS + tl.arange(0, STOPS))
    hits = (token[:, None] == stops[None, :]) & new[:, None]
    stopped = tl.sum(tl.sum(hits.to(tl.int32), 1), 0) > 0
    finished = finished | stopped | (made >= tl.load(limit + b))
    tl.store(done + b, finished)
    good = (tl.load(usable + b * N + node, mask=inside, other=0) != 0) | (new == 0)
    tl.store(finite + b * P + level, good, mask=inside)
    tl.store(out_count + b, many)
    ring += tl.load(step) % RING * STRIDE + b * WIDTH
    tl.store(ring, many)
    tl.store(ring + 1, finished.to(tl.int64))
    tl.store(ring + 2 + 2 * level, token, mask=inside)
    tl.store(ring + 3 + 2 * level, good.to(tl.int64), mask=inside)


@jit
def keep_kernel(
    features, path, count, n, buffer, history, step, N, P, ROWS, F, HISTORY, KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the features of one accepted node, and count the step. Grid (B P, blocks of F)."""
    row = tl.program_id(0)
    b = row // P
    level = row % P
    if (row == 0) & (tl.program_id(1) == 0):
        tl.store(step, tl.load(step) + 1)
    many = tl.load(count + b)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(path + row)
    value = tl.load(features + (b * N + node) * F + d, mask=d < F)
    tl.store(buffer + (b * ROWS + level) * F + d, value, mask=d < tl.where(many > 0, F, 0))
    if KEEP:
        place = (tl.load(n + b) - many + level) % HISTORY  # n has grown already
        tl.store(history + (b * (HISTORY + 1) + place) * F + d, value, mask=d < tl.where(level < many, F, 0))


def commit(out: Sequence[Tensor], accepted: Accepted, usable: Tensor, features: Tensor, buffers: StepBuffers) -> None:
    """Two launches. (count [B], finite [B,P], source [B,P], target [B,P]) of `decoding.step._write`. Writes the buffers.

    usable bool [B,N] and features [B,N,F] belong to the nodes of the tree. What `tokens` and `history` hold in their last
    rows, which nobody reads, stays as it is.
    """
    path = accepted.path.contiguous()
    B, P = path.shape
    N, F = features.shape[1:]
    ring, history = buffers.ring, buffers.history
    commit_kernel[B,](
        *(t.contiguous() for t in (*accepted, usable)), *buffers[:9], buffers.step, buffers.segments, *out, N, P,
        buffers.tokens.shape[1], ring.shape[0], ring.shape[2], ring.stride(0), STOPS=buffers.stop_ids.shape[1],
        PP=triton.next_power_of_2(P), num_warps=1,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(F))
    keep = history.shape[1] > 0
    keep_kernel[B * P, triton.cdiv(F, block)](
        features.contiguous(), path, out[0], buffers.n, buffers.features, history if keep else buffers.features,
        buffers.step, N, P, buffers.features.shape[1], F, history.shape[1] - 1 if keep else 1, KEEP=keep, BLOCK=block,
    )  # fmt: skip


def commit_shapes(accepted: Accepted, *_rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty outputs of `commit`."""
    path = accepted.path
    source, target = path.new_empty(path.shape), path.new_empty(path.shape)
    return path.new_empty(path.shape[0]), path.new_empty(path.shape, dtype=torch.bool), source, target
