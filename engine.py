"""The engine: one request at a time, from prompt ids to a stream of tokens.

It prefills the prompt (reusing the prefix that its caches still hold), launches steps ahead of the host, applies the stop
rules, and falls back to plain decoding while drafting does not pay. It speaks token ids; text only passes through.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

import kernels
from drafters.base import UNCOMPILED, Drafter, PlainDrafter
from eagle_draft import EagleHead
from memory_plan import MemoryPlan
from model import Transformer
from options import LoadOptions
from runtime.async_stream import AsyncStream
from runtime.compiled import COMPILE_MODES, CompileMode, compile_parts
from runtime.constrained import ConstrainedSteps
from runtime.fused import fused_parts
from runtime.grammar import Constraint, Grammars
from runtime.lease import Lease, LeaseQueue, Left
from runtime.prefill import Prefill, Prompt, not_finite, prompts_ids
from runtime.prompt_cache import PromptCache, common_length
from runtime.results import Chunk, GenerationResult, SequenceOutput, Stream, mark_interrupted
from runtime.runner import Pacer, Runner
from sampling import Logprobs, SamplingMode, SamplingParams
from sampling_params import per_row
from step import MAX_STOP_IDS, RING, DecodeState, Observer, StepOutput, decode_step
from tokenizer import Tokenizer

LAG = 2  # steps that run ahead of the host on a GPU
Result = TypeVar("Result")
ASKED_FOR = "asked for"  # why speculation stays on: the user wants it


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, and what `load.load` knows of it.

    Args:
        batch_size: sequences that are decoded together.
        ctx: tokens of prompt and output that fit; default: all positions of the model.
        compile, compile_mode: one of runtime.compiled.COMPILE_MODES.
        backend: the kernels; default: Triton on a GPU, the reference on a CPU.
        lag: steps that may run ahead of the host; default: 2 on a GPU, 0 on a CPU. Observers see every step, so with one
            attached nothing runs ahead.
        eagle_always: False: measure at the first request whether speculation pays, and decode plainly while it does not.
            The tokens are the same up to the rounding of forwards of other widths.
        kv_dtype: of the target's cache: None for the model's, or torch.int8.
        options, plan, head, generation: what `load.load` decided, planned and read (generation is the model's
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
    options: LoadOptions | None = None
    plan: MemoryPlan | None = None
    head: EagleHead | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: LoadOptions, backend: kernels.KernelBackend, head: EagleHead | None = None) -> EngineConfig:
        """The configuration that resolved options ask for."""
        return cls(
            options.batch_size, options.ctx, options.compile, options.compile_mode, backend,
            eagle_always=options.eagle_always, kv_dtype=torch.int8 if options.kv == "int8" else None,
            options=options, head=head,
        )  # fmt: skip


class Engine:
    """Decodes one batch at a time with a target, a drafter and static buffers. `load.load` builds it."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
    ):
        """Allocate everything that requests need. Raises ValueError in one line for values that are out of range."""
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter or PlainDrafter(model)
        self.config = config = config or EngineConfig()
        on_gpu = model.device.type == "cuda"
        self.batch_size = config.batch_size
        self.ctx = config.ctx or model.config.max_positions
        self.backend = config.backend or kernels.KernelBackend("auto", model.device.type)
        self.lag = (LAG if on_gpu else 0) if config.lag is None else config.lag
        self.options, self.plan, self.head, self.generation = (
            config.options, config.plan, config.head, config.generation,
        )  # fmt: skip
        self._check_config()
        self.always_on = self._why_always_on()
        stand_in = PlainDrafter(model, features_of=self.drafter)
        self.fallback: Drafter | None = None if self.always_on else stand_in
        self.state = self._allocate()
        mode = COMPILE_MODES[config.compile_mode] if config.compile else CompileMode("", None, False)
        self.runner = Runner(self.state.ring, self.state.step, torch.cuda if on_gpu else None, mode.captured and on_gpu)
        self._compile(mode, on_gpu)
        self.constrained = ConstrainedSteps(model, self.state, self.runner, self.parts)
        self.grammars = Grammars(tokenizer, model.config.vocab_size)
        self.timings: dict[SamplingMode, tuple[float, float]] = {}  # seconds of a plain and of a speculative step
        self.step_seconds: tuple[float, float] | None = None  # those of the present request
        self.warm: set[tuple] = set()  # kinds of step that have run compiled
        self.compile_seconds = 0.0  # time spent on their first runs
        self.observers: list[Observer] = []
        self._forget_caches()
        self.prompt_cache = PromptCache()  # keeps texts that the caches no longer hold; this one keeps none
        self.queue = LeaseQueue()  # requests run one after another

    def _check_config(self) -> None:
        longest = self.model.config.max_positions
        if not 2 <= self.ctx <= longest:
            raise ValueError(f"ctx is {self.ctx}; allowed: 2 to {longest} (the model's max_position_embeddings).")
        mode = self.config.compile_mode
        if mode not in COMPILE_MODES:
            raise ValueError(f"compile_mode is {mode!r:.40}; allowed: {', '.join(COMPILE_MODES)}.")
        if not 0 <= self.lag < RING:
            raise ValueError(f"lag is {self.lag}; allowed: 0 to {RING - 1} steps ahead of the host.")

    def _why_always_on(self) -> str:
        """Why speculation is never given up; "" if plain steps replace it while it does not pay."""
        if self.drafter.multi_round:
            return "with multi-round verification the tokens depend on the drafter"
        return ASKED_FOR if self.config.eagle_always or self.drafter.D == 0 else self.drafter.always_on

    def _allocate(self) -> DecodeState:
        history = self.fallback is not None
        return DecodeState(self.model, self.drafter, self.batch_size, self.ctx, history, self.config.kv_dtype)

    def _compile(self, mode: CompileMode, on_gpu: bool) -> None:
        """Set up the functions that steps and prefill run. Nothing is compiled before their first call."""
        self.parts = compile_parts(on_gpu, mode.inductor) if mode.scope == "parts" else UNCOMPILED
        self._step: Callable[..., StepOutput] = decode_step
        self._plain_step: Callable[..., StepOutput] = decode_step
        layers = None
        if self.backend.mode == "cpu":
            self.parts = fused_parts()
            layers = self.parts.layers
        self.prefill = Prefill(self.model, self.drafter, self.state, layers, mode.scope == "whole")
        if mode.scope != "whole":
            return
        if mode.inductor:  # Inductor captures no step that writes a buffer whose address may change
            for buffer in self.state.buffers() + self.drafter.buffers():
                torch._dynamo.mark_static_address(buffer)
        # torch limits recompilations per code object, so the plain step gets a code object of its own
        plain_step = lambda *args, **named: decode_step(*args, **named)  # noqa: E731
        self._step = torch.compile(decode_step, fullgraph=True, dynamic=False, mode=mode.inductor)
        self._plain_step = torch.compile(plain_step, fullgraph=True, dynamic=False, mode=mode.inductor)

    @property
    def break_even_tau(self) -> float:
        """Tokens per step above which speculation pays. 0 where it was not measured; then it is never given up."""
        return self.step_seconds[1] / self.step_seconds[0] if self.step_seconds else 0.0

    def keep_prompts(self, cache: PromptCache) -> None:
        """From now on keep the caches of earlier prompts there. Call it between requests."""
        self.prompt_cache = cache

    def add_observer(self, observer: Observer) -> None:
        """Let `observer` watch all further steps.

        Steps no longer run ahead of the host. Raises ValueError for an observer of phases if the step is compiled in one
        piece, or is captured already, because a graph holds only the marks of its capture.
        """
        if self.config.compile and COMPILE_MODES[self.config.compile_mode].scope == "whole" and observer.marks:
            raise ValueError("a step compiled in one piece has no phases to time; use --compile-mode regions.")
        if self.runner.graphs and observer.marks:
            raise ValueError("the step is captured without marks; add an observer of phases before the first request.")
        self.observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop showing steps to `observer`."""
        self.observers.remove(observer)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The request's stop ids, or else the tokenizer's, or else the config's."""
        if params.stop_ids:
            return params.stop_ids
        if self.tokenizer is not None and self.tokenizer.eos_ids:
            return tuple(self.tokenizer.eos_ids)
        return self.model.config.eos_token_ids

    def twin(self, width: int) -> Engine:
        """An engine on the same model that decodes plainly, in forwards of `width` rows, with buffers of its own."""
        return self.sibling(PlainDrafter(self.model, width), replace(self.config, head=None))

    def sibling(self, drafter: Drafter | None, config: EngineConfig) -> Engine:
        """Another engine on the same model, in the same processes."""
        return Engine(self.model, self.tokenizer, drafter, config)

    def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        """deed(self, *arguments), in all processes where the model is split among several. deed: of a module or class."""
        return deed(self, *arguments)

    @torch.inference_mode()
    def warm_up(self, params: SamplingParams | None = None) -> float:
        """Compile, capture and time now what requests with these settings need; otherwise their first one does.

        Waits for the engine, as a request does. Returns the seconds that the work took.
        """
        params = params or SamplingParams()
        with Lease(self.queue):
            started = time.perf_counter()
            self._write_settings([params])
            self._first_runs(params.mode)
            return time.perf_counter() - started

    def step(self, mode: SamplingMode, mark: Callable[[str], None] | None = None) -> StepOutput:
        """Run one speculative step now, on the state as it is and without its graph. For measurements."""
        marks = {} if mark is None else {"mark": mark}
        return self._step(self.model, self.drafter, self.state, mode, parts=self.parts, **marks)

    def graph(self, mode: SamplingMode) -> Any:
        """The CUDA graph that replays such a step, or None."""
        return self.runner.graphs.get(self._step_call(self.drafter, mode)[0], (None,))[0]

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Decode one prompt. Returns a Stream of Chunks whose `result` is complete when the stream ends.

        The prompt is text to continue, a list of token ids, or a one-dimensional numpy array or torch tensor of ids. Any
        number of threads may use one engine. Their requests run one after another (see Stream).

        Raises, in one line and before any kernel runs:
            TypeError: for a prompt of another type.
            ValueError: for ids outside the vocabulary, and for a prompt that does not fit.
        """
        return self.generate_batch([prompt], params)

    def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncStream:
        """The same for asyncio: `async for chunk in engine.agenerate(prompt)`. The event loop stays free meanwhile.

        A task that is cancelled closes its stream (see AsyncStream).
        """
        return AsyncStream(self.generate(prompt, params), self.queue.worker())

    def generate_batch(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Stream:
        """Decode up to batch_size prompts of any lengths together. Otherwise as `generate`.

        params: for all prompts, where prompt b draws with seed + b, or one per prompt. The text of a prompt does not
            depend on the settings of the others.
        """
        prompts = prompts_ids(prompts, self.tokenizer)
        params = per_row(params or SamplingParams(), len(prompts))
        self._check_request(prompts, params)
        chain = self.drafter.D if self.drafter.N == self.drafter.D + 1 and not self.drafter.p_min else 0
        results = [
            GenerationResult(len(prompt), row.temperature, row.seed, chain=chain)
            for prompt, row in zip(prompts, params, strict=True)
        ]
        lease = Lease(self.queue)
        constraints = [self.grammars.constraint(p.grammar, self.stop_ids(p)) if p.grammar else None for p in params]
        request = Request(self, prompts, params, results, constraints)
        return Stream(self._run(request, lease), results, lease)

    def _check_request(self, prompts: list[list[int]], rows: list[SamplingParams]) -> None:
        if not 1 <= len(prompts) <= self.batch_size:
            raise ValueError(f"{len(prompts)} prompts, but the engine holds 1 to {self.batch_size}; use --batch-size.")
        V = self.model.config.vocab_size
        for prompt, params in zip(prompts, rows, strict=True):
            if len(self.stop_ids(params)) > MAX_STOP_IDS:
                raise ValueError(f"{len(self.stop_ids(params))} stop ids; allowed: at most {MAX_STOP_IDS}.")
            if params.stop and self.tokenizer is None:
                raise ValueError("stop strings need a tokenizer, and this checkpoint has none; use stop ids.")
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token (or text).")
            for t in prompt:
                if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < V:
                    raise ValueError(f"prompt id {t!r} is outside the vocabulary; allowed: 0 to {V - 1}.")
            need = len(prompt) + params.max_new_tokens
            if need > self.ctx:
                longest = self.model.config.max_positions
                hint = f"Try --ctx {need}." if need <= longest else f"The model's limit is {longest:,}."
                raise ValueError(
                    f"prompt is {len(prompt):,} tokens; with --max-new-tokens {params.max_new_tokens:,} it needs "
                    f"{need:,} of the {self.ctx:,} allocated. {hint}"
                )

    @torch.inference_mode()
    def _run(self, request: Request, lease: Lease) -> Generator[Chunk]:
        try:
            if not lease.wait():
                return
            rows = (self._cached, self._drafted, request.prompts)
            reuse = self.prompt_cache.exchange(self.state, self.drafter, *rows)
            self._forget_caches()  # nothing is valid until the request has ended well
            self._write_settings(request.params)
            self._first_runs(request.mode)
            for b, prompt in enumerate(request.prompts):
                yield request.prefill(b, prompt, *reuse[b], lease.go_on)
                lease.check()
            self.runner.begin()
            while not request.finished:
                for chunk in request.advance():
                    yield chunk
                    lease.check()
            self._keep_caches(request)
        except Left:
            return
        except GeneratorExit:  # the reader left between two chunks, and what it was given is in the caches
            lease.end(partial(self._keep_caches, request))
            raise
        finally:
            lease.end()
            mark_interrupted(request.results)

    def _keep_caches(self, request: Request) -> None:
        for b in range(len(request.prompts)):
            self._cached[b], self._drafted[b] = request.cached(b)

    def _forget_caches(self) -> None:
        # for each row the ids whose target rows are valid, and the number of valid draft rows
        self._cached: list[list[int]] = [[] for _ in range(self.batch_size)]
        self._drafted = [0] * self.batch_size

    def _write_settings(self, params: Sequence[SamplingParams]) -> None:
        """Write a request's settings into the static buffers. Every sequence counts as finished until its prefill."""
        state = self.state
        state.done.fill_(True)
        state.sampling.set([*params, *[SamplingParams()] * (self.batch_size - len(params))])
        state.stop_ids.fill_(-1)
        for b, row in enumerate(params):
            stop_ids = self.stop_ids(row)
            state.stop_ids[b, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
            state.limit[b] = row.max_new_tokens
        state.seen.zero_()
        state.counts.zero_()

    def _first_runs(self, mode: SamplingMode) -> None:
        """Capture, compile and time what the first request of a kind needs.

        All sequences are finished, so the steps that run here change nothing.
        """
        for drafter in (d for d in (self.drafter, self.fallback) if d is not None):
            started = time.perf_counter()
            key = self._step_call(drafter, mode)[0]
            self._capture(drafter, mode)
            if self.config.compile and key not in self.warm:  # the first run compiles, which is no time of decoding
                self.runner.begin()
                self._launch(drafter, mode)
                self._read()
                self.warm.add(key)
                self.compile_seconds += time.perf_counter() - started
        if self.drafter.unpriced:
            self.drafter.price(self._measure_price(mode))
        paced = self.fallback is not None and not self.drafter.prunes(mode)
        if paced and mode not in self.timings:
            self.timings[mode] = self._measure(mode)
        self.step_seconds = self.timings[mode] if paced else None

    def _measure_price(self, mode: SamplingMode, nodes: int = 4) -> float:
        """What a node adds to the time of a plain step, as a share of it."""
        steps = (PlainDrafter(self.model, width, features_of=self.drafter) for width in (1, 1 + nodes))
        plain, wide = self._time_steps(mode, *steps)
        return max(0.0, wide / plain - 1) / nodes

    def _measure(self, mode: SamplingMode) -> tuple[float, float]:
        """Seconds of a plain and of a speculative step."""
        return self._time_steps(mode, self.fallback, self.drafter)

    def _time_steps(self, mode: SamplingMode, *drafters: Drafter) -> tuple[float, float]:
        """Seconds of a step with each of two drafters, timed alternately with as many under way as in decoding."""
        self.runner.begin()
        times: list[list[float]] = [[], []]
        for _ in range(4):
            for drafter, seconds in zip(drafters, times, strict=True):
                started = time.perf_counter()
                for _ in range(1 + self.lag):
                    self._launch(drafter, mode)
                for _ in range(1 + self.lag):
                    self._read()
                seconds.append((time.perf_counter() - started) / (1 + self.lag))
        return statistics.median(times[0][1:]), statistics.median(times[1][1:])

    def _capture(self, drafter: Drafter, mode: SamplingMode) -> None:
        with self.backend.active():
            if mode.grammar:
                return self.constrained.capture(drafter, mode, self._marker())
            self.runner.capture(*self._step_call(drafter, mode))

    def _marker(self) -> Callable[[str], None] | None:
        """Tells the observers of phases where a step is. None if there are no such observers."""
        marking = [observer for observer in self.observers if observer.marks]

        def mark(phase: str) -> None:
            for observer in marking:
                observer.mark(phase)

        return mark if marking else None

    def _step_call(self, drafter: Drafter, mode: SamplingMode) -> tuple[tuple, Callable[[], StepOutput]]:
        """The key of a step's graph, and the step as a function without arguments."""
        step = self._plain_step if drafter is self.fallback else self._step
        named = {"parts": self.parts}
        mark = self._marker()
        if mark is not None:
            named["mark"] = mark

        def call() -> StepOutput:
            if mark is not None:
                mark("start")
            return step(self.model, drafter, self.state, mode, **named)

        return (drafter.N, drafter.D, mode), call

    def _launch(
        self, drafter: Drafter, mode: SamplingMode, constraints: Sequence[Constraint | None] = ()
    ) -> StepOutput:
        with self.backend.active():
            if mode.grammar:
                return self.constrained.launch(drafter, mode, constraints, self._marker())
            return self.runner.launch(*self._step_call(drafter, mode))

    def _read(self) -> list[list[int]]:
        return self.runner.read()

    def _finish(self, row: int) -> None:
        """End a row that the host has finished. The steps under way still add to it, and nobody reads what they add."""
        self.state.done.select(0, row).fill_(True)

    @torch.inference_mode()
    def margin(
        self, row: int, text: Sequence[int], prompt: int, params: SamplingParams, a: int, b: int
    ) -> tuple[float, float]:
        """How far apart tokens a and b are as successors of `text`, whose first `prompt` ids are the prompt.

        Returns the difference of their sampling keys z + T g, and the same in units of the last place of the larger logit
        in the model's dtype. It tells a rounding tie from a bug.
        """
        with Lease(self.queue), self.backend.active():
            self._forget_caches()
            self.state.sampling.set(params)
            logits, noise = self.prefill.logits(row, list(text), params.mode)
            logits = self.prefill.penalised(row, logits, text, prompt, params.mode)
            temperature = self.state.sampling.row(row).temperature
            keys = logits[0, 0] if noise is None else (logits + temperature * noise)[0, 0]
        distance = abs(float(keys[a] - keys[b]))
        largest = float(logits[0, 0, [a, b]].abs().max())
        ulp = torch.finfo(self.model.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-9)))
        return distance, distance / ulp


