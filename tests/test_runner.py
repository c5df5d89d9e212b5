"""runner.py and the engine around it: steps ahead of the host, CUDA graphs (on a stand-in), break-even, accidents."""

import copy
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda, tensors
from test_engine import HEADS, MODEL, PROMPTS, letters, make, plain, scripted, settings, steps_of
from tiny import CTX, PROMPT, TREES, ScriptedDrafter, eagle_drafter, fake_clock, tables, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from cli.steps import Gauge
from decoding.drafter import Drafter, StepParts
from decoding.step import HISTORY, RING, DecodeState, Observer, decode_step
from drafters.draft_model import DraftModelDrafter
from drafters.ngram import NGramDrafter, WithNGrams
from engine import runner as runner_module
from engine import stepping
from engine.batch import Batch
from engine.engine import Engine, EngineConfig
from engine.prefill import Prefill
from engine.request import Request
from engine.runner import WARM_UP, Pacer, Runner, capture_graph
from engine.stepping import LAG, Stepper

ERRORS = (KeyboardInterrupt, RuntimeError)


def ahead(kind: str, tree: str, lag: int, rows: int = 1) -> Engine:
    """A tiny engine that runs `lag` steps ahead of the host."""
    engine = make(kind, tree, rows, lag)
    engine.tokenizer = letters()
    return engine


def outcome(results):
    return [(r.token_ids, r.tokens_per_step, r.text, r.stop_reason) for r in results]


# ------------------------------------------------------------------ steps ahead of the host


@pytest.mark.parametrize("kind, tree, index", [
    ("", "", 2), ("eagle1", "paper25", 2), ("eagle3", "dynamic", 0), ("oracle", "chain4", 2),
])  # fmt: skip
def test_steps_ahead_change_nothing(kind, tree, index):
    """Catches steps that ran ahead, were thrown away and still count in steps or tau, are emitted after a stop
    string, or stay in a cache that the next turn reuses. Rows finish at different times, by strings, ids and length. An
    oracle's drafts are all accepted, so that two more long runs are there already when a string is found within one."""

    def engine(lag: int) -> Engine:
        if kind == "oracle":
            return scripted(tree, settings(index), 3, tokenizer=letters(), lag=lag)
        return ahead(kind, tree, lag, 3)

    text = letters().decode(plain(settings(index)))
    for stops in ((text[9:12],), (text[4:6], text[15:19])):
        params = settings(index, stop=stops, stop_ids=(plain(settings(index), 1)[6],))
        expected = outcome(engine(0).generate_batch(PROMPTS, params).run())
        for lag in (2,) if kind else (2, RING - 1):
            late = engine(lag)
            first = late.generate_batch(PROMPTS, params).run()
            assert outcome(first) == expected
            turns = [p + r.token_ids + [4, 8] for p, r in zip(PROMPTS, first, strict=True)]
            second = late.generate_batch(turns, params).run()
            assert outcome(second) == outcome(engine(0).generate_batch(turns, params).run())
            assert all(r.cached_tokens >= len(p) - 2 for r, p in zip(second, PROMPTS, strict=True))


class Watcher(Observer):
    """Keeps the tokens of row 0 of every step that it sees, and how many steps were unread then."""

    def __init__(self, engine: Engine):
        self.engine, self.emitted, self.unread = engine, [], []

    def step(self, output, results):
        self.emitted.append(output.emitted[0, : int(output.count[0])].tolist())
        self.unread.append(self.engine.runner.issued - self.engine.runner.taken)


def test_observers_attach_and_detach():
    """Catches an observer that replaces another one, that goes on watching after it was removed, that changes what is
    decoded, that is shown tensors of later steps, or after which no step runs ahead of the host any more."""
    engine = ahead("eagle1", "paper25", 2)
    one, two = Watcher(engine), Watcher(engine)
    expected = outcome(ahead("eagle1", "paper25", 2).generate(PROMPT, settings(2)).run())
    for watchers in ((one,), (one, two), (two,)):
        for watcher in watchers:
            engine.add_observer(watcher)
        found = engine.generate(PROMPT, settings(2)).run()
        assert outcome(found) == expected
        for watcher in watchers:
            engine.remove_observer(watcher)
    assert len(one.emitted) == len(two.emitted) == 2 * found[0].steps
    assert one.emitted == two.emitted and {*one.unread, *two.unread} == {0}
    assert sum(one.emitted[: found[0].steps], [])[: found[0].new_tokens - 1] == found[0].token_ids[1:]
    unread, real = [], engine.runner.read
    engine.runner.read = lambda: unread.append(engine.runner.issued - engine.runner.taken) or real()
    assert outcome(engine.generate(PROMPT, settings(2)).run()) == expected
    assert set(unread) == {1 + 2}
    assert len(one.emitted) == len(two.emitted) == 2 * found[0].steps
    with pytest.raises(ValueError):
        engine.remove_observer(one)


