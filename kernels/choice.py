"""Position-keyed noise, and the target's choice of a token, in one launch each.

The kernels compute what `sampling` says in plain PyTorch. One program owns one row of the vocabulary, so a row does not
depend on other rows. Candidates are ranked by one integer that holds the ordered bits of their key and the complement
of their id: all are different, and of equal keys the lower id comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import EXACT, constexpr, jit, tl, triton

NOTHING = constexpr(-(2**63))  # below the rank of every candidate
LOWEST = constexpr(-3.4028234663852886e38)  # of float32


class Settings(NamedTuple):
    """The settings of a batch, fp32 [B,1,1], top_k int64. All are contiguous."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@jit
def mix(x, key):
    """A bijection of 32-bit values x, unsigned, that `key` selects (`sampling._mix`)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x ^= key
    x *= 0x846CA68B
    return x ^ (x >> 16)


@jit
def noise_kernel(seed, n, hashes, out, rows, V, BLOCK: tl.constexpr):
    """`gumbel_noise` of the positions n + 1 to n + rows. Grid (B rows, blocks of the vocabulary)."""
    row = tl.program_id(0)
    b = row // rows
    words = tl.load(seed + b)
    position = (tl.load(n + b) + 1 + row % rows).to(tl.uint32)
    zero = position ^ position
    low = mix(words.to(tl.uint32) ^ 0x9E3779B9, zero)
    high = mix((words >> 32).to(tl.uint32) ^ low, zero)
    first = mix(mix(position + low, zero) ^ high, zero)
    second = mix((first + high) ^ low, zero)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = mix(tl.load(hashes + i, mask=i < V, other=0).to(tl.uint32) ^ first, second)
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    # log(1 - v) loses the bits of a small v by rounding 1 - v. The quotient puts them back.
    u = 1 - v
    log1p = tl.where(u == 1, -v, tl.log(u) * (-v / tl.where(u == 1, 1.0, u - 1)))
    tl.store(out + row.to(tl.int64) * V + i, -tl.log(-log1p), mask=i < V)


@jit
def ordered(x):
    """Signed integers, ordered like the floats x. Both zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def rank_of(key, i):
    """One int64 per candidate: greater for a greater key, and of equal keys for the lower number i."""
    return (ordered(key).to(tl.int64) << 31) + (0x7FFFFFFF - i)


@jit
def largest(ranks, K, KP: tl.constexpr):
    """The numbers [KP] of the K largest of all ranks, in descending order.

    If each of `BLOCK` ranks is the largest of those whose numbers have the same remainder, the K largest of all ranks
    lie in the K groups that these numbers name modulo BLOCK.
    """
    k = tl.arange(0, KP)
    found = tl.zeros((KP,), tl.int32)
    for i in range(K):
        rank = tl.max(ranks)
        found = tl.where(k == i, (0x7FFFFFFF - (rank & 0x7FFFFFFF)).to(tl.int32), found)
        ranks = tl.where(ranks == rank, NOTHING, ranks)
    return found


