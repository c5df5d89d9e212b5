"""The best draft tokens of a row of logits in one launch, as `sampling.draft_keys` and `linear.packed_topk` rank them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import jit, tl, triton
from kernels.choice import LOWEST, NOTHING, block_of, largest, load_logits, rank_of, threshold


@jit
def add_exponentials(top, total, x, count):
    """(running maxima, running sums of exp(x - maximum)) of each lane with one more x, which stands for `count`."""
    higher = tl.maximum(top, x)
    return higher, total * tl.exp(top - higher) + count * tl.exp(x - higher)


@jit
def log_total(top, total):
    """The logarithm of the sum over all lanes of `add_exponentials`."""
    highest = tl.max(top, 0)
    return highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))


@jit
def draft_key(row, noise, ids, heat, i, mask, SAMPLE: tl.constexpr, TRIMMED: tl.constexpr):
    """(logit z, z + T g) of draft tokens i."""
    z = load_logits(row, i, mask)
    key = z
    if SAMPLE:
        token = tl.load(ids + i, mask=mask, other=0) if TRIMMED else i
        key += heat * tl.load(noise + token, mask=mask, other=0)
    return z, key


@jit
def draft_rank(z, key, cut, i, mask, FILTERS: tl.constexpr):
    """Survivors by their keys, and then the others by their logits."""
    rank = rank_of(key, i)
    if FILTERS:
        rank = tl.where(z >= cut, rank + 4611686018427387904, rank_of(z, i) - 4611686018427387904)
    return tl.where(mask, rank, NOTHING)


@jit
def draft_topk_kernel(
    logits, noise, ids, temperature, top_k, top_p, min_p, best_ids, best_scores, noise_b, noise_w, W, V, K,
    KP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SAMPLE: tl.constexpr, FILTERS: tl.constexpr,
    NOISY: tl.constexpr, TRIMMED: tl.constexpr,
):  # fmt: skip
    """The K largest keys of `sampling.draft_keys` with their scores, for one row. Grid (B W,).

    One pass over the row finds the sums of the scores and the best key of every lane. The K best keys lie in the K best
    lanes, which are read again.
    """
    pid = tl.program_id(0)
    b = pid // W
    row = logits + pid.to(tl.int64) * V
    noise += b * noise_b + pid % W * noise_w
    heat = tl.load(temperature + b)
    softness = tl.where(heat > 0, tl.maximum(heat, 0.5), 1.0)
    cut = heat
    if FILTERS:
        cut = threshold(row, V, heat, tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b), BLOCK)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NOTHING, tl.int64)
    raw_top = tl.full((BLOCK,), LOWEST, tl.float32)
    raw_total = tl.zeros((BLOCK,), tl.float32)
    top = raw_top
    total = raw_total
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    alive_count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        i = start + lane
        z, key = draft_key(row, noise, ids, heat, i, i < V, SAMPLE, TRIMMED)
        best = tl.maximum(best, draft_rank(z, key, cut, i, i < V, FILTERS))
        raw_top, raw_total = add_exponentials(raw_top, raw_total, z, 1.0)
        if NOISY:
            soft = key / softness
            if FILTERS:
                alive = (z >= cut) & (i < V)
                alive_count += alive.to(tl.int32)
                least = tl.minimum(least, tl.where(alive, soft, float("inf")))
                soft = tl.where(alive, soft, float("-inf"))
            top, total = add_exponentials(top, total, soft, 1.0)
    k = tl.arange(0, KP)
    i = largest(best, K, KP) % BLOCK
    if BLOCKS > 1:
        many = i[:, None] + tl.arange(0, BLOCKS)[None, :] * BLOCK
        mask = (k < K)[:, None] & (many < V)
        z, key = draft_key(row, noise, ids, heat, many, mask, SAMPLE, TRIMMED)
        i = largest(draft_rank(z, key, cut, many, mask, FILTERS), K, KP)
    z, key = draft_key(row, noise, ids, heat, i, k < K, SAMPLE, TRIMMED)
    raw = z - log_total(raw_top, raw_total)
    score = raw
    if NOISY:
        norm = log_total(top, total)
        score = key / softness - norm
        if FILTERS:
            score = tl.where(z >= cut, score, tl.min(least, 0) - norm + raw)
            score = tl.where(tl.sum(alive_count, 0) == 1, raw, score)
    score = tl.where(score == score, score, float("-inf"))
    tl.store(best_ids + pid * K + k, i.to(tl.int64), mask=k < K)
    tl.store(best_scores + pid * K + k, score, mask=k < K)


@jit
def merge_topk_kernel(
    tile_values, tile_ids, values, ids, totals, scores, M, TILES, K, KP: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Merge what `linear._finish_topk` found in every tile of the vocabulary, for one row. Grid (M,).

    Candidates are numbered in the order of the tiles, so that of equal logits the lower id has the lower number.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    count = TILES * K
    best = tl.full((BLOCK,), NOTHING, tl.int64)
    for start in range(0, count, BLOCK):
        i = start + lane
        value = tl.load(tile_values + (i // K * M + row) * (K + 2) + i % K, mask=i < count, other=0)
        best = tl.maximum(best, tl.where(i < count, rank_of(value, i), NOTHING))
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, TILES, BLOCK):
        at = ((start + lane) * M + row) * (K + 2) + K
        mask = start + lane < TILES
        tile_top = tl.load(tile_values + at, mask=mask, other=float("-inf"))
        top, total = add_exponentials(top, total, tile_top, tl.load(tile_values + at + 1, mask=mask, other=0))
    k = tl.arange(0, KP)
    i = largest(best, K, KP) % BLOCK
    if BLOCKS > 1:
        many = i[:, None] + tl.arange(0, BLOCKS)[None, :] * BLOCK
        mask = (k < K)[:, None] & (many < count)
        value = tl.load(tile_values + (many // K * M + row) * (K + 2) + many % K, mask=mask, other=0)
        i = largest(tl.where(mask, rank_of(value, many), NOTHING), K, KP)
    value = tl.load(tile_values + (i // K * M + row) * (K + 2) + i % K, mask=k < K, other=0)
    norm = log_total(top, total)
    score = value - norm
    tl.store(values + row * K + k, value, mask=k < K)
    tl.store(ids + row * K + k, tl.load(tile_ids + (i // K * M + row) * K + i % K, mask=k < K).to(tl.int64), mask=k < K)
    tl.store(scores + row * K + k, tl.where(score == score, score, float("-inf")), mask=k < K)
    tl.store(totals + row, norm)


def draft_topk_shapes(logits: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """Empty outputs of `draft_topk`."""
    shape, wide = (*logits.shape[:2], rest[-1]), torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=wide)


def draft_topk(out, logits, noise, draft_ids, settings, filters, noisy, count) -> None:
    """(ids int64, scores fp32), each [B,W,count]: the largest keys of `sampling.draft_keys` for logits [B,W,V].

    noise [B,1 or W,target's V] belongs to the ids draft_ids [V] of the target. Without noise the keys are the logits.
    """
    logits = logits.contiguous()
    B, W, V = logits.shape
    wide = triton.next_power_of_2(count)
    block, warps = block_of(V, wide)
    most = 128 if warps == 16 else None  # Without a number, ptxas would rather spill than use more than 64 registers.
    sample = noise is not None
    strides = (noise.stride(0), noise.stride(1) * (noise.shape[1] > 1)) if sample else (0, 0)
    draft_topk_kernel[B * W,](
        logits, noise if sample else logits, out[0] if draft_ids is None else draft_ids, *settings, *out, *strides, W, V,
        count, KP=wide, BLOCK=block, BLOCKS=triton.next_power_of_2(triton.cdiv(V, block)), SAMPLE=sample,
        FILTERS=filters and sample, NOISY=noisy and sample, TRIMMED=draft_ids is not None, num_warps=warps,
        maxnreg=most,
    )  # fmt: skip


def merge_topk(out: Sequence[Tensor], tile_values: Tensor, tile_ids: Tensor) -> None:
    """Write a `linear.TopK` of M rows, made of what the tiles of a vocabulary found.

    tile_values fp32 [tiles, M, K + 2]: the best logits, the maximum and the sum of exp(logit - maximum). tile_ids int32
    [tiles, M, K].
    """
    tiles, M, K = tile_ids.shape
    wide = triton.next_power_of_2(K)
    block, warps = block_of(tiles * K, wide)
    blocks = triton.next_power_of_2(triton.cdiv(tiles * K, block))
    merge_topk_kernel[M,](
        tile_values, tile_ids, *out, M, tiles, K, KP=wide, BLOCK=block, BLOCKS=blocks, num_warps=warps
    )
