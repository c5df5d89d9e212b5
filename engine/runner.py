"""Running steps ahead of the host: the ring that carries their output, CUDA graphs, and when speculation pays.

This file knows neither models nor text. A step is a function without arguments that works on static buffers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROWS = 1.02  # times as long as a short one is a step behind a long text at least, if the difference is no accident
WARM_UP = 3  # runs before a capture, so that kernels are compiled and workspaces allocated outside the graph


def capture_graph(
    call: Callable[[], Any], cuda: Any = torch.cuda, stream: Any = None, pool: Any = None, warm_up: int = WARM_UP
) -> tuple[Any, Any]:
    """Capture `call` as a CUDA graph. Returns the graph and the output that every replay writes again.

    The warm-up and the capture use the same side stream, because workspaces belong to a stream. `cuda` is torch.cuda, or
    what a test puts in its place.
    """
    current = cuda.current_stream()
    stream = stream or cuda.Stream()
    graph = cuda.CUDAGraph()
    try:
        stream.wait_stream(current)
        try:
            with cuda.stream(stream):
                for _ in range(warm_up):
                    call()
        finally:
            current.wait_stream(stream)
        with cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = call()
    finally:
        cuda.set_stream(current)  # a capture that fails may leave its own stream current
    return graph, output


class Runner:
    """Launches steps and hands over their output through a ring on the device, without waiting for the steps.

    The i-th step since `begin` writes row i mod R of `ring` int64 [R, B, W] and adds one to `counter` int64 [1] itself.
    After every step the whole ring is copied to pinned host memory, where a row stays unchanged for R - 1 further steps.
    `read` waits only for its own step. On a CPU the same code runs without events.
    """

    def __init__(self, ring: Tensor, counter: Tensor, cuda: Any = None, capture: bool = False):
        """cuda: torch.cuda for tensors on a GPU (or what a test puts in its place). capture: replay CUDA graphs."""
        self.ring = ring
        self.counter = counter
        self.cuda = cuda
        self.capturing = capture
        self.host = torch.zeros(ring.shape, dtype=ring.dtype, pin_memory=cuda is torch.cuda)
        self.events = [cuda.Event() for _ in range(len(ring))] if cuda else []
        self.graphs: dict[Hashable, tuple[Any, Any]] = {}
        self.stream = cuda.Stream() if cuda and capture else None
        self.pool = cuda.graph_pool_handle() if cuda and capture else None
        self.issued = self.taken = self.replays = 0

    def begin(self) -> None:
        """Forget the steps issued so far. Those under way finish before any later one. No host sync."""
        self.counter.zero_()
        self.issued = self.taken = self.replays = 0

    def launch(self, key: Hashable, step: Callable[[], Any]) -> Any:
        """Run `step`, or replay the graph captured under `key`. Returns the step's own output. No host sync."""
        if self.issued - self.taken >= len(self.ring):
            raise RuntimeError(f"{len(self.ring)} steps are unread; the ring holds no more.")
        out = self.run(key, step)
        self.host.copy_(self.ring, non_blocking=True)
        if self.events:
            self.events[self.issued % len(self.ring)].record()
        self.issued += 1
        return out

    def run(self, key: Hashable, part: Callable[[], Any]) -> Any:
        """Run a part of a step that fills no ring row, or replay its graph. Returns its own output. No host sync."""
        graph, out = self.graphs.get(key, (None, None))
        if graph is None:
            return part()
        graph.replay()
        self.replays += 1
        return out

    def read(self) -> list[list[int]]:
        """Ring row [B][W] of the oldest unread step. Waits for that step, not for those launched after it."""
        row = self.taken % len(self.ring)
        if self.events:
            self.events[row].synchronize()
        self.taken += 1
        return self.host[row].tolist()

    def capture(self, key: Hashable, step: Callable[[], Any]) -> None:
        """Capture `step` as the graph of `key`, unless there is one or graphs are not wanted.

        Call it while all sequences are finished, because the warm-up runs the step. Raises RuntimeError if the step
        cannot be captured; from then on steps run one kernel at a time.
        """
        if not self.capturing or key in self.graphs:
            return
        try:
            self.graphs[key] = capture_graph(step, self.cuda, self.stream, self.pool)
        except Exception as error:
            self.capturing = False
            what = f"the step could not be captured as a CUDA graph ({type(error).__name__}: {error})"
            raise RuntimeError(f"{what}; the next request runs its steps one kernel at a time.") from error


class Times(NamedTuple):
    """Seconds of some kinds of steps, measured behind a text of `behind` tokens. A text of n tokens makes them longer in
    proportion to 1 + growth n, because every row attends to all of it."""

    seconds: tuple[float, ...]
    behind: int = 0
    growth: tuple[float, ...] = (0.0, 0.0, 0.0)

    def at(self, length: int) -> tuple[float, ...]:
        """All of them behind a text of `length` tokens."""
        pairs = zip(self.seconds, self.growth, strict=False)
        return tuple(s * (1 + g * length) / (1 + g * self.behind) for s, g in pairs)

    def grown(self, far: tuple[float, ...], length: int) -> Times:
        """The same with the growth that follows from the seconds behind `length` tokens."""
        growth = []
        for near, long in zip(self.seconds, far, strict=True):
            slope = (long - near) / (length - self.behind) if long > GROWS * near else 0.0
            growth.append(slope / max(near - slope * self.behind, near / 20))
        return self._replace(growth=tuple(growth))


