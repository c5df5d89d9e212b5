"""Tests of validation, the quality of the noise, processors against transformers, distributions, and tracing."""

import itertools
import math

import numpy as np
import pytest
import torch

from decoding import sampling
from decoding.params import SamplingMode, SamplingParams
from decoding.sampling import SamplingState

VOCAB = 64
SAMPLE = SamplingMode(sample=True)
FILTER = SamplingMode(sample=True, filters=True)
ALL = SamplingMode(sample=True, filters=True, penalties=True)


def state_for(rows: int = 1, **kwargs) -> SamplingState:
    state = SamplingState(rows)
    state.set(SamplingParams(**kwargs))
    return state


def chi_square_z(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square statistic as a standard normal deviate (Wilson-Hilferty); bins under 5 expected merge."""
    big = expected >= 5
    observed = torch.cat([observed[big], observed[~big].sum()[None]]).double()
    expected = torch.cat([expected[big], expected[~big].sum()[None]]).double()
    if expected[-1] < 5:
        assert observed[-1] <= 30, "draws where almost none are expected"
        observed, expected = observed[:-1], expected[:-1]
    x, k = float(((observed - expected) ** 2 / expected).sum()), max(len(expected) - 1, 1)
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def warp(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """transformers' warpers in float64 on [rows, V]; removed tokens are -inf."""
    lp = pytest.importorskip("transformers").generation.logits_process
    z = lp.TemperatureLogitsWarper(float(temperature))(None, logits.double())
    z = lp.TopKLogitsWarper(top_k)(None, z) if top_k else z
    z = lp.TopPLogitsWarper(top_p)(None, z) if top_p < 1 else z
    return lp.MinPLogitsWarper(min_p)(None, z) if min_p else z


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("field, bad", [
    ("temperature", [-0.1, math.nan, math.inf, 1e39, True, "1", None, 1j]),
    ("top_k", [-1, 1.0, True, math.nan, 2**63, None]),
    ("top_p", [0, 0.0, -0.5, 1.0001, math.nan, True, "0.9"]),
    ("min_p", [-0.01, 1, 1.0, math.nan, False]),
    ("repetition_penalty", [0, -1, math.inf, math.nan, True]),
    ("presence_penalty", [-2.01, 2.01, math.nan, True]),
    ("frequency_penalty", [-2.01, 2.01, math.inf, False]),
    ("seed", [2**64, -(2**63) - 1, 0.0, True, "7"]),
    ("max_new_tokens", [-1, -5, 1.5, True, None]),
    ("stop_ids", [(True,), (-1,), (2.0,), 5, None, "12"]),
    ("stop", ["text", ("",), ("x" * 1025,), ("é" * 513,), ("a",) * 17, (b"x",), None]),
])  # fmt: skip
def test_bad_values_are_refused_in_one_line(field, bad):
    """Prevents silently greedy T = -1, top_k = -1 crashing later, and `true` passing as 1."""
    for value in bad:
        with pytest.raises(ValueError) as error:
            SamplingParams(**{field: value})
        assert str(error.value).startswith(field) and "allowed" in str(error.value) and "\n" not in str(error.value)


def test_good_values_and_modes():
    """Prevents valid edge values being refused, and a graph compiled without the code that a request needs."""
    edge = SamplingParams(temperature=1e-30, top_p=1e-9, min_p=0.999, seed=2**64 - 1, stop=["a"] * 16, stop_ids=[3])
    assert edge.stop == ("a",) * 16 and edge.stop_ids == (3,)
    SamplingParams(seed=-(2**63), presence_penalty=-2, frequency_penalty=2, stop=("é" * 512,), temperature=3)
    assert SamplingParams().mode == SamplingMode()
    assert SamplingParams(top_k=5, top_p=0.5).mode == SamplingMode()
    assert SamplingParams(temperature=1).mode == SAMPLE
    for kwargs in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(temperature=1, **kwargs).mode == FILTER
    for kwargs in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -1}):
        assert SamplingParams(**kwargs).mode == SamplingMode(penalties=True)


