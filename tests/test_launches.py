"""How many kernels a step launches on a GPU, and the kernels of its small work against plain PyTorch.

Tests named `test_interpreted_*` need TRITON_INTERPRET=1 before Triton is imported. tests/test_interpreter_steps.py runs
them. Without it those that have the fixture `ours` ask the C++ kernels.
"""

import functools
import itertools
from dataclasses import replace
from unittest import mock

import fake_cuda
import pytest
import torch
from fake_cuda import Launches, OneDevice, fake_gpu, on_fake_gpu, step_engine
from test_model import random_tree
from tiny import CTX, DRAFT_VOCAB, PROMPT, interpreted, needs_triton, tables, tiny_head, tiny_model

import eagle_draft
import kernels
import model
import tree as trees
from bench import random_models
from bench.random_models import BLOCKS, SHAPES, block_config
from decoding import sampling, step, verify
from decoding.params import SamplingMode, SamplingParams
from decoding.sampling import SamplingState
from eagle_draft import EagleDrafter
from engine.engine import Engine, EngineConfig
from families.config import DeltaConfig
from kernels import KernelBackend, choice, draft, growing, linear, records, topk
from kernels.panels import panels_bytes
from layers.recurrent import DeltaNet, new_memory
from weights.gguf_types import FORMATS
from weights.quantized import FloatLinear, QuantEmbedding, QuantLinear, replace_module

OURS = ("noise", "choose", "draft_topk", "draft_tree", "commit")
LAYERS = 2  # every layer launches the same


# ---- counts ------------------------------------------------------------------------------------------------


def counted(engine, settings, rows=None):
    """The launches of one step by (part, operator). The parts: target layers, draft layers, draft, settling, the rest.

    rows: how many of the engine's rows run; all of them where it is left out.
    """
    view = engine.view(rows or engine.batch_size)
    engine.pin(128)
    count = Launches()

    def in_part(owner, name, part):
        function = getattr(owner, name)

        def call(*args, **named):
            before, count.part = count.part, part
            try:
                return function(*args, **named)
            finally:
                count.part = before

        return mock.patch.object(owner, name, call)

    with (
        in_part(model.Block, "forward", "layer"), in_part(eagle_draft.EagleHead, "layer_forward", "draft layer"),
        in_part(type(view.drafter), "draft", "draft"), in_part(step, "accept_and_commit", "settle"),
        torch.no_grad(), engine.backend.active(), OneDevice(), count,
    ):  # fmt: skip
        step.decode_step(engine.model, view.drafter, view.state, SamplingParams(**settings).mode)
    return count.counts


@needs_triton
@pytest.mark.parametrize("shape,quant,head,nodes,batch,settings,most", [
    ("llama-2-7b", "int4", 1, 1, 1, {}, 233), ("llama-2-7b", "int4", 1, 24, 1, {}, 327),
    ("llama-2-7b", "int4", 1, 24, 4, {"temperature": 1.0, "top_p": 0.9}, 330), ("llama-3-8b", "", 3, 60, 1, {}, 329),
    ("llama-2-7b", "int4", 1, 26, 4, {"temperature": 1.0}, 330), ("mixtral-8x7b", "int4", 1, 1, 1, {}, 329),
    ("mixtral-8x7b", "int4", 1, 1, 4, {}, 363), ("qwen3-30b-a3b", "int4", 1, 1, 1, {}, 489),
])  # fmt: skip
def test_a_step_launches_few_kernels(monkeypatch, shape, quant, head, nodes, batch, settings, most):
    """Small work that falls apart into hundreds of launches: a draft level, the filters, the noise, the commit; a copy
    that an operator makes before its kernel, once per draft level and layer; and routing to experts that falls apart into
    a softmax, a top-k, sorts and sums.

    most: launches of the whole step, of whose layers a few are counted.
    """
    sizes = dict(hidden_size=2048, intermediate_size=768, num_hidden_layers=48, num_key_value_heads=4, qk_norm=True)
    many = replace(SHAPES["mixtral-8x7b"], num_local_experts=16, num_experts_per_tok=8, windows=(0,) * 48, **sizes)
    monkeypatch.setitem(SHAPES, "qwen3-30b-a3b", many)
    with fake_gpu(monkeypatch):
        counts = counted(step_engine(shape, quant, head, nodes, LAYERS, batch), settings)
    layers, settle = (sum(count for (part, _), count in counts.items() if part == name) for name in ("layer", "settle"))
    rest = sum(counts.values()) - layers
    assert rest + layers * SHAPES[shape].num_hidden_layers // LAYERS <= most and settle <= 5, (rest, layers, counts)


