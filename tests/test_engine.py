"""engine/engine.py: the same tokens with every drafter, stop rules, interrupted requests, the distribution of multi-round
verification, and one graph per step."""

import functools
import itertools
import json
import math
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from fake_cuda import Indexing, Leak, OneDevice, on_fake_gpu
from test_sampling import chi_square_z
from tiny import (
    CTX,
    DRAFT_VOCAB,
    MEDUSA,
    PROMPT,
    TREES,
    PieceTokenizer,
    ScriptedDrafter,
    V,
    eagle_drafter,
    eagle_engine,
    heads,
    needs_triton,
    tables,
    tiny_head,
    tiny_model,
)

import kernels
import tree as trees
from decoding import sampling
from decoding.drafter import Draft, PlainDrafter
from decoding.params import SamplingMode, SamplingParams
from decoding.step import DecodeState, decode_step
from drafters.trees import DraftRule
from eagle_draft import EagleDrafter
from engine import stepping
from engine.engine import Engine, EngineConfig
from engine.fused import compiled_blocks
from engine.prefill import Prefill
from kernels import growing

MODEL = tiny_model()
HEADS = heads(MODEL)
PROMPTS = [PROMPT, PROMPT[:5], [11] + PROMPT * 2]
SETTINGS = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=1.0),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=1.0, top_k=5),
    dict(temperature=0.8, min_p=0.1),
    dict(repetition_penalty=1.3, frequency_penalty=0.4),
    dict(temperature=1.0, top_p=0.95, top_k=20, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.5),
    dict(temperature=0.9, repetition_penalty=1.1, logit_bias={5: 3.0, 9: -100, 22: 1.5}),
]


def settings(index: int, **more) -> SamplingParams:
    return SamplingParams(**({"seed": 3, "max_new_tokens": 24} | SETTINGS[index % len(SETTINGS)] | more))


@functools.cache
def plain(params: SamplingParams, row: int = 0) -> tuple[int, ...]:
    """Plain decoding of PROMPTS[row] in float64. Row b of a batch draws with seed + b."""
    seed = {**vars(params), "seed": params.seed + row}
    return tuple(Engine(MODEL).generate(PROMPTS[row], SamplingParams(**seed)).run()[0].token_ids)


def make(kind: str | None, tree, rows: int = 1, lag: int | None = None) -> Engine:
    """An engine with a head of this kind, or one that decodes plainly."""
    if not kind:
        return Engine(MODEL, config=EngineConfig(batch_size=rows, lag=lag))
    return eagle_engine(HEADS[kind], TREES[tree] if isinstance(tree, str) else tree, rows, lag=lag)


def consistent(result) -> bool:
    """The counting rules: what new_tokens, steps, tau and accepted_by_depth must be for these tokens."""
    flat = [token for step in result.tokens_per_step for token in step]
    assert result.token_ids[1:] == flat and all(result.tokens_per_step)
    assert result.new_tokens == 1 + len(flat) and result.steps == len(result.tokens_per_step)
    if result.steps:
        assert result.tau == pytest.approx(len(flat) / result.steps)
        assert result.tau == pytest.approx(1 + sum(result.accepted_by_depth))
    return True


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", HEADS)
def test_same_tokens_as_plain_decoding(kind, tree):
    """Catches a drafter that changes the output, which is the promise of the project. Float64 is exact. The settings
    rotate, so that every tree and every head meets all of them."""
    first = list(HEADS).index(kind) + 2 * list(TREES).index(tree)
    engine = eagle_engine(HEADS[kind], TREES[tree])
    for index in (first, first + 3, first + 5):
        params = settings(index)
        result = engine.generate(PROMPT, params).run()[0]
        assert tuple(result.token_ids) == plain(params) and consistent(result)
        assert result.stop_reason == "length"


@pytest.mark.parametrize("kind", [None, "eagle1", "eagle3"])
def test_same_tokens_in_a_batch(kind):
    """Catches rows of a batch that leak into each other: rows of other lengths and trees, with temperature, filters,
    penalties, seed, length and stop ids of their own. A greedy prompt stands beside sampled ones, and every prompt must
    get the text that it gets alone."""
    shift = list(HEADS).index(kind) if kind else 0
    made = ([trees.chain(4), MEDUSA, trees.StaticTree(())], TREES["dynamic"]) if kind else (None,)
    engines = [make(kind, tree, 3) for tree in made]
    for indices in ((0, 4, 7), (6, 3, 0), (5, 0, 1)):
        rows = [settings(i + shift, seed=40 + 7 * i, max_new_tokens=12 + 5 * b) for b, i in enumerate(indices)]
        stop = Engine(MODEL).generate(PROMPTS[2], rows[2]).run()[0].token_ids[6]
        rows[2] = replace(rows[2], stop_ids=(stop,))
        alone = [Engine(MODEL).generate(*request).run()[0] for request in zip(PROMPTS, rows, strict=True)]
        for engine in engines:
            results = engine.generate_batch(PROMPTS, rows).run()
            facts = [[(r.token_ids, r.stop_reason, r.seed, r.temperature) for r in each] for each in (results, alone)]
            assert facts[0] == facts[1] and all(map(consistent, results))
            assert {r.new_tokens for r in results[:2]} == {12, 17} and results[2].new_tokens <= 7
    with pytest.raises(ValueError, match="2 SamplingParams for 3 rows"):
        engine.generate_batch(PROMPTS, rows[:2])


