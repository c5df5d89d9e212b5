"""Continuous batching: which requests have a row of the engine, and what runs next.

A request waits until a row is free, and the cache has room for its prompt and answer. Its prompt is read in parts,
between the steps of the others, and then its row joins the steps. It leaves when its text ends, and the others go on.
What a row holds stays there while nobody else needs the room, so that a later request that begins alike need not read it
again. The tokens of a request do not depend on the others: a row's bits do not, its noise has its own seed, and a tree
only decides how many tokens a step emits.

The rows that decode are the first ones of the engine, and a step runs those alone. So a row that becomes free among them
changes places with the last one.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch

from decoding.params import SamplingMode
from decoding.sampling import Logprobs
from decoding.step import RING, StepOutput
from engine.grammar_text import GrammarError
from engine.pool import Pool
from engine.prefill import CHUNKS, not_finite
from engine.prompt_cache import WORTHWHILE, PromptCache, Saved, Text, cache_rows, common_length, kept_ids
from engine.request import Request
from engine.runner import Pacer
from engine.stepping import Stepper, View
from tree import TreeTables
from weights.lora import choice_of

READ = CHUNKS[-1]  # tokens of prompts that are read between two steps
BEHIND = 100  # tokens of plain steps after which a drafter catches up, whether or not it drafts; fewer than HISTORY


class Launched(NamedTuple):
    """A step under way."""

    rows: list[Request | None]
    speculative: bool
    output: StepOutput


Reading = Generator[None, None, tuple[int, Logprobs | None]]


class Batch:
    """The requests of an engine. All methods but `submit` come from the thread that has the engine at the moment."""

    def __init__(self, engine: Stepper):
        self.engine = engine
        self.rows: list[Request | None] = [None] * engine.batch_size
        self.texts = [Text() for _ in self.rows]
        self.choice = choice_of(engine.model)  # among several adapters
        self.pool = Pool(engine.state)
        self.prompt_cache = PromptCache()  # keeps texts that no row holds any more; this one keeps none
        self.waiting: deque[Request] = deque()
        self._reading: Request | None = None  # whose prompt is being read
        self._parts: Reading  # which reads it
        self._pending: deque[Launched] = deque()
        self._pacers: dict[int, Pacer] = {}  # by the number of rows
        self._paced = 0  # rows of the last one used
        self._speculating = True  # whether the steps under way draft
        self._kind: tuple[SamplingMode, int] | None = None  # of the steps under way: settings and rows
        self.parts = 0  # that have run; each is at most one step and one part of a prompt
        self._ended = 0  # requests so far
        self._begun = 0.0  # when the oldest step under way began, or the one before it ended

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting) or any(self.rows)

    def submit(self, request: Request) -> None:
        """Queue a request. Any thread may call this."""
        self.waiting.append(request)

    def iterate(self) -> None:
        """End the requests that shall end, and go on."""
        self.settle()
        self.go_on()

    @torch.inference_mode()
    def go_on(self) -> None:
        """Go on by one part: at most one step of all rows that decode, and one part of a prompt."""
        try:
            decoding = bool(self._live())
            self._read_prompts()
            if decoding:  # else the first tokens go out at once
                self._decode()
            self.parts += 1
        except Exception as error:  # every reader is told; the engine can go on with other requests
            self._abandon(error)
        except BaseException:  # Ctrl-C, at any line
            self._abandon(None)
            raise

    def settle(self) -> None:
        """End the requests that shall end. What they have decoded stays in the caches."""
        for request in (*self.rows, *self.waiting):
            if request and request.stopping:
                self._end(request)

    def drain(self) -> None:
        """Hand out what the steps under way emit, so that none is left, and steps of another kind may follow."""
        while self._pending:
            self._hand_out()
        self._kind = None

    def forget(self) -> None:
        """Forget what the caches hold of texts that have ended."""
        self.texts = [Text() for _ in self.rows]

    @property
    def full(self) -> bool:
        """Whether a request of a whole context would have to wait."""
        return None not in self.rows or not self._fits(self.engine.ctx)

    def free_row(self) -> int:
        """A row without a request or a text, with room for a whole context. Iterates until there is one."""
        while self.full:
            self.iterate()
        row = self.rows.index(None)
        self.texts[row] = Text()
        self._make_room(row, self.engine.ctx, [])
        return row

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """A request ends: with its text, with an error, or because its reader left."""
        if request.ended:
            return
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self._ended += 1
            if error is None and self.engine.fallback is not None:  # so that the next turn need not run them again
                self._catch_up(request)
            ids, drafted = request.cached() if error is None else ([], 0)
            state, row = self.engine.state, request.row
            state.done.select(0, row).fill_(True)  # steps under way still add to it, for nobody
            at = int(state.n[row] - state.memory.pending[row]) if state.memory else 0  # waits for these steps
            self.texts[row] = Text(ids, drafted, self._ended, at, self.engine.prefill.snapshots[row])
            self.rows[row] = None
        if request is self._reading:
            self._reading = None
        if error is not None:
            self.prompt_cache.distrust(request.restored)
        request.end(error)
        self.prompt_cache.shrink()

    def _abandon(self, error: Exception | None) -> None:
        """End all requests that have a row, after a failure that may have left the buffers in any state. Where none has
        one, the first that waits has failed."""
        failed = [request for request in self.rows if request is not None]
        if not failed and self.waiting:
            failed = [self.waiting.popleft()]
        self.rows = [None] * len(self.rows)
        self._reading = None
        self.forget()
        for request in failed:
            self.prompt_cache.distrust(request.restored)
            request.end(error)
        self.engine.state.done.fill_(True)
        self.engine.state.lay_out()
        self._begin()

    # ---- prompts ---------------------------------------------------------------------------------------------

    def _read_prompts(self) -> None:
        """Read the next part of a prompt, or several prompts that are short."""
        read = 0
        while read < READ and (self._reading or self._admit()):
            request, started = self._reading, time.perf_counter()
            self.choose([request])
            try:
                with self.engine.backend.active():
                    next(self._parts)
            except StopIteration as end:
                self._reading = None
                read += len(request.prompt) - request.result.cached_tokens
                self._take(request, request.begin, *end.value)
            except (ArithmeticError, GrammarError) as error:
                self._end(request, error)
            request.result.prefill_seconds += time.perf_counter() - started
            if self._reading:
                return

    def choose(self, rows: Sequence[Request | None]) -> None:
        """Tell the model which adapter each row of the next forwards has."""
        if self.choice is not None:
            self.choice.set([request.adapter if request else 0 for request in rows])

    def _take(self, request: Request, take: Callable[..., int | None], *decoded: Any) -> None:
        """Let a request take what was decoded. Where it cannot be used, that ends this request alone."""
        try:
            position = take(*decoded)
        except GrammarError as error:
            return self._end(request, error)
        if position is not None:
            self._end(request, not_finite(self.engine.model, self.engine.state, position))
        elif request.finished:
            self._end(request)

    def _admit(self) -> bool:
        """Give the first request that waits a row. False if there is none, or no free row, or no room in the cache."""
        if not self.waiting or None not in self.rows:
            return False
        request = self.waiting[0]
        tokens = len(request.prompt) + request.params.max_new_tokens
        if not self._fits(tokens):
            return False
        self._close_gaps()
        if not any(self.rows):
            self._begin()
        engine, state = self.engine, self.engine.state
        row = self.rows.index(None)
        kept = kept_ids(request.prompt, request.adapter) if request.scores is None else []
        request.restored = self._arrange(row, kept, tokens)
        text = self.texts[row]
        start = self._take_up(row, text, kept)
        self.texts[row] = Text()  # nothing is valid until the request has ended well
        self.rows[row], request.row, request.began = request, row, time.perf_counter()
        self.waiting.popleft()
        request.result.cached_tokens = start
        engine.write_settings(row, request.params, request.stop_ids, len(request.prompt))
        # Until its prompt has been read, steps may run this row, too. What they write lies right behind the prompt, where
        # it takes the place of nothing that a ring needs.
        state.n[row] = min(tokens - 1, len(request.prompt) + 1)
        state.count[row] = 1
        allowed = request.constraint.allowed() if request.constraint else None
        how = request.mode, start, allowed, self._alone, request.scores
        self._parts = engine.prefill.read(row, request.prompt, *how)
        self._reading = request
        return True

    def _take_up(self, row: int, text: Text, prompt: list[int]) -> int:
        """Prepare a row that holds `text` to go on from the token of a prompt that is returned."""
        engine, memory = self.engine, self.engine.state.memory
        start, snapshot = text.way_on(prompt, engine.drafter)
        engine.prefill.snapshots[row] = [snapshot for snapshot in text.snapshots if snapshot.end <= start]
        if snapshot is not None:
            snapshot.restore(engine.state, engine.drafter, row, start)
        elif memory is not None and start:
            memory.pending[row] = start - text.at
        if snapshot is None:
            engine.prefill.add_snapshot(row, text.at, start, text.drafted)  # of the end of an answer
        return start

    def _alone(self) -> bool:
        """Whether one row has a request, and no other one waits for a step."""
        return self.rows.count(None) == len(self.rows) - 1

    def _begin(self) -> None:
        """Start afresh, because nothing is decoded at the moment."""
        self._pending.clear()  # nobody reads what they emit
        self.engine.runner.begin()
        if 1 in self._pacers:
            self._pacers[1] = self._pacers[1].for_another_text(time.perf_counter() - self._begun)
        self._paced = 0
        self._speculating = True
        self._kind = None

    def _fits(self, tokens: int) -> bool:
        """Whether the cache has room for a request of so many tokens beside those that run."""
        free = [b for b, request in enumerate(self.rows) if request is None]
        return self._places(tokens) <= self.pool.room(free)

    def _places(self, tokens: int) -> int:
        """Places that a row needs for so many tokens, a tree behind them, and one trash row."""
        return tokens + self.engine.drafter.N + 1

    def _make_room(self, row: int, tokens: int, prompt: list[int]) -> None:
        """Give the free row `row` places for so many tokens, which are there (`_fits`). The texts of other free rows go
        where they stand in the way, the oldest first. prompt: what the row will hold."""
        engine, pool, needed = self.engine, self.pool, self._places(tokens)
        if not engine.state.scarce:
            return
        others = [b for b, request in enumerate(self.rows) if request is None and b != row]
        for b in others:
            pool.cut(b, len(self.texts[b].ids))
        for b in sorted(others, key=lambda b: self.texts[b].used):
            if pool.room([row]) >= needed:
                break
            self.prompt_cache.save(engine.state, engine.drafter, b, self.texts[b], [])
            self.texts[b] = Text()
            pool.cut(b, 0)
        text = self.texts[row]
        self.prompt_cache.save(engine.state, engine.drafter, row, text, prompt)
        text.ids = text.ids[:tokens]
        text.drafted = engine.drafter.rows_of_part(text.drafted, len(text.ids))
        pool.extend(row, needed)
        engine.state.write_spans()

    def _arrange(self, row: int, prompt: list[int], tokens: int) -> Saved | None:
        """Have the free row `row` hold as much of a prompt as any row or kept text has, and lose no text that is newer
        than another one. Returns the kept text that it got, if it got one. tokens: that the row needs room for."""
        drafter, state = self.engine.drafter, self.engine.state
        held = [
            Text(*request.cached(), 0, request.length + 1 if state.memory else 0, self.engine.prefill.snapshots[b])
            if request
            else text
            for b, (request, text) in enumerate(zip(self.rows, self.texts, strict=True))
        ]
        gains = [text.usable(prompt, drafter) for text in held]
        free = [b for b, request in enumerate(self.rows) if request is None]
        best = max(range(len(gains)), key=lambda b: (gains[b], self.rows[b] is None))
        own = max(free, key=lambda b: gains[b])
        if gains[own] < min(WORTHWHILE, max(1, len(self.texts[own].ids) // 2)):  # it may be worth more to others
            own = min(free, key=lambda b: (len(self.texts[b].ids) > 0, self.texts[b].used))
        self._swap(row, own)
        self._make_room(row, tokens, prompt)
        text = self.texts[row]
        restored = self.prompt_cache.exchange(state, drafter, row, text, prompt)
        if self.rows[best] is None or gains[best] < text.usable(prompt, drafter) + WORTHWHILE:
            return restored
        common = common_length(held[best].ids, prompt)
        drafted = drafter.rows_of_part(held[best].drafted, common)
        places, parts = (cache_rows(state, drafter, b, common, drafted) for b in (row, best))
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        text.ids, text.drafted = prompt[:common], drafted
        text.at, text.snapshots = held[best].at, held[best].snapshots
        return None

    def _close_gaps(self) -> None:
        """Have the rows that decode come first. Where each row has a tree of its own, they stay where they are."""
        tree = self.engine.drafter.tree
        while not (isinstance(tree, TreeTables) and tree.mixed):
            free = self.rows.index(None) if None in self.rows else len(self.rows)
            last = max((request.row for request in self._live()), default=0)
            if last <= free:
                return
            self._swap(free, last)

    def _live(self) -> list[Request]:
        """The requests that decode."""
        return [request for request in self.rows if request and request is not self._reading]

    def _swap(self, a: int, b: int) -> None:
        """Exchange two rows. Those under way go on with what they have."""
        if a == b:
            return
        engine = self.engine
        # what the host does not know yet of steps under way
        ahead = RING * (engine.drafter.D + 1) + 1
        length = max(r.length if r else len(text.ids) for r, text in ((self.rows[i], self.texts[i]) for i in (a, b)))
        engine.state.swap(a, b)
        engine.drafter.swap(a, b, length + ahead)
        for held in (self.rows, self.texts, engine.prefill.snapshots):
            held[a], held[b] = held[b], held[a]
        for i in (a, b):
            if (request := self.rows[i]) is not None:
                request.row = i

    # ---- steps -----------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Launch steps of all rows that decode, and hand out what the oldest one emitted."""
        self._close_gaps()
        live = self._live()
        if not live:
            return
        view = self.engine.view(max(request.row for request in live) + 1)
        mode = SamplingMode.covering(request.mode for request in live)
        if self._kind != (mode, view.rows):
            self.drain()
            if any(request.ended for request in live):  # the next part sees which are left
                return
            self.engine.first_runs(mode, view)
            self._kind = mode, view.rows
        self.choose(self.rows)
        self._launch(view, mode, live)
        self._hand_out()

    def _pacer(self, view: View, mode: SamplingMode) -> Pacer:
        if view.rows not in self._pacers:  # where drafting does not pay for few rows, it does not for more
            fewer = self._pacers.get(self._paced) if self._paced < view.rows else None
            self._pacers[view.rows] = copy.copy(fewer or Pacer(0.0))
        self._paced = view.rows
        pacer, seconds = self._pacers[view.rows], self.engine.step_seconds
        pacer.break_even = self.engine.break_even_tau
        pacer.plain_seconds = seconds[0] if seconds and view.drafter.prunes(mode) else 0.0
        return pacer

    def _launch(self, view: View, mode: SamplingMode, live: list[Request]) -> None:
        """Launch as many steps as may run ahead of the host."""
        engine = self.engine
        started = time.perf_counter()
        engine.follow(view, max(request.length for request in live))
        lag = 0 if engine.observers or mode.logprobs or mode.grammar else engine.lag
        if not self._pending or not lag:
            self._begun = started
        speculating = self._pacer(view, mode).speculating
        if not speculating or not self._pending:  # plain steps under way end before drafting comes back
            returns = speculating and not self._speculating
            for request in live:
                if returns or request.length - request.drafted > BEHIND:
                    self._catch_up(request)
            self._speculating = speculating
        drafter = view.drafter if self._speculating else engine.fallback
        rows = [request if request in live else None for request in self.rows[: view.rows]]
        constraints = [request and request.constraint for request in rows]
        while self._speculating is speculating and len(self._pending) <= lag:
            output = engine.launch(drafter, mode, view, constraints)
            self._pending.append(Launched(rows, self._speculating, output))

    def _catch_up(self, request: Request) -> None:
        """Give the drafter the tokens of a request that were decoded plainly."""
        with torch.inference_mode(), self.engine.backend.active():
            self.engine.prefill.catch_up(request.row, request.drafted, request.length)
        request.drafted = max(request.drafted, request.length)

    def _hand_out(self) -> None:
        """Read the oldest step under way. The seconds are those of the steps alone, or where steps run ahead of the host,
        the time that passed."""
        engine = self.engine
        ring = engine.runner.read()
        launched = self._pending.popleft()
        now = time.perf_counter()
        seconds, self._begun = now - self._begun, now
        there = [(b, request) for b, request in enumerate(launched.rows) if request and not request.ended]
        pacer = self._pacers.get(len(launched.rows))
        if pacer is not None and there:
            pacer.take(launched.speculative, [ring[b][0] for b, _ in there], seconds)
        if not self._pending:  # nothing has overwritten the output
            results = [request and request.result for request in launched.rows]
            for observer in list(engine.observers):
                observer.step(launched.output, results)
        nodes = launched.output.draft.tokens.shape[1] - 1
        for b, request in there:
            request.result.decode_seconds += seconds
            logprobs = launched.output.logprobs
            self._take(request, request.take, ring[b], nodes, launched.speculative, logprobs and logprobs.row(b))