class Request:
    """The host's side of one request: what it knows of every row, and the steps under way."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        params: list[SamplingParams],
        results: list[GenerationResult],
        constraints: list[Constraint | None],
    ):
        self.engine = engine
        self.prompts = prompts
        self.params = params
        self.constraints = constraints
        self.mode = SamplingMode.covering(row.mode for row in params)
        self.results = results
        self.rows = [
            SequenceOutput(result, row, set(engine.stop_ids(row)), engine.tokenizer)
            for result, row in zip(results, params, strict=True)
        ]
        self.lengths = [0] * len(prompts)  # tokens in the target's cache
        self.drafted = [0] * len(prompts)  # draft rows that are made of true features
        self.pending: deque[Drafter] = deque()  # the drafters of the steps under way
        self.pacer: Pacer | None = None  # made when decoding begins
        self.drafter = engine.drafter
        self.begun = 0.0
        self.seconds = 0.0

    @property
    def lag(self) -> int:
        """Steps that may run ahead of the host. Observers may come and go within a request."""
        return 0 if self.engine.observers or self.mode.logprobs or self.mode.grammar else self.engine.lag

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    def prefill(
        self, b: int, prompt: list[int], cached: list[int], drafted: int, after_chunk: Callable[[], None]
    ) -> Chunk:
        """Run a prompt, less what the caches hold of it. Returns the first token's chunk."""
        engine = self.engine
        started = time.perf_counter()
        start = min(common_length(prompt, cached), len(prompt) - 1)
        if engine.drafter.D > 0:  # draft row i holds token i + 1, which must agree too
            start = max(0, min(start - 1, drafted))
        self.results[b].cached_tokens = start
        with engine.backend.active():
            constraint = self.constraints[b]
            allowed = constraint.allowed() if constraint else None
            first, logprobs = engine.prefill.first_token(b, prompt, self.mode, start, allowed, after_chunk)
        self.lengths[b] = len(prompt)
        self.drafted[b] = len(prompt) - 1
        self.results[b].prefill_seconds = time.perf_counter() - started
        chunk = self.rows[b].push([first], logprobs and logprobs.row(0), step=False)
        self._taken(b, chunk)
        return chunk._replace(row=b)

    def _taken(self, b: int, chunk: Chunk) -> None:
        """Note that a row has got the tokens of a chunk."""
        if self.rows[b].finished:
            self.engine._finish(b)
        elif (constraint := self.constraints[b]) is not None:
            constraint.take(chunk.token_ids)

    def advance(self) -> Iterator[Chunk]:
        """Launch steps and hand out what the oldest one emitted.

        The seconds of decoding are those of the steps alone, not of what the consumer does with a chunk. Where steps run
        ahead of the host they run meanwhile, so there it is the time that passed.
        """
        engine = self.engine
        if self.pacer is None:
            self.pacer = Pacer(engine.break_even_tau)
            self.begun = time.perf_counter()
        started = time.perf_counter()
        output = self._launch_steps()
        ring = engine._read()
        used = self.pending.popleft()
        counts = [r[0] for r, row in zip(ring, self.rows, strict=False) if not row.finished]
        self.pacer.take(used is engine.drafter, counts)
        now = time.perf_counter()
        self.seconds = now - self.begun if self.lag else self.seconds + now - started
        self.begun = now - self.seconds
        if output is not None:  # a step that was launched before the observer came is not shown
            for observer in engine.observers:
                observer.step(output)
        for b, row in enumerate(self.rows):
            if not row.finished:
                yield from self._emit(b, row, ring[b], used, output.logprobs.row(b) if self.mode.logprobs else None)

    def _launch_steps(self) -> StepOutput | None:
        """Launch as many steps as may run ahead of the host. Returns the output of the last one launched."""
        engine = self.engine
        wanted = engine.drafter if self.pacer.speculating else engine.fallback
        if wanted is engine.fallback or not self.pending:  # plain steps under way end before drafting comes back
            if wanted is not self.drafter and wanted is engine.drafter:
                for b in (b for b, row in enumerate(self.rows) if not row.finished):
                    with engine.backend.active():
                        engine.prefill.catch_up(b, self.drafted[b], self.lengths[b])
                    self.drafted[b] = self.lengths[b]
            self.drafter = wanted
        output = None
        while self.drafter is wanted and len(self.pending) <= self.lag:
            output = engine._launch(self.drafter, self.mode, self.constraints)
            self.pending.append(self.drafter)
        return output

    def _emit(
        self, b: int, row: SequenceOutput, ring: list[int], used: Drafter, logprobs: Logprobs | None
    ) -> Iterator[Chunk]:
        """Take one row's part of a step."""
        engine = self.engine
        count, done, emitted, finite = ring[0], ring[1], ring[2::2], ring[3::2]
        usable = [*finite, 0].index(0)  # an unusable token is an error, unless a stop comes before it
        position = self.lengths[b] + usable
        if used is engine.drafter:
            self.drafted[b] = self.lengths[b]
        self.lengths[b] += count
        self.results[b].decode_seconds = self.seconds
        chunk = row.push(emitted[: min(usable, count)], logprobs)
        if used is engine.fallback and chunk.token_ids:
            self.results[b].plain_steps.append(self.results[b].steps - 1)
        self._taken(b, chunk)
        if row.finished or usable > 0:
            yield chunk._replace(row=b)
        if not row.finished and usable < count:
            raise not_finite(engine.model.dtype, position)
        if done and not row.finished:
            raise RuntimeError(f"sequence {b} stopped on the device alone; please report this.")

    def cached(self, b: int) -> tuple[list[int], int]:
        """What the caches hold at the end: the ids of row b, and the number of its valid draft rows."""
        text = self.prompts[b] + self.results[b].token_ids
        return text[: min(self.lengths[b], len(text))], max(0, min(self.drafted[b], len(text) - 1))
