"""drafters/block.py: trees against brute force, acceptance that is certain, and the kernels against plain code."""

import functools
import math

import pytest
import torch
from block_kit import block_outputs, corrected, draft_ids, layouts, random_tensors, tap_ids, tiny_block, write_layout
from test_block_heads import ANCHOR, MODEL, after, features_of
from test_drafters import table_model
from tiny import CTX, PROMPT, V, interpreted, needs_kernels, node_paths, tables, tiny_model

import kernels
import tree as trees
from decoding import sampling
from decoding.drafter import Draft
from decoding.params import SamplingMode, SamplingParams
from decoding.step import DecodeState, draft_input
from drafters.block import BlockDrafter, BlockHead
from engine.engine import Engine, EngineConfig
from kernels import KernelBackend
from kernels.growing import best_prefixes
from loading.drafting import build_head
from weights.block_heads import read_head

SAMPLED = dict(temperature=1.0, seed=11)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


# ---- trees ---------------------------------------------------------------------------------------------------


def paths_of(draft: Draft, b: int = 0) -> dict[tuple[int, ...], float]:
    """The token path and the score of every node but the root; checks parents, depths and what nodes see."""
    return {path: float(draft.scores[b, i]) for i, path in node_paths(draft, b).items()}


def best_set(children, N: int, D: int) -> dict[tuple[int, ...], float]:
    """The N - 1 likeliest prefixes of all that there are. children(path): (token, log-probability) of each child."""
    every, front = {}, {(): 0.0}
    for _ in range(D):
        front = {(*path, token): w + gain for path, w in front.items() for token, gain in children(path)}
        every |= front
    order = sorted(every, key=lambda path: (-every[path], len(path)))
    return {path: every[path] for path in order[: N - 1]}


def same_tree(got: dict, want: dict, tolerance: float = 1e-9) -> None:
    assert got.keys() == want.keys()
    assert all(abs(got[path] - want[path]) < tolerance for path in want)


def marginals(B: int, D: int, K: int, ties: bool = False):
    """Candidates [B, D, K] that differ, and log-probabilities, descending."""
    tokens = torch.rand(B, D, 3 * K).argsort(-1)[..., :K]
    scores = (torch.randn(B, D, 3 * K, dtype=torch.float64) * 2).log_softmax(-1).sort(descending=True).values[..., :K]
    return tokens, (scores * 2).round() / 2 - 0.25 if ties else scores


def candidates(tokens, scores):
    """The children of any path: the candidates of its depth."""
    return lambda path: list(zip(tokens[len(path)].tolist(), scores[len(path)].tolist(), strict=True))


@pytest.mark.parametrize("D,K,N", [(1, 4, 4), (4, 5, 20), (3, 3, 39), (6, 1, 5), (5, 6, 2)])
def test_a_tree_of_marginals_has_the_best_prefixes(D, K, N):
    """A prefix that is likelier than one in the tree: lost at the edge of a level, or because its sibling came first. And
    a NaN, or a token with no probability, that takes part in a tree because there is nothing else."""
    tokens, scores = marginals(2, D, K)
    draft = best_prefixes(tokens, scores, torch.tensor([7, 8]), N)
    for b in range(2):
        same_tree(paths_of(Draft(*draft), b), best_set(candidates(tokens[b], scores[b]), N, D))
    tokens, scores = marginals(1, D, K, ties=True)
    draft = best_prefixes(tokens, scores, torch.tensor([7]), N)
    want = best_set(candidates(tokens[0], scores[0]), N, D)
    assert sorted(paths_of(Draft(*draft)).values()) == pytest.approx(sorted(want.values()))
    tokens, scores = marginals(1, 2, 3)
    scores[0, 0, 1:] = -math.inf
    scores[0, 1, 0] = math.nan
    draft = Draft(*best_prefixes(tokens, scores, torch.tensor([7]), 8))
    assert len(paths_of(draft)) == int(draft.valid.sum()) - 1 == 3


KINDS = ["dflash", "jetspec", "dflash2", "speculators", *(f"dspark, {x}" for x in ("plain", "vanilla", "gated", "rnn"))]


