"""Running steps: compiled, captured as a graph, a few ahead of the host, timed, and shown to those who watch."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import Any, NamedTuple

import torch

import kernels
from decoding.drafter import UNCOMPILED, Draft, Drafter, PlainDrafter
from decoding.params import SamplingMode, SamplingParams
from decoding.step import DecodeState, Observer, StepOutput, decode_step, draft_phase, marker, verify_phase
from engine.fused import compiled_blocks, fused_parts
from engine.grammar import Constraint, constrain
from engine.prefill import CHUNKS, Prefill
from engine.runner import Runner, Times
from loading.drafting import DraftHead
from loading.memory import MemoryPlan
from loading.options import COMPILE_MODES, LoadOptions
from model import Transformer
from support import cache
from support.machine import describe_device

FAR = 4096  # tokens of a text behind which steps are timed, to learn how they grow
MANY = 12  # nodes, besides those that cost little, whose price is measured
TURNS = 8, 4  # in which each kind of step is timed, and how many do where they take long; the first one does not count
LAG = 2  # steps that run ahead of the host on a GPU
# Of options.KV_CACHES; the others are the model's.
KV_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
# A step, or a half of one: the key of its graph, and a function without arguments.
Call = tuple[tuple, Callable[[], Any]]


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, and what `engine.load.load` knows of it.

    Args:
        batch_size: rows, which is how many sequences are decoded together.
        ctx: tokens of prompt and output that fit; default: all positions of the model.
        compile, compile_mode: one of options.COMPILE_MODES.
        backend: the kernels; default: Triton on a GPU, the reference on a CPU.
        lag: steps that may run ahead of the host; default: 2 on a GPU, 0 on a CPU. Observers see every step, so with one
            attached nothing runs ahead.
        eagle_always: False: measure at the first request whether speculation pays, and decode plainly while it does not.
            The tokens are the same up to the rounding of forwards of other widths.
        kv_dtype: of the target's cache: None for the model's, torch.int8, or with the CPU kernels torch.float16 or
            torch.bfloat16.
        pool: tokens that the target's cache has room for, of all rows together; default: ctx for each.
        chunk: the most tokens of a prompt that one forward reads.
        options, plan, head, generation: what `engine.load.load` decided, planned and read (generation is the model's
            generation_config.json). The engine only keeps them, for reports and command lines.
    """

    batch_size: int = 1
    ctx: int | None = None
    compile: bool = False
    compile_mode: str = "graph"
    backend: kernels.KernelBackend | None = None
    lag: int | None = None
    eagle_always: bool = True
    kv_dtype: torch.dtype | None = None
    pool: int | None = None
    chunk: int = CHUNKS[-1]
    options: LoadOptions | None = None
    plan: MemoryPlan | None = None
    head: DraftHead | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: LoadOptions, backend: kernels.KernelBackend, head: DraftHead | None = None) -> EngineConfig:
        """The configuration that resolved options ask for."""
        return cls(
            options.slots, options.ctx, options.compile, options.compile_mode, backend,
            eagle_always=options.eagle_always, kv_dtype=KV_DTYPES.get(options.kv), pool=options.pool,
            options=options, head=head,
        )  # fmt: skip


class View(NamedTuple):
    """The first rows of an engine: their buffers, and what drafts for them. Steps run on one of these."""

    rows: int
    state: DecodeState
    drafter: Drafter