def test_state_is_set_in_place_and_seeds_wrap():
    """Prevents captured graphs reading freed buffers, and row seeds overflowing at the 64-bit end."""
    state = SamplingState(3)
    buffers = {name: value.data_ptr() for name, value in vars(state).items()}
    state.set(SamplingParams(temperature=0.5, top_k=7, seed=2**63 - 1))
    assert buffers == {name: value.data_ptr() for name, value in vars(state).items()}
    assert state.seed.tolist() == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert (state.temperature.unique().item(), state.top_k.unique().item()) == (0.5, 7)
    state.set(SamplingParams(seed=2**64 - 1))
    assert state.seed.tolist() == [-1, 0, 1]
    rows = [SamplingParams(temperature=1e-60, seed=5), SamplingParams(top_k=7, seed=6), SamplingParams(1.0, 7, seed=6)]
    state.set(rows)
    assert buffers == {name: value.data_ptr() for name, value in vars(state).items()}
    assert state.seed.tolist() == [5, 6, 6] and state.top_k.flatten().tolist() == [0, 0, 7]
    assert state.temperature.flatten().tolist() == [2.0**-126, 0.0, 1.0]
    assert state.part(2).seed.tolist() == [6] and state.part(2).top_k.shape == (1, 1, 1)
    with pytest.raises(ValueError, match="1 SamplingParams for 3 rows; pass one for all rows, or one per row"):
        state.set(rows[:1])


# ---------------------------------------------------------------- noise


def twin_bits(seed: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`noise_bits` written independently in wrapping uint32 / uint64 arithmetic."""

    def mix(x, key=0):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15)) ^ np.asarray(key, np.uint32)) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    seed = seed.astype(np.uint64)[:, None]
    low = mix(seed.astype(np.uint32) ^ np.uint32(0x9E3779B9))
    high = mix((seed >> np.uint64(32)).astype(np.uint32) ^ low)
    first = mix(mix(positions.astype(np.uint32) + low) ^ high)
    second = mix((first + high) ^ low)
    return mix(mix(ids.astype(np.uint32)) ^ first[..., None], second[..., None]).astype(np.int64)


def test_noise_bits_equal_the_numpy_twin():
    """Prevents an int64 overflow, or a signed shift, giving other bits on another device or compiler; the in-place hash
    from overwriting the engine's buffers; and other key words on a CPU, which computes them with Python integers."""
    generator = torch.Generator().manual_seed(1)
    extreme = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -(2**31), 2**63 - 1, -(2**63)]
    random = torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator).tolist()
    seed = torch.tensor(extreme + random)
    positions = torch.randint(0, 2**31, (len(seed), 4), generator=generator)
    positions[:10] = torch.tensor([0, 1, 2**31 - 1, 2**32 - 1])
    ids = torch.cat([torch.tensor([0, 1, 2**31 - 1, 2**32 - 1]), torch.arange(100, 160)])
    copies = [x.clone() for x in (seed, positions, ids)]
    bits = sampling.noise_bits(seed, positions, ids)
    assert all(map(torch.equal, (seed, positions, ids), copies))  # the hash works in place, on copies
    assert bits.min() >= 0 and bits.max() < 2**32 and bits.shape == (310, 4, 64)
    with np.errstate(over="ignore"):
        assert np.array_equal(bits.numpy(), twin_bits(seed.numpy(), positions.numpy(), ids.numpy()))
    assert torch.equal(sampling._keys_on_host(seed, positions), torch.stack(sampling._keys(seed, positions)))
    for shape in ((310, 1, 64), (310, 4, 64)):  # ids per row and per node
        assert torch.equal(sampling.noise_bits(seed, positions, ids.expand(shape)), bits)
    # the largest intermediate product stays inside the signed 64-bit range
    assert (2**32 - 1) * max(abs(sampling.MIX_A), abs(sampling.MIX_B)) < 2**63


def test_noise_is_finite_at_both_ends(monkeypatch):
    """Prevents log(0): 32 one bits round to v = 1 in fp32, and would bar a token for ever."""
    bits = torch.tensor([0, 1, 2, 2**24, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 2, 2**32 - 1]).view(1, 1, -1)
    monkeypatch.setattr(sampling, "noise_bits", lambda *_: bits.clone())
    g = sampling.gumbel_noise(None, None, None)
    v = (bits.double() + 0.5) / 2**32
    assert g.isfinite().all() and g.dtype == torch.float32
    assert (g[..., :-1] >= g[..., 1:]).all() and g.min() > -2.83 and g.max() < 22.89
    torch.testing.assert_close(g[..., :5].double(), -torch.log(-torch.log1p(-v))[..., :5], rtol=2e-5, atol=2e-6)