@pytest.mark.parametrize("kind", [None, "eagle1", "eagle3"])
def test_logprobs_are_those_of_the_model(kind):
    """Catches log-probabilities of the wrong node, position, prompt or step, after temperature and penalties, or of
    tokens behind the end. They are compared with a forward over the whole text without a cache."""
    engine = make(kind, MEDUSA, 3, lag=2)
    rows = [settings(7, logprobs=3), settings(0, logprobs=0, stop_ids=(plain(settings(0), 1)[5],)), settings(1)]
    stream = engine.generate_batch(PROMPTS, rows)
    chunks = list(stream)
    assert tuple(stream.results[0].token_ids) == plain(settings(7)) and not stream.results[2].logprobs
    for b, (params, result) in enumerate(zip(rows[:2], stream.results, strict=False)):
        assert len(result.logprobs) == result.new_tokens <= (24, 6)[b]
        assert result.logprobs == [entry for chunk in chunks if chunk.row == b for entry in chunk.logprobs]
        hidden_states, _ = MODEL.forward_train(torch.tensor([PROMPTS[b] + result.token_ids]))
        want = MODEL.logits(hidden_states[0, len(PROMPTS[b]) - 1 : -1]).log_softmax(-1)
        for token, row, entry in zip(result.token_ids, want, result.logprobs, strict=True):
            best = row.topk(params.logprobs)
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert [i for i, _ in entry.top] == best.indices.tolist()
            assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    first = stream.results[0].logprobs[0]
    in_json = json.loads(json.dumps(stream.results[0].to_dict()))["logprobs"][0]
    assert in_json == {"logprob": first.logprob, "top": [list(pair) for pair in first.top]}
    assert engine.generate(PROMPT, settings(0)).run()[0].logprobs == []


@pytest.mark.parametrize("tree", ("chain4", "dynamic"))
def test_int8_cache_keeps_the_promise(tree):
    """Catches keys and values that are quantized by more than their own row, and rows that are moved without their
    scales. Speculative tokens would then differ from plain ones. The test decodes a batch, and a second turn that
    reuses the cache of the first."""
    config = EngineConfig(batch_size=2, kv_dtype=torch.int8)
    drafters = [None] + [eagle_drafter(HEADS[kind], TREES[tree], 2) for kind in ("eagle1", "eagle3")]
    engines, turn = [Engine(MODEL, None, drafter, config) for drafter in drafters], PROMPTS[:2]
    assert engines[0].state.kv[0].dtype == torch.int8 and not engines[0].state.kv[0].any()
    for index in (0, 2):
        results = [engine.generate_batch(turn, settings(index)).run() for engine in engines]
        ids = [[r.token_ids for r in rows] for rows in results]
        assert ids[1] == ids[0] and ids[2] == ids[0]
        turn = [prompt + new + [7] for prompt, new in zip(turn, ids[0], strict=True)]
    assert all(r.cached_tokens > 20 for rows in results for r in rows)
    assert engines[0].state.kv[0].any()


def test_wide_plain_forward_is_plain():
    """Catches padding rows that count: `--prove` replays through a forward that is as wide as the tree."""
    for index in (0, 7):
        engine = Engine(MODEL, drafter=PlainDrafter(MODEL, width=9))
        assert tuple(engine.generate(PROMPT, settings(index)).run()[0].token_ids) == plain(settings(index))


# ------------------------------------------------------------------ drafters that know


class RandomShapes(ScriptedDrafter):
    """Another random tree in every step and row, as dynamic trees vary, always with one right path of D nodes."""

    def __init__(self, truth, shift=0, N=14, D=5):
        super().__init__(trees.chain(D), truth, shift)
        self.N, self.D, self.random = N, D, random.Random(0)

    def shape(self, inputs):
        parents, ranks = [], []
        for _ in range(inputs.n.shape[0]):
            depth, parent, rank, right = [0], [0], [0], self.random.sample(range(1, self.N), self.D)
            above, on_path = 0, 0
            for i in range(1, self.N):
                if i in right:
                    above, on_path = on_path, i
                    rank.append(0)
                else:
                    above = self.random.choice([j for j in range(i) if depth[j] < self.D])
                    rank.append(i)  # a wrong token that no sibling has
                parent.append(above)
                depth.append(depth[above] + 1)
            parents.append(parent)
            ranks.append(rank)
        parent, rank = torch.tensor(parents), torch.tensor(ranks)
        ancestors, depth = growing.ancestors_from_parents(parent, self.D)
        return parent, depth, ancestors, torch.ones_like(parent, dtype=torch.bool), rank


def scripted(tree, params, rows=1, shift=0, tokenizer=None, lag=None):
    """An engine whose drafter knows the plain continuation of every row, or with shift=1 avoids it."""
    longer = SamplingParams(**{**vars(params), "max_new_tokens": params.max_new_tokens + 20, "stop_ids": ()})
    truth = [PROMPTS[b] + list(plain(longer, b)) for b in range(rows)]
    drafter = RandomShapes(truth, shift) if tree == "random" else ScriptedDrafter(TREES[tree], truth, shift)
    return Engine(MODEL, tokenizer, drafter, EngineConfig(batch_size=rows, lag=lag))


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("tree", ("paper25", "chain4", "medusa", "random", "root"))
def test_oracle_is_accepted_whole_and_hostile_not_at_all(tree, rows):
    """Catches acceptance that is lost in the engine, by wrong positions, slots, masks, noise rows or commits. An
    oracle must get D + 1 tokens in every step and a drafter that is always wrong one token. The text must be the
    same, greedy and sampled, with and without penalties."""
    for index, shift in ((0, 0), (2, 0), (7, 0), (0 if rows == 1 else 7, 1)):
        params = settings(index)
        engine = scripted(tree, params, rows, shift)
        full = 1 if shift else engine.drafter.D + 1
        for b, result in enumerate(engine.generate_batch(PROMPTS[:rows], params).run()):
            assert tuple(result.token_ids) == plain(params, b) and result.seed == 3 + b and consistent(result)
            assert all(len(step) == full for step in result.tokens_per_step[:-1])


# ------------------------------------------------------------------ stop rules