def with_types(linear):
    """The linear with the weight of a mixed file: queries and keys in Q4_K and values in Q6_K, or all of it in Q4_K."""
    n, k = linear.out_features, linear.in_features
    rows = {"Q4_K": 2 * k, "Q6_K": k} if n == 3 * k else {"Q4_K": n}
    words = sum(panels_bytes(FORMATS[kind], count, k) // 4 for kind, count in rows.items())
    forms = tuple((count, *FORMATS[kind].numbers()) for kind, count in rows.items())
    weight, counters = (torch.empty(size, dtype=torch.int32, device="cuda") for size in (words, n))
    return FloatLinear(kernels.PackedWeight("planes", 6, 0, n, k, weight, counters=counters, forms=forms))


@needs_triton
@pytest.mark.parametrize("nodes,quantized_embedding,most", [(1, True, 233), (24, False, 327), (24, True, 342)])
def test_types_of_a_file_take_no_more_launches_than_int4(monkeypatch, nodes, quantized_embedding, most):
    """A fused matrix of several types that falls apart into a launch for each, and epilogues that are launches of their
    own. A quantized embedding is looked up in a kernel of its own, and a draft forward joins its rows in another one."""
    with fake_gpu(monkeypatch):
        engine = step_engine("llama-2-7b", "int4", 1, nodes, LAYERS)
        target = engine.model
        for name, module in list(target.named_modules()):
            if isinstance(module, QuantLinear):
                replace_module(target, name, with_types(module))
        if quantized_embedding:
            target.embed_tokens = QuantEmbedding(target.lm_head.packed, torch.float16)
        counts = counted(engine, {})
    layers = sum(count for (part, _), count in counts.items() if part == "layer")
    assert len(target.layers[0].attention.qkv.packed.forms) == 2
    assert sum(counts.values()) - layers + layers * 32 // LAYERS <= most, counts


@needs_triton
@pytest.mark.parametrize("nodes", [1, 24])
def test_a_step_of_some_slots_launches_as_much_as_one_of_a_full_engine(monkeypatch, nodes):
    """Launches for each row, and copies because the first rows of a buffer are no longer contiguous."""
    with fake_gpu(monkeypatch):
        engine = step_engine("llama-2-7b", "int4", 1, nodes, 2, batch=8)
        counts = {rows: counted(engine, {}, rows) for rows in (1, 3, 4, 8)}
    assert counts[3] == counts[4] == counts[8], counts
    assert sum(counts[4].values()) <= sum(counts[1].values()) + 10, counts


@needs_triton
@pytest.mark.parametrize("chain", [False, True])
def test_a_recurrent_layer_launches_few_kernels(monkeypatch, chain):
    """A walk, a norm or a convolution that falls apart, a copy of the gate or of the memory, and a read of a value."""
    sizes = DeltaConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=24, kernel=4)
    layer = DeltaNet(replace(SHAPES["tiny"], delta=sizes)).half()
    with fake_gpu(monkeypatch), torch.device("cuda"), torch.no_grad():
        memory = list(new_memory(sizes, 3, 2, 8, 4, torch.float16, torch.device("cuda")).layers())[1]
        on_fake_gpu(layer)
        nodes = records.Nodes(*[memory.keep] * 7, chain=chain, walk=torch.empty(2, 8, 3, dtype=torch.int64))
        count, x = Launches(), torch.empty(2, 8, SHAPES["tiny"].hidden_size, dtype=torch.float16)
        with KernelBackend("auto", "cuda").active(), OneDevice(), count:
            layer(x, nodes, memory, x)
    ours = {name: n for (_, name), n in count.counts.items() if name.endswith("_kernel")}
    assert ours == {"delta_kernel": 1, "gated_norm_kernel": 1}, count.counts
    assert chain or sum(count.counts.values()) <= 8, count.counts


# ---- the kernels against plain code ------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def ours():
    """Our kernels run, and plain code does what other kernels would do."""
    if not kernels.INTERPRETED and kernels.cpu_problem():
        pytest.skip("the CPU kernels do not run here")
    backend = KernelBackend("reference" if kernels.INTERPRETED else "cpu", "cpu")
    backend.table.update(dict.fromkeys(OURS if kernels.INTERPRETED else (), ("triton", "by hand")))
    with backend.active():
        yield backend


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