def test_noise_bits_are_uniform_and_independent():
    """Prevents a weak hash: biased bits, or draws correlated across ids, positions, seeds or seed halves."""
    seed, positions, ids = torch.arange(8), torch.arange(64).expand(8, 64), torch.arange(1024)
    x = sampling.noise_bits(seed, positions, ids)  # 524,288 words
    for bit in range(32):
        share = float((x >> bit & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(x.numel()), f"bit {bit}: {share}"
    for shift in (0, 8, 16, 24):
        counts = (x >> shift & 255).flatten().bincount(minlength=256)
        assert abs(chi_square_z(counts, torch.full((256,), x.numel() / 256))) < 4.5
    shifted_seed = sampling.noise_bits(seed + 2**32, positions, ids)
    pairs = {
        "ids": (x[..., 1:], x[..., :-1]),
        "ids two apart": (x[..., 2:], x[..., :-2]),
        "ids 512 apart": (x[..., 512:], x[..., :-512]),
        "positions": (x[:, 1:], x[:, :-1]),
        "position against id": (x[:, 1:, :-1], x[:, :-1, 1:]),
        "seeds": (x[1:], x[:-1]),
        "seed against position": (x[1:, :-1], x[:-1, 1:]),
        "upper seed half": (x, shifted_seed),
    }
    for name, (a, b) in pairs.items():
        u, w = (y.flatten().double() / 2**32 - 0.5 for y in (a, b))
        assert abs(float((u * w).mean()) * 12) < 5 / math.sqrt(u.numel()), name
        for shift in (0, 28):
            joint = ((a >> shift & 15) * 16 + (b >> shift & 15)).flatten().bincount(minlength=256)
            assert abs(chi_square_z(joint, torch.full((256,), a.numel() / 256))) < 4.5, (name, shift)


# ---------------------------------------------------------------- filters


CASES = [
    {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_k": 50}, {"top_k": 10_000}, {"top_k": 40, "top_p": 0.8},
    {"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.05}, {"temperature": 1.7, "top_p": 0.999},
    {"min_p": 0.1}, {"temperature": 2.0, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.5, "top_k": 600, "top_p": 0.9, "min_p": 0.001},
]  # fmt: skip


def both_ways(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """survivors of [B,N,V], or [N,V] of one sequence, by the CPU path, checked against the fixed-shape GPU path."""
    if logits.dim() == 2:
        return both_ways(logits[None], state)[0]
    mask = sampling.survivors(logits, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_cutoff", sampling._cutoff_search)
        assert torch.equal(sampling.survivors(logits, state), mask)
    return mask


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocab, scale", [(40, 2.0), (1000, 0.5), (1000, 4.0), (4096, 2.5)])
def test_survivors_equal_transformers(case, vocab, scale):
    """Prevents filters in another order, a wrong renormalisation after top-k, or an inexact threshold."""
    logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    case = {"temperature": 1.0, **case}
    assert torch.equal(both_ways(logits, state_for(**case)), warp(logits, **case).isfinite())


def test_ties_share_their_fate_and_one_token_survives():
    """Prevents results that depend on how a sort orders equal logits, empty survivor sets, and a sum that has to exceed
    top-p's mass, not to reach it: of 1/2, 1/4 and 1/4 top-p = 0.5 keeps the first."""
    tied = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0, -0.0, -1.0]])
    keep = lambda **kw: both_ways(tied, state_for(temperature=1.0, **kw)).nonzero()[:, 1].tolist()  # noqa: E731
    assert keep(top_k=1) == [0] and keep(top_k=2) == keep(top_k=4) == [0, 2, 3, 4]
    assert keep(top_k=6) == keep(top_k=7) == [0, 1, 2, 3, 4, 5, 6]  # 0.0 and -0.0 are equal
    first, second = 0.4243, 0.1561  # softmax of the three largest
    assert keep(top_p=first - 0.01) == [0] and keep(top_p=first + 0.01) == [0, 2, 3, 4]
    assert keep(top_p=first + 3 * second - 0.01) == [0, 2, 3, 4]
    assert keep(top_p=first + 3 * second + 0.01) == [0, 1, 2, 3, 4]
    flat = torch.zeros(2, 300)
    for kwargs in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.99}, {"top_p": 0.5, "top_k": 3}):
        state = state_for(temperature=1e-30, **kwargs)
        assert both_ways(flat, state).all()
        assert torch.equal(both_ways(torch.arange(300.0)[None], state).sum(-1), torch.tensor([1]))
    lonely = torch.full((1, 300), -math.inf)
    lonely[0, 7] = -4.0
    assert both_ways(lonely, state_for(temperature=2.0, top_k=9, top_p=0.9)).nonzero().tolist() == [[0, 7]]
    half = torch.tensor([[0.0, -math.log(2), -math.log(2)]])
    assert both_ways(half, state_for(temperature=1.0, top_p=0.5)).tolist() == [[True, False, False]]


def test_a_row_is_filtered_alone_as_in_a_batch():
    """Prevents the nucleus from depending on the number of tree nodes (identity with plain decoding)."""
    logits = torch.randn(30, 2048, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 8, 30)[:, None]
    state = state_for(temperature=0.9, top_p=0.93, top_k=700, min_p=1e-4)
    together = both_ways(logits, state)
    for row in range(30):
        assert torch.equal(both_ways(logits[row : row + 1], state)[0], together[row])


MIXED = [{}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.5, "top_p": 0.6, "min_p": 0.01}, {"temperature": 1.0}]