class Pacer:
    """Decides whether to draft: not where drafting loses against plain steps.

    It adds up what drafting loses, in plain steps (Page's cumulative sum). Gains make up for losses, and up to SAVED of
    them are saved up for later ones: steps vary so much that a head that gains a fifth would be given up every few texts
    otherwise. A loss of LOSS ends drafting. While decoding is plain it lets PLAIN steps pass, and then tries again: until
    drafting has lost TRY, or won as much and stays. Each time that a try fails, the next one waits twice as long.

    What a plain step takes is known from the last of CHECK of them, which follow each other after LOOK seconds of
    drafting, at the beginning of a text after as long a rest, and wherever decoding becomes plain. So neither a machine
    that has become faster or slower decides, nor one that was disturbed while the engine timed its steps.
    """

    LOSS, TRY, SAVED = 5.0, 3.0, 20.0  # plain steps
    PLAIN, LONGEST = 64, 512  # plain steps between two tries
    RECENT = 16  # drafted steps whose times say which ones are hiccups
    CHECK = 16  # plain steps that say how fast the machine is
    LAST = 4  # of these, which count, because behind drafts the first ones are slower
    LOOK = 3.0  # seconds

    def __init__(self, break_even: float, plain_seconds: float = 0.0):
        """plain_seconds: of a plain step, where speculative ones differ too much to be measured before: then their own
        times say what they cost. Otherwise all of them cost `break_even` plain steps."""
        self.break_even = break_even
        self.plain_seconds = plain_seconds
        self.speculating = True
        self.loss = self.gain = 0.0
        self.trying = False
        self.seconds: list[float] = []  # of recent steps of the present kind
        self.counts: list[float] = []  # the tokens that recent drafted steps emitted
        self.drafted = 0.0  # tokens per second of the last drafted steps
        self.drift = 1.0  # what a plain step takes, as a share of `plain_seconds`
        self.since = math.inf  # seconds since that was looked at; the steps timed at the start ran behind slower ones
        self.looking = False  # whether plain steps run for that alone
        self.plain = 0
        self.pause = self.PLAIN

    def for_another_text(self, rest: float = 0.0) -> Pacer:
        """What one text is like says little of the next one: losses are forgotten, and gains are kept. But where drafting
        did not pay, it goes on plainly for the rest of the pause, and then with a try, because each try costs as much as
        a short answer may lose. rest: seconds since the last step."""
        pacer = Pacer(self.break_even, self.plain_seconds)
        pacer.drift, pacer.since = self.drift, self.since + rest
        failed = not (self.speculating or self.looking)
        pacer.loss = 0.0 if failed else min(0.0, self.loss)
        pacer.looking = not failed and self.plain_seconds > 0 and pacer.since > self.LOOK
        pacer.speculating = not (failed or pacer.looking)
        if failed or self.trying:
            pacer.trying, pacer.pause, pacer.plain = True, self.pause, self.plain if failed else 0
        return pacer

    def take(self, speculative: bool, counts: Sequence[int], seconds: float) -> None:
        """Learn how many tokens a step emitted for each unfinished sequence, and how long it took.

        Steps that were launched before the last change of mind belong to neither phase and are ignored.
        """
        if speculative != self.speculating:
            return
        if not speculative:
            self._take_plain(seconds)
            return
        cost, count = self.break_even, statistics.fmean(counts)
        if self.plain_seconds:
            self.seconds = [*self.seconds[1 - self.RECENT :], seconds]
            self.counts = [*self.counts[1 - self.RECENT :], count]
            cost = min(seconds, 2 * statistics.median(self.seconds)) / (self.plain_seconds * self.drift)
            self.since += seconds
        won = (count - cost) * math.sqrt(len(counts))  # the mean of several varies less
        self.loss = max(-self.SAVED, self.loss - won)
        self.gain += won
        self.trying = self.trying and self.gain < self.TRY
        lost = self.loss >= (self.TRY if self.trying else self.LOSS)
        if lost:
            self.pause = min(2 * self.pause, self.LONGEST) if self.trying else self.PLAIN
        self.looking = not lost and self.plain_seconds > 0 and self.since > self.LOOK
        if lost or self.looking:
            self.speculating = False
            self.plain = 0
            self.drafted = statistics.fmean(self.counts) / statistics.median(self.seconds) if self.seconds else 0.0
            self.seconds = []

    def _take_plain(self, seconds: float) -> None:
        self.plain += 1
        resumes = self.plain >= self.pause
        if self.plain_seconds and len(self.seconds) < self.CHECK:
            self.seconds = [*self.seconds, seconds]  # a copy of a pacer shares the list
            if len(self.seconds) == self.CHECK:
                now = statistics.median(self.seconds[-self.LAST :])
                self.drift, self.since = now / self.plain_seconds, 0.0
                resumes = resumes or self.looking or self.drafted * now > 1  # the machine had become slower
        if resumes:
            self.speculating = True
            if not self.looking:
                self.trying = True
                self.loss = self.gain = 0.0
            self.looking = False
            self.seconds, self.counts = [], []