def three_rows():
    """Settings of three sequences: top-p, all filters, and greedy."""
    state = SamplingState(3, torch.get_default_device())
    both = SamplingParams(temperature=0.6, top_k=7, top_p=0.9, min_p=0.02)
    state.set([SamplingParams(temperature=1.0, top_p=0.8), both, SamplingParams()])
    return state


def hard_logits(B, N, V):
    """Logits with ties at the cutoffs, NaN, both zeros, and a row of one value."""
    logits = torch.randn(B, N, V) * 3
    logits[0, 1, :50] = 2.5
    logits[0, 0, 3:5] = torch.tensor([-0.0, 0.0])
    logits[1, 1, 5:60] = logits[1, 1].amax()
    logits[2, 1, 2] = float("nan")
    logits[2, 0] = 1.5
    return logits


def test_interpreted_noise_is_the_generators(ours):
    """A bit of the integer generator that is lost in 32-bit arithmetic, a small number whose logarithm is rounded away,
    seeds or positions beyond 32 bits, and noise so inexact at its ends that it is no Gumbel noise."""
    seed, n = torch.tensor([5, -(2**63), 2**40 + 1]), torch.tensor([3, 100, 2**33])
    close = 3e-7 if ours.mode == "cpu" else 2e-6
    for size in (5, 8, 1500):  # less than a register of a CPU, one, and several with a rest
        hashes = sampling.hash_ids(torch.arange(size))
        bits = sampling.noise_bits(seed, n[:, None] + 1 + torch.arange(2), hashes, hashed=True)
        v = ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24).double()
        got = sampling.noise_ahead(seed, n, 2, hashes)
        torch.testing.assert_close(got.double(), -(-torch.log1p(-v)).log(), rtol=close, atol=close)


def test_interpreted_noise_is_finite_at_both_ends(ours):
    """Infinite noise for the smallest or the largest of all words, which no short test draws."""
    words = torch.tensor([0, 1, 2**32 - 1, 2**32 - 2, 2**31, 2**24])
    # the kernel mixes a hash with two keys by bijections, so the hashes of any words can be computed backwards
    seed, n = torch.tensor([3]), torch.tensor([11])
    first, second = sampling._keys_on_host(seed, n[:, None] + 1).flatten().tolist()
    hashes = torch.tensor([unmixed(int(word), second) ^ first for word in words])
    assert sampling.noise_bits(seed, n[:, None] + 1, hashes, hashed=True).flatten().tolist() == words.tolist()
    got = sampling.noise_ahead(seed, n, 1, hashes).flatten()
    assert torch.allclose(got, sampling.noise_ahead.reference(seed, n, 1, hashes).flatten(), rtol=1e-6, atol=1e-6)
    assert got.isfinite().all() and got[0] > 22 and got[2] < -2.8


def unmixed(x: int, key: int) -> int:
    """The inverse of `sampling._mix` for one value."""
    mask = 0xFFFFFFFF
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) & mask
    x ^= key
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) & mask
    return x ^ x >> 16


@pytest.mark.parametrize("V", [5, 8, 5000])
def test_interpreted_choice_is_the_plain_one(ours, V):
    """A survivor too many or too few at a tie, NaN that wins or counts as usable, a tie that goes to the higher id, a
    token of the padding, noise of another depth, a setting of another row, and a row that depends on its neighbours."""
    state, logits = three_rows(), torch.cat((hard_logits(3, 2, V), torch.randn(3, 2, V).round(decimals=1)), 1)
    logits[0, 2], logits[0, 3, :3], logits[1, 2, 3] = -torch.inf, -torch.inf, torch.inf
    noise, depth = torch.randn(3, 4, V), torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2], [2, 0, 0, 1]])
    usable = sampling.finite(logits)
    for mode in (SamplingMode(sample=True), SamplingMode(sample=True, filters=True), SamplingMode()):
        for rows in (depth, None):
            got, checked = sampling.choose_and_check(logits, noise, state, mode, rows)
            given = noise if mode.sample else None, rows, sampling._settings(state), mode.filters
            want, _ = sampling._choose.reference(logits, *given)
            assert torch.equal(got[usable], want[usable]) and torch.equal(checked, usable) and not usable.all()
    rows = sampling.choose(logits[:, 1:], noise, state, SamplingMode(True, True), depth[:, 1:])
    whole, seen = sampling.choose(logits, noise, state, SamplingMode(True, True), depth)[:, 1:], usable[:, 1:]
    assert torch.equal(rows[seen], whole[seen])