class Stepper:
    """The lower half of an engine: runs steps on its buffers, compiled or captured, and times and shows them."""

    patience = 0.5  # seconds for the timing of steps; other programs disturb long steps less

    def __init__(self, model: Transformer, drafter: Drafter, config: EngineConfig):
        """Allocate the buffers. Raises ValueError in one line for values that are out of range."""
        self.model = model
        self.drafter = drafter
        self.config = config
        on_gpu = model.device.type == "cuda"
        self.batch_size = config.batch_size
        self.ctx = config.ctx or model.config.max_positions
        self.pool_tokens = config.pool or self.batch_size * self.ctx  # room of the target's cache
        self.backend = config.backend or kernels.KernelBackend("auto", model.device.type)
        self.lag = (LAG if on_gpu else 0) if config.lag is None else config.lag
        self._check_config()
        # plain steps may not replace those of multi-round verification, because there the tokens depend on the drafter
        always = drafter.multi_round or config.eagle_always or drafter.D == 0
        self.fallback = None if always else PlainDrafter(model, features_of=drafter)
        history = self.fallback is not None
        self.state = DecodeState(model, drafter, self.batch_size, self.ctx, history, config.kv_dtype, config.pool)
        self._views = {self.batch_size: View(self.batch_size, self.state, drafter)}
        self.compiled = ""  # what torch.compile makes: nothing, the "blocks" of the model, or the whole "step"
        if config.compile and not (on_gpu and config.compile_mode == "graph"):
            self.compiled = "step" if config.compile_mode == "reduce-overhead" else "blocks"
        captured = config.compile and on_gpu and self.compiled != "step"
        self.runner = Runner(self.state.ring, self.state.step, torch.cuda if on_gpu else None, captured)
        self._compile()
        # of a plain and of a speculative step, by the settings and the number of rows
        self.timings: dict[tuple[SamplingMode, int], Times] = {}
        self._times: Times | None = None  # those of the present steps
        self.behind = 0  # tokens of the longest text under way
        # of a plain step and one that checks `Drafter.priced_nodes` more nodes, by the number of rows
        self.prices: dict[int, Times] = {}
        self._ready: set[tuple[SamplingMode, int]] = set()  # settings and numbers of rows whose first runs are done
        self.compile_seconds = 0.0  # time spent on their first runs
        self.observers: list[Observer] = []

    def _check_config(self) -> None:
        longest = self.model.config.max_positions
        if not 2 <= self.ctx <= longest:
            raise ValueError(f"ctx is {self.ctx}; allowed: 2 to {longest} (the model's max_position_embeddings).")
        mode = self.config.compile_mode
        if mode not in COMPILE_MODES:
            raise ValueError(f"compile_mode is {mode!r:.40}; allowed: {', '.join(COMPILE_MODES)}.")

    def _compile(self) -> None:
        """Set up the functions that steps and prefill run. Nothing is compiled before their first call."""
        self.parts = compiled_blocks() if self.compiled == "blocks" else UNCOMPILED
        self._step = self._plain_step = decode_step
        layers = None
        if self.backend.mode == "cpu":
            self.parts = fused_parts()
            layers = self.parts.layers
        self.prefill = Prefill(self.model, self.drafter, self.state, layers, self.compiled == "step", self.config.chunk)
        if self.compiled != "step":
            return
        # Inductor captures no step that writes a buffer whose address may change
        _mark_static([*self.state.buffers(), *self.drafter.caches])
        compile = partial(torch.compile, fullgraph=True, dynamic=False, mode="reduce-overhead")
        self._step = compile(decode_step)
        # torch limits recompilations per code object, so the plain step gets a code object of its own
        self._plain_step = compile(lambda *args, **named: decode_step(*args, **named))

    def view(self, rows: int) -> View:
        """The first rows. A GPU and compiled steps have views of 1, 2, 4, 8, ... rows, a CPU has one of each number."""
        if self.runner.capturing or self.model.device.type == "cuda" or self.config.compile:
            rows = self._rounded(rows)
        if rows not in self._views:
            view = View(rows, self.state.first(rows), self.drafter.first(rows))
            if self.compiled == "step":
                _mark_static([*view.state.buffers(), *view.drafter.caches])
            self._views[rows] = view
        return self._views[rows]

    def _rounded(self, rows: int) -> int:
        """The next power of two, or all rows."""
        return min(1 << (rows - 1).bit_length(), self.batch_size)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block all sequences count as finished, so that steps change nothing. None may be under way."""
        before = self.state.done.clone()  # what steps write into the drafter's caches is written again
        self.state.done.fill_(True)
        try:
            yield
        finally:
            self.state.done.copy_(before)
            self.runner.begin()

    def pin(self, context: int) -> None:
        """Set all sequences back to `context` cached tokens with room to go on. Fills device buffers without waiting."""
        state = self.state
        values = {state.n: context, state.count: 1, state.produced: 1, state.done: False, state.limit: 1 << 40}
        for buffer, value in values.items():
            buffer.fill_(value)

    def fill(self) -> None:
        """Fill the caches with random numbers: a prompt would need kernels of its own to be compiled."""
        state = self.state
        for buffer in (*state.kv, state.features, state.history, *self.drafter.caches):
            if buffer.is_floating_point():
                buffer.normal_()
            else:  # int8 keys and values with their scales
                buffer.random_(0, 2)
        state.tokens.random_(0, self.model.config.vocab_size)

    def write_settings(self, row: int, params: SamplingParams, stop_ids: Collection[int], start: int) -> None:
        """Write a request's settings into a row of the buffers. It counts as finished until its prompt is read.

        start: the position of its first new token.
        """
        state = self.state
        state.done[row] = True
        self.write_sampling(row, params, stop_ids, start)
        state.stop_ids[row] = -1
        state.stop_ids[row, : len(stop_ids)] = torch.tensor([*stop_ids], dtype=torch.int64)
        state.limit[row] = params.max_new_tokens
        state.seen[row] = False
        state.counts[row] = 0

    def write_sampling(self, row: int, params: SamplingParams, stop_ids: Collection[int], start: int) -> None:
        """Write those settings that say how a token is chosen."""
        known = [token for token in stop_ids if token < self.model.config.vocab_size]
        self.state.sampling.set_row(row, params, known, start)

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Seconds of a plain and of a speculative step behind the present text, None if they were not measured. 0 of a
        speculative one: they differ too much."""
        return self._times and self._times.at(self.behind)

    @property
    def break_even_tau(self) -> float:
        """The break-even tau: speculation pays above it. 0 if it was not measured; then speculation always stays on."""
        return self.step_seconds[1] / self.step_seconds[0] if self.step_seconds else 0.0

    def add_observer(self, observer: Observer) -> None:
        """Let `observer` watch all further steps.

        Steps no longer run ahead of the host. Raises ValueError for an observer of phases if the step is compiled in one
        piece, or is captured already, because a graph holds only the marks of its capture.
        """
        if self.compiled == "step" and observer.marks:
            raise ValueError("a step compiled in one piece has no phases to time; leave out --compile-mode.")
        if self.runner.graphs and observer.marks:
            raise ValueError("the step is captured without marks; add an observer of phases before the first request.")
        self.observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop showing steps to `observer`."""
        self.observers.remove(observer)

    def step(self, mode: SamplingMode) -> StepOutput:
        """Run one speculative step now, on the state as it is and without its graph. For measurements."""
        return self._step(self.model, self.drafter, self.state, mode, parts=self.parts)

    def first_runs(self, mode: SamplingMode, view: View) -> None:
        """Capture, compile and time what steps of this kind need at first. No step may be under way."""
        rows = self._rounded(view.rows)  # what was found for as many rows holds for this view
        if (mode, view.rows) not in self._ready:
            with self.paused():
                self._first_runs(mode, view, rows)
            self._ready.add((mode, view.rows))
        self._times = self.timings.get((mode, rows))

    def follow(self, view: View, length: int) -> None:
        """Have the next steps count with a text of so many tokens."""
        self.behind = length
        if view.drafter.by_price and (times := self.prices.get(self._rounded(view.rows))):
            (plain, few, many), (alone, first, _) = times.at(length), times.at(0)
            nodes = view.drafter.priced_nodes
            costs = (few - plain) / nodes, (first - alone) / nodes, (many - few) / MANY
            view.drafter.price(*(max(0.0, cost) / plain for cost in costs))

    def _first_runs(self, mode: SamplingMode, view: View, rows: int) -> None:
        for drafter in filter(None, (view.drafter, self.fallback)):
            started = time.perf_counter()
            self._capture(drafter, mode, view)
            if self.config.compile:  # the first run compiles, which is no time of decoding
                self.runner.begin()
                self.launch(drafter, mode, view)
                self.runner.read()
                self.compile_seconds += time.perf_counter() - started
        if view.drafter.by_price and rows not in self.prices:
            few = 1 + view.drafter.priced_nodes
            nodes = (PlainDrafter(self.model, n, self.drafter) for n in (1, few, few + MANY))
            self.prices[rows] = self._line(partial(self._time_steps, mode, self.view(rows), *nodes), rows, "price")
        if self.fallback is not None and (mode, rows) not in self.timings:
            prunes = view.drafter.prunes(mode)  # its trees follow the text, so its steps are timed while they decode
            known = self.prices.get(rows) if prunes else None
            times = known or self._line(partial(self._measure, mode, self.view(rows)), rows, repr(mode))
            self.timings[mode, rows] = times._replace(seconds=(times.seconds[0], 0.0)) if prunes else times

    def _line(self, measure: Callable[[], tuple[float, ...]], rows: int, what: str) -> Times:
        """What `measure` gives behind the present text and behind a long one.

        How steps grow with the text is kept for this machine, model and options. So it is measured once, if there is room
        for a long text.
        """
        state = self.view(rows).state
        behind = int(state.n.max())
        times = Times(measure(), behind)
        far = min(FAR, min(size for _, size in state.spans[:rows]) - self.drafter.N - 2)
        if far < behind + FAR // 4:
            return times
        facts = self.config.options, self.model.config, self.model.quant, torch.get_num_threads(), rows, what
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        place = cache.folder() / "times" / f"{cache.key(describe_device(self.model.device))}-{digest}"
        if self.config.options is not None and (kept := cache.fetch(place)):
            return times._replace(growth=tuple(kept.about["growth"]))
        more, rings = far - behind, [ring.clone() for ring in self.drafter.caches if self.drafter.ring]
        for first, _ in state.spans[:rows]:
            for kv in self.state.kv:  # memory that was never written is read too fast
                kv.narrow(-2, first + behind + 1, more).zero_()
        state.n.add_(more)
        try:
            times = times.grown(measure(), behind + more)
        finally:
            state.n.sub_(more)
            for ring, held in zip(self.drafter.caches, rings, strict=False):  # whose rows all are of the present text
                ring.copy_(held)
        if self.config.options is not None:
            with contextlib.suppress(OSError):
                cache.store(place, b"", {"growth": times.growth})
        return times

    def _measure(self, mode: SamplingMode, view: View) -> tuple[float, float]:
        """Seconds of a plain and of a speculative step."""
        return self._time_steps(mode, view, self.fallback, view.drafter)

    def _time_steps(self, mode: SamplingMode, view: View, *drafters: Drafter) -> tuple[float, ...]:
        """Seconds of a step with each of some drafters, timed alternately with as many under way as in decoding.

        Steps are compared with those of the first drafter in the same turn, because a machine that others use is slower
        in one turn than in the next.
        """
        self.runner.begin()
        times: list[list[float]] = [[] for _ in drafters]
        most, least = TURNS
        while len(times[0]) < (most if sum(map(sum, times)) < self.patience else least):
            for drafter, seconds in zip(drafters, times, strict=True):
                started = time.perf_counter()
                for _ in range(1 + self.lag):
                    self.launch(drafter, mode, view)
                for _ in range(1 + self.lag):
                    self.runner.read()
                seconds.append((time.perf_counter() - started) / (1 + self.lag))
        plain = statistics.median(times[0][1:])
        return tuple(plain * statistics.median([*map(truediv, one, times[0])][1:]) for one in times)

    def _capture(self, drafter: Drafter, mode: SamplingMode, view: View) -> None:
        with self.backend.active():
            if not mode.grammar:
                return self.runner.capture(*self._step_call(drafter, mode, view))
            key, draft = self._call("draft", draft_phase, drafter, mode, view)
            self.runner.capture(key, draft)
            if key in self.runner.graphs:
                self.runner.capture(*self._verify_call(self.runner.graphs[key][1], drafter, mode, view))

    def _call(self, part: str, function: Callable, drafter: Drafter, mode: SamplingMode, view: View) -> Call:
        run = partial(function, drafter, view.state, mode, mark=marker(self.observers), parts=self.parts)
        return (drafter.N, drafter.D, mode, view.rows, part), run

    def _step_call(self, drafter: Drafter, mode: SamplingMode, view: View) -> Call:
        """A step. One with grammars is split in two instead, because the host reads the draft in between (`launch`)."""
        step = self._plain_step if drafter is self.fallback else self._step
        return self._call("step", partial(step, self.model), drafter, mode, view)

    def _verify_call(self, drafted: tuple[Draft, Any], drafter: Drafter, mode: SamplingMode, view: View) -> Call:
        """drafted: what `draft_phase` returned."""
        return self._call("verify", partial(verify_phase, self.model, drafted), drafter, mode, view)

    def launch(
        self, drafter: Drafter, mode: SamplingMode, view: View, constraints: Sequence[Constraint | None] = ()
    ) -> StepOutput:
        """Launch a step of this drafter on the rows of a view. constraints: of the rows, for a mode with grammars."""
        with self.backend.active():
            if not mode.grammar:
                return self.runner.launch(*self._step_call(drafter, mode, view))
            drafted = self.runner.run(*self._call("draft", draft_phase, drafter, mode, view))
            constrain(drafted[0], view.state.allowed, constraints, drafter.multi_round)
            return self.runner.launch(*self._verify_call(drafted, drafter, mode, view))


def _mark_static(buffers: Sequence[torch.Tensor]) -> None:
    for buffer in buffers:
        torch._dynamo.mark_static_address(buffer)