def mixed_state() -> SamplingState:
    """Four sequences with settings of their own: greedy, top-k, top-p with min-p, and sampling without filters."""
    state = SamplingState(4)
    state.set([SamplingParams(seed=b, **settings) for b, settings in enumerate(MIXED)])
    return state


def test_sequences_with_settings_of_their_own_are_decided_as_alone():
    """Prevents one sequence's temperature or filters from reaching another, and 0 / 0 in a greedy row beside others."""
    logits = torch.randn(4, 5, 300, generator=torch.Generator().manual_seed(8)) * 3
    state = mixed_state()
    noise = sampling.gumbel_noise(state.seed, torch.arange(5).expand(4, 5), torch.arange(300))
    mask, choice = both_ways(logits, state), sampling.choose(logits, noise, state, FILTER)
    p = sampling.probabilities(logits, state, FILTER)
    keys, scores = sampling.draft_keys(logits, noise, state, FILTER)
    for b, settings in enumerate(MIXED):
        own, mode = state_for(seed=b, **settings), SamplingParams(**settings).mode
        one, heard = logits[b : b + 1], noise[b : b + 1] if mode.sample else None
        assert torch.equal(choice[b], sampling.choose(one, heard, own, mode)[0])
        assert torch.equal(p[b], sampling.probabilities(one, own, mode)[0])
        for together, alone in zip((keys, scores), sampling.draft_keys(one, heard, own, mode), strict=True):
            torch.testing.assert_close(together[b], alone[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(mask[b], both_ways(one, own)[0]) if mode.filters else mask[b].all()


# ---------------------------------------------------------------- choice


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choice_follows_the_processed_distribution(case):
    """Prevents wrong frequencies: 10^5 draws with the real noise, positions and seeds as samples (chi-square).

    Power: with 10^5 draws over at most 64 tokens, a total variation of 0.01 gives z above 8.
    """
    case = {"temperature": 1.0, **case}
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    state = state_for(10, seed=77, **case)
    noise = sampling.gumbel_noise(state.seed, torch.arange(10_000).expand(10, -1), torch.arange(VOCAB))
    choice = sampling.choose(logits.expand(10, 10_000, VOCAB), noise, state, FILTER)
    p = warp(logits, **case).softmax(-1)[0]
    counts = choice.flatten().bincount(minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    assert chi_square_z(counts[p > 0], p[p > 0] * 1e5) < 4


def test_penalties_and_filters_equal_those_of_transformers():
    """Prevents penalties applied after the temperature or to the wrong sign, and multi-round verification from testing
    against another distribution than `choose` samples."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 1, VOCAB, generator=generator) * 2
    prompt, output = torch.tensor([1, 5, 9, 9]), torch.tensor([2, 5, 5, 30])
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.25}
    case = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    state = state_for(**case, **settings)
    seen, counts = torch.zeros(1, VOCAB, dtype=torch.bool), torch.zeros(1, VOCAB, dtype=torch.int32)
    seen[0, torch.cat([prompt, output[:2]])] = True
    counts[0] = output[:2].bincount(minlength=VOCAB)
    path = output[2:].view(1, 1, 2)
    z = sampling.apply_penalties(logits, seen, counts, path, torch.ones_like(path, dtype=torch.bool), state)
    lp = pytest.importorskip("transformers").generation.logits_process
    history = torch.cat([prompt, output])[None]
    expected = lp.RepetitionPenaltyLogitsProcessor(1.3)(history, logits[0].double())
    expected -= 0.25 * output.bincount(minlength=VOCAB) + 0.4 * (output.bincount(minlength=VOCAB) > 0)
    want = warp(expected, **case).softmax(-1)
    torch.testing.assert_close(sampling.probabilities(z, state, ALL)[0].double(), want, rtol=1e-5, atol=1e-6)
    greedy = sampling.probabilities(logits, state_for(), SamplingMode())
    assert torch.equal(greedy, torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float())


def test_ties_go_to_the_lowest_id():
    """Prevents plain and drafted decoding from breaking the same tie differently, at several widths, and the blocked
    argmax from losing a maximum at a block edge."""
    for vocab in (7, 64, 1000, 4096):
        x = torch.randn(50, vocab).mul(3).round()
        assert sampling._argmax(x).tolist() == [int((row == row.max()).nonzero()[0]) for row in x]
        for low, high in ((vocab // 2, vocab - 1), (vocab - 2, vocab - 1), (1, 2)):
            logits = torch.zeros(2, 3, vocab)
            logits[..., [low, high]] = 1.5
            assert sampling.choose(logits, None, state_for(2), SamplingMode()).eq(low).all()
            state = state_for(2, temperature=1.0, top_k=2)
            assert sampling.choose(logits, torch.zeros_like(logits), state, FILTER).eq(low).all()


def test_low_temperature_becomes_greedy():
    """Prevents a jump at T -> 0: with T g smaller than the margin the sampled token is the greedy one."""
    logits = torch.randn(1, 200, VOCAB, generator=torch.Generator().manual_seed(6)) * 3
    greedy = sampling.choose(logits, None, state_for(), SamplingMode())
    for temperature, least in ((1e-60, 1.0), (1e-30, 1.0), (1e-6, 1.0), (0.01, 0.97)):
        state = state_for(temperature=temperature, top_p=0.99)
        noise = sampling.gumbel_noise(state.seed, torch.arange(200)[None], torch.arange(VOCAB))
        for mode in (SAMPLE, FILTER):
            assert (sampling.choose(logits, noise, state, mode) == greedy).float().mean() >= least
    hot = state_for(temperature=3e38, top_p=0.5)
    assert len(sampling.choose(logits, noise, hot, FILTER).unique()) > 20  # uniform, not an overflow to token 0


def test_same_choice_for_any_row_grouping_and_top_k_1_is_greedy():
    """Prevents noise tied to a node's index instead of its position, and top_k = 1 differing from greedy."""
    logits = torch.randn(1, 30, VOCAB)
    state = state_for(temperature=1.0, top_k=1, seed=3)
    noise = sampling.gumbel_noise(state.seed, torch.arange(30)[None], torch.arange(VOCAB))
    assert torch.equal(sampling.choose(logits, noise, state, FILTER), logits.argmax(-1))
    state.set(SamplingParams(temperature=1.0, top_p=0.9, seed=3))
    whole = sampling.choose(logits, noise, state, FILTER)
    for i in range(30):
        one = sampling.gumbel_noise(state.seed, torch.tensor([[i]]), torch.arange(VOCAB))
        assert torch.equal(one[0, 0], noise[0, i])
        assert torch.equal(sampling.choose(logits[:, i : i + 1], one, state, FILTER)[0], whole[0, i : i + 1])
    rows = state_for(3, temperature=1.0, seed=2)
    assert sampling.gumbel_noise(rows.seed, torch.arange(30).expand(3, 30), torch.arange(VOCAB))[1].equal(noise[0])


def test_noise_streams_are_independent_and_uniform():
    """Prevents draft, acceptance and residual draws of multi-round verification from sharing randomness."""
    seed = torch.tensor([0, 1, -1, 2**40 + 7])
    positions, ids = torch.arange(256).expand(4, -1), torch.arange(64)
    draws = [sampling.uniform_noise(s, positions, ids) for s in (seed, *(sampling.stream(seed, k) for k in (1, 2, 3)))]
    for number, u in enumerate(draws):
        assert u.min() >= 0 and u.max() < 1
        counts = (u * 256).long().flatten().bincount(minlength=256)
        assert abs(chi_square_z(counts, torch.full((256,), u.numel() / 256))) < 4.5
        for other in draws[:number]:
            assert abs(float(((u - 0.5) * (other - 0.5)).double().mean()) * 12) < 5 / math.sqrt(u.numel())


def test_rows_that_cannot_be_chosen_from_are_flagged():
    """Prevents NaN or all-masked logits from silently becoming token 0, or disturbing another row."""
    good = torch.randn(1, 6, 128)
    logits = good.clone()
    logits[0, 1, 5] = math.nan
    logits[0, 2] = -math.inf
    logits[0, 3, 9] = math.inf
    logits[0, 4, 1:] = -math.inf
    assert sampling.finite(logits).tolist() == [[True, False, False, False, True, True]]
    state = state_for(temperature=1.0, top_p=0.9, top_k=20)
    noise = sampling.gumbel_noise(state.seed, torch.arange(6)[None], torch.arange(128))
    choice, clean = (sampling.choose(z, noise, state, FILTER)[0] for z in (logits, good))
    assert choice[[0, 5]].equal(clean[[0, 5]]) and choice[4] == 0
    search = sampling._cutoff_search(logits, state.temperature, state.top_k, state.top_p)
    host = sampling._cutoff(logits, state.temperature, state.top_k, state.top_p)
    assert torch.equal(search[0, [0, 4, 5]], host[0, [0, 4, 5]])


# ---------------------------------------------------------------- penalties


def test_penalties_per_node_equal_brute_force():
    """Prevents a node from being penalised for a sibling's tokens, or a path token being counted once."""
    generator = torch.Generator().manual_seed(8)
    B, N, P, V = 2, 7, 5, 30
    logits = torch.randn(B, N, V, generator=generator) * 3
    logits[..., 4] = -math.inf
    prompt = torch.randint(0, V, (B, 6), generator=generator)
    output = torch.randint(0, V, (B, 8), generator=generator)
    path = torch.randint(0, 6, (B, N, P), generator=generator)  # few ids: many repeats
    valid = torch.rand(B, N, P, generator=generator) < 0.6
    path[~valid] = torch.tensor([-1, V + 5, 0])[torch.randint(0, 3, (int((~valid).sum()),), generator=generator)]
    state = state_for(repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=-0.2)
    count = torch.stack([row.bincount(minlength=V) for row in output]).int()
    seen = torch.stack([torch.cat([a, b]).bincount(minlength=V) for a, b in zip(prompt, output, strict=True)])
    z = sampling.apply_penalties(logits, seen, count, path, valid, state)
    for b, n in itertools.product(range(B), range(N)):
        generated = output[b].tolist() + path[b, n][valid[b, n]].tolist()
        for t in range(V):
            x = float(logits[b, n, t])
            if t in generated or t in prompt[b]:
                x = x * 1.7 if x < 0 else x / 1.7
            x -= 0.3 * (t in generated) - 0.2 * generated.count(t)
            assert float(z[b, n, t]) == pytest.approx(x, rel=1e-5, abs=1e-5), (b, n, t)


def test_path_penalties_have_the_bits_of_committed_ones():
    """Prevents a fork between plain decoding (tokens in the counts) and a tree (tokens on the path)."""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(1, 1, VOCAB, generator=generator) * 5
    tokens = torch.tensor([3, 3, 8, 60])
    state = state_for(repetition_penalty=1.15, presence_penalty=0.7, frequency_penalty=0.13)
    zero = torch.zeros(1, VOCAB, dtype=torch.int64)
    counted = tokens.bincount(minlength=VOCAB)[None]
    valid = torch.ones(1, 1, 4, dtype=torch.bool)
    in_tree = sampling.apply_penalties(logits, zero, zero, tokens.view(1, 1, 4), valid, state)
    committed = sampling.apply_penalties(logits, counted, counted, tokens.view(1, 1, 4), ~valid, state)
    assert torch.equal(in_tree, committed)
    off = sampling.apply_penalties(logits, counted, counted, tokens.view(1, 1, 4), valid, state_for())
    assert torch.equal(off, logits)


# ---------------------------------------------------------------- drafting


def test_draft_keys_order_survivors_first():
    """Prevents drafting tokens that the filters removed before tokens that may win, and infinite scores."""
    z = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(10)) * 3
    state = state_for(2, temperature=1.2, top_k=6)
    noise = sampling.gumbel_noise(state.seed, torch.arange(3).expand(2, 3), torch.arange(VOCAB))
    keys, scores = sampling.draft_keys(z, noise, state, FILTER)
    alive = sampling.survivors(z, state)
    assert keys.isfinite().all() and scores.isfinite().all() and alive.sum(-1).eq(6).all()
    assert torch.equal(keys.argmax(-1), sampling.choose(z, noise, state, FILTER))
    torch.testing.assert_close(keys[alive], (z + 1.2 * noise)[alive])
    for x in (keys, scores):
        order = x.argsort(-1, descending=True)
        assert alive.gather(-1, order)[..., :6].all()
        raw = z.gather(-1, order)[..., 6:]
        assert (raw[..., :-1] >= raw[..., 1:]).all()
    expected = ((z + 1.2 * noise) / 1.2).masked_fill(~alive, -math.inf).log_softmax(-1)
    torch.testing.assert_close(scores[alive], expected[alive])
    plain = sampling.draft_keys(z, noise, state, SAMPLE)
    torch.testing.assert_close(plain[1], ((z + 1.2 * noise) / 1.2).log_softmax(-1))
    cold = state_for(2, temperature=0.1)
    plain = sampling.draft_keys(z, noise, cold, SAMPLE)
    torch.testing.assert_close(plain[1], ((z + 0.1 * noise) / 0.5).log_softmax(-1))


def test_draft_keys_fall_back_to_greedy():
    """Prevents top_k = 1 at T = 1 from building another tree than greedy decoding does."""
    z = torch.randn(1, 4, VOCAB)
    noise = torch.randn(1, 4, VOCAB)
    greedy = sampling.draft_keys(z, None, state_for(), SamplingMode())
    assert torch.equal(greedy[0], z) and torch.equal(greedy[1], z.log_softmax(-1))
    for other in (
        sampling.draft_keys(z, noise, state_for(), SamplingMode()),
        sampling.draft_keys(z, None, state_for(temperature=1.0), SAMPLE),
        sampling.draft_keys(z, noise, state_for(temperature=1.0, top_k=1), FILTER),
        sampling.draft_keys(z, noise, state_for(temperature=1.0, top_p=1e-6), FILTER),
    ):
        assert torch.equal(other[0], greedy[0]) and torch.equal(other[1], greedy[1])


@pytest.mark.parametrize("mode", [SamplingMode(), SAMPLE, FILTER], ids=str)
def test_draft_nan_is_never_preferred(mode):
    """Prevents a NaN draft logit from winning top-k (torch sorts NaN first) or spoiling its siblings."""
    z = torch.randn(1, 3, VOCAB)
    z[0, 0, 7] = math.nan
    z[0, 1] = math.nan
    noise = torch.randn(1, 3, VOCAB)
    keys, scores = sampling.draft_keys(z, noise, state_for(temperature=1.0, top_k=8), mode)
    for x in (keys, scores):
        assert not x.isnan().any() and x[0, 0, 7] == -math.inf and (x[0, 1] == -math.inf).all()
        assert x[0, 2].isfinite().all() and x[0, 0].isfinite().sum() == VOCAB - 1


# ---------------------------------------------------------------- tracing


@pytest.mark.parametrize("backend, path", [("eager", "gpu"), pytest.param("inductor", "cpu", marks=pytest.mark.slow)])
def test_compiled_equals_eager_without_recompiling(backend, path, monkeypatch):
    """Prevents other noise bits when compiled, and graph breaks in the search for GPUs. Tests of the engine trace whole
    steps, and run them on fake CUDA tensors."""
    if path == "gpu":
        monkeypatch.setattr(sampling, "_cutoff", sampling._cutoff_search)

    def step(logits, positions, state):
        bits = sampling.noise_bits(state.seed, positions, torch.arange(192))
        noise = sampling.gumbel_noise(state.seed, positions, torch.arange(192))
        return bits, sampling.choose(logits, noise, state, FILTER)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)
    state = state_for(2)
    for number, params in enumerate((
        SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=1),
        SamplingParams(temperature=1.4, min_p=0.05, seed=2**63),
        SamplingParams(temperature=0.3, top_p=0.5, seed=-7), SamplingParams(temperature=1.0),
    )):  # fmt: skip
        state.set(params)
        inputs = torch.randn(2, 5, 192) * 3, torch.randint(0, 4096, (2, 5)), state
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            assert all(map(torch.equal, compiled(*inputs), step(*inputs)))