@interpreted
def test_interpreted_filters_keep_what_plain_code_keeps(ours, monkeypatch):
    """A nucleus that does not fit in the registers, so that its threshold needs the logits again, ties at a threshold,
    and a row of one value. The noise prefers the least survivor, so that a survivor too many or too few shows."""
    for module in (choice, topk):
        monkeypatch.setattr(module, "block_of", lambda size, at_least=1: (128, 1))
    state = SamplingState(4, torch.get_default_device())
    state.set([
        SamplingParams(temperature=1.0, top_p=0.8), SamplingParams(temperature=0.6, top_k=7, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.5, top_k=300, top_p=0.99), SamplingParams(temperature=1.0, top_k=600),
    ])  # fmt: skip
    logits = torch.randn(4, 4, 700) * torch.tensor([3, 0.1, 3, 0])[:, None]
    logits[:, 2] = (logits[:, 2] * 2).round() / 2
    depth, mode = torch.zeros(4, 1, dtype=torch.int64), SamplingMode(sample=True, filters=True)
    for rows in logits.split(1, 1):
        rows, noise = rows.contiguous(), rows * -50
        want, _ = sampling._choose.reference(rows, noise, depth, sampling._settings(state), True)
        got, _ = sampling.choose_and_check(rows, noise, state, mode, depth)
        assert torch.equal(got, want)


@pytest.mark.parametrize("V,filters,noisy", [
    (97, True, True), (4500, True, False), (9000, False, True), (5, False, True), (8, False, False),
])  # fmt: skip
def test_interpreted_draft_topk_is_the_plain_one(ours, V, filters, noisy):
    """A child that is lost between blocks of the vocabulary or found twice, removed tokens in front of survivors, noise
    looked up by draft ids, and scores of other tokens or of another sum."""
    state, logits = three_rows(), hard_logits(3, 2, V)
    noise, ids = torch.randn(3, 2, 2 * V), torch.arange(V) * 2
    mode = SamplingMode(sample=True, filters=filters and ours.mode != "cpu")  # C++ has no filters
    cases = [(noise, ids, mode, 4), (noise[:, :1], ids, mode, 1), (noise[..., :V], None, mode, min(V, 6))]
    for given, trimmed, heard, K in [*cases, (None, None, SamplingMode(), min(V, 40))]:
        got, scores = sampling.draft_topk(logits, given, trimmed, state, heard, K, noisy)
        own = given if trimmed is None else given[..., ids]
        keys, want = sampling.draft_keys(logits, own, state, heard, noisy)
        best = keys.sort(dim=-1, descending=True, stable=True).indices[..., :K]
        assert torch.equal(got, best)
        torch.testing.assert_close(scores, want.gather(-1, best), rtol=1e-5, atol=2e-5)
    alone = sampling.draft_topk(logits[:, 1:], noise[:, 1:], ids, state, mode, 4, noisy)
    same(alone, [t[:, 1:] for t in sampling.draft_topk(logits, noise, ids, state, mode, 4, noisy)])
    half = sampling.draft_topk(logits.half(), None, None, state, SamplingMode(), 4)
    same(half, sampling.draft_topk(logits.half().float(), None, None, state, SamplingMode(), 4))


def test_interpreted_unusable_draft_logits_come_last(ours):
    """A candidate of NaN before one that can be drafted, or a score of NaN that spoils a tree's order."""
    cold = choice.Settings(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1, dtype=torch.int64), *torch.zeros(2, 2, 1, 1))
    z = torch.tensor([[[float("nan"), 1.0, -float("inf"), 3.0, float("nan"), 2.0]], [[float("nan")] * 6]])
    best, scores = sampling.draft_topk(z, None, None, cold, SamplingMode(), 6)
    assert best[0, 0, :3].tolist() == [3, 5, 1] and sorted(best[0, 0].tolist()) == list(range(6))
    assert torch.allclose(scores[0, 0, :3].exp().sum(), torch.tensor(1.0)) and not scores.isnan().any()
    assert scores[0, 0, 3:].tolist() == scores[1, 0, :3].tolist() == [-float("inf")] * 3