def test_stop_ids_inside_an_accepted_run():
    """Catches tokens after a stop id that leak into ids, counts, tau or acceptance. Every token of the text is the stop
    id once, also the first one."""
    tokens = plain(settings(2))
    for k in (tokens.index(token) for token in {*tokens}):
        params = settings(2, stop_ids=(96, tokens[k]))
        result = scripted("chain4", params).generate(PROMPT, params).run()[0]
        assert tuple(result.token_ids) == tokens[: k + 1] and result.stop_reason == "eos" and consistent(result)
        assert [len(step) for step in result.tokens_per_step] == [5] * (k // 5) + ([k % 5] if k % 5 else [])


@pytest.mark.parametrize("tree", ("root", "chain4", "random"))
def test_length_limit_inside_an_accepted_run(tree):
    """Catches an accepted run that goes past max_new_tokens, and a count without the token that prefill gives, also on
    the device: a batch would compute a step for nothing."""
    for limit in range(1, 14):
        params = settings(2, max_new_tokens=limit)
        made = scripted(tree, params)
        result = made.generate(PROMPT, params).run()[0]
        assert tuple(result.token_ids) == plain(settings(2))[:limit] and result.stop_reason == "length"
        assert consistent(result) and int(made.state.produced[0]) >= limit


def test_the_last_slot_of_the_context():
    """Catches tree rows past the end of the context that overwrite live rows instead of the trash row."""
    for tree in ("paper25", "dynamic", "chain4"):
        prompt = (PROMPT * 9)[: CTX - 30]
        params = settings(2, max_new_tokens=30)
        expected = Engine(MODEL).generate(prompt, params).run()[0].token_ids
        assert eagle_engine(HEADS["eagle1"], TREES[tree]).generate(prompt, params).run()[0].token_ids == expected
        with pytest.raises(ValueError, match="model's limit"):
            eagle_engine(HEADS["eagle1"], TREES[tree]).generate([1, *prompt], params)


def letters() -> PieceTokenizer:
    """Tokens of one to three bytes over a small alphabet. Some of them are halves of characters."""
    pieces = [b"a", b"b", b"ab", b"ba", b"c", b" ", b"\xc3", b"\xa9", "é".encode(), b"abc", b"x\xe2", b"\x82\xac"]
    return PieceTokenizer([pieces[i % len(pieces)] for i in range(V)])


def expected_stop(tokenizer, tokens, stops, limit):
    """(ids, text, reason) by definition: the shortest prefix whose text holds a stop string."""
    stream, text = tokenizer.stream(), ""
    for i, token in enumerate(tokens[:limit]):
        text += stream.push([token])
        cuts = [text.find(s) for s in stops if s in text]
        if cuts:
            return tokens[: i + 1], text[: min(cuts)], "stop"
    text += stream.flush()
    cuts = [text.find(s) for s in stops if s in text]
    return tokens[:limit], text[: min(cuts)] if cuts else text, "stop" if cuts else "length"


def test_stop_strings_across_tokens_and_steps():
    """Catches errors of stop strings that span tokens or steps: a part of one or the text after it is shown, ids are
    counted wrongly, or a chunk is taken back. Behind an "x" a token has half a character, which must not be flushed."""
    tokenizer, rng = letters(), random.Random(1)
    tokens = plain(settings(2, max_new_tokens=44))
    text = tokenizer.decode(tokens)
    for trial in range(24):
        at = [rng.randrange(len(text)) for _ in range(rng.choice((1, 1, 2, 3)))]
        stops = tuple(text[i : i + rng.randint(1, 6)] for i in at) + (("zz", "é€é", "\ufffd", "x")[trial % 4],)
        params = settings(2, max_new_tokens=rng.choice((7, 24)), stop=stops)
        tree = ("chain4", "medusa", "random")[trial % 3]
        engine = scripted(tree, settings(2), tokenizer=tokenizer)
        stream, shown = engine.generate(PROMPT, params), ""
        ids, final, reason = expected_stop(tokenizer, tokens, stops, params.max_new_tokens)
        for chunk in stream:
            shown += chunk.text
            assert final.startswith(shown)
        result = stream.result
        assert (tuple(result.token_ids), result.text, result.stop_reason) == (ids, final, reason)
        assert shown == result.text and consistent(result)


def test_log_probabilities_of_a_prompt_are_those_of_its_steps():
    """Another value than that with which a token was decoded, with a drafter and behind a text that is cached; a first
    token that has one, and a prompt of one token."""
    engine = eagle_engine(HEADS["eagle3"], TREES["chain4"])
    for _ in range(2):
        decoded = engine.generate(PROMPT, settings(1, max_new_tokens=20, logprobs=2)).run()[0]
        asked = settings(1, max_new_tokens=3, prompt_logprobs=2)
        scored = engine.generate(PROMPT + decoded.token_ids, asked).run()[0]
        found = scored.prompt_logprobs
        assert found[0] is None and len(found) == len(PROMPT) + 20 and scored.cached_tokens == 0
        for entry, one in zip(found[len(PROMPT) :], decoded.logprobs, strict=True):
            assert entry.logprob == pytest.approx(one.logprob, abs=1e-4) and entry.top[0][0] == one.top[0][0]
    nothing = engine.generate(PROMPT[:1], settings(1, max_new_tokens=0, prompt_logprobs=0)).run()[0]
    assert nothing.prompt_logprobs == [None] and not nothing.token_ids and nothing.stop_reason == "length"


def greedy_loop(prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy tokens of a loop that adds biases, counts for penalties, and bans stop ids at the beginning by itself. Plain
    and speculative decoding would agree on wrong tokens."""
    wanted, stop = [], [token for token in params.stop_ids if token < V]
    while len(wanted) < params.max_new_tokens and not {*wanted} & {*stop}:
        z = MODEL.logits(MODEL.forward_train(torch.tensor([prompt + wanted]))[0][:, -1])[0]
        for token, value in params.logit_bias:
            z[token] += value
        for token in {*prompt, *wanted}:
            z[token] *= params.repetition_penalty ** (-1 if z[token] > 0 else 1)
        for token in set(wanted):
            z[token] -= params.presence_penalty + params.frequency_penalty * wanted.count(token)
        if len(wanted) < params.min_new_tokens:
            z[stop] = -math.inf
        wanted.append(int(z.argmax()))
    return wanted


def test_biases_and_a_least_length_are_followed():
    """Catches a bias of another row, after the penalties or missing at the first token, a stop id that comes too soon or
    too late, and a token of prefill that penalties do not count."""
    penalties, rows = dict(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=1.5), []
    for bias, least in (({7: 2.5, 30: -100}, 0), ({}, 9), ({11: 100}, 5)):
        params = SamplingParams(max_new_tokens=14, logit_bias=bias, **penalties)
        stop = greedy_loop(PROMPT, params)[1:3]
        params = replace(params, stop_ids=(*stop, 2**31 - 1), min_new_tokens=least)
        wanted = greedy_loop(PROMPT, params)
        assert len(wanted) > least and Engine(MODEL).generate(PROMPT, params).run()[0].token_ids == wanted
        rows.append((params, wanted))
    for engine in (make(None, "", 4, lag=2), make("eagle3", "dynamic", 4)):
        everything = [params for params, _ in rows] + [settings(1)]
        results = engine.generate_batch([PROMPT] * 4, everything).run()
        assert [r.token_ids for r in results] == [wanted for _, wanted in rows] + [list(plain(settings(1)))]


@pytest.mark.parametrize("kind", HEADS)
def test_a_bias_reaches_the_drafts(kind):
    """A drafter that knows nothing of a bias: the tokens would be right, and hardly any draft would be accepted."""
    token = int(DRAFT_VOCAB[20])
    for index, tree in ((0, "chain4"), (1, "dynamic"), (4, "paper25")):
        engine = eagle_engine(HEADS[kind], TREES[tree])
        params = settings(index, logit_bias={token: 100})
        result = engine.generate(PROMPT, params).run()[0]
        assert result.token_ids == [token] * 24 and result.tau > TREES[tree].D - 0.5


def test_text_streams_as_soon_as_it_may():
    """Catches text that is held back although no stop string can match any more. A user would see a frozen stream."""
    params = settings(2, stop=("zzz",))
    engine = Engine(MODEL, letters())
    shown = ""
    for i, chunk in enumerate(engine.generate(PROMPT, params)):
        shown += chunk.text
        stream = letters().stream()
        assert shown == "".join(stream.push([t]) for t in plain(settings(2))[: i + 1]) or i == 23


# ------------------------------------------------------------------ several requests on one engine


def steps_of(engine, prompt, params):
    result = engine.generate(prompt, params).run()[0]
    return result.token_ids, result.tokens_per_step


@pytest.mark.parametrize("kind, tree", (("eagle1", "paper25"), ("eagle3", "dynamic")))
def test_a_turn_after_a_stop_equals_a_fresh_run(kind, tree):
    """Catches rows of tokens that a stop cut off, and stale draft rows, in a cache that the next turn reuses. Tokens
    and tokens per step must be those of a fresh engine, and the common prefix must really be reused."""
    hot = dict(temperature=4.0, seed=8)  # the shared noise makes long accepted runs
    engine = eagle_engine(HEADS[kind], TREES[tree])
    free = SamplingParams(max_new_tokens=24, **hot)
    first = engine.generate(PROMPT, free).run()[0]
    step = max(range(first.steps), key=lambda i: len(first.tokens_per_step[i]))
    assert len(first.tokens_per_step[step]) > 2
    stop = first.tokens_per_step[step][0]  # the rest of this run is cut off
    params = SamplingParams(max_new_tokens=24, stop_ids=(stop,), **hot)
    for more in ([stop, 4, 8], [4], PROMPT):
        engine = eagle_engine(HEADS[kind], TREES[tree])
        ids = engine.generate(PROMPT, params).run()[0].token_ids
        prompt = PROMPT + ids + more
        fresh = steps_of(eagle_engine(HEADS[kind], TREES[tree]), prompt, free)
        again = engine.generate(prompt, free)
        assert (again.run()[0].token_ids, again.result.tokens_per_step) == fresh
        assert len(PROMPT) <= again.result.cached_tokens < len(prompt)


def test_prefix_reuse_counts():
    """Catches cached_tokens that are wrong by one, and a cache that is believed valid further than it is."""
    engine = Engine(MODEL)
    params = settings(0, max_new_tokens=6)
    ids = engine.generate(PROMPT, params).run()[0].token_ids
    for prompt, cached in (
        (PROMPT + ids + [4], len(PROMPT) + 5),  # the last token never went through the model
        (PROMPT + ids[:3], len(PROMPT) + 2),  # its own last token runs again for its logits
        (PROMPT[:4] + [90], 4),
        ([90], 0),
        (PROMPT, 0),
        (PROMPT, len(PROMPT) - 1),
    ):
        result = engine.generate(prompt, params).run()[0]
        assert result.cached_tokens == cached
        assert result.token_ids == Engine(MODEL).generate(prompt, params).run()[0].token_ids


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("head", [None, "eagle1"])
def test_a_stream_that_was_closed_leaves_its_prefix(head, lag):
    """Catches a stopped answer whose conversation runs again from its start, steps under way that count as kept, and a
    stream that is closed after another request has taken its place."""
    engine, params = make(head, "paper25", lag=lag), settings(2, max_new_tokens=30)
    stream = engine.generate(PROMPT, params)
    for _ in zip(range(4), stream, strict=False):
        pass
    stream.close()
    known = PROMPT + stream.result.token_ids
    result = engine.generate(known + [4], params).run()[0]
    assert result.token_ids == make(head, "paper25").generate(known + [4], params).run()[0].token_ids
    assert result.cached_tokens == len(known) - 1 if head is None else result.cached_tokens >= len(PROMPT)
    stream = engine.generate(PROMPT, params)
    next(iter(stream))
    other = engine.generate([9, 8, 7, 6], params).run()[0]
    stream.close()
    again = engine.generate([9, 8, 7, 6], params).run()[0]
    assert again.token_ids == other.token_ids and again.cached_tokens >= 2


@functools.cache
def fresh_steps(index, prompt):
    fresh = eagle_engine(HEADS["eagle1"], TREES["paper25"])
    return steps_of(fresh, list(prompt), settings(index, max_new_tokens=12))


@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("accident", ("closed", "half read", "no memory"))
def test_the_engine_survives(accident, rows, monkeypatch):
    """Catches what a request that is cut short leaves behind for the next one: the stream is closed, nobody reads its
    end meanwhile, or memory runs out within a prompt. Catches chunks that are lost while another stream is read, and a
    thread that waits for itself. (tests/test_runner.py cuts requests short at all other places.)"""
    engine = eagle_engine(HEADS["eagle1"], TREES["paper25"], rows, lag=2)  # cut short with steps under way
    index, prompt = ((2, PROMPT), (7, PROMPT + [5, 6]))[rows - 1]
    engine.generate(PROMPT, settings(0, max_new_tokens=4)).run()  # something to reuse wrongly
    stream = engine.generate(PROMPT, settings(2))
    if accident == "no memory":
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(engine.prefill, "forward", mock.Mock(side_effect=MemoryError))
            stream.run()
    else:
        ids = [token for _, chunk in zip(range(4), stream, strict=False) for token in chunk.token_ids]
    if accident == "closed":
        stream.close()
    assert steps_of(engine, prompt, settings(index, max_new_tokens=12)) == fresh_steps(index, tuple(prompt))
    if accident == "half read":  # it has gone on meanwhile
        assert (*ids, *(token for chunk in stream for token in chunk.token_ids)) == plain(settings(2))
    stream.close()
    assert stream.result.stop_reason == ("length" if accident == "half read" else "interrupted")


def test_the_backend_does_not_leak_to_the_consumer():
    """Catches the kernels of one engine that run in the consumer's code between chunks, or in another engine's."""
    before = kernels.active_backend()
    engine = Engine(MODEL, config=EngineConfig(backend=kernels.KernelBackend("reference")))
    for _ in engine.generate(PROMPT, settings(0)):
        assert kernels.active_backend() is before
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("prompts, params, message", [
    ([[]], {}, "prompt is empty"), ([], {}, "no prompts"), ([[-1]], {}, "prompt id -1"),
    ([[0, V]], {}, f"prompt id {V} is outside the vocabulary; allowed: 0 to {V - 1}"),
    ([[True]], {}, "prompt id True"),
    ([[1]], dict(max_new_tokens=CTX), f"needs {CTX + 1} of the {CTX} allocated"),
    ([[1]], dict(stop=("x",)), "stop strings need a tokenizer"),
    ([[1]], dict(stop_ids=tuple(range(40))), "40 stop ids; allowed: at most 32"),
])  # fmt: skip
def test_bad_requests_are_refused_at_once(prompts, params, message):
    """Catches requests that index out of the cache or the vocabulary, and a mode of compilation that silently falls back
    to another one. They must end in one line before any kernel runs."""
    with pytest.raises(ValueError, match=message) as error:
        Engine(MODEL).generate_batch(prompts, SamplingParams(**params))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="compile_mode is 'fast'; allowed: graph, blocks, reduce-overhead"):
        Engine(MODEL, config=EngineConfig(compile_mode="fast"))


# ------------------------------------------------------------------ NaN


def poisoned_model(token: int, value: float):
    model = tiny_model()
    model.embed_tokens.weight[token] = value
    return model


class Poisoner(ScriptedDrafter):
    """An oracle on rank 0 whose other nodes all draft one token."""

    poison = 0

    def draft(self, inputs) -> Draft:
        draft = super().draft(inputs)
        rank = self.tree.rank.expand_as(draft.tokens)
        return draft._replace(tokens=torch.where(rank > 0, self.poison, draft.tokens))


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("index", (0, 7))
def test_a_rejected_nan_branch_changes_nothing(value, index):
    """Catches a rejected branch whose overflow reaches its siblings, later steps or the counts, because 0 x NaN =
    NaN."""
    params = settings(index)
    truth = PROMPT + list(plain(settings(index, max_new_tokens=44)))
    unused = next(t for t in range(V) if t not in truth)
    drafter = Poisoner(TREES["paper25"], [truth])
    drafter.poison = unused
    engine = Engine(poisoned_model(unused, value), drafter=drafter)
    result = engine.generate(PROMPT, params).run()[0]
    assert tuple(result.token_ids) == plain(params)
    assert all(len(step) == 6 for step in result.tokens_per_step[:-1])


@pytest.mark.parametrize("kind, tree", (("eagle1", "paper25"), ("eagle1", "dynamic"), ("eagle3-full", "dynamic")))
def test_a_nan_draft_changes_nothing(kind, tree):
    """Catches NaN that stays in the draft cache. A head that drafts a token with NaN weights fills its own rows with
    NaN, and the next step must not see them."""
    params = settings(2)
    truth = PROMPT + list(plain(params))
    unused = next(t for t in range(V) if t not in truth)
    model = poisoned_model(unused, math.nan)
    head = heads(model)[kind]
    real, calls = head.narrow_logits, []

    def narrow_logits(output):  # the poisoned token is always the second best
        logits = real(output)
        calls.append(bool(logits.isnan().any()))
        logits[..., unused] = logits.amax(-1) - 1e-9
        return logits

    head.narrow_logits = narrow_logits
    clean = eagle_engine(HEADS[kind], TREES[tree]).generate(PROMPT, params).run()[0]
    result = eagle_engine(head, TREES[tree], shared_noise=False).generate(PROMPT, params).run()[0]
    assert any(calls) and tuple(result.token_ids) == plain(params) == tuple(clean.token_ids)


@pytest.mark.parametrize("tree", ("root", "chain4", "medusa"))
def test_a_nan_on_the_accepted_path_is_an_error(tree):
    """Catches logits that are not finite and become token 0. Whoever drafts, the good tokens come first and then one
    line that names the position. There is no error if the text stops before it."""
    tokens = plain(settings(2))
    k = next(i for i in range(7, 24) if tokens[i] not in tokens[:i] and tokens[i] not in PROMPT)
    model = poisoned_model(tokens[k], math.nan)
    truth = PROMPT + list(plain(settings(2, max_new_tokens=44)))

    def engine():
        return Engine(model, drafter=ScriptedDrafter(TREES[tree], [truth]))

    stream = engine().generate(PROMPT, settings(2))
    with pytest.raises(ArithmeticError, match=f"non-finite at token {len(PROMPT) + k}\\b") as error:
        stream.run()
    assert "\n" not in str(error.value)
    assert tuple(stream.result.token_ids) == tokens[: k + 1] and consistent(stream.result)
    stopping = settings(2, stop_ids=(tokens[k],))
    result = engine().generate(PROMPT, stopping).run()[0]
    assert tuple(result.token_ids) == tokens[: k + 1] and result.stop_reason == "eos"
    with pytest.raises(ArithmeticError, match="non-finite at token 2"):
        engine().generate([1, 2, tokens[k]], settings(2)).run()


def test_a_batch_row_with_nan_leaves_the_others_right():
    """Catches an error for a row that has finished already, and NaN that leaves the cache of its row."""
    others = [plain(settings(2), b) for b in range(1, 3)]
    tokens = plain(settings(2))
    elsewhere = {t for row in (*others, *PROMPTS) for t in row}
    k = next(i for i, t in enumerate(tokens) if i > 0 and t not in tokens[:i] and t not in elsewhere)
    stop = tokens[k]
    model = poisoned_model(stop, math.nan)  # row 0 stops at this token, but its forwards go on
    truth = [p + list(plain(settings(2, max_new_tokens=44), b)) for b, p in enumerate(PROMPTS)]
    for drafter in (None, ScriptedDrafter(MEDUSA, truth)):
        engine = Engine(model, drafter=drafter, config=EngineConfig(batch_size=3))
        results = engine.generate_batch(PROMPTS, settings(2, stop_ids=(stop,))).run()
        assert tuple(results[0].token_ids) == tokens[: k + 1]
        assert [tuple(r.token_ids) for r in results[1:]] == others


# ------------------------------------------------------------------ multi-round: the distribution of the emitted tokens

SMALL = 5  # vocabulary
ROWS, SPAN = 4096, 3  # draws, and tokens per draw: 125 outcomes
MUTANT_ROWS = 1024  # a mutant lands 11 deviations away or more, and the limit is 8
BUSH = trees.StaticTree(tuple(tuple(map(int, w)) for w in "0 1 2 00 01 10 000".split()))


def dense_attention(
    q, kv, start, visible, positions, window, scale, arrived=None, cap=0.0, sinks=None, segments=None, *_
):
    """Attention for thousands of rows at once. The reference loops over the rows."""
    B, _, T, _ = q.shape
    if segments is not None:  # which lie behind each other, all of one size
        first, behind = segments[0].tolist()
        kv = kv[:, 0].narrow(2, first, B * (behind + 1)).unflatten(2, (B, -1)).transpose(1, 2)
    S, R = kv.shape[3], visible.shape[2]
    group = q.shape[1] // kv.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in kv)
    mask = (torch.arange(S) < start[:, None])[:, None].expand(B, T, S).clone()
    slots = (start[:, None] + torch.arange(R)).clamp(max=S - 1)[:, None].expand(B, T, R)
    mask.scatter_(2, slots, visible)
    out = ((q @ k.mT) * scale).masked_fill(~mask[:, None], -math.inf).softmax(-1) @ v
    return out.transpose(1, 2)


@functools.cache
def small_model():
    model = tiny_model(torch.float32, seed=4, layers=1, vocab=SMALL, hidden_size=16, num_attention_heads=2, head_dim=8)
    model.lm_head.weight.mul_(1.5)
    return model


@functools.cache
def small_head(seed=5):
    return tiny_head(small_model(), seed=seed, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8)


def draws(tree, params, multi_round="", shared_noise=True, rows=ROWS, ctx=24):
    """SPAN tokens after the first one of every row, from prefill and the engine's own step. int64 [rows, SPAN]."""
    built = tables(tree, rows)
    drafter = EagleDrafter(small_head(), built, rows, ctx + built.N + 1, DraftRule(shared_noise, multi_round))
    engine = Engine(small_model(), drafter=drafter, config=EngineConfig(batch_size=rows, ctx=ctx))
    state, prompt = engine.state, [1, 3, 0, 2]
    out, filled = (torch.zeros(rows, SPAN + built.D + 1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    with torch.inference_mode():
        state.sampling.set(params)
        # greedy, so that all rows start with the same token
        list(engine.prefill.read(0, prompt, SamplingMode()))
        for buffer in (state.tokens, state.n, state.root, state.count, state.features):
            buffer.copy_(buffer[:1].expand_as(buffer))
        by_row = state.kv[0].unflatten(-2, (rows, -1))
        by_row.copy_(by_row[..., :1, :, :].expand_as(by_row))
        drafter.cache.copy_(drafter.cache[:, :1].expand_as(drafter.cache))
        state.done.fill_(False)
        state.limit.fill_(999)
        state.seen[:], state.counts[:] = state.seen[:1].clone(), state.counts[:1].clone()
        taken = []
        while int(filled.min()) < SPAN:
            step = decode_step(small_model(), drafter, state, params.mode)
            level = torch.arange(built.D + 1)
            where = (filled[:, None] + level).clamp(max=out.shape[1] - 1)
            keep = (level < step.count[:, None]) & (filled[:, None] + level < SPAN)
            out.scatter_(1, torch.where(keep, where, out.shape[1] - 1), step.emitted)
            filled += step.count
            taken.append(step.count.double().mean())
            state.n.clamp_(max=ctx - 6)  # finished rows must not run out of cache
    return out[:, :SPAN], float(torch.stack(taken).mean()), prompt + [int(state.tokens[0, 4])]


def exact_distribution(start, params):
    """Probability of each of the SMALL^SPAN continuations in float64, with the filters written out here."""
    model = small_model()
    weights = {k: v.double() for k, v in model.state_dict().items()}
    twin = tiny_model(torch.float64, layers=1, vocab=SMALL, hidden_size=16, num_attention_heads=2, head_dim=8)
    twin.load_state_dict(weights)
    wanted = torch.ones(1, dtype=torch.float64)
    for length in range(SPAN):
        ids = torch.tensor([[*start, *tail] for tail in itertools.product(range(SMALL), repeat=length)])
        z = twin.logits(twin.forward_train(ids)[0][:, -1]) / params.temperature
        order = z.argsort(-1, descending=True)
        p = z.gather(1, order).softmax(-1)
        if params.top_k:
            p[:, params.top_k :] = 0
            p = p / p.sum(-1, keepdim=True)
        p = torch.where(p.cumsum(-1) - p < params.top_p, p, 0)
        p = torch.zeros_like(p).scatter(1, order, p / p.sum(-1, keepdim=True))
        wanted = (wanted[:, None] * p).flatten()
    return wanted


def deviation(drawn, wanted):
    """Chi-square of the drawn continuations against the wanted probabilities, as a standard normal deviate."""
    cells = (drawn * SMALL ** torch.arange(SPAN - 1, -1, -1)).sum(-1)
    observed = torch.bincount(cells, minlength=SMALL**SPAN).double()
    assert not observed[wanted == 0].any(), "a token that the filters remove"
    return chi_square_z(observed[wanted > 0], wanted[wanted > 0] * len(drawn))


SAMPLINGS = {
    "T=1": SamplingParams(temperature=1.0, seed=100),
    "T=0.7 top-k": SamplingParams(temperature=0.7, top_k=3, seed=90000),
    "T=1.3 top-p": SamplingParams(temperature=1.3, top_p=0.8, seed=200000),
    "T=1 top-2": SamplingParams(temperature=1.0, top_k=2, seed=4000),  # fewer tokens than a node has children
}
RULES = [  # every rule with and without filters, every setting on a chain or a tree
    ("chain", "with", "T=1.3 top-p"),
    ("chain", "without", "T=0.7 top-k"),
    ("tree", "with", "T=1"),
    ("tree", "with", "T=0.7 top-k"),
    ("tree", "without", "T=1"),
    ("tree", "without", "T=1.3 top-p"),
    ("tree", "without", "T=1 top-2"),
    ("tree", "", "T=0.7 top-k"),
    ("dynamic", "", "T=1.3 top-p"),
]
SMALL_TREES = {"chain": trees.chain(3), "tree": BUSH, "dynamic": trees.DynamicTree(7, 2, 2)}


@pytest.fixture
def dense(monkeypatch):
    """Thousands of rows at once, where code for CPUs loops over rows: of attention, settings, filters and noise. The last
    two are calculated as on GPUs here (tests/test_sampling.py has them agree)."""

    def set_all(self, params):
        self.set_row(0, params)
        for buffer in vars(self).values():
            buffer.copy_(buffer[:1].clone())
        self.seed.add_(torch.arange(len(self.seed)))

    monkeypatch.setattr(kernels, "tree_attention", dense_attention)
    monkeypatch.setattr(sampling.SamplingState, "set", set_all)
    monkeypatch.setattr(sampling, "_cutoff", sampling._cutoff_search)
    monkeypatch.setattr(sampling, "_keys_on_host", lambda *words: torch.stack(sampling._keys(*words)))


@pytest.mark.parametrize("tree, rule, name", RULES)
def test_emitted_tokens_follow_the_target(tree, rule, name, dense):
    """Catches a biased rule. Multi-round verification (with and without replacement, on chains and trees, with
    filters on both sides) and shared noise must emit 125 continuations with the target's own probabilities.

    Asserted: the chi-square of the drawn continuations lies below 4.5 deviations, which chance exceeds in 3 of a million
    runs.

    Power: with n draws the expectation of the statistic grows by n sum (p - q)^2 / q. A shift of 7 % of the mass between
    equally likely halves adds 4096 * 4 * 0.07^2 = 80 to a mean of at most 124 with deviation 16, and is found. The
    mutants below are found with a quarter of the draws.
    """
    params = SAMPLINGS[name]
    drawn, _, start = draws(SMALL_TREES[tree], params, rule)
    assert deviation(drawn, exact_distribution(start, params)) < 4.5


def test_multi_round_beats_chance_and_is_refused_with_dynamic_trees(dense):
    """Catches a rule that accepts too little. A rule that accepts nothing is lossless too, so acceptance must exceed
    the luck of a head with other weights."""
    params = SAMPLINGS["T=1"]
    _, tau, _ = draws(BUSH, params, "without", rows=2048)
    assert tau > 1.4
    with pytest.raises(ValueError, match="static tree"):
        EagleDrafter(small_head(), trees.DynamicTree(8, 2, 2), 1, 40, DraftRule(multi_round="without"))


def same_stream(monkeypatch):
    """Drafting, acceptance and the bonus share their noise."""
    monkeypatch.setattr(sampling, "stream", lambda seed, which: seed)


def raw_bonus(monkeypatch):
    """Bonus and acceptance use unfiltered probabilities, as if top-p came after acceptance."""

    def probabilities(logits, state, mode):
        return (logits / state.temperature).softmax(-1)

    monkeypatch.setattr(sampling, "probabilities", probabilities)


def noise_without_positions(monkeypatch):
    """All depths share one noise."""
    real = sampling.gumbel_noise
    monkeypatch.setattr(sampling, "gumbel_noise", lambda s, p, *a, **how: real(s, p * 0, *a, **how))


@pytest.mark.parametrize("mutant", (same_stream, raw_bonus, noise_without_positions))
def test_mutants_of_the_distribution_are_caught(mutant, dense, monkeypatch):
    """Shows that the test of the distribution can fail: each mutant deviates by more than 8, or emits a removed token.
    tests/test_tree.py has mutants of the rule itself."""
    rule, name = ("", "T=1") if mutant is noise_without_positions else ("without", "T=1.3 top-p")
    params = SAMPLINGS[name]
    mutant(monkeypatch)
    try:
        drawn, _, start = draws(BUSH, params, rule, rows=MUTANT_ROWS)
        z = deviation(drawn, exact_distribution(start, params))
    except AssertionError:  # the mutant emitted a token that the filters remove
        return
    assert z > 8


def test_greedy_multi_round_is_greedy():
    """Catches multi-round verification that samples at temperature 0. Both distributions have one token there, so
    only equal tokens may be accepted."""
    for rule in ("with", "without"):
        engine = eagle_engine(HEADS["eagle1-trimmed"], MEDUSA, multi_round=rule)
        assert tuple(engine.generate(PROMPT, settings(0)).run()[0].token_ids) == plain(settings(0))


# ------------------------------------------------------------------ one graph, nothing read on the host

FILTERS = dict(temperature=1.0, top_p=0.9, top_k=9, min_p=0.01, repetition_penalty=1.2)
MODES = {
    "plain": (None, dict(temperature=0.0), ""),
    "static": (trees.chain(2), dict(temperature=1.0), ""),
    "dynamic, filters, penalties": (trees.DynamicTree(6, 2, 2), FILTERS, ""),
    "multi-round": (trees.chain(2), dict(temperature=1.0), "without"),
}


def tiny_parts(mode: str):
    """A model, and the head of the trees of this mode."""
    model = tiny_model(torch.float32, layers=1)
    return model, tiny_head(model, 3, DRAFT_VOCAB, taps=(0, 1)) if "dynamic" in mode else tiny_head(model)


REQUESTS = [
    (PROMPT, dict(seed=5, stop_ids=(7,), max_new_tokens=9)),
    (PROMPT[:3], dict(seed=-4, temperature=0.6, stop_ids=(1, 2, 3), max_new_tokens=12)),
    (PROMPT * 3, dict(seed=77, temperature=1.9, top_p=0.5, max_new_tokens=5)),
]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "static"])
def test_step_is_one_graph_and_never_recompiles(mode):
    """Catches a graph break, and a guard on a prompt, position, seed, temperature or stop id. It would cost seconds
    in the middle of a request, and such a step cannot be captured. The static tree is that of multi-round."""
    torch._dynamo.reset()
    tree, sampled, rule = MODES[mode]
    model, head = tiny_parts(mode)
    engine, eager = (eagle_engine(head, tree, multi_round=rule) if tree else Engine(model) for _ in range(2))
    engine._step = torch.compile(decode_step, fullgraph=True, backend="eager", dynamic=False)
    engine.generate(PROMPT, SamplingParams(**{**sampled, "max_new_tokens": 6})).run()
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt, changes in REQUESTS:
            changes = {k: v for k, v in changes.items() if k not in ("temperature", "top_p") or k in sampled}
            if not sampled["temperature"]:
                changes.pop("temperature", None)
            params = SamplingParams(**{**sampled, **changes})
            assert steps_of(engine, prompt, params) == steps_of(eager, prompt, params)


def fake_step(mode: str, spoil=lambda inputs: None) -> int:
    """One step on fake CUDA tensors. Returns how many drafts were made."""
    tree, sampled, rule = MODES[mode]
    calls, (model, head) = [], tiny_parts(mode)
    built = tables(tree, 2) if tree else None
    with torch._subclasses.fake_tensor.FakeTensorMode(), Indexing():
        on_fake_gpu(model)
        drafter = PlainDrafter(model)
        if tree:
            placed = on_fake_gpu(head), on_fake_gpu(built)
            drafter = EagleDrafter(*placed, 2, CTX + built.N + 1, DraftRule(multi_round=rule))
        state = DecodeState(model, drafter, 2, CTX, history=drafter.D > 0)
        fallback, real = PlainDrafter(model, features_of=drafter), drafter.draft

        def draft(inputs):
            calls.append(spoil(inputs))
            return real(inputs)

        drafter.draft = draft
        with OneDevice(), torch.inference_mode():
            out = decode_step(model, drafter, state, SamplingParams(**sampled).mode)
            if state.history.numel():  # a plain step may take over, and then the drafter catches up
                plainly = decode_step(model, fallback, state, SamplingParams(**sampled).mode)
                assert plainly.emitted.shape == (2, 1)
                with kernels.KernelBackend("auto", "cuda").active():
                    Prefill(model, drafter, state, None, False).catch_up(0, 5, 50)
        held = [t for t in vars(state).values() if isinstance(t, torch.Tensor)]
        assert all(t.device.type == "cuda" for t in held) and any(t is state.ring for t in held)
        assert all(t.device.type == "cuda" for t in (out.emitted, out.count, out.finite, out.path))
        assert out.emitted.shape == (2, drafter.D + 1)
    return len(calls)


@needs_triton
@pytest.mark.parametrize("mode", MODES)
def test_step_never_leaves_the_device(mode):
    """Catches a hidden read or copy to the host. Each would make the GPU wait and forbids capture. fullgraph alone
    lets .cpu() pass."""
    assert fake_step(mode) == 1


SPOILERS = {
    "copy to the host": lambda inputs: inputs.n.cpu(),
    "index by a 0-d tensor": lambda inputs: inputs.tokens[inputs.n[0]],
    "item": lambda inputs: inputs.n.sum().item(),
    "branch": lambda inputs: bool(inputs.n.sum() > 0),
    "constant from the host": lambda inputs: inputs.n + torch.tensor([1, 2]),
    "boolean mask": lambda inputs: inputs.tokens[inputs.tokens > 0],
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_planted_leak_is_caught(spoiler):
    """Shows that the test above can fail, for reads of values and for tensors that come from the host."""
    with pytest.raises(Leak):
        fake_step("static", SPOILERS[spoiler])


@pytest.mark.parametrize("mode", ("plain", "static", "dynamic", "multi-round"))
def test_a_block_compiles_once_per_width_and_leaves_other_engines_alone(mode, monkeypatch):
    """Catches a block that is compiled anew for every layer, level, prompt, position, seed or temperature. Catches
    another engine on the same model and head whose layers run compiled too, also after an error."""
    torch._dynamo.reset()
    compiled, ran = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return lambda *arguments: ran.append(graph) or graph.forward(*arguments)

    monkeypatch.setattr(stepping, "compiled_blocks", lambda: compiled_blocks(backend))
    tree = {"dynamic": trees.DynamicTree(6, 2, 2)}.get(mode, trees.chain(2))
    model, rule = tiny_model(torch.float32, layers=3), "without" if mode == "multi-round" else ""
    head, configs = tiny_head(model), [EngineConfig(compile=how) for how in (True, False)]
    drafters = [None if mode == "plain" else eagle_drafter(head, tree, multi_round=rule) for _ in configs]
    engine, eager = (Engine(model, None, *each) for each in zip(drafters, configs, strict=True))

    def uncompiled(prompt, params):
        before = len(ran)
        found = steps_of(eager, prompt, params)
        assert len(ran) == before, "the other engine ran compiled code"
        return found

    temperature = 0.0 if mode == "plain" else 1.0
    first = SamplingParams(temperature, max_new_tokens=6)
    expected = uncompiled(PROMPT, first)
    assert steps_of(engine, PROMPT, first) == expected and ran
    assert len(compiled) == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt, changes in REQUESTS:
            changes = {**changes, "temperature": changes.get("temperature", 1) * temperature, "top_p": 1.0}
            params = SamplingParams(**changes)
            assert steps_of(engine, prompt, params) == uncompiled(prompt, params)
    real = engine._step
    engine._step = lambda *arguments, **named: (real(*arguments, **named), 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPT, first).run()
    assert uncompiled(PROMPT, first) and len(compiled) == 1
