"""The C++ kernels of a step's small work, beside what tests/test_launches.py asks of them and of Triton."""

from __future__ import annotations

import pytest
import torch
from test_cpu_kernels import backend, needs_kernels
from test_model import random_tree

from decoding import sampling, verify
from decoding.params import SamplingMode
from kernels import records
from kernels.choice import Settings

pytestmark = needs_kernels


def test_noise_is_finite_at_both_ends():
    """Infinite noise for the smallest or the largest of all words, which no short test draws."""
    words = torch.tensor([0, 1, 2**32 - 1, 2**32 - 2, 2**31, 2**24])
    # the kernel mixes a hash with two keys by bijections, so the hashes of any words can be computed backwards
    seed, n = torch.tensor([3]), torch.tensor([11])
    first, second = sampling._keys_on_host(seed, n[:, None] + 1).flatten().tolist()
    hashes = torch.tensor([unmixed(int(word), second) ^ first for word in words])
    assert sampling.noise_bits(seed, n[:, None] + 1, hashes, hashed=True).flatten().tolist() == words.tolist()
    with backend().active():
        ours = sampling.noise_ahead(seed, n, 1, hashes).flatten()
    assert torch.allclose(ours, sampling.noise_ahead.reference(seed, n, 1, hashes).flatten(), rtol=1e-6, atol=1e-6)
    assert ours.isfinite().all() and ours[0] > 22 and ours[2] < -2.8


def unmixed(x: int, key: int) -> int:
    """The inverse of `sampling._mix` for one value."""
    mask = 0xFFFFFFFF
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) & mask
    x ^= key
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) & mask
    return x ^ x >> 16


def test_unusable_draft_logits_come_last():
    """A candidate of NaN before one that can be drafted, or a score of NaN that spoils a tree's order."""
    cold = Settings(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1, dtype=torch.int64), *torch.zeros(2, 2, 1, 1))
    z = torch.tensor([[[float("nan"), 1.0, -float("inf"), 3.0, float("nan"), 2.0]], [[float("nan")] * 6]])
    with backend().active():
        best, scores = sampling.draft_topk(z, None, None, cold, SamplingMode(), 6)
    assert best[0, 0, :3].tolist() == [3, 5, 1] and sorted(best[0, 0].tolist()) == list(range(6))
    assert torch.allclose(scores[0, 0, :3].exp().sum(), torch.tensor(1.0)) and not scores.isnan().any()
    assert scores[0, 0, 3:].tolist() == scores[1, 0, :3].tolist() == [-float("inf")] * 3


def test_acceptance_is_that_of_the_plain_code():
    """A path that goes on below a token that differs, an invalid node, or the deeper of two equals by a higher number."""
    lengths = set()
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        N = int(torch.randint(1, 12, (), generator=g))
        trees = [random_tree(N, seed), random_tree(N, seed + 999)]
        parent = torch.stack([tree[0] for tree in trees])
        ancestors = torch.stack([tree[1] for tree in trees])
        depth = ancestors.sum(-1) - 1
        tokens, choice = (torch.randint(0, 2, (2, N), generator=g) for _ in range(2))
        valid = torch.rand(2, N, generator=g) > 0.1
        D = int(depth.max()) + seed % 2
        given = tokens, parent, depth, ancestors, valid, choice, D
        with backend().active():
            ours = verify.accept(*given)
        assert all(torch.equal(a, b) for a, b in zip(ours, verify.accept(*given), strict=True))
        lengths |= set(ours.count.tolist())
    assert len(lengths) > 4


def test_layers_cannot_be_read_from_another_tensor():
    """A tensor of numbers that is taken for the memory of layers: a crash instead of an error."""
    x, nothing = torch.zeros(1, 1, 64), torch.zeros(1, 1, dtype=torch.int64)
    visible = nothing[None].bool()
    rotary, kv = [torch.zeros(1, 1, 8)] * 2, torch.zeros(1, 2, 1, 1, 4, 16)
    nodes = records.flat(records.Nodes(*rotary, nothing, nothing, nothing[0], visible, visible))
    with backend().active():
        copied = torch.ops.eaglet_cpu.stack_layers.default([], torch.ones(64), [], [], 0, 1e-5, 1.0, 0.0).clone()
    for other in (torch.tensor([1]), copied):
        with pytest.raises(RuntimeError, match="does not hold layers"):
            torch.ops.eaglet_cpu.layers.default(x, None, other, nodes, kv, True, ())
