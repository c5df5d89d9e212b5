"""One request from its prompts to its last chunk: what the host knows of every row, and the steps under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from drafters.base import Drafter
from runtime.grammar import Constraint
from runtime.prefill import not_finite
from runtime.prompt_cache import common_length
from runtime.results import Chunk, SequenceOutput
from runtime.runner import Pacer
from runtime.stepping import Stepper
from sampling import Logprobs, SamplingMode, SamplingParams
from step import StepOutput


class Request:
    """The host's state of one request: the progress of every row, and the steps that are running."""

    def __init__(
        self,
        engine: Stepper,
        prompts: list[list[int]],
        params: list[SamplingParams],
        outputs: list[SequenceOutput],
        constraints: list[Constraint | None],
    ):
        self.engine = engine
        self.prompts = prompts
        self.params = params
        self.constraints = constraints
        self.mode = SamplingMode.covering(row.mode for row in params)
        self.results = [output.result for output in outputs]
        self.rows = outputs
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
            self.engine.finish(b)
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
        ring = engine.read()
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
            output = engine.launch(self.drafter, self.mode, self.constraints)
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
