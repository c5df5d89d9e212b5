"""What the caches of drafters hold of a text, whole or of its last tokens, by the drafts that are made of it."""

import functools
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from block_kit import tiny_block
from test_recurrent import HYBRID
from tiny import MEDUSA, PieceTokenizer, V, needs_kernels, tables, tiny_head, tiny_model

import tree as trees
from decoding.drafter import Drafter
from decoding.params import SamplingParams
from decoding.step import Observer
from drafters import trees as tree_drafters
from drafters.block import BlockDrafter
from drafters.draft_model import DraftModelDrafter
from drafters.ngram import WithNGrams
from drafters.trees import DraftRule
from eagle_draft import EagleDrafter, MtpHead
from engine import stepping
from engine.batch import Batch
from engine.engine import Engine, EngineConfig
from engine.prompt_cache import PromptCache
from engine.runner import Times
from engine.stepping import Stepper
from generate import load
from loading.drafting import DraftFiles
from loading.memory import plan_memory
from loading.options import DEMO, LoadOptions
from weights.checkpoint import Checkpoint
from weights.head_reader import read_eagle
from weights.heads import mtp_head

LONG = 320  # positions
WINDOW = 16
TEXT = [random.Random(7 * i // 3).randrange(1, V) for i in range(LONG)]
OTHER = [random.Random(1000 + i).randrange(1, V) for i in range(LONG)]
TREES = {"eagle1": trees.PAPER25, "eagle3": trees.DynamicTree(16, 4, 4), "mtp": trees.chain(4), "ngrams": MEDUSA,
         "block": trees.DynamicTree(12, 3, 3), "draft": trees.chain(4)}  # fmt: skip
CASES = [(kind, window) for kind in TREES for window in (0, WINDOW) if (kind, window) != ("draft", WINDOW)]
every_kind = pytest.mark.parametrize(("kind", "window"), CASES, ids=[f"{k}-{w or 'full'}" for k, w in CASES])


def longer(module):
    module.rotary.build("cpu", LONG)
    return module


@functools.cache
def models(kind: str):
    """A target, and what drafts for it."""
    changes = {"mtp": True, **HYBRID} if kind == "mtp" else {}
    target = longer(tiny_model(**changes))
    target.config = replace(target.config, max_position_embeddings=LONG)
    if kind == "mtp":
        return target, longer(MtpHead(mtp_head(target.config).config, target))
    if kind == "block":
        return target, longer(tiny_block(target, slots=6, windows=(0, 9), causal_window=True))
    if kind == "draft":
        return target, longer(tiny_model(seed=5, layers=1))
    return target, longer(tiny_head(target, 3 if kind == "eagle3" else 1))


def drafter(kind: str, window: int, rows: int = 1) -> Drafter:
    target, head = models(kind)
    tree = tables(TREES[kind], rows)
    slots, rule = LONG + tree.N + 17, DraftRule(window=window)
    if kind == "draft":
        return DraftModelDrafter(target, head, tree, rows, slots, rule)
    made = {"block": BlockDrafter}.get(kind, EagleDrafter)(head, tree, rows, slots, rule)
    assert (made.ring > 0) == (window > 0)
    return WithNGrams(made, 3) if kind == "ngrams" else made


def engine(kind: str, window: int, rows: int = 1, cache: PromptCache | None = None, **config) -> Engine:
    config = EngineConfig(batch_size=rows, **{"eagle_always": False, "lag": 0} | config)
    made = Engine(models(kind)[0], PieceTokenizer([bytes([i]) for i in range(V)]), drafter(kind, window, rows), config)
    made.keep_prompts(cache or PromptCache())
    return made


def params(count: int) -> SamplingParams:
    return SamplingParams(0.7, seed=5, max_new_tokens=count)


class Drafts(Observer):
    """What is drafted in the steps of one request."""

    def __init__(self, result):
        self.result = result
        self.seen = []

    def step(self, output, results) -> None:
        for b, result in enumerate(results):
            if result is self.result and output.draft.tokens.shape[1] > 1:
                draft = output.draft
                kept = draft.valid[b] & (draft.scores[b] > -torch.inf)
                self.seen.append([column[b][kept].clone() for column in (draft.tokens, draft.parent, draft.scores)])


def drafts(on: Engine, prompt: list[int], count: int = 7) -> tuple[list, int]:
    """The drafts of the steps behind a prompt, and how many of its tokens were not run."""
    stream = on.generate(prompt, params(count))
    observer = Drafts(stream.result)
    on.add_observer(observer)
    stream.run()
    on.remove_observer(observer)
    return observer.seen, stream.result.cached_tokens


def same(found: list, fresh: list) -> None:
    assert len(found) == len(fresh) > 1
    for ours, theirs in zip(found, fresh, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=1e-9)


def check(kind: str, window: int, on: Engine, prompt: list[int], least: int = 1) -> int:
    """The drafts behind a prompt are those of an engine that has seen nothing. Returns how many tokens were not run."""
    found, cached = drafts(on, prompt)
    same(found, drafts(engine(kind, window), prompt)[0])
    assert cached >= least
    return cached


PLAIN = [0.0]  # how many of the next steps do not draft


@pytest.fixture(autouse=True)
def pacer(monkeypatch):
    """Drafting does not depend on what pays on this machine. A shorter text fills a ring."""

    def pacer(*_):
        PLAIN[0] -= 1
        return SimpleNamespace(speculating=PLAIN[0] < 0)

    PLAIN[0] = 0
    monkeypatch.setattr(Batch, "_pacer", pacer)
    monkeypatch.setattr(tree_drafters, "BACK", 8)
    monkeypatch.setattr(tree_drafters, "AHEAD", 40)


@every_kind
def test_a_text_that_is_still_there_is_drafted_from_as_if_it_were_new(kind, window):
    """Rows that were never made, that a later text or a rejected branch has overwritten, or that are of the text before:
    the tokens are right all the same, and nothing but the drafts shows it."""
    for asked, count, kept, new in ((170, 8, 170, 3), (170, 60, 150, 10), (120, 30, 40, 5), (30, 30, 25, 40)):
        on = engine(kind, window)
        on.generate(TEXT[:asked], params(count)).run()
        check(kind, window, on, TEXT[:kept] + OTHER[:new], 0 if kind == "mtp" else kept - WINDOW - 2)
        if asked == 170:
            answer = on.generate(TEXT[:asked], params(count)).run()[0].token_ids
            check(kind, window, on, [*TEXT[:asked], *answer, 5, 7], asked + count - 4)


@every_kind
def test_a_text_that_was_decoded_plainly_is_drafted_from_as_if_it_were_a_prompt(kind, window):
    """Rows of tokens that plain steps decoded, which the drafter has to catch up with: in the same request, and where
    another one goes on."""
    for steps in (3, 110):
        on = engine(kind, window)
        PLAIN[0] = steps
        stream = on.generate(TEXT[:130], params(steps + 12))
        observer = Drafts(stream.result)
        on.add_observer(observer)
        (result,) = stream.run()
        began = 1 + sum(len(ids) for ids in result.tokens_per_step[:steps])
        fresh = drafts(engine(kind, window), TEXT[:130] + result.token_ids[: began - 1])[0]
        same(observer.seen[:2], fresh[:2])
    on = engine(kind, window)
    PLAIN[0] = 10000
    answer = on.generate(TEXT[:130], params(110)).run()[0].token_ids
    PLAIN[0] = 0
    check(kind, window, on, [*TEXT[:130], *answer, 5, 7], 230)


@every_kind
@pytest.mark.parametrize("place", ("memory", "restart"))
def test_a_text_that_was_kept_is_drafted_from_as_if_it_were_new(kind, window, place, tmp_path):
    """Copies that have the wrong rows of the draft caches, or too few, or that are taken for those of another text."""
    keep = place == "restart"

    def kept() -> PromptCache:
        return PromptCache(64 * (place == "memory"), 64, tmp_path, keep=keep)

    on = engine(kind, window, cache=kept())
    answers = [on.generate(text[:150], params(60)).run()[0].token_ids for text in (TEXT, OTHER)]
    if keep:
        on.prompt_cache.close()
        on = engine(kind, window, cache=kept())
        on.generate(OTHER[:150], params(60)).run()
    check(kind, window, on, [*TEXT[:150], *answers[0], 5, 7], 200)
    check(kind, window, on, [*OTHER[:150], *answers[1], 5, 7], 200)
    check(kind, window, on, TEXT[:130] + OTHER[:6], 0 if kind == "mtp" else 110)
    assert on.prompt_cache.hits >= 2


@every_kind
def test_a_text_of_another_row_is_drafted_from_as_if_it_were_new(kind, window):
    """Rows that are copied from a text that goes on, that change places, that steps of others overwrite while the prompt
    is read, or of a text that was cut to make room."""
    on = engine(kind, window, 3, lag=2)
    running, second = on.generate(TEXT[:150], params(110)), on.generate(OTHER[:170], params(90))
    begun = [token for _ in range(6) for token in next(running).token_ids]
    next(second)
    check(kind, window, on, TEXT[:150] + OTHER[:9], 0 if kind == "mtp" else 130)
    check(kind, window, on, TEXT[:150] + begun[:4] + [5], 0 if kind == "mtp" else 130)
    PLAIN[0] = 10_000  # so that the drafter lacks rows of what is copied
    begun += [token for _ in range(40) for token in next(running).token_ids]
    PLAIN[0] = 0
    check(kind, window, on, TEXT[:150] + begun + [5], 0 if kind == "mtp" else 130)
    running.close()  # and the second one changes its row
    check(kind, window, on, OTHER[:150] + TEXT[:60], 0 if kind == "mtp" else 130)
    check(kind, window, on, [*OTHER[:170], *second.run()[0].token_ids, 3], 250)
    scarce = engine(kind, window, 3, pool=LONG + 100)
    for text in (TEXT, OTHER):
        answer = scarce.generate(text[:150], params(60)).run()[0].token_ids
        check(kind, window, scarce, [*text[:150], *answer, 5], 200)
        check(kind, window, scarce, text[:130] + OTHER[:3], 0)


@every_kind
@pytest.mark.parametrize("place", ("memory", "restart"))
def test_another_question_behind_the_same_system_message_starts_behind_it(kind, window, place, tmp_path):
    """An agent's 7,000 tokens of tools that are read again: where a memory cannot be cut back, or a ring lacks the rows;
    in several rows at once, with a rounded cache, after a restart; and an edited message, and an answer that comes back
    without its thought. The drafts show copies that lack a row, or are of another text."""
    system, mark, keep = [token % 90 for token in TEXT[:150]], 95, place == "restart"

    def made() -> Engine:
        cache = PromptCache(64 * (not keep), 64, tmp_path, keep=keep)
        on = engine(kind, window, 2, cache, kv_dtype=torch.int8 if kind == "eagle3" else None)
        on.prefill.turns = (mark,)
        return on

    def question(*ids: int) -> list[int]:
        return [mark, *ids, mark, 7]

    def ask(prompt: list[int], least: int) -> None:
        found, cached = drafts(on, prompt)
        kept, on.batch.prompt_cache = on.prompt_cache, PromptCache()
        on.forget()
        same(found, drafts(on, prompt)[0])
        on.forget()
        on.batch.prompt_cache = kept
        assert cached >= least

    on = made()
    first = system + question(*OTHER[:70])
    streams = [on.generate(first, params(70)), on.generate(system + question(11, 12), params(9))]
    answer, _ = [stream.run()[0].token_ids for stream in streams]
    assert streams[1].result.cached_tokens >= 148
    on.generate(OTHER[:200], params(9)).run()
    on.generate(OTHER[40:200], params(9)).run()  # so that both rows are taken
    if keep:
        on.prompt_cache.close()
        on = made()
    ask(system + question(13, 14, 15), 148)
    ask([*first, *answer, *question(3)], len(first) + 60 if on.prompt_cache.entries else 148)
    ask([*first, *answer[40:], *question(3)], 148)


@pytest.mark.parametrize(("kind", "window"), [("eagle1", 0), ("eagle3", WINDOW), ("mtp", WINDOW), ("block", WINDOW)])
def test_timing_steps_behind_a_long_text_leaves_no_trace(kind, window, monkeypatch):
    """Steps that are timed far behind a text and write over what it needs: in the target's cache, or where a ring has the
    last rows of the text; a length that stays changed; and one that nothing was timed behind."""
    monkeypatch.setattr(stepping, "FAR", 250)
    timed, real = [], Stepper._measure
    monkeypatch.setattr(Stepper, "_measure", lambda self, *how: timed.append(self.state.n.tolist()) or real(self, *how))
    on = engine(kind, window, 2)
    found, _ = drafts(on, TEXT[:60])
    assert [lengths[0] for lengths in timed] == [60, 250]
    assert on.timings[params(1).mode, 1].behind == 60 and int(on.state.n[0]) < 100
    monkeypatch.setattr(stepping, "FAR", 10_000)
    same(found, drafts(engine(kind, window), TEXT[:60])[0])


def test_times_follow_the_length_of_the_text():
    """A price that is measured behind nothing and used behind 6,000 tokens, and noise that is taken for growth."""
    times = Times((4.0, 6.0), 100).grown((8.0, 26.0), 4100)
    assert times.at(100) == pytest.approx((4, 6)) and times.at(4100) == pytest.approx((8, 26))
    assert times.at(2100) == pytest.approx((6, 16)) and times.at(8100) == pytest.approx((12, 46))
    again = times._replace(seconds=(5.0, 7.2), behind=1100)  # the same steps behind another text
    assert again.at(100) == pytest.approx((4, 7.2 * 6 / 11))
    for noise in ((4.05, 5.0), (3.0, 6.1)):
        assert Times((4.0, 6.0), 100).grown(noise, 4100).at(9000) == (4.0, 6.0)


def test_how_steps_grow_is_measured_once_for_a_machine_and_a_model(monkeypatch, empty_cache):
    """A measurement of a second at every start, or one that another model or other options take over."""
    monkeypatch.setattr(stepping, "FAR", 300)
    seen = []
    monkeypatch.setattr(
        Stepper, "_measure", lambda self, *_: seen.append(int(self.state.n[0])) or (1.0, 2.0 + seen[-1])
    )
    tunes = []
    for more in ({}, {}, {"tree": "chain:3"}):
        given = {"eagle": str(DEMO / "eagle1"), "tree": "chain:2", "device": "cpu", "kernels": "reference", "ctx": 512}
        on = load(DEMO, **given | more)
        on.generate([5, 6, 7], SamplingParams(max_new_tokens=3)).run()
        tunes.append((seen.copy(), on.timings[SamplingParams().mode, 1].at(1000)[1]))
        seen.clear()
    assert [lengths for lengths, _ in tunes] == [[3, 300], [3], [3, 300]]
    assert all(seconds == pytest.approx(1002) for _, seconds in tunes)


@pytest.mark.parametrize("kind", ("eagle1", "eagle3", "mtp", "ngrams", "block"))
def test_a_ring_drafts_what_a_whole_cache_with_a_window_drafts(kind, monkeypatch):
    """Rows of the ring that are overwritten too early, a window that is one token off, rows of a prompt's padding: in a
    text many times as long as the ring, alone and among others."""
    asked = [(TEXT[:5], params(260)), (TEXT[:290], params(20)), (OTHER[:33], params(40)), (OTHER[:257], params(40))]
    found = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(tree_drafters, "ring_slots", lambda window, scratch: 1 << 30)
        target, head = models(kind)
        tree = tables(TREES[kind], 3)
        made = {"block": BlockDrafter}.get(kind, EagleDrafter)(head, tree, 3, LONG + 60, DraftRule(window=WINDOW))
        assert made.window == WINDOW and (made.ring == 0) == patched
        made = WithNGrams(made, 3) if kind == "ngrams" else made
        on = Engine(target, None, made, EngineConfig(batch_size=3, lag=0))
        streams = [on.generate(prompt, settings) for prompt, settings in asked]
        observers = [Drafts(stream.result) for stream in streams]
        for observer in observers:
            on.add_observer(observer)
        texts = [stream.run()[0].token_ids for stream in streams]
        found.append(([observer.seen for observer in observers], texts))
    (rings, texts), (whole, others) = found
    assert texts == others
    for ours, theirs in zip(rings, whole, strict=True):
        same(ours, theirs)


def test_the_cache_of_a_head_with_a_window_does_not_grow_with_the_context():
    """A head whose cache takes half a gigabyte for a context of 131,072 tokens, or a plan that says so."""
    _, head = models("eagle3")
    tree = tables(trees.PAPER25)
    sizes = [EagleDrafter(head, tree, 1, n, DraftRule(window=256)).cache.nbytes for n in (1000, 131_072)]
    assert sizes[0] == sizes[1] < 100_000
    checkpoint = Checkpoint.open(DEMO)
    plans = []
    for window, ctx in itertools.product(("full", "256"), (512, 2048)):
        options = LoadOptions(eagle=str(DEMO / "eagle1"), draft_window=window, ctx=ctx, device="cpu", tree="paper25")
        plain = plan_memory(checkpoint, DraftFiles(), replace(options, eagle=None)).kv
        plans.append(
            plan_memory(checkpoint, DraftFiles(read_eagle(DEMO / "eagle1", checkpoint.config)), options).kv - plain
        )
    assert plans[0] < plans[1] and plans[2] == plans[3] < plans[1] / 3


def test_a_window_changes_drafts_and_no_token():
    """A window that is not applied at all, or that reaches the target."""
    target, _ = models("eagle1")
    plain = Engine(target).generate(TEXT[:200], params(60)).run()[0].token_ids
    seen = []
    for window in (0, WINDOW, 40):
        found, cached = drafts(engine("eagle1", window), TEXT[:200], 60)
        on = engine("eagle1", window)
        assert on.generate(TEXT[:200], params(60)).run()[0].token_ids == plain
        seen.append([tuple(tokens.tolist()) for tokens, *_ in found])
    assert len({tuple(each) for each in seen}) == 3


@needs_kernels
@pytest.mark.parametrize("tree", ("paper25", "dynamic:16,4,4"))
@pytest.mark.parametrize("head", ("eagle1", "eagle3"))
def test_the_cpu_kernels_draft_in_a_ring_what_they_draft_in_a_whole_cache(head, tree, monkeypatch):
    """A slot of the ring that the C++ code computes in another way than the one that wrote it, or another window: each
    part of a draft has its own code there, and drafts whole static trees in one call."""
    settings = SamplingParams(0.5, seed=3, max_new_tokens=120, stop_ids=(1 << 20,))
    ids = [random.Random(i // 2).randrange(3, 4000) for i in range(900)]
    found = []
    for slots in (tree_drafters.ring_slots, lambda window, scratch: 1 << 30):
        monkeypatch.setattr(tree_drafters, "ring_slots", slots)
        given = dict(eagle=str(DEMO / head), tree=tree, draft_window=48, eagle_always=True, slots=2, ctx=1200)
        on = load(DEMO, device="cpu", kernels="cpu", **given)
        assert (on.drafter.window, on.drafter.ring > 0) == (48, len(found) == 0)
        streams = [on.generate(ids[:length], settings) for length in (900, 5)]
        observers = [Drafts(stream.result) for stream in streams]
        for observer in observers:
            on.add_observer(observer)
        texts = [stream.run()[0].token_ids for stream in streams]
        found.append((texts, [step for observer in observers for step in observer.seen]))
    assert found[0][0] == found[1][0] and len(found[0][1]) == len(found[1][1]) > 40
    assert all(map(torch.equal, *(sum(steps, []) for _, steps in found)))
