"""The C++ kernels of a step's small work: what plain PyTorch computes, for any shape."""

from __future__ import annotations

import pytest
import torch
from test_cpu_kernels import backend, needs_kernels
from test_model import random_tree

import eagle_draft  # noqa: F401, it registers the operator that is compared with
import kernels
from decoding import sampling, step, verify
from decoding.params import SamplingMode
from kernels import records
from kernels.choice import Settings

SIZES = (5, 8, 4099)  # of a vocabulary: less than a register, one, and several with a rest

pytestmark = needs_kernels


def settings(*temperatures: float) -> Settings:
    heat = torch.tensor(temperatures).view(-1, 1, 1)
    ones = torch.ones_like(heat)
    return Settings(heat, torch.zeros_like(heat, dtype=torch.int64), ones, torch.zeros_like(heat))


def logits_with_traps(*shape: int) -> torch.Tensor:
    """Random logits with ties, a NaN, an infinity, a row of -infinity, and masked tokens."""
    z = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).round(decimals=1)
    z[0, 0, 1] = float("nan")
    z[0, 1, 3] = float("inf")
    z[0, 2] = -float("inf")
    z[0, 3, :3] = -float("inf")
    return z


@pytest.mark.parametrize("size", SIZES)
def test_noise_is_that_of_the_plain_code(size):
    """Other bits than the reference's, or noise so inexact at its ends that it is no Gumbel noise."""
    seed, n = torch.tensor([7, -(2**63), 2**62 + 5]), torch.tensor([0, 4000, 2**31])
    hashes = sampling.hash_ids(torch.arange(size))
    plain = sampling.noise_ahead(seed, n, 3, hashes)
    with backend().active():
        ours = sampling.noise_ahead(seed, n, 3, hashes)
    bits = sampling.noise_bits(seed, n[:, None] + 1 + torch.arange(3), hashes, hashed=True)
    v = ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24).double()
    exact = -(-torch.log1p(-v)).log()
    assert ours.shape == plain.shape and torch.allclose(ours.double(), exact, rtol=3e-7, atol=2e-7)


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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sample", [False, True])
def test_the_choice_is_that_of_the_plain_code(size, sample):
    """Another token of equals, a token of the padding, noise of another depth, or a row of NaN that counts as usable."""
    z, mode, heat = logits_with_traps(2, 6, size), SamplingMode(sample=sample), settings(0.7, 0.0)
    for rows, depth in ((3, torch.tensor([[0, 1, 1, 2, 2, 0], [0, 1, 2, 2, 1, 1]])), (6, None)):
        noise = torch.randn(2, rows, size) if sample else None
        with backend().active():
            tokens, usable = sampling.choose_and_check(z, noise, heat, mode, depth)
        assert torch.equal(usable, sampling.finite(z)) and usable.any() and not usable.all()
        assert torch.equal(tokens[usable], sampling._choose.reference(z, noise, depth, heat, False)[0][usable])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("noisy", [False, True])
def test_the_best_draft_tokens_are_those_of_the_plain_code(size, rows, noisy):
    """A missing or doubled candidate, scores of keys where those of logits are due, or noise of another token.

    rows: of the noise; 0 for none.
    """
    g = torch.Generator().manual_seed(size)
    z = torch.randn(2, 3, size, generator=g)
    ids = torch.randperm(size + 50, generator=g)[:size].sort().values
    noise = torch.randn(2, rows, size + 50, generator=g) if rows else None
    heat, mode = settings(0.3, 0.0), SamplingMode(sample=rows > 0)
    for count in (1, 4, min(size, 40)):
        for places in (ids, None):
            own = noise if places is not None or noise is None else noise[..., :size]
            plain = sampling._draft_topk.reference(z, own, places, heat, False, noisy, count)
            with backend().active():
                ours = sampling.draft_topk(z, own, places, heat, mode, count, noisy)
            assert torch.equal(ours[0], plain[0]) and torch.allclose(ours[1], plain[1], atol=2e-5)


def test_unusable_draft_logits_come_last():
    """A candidate of NaN before one that can be drafted, or a score of NaN that spoils a tree's order."""
    z = torch.tensor([[[float("nan"), 1.0, -float("inf"), 3.0, float("nan"), 2.0]], [[float("nan")] * 6]])
    with backend().active():
        best, scores = sampling.draft_topk(z, None, None, settings(0.0, 0.0), SamplingMode(), 6)
    assert best[0, 0, :3].tolist() == [3, 5, 1] and sorted(best[0, 0].tolist()) == list(range(6))
    assert torch.allclose(scores[0, 0, :3].exp().sum(), torch.tensor(1.0)) and not scores.isnan().any()
    assert scores[0, 0, 3:].tolist() == scores[1, 0, :3].tolist() == [-float("inf")] * 3