@jit
def load_logits(row, i, mask):
    """Logits i of a row in fp32. NaN counts as -inf, and so does what lies outside the mask."""
    z = tl.load(row + i, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(z == z, z, float("-inf"))


@jit
def masses(row, V, top, temperature, floor, a, b, c, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of a row, summed over {image >= a}, {image >= b} and {image >= c}, int64.

    A weight is 1, or if WEIGHTED the token's probability in units of 2^-30 (`sampling._weight`), and 0 below `floor`.
    """
    HALF: tl.constexpr = (BLOCK + 1) // 2  # fewer registers
    lane = tl.arange(0, HALF)
    sum_a = tl.zeros((HALF,), tl.int64)
    sum_b = tl.zeros((HALF,), tl.int64)
    sum_c = tl.zeros((HALF,), tl.int64)
    for start in range(0, V, HALF):
        i = start + lane
        z = load_logits(row, i, i < V)
        image = ordered(z)
        weight = (i < V).to(tl.int64)
        if WEIGHTED:
            weight = (tl.exp((z - top) / temperature) * 1073741824.0).to(tl.int64)
            weight = tl.where((i < V) & (image >= floor), weight, 0)
        sum_a += tl.where(image >= a, weight, 0)
        sum_b += tl.where(image >= b, weight, 0)
        sum_c += tl.where(image >= c, weight, 0)
    return tl.sum(sum_a, 0), tl.sum(sum_b, 0), tl.sum(sum_c, 0)


@jit
def unordered(image):
    """The floats of which `ordered` makes these integers. Zeros are positive."""
    return tl.where(image < 0, image ^ 0x7FFFFFFF, image).to(tl.float32, bitcast=True)


@jit
def greatest_images(row, V, BLOCK: tl.constexpr):
    """((a, b, c), bound): the images of a row's logits above `bound`, each in one of the three [BLOCK], int32.

    Lane i holds the greatest three logits of all i + k BLOCK. The bound is the greatest of all others, so that
    about 1,000 logits of a long row lie above it, and all logits of a row of up to three blocks.
    """
    lane = tl.arange(0, BLOCK)
    a = tl.full((BLOCK,), -2147483648, tl.int32)
    b = a
    c = a
    rest = a
    for start in range(0, V, BLOCK):
        x = tl.where(start + lane < V, ordered(load_logits(row, start + lane, start + lane < V)), -2147483648)
        a, x = tl.maximum(a, x), tl.minimum(a, x)
        b, x = tl.maximum(b, x), tl.minimum(b, x)
        c, x = tl.maximum(c, x), tl.minimum(c, x)
        rest = tl.maximum(rest, x)
    return (a, b, c), tl.max(rest, 0)


@jit
def kept_weight(image, above, top, temperature, WEIGHTED: tl.constexpr):
    """The weights of `masses`, int32, of the images from `above` on. All others weigh 0."""
    weight = tl.full(image.shape, 1, tl.int32)
    if WEIGHTED:
        weight = (tl.exp((unordered(image) - top) / temperature) * 1073741824.0).to(tl.int32)
    return tl.where(image >= above, weight, 0)


@jit
def kept_mass(kept, weights, t):
    """The sum of the weights of all kept images from t on, int64."""
    mass = tl.where(kept[0] >= t, weights[0], 0).to(tl.uint32) + tl.where(kept[1] >= t, weights[1], 0).to(tl.uint32)
    mass += tl.where(kept[2] >= t, weights[2], 0).to(tl.uint32)  # each is at most 2^30
    return tl.sum(mass.to(tl.int64), 0)


@jit
def heaviest(row, V, kept, bound, top, temperature, floor, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest int32 t for which {image >= t} weighs `target` or more, -2^31 if there is none.

    It is found bit by bit. Only if the logits of `greatest_images` weigh too little, all logits are read again for every
    second bit.
    """
    least = tl.full((), -2147483648, tl.int32)
    zero = tl.full((), 0, tl.int32)
    above = tl.maximum(floor, bound + 1)
    weights = (
        kept_weight(kept[0], above, top, temperature, WEIGHTED), kept_weight(kept[1], above, top, temperature, WEIGHTED),
        kept_weight(kept[2], above, top, temperature, WEIGHTED),
    )  # fmt: skip
    if kept_mass(kept, weights, least) >= target:
        t = tl.where(kept_mass(kept, weights, zero) >= target, zero, least)
        for step in range(31):
            digit = zero + (1 << (30 - step))
            t += tl.where(kept_mass(kept, weights, t + digit) >= target, digit, 0)
    else:
        whole, _, _ = masses(row, V, top, temperature, floor, zero, zero, zero, WEIGHTED, BLOCK)
        t = tl.where(whole >= target, zero, least)
        for step in range(16):
            digit = zero + (1 << tl.maximum(29 - 2 * step, 0))
            one, two, three = masses(
                row, V, top, temperature, floor, t + digit, t + 2 * digit, t + 3 * digit, WEIGHTED, BLOCK
            )
            reached = (one >= target).to(tl.int32) + (two >= target).to(tl.int32) + (three >= target).to(tl.int32)
            t += digit * reached
    return t


@jit
def threshold(row, V, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The least logit of a row that survives top-k, then top-p and min-p (`sampling.survivors`)."""
    kept, bound = greatest_images(row, V, BLOCK)
    top = unordered(tl.max(kept[0], 0))
    temperature = tl.maximum(temperature, 1.1754943508222875e-38)
    least = tl.full((), -2147483648, tl.int32)
    by_count = least
    if top_k > 0:
        by_count = heaviest(row, V, kept, bound, top, temperature, least, top_k, False, BLOCK)
    by_mass = least
    if top_p < 1:
        total, _, _ = masses(row, V, top, temperature, by_count, least, least, least, True, BLOCK)
        target = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        by_mass = heaviest(row, V, kept, bound, top, temperature, by_count, target, True, BLOCK)
    image = tl.maximum(tl.maximum(by_count, by_mass), -0x7F800000)  # the image of the lowest finite number
    cut = unordered(image)
    if min_p > 0:
        cut = tl.maximum(cut, top + temperature * tl.log(min_p))
    return tl.minimum(cut, top)


@jit
def choose_kernel(
    logits, noise, depth, temperature, top_k, top_p, min_p, choice, usable, N, P, V, BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr, FILTERS: tl.constexpr, BY_DEPTH: tl.constexpr,
):  # fmt: skip
    """`sampling.choose` and `sampling.finite` of one node. Grid (B N,)."""
    node = tl.program_id(0)
    b = node // N
    row = logits + node.to(tl.int64) * V
    heat = tl.load(temperature + b)
    at = b * P + (tl.load(depth + node) if BY_DEPTH else node % N)
    cut = heat
    if FILTERS:
        cut = threshold(row, V, heat, tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b), BLOCK)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NOTHING, tl.int64)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        i = start + lane
        z = tl.load(row + i, mask=i < V, other=float("-inf")).to(tl.float32)
        spoilt |= ((z != z) | (z == float("inf"))).to(tl.int32)
        z = tl.where(z == z, z, float("-inf"))
        tops = tl.maximum(tops, z)
        key = z
        if SAMPLE:
            key += heat * tl.load(noise + at.to(tl.int64) * V + i, mask=i < V, other=0)
        if FILTERS:
            key = tl.where(z >= cut, key, float("-inf"))
        best = tl.maximum(best, tl.where(i < V, rank_of(key, i), NOTHING))
    tl.store(choice + node, 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF))
    tl.store(usable + node, (tl.max(spoilt, 0) == 0) & (tl.max(tops, 0) > float("-inf")))


def block_of(size: int, at_least: int = 1) -> tuple[int, int]:
    """(BLOCK, warps) for a program that reads rows of `size` values."""
    block = triton.next_power_of_2(max(min(size, 4096), at_least))
    return block, max(1, min(16, block // 256))


def noise_shape(seed: Tensor, n: Tensor, rows: int, hashes: Tensor) -> Tensor:
    """Empty output of `noise`."""
    return seed.new_empty(seed.shape[0], rows, hashes.shape[0], dtype=torch.float32)


def noise(out: Tensor, seed: Tensor, n: Tensor, rows: int, hashes: Tensor) -> None:
    """Gumbel noise, fp32 [B, rows, V], of the positions n + 1 to n + rows. seed, n [B]; hashes [V] of the token ids."""
    B, V = seed.shape[0], hashes.shape[0]
    block = min(1024, triton.next_power_of_2(V))
    noise_kernel[B * rows, triton.cdiv(V, block)](seed, n.contiguous(), hashes, out, rows, V, BLOCK=block, **EXACT)


def choose_shapes(logits: Tensor, *_rest) -> tuple[Tensor, Tensor]:
    """Empty outputs of `choose`."""
    return logits.new_empty(logits.shape[:2], dtype=torch.int64), logits.new_empty(logits.shape[:2], dtype=torch.bool)


def choose(out, logits, noise, depth, settings, filters) -> None:
    """(choice int64 [B,N], usable bool [B,N]) of logits [B,N,V] with noise [B,P,V].

    Node i takes the noise's row depth[b, i], or row i without `depth` [B,N]. Without noise the choice is greedy.
    """
    logits = logits.contiguous()
    B, N, V = logits.shape
    block, warps = block_of(V)
    table = logits if noise is None else noise.contiguous()
    choose_kernel[B * N,](
        logits, table, out[0] if depth is None else depth.contiguous(), *settings, *out, N, table.shape[1], V,
        BLOCK=block, SAMPLE=noise is not None, FILTERS=filters, BY_DEPTH=depth is not None, num_warps=warps, **EXACT,
    )  # fmt: skip