def drafted(tmp_path, name, tree, settings):
    """(config, tensors, drafter, its draft, noise) of a published head with random weights, after random features."""
    config = layouts()[name]
    tensors = random_tensors(config)
    folder = write_layout(tmp_path / "head", config, tensors)
    head = build_head(read_head(folder, MODEL.config, {"shortlist": "40"}), MODEL)
    features = features_of(config)
    drafter, state = after(head, features, tap_ids(config), 4, tree)
    state.sampling.set(SamplingParams(**settings))
    mode = SamplingParams(**settings).mode
    ahead = torch.arange(drafter.D + 1) + len(features) + 1
    noise = sampling.gumbel_noise(state.sampling.seed, ahead[None], torch.arange(V)) if mode.sample else None
    return config, tensors, drafter, drafter.draft(draft_input(state, mode, noise)), noise, features


@pytest.mark.parametrize("temperature", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("name", KINDS)
def test_trees_are_those_of_the_formulas(tmp_path, name, temperature):
    """Candidates, scores or parents of another tree than the best one: the noise of another depth or of draft ids, a
    correction by the wrong token, a normaliser over the shortlist alone, or a temperature that is applied twice."""
    K, N = 5, 6  # so many candidates and rows that no prefix can be lost
    tree = trees.DynamicTree(N, 2, K)
    config, tensors, drafter, draft, noise, features = drafted(
        tmp_path, name, tree, SAMPLED | {"temperature": temperature}
    )
    out, z = block_outputs(config, tensors, features, ANCHOR, MODEL)
    ids = draft_ids(config)
    soft = max(temperature, 0.5) if temperature else 1.0

    def children(path):
        d = len(path)
        g = temperature * noise[0, d, ids].double() if temperature else 0.0
        keys = (z[d] + g) / soft
        own = corrected(config, tensors, out, z, [ANCHOR, *path]) - z[d]
        short = torch.zeros(len(ids), dtype=torch.bool)
        short[keys.topk(min(40, len(ids))).indices] = True
        scores = (keys + torch.where(short, own, 0.0) / soft).log_softmax(-1)
        best = torch.where(short, scores, -math.inf).topk(K)
        return [(ids[i], float(w)) for i, w in zip(best.indices, best.values, strict=True)]

    same_tree(paths_of(draft), best_set(children, N, 3), 1e-6 if temperature else 1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_chains_walk_the_best_token(tmp_path, name):
    """A chain that is corrected by another token than the one it drafted, or not at all. Static trees take ranks."""
    config, tensors, drafter, draft, _, features = drafted(tmp_path, name, trees.chain(3), {})
    out, z = block_outputs(config, tensors, features, ANCHOR, MODEL)
    ids = draft_ids(config)

    def best(path, count):
        """The likeliest tokens of the shortlist after a path that begins with the anchor."""
        keys, short = corrected(config, tensors, out, z, path), z[len(path) - 1].topk(min(40, len(ids))).indices
        return [ids[int(i)] for i in short[keys[short].topk(count).indices]]

    path = [ANCHOR]
    for _ in range(3):
        path += best(path, 1)
    assert draft.tokens[0].tolist() == path
    _, _, _, draft, _, _ = drafted(tmp_path / "b", name, trees.StaticTree(((0,), (1,), (1, 0), (1, 1))), {})
    first = best([ANCHOR], 2)
    assert draft.tokens[0, 1:].tolist() == first + best([ANCHOR, first[1]], 2)


@pytest.mark.parametrize("name", ("dspark, vanilla", "dflash2", "dflash"))
def test_penalties_and_the_shortlist_agree(tmp_path, name):
    """Two ways to the children of a row, from the shortlist and from all logits, that differ without any penalty."""
    tree = trees.DynamicTree(12, 2, 6)
    _, _, drafter, draft, _, _ = drafted(tmp_path, name, tree, {})
    drafter._whole_logits = lambda inputs: True
    _, state = after(drafter.head, features_of(layouts()[name]), tap_ids(layouts()[name]), 4)
    whole = drafter.draft(draft_input(state, SamplingMode()))
    same_tree(paths_of(whole), paths_of(draft), 1e-9)


def test_pruned_trees_keep_what_is_likely_enough(tmp_path):
    """A node that is kept below p_min, dropped above it, or left without its parent; rows of a batch that differ."""
    tree = trees.DynamicTree(30, 3, 6)
    _, _, drafter, draft, _, _ = drafted(tmp_path, "dspark, gated", tree, {})
    want = {path: score for path, score in paths_of(draft).items() if math.exp(score) >= 0.04}
    drafter.p_min = 0.04
    pruned = drafter._pruned(draft)
    assert 1 < len(want) < 29 and paths_of(pruned) == want and pruned.tokens.shape[1] == len(want) + 1
    two = Draft(*(t.expand(2, *t.shape[1:]).clone() if t is not None else None for t in draft))
    two.scores[1, 1:] -= 0.5
    pruned = drafter._pruned(two)
    assert paths_of(pruned, 0) == want
    assert paths_of(pruned, 1).keys() == {path for path in want if math.exp(want[path] - 0.5) >= 0.04}


# ---- acceptance that is certain ------------------------------------------------------------------------------


class OracleHead(BlockHead):
    """Slot j gives the hidden state that the target itself will have at position start + j: `truth` [B, S, H]."""

    truth: torch.Tensor

    def forward(self, tokens, nodes, cache, layers=None):
        places = nodes.positions[:, : self.config.depth].clamp(max=self.truth.shape[1] - 1)
        truth = self.truth[: len(tokens)]
        return truth.gather(1, places[..., None].expand(-1, -1, truth.shape[2]))


def oracle(model, texts: list[list[int]], tree, sharp: float = 1.0) -> Engine:
    """An engine whose head knows the target's states along the texts. sharp: by what they are multiplied."""
    head = tiny_block(model, slots=6, slot0=True)
    head.__class__ = OracleHead
    length = max(map(len, texts))
    rows = [model.forward_train(torch.tensor([text + [0] * (length - len(text))]))[0] for text in texts]
    head.truth = torch.cat(rows) * sharp
    built = tables(tree, len(texts))
    drafter = BlockDrafter(head, built, len(texts), CTX + built.N + 1)
    return Engine(model, None, drafter, EngineConfig(batch_size=len(texts)))


@functools.cache
def plain_text(params: SamplingParams) -> list[int]:
    return PROMPT + Engine(tiny_model()).generate(PROMPT, params).run()[0].token_ids


@pytest.mark.parametrize("settings", ({}, SAMPLED, SAMPLED | {"top_p": 0.9, "top_k": 20}))
def test_the_target_itself_is_always_accepted(settings):
    """Drafts at a wrong position, with the noise of another depth, or scored so that the likeliest path is not kept."""
    params = SamplingParams(**settings, max_new_tokens=60)
    text = plain_text(params)

    def steps(tree, sharp=1.0):
        result = oracle(tiny_model(), [text], tree, sharp).generate(PROMPT, params).run()[0]
        assert PROMPT + result.token_ids == text
        return [len(step) for step in result.tokens_per_step[:-1]]

    assert set(steps(trees.chain(6))) == {7}
    assert min(steps(trees.DynamicTree(20, 5, 4))) >= 2  # unsure as it is, it spreads
    if not settings:  # sharpened, it is sure
        assert set(steps(trees.DynamicTree(20, 5, 4), 60.0)) == {7}


def test_rows_of_a_batch_are_drafted_for_with_their_own_text():
    """A row that is drafted for with the length, the noise or the context of another one."""
    params = SamplingParams(**SAMPLED, max_new_tokens=40)
    prompts = [PROMPT, PROMPT[:5], PROMPT + PROMPT[:9]]
    engine = Engine(tiny_model(), None, None, EngineConfig(batch_size=3))
    plain = [result.token_ids for result in engine.generate_batch(prompts, params).run()]
    texts = [prompt + ids for prompt, ids in zip(prompts, plain, strict=True)]
    results = oracle(tiny_model(), texts, trees.chain(4)).generate_batch(prompts, params).run()
    for result, ids in zip(results, plain, strict=True):
        assert result.token_ids == ids and all(len(step) == 5 for step in result.tokens_per_step[:-1])


def test_the_context_is_the_same_however_it_came():
    """Keys and values that are missing, shifted or stale after a prompt in parts, a kept prefix, plain steps that the
    drafter catches up with, or steps that accepted something: the drafts then differ from those of a fresh text."""
    model = tiny_model(layers=2)
    text = plain_text(SamplingParams(max_new_tokens=60))

    def engine() -> Engine:
        head = tiny_block(model, slots=6, windows=(0, 9), causal_window=True)
        drafter = BlockDrafter(head, trees.DynamicTree(12, 3, 3), 1, CTX + 13)
        return Engine(model, None, drafter, EngineConfig(eagle_always=False, lag=0))

    def context(e: Engine, length: int):
        return e.drafter.cache[..., :length, :].clone()

    fresh = engine()
    fresh.prefill.logits(0, text[:70], SamplingMode())
    want = context(fresh, 70)
    for how in ("speculative", "plain", "kept"):
        e, mode, start = engine(), SamplingMode(), 40 if how == "kept" else 20
        with torch.inference_mode():
            e.generate(text[:start], SamplingParams(max_new_tokens=2)).run()
            list(e.prefill.read(0, text[:start], mode, start - 8 if how == "kept" else 0))
            e.state.limit[0] = 100
            while int(e.state.n[0]) < 72:
                e.launch(e.fallback if how == "plain" else e.drafter, mode, e.view(1))
                e.runner.read()
            n = int(e.state.n[0])
            assert e.state.tokens[0, : n + 1].tolist() == text[: n + 1]
            if how == "plain":
                e.prefill.catch_up(0, start, n)
            torch.testing.assert_close(context(e, 70), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ("vanilla", "gated", "rnn", "selector"))
@pytest.mark.parametrize("settings", ({}, SAMPLED))
def test_a_correction_that_knows_the_next_token_is_always_accepted(kind, settings):
    """A correction by the parent of another row, a state that is not the parent's, or a lost factor: the logits of the
    slots know nothing here, and the token before says all."""
    model, follow = table_model()
    r = 128
    head = tiny_block(model, slots=5, slot0=kind != "selector", markov=kind, rank=r, shortlist=V,
                      num_attention_heads=4, num_key_value_heads=2, head_dim=8)  # fmt: skip
    head.norm.weight.data.zero_()  # so that all logits of the slots are 0
    eye = torch.eye(V, r, dtype=torch.float64)
    head.predecessor.weight.data.copy_(eye * 30)
    head.successor.weight.data.copy_(torch.zeros(V, r).double().index_add_(0, follow, eye[:V]))
    if kind == "gated":
        head.mix.weight.data.zero_()
        head.mix.bias.data.fill_(9)
    if kind == "rnn":  # out = e, which tanh turns into nearly 1; the state stays 0
        head.mix.weight.data.zero_()
        head.mix.weight.data[2 * r :, r : 2 * r] = torch.eye(r) * 9
        head.successor.weight.data.mul_(30)
        head.mix.bias.data.zero_()
    if kind == "selector":
        head.config = head.config.__class__(**{**vars(head.config), "markov": "vanilla"})
    for tree in (trees.chain(4), trees.DynamicTree(12, 3, 3)):
        built_tree = tables(tree)
        drafter = BlockDrafter(head, built_tree, 1, CTX + built_tree.N + 1)
        params = SamplingParams(**settings, max_new_tokens=50)
        result = Engine(model, None, drafter).generate(PROMPT, params).run()[0]
        assert result.token_ids == Engine(model).generate(PROMPT, params).run()[0].token_ids
        assert all(len(step) == 5 for step in result.tokens_per_step[:-1]), (kind, result.tokens_per_step)


# ---- the search in C++ ---------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("settings", ({}, SAMPLED, {"temperature": 0.3, "seed": 2}))
@pytest.mark.parametrize("kind", ("", "vanilla", "selector"))
def test_the_search_in_cpp_finds_the_same_trees(kind, settings):
    """A factor of another token or slot, places taken for ids, a normaliser over the shortlist alone, no temperature, a
    row that gets the tree of another one, and pruning that keeps too much or too little."""
    model = tiny_model(torch.float32)
    ids = torch.arange(0, V, 2)
    head = tiny_block(model, slots=6, slot0=True, markov=kind, rank=6 if kind else 0, draft_ids=ids, shortlist=9)
    K, N, B = 7, 8, 3
    drafter = BlockDrafter(head, trees.DynamicTree(N, 3, K), B, CTX + N + 1)
    state = DecodeState(model, drafter, B, CTX)
    state.n.copy_(torch.tensor([9, 20, 31]))
    state.root.copy_(torch.tensor([5, 50, 90]))
    state.features.copy_(torch.randn(state.features.shape))
    drafter.cache.copy_(torch.randn(drafter.cache.shape))
    state.sampling.set([SamplingParams(**settings | {"seed": b}) for b in range(B)])
    mode = SamplingParams(**settings).mode
    noise = sampling.noise_ahead(state.sampling.seed, state.n, drafter.D + 1, state.hashes) if mode.sample else None
    inputs = draft_input(state, mode, noise)
    plain = drafter.draft(inputs)
    with KernelBackend("cpu", "cpu").active():
        assert drafter._searches_in_cpp(inputs, drafter._slots(inputs))
        got = drafter.draft(inputs)
        drafter.p_min, drafter.scoring = 0.04, "noisy"
        pruned = drafter.draft(inputs)
    for b in range(B):
        want = paths_of(plain, b)
        same_tree(paths_of(got, b), want, 1e-4)
        same_tree(paths_of(pruned, b), {path: w for path, w in want.items() if w >= math.log(0.04)}, 1e-4)
    assert got.tokens.shape == (B, N) and pruned.tokens.shape[1] == int(pruned.valid.sum(1).max())


# ---- the kernels against plain code --------------------------------------------------------------------------


@interpreted
def test_interpreted_context_is_written_as_in_plain_code(each):
    """A key with the norm of another layer, turned the wrong way, or in the slot of another row or head; a batch that is
    the first rows of a larger one."""
    for B, hd in ((1, 8), (2, 12)):
        kv = torch.randn(B, 5, 3, 2, 2, hd)
        norms, cos, sin = torch.randn(3, hd), torch.randn(B, 5, hd // 2), torch.randn(B, 5, hd // 2)
        slots = torch.stack([torch.randperm(9)[:5] for _ in range(B)])
        caches = [torch.zeros(3, 2, B + 1, 2, 9, hd) for _ in range(2)]
        views = [cache.narrow(2, 0, B) for cache in caches]
        kernels.write_context(kv, norms, 1e-5, cos, sin, views[0], slots)
        kernels.write_context.reference(kv, norms, 1e-5, cos, sin, views[1], slots)
        torch.testing.assert_close(*caches, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("taps,group", [(2, 4), (3, 24)])
def test_interpreted_slots_are_convolved_as_in_plain_code(each, taps, group):
    """A tap of the block before, of another side, or of another group of channels."""
    y, x, base = torch.randn(2, 4, 24), torch.randn(2, 4, 24), torch.randn(2, taps, 24)
    delta = torch.randn(2, 4, 2 * taps * 24 // group)
    for side in (0, 1):
        for residual in (None, x):
            got = kernels.convolve(y, delta, base, side, residual)
            torch.testing.assert_close(got, kernels.convolve.reference(y, delta, base, side, residual))


@interpreted
@pytest.mark.parametrize("K,R,count", [(5, 3, 5), (16, 6, 4), (9, 40, 1)])
def test_interpreted_children_are_those_of_plain_code(each, K, R, count):
    """A bias of another slot or row, the probability outside the shortlist lost, and NaN that wins."""
    scores = (torch.randn(2, 3, K) * 2).log_softmax(-1) - 0.3
    scores[0, 1, K - 1] = float("nan")
    ids = torch.stack([torch.randperm(50)[:K] for _ in range(6)]).view(2, 3, K)
    factor, table, soft = torch.randn(2, 4, R), torch.randn(50, R), torch.tensor([0.5, 2.0]).view(2, 1, 1)
    tokens, before, mixed = torch.randint(0, 70, (2, 4)), torch.randn(70, R), torch.randn(2, 3, R)
    for depth, softness, known in (
        (0, None, (factor, None, None, None)), (2, soft, (factor, None, None, None)),
        (1, soft, (None, tokens, before, None)), (0, None, (None, tokens, before, mixed)),
        (2, soft, (None, tokens, before, mixed)),
    ):  # fmt: skip
        parents = kernels.Parents(table, *known)
        got = kernels.follow(scores, ids, parents, softness, depth, count)
        want = kernels.follow.reference(scores, ids, parents, softness, depth, count)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("D,K,N", [(3, 4, 12), (5, 3, 2), (1, 7, 7), (4, 2, 16)])
def test_interpreted_trees_of_marginals_are_those_of_plain_code(each, D, K, N):
    """A prefix that the heap of a program forgets, takes twice, or gives to another parent."""
    tokens, scores = marginals(2, D, K)
    scores = scores.float()
    scores[1, 0, 1:] = -math.inf
    root = torch.tensor([5, 6])
    got, want = best_prefixes(tokens, scores, root, N), best_prefixes.reference(tokens, scores, root, N)
    for b in range(2):
        same_tree(paths_of(Draft(*got), b), paths_of(Draft(*want), b), 1e-5)
        assert int(got.valid[b].sum()) == int(want.valid[b].sum())