@pytest.mark.parametrize("fed", [0, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_rows_are_placed_as_the_plain_code_places_them(fed, batched):
    """A position past the rotary table, a slot past the cache, or a token of another sequence."""
    g = torch.Generator().manual_seed(1)
    depth = torch.randint(0, 4, (2 if batched else 1, 5), generator=g)
    cos, sin = torch.randn(2, 20, 8, generator=g).unbind(0)
    tokens, n, count = torch.randint(0, 99, (2, 24), generator=g), torch.tensor([4, 21]), torch.tensor([2, 3])
    for lead in (0, 1):
        for part in (depth, depth[:, :0]):
            given = (n, part, records.Rotary(cos, sin), 24, fed, count, tokens, lead)
            with backend().active():
                ours = kernels.place_rows(*given)
            assert all(torch.equal(a, b) for a, b in zip(ours, kernels.place_rows(*given), strict=True))


def join(embedding, feature, source, norms, keep_normed):
    return torch.ops.eaglet_cpu.join_rows.default(embedding, feature, source, *norms, 1e-5, keep_normed)


@pytest.mark.parametrize("keep_normed", [False, True])
def test_embeddings_stand_beside_the_features_of_their_parents(keep_normed):
    """The feature of another row or sequence, a norm of the other half, or a residual after the norm."""
    g = torch.Generator().manual_seed(2)
    table, features = torch.randn(9, 16, generator=g), torch.randn(2, 4, 16, generator=g)
    tokens, source = torch.randint(0, 9, (2, 3), generator=g), torch.tensor([[0, 0, 3], [2, 1, 1]])
    norms = torch.rand(16, generator=g), torch.rand(16, generator=g)
    residual, joined = join(table[tokens], features, source, norms, keep_normed)
    want = torch.ops.eaglet.join_rows(table, tokens, features, source, *norms, 1e-5, keep_normed)
    assert torch.allclose(residual, want[0], atol=1e-6) and torch.allclose(joined, want[1], atol=1e-6)
    _, joined = join(table[tokens], features[:, :3].contiguous(), None, (None, None), False)
    assert torch.equal(joined, torch.cat((table[tokens], features[:, :3]), -1))


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


def commit_case(seed: int, history: bool) -> tuple[tuple, records.StepBuffers]:
    """What `step._write` gets: the accepted path and the state of two sequences in their middle or at an end."""
    g = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    P, N, F, S = 4, 6, 16, 40
    accepted = records.Accepted(numbers(0, N, 2, P), numbers(1, P + 1, 2), numbers(0, 9, 2), numbers(0, 9, 2, P))
    given = accepted, numbers(0, 4, 2, N) > 0, torch.randn(2, N, F, generator=g)
    state = {
        "tokens": numbers(0, 9, 2, S), "n": numbers(1, 30, 2), "root": numbers(0, 9, 2), "count": numbers(1, 3, 2),
        "produced": numbers(0, 9, 2), "limit": numbers(8, 14, 2), "done": numbers(0, 3, 2) == 0,
        "stop_ids": numbers(5, 30, 2, 3), "ring": numbers(0, 9, step.RING, 2, 2 + 2 * P),
        "features": torch.randn(2, P, F, generator=g),
        "history": torch.randn(2, step.HISTORY + 1 if history else 0, F, generator=g),
        "step": torch.tensor([seed]), "segments": torch.tensor([[50, 39], [7, 35]]),
    }  # fmt: skip
    return given, records.StepBuffers(**state)


@pytest.mark.parametrize("history", [False, True])
def test_a_commit_writes_what_the_plain_code_writes(history):
    """A stop id that is missed, a finished sequence that goes on, or a feature in another row."""
    ended = []
    for seed in range(40):
        given, state = commit_case(seed, history)
        mine = records.StepBuffers(*(t.clone() for t in state))
        want = step._write.reference(*given, state)
        ours = torch.ops.eaglet_cpu.commit.default(*given, mine)
        assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True))
        for name, *pair in zip(state._fields, mine, state, strict=True):
            if name in ("tokens", "history"):  # nobody reads their last row
                pair = [t[:, :-1] for t in pair]
            assert torch.equal(*pair), name
        ended += state.done.tolist()
    assert 10 < sum(ended) < 75


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_rows_of_the_cache_move_as_in_the_plain_code(dtype):
    """A row that is overwritten before it has moved, or a row of another layer, head or sequence."""
    source, target = torch.tensor([[5, 7, 6, 9], [3, 4, 8, 19]]), torch.tensor([[5, 6, 7, 19], [3, 4, 5, 19]])
    for batch, apart in ((2, 0), (1, 21)):  # a cache for each sequence, and one for both
        kv = (torch.randn(3, 2, batch, 2, 20 + apart, 12) * 50).to(dtype)
        mine, places = kv.clone(), torch.tensor([[0], [apart]])
        kernels.commit_kv(kv, source + places, target + places)
        with backend().active() as active:
            kernels.commit_kv(mine, source + places, target + places)
        assert not active.declined and torch.equal(mine[..., :-1, :], kv[..., :-1, :])


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