@interpreted
@pytest.mark.parametrize("tiles,K", [(5, 4), (1002, 10)])
def test_interpreted_merge_takes_the_best_of_all_tiles(ours, tiles, K):
    """A candidate that is lost above 4096, a tie that goes to the higher id, and a sum without one of the tiles."""
    values = (torch.randn(tiles, 3, K) * 4).round().sort(dim=-1, descending=True).values / 4  # many ties
    values[:, 2] = -float("inf")
    values[-1, 1, :2] = 50
    ids = torch.arange(tiles * K, dtype=torch.int32).view(tiles, 1, K).expand(-1, 3, -1).contiguous()
    total = torch.where(values[..., 0] > -float("inf"), torch.rand(tiles, 3) + 1, 0)
    got = linear.planes_topk.shapes(torch.empty(3, 1), None, None, K)
    topk.merge_topk(got, torch.cat((values, values[..., :1], total[..., None]), -1), ids)
    want, order = values.transpose(0, 1).flatten(1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(got[0], want[:, :K]) and torch.equal(got[1], order[:, :K])
    sums = (values[..., 0].double() + total.log()).logsumexp(0)
    torch.testing.assert_close(got[2][:2], sums[:2].float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(got[3][:2], got[0][:2] - got[2][:2, None]) and (got[3][2] == -float("inf")).all()


def test_interpreted_rows_are_placed(ours):
    """A fed row at the position of another sequence, a slot past the cache, and a table that is read past its end."""
    n, count = torch.tensor([7, 12, 30]), torch.tensor([1, 3, 2])
    rotary, tokens = records.Rotary(torch.randn(25, 6), torch.randn(25, 6)), torch.randint(0, 99, (3, 34))
    depths, segments = torch.randint(0, 3, (3, 5)), torch.tensor([[40, 33], [3, 14], [90, 20]])
    for lead, fed, depth in itertools.product((0, 1), (0, 3), (depths, depths[:1], depths[:1, :0])):
        for shared in (None, segments):
            given = n, depth, rotary, 34, fed, count, tokens, lead, shared
            same(kernels.place_rows(*given), draft.place_rows.reference(*given))


@pytest.mark.parametrize("K,levels,N", [(4, 3, 14), (8, 2, 24), (1, 3, 4)])
def test_interpreted_trees_grow_as_in_plain_code(ours, K, levels, N):
    """A tie that goes to the higher id, NaN that wins, a child without its parent, and one who sees a stranger. C++ takes
    part when a path is accepted and committed."""
    ids = torch.arange(50) * 2

    def scores(*shape):
        values = -(torch.rand(3, *shape) * 4).round()  # many ties
        values.view(3, -1)[1, 0] = float("nan")
        return values

    def grow(pool, tokens, scores):
        before = [pool.tokens, pool.scores, pool.parent, pool.frontier, pool.visible]
        return growing._grow.reference(before, tokens, scores, ids)

    first = torch.randint(0, 50, (3, K)), scores(K)
    pool, plain = growing.first_level(*first, ids), growing._grow.reference([], *first, ids)
    same(pool, plain)
    for _ in range(levels):
        more = torch.randint(0, 50, (3, K, K)), scores(K, K)
        pool, plain = growing.expand(pool, *more, ids), grow(plain, *more)
        same(pool, plain)
    root = torch.randint(0, 50, (3,))
    tree, launches = launched(lambda: growing.select(pool, root, N, levels + 1))
    assert launches == (ours.mode != "cpu")
    same(tree, growing._select.reference(*plain[:3], root, None, N, levels + 1, None))
    pool = pool._replace(tokens=pool.tokens // 2)
    same(growing.select(pool, root, N, levels + 1, ids=ids), tree)
    for offered, history in ((tree.tokens, step.HISTORY + 1), (tree.tokens % 3, 0)):
        walk = offered, tree.parent, tree.depth, tree.ancestors, tree.valid, offered.roll(-1, 1), levels + 2
        same(verify.accept(*walk), verify.accept.reference(*walk))
        for _ in range(1 if kernels.INTERPRETED else 10):
            settle(offered.roll(-1, 1), verify.accept(*walk), history, ours.mode != "cpu")
    assert not ours.declined
    if ours.mode == "cpu":
        return
    wide = growing.Pool(*(t.expand(-1, 9000) if t.dim() == 2 else t for t in (pool.tokens[:, :1],) * 7))
    wide = wide._replace(scores=torch.zeros(3, 9000), parent=torch.full((3, 9000), -1))
    growing.select(wide, root, 4, 2)
    assert "8192" in ours.declined["draft_tree"]


def test_interpreted_acceptance_is_that_of_the_plain_code(ours):
    """A path that goes on below a token that differs, an invalid node, or the deeper of two equals by a higher number."""
    lengths = set()
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        N = int(torch.randint(1, 12, (), generator=g))
        trees = [random_tree(N, seed), random_tree(N, seed + 999)]
        parent = torch.stack([tree[0] for tree in trees])
        ancestors = torch.stack([tree[1] for tree in trees])
        depth = ancestors.sum(-1) - 1
        tokens, chosen = (torch.randint(0, 2, (2, N), generator=g) for _ in range(2))
        valid = torch.rand(2, N, generator=g) > 0.1
        D = int(depth.max()) + seed % 2
        given = tokens, parent, depth, ancestors, valid, chosen, D
        got = verify.accept(*given)
        same(got, verify.accept.reference(*given))
        lengths |= set(got.count.tolist())
    assert len(lengths) > 4


def launched(call):
    """(the result of a call, how many kernels it launched)"""
    runtime = kernels.triton.runtime
    owner, name = (
        (runtime.interpreter.GridExecutor, "__call__") if kernels.INTERPRETED else (runtime.jit.JITFunction, "run")
    )
    launches, real = [], getattr(owner, name)

    def run(self, *args, **named):
        launches.append(self)
        return real(self, *args, **named)

    with mock.patch.object(owner, name, run):
        return call(), len(launches)


def settle(choice_of_nodes, accepted, history, on_triton):
    """Commit an accepted path by kernels and by plain code, where a row has stopped and one is at its limit. history:
    for how many positions features are kept."""
    B, N, P = *choice_of_nodes.shape, accepted.path.shape[1]
    usable, features, S = torch.rand(B, N) > 0.2, torch.randn(B, N, 40), 60
    ints = dict(n=[5, 17, S - 3 - P], root=[1, 2, 3], count=[1, 2, 1], produced=[3, 4, 5], limit=[5, 100, 6])
    state = dict(tokens=torch.randint(0, 9, (B, S))) | {name: torch.tensor(values) for name, values in ints.items()}
    state |= dict(done=torch.tensor([False, True, False]), stop_ids=torch.randint(-1, 30, (B, 2)))
    state |= dict(ring=torch.zeros(8, B, 2 + 2 * P + 4, dtype=torch.int64), features=torch.zeros(B, P, 40))
    state |= dict(history=torch.zeros(B, history, 40), step=torch.tensor([9]))
    state |= dict(segments=torch.tensor([[70, 59], [0, 40], [130, 59]]))
    state = records.StepBuffers(**state)
    plain = records.StepBuffers(*(tensor.clone() for tensor in state))
    got, launches = launched(lambda: step._write(accepted, usable, features, state))
    assert launches == 2 * on_triton
    same(got, step._write.reference(accepted, usable, features, plain))
    for name, *pair in zip(state._fields, state, plain, strict=True):
        if name in ("tokens", "history"):  # their last rows hold nothing
            pair = [tensor[:, :-1] for tensor in pair]
        same(pair[:1], pair[1:])
    for dtype in (torch.float32, torch.float16, torch.int8):
        kv = (torch.randn(2, 2, 1, 3, 190, 12) * 9).to(dtype)  # which all sequences share
        moved, first = kv.clone(), state.segments[:, :1]
        own = torch.cat([kv.narrow(4, int(at), S) for at in first], 2)
        kernels.commit_kv(kv, got[2], got[3])
        kernels.commit_kv.reference(moved, got[2], got[3])
        kernels.commit_kv(own, got[2] - first, got[3] - first)
        same([kv, own], [moved, torch.cat([kv.narrow(4, int(at), S) for at in first], 2)])


@pytest.mark.parametrize("version,keep", [(1, False), (3, False), (3, True)])
def test_interpreted_features_are_joined_with_embeddings(ours, version, keep):
    """A feature of another row or sequence, a norm that is forgotten or used for the other half, and a residual before
    the norm instead of behind it."""
    small = tiny_model(torch.float32)
    head = tiny_head(small, version, DRAFT_VOCAB if version == 3 else None)
    head.config = replace(head.config, norm_before_residual=keep)
    H = head.config.layer.hidden_size
    tokens, feature, rows = torch.randint(0, 90, (2, 5)), torch.randn(2, 5, H), torch.randint(0, 3, (2, 5))
    for source in (rows, None):
        with torch.no_grad():
            want = head.joined_train(tokens, feature if source is None else eagle_draft.take_rows(feature, source))
            found = [head.joined(tokens, feature, source)]
            embed = head.embed_tokens or small.embed_tokens
            with mock.patch.object(head, "embed_tokens", embed.forward):  # one that is no table
                found.append(head.joined(tokens, feature, source))
        for residual, joined in found:
            torch.testing.assert_close(joined, want[1], rtol=1e-5, atol=1e-5)
            if version == 3:
                torch.testing.assert_close(residual, want[0], rtol=1e-5, atol=1e-5)


SETTINGS = {
    "greedy": {},
    "T=1": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2},
}


@interpreted
@pytest.mark.parametrize("name", SETTINGS)
def test_interpreted_engine_gives_the_plain_tokens(ours, name, monkeypatch):
    """Kernels that are right alone and wrong together, in a batch, or with penalties; a step that cannot be traced; and
    an operator that launches more kernels than are counted for it."""
    params = SamplingParams(max_new_tokens=4, **SETTINGS[name])
    small = tiny_model(torch.float32)
    if name == "penalties":
        built, head = tables(trees.StaticTree(((0,), (1,), (0, 0))), 2), tiny_head(small)
    else:
        built, head = trees.DynamicTree(9, 2, 3), tiny_head(small, 3, DRAFT_VOCAB, taps=(0, 1))

    def run(backend, compiled=False):
        drafter = EagleDrafter(head, built, 2, CTX + built.N + 1)
        engine = Engine(small, drafter=drafter, config=EngineConfig(batch_size=2, ctx=CTX, backend=backend))
        if compiled:
            engine._step = torch.compile(step.decode_step, fullgraph=True, backend="eager", dynamic=False)
        results = engine.generate_batch([PROMPT, PROMPT[:4]], params).run()
        return [(result.tokens_per_step, result.logprobs) for result in results]

    want = run(KernelBackend("reference", "cpu"))
    assert run(ours, name == "greedy") == want and not ours.declined


@needs_triton
@pytest.mark.parametrize("kind,slots,depth,tree,whole,drafting", [
    ("dflash", 16, 5, "dynamic:60,7,10", 280, 46), ("dflash", 16, 5, "dynamic:16,14,1", 280, 46),
    ("dflash", 8, 3, "dynamic:8,6,4", 266, 32), ("dspark", 7, 5, "dynamic:60,6,10", 294, 60),
    ("dspark", 7, 5, "dynamic:8,6,1", 294, 60), ("dflash2", 16, 5, "dynamic:16,7,8", 327, 93),
])  # fmt: skip
def test_a_block_is_drafted_with_few_launches(monkeypatch, kind, slots, depth, tree, whole, drafting):
    """Work for each depth or layer that could be done once: the keys and values of the text, the candidates of all slots,
    a tree of marginals.

    depth: layers of the head. drafting: of the draft alone, where EAGLE-3 with dynamic:60,7,10 has 95. whole: of the
    step of 32 layers, where that has 329, 224 of them in the target.
    """
    monkeypatch.setitem(fake_cuda.TREES, 99, tree)
    monkeypatch.setitem(BLOCKS, kind, BLOCKS[kind] | {"slots": slots})
    monkeypatch.setattr(random_models, "block_config", functools.partial(block_config, layers=depth))
    with fake_gpu(monkeypatch):
        counts = counted(step_engine("llama-3-8b", "int4", kind, 99, LAYERS), {})
    layers, draft = (sum(count for (part, _), count in counts.items() if part == name) for name in ("layer", "draft"))
    own = 0 if kind == "dflash2" else depth * 7  # layers of a head are mostly of the same class
    rest = sum(counts.values()) - layers - draft
    assert draft + own <= drafting and (kind == "dflash2" or drafting < 0.65 * 95)
    assert rest + draft + own + (layers - own) * 32 // LAYERS == whole