@pytest.mark.parametrize("at", (0, 1, 4))
def test_an_observer_comes_and_goes_within_a_request(at, monkeypatch):
    """Catches an observer that is added while steps are under way and then shown another step than the one that was
    read, or none. Catches seconds of decoding that jump when it comes or goes."""
    clock = fake_clock(monkeypatch)
    engine = ahead("eagle1", "paper25", 2)
    expected = outcome(ahead("eagle1", "paper25", 0).generate(PROMPT, settings(2)).run())
    stream, watcher, seconds = engine.generate(PROMPT, settings(2)), Watcher(engine), []
    with clock:
        for i, _ in enumerate(stream):
            if i == at:
                engine.add_observer(watcher)
            if at < i < at + 8:
                clock.now += 300  # the consumer's own time, which no step runs in
            if i == at + 8:
                engine.remove_observer(watcher)
            seconds.append(stream.result.decode_seconds)
    assert outcome(stream.results) == expected
    # two steps may have been under way already
    steps = stream.result.tokens_per_step
    late = next(k for k in range(3) if steps[at + k : at + k + len(watcher.emitted)] == watcher.emitted)
    assert len(watcher.emitted) == 8 - late and set(watcher.unread) == {0}
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 1


def test_the_ring_refuses_to_overwrite_unread_rows():
    """Catches a lag longer than the ring, with which rows are overwritten before the host has seen them."""
    runner = Runner(torch.zeros(3, 1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    for i in range(3):
        runner.launch("", lambda i=i: runner.ring[i].fill_(i))
    with pytest.raises(RuntimeError, match="3 steps are unread"):
        runner.launch("", lambda: None)
    assert [runner.read()[0][0] for _ in range(3)] == [0, 1, 2]


# ------------------------------------------------------------------ CUDA graphs, on a stand-in


def with_graphs(engine: Engine) -> Engine:
    """The engine as on a GPU with graphs. The `cuda` of its Runner is the only part that is replaced."""
    engine.runner = Runner(engine.state.ring, engine.state.step, FakeCuda(), capture=True)
    return engine


DRAFTERS = ("", "eagle1", "eagle3-dynamic", "eagle1-grams", "draft", "ngram")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_graphs_replay_what_eager_steps_compute(kind):
    """Catches a buffer that a step or a draft rebinds instead of writing it, and a number of the host
    (position, temperature, seed, stop id, row count) that is fixed in the graph. A replay would repeat the request in
    which it was captured. Requests with other prompts, batches and settings follow each other, and every kind of step is
    captured once for every number of rows, when it is first needed."""
    configs = [EngineConfig(batch_size=3, lag=lag) for lag in (2, 0)]
    engine, eager = (Engine(MODEL, letters(), drafter_of(kind, 3), config) for config in configs)
    with_graphs(engine)
    for number, index in enumerate((2, 1, 0, 7, 2, 3)):
        params = settings(index, seed=number, max_new_tokens=5 + number, stop_ids=(90 + number,))
        prompts = PROMPTS[: 3 - number % 3][:: 1 - 2 * (number % 2)]
        ours, theirs = (outcome(e.generate_batch(prompts, params).run()) for e in (engine, eager))
        assert ours == theirs
        captured = [entry for entry in engine.runner.cuda.log if entry[0] == "captured"]
        assert len(captured) == len(engine.runner.graphs)
        if kind in DRAFTERS[:3]:  # with the others the rows end at other times
            assert len(captured) == (1, 2, 3, 4, 4, 5)[number]
    assert {pool for _, pool in captured} == {engine.runner.pool}  # one memory pool for all graphs
    assert len({mode for _, _, mode, *_ in engine.runner.graphs}) == 4


def test_the_gauge_counts_graph_launches():
    """Catches a step that is split over several graphs, or left to single kernels, and reports one launch."""
    engine = with_graphs(ahead("eagle1", "paper25", 0))
    gauge = Gauge(engine)
    engine.runner.begin()
    assert gauge.launches() == "no graph: kernels are launched one by one"
    found = engine.generate(PROMPT, settings(0)).run()[0]
    assert engine.runner.replays == engine.runner.issued == found.steps
    assert gauge.launches() == "1 graph launch per step"
    engine.runner.replays *= 2
    assert gauge.launches() == "2 graph launches per step"
    with pytest.raises(ValueError, match="captured without marks; add an observer of phases before"):
        Gauge(engine)
    assert engine.observers == [gauge]


def test_graphs_are_captured_on_request():
    """Catches a first request that captures again after `warm_up`, settings of another kind that count as captured,
    and a request that differs after a warm-up, or around one, or loses its cached prefix, because a warm-up advances a
    sequence or writes over cached rows, those of the drafter included."""
    params, engine, eager = settings(2), with_graphs(ahead("eagle1", "paper25", 2)), ahead("eagle1", "paper25", 2)
    assert engine.warm_up(params) > 0 and len(engine.runner.graphs) == 1
    graphs = dict(engine.runner.graphs)
    for _ in range(2):
        first = engine.generate(PROMPT, params).run()
        assert outcome(first) == outcome(eager.generate(PROMPT, params).run())
    assert engine.runner.graphs == graphs
    text = PROMPT + first[0].token_ids
    for other in (settings(0), params):
        engine.warm_up(other)
    assert len(engine.runner.graphs) == 2
    again = engine.generate(text + [7], params).run()
    assert again[0].cached_tokens > len(PROMPT)
    assert outcome(again) == outcome(ahead("eagle1", "paper25", 0).generate(text + [7], params).run())
    stream = engine.generate(PROMPT, params)
    next(iter(stream))
    engine.warm_up(settings(1))
    assert stream.run()[0].token_ids == list(plain(params))


def test_steps_of_more_clients_are_captured_at_the_start():
    """Catches a client who comes while others decode, and for whom all of them wait until their step is captured, and a
    text that goes on with the times of other steps."""
    config = EngineConfig(batch_size=5, eagle_always=False)
    engine = with_graphs(Engine(MODEL, letters(), drafter_of("eagle1", 5), config))
    stream = engine.generate(PROMPT, settings(1))
    chunks = iter(stream)
    next(chunks), next(chunks)  # from the prompt, and from a step
    engine.warm_up(settings(1), requests=5)
    assert stream.run()[0].token_ids == list(plain(settings(1)))
    times = [engine.timings[settings(1).mode, rows].at(engine.behind) for rows in (1, 5)]
    assert engine.step_seconds == times[0] != times[1]
    graphs = dict(engine.runner.graphs)
    assert sorted(rows for *_, rows, _ in graphs) == [1, 1, 2, 2, 4, 4, 5, 5]  # plain steps, too
    for clients in range(1, 6):
        results = engine.generate_batch((PROMPTS * 2)[:clients], settings(1)).run()
        for b, result in enumerate(results[:3]):
            assert tuple(result.token_ids) == plain(settings(1), b)
    assert engine.runner.graphs == graphs


def test_capture_order_and_waits():
    """Catches a warm-up on another stream than the capture's, a capture that does not wait for the stream before it,
    and a read that waits for more than its own step. The GPU would then idle while the host works."""
    engine = with_graphs(ahead("eagle1", "paper25", 2))
    log = engine.runner.cuda.log
    result = engine.generate(PROMPT, settings(2)).run()[0]
    mode = "thread_local"  # other threads of the process may use CUDA during a capture
    assert log[:5] == [
        ("wait_stream", "side", "main"),
        ("enter", "side"),
        ("wait_stream", "main", "side"),
        ("capture", engine.runner.pool, "side", mode),
        ("captured", engine.runner.pool),
    ]
    assert engine.runner.cuda.current.name == "main"
    kinds = [entry[0] for entry in log[5:]]
    replays, waits = kinds.count("replay"), [entry[1] for entry in log if entry[0] == "wait"]
    assert waits == [i % RING for i in range(result.steps)]
    assert replays == result.steps + LAG  # the last ones are thrown away and not counted
    for i in range(result.steps):
        at = [k for k, entry in enumerate(kinds) if entry == "wait"][i]
        assert kinds[:at].count("replay") == i + 1 + LAG  # the host waits only for the step two replays back
    assert all(k == "record" for j, k in enumerate(kinds[1:]) if kinds[j] == "replay")


class Writes(TorchDispatchMode):
    """Collects the memory that operators write in place, except what was allocated meanwhile."""

    def __init__(self):
        super().__init__()
        self.seen, self.written = {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tensors(args, kwargs)}
        out = function(*args, **(kwargs or {}))
        for tensor in tensors(out):  # kept alive, so that no address is used twice
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in given:
                self.seen[memory.data_ptr()] = memory
        names = [argument.name for argument in function._schema.arguments if argument.is_write]
        by_name = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | (kwargs or {})
        self.written |= addresses(by_name[name] for name in names if name in by_name) - self.seen.keys()
        return out


def addresses(buffers) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in buffers}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_buffers_name_all_that_a_step_writes(kind):
    """Catches a tensor that a step writes and `buffers` or `caches` leave out. --compile-mode reduce-overhead would
    capture no step then, because its graphs must know the addresses of all that they write. Catches a name too many as
    well."""
    engine = Engine(MODEL, drafter=drafter_of(kind, 2), config=EngineConfig(batch_size=2, eagle_always=False))
    engine._measure = lambda *_: (1.0, 1.0)
    params = settings(7, max_new_tokens=5)
    engine.generate_batch(PROMPTS[:2], params).run()
    with torch.inference_mode(), Writes() as writes:
        engine._step_call(engine.drafter, params.mode, engine.view(2))[1]()
    own = engine.drafter.caches
    assert addresses(own) <= writes.written <= addresses([*engine.state.buffers(), *own])
    assert len(addresses(own)) == (kind not in ("", "ngram"))
    assert len(writes.written) > 10


def test_a_rebound_buffer_is_caught():
    """Shows that the comparison of graphs with eager steps can fail."""

    def rebinding(model, drafter, state, mode, **named):
        out = decode_step(model, drafter, state, mode, **named)
        state.root = state.root.clone()
        return out

    engine, eager = with_graphs(ahead("eagle1", "paper25", 2)), ahead("eagle1", "paper25", 0)
    engine._step = rebinding
    with pytest.raises(AssertionError):
        for prompt in (PROMPT, PROMPT[:5]):  # the graph is captured in the first request
            assert steps_of(engine, prompt, settings(2)) == steps_of(eager, prompt, settings(2))


@pytest.mark.parametrize("when", (0, WARM_UP))
def test_a_failed_capture_says_so_and_leaves_the_engine_usable(when):
    """Catches unclear errors, wrong streams and wrong tokens after an operator that cannot be captured or memory that
    ends in the warm-up. The error is one line, and from then on steps run without graphs. Ctrl-C is no reason to give
    up graphs."""
    engine = with_graphs(ahead("eagle1", "paper25", 2))
    real, calls = engine._step, []

    def failing(error):
        def step(*args, **named):
            calls.append(1)
            if len(calls) == when + 1:
                raise error
            return real(*args, **named)

        calls.clear()
        return step

    engine._step = failing(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.warm_up(settings(0))
    assert not engine.runner.graphs and engine.runner.cuda.current.name == "main"
    log = engine.runner.cuda.log
    assert log.index(("wait_stream", "main", "side")) > log.index(("enter", "side"))
    engine._step = real
    assert steps_of(engine, PROMPT, settings(0)) == steps_of(ahead("eagle1", "paper25", 0), PROMPT, settings(0))
    assert engine.runner.graphs.pop(next(iter(engine.runner.graphs)))
    engine._step = failing(torch.OutOfMemoryError("CUDA out of memory"))
    stream = engine.generate(PROMPT, settings(2))
    with pytest.raises(RuntimeError, match="could not be captured.*OutOfMemoryError.*one kernel at a time"):
        stream.run()
    assert stream.result.stop_reason == "interrupted" and engine.runner.cuda.current.name == "main"
    assert steps_of(engine, PROMPT, settings(2)) == steps_of(ahead("eagle1", "paper25", 0), PROMPT, settings(2))
    assert not engine.runner.graphs


# ------------------------------------------------------------------ accidents

# Where a request can be cut short. Every one of these methods is made to fail with every kind of error.
POINTS = {
    DecodeState: "__init__",
    Engine: "first_runs _capture _measure launch",
    Prefill: "read catch_up",
    Request: "begin take cached",
    Batch: "_admit _arrange _launch _end",
    Runner: "begin launch read",
    Pacer: "take",
}
INJECTION_POINTS = [(owner, name) for owner, names in POINTS.items() for name in names.split()]


def pace(monkeypatch, **settings: int) -> None:
    for name, value in settings.items():
        monkeypatch.setattr(Pacer, name, value)


def accident_engine(graphs: bool) -> Engine:
    """It gives up speculation after two steps and takes it up again after four tokens."""
    config = EngineConfig(batch_size=2, lag=2, eagle_always=False)
    engine = Engine(MODEL, letters(), drafter_of("eagle1-chain", 2), config)
    engine._measure = lambda *_: (1.0, 50.0)
    return with_graphs(engine) if graphs else engine


def texts(engine: Engine, rows: int):
    params = settings(2, stop=(letters().decode(plain(settings(2)))[-9:-5],))
    return [(r.token_ids, r.text, r.stop_reason) for r in engine.generate_batch(PROMPTS[:rows], params).run()]


@functools.cache
def fresh_texts(rows: int):
    return texts(ahead("eagle1", "chain4", 0, 2), rows)


@pytest.mark.parametrize("after", (False, True), ids=("before", "after"))
@pytest.mark.parametrize("owner, point", INJECTION_POINTS, ids=[f"{o.__name__}.{p}" for o, p in INJECTION_POINTS])
def test_the_engine_survives_every_injection_point(owner, point, after, monkeypatch):
    """After an error at any place where a request can be cut short, later requests have the texts of a fresh engine.

    Catches what Ctrl-C, a bug or a lack of memory leaves behind. A point that no request reaches fails here, because its
    error is not raised. After the work of a place only Ctrl-C is tried.
    """
    pace(monkeypatch, LOSS=90, PLAIN=4, TRY=90)
    monkeypatch.setattr(runner_module, "capture_graph", functools.partial(capture_graph, warm_up=1))
    real, graphs = getattr(owner, point), point in ("_capture", "launch")
    engine = accident_engine(graphs)
    for error in ERRORS[:1] if after else ERRORS:

        def failing(self, *args, error=error, **kwargs):
            if after:
                real(self, *args, **kwargs)
            raise error(f"planted in {point}")

        engine.generate(PROMPTS[1], settings(2, max_new_tokens=3)).run()  # something to reuse wrongly
        if point in ("_capture", "_measure"):  # these run once for each kind of step
            vars(engine).pop(point, None)
            engine.timings.clear()
            engine._ready.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, point, failing)
            with pytest.raises(error, match=f"planted in {point}"):
                texts(accident_engine(graphs) if owner is DecodeState else engine, 2)
        if owner is DecodeState:
            engine = accident_engine(graphs)
        for rows in (2,) if after else (1, 2):
            assert texts(engine, rows) == fresh_texts(rows)


def test_rows_of_a_request_that_was_cut_short_stand_still():
    """Catches rows that go on after their request was cut short, in the warm-up or in the steps of the next request. They
    could run past the end of the cache."""
    engine = accident_engine(graphs=True)
    stream = engine.generate_batch(PROMPTS[:2], settings(2))
    for _, _ in zip(stream, range(4), strict=False):
        pass
    stream.close()
    assert engine.state.done.all()
    reached = engine.state.n.clone()
    engine.warm_up(settings(0))
    assert engine.state.done.all() and torch.equal(engine.state.n, reached)
    engine.generate_batch(PROMPTS[:1], settings(2, max_new_tokens=6)).run()
    assert engine.state.n[1] == reached[1]


class Interrupt(TorchDispatchMode):
    """Ctrl-C after the k-th operator that writes in place."""

    def __init__(self, k: int):
        super().__init__()
        self.left = k

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.left -= function._schema.is_mutable
        if self.left == 0:
            raise KeyboardInterrupt
        return out


def test_an_interrupt_between_any_two_writes():
    """Catches positions and counts that contradict each other after a step was cut in two, in a row that the next
    request does not use. With n < count it would feed draft row -1."""
    engine, fresh = ahead("eagle1", "chain4", 0, 3), ahead("eagle1", "chain4", 0, 3)
    expected = outcome(fresh.generate_batch(PROMPTS[:1], settings(2, max_new_tokens=6)).run())
    short, hot, k = [[1], [2, 3], [4]], settings(2, temperature=4.0, seed=8, max_new_tokens=9), 0
    real, fired = engine._step, True
    while fired:
        fired, k = False, k + 1

        def step(*args, k=k, **named):
            with Interrupt(k):
                return real(*args, **named)

        engine._step = step
        try:
            engine.generate_batch(short, hot).run()
        except KeyboardInterrupt:
            fired = True
        engine._step = real
        assert bool((engine.state.n >= engine.state.count).all())
        if k % 9 == 0:
            assert outcome(engine.generate_batch(PROMPTS[:1], settings(2, max_new_tokens=6)).run()) == expected
    assert k > 40


# ------------------------------------------------------------------ never slower


def stays(pacer: Pacer, steps: int, speculative: bool, counts: list[int], seconds: float = 1.0) -> bool:
    """Whether the pacer is of the same mind after each of so many equal steps."""
    before = pacer.speculating
    for _ in range(steps):
        pacer.take(speculative, counts, seconds)
        if pacer.speculating != before:
            return False
    return True


def test_pacer_gives_up_after_a_loss_and_tries_again():
    """Catches a request that stays slow because the decision is made never or only once, and one that flickers
    because of one bad step."""
    pacer = Pacer(2.0)
    assert stays(pacer, 4, True, [1]) and not stays(pacer, 1, True, [1])  # each loses one plain step
    assert stays(pacer, 1, True, [5])  # this step was under way, so it belongs to no phase
    assert stays(pacer, 63, False, [1, 1]) and not stays(pacer, 1, False, [1])
    for count in (1, 3, 1, 1):  # a try may lose less, and what it wins in between counts
        assert stays(pacer, 1, False, [1]) and stays(pacer, 1, True, [count])
    assert not stays(pacer, 1, True, [1])
    assert stays(pacer, 127, False, [1]) and not stays(pacer, 1, False, [1])  # the next try waits twice as long
    assert all(stays(pacer, 1, True, [3 if i % 16 < 12 else 1]) for i in range(200))
    pacer = pacer.for_another_text()
    assert stays(pacer, 24, True, [1]) and not stays(pacer, 1, True, [1])  # of 200 good steps no more is saved up
    assert pacer.pause == 64


def timed_steps(monkeypatch, took, *costs: float, patience: float) -> tuple[tuple[float, ...], int]:
    """What `_time_steps` finds if launch number i of a step that costs c takes took(i, c) seconds; the launches."""
    clock, count = [0.0], itertools.count()

    def launch(cost: float, *_: object) -> None:
        clock[0] += took(next(count), cost)

    monkeypatch.setattr(stepping.time, "perf_counter", lambda: clock[0])
    runner = SimpleNamespace(begin=lambda: None, read=lambda: None)
    stepper = SimpleNamespace(runner=runner, lag=0, launch=launch, patience=patience)
    return Stepper._time_steps(stepper, None, None, *costs), next(count)


def test_other_programs_do_not_change_the_price_of_a_node(monkeypatch):
    """A node that seems to cost nothing as long as the engine lives, because other programs slowed down two steps."""
    slow = (9.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 3.0)  # the machine in each turn, which is two launches
    found, _ = timed_steps(
        monkeypatch, lambda i, cost: cost * slow[i // 2] + 5 * (i in (2, 4)), 1.0, 1.4, patience=math.inf
    )
    assert found == pytest.approx((2.0, 2.8))


@pytest.mark.parametrize(("plain", "turns"), [(0.001, 8), (0.2, 4)])
def test_long_steps_are_timed_fewer_times(plain, turns, monkeypatch):
    """A start that takes twice as long with a large model, whose long steps other programs disturb less."""
    costs = plain, 2 * plain
    found, launches = timed_steps(monkeypatch, lambda _, cost: cost, *costs, patience=Stepper.patience)
    assert found == pytest.approx(costs) and launches == 2 * turns


def test_pacer_takes_no_hiccup_for_the_price_of_a_step():
    """Where the times of the steps say what they cost, one step that waited for other programs ends nothing, and dearer
    steps do."""
    pacer = timed_pacer()
    assert all(stays(pacer, 1, True, [2], 0.090 if i % 20 == 7 else 0.0015) for i in range(60))
    assert not stays(pacer, 60, True, [2], 0.0025)


def timed_pacer() -> Pacer:
    """One that goes by the times of the steps, and knows that a plain one takes a millisecond."""
    pacer = Pacer(0.0, plain_seconds=0.001)
    pacer.since = 0.0
    return pacer


def test_pacer_follows_a_machine_whose_speed_changes():
    """Plain steps that were timed while the machine was faster or slower than it is: drafting that wins is given up, or
    one that loses goes on for ever. And looking at that again and again, at a cost."""
    for now in (0.5, 1.0, 2.0):  # what a plain step takes, in milliseconds; a drafted one takes 1.5 times as long
        for count, wins in ((2, True), (1.2, False)):
            pacer, speculating, plain = timed_pacer(), [], 0
            for _ in range(2):  # texts
                pacer = pacer.for_another_text(60.0)
                for _ in range(400):
                    speculating.append(pacer.speculating)
                    if pacer.speculating:
                        pacer.take(True, [count], 0.0015 * now)
                    else:
                        pacer.take(False, [1], (0.0012 if plain % pacer.CHECK < 11 else 0.001) * now)
                        plain += 1
            drafted = sum(speculating) / len(speculating)
            assert drafted > 0.95 if wins else drafted < 0.15, (now, count, drafted)
    pacer = timed_pacer().for_another_text(60.0)
    for _ in range(3):
        pacer.take(False, [1], 0.009)
    other = copy.copy(pacer)  # that of more rows begins as one
    for _ in range(pacer.CHECK - 3):
        pacer.take(False, [1], 0.009)
        other.take(False, [1], 0.001)
    assert (pacer.drift, other.drift) == (pytest.approx(9.0), pytest.approx(1.0))
    pacer = timed_pacer()
    looks = 0
    for _ in range(8000):
        looks += not pacer.speculating
        pacer.take(pacer.speculating, [2], 0.0015 if pacer.speculating else 0.001)
    assert looks == 3 * pacer.CHECK  # in twelve seconds


def test_a_pause_goes_on_in_the_next_text():
    """A try at the beginning of each short answer, which costs more than such an answer may lose; a pause that no text
    ends; and one that begins although drafting paid."""
    pacer = timed_pacer()
    assert not stays(pacer, 9, True, [1], 0.002)
    assert stays(pacer, 40, False, [1], 0.001)
    pacer = pacer.for_another_text(1.0)
    assert not pacer.speculating and stays(pacer, 23, False, [1], 0.001) and not stays(pacer, 1, False, [1], 0.001)
    pacer = pacer.for_another_text(1.0)  # in the middle of a try
    assert stays(pacer, 1, True, [1], 0.002) and not stays(pacer, 2, True, [1], 0.002)
    assert stays(pacer, 127, False, [1], 0.001) and not stays(pacer, 1, False, [1], 0.001)
    assert stays(pacer, 30, True, [3], 0.001)
    pacer = pacer.for_another_text(1.0)
    assert pacer.speculating and not pacer.trying and pacer.pause == pacer.PLAIN


@pytest.mark.parametrize("rows, steps", [(1, 5), (2, 4), (8, 2), (16, 2)])
def test_many_sequences_tell_soon_whether_drafting_pays(rows, steps):
    """Sixteen steps of a tree in eight sequences cost as much as a hundred plain ones: tries that slow everybody down."""
    pacer = timed_pacer()
    assert stays(pacer, steps - 1, True, [2] * rows, 0.003) and not stays(pacer, 1, True, [2] * rows, 0.003)


class Turning(ScriptedDrafter):
    """Always wrong up to a position and always right from there on. Exchange the shifts for the opposite."""

    turn, shifts = 60, (1, 0)

    def draft(self, inputs):
        before, after = (self.with_shift(inputs, s) for s in self.shifts)
        early = (inputs.n < self.turn)[:, None]
        return before._replace(tokens=torch.where(early, before.tokens, after.tokens))

    def with_shift(self, inputs, shift):
        self.shift = shift
        return super().draft(inputs)


@pytest.mark.parametrize("shifts, lag", [((1, 0), 2), ((0, 1), 0)])
def test_plain_steps_while_speculation_does_not_pay(shifts, lag):
    """Catches a hopeless drafter that goes on slowing a request, and one that became good and stays unused. The
    tokens are always those of plain decoding, and the counts fit."""
    params = settings(2, max_new_tokens=130)
    expected = plain(params)
    truth = PROMPT + list(plain(settings(2, max_new_tokens=140)))
    drafter = Turning(TREES["chain4"], [truth])
    drafter.shifts = shifts
    engine = Engine(MODEL, drafter=drafter, config=EngineConfig(lag=lag, eagle_always=False))
    engine._measure = lambda *_: (1.0, 2.0)
    result = engine.generate(PROMPT, params).run()[0]
    assert engine.break_even_tau == 2.0
    assert tuple(result.token_ids) == expected
    sizes = [len(step) for step in result.tokens_per_step]
    assert result.new_tokens == 1 + sum(sizes) and result.drafted != sizes
    assert result.tau == (sum(sizes) - result.plain_tokens) / (len(sizes) - result.plain_tokens)
    if shifts == (1, 0):  # wrong for 5 steps, plain for 64, then right
        assert sizes[:69] == [1] * 69 and result.plain_tokens == 64 + lag
        assert set(sizes[69 + 2 * lag : -1]) == {5}
    else:  # right, then wrong, which is noticed
        assert sizes[:8] == [5] * 8 and result.plain_tokens >= 40 and set(sizes[30:]) == {1}
    again = engine.generate(PROMPT, params).run()[0]  # where it paid at the end, it may lose what it has won
    assert (len(again.drafted) > len(result.drafted)) == (shifts == (1, 0))


def drafter_of(kind: str, batch_size: int) -> Drafter | None:
    tree = next((t for name, t in TREES.items() if name.removesuffix("4") in kind), TREES["paper25"])
    if not kind:
        return None
    if kind == "ngram":
        return NGramDrafter(MODEL, 8, 4)
    if kind == "draft":
        built = tables(tree, batch_size)
        return DraftModelDrafter(MODEL, tiny_model(seed=5, layers=1), built, batch_size, CTX + built.N + 1)
    eagle = eagle_drafter(HEADS[kind.split("-")[0]], tree, batch_size)
    return WithNGrams(eagle, 4) if "grams" in kind else eagle


@pytest.mark.parametrize(
    "kind, lag", [("eagle1", 2), ("eagle3-dynamic", 2), ("eagle1-grams", 0), ("draft", 2), ("ngram", 0)]
)
def test_a_drafter_catches_up_after_plain_steps(kind, lag, monkeypatch):
    """Catches draft rows of plainly decoded tokens that are missing, shifted by one or made from other features.
    Acceptance would be lost silently. Tokens and all later draft rows must be those of an engine that never stopped,
    also in the next turn."""
    pace(monkeypatch, LOSS=250, PLAIN=37, LONGEST=37, TRY=250)  # 37: more than one chunk of catching up
    params = settings(2, max_new_tokens=90)
    always = Engine(MODEL, drafter=drafter_of(kind, 2), config=EngineConfig(batch_size=2))
    engine = Engine(MODEL, drafter=drafter_of(kind, 2), config=EngineConfig(batch_size=2, lag=lag, eagle_always=False))
    engine._measure = lambda *_: (1.0, 99.0)
    prompts = [PROMPT, PROMPT[:5]]
    caught, real = [], engine.prefill.catch_up
    monkeypatch.setattr(engine.prefill, "catch_up", lambda *args: caught.append(args) or real(*args))
    ours, theirs = (e.generate_batch(prompts, params).run() for e in (engine, always))
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert all(r.plain_tokens > 40 for r in ours) and {row for row, *_ in caught} == {0, 1}
    spans = [end - start for _, start, end in caught]  # short where a row goes on alone
    assert max(spans) <= HISTORY and sum(span > 30 for span in spans) >= 2
    places = [{tuple(text.ids): b for b, text in enumerate(e.batch.texts)} for e in (engine, always)]
    for ids, b in places[0].items():
        a = places[1][ids]
        end = max(end for _, _, end in caught)
        cache = getattr(getattr(engine.drafter, "drafter", engine.drafter), "cache", None)
        if cache is not None:
            other = getattr(always.drafter, "drafter", always.drafter).cache
            rows = min(end, engine.batch.texts[b].drafted, always.batch.texts[a].drafted)
            assert rows > 40
            torch.testing.assert_close(cache[..., b, :, :rows, :], other[..., a, :, :rows, :])
    turns = [p + r.token_ids + [7] for p, r in zip(prompts, ours, strict=True)]
    engine.timings = dict.fromkeys(engine.timings, runner_module.Times((1.0, 0.0)))
    engine.batch._pacers.clear()
    short = settings(2, max_new_tokens=9)
    assert outcome(engine.generate_batch(turns, short).run()) == outcome(always.generate_batch(turns, short).run())


def test_the_first_request_measures_both_steps(monkeypatch):
    """Catches a break-even that is guessed, measured again in every request, or measured on steps that leave traces."""
    clock = fake_clock(monkeypatch)
    engine = Engine(MODEL, drafter=drafter_of("eagle1", 1), config=EngineConfig(eagle_always=False))
    assert engine.step_seconds is None and engine.break_even_tau == 0
    params = settings(2, max_new_tokens=12)
    with clock:
        assert tuple(engine.generate(PROMPT, params).run()[0].token_ids) == plain(params)
        plain_step, speculative = engine.step_seconds
        # five draft levels are more operators than none
        assert engine.break_even_tau == speculative / plain_step > 1
        engine.generate(PROMPT, settings(0, max_new_tokens=5)).run()  # another kind of step takes another time
        assert len(engine.timings) == 2 and engine.step_seconds != (plain_step, speculative)
        engine.generate(PROMPT, params).run()
        assert len(engine.timings) == 2 and engine.step_seconds == (plain_step, speculative)


@pytest.mark.parametrize("lag, graphs", [(0, False), (2, True)])
def test_captures_and_first_runs_do_not_count_as_steps(lag, graphs, monkeypatch):
    """Catches a break-even that holds the seconds of a capture or of a compilation, so that speculation would be given up
    without reason, or never; and compilation that counts as decoding."""
    clock, times = fake_clock(monkeypatch), []
    monkeypatch.setattr(stepping, "compiled_blocks", StepParts)  # which compiles nothing
    for slow in (0, 300):
        config = EngineConfig(compile=True, lag=lag, eagle_always=False)
        engine = Engine(MODEL, drafter=drafter_of("eagle1-chain", 1), config=config)
        if graphs:
            with_graphs(engine)
        owner, name = (engine.runner, "capture") if graphs else (engine, "launch")
        real, seen = getattr(owner, name), set()

        def first(key, *rest, real=real, seen=seen, slow=slow):
            clock.now += slow * (key not in seen)
            seen.add(key)
            return real(key, *rest)

        setattr(owner, name, first)
        with clock:
            results = [engine.generate(PROMPT, settings(2, max_new_tokens=4)).run()[0] for _ in range(2)]
        assert len(seen) == 2 and engine.compile_seconds == pytest.approx(2 * slow, abs=1)
        assert 0 < results[0].decode_seconds < 1 and results[0].token_ids == results[1].token_ids
        times.append(engine.step_seconds)
    assert times[0] == pytest.approx(times[1])


def test_what_cannot_catch_up_says_so():
    """Catches plain steps between those of a rule whose tokens depend on the drafter (multi-round)."""
    multi = eagle_drafter(HEADS["eagle1"], TREES["chain4"], multi_round="without")
    engine, other = (
        Engine(MODEL, drafter=drafter, config=EngineConfig(eagle_always=False))
        for drafter in (multi, drafter_of("ngram", 1))
    )
    assert engine.fallback is None and other.fallback is not None
    engine.generate(PROMPT, settings(2, max_new_tokens=4)).run()
    assert engine.step_seconds is None


@pytest.mark.parametrize("mode", ("blocks", "reduce-overhead"))
def test_compiled_steps_decode_the_same_and_switch_without_compiling_anew(mode, monkeypatch):
    """Catches a switch between drafting and plain steps that compiles anew in the middle of a request; and a mode that
    compiles the step in one piece and leaves out a function, breaks its graph, or does not mark the buffers whose
    addresses stay."""
    torch._dynamo.reset()
    pace(monkeypatch, LOSS=150, PLAIN=5, TRY=150)
    real, calls = torch.compile, []

    def compile(function, **how):
        calls.append(how)
        return real(function, fullgraph=how["fullgraph"], dynamic=how["dynamic"], backend="eager")

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(Engine, "_measure", lambda *_: (1.0, 99.0))
    config = EngineConfig(lag=2, eagle_always=False, compile=True, compile_mode=mode)
    engine = Engine(MODEL, drafter=drafter_of("eagle1-chain", 1), config=config)
    assert all(how["fullgraph"] and not how["dynamic"] for how in calls)
    if mode == "reduce-overhead":
        assert [how.get("mode") for how in calls] == [None, mode, mode], "prefill, step, plain step"
        buffers = [*engine.state.buffers(), engine.drafter.cache]
        assert all(hasattr(buffer, "_dynamo_static_input_type") for buffer in buffers)
    for seed, prompt in ((9, PROMPT), (3, PROMPT * 3), (4, PROMPT[:3])):
        params = settings(2, seed=seed, max_new_tokens=40)
        with torch.compiler.set_stance("fail_on_recompile" if seed == 4 else "default"):
            result = engine.generate(prompt, params).run()[0]
        assert result.token_ids == Engine(MODEL).generate(prompt, params).run()[0].token_ids
        assert result.plain_tokens > 10
