"""The engine: prefill, the speculative step, stop rules, results. It speaks token ids; text only passes through.

A step is draft -> forward -> accept -> commit on static buffers (DESIGN: "the step"). Nothing in it waits for the host,
so it can be compiled whole or captured as one CUDA graph. Plain decoding is the same step with a one-node tree. The
emitted tokens are a function of (prompt, seed): the drafter decides only how many of them one forward yields.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import kernels
import sampling
from drafters.base import Drafter, PlainDrafter
from model import Transformer, chain_ancestors
from runtime.compiled import COMPILE_MODES, CompiledStep
from runtime.results import Chunk, GenerationResult, SequenceOutput
from runtime.runner import RING, Pacer, Runner
from sampling import SamplingMode, SamplingParams
from step import HISTORY, MAX_STOP_IDS, DecodeState, StepOutput, accept_and_commit, decode_step

PREFILL_CHUNKS = (32, 64, 128, 256)  # fixed widths: a prompt of any length runs shapes that were seen before


LAG = 2  # steps that run ahead of the host on a GPU


# Where a request can be cut short: Engine methods, each of which the tests make fail with every kind of error.
INJECTION_POINTS = (
    "_allocate", "_set_up", "_capture", "_measure", "_prefill", "_launch", "_read", "_observe", "_finish", "_catch_up",
)  # fmt: skip


class Stream:
    """An iterator of Chunks whose `results` fill as it runs. Leaving it early (break, exception, Ctrl-C) is safe."""

    def __init__(self, chunks: Iterator[Chunk], results: list[GenerationResult]):
        self._chunks, self.results = chunks, results

    @property
    def result(self) -> GenerationResult:
        return self.results[0]

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def close(self) -> None:
        """Stop here: what was not finished is marked as interrupted, wherever the iterator stands."""
        self._chunks.close()
        for result in self.results:
            if result.stop_reason == "unfinished":
                result.stop_reason = "interrupted"

    def run(self) -> list[GenerationResult]:
        """Run to the end and return the results."""
        for _ in self._chunks:
            pass
        return self.results


class Engine:
    """Decodes one batch at a time with a target, a drafter and static buffers. Built by `generate.load`."""

    def __init__(
        self,
        model: Transformer,
        tokenizer=None,
        drafter: Drafter | None = None,
        batch_size: int = 1,
        ctx: int | None = None,
        compile: bool = False,
        backend: kernels.KernelBackend | None = None,
        lag: int | None = None,
        compile_mode: str = "graph",
        eagle_always: bool = True,
        kv_dtype: torch.dtype | None = None,  # of the target's cache: None = the model's, or torch.int8
    ):
        """lag: steps that may run ahead of the host, by default 2 on a GPU (0 with an observer, which wants them all).
        eagle_always=False: measure at the first request whether speculation pays, and decode plainly while it does not.
        The tokens are the same (to rounding: forwards of other widths)."""
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.drafter = drafter or PlainDrafter(model, batch_size)
        self.ctx = ctx or model.config.max_positions
        if not 2 <= self.ctx <= model.config.max_positions:
            raise ValueError(
                f"ctx is {self.ctx}; allowed: 2 to {model.config.max_positions} (the model's max_position_embeddings)."
            )
        self.backend = backend or kernels.KernelBackend("auto", model.device.type)
        if compile_mode not in COMPILE_MODES:
            raise ValueError(f"compile_mode is {compile_mode!r:.40}; allowed: {', '.join(COMPILE_MODES)}.")
        self.compiled, self.compile_mode = compile, compile_mode
        what, how, captured = COMPILE_MODES[compile_mode] if compile else ("", None, False)
        # Why speculation is never given up; '' = plain steps replace it while it does not pay.
        self.always_on = "asked for" if eagle_always or self.drafter.D == 0 else ""
        if self.drafter.multi_round:
            self.always_on = "with multi-round verification the tokens depend on who drafts"
        self.always_on = self.always_on or getattr(self.drafter, "always_on", "")
        self.fallback: Drafter | None = None if self.always_on else PlainDrafter(model, batch_size)
        if self.fallback is not None:  # keeps what the drafter will want to know
            self.fallback.taps, self.fallback.feature_size = self.drafter.taps, self.drafter.feature_size
        self.timings: dict[SamplingMode, tuple[float, float]] = {}  # seconds: plain step, speculative step
        self.step_seconds: tuple[float, float] | None = None  # those of the request
        self.warm: set[tuple] = set()  # kinds of step that have run compiled
        self.compile_seconds = 0.0  # spent on their first runs: compiling, capturing
        self.kv_dtype = kv_dtype
        self.state = self._allocate()
        on_gpu = model.device.type == "cuda"
        self.lag = (LAG if on_gpu else 0) if lag is None else lag
        if not 0 <= self.lag < RING:
            raise ValueError(f"lag is {self.lag}; allowed: 0 to {RING - 1} steps ahead of the host.")
        cuda = torch.cuda if on_gpu else None
        self.runner = Runner(self.state.ring, self.state.step, cuda, captured and on_gpu)
        self._step: Callable = decode_step
        self._plain_step: Callable = decode_step
        self._forward: Callable = _prefill_chunk
        if what == "whole":
            for holder in (self.state, self.state.sampling, self.drafter) if how else ():
                for buffer in (t for t in vars(holder).values() if isinstance(t, Tensor)):
                    torch._dynamo.mark_static_address(buffer)  # else Inductor captures no step that writes it
            self._step = torch.compile(decode_step, fullgraph=True, dynamic=False, mode=how)
            own = lambda *args: decode_step(*args)  # noqa: E731 (torch limits recompilations per code object)
            self._plain_step = torch.compile(own, fullgraph=True, dynamic=False, mode=how)
            self._forward = torch.compile(_prefill_chunk, fullgraph=True, dynamic=False)
        elif what == "regions":
            self._step = self._plain_step = CompiledStep(
                model, self.drafter, decode_step, accept_and_commit, mode=how
            ).step
        # What the caches hold: per row, ids whose target rows are valid, and how many draft rows are.
        self._cached: list[list[int]] = [[] for _ in range(batch_size)]
        self._drafted = [0] * batch_size
        self._owner: list[GenerationResult] | None = None  # of the request that the state belongs to
        self.observer: Callable[[StepOutput], None] | None = (
            None  # sees every step's tensors (--show-tree, --html)
        )

    def _allocate(self) -> DecodeState:
        history = self.fallback is not None
        return DecodeState(self.model, self.drafter, self.batch_size, self.ctx, history, self.kv_dtype)

    @property
    def break_even_tau(self) -> float:
        """Tokens per step from which on speculation pays; 0 where it was not measured (nothing is given up then)."""
        return self.step_seconds[1] / self.step_seconds[0] if self.step_seconds else 0.0

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The request's stop ids, or else the tokenizer's, or else the config's."""
        if params.stop_ids:
            return params.stop_ids
        if self.tokenizer is not None and self.tokenizer.eos_ids:
            return tuple(self.tokenizer.eos_ids)
        return self.model.config.eos_token_ids

    @torch.inference_mode()
    def prepare(self, params: SamplingParams | None = None) -> float:
        """Compile, capture and time now what requests with such settings need; else their first one does. Ends a stream
        that is under way. Returns the seconds it took."""
        params, started = params or SamplingParams(), time.perf_counter()
        self._owner = None
        self._set_up(params)
        self._prepare(params.mode)
        return time.perf_counter() - started

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Decode one prompt. Returns a Stream of Chunks; its `result` is complete when the stream ends.

        Raises ValueError (before any kernel runs) for ids outside the vocabulary and for a prompt that does not fit.
        """
        return self.generate_batch([prompt_ids], params)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> Stream:
        """Decode up to batch_size prompts of any lengths together; row b draws with seed + b."""
        params = params or SamplingParams()
        prompts = [list(p) for p in prompts]
        self._check(prompts, params)
        chain = self.drafter.D if self.drafter.N == self.drafter.D + 1 else 0
        results = [
            GenerationResult(len(p), params.temperature, params.seed + b, chain=chain)
            for b, p in enumerate(prompts)
        ]
        return Stream(self._run(prompts, params, results), results)

    def _check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        if not 1 <= len(prompts) <= self.batch_size:
            raise ValueError(
                f"{len(prompts)} prompts, but the engine holds 1 to {self.batch_size}; use --batch-size."
            )
        if len(self.stop_ids(params)) > MAX_STOP_IDS:
            raise ValueError(f"{len(self.stop_ids(params))} stop ids; allowed: at most {MAX_STOP_IDS}.")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this checkpoint has none; use stop ids.")
        V = self.model.config.vocab_size
        for prompt in prompts:
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
    def _run(self, prompts, params: SamplingParams, results: list[GenerationResult]) -> Iterator[Chunk]:
        B, mode = self.batch_size, params.mode
        rows = [SequenceOutput(r, params, set(self.stop_ids(params)), self.tokenizer) for r in results]
        lengths = [0] * B  # tokens in the target cache, as the host knows them
        drafted = [0] * B  # draft rows made of true features
        reuse = [list(ids) for ids in self._cached], list(self._drafted)
        self._cached, self._drafted = [[] for _ in range(B)], [0] * B  # nothing is valid until we end well
        self._owner = results
        try:
            self._set_up(params)
            self._prepare(mode)
            for b, prompt in enumerate(prompts):
                started = time.perf_counter()
                with self.backend.active():
                    first = self._prefill(b, prompt, mode, reuse[0][b], reuse[1][b], results[b])
                lengths[b], drafted[b] = len(prompt), len(prompt) - 1
                results[b].prefill_seconds = time.perf_counter() - started
                chunk = rows[b].push([first], step=False)
                if rows[b].finished:
                    self._finish(b)
                yield chunk._replace(row=b)
                self._check_owner(results)
            # Seconds of decoding: steps alone, not what the consumer does with a chunk; but where steps run ahead they
            # run meanwhile, so there it is the time that passed.
            begun, seconds = time.perf_counter(), 0.0
            observer, lag = self.observer, 0 if self.observer is not None else self.lag
            self.runner.begin()
            pending: deque[Drafter] = deque()
            pacer, drafter = Pacer(self.break_even_tau), self.drafter
            while not all(row.finished for row in rows):
                started = begun if lag else time.perf_counter()
                wanted = self.drafter if pacer.speculating else self.fallback
                if wanted is self.fallback or not pending:  # plain steps under way end first
                    if wanted is not drafter and wanted is self.drafter:
                        for b in (b for b, row in enumerate(rows) if not row.finished):
                            self._catch_up(b, drafted[b], lengths[b])
                            drafted[b] = lengths[b]
                    drafter = wanted
                while drafter is wanted and len(pending) <= lag:
                    out = self._launch(drafter, mode)
                    pending.append(drafter)
                ring, used = self._read(), pending.popleft()
                pacer.take(
                    used is self.drafter,
                    [r[0] for r, row in zip(ring, rows, strict=False) if not row.finished],
                )
                seconds = time.perf_counter() - started + (0.0 if lag else seconds)
                if observer is not None:
                    self._observe(observer, out)
                for b, row in enumerate(rows):
                    if row.finished:
                        continue
                    count, done, emitted, finite = ring[b][0], ring[b][1], ring[b][2::2], ring[b][3::2]
                    usable = [*finite, 0].index(0)  # then an error, unless a stop comes first
                    position = lengths[b] + usable
                    drafted[b] = lengths[b] if used is self.drafter else drafted[b]
                    lengths[b] += count
                    results[b].decode_seconds = seconds
                    chunk = row.push(emitted[: min(usable, count)])
                    if used is self.fallback:
                        results[b].plain_steps += [results[b].steps - 1] * bool(chunk.token_ids)
                    if row.finished and not done:
                        self._finish(b)
                    if row.finished or usable > 0:
                        yield chunk._replace(row=b)
                        self._check_owner(results)
                    if not row.finished and usable < count:
                        raise ArithmeticError(self._not_finite(position))
                    if done and not row.finished:
                        raise RuntimeError(f"sequence {b} stopped on the device alone; please report this.")
            for b, prompt in enumerate(prompts):
                text = prompt + results[b].token_ids
                self._cached[b] = text[: min(lengths[b], len(text))]
                self._drafted[b] = max(0, min(drafted[b], len(text) - 1))
        finally:
            for result in results:
                if result.stop_reason == "unfinished":
                    result.stop_reason = "interrupted"

    def _set_up(self, params: SamplingParams) -> None:
        """Write a request's settings into the static buffers; every sequence counts as finished until its prefill."""
        state, stop_ids = self.state, self.stop_ids(params)
        state.done.fill_(True)
        state.sampling.set(params)
        state.stop_ids.fill_(-1)
        state.stop_ids[: len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
        state.limit.fill_(params.max_new_tokens)
        state.seen.zero_()
        state.counts.zero_()

    def _prepare(self, mode: SamplingMode) -> None:
        """What the first request of a kind needs. All sequences are finished, so steps run here change nothing."""
        for drafter in (d for d in (self.drafter, self.fallback) if d is not None):
            started, key = time.perf_counter(), self._call(drafter, mode)[0]
            self._capture(drafter, mode)
            if self.compiled and key not in self.warm:  # a first run compiles; not on decoding's time
                self.runner.begin()
                self._launch(drafter, mode)
                self._read()
                self.warm.add(key)
                self.compile_seconds += time.perf_counter() - started
        if self.fallback is not None:
            if mode not in self.timings:
                self.timings[mode] = self._measure(mode)
            self.step_seconds = self.timings[mode]

    def _measure(self, mode: SamplingMode) -> tuple[float, float]:
        """Time plain and speculative steps in turn, as many at once as run ahead of the host anyway."""
        self.runner.begin()
        times: list[list[float]] = [[], []]
        for _ in range(4):
            for drafter, seconds in zip((self.fallback, self.drafter), times, strict=True):
                started = time.perf_counter()
                for _ in range(1 + self.lag):
                    self._launch(drafter, mode)
                for _ in range(1 + self.lag):
                    self._read()
                seconds.append((time.perf_counter() - started) / (1 + self.lag))
        return statistics.median(times[0][1:]), statistics.median(times[1][1:])

    def _catch_up(self, row: int, start: int, end: int) -> None:
        """Give the drafter the tokens start .. end - 1 that were decoded plainly. No host sync."""
        state, width = self.state, PREFILL_CHUNKS[0]
        level = torch.arange(width + 1, device=self.model.device)
        with self.backend.active():
            for at in range(start, end, width):
                tokens = state.tokens[row].index_select(0, (at + level).clamp(max=state.slots - 1))
                features = state.history[row].index_select(0, (at + level[:-1]) % HISTORY)
                self.drafter.prefill(row, tokens[None], features[None], torch.full_like(level[:1], at))

    def _capture(self, drafter: Drafter, mode: SamplingMode) -> None:
        with self.backend.active():
            self.runner.prepare(*self._call(drafter, mode))

    def _call(self, drafter: Drafter, mode: SamplingMode) -> tuple[tuple, Callable[[], StepOutput]]:
        """(key of its graph, the step itself)."""
        step = self._plain_step if drafter is self.fallback else self._step
        return (drafter.N, drafter.D, mode), lambda: step(self.model, drafter, self.state, mode)

    def _launch(self, drafter: Drafter, mode: SamplingMode) -> StepOutput:
        with self.backend.active():
            return self.runner.launch(*self._call(drafter, mode))

    def _read(self) -> list[list[int]]:
        return self.runner.read()

    def _observe(self, observer: Callable[[StepOutput], None], out: StepOutput) -> None:
        observer(out)

    def _finish(self, row: int) -> None:
        """The host found the row's end. Takes effect after the steps under way, which add rows that nobody reads."""
        self.state.done.select(0, row).fill_(True)

    @torch.inference_mode()
    def margin(
        self, row: int, text: Sequence[int], prompt: int, params: SamplingParams, a: int, b: int
    ) -> tuple[float, float]:
        """How far apart tokens a and b are as successors of `text` (whose first `prompt` ids are the prompt): the
        difference of their sampling keys z + T g, and how many units in the last place of the larger logit in the
        model's dtype that is. For judging whether a fork is a rounding tie."""
        self._cached, self._drafted = [[] for _ in self._cached], [0] * self.batch_size
        with self.backend.active():
            self.state.sampling.set(params)
            logits, noise = self._prompt_logits(row, list(text), params.mode)
            if params.mode.penalties:
                self._count(row, text, prompt)
                logits = self._penalised(row, logits)
            keys = logits[0, 0] if noise is None else (logits + self.state.sampling.temperature * noise)[0, 0]
        distance, largest = abs(float(keys[a] - keys[b])), float(logits[0, 0, [a, b]].abs().max())
        ulp = torch.finfo(self.model.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-9)))
        return distance, distance / ulp

    def _count(self, row: int, text: Sequence[int], prompt: int) -> None:
        """Set the penalty counters as after generating text[prompt:]."""
        state, device = self.state, self.model.device
        state.seen[row], state.counts[row] = False, 0
        state.seen[row, torch.tensor(text, device=device)] = True
        generated = torch.tensor(text[prompt:], dtype=torch.int64, device=device)
        state.counts[row].scatter_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def _penalised(self, row: int, logits: Tensor) -> Tensor:
        state = self.state
        empty = torch.zeros(1, 1, 1, dtype=torch.int64, device=logits.device)
        seen, counts = state.seen[row : row + 1], state.counts[row : row + 1]
        return sampling.apply_penalties(logits, seen, counts, empty, empty.bool(), state.sampling)

    def _check_owner(self, results: list[GenerationResult]) -> None:
        if self._owner is not results:
            raise RuntimeError(
                "another request started on this engine and replaced this stream's state; finish one stream "
                "before the next (several prompts at once: generate_batch)."
            )

    def _not_finite(self, position: int) -> str:
        low = self.model.dtype == torch.float16
        hint = "fp16 overflow? Try --dtype bfloat16 or float32." if low else "Are the weights damaged?"
        return f"logits became non-finite at token {position}. {hint}"

    def _prefill(self, row: int, prompt: list[int], mode, cached: list[int], drafted: int, result) -> int:
        """Run the prompt (less what the caches still hold) in fixed chunks; set up the row; returns token 1."""
        state, P = self.state, len(prompt)
        start = next((i for i, (x, y) in enumerate(zip(prompt, cached, strict=False)) if x != y), len(cached))
        start = min(start, P - 1)
        if self.drafter.D > 0:
            start = max(0, min(start - 1, drafted))  # draft row i holds token i + 1, which must agree too
        result.cached_tokens = start
        logits, noise = self._prompt_logits(row, prompt, mode, start)
        if mode.penalties:
            self._count(row, prompt, P)
            logits = self._penalised(row, logits)
        first = sampling.choose(logits, noise, state.sampling, mode)[0, 0]
        state.tokens[row, :P] = torch.tensor(prompt, device=first.device)
        state.tokens[row, P] = first
        state.n[row], state.root[row], state.count[row] = P, first, 1
        state.produced[row], state.done[row] = 1, False
        state.seen[row, first], state.counts[row, first] = True, 1
        return int(first)

    def _prompt_logits(self, row: int, text: list[int], mode, start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Fill the caches with text[start:]; logits [1, 1, V] after its last token and that position's noise. The last
        token's feature becomes the pending one."""
        state, P, device = self.state, len(text), self.model.device
        ids = torch.tensor([*text, 0], dtype=torch.int64)
        while start < P:
            width = next((w for w in PREFILL_CHUNKS if P - start <= w), PREFILL_CHUNKS[-1])
            take = min(width, P - start)
            chunk, nexts = torch.zeros(2, 1, width, dtype=torch.int64)
            chunk[0, :take], nexts[0, :take] = ids[start : start + take], ids[start + 1 : start + take + 1]
            where = torch.tensor([start], device=device)
            kv, tokens = state.kv[:, :, row : row + 1], (chunk.to(device), nexts.to(device))
            hidden_states, features = self._forward(self.model, self.drafter, kv, row, *tokens, where)
            start += take
        state.features[row, 0] = features[0, take - 1]
        logits = self.model.logits(hidden_states[:, take - 1 : take])
        if not bool(sampling.finite(logits).all()):
            raise ArithmeticError(self._not_finite(P - 1))
        if not mode.sample:
            return logits, None
        vocabulary = torch.arange(logits.shape[-1], device=device)
        position = torch.tensor([[P]], device=device)
        return logits, sampling.gumbel_noise(state.sampling.seed[row : row + 1], position, vocabulary)


def _prefill_chunk(model, drafter, kv: Tensor, row: int, tokens: Tensor, nexts: Tensor, start: Tensor):
    """A chunk of known tokens [1, T] from position start [1] -> hidden_states [1, T, H], features [1, T, F]."""
    T = tokens.shape[1]
    depth = torch.arange(T, device=tokens.device)[None]
    nodes = model.nodes(start, depth, chain_ancestors(1, T, tokens.device), kv.shape[4])
    hidden_states, taps = model(tokens, nodes, kv, drafter.taps)
    features = hidden_states if taps is None else taps
    drafter.prefill(row, torch.cat((tokens, nexts[:, -1:]), 1), features, start)
    return hidden_states, features
