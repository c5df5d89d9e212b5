"""TODO."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

RING = 8  # steps whose output the device keeps: more than may run ahead


WARM_UP = 3  # steps before a capture: kernels compile, workspaces are allocated outside the graph


class Runner:
    """Launches steps and hands their output over through a device ring, without waiting for the steps.

    The i-th step since `begin` writes row i mod R of `ring` int64 [R, B, W] and adds one to `counter` int64 [1] itself.
    After each step the whole ring is copied to (pinned) host memory, so a row stays there, unchanged, for R - 1 further
    steps; `read` waits for its own step alone. On a CPU the same code runs without events.
    """

    def __init__(self, ring: Tensor, counter: Tensor, cuda: Any = None, capture: bool = False):
        """cuda: torch.cuda for tensors on a GPU (or what a test puts in its place). capture: replay CUDA graphs."""
        self.ring, self.counter, self.cuda, self.capture = ring, counter, cuda, capture
        self.host = torch.zeros(ring.shape, dtype=ring.dtype, pin_memory=cuda is torch.cuda)
        self.events = [cuda.Event() for _ in range(len(ring))] if cuda else []
        self.graphs: dict[Hashable, tuple[Any, Any]] = {}
        self.stream = cuda.Stream() if cuda and capture else None
        self.pool = cuda.graph_pool_handle() if cuda and capture else None
        self.issued = self.taken = self.replays = 0

    def begin(self) -> None:
        """Forget the steps issued so far (those still under way finish before any later one). No host sync."""
        self.counter.zero_()
        self.issued = self.taken = self.replays = 0

    def launch(self, key: Hashable, step: Callable[[], Any]) -> Any:
        """Run `step`, or replay the graph captured under `key`; returns the step's own output. No host sync."""
        if self.issued - self.taken >= len(self.ring):
            raise RuntimeError(f"{len(self.ring)} steps are unread; the ring holds no more.")
        graph, out = self.graphs.get(key, (None, None))
        if graph is None:
            out = step()
        else:
            graph.replay()
            self.replays += 1
        self.host.copy_(self.ring, non_blocking=True)
        if self.events:
            self.events[self.issued % len(self.ring)].record()
        self.issued += 1
        return out

    def read(self) -> list[list[int]]:
        """Ring row [B][W] of the oldest unread step. Waits for that step, not for those launched after it."""
        row = self.taken % len(self.ring)
        if self.events:
            self.events[row].synchronize()
        self.taken += 1
        return self.host[row].tolist()

    def prepare(self, key: Hashable, step: Callable[[], Any]) -> None:
        """Capture `step` as the graph of `key`, unless there is one. The state must be such that steps change nothing
        that counts (all sequences finished): warm-up runs it. RuntimeError if it cannot be captured; from then on steps
        run eagerly."""
        if not self.capture or key in self.graphs:
            return
        cuda, current = self.cuda, self.cuda.current_stream()
        graph = cuda.CUDAGraph()
        try:
            self.stream.wait_stream(current)
            try:
                with cuda.stream(self.stream):  # the capture's own stream: workspaces belong to a stream
                    for _ in range(WARM_UP):
                        step()
            finally:
                current.wait_stream(self.stream)
            with cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                out = step()
        except Exception as error:
            self.capture = False
            raise RuntimeError(
                f"the step could not be captured as a CUDA graph ({type(error).__name__}: {error}); "
                "the next request on this engine runs its steps one kernel at a time."
            ) from error
        finally:
            cuda.set_stream(current)  # a capture that fails may leave its own stream current
        self.graphs[key] = graph, out


class Pacer:
    """Decides within one request whether steps speculate: not while tau stays under break-even.

    It looks at the last WINDOW steps. Once plain, it lets PLAIN tokens pass, then has PROBE steps speculate to decide.
    """

    WINDOW, PLAIN, PROBE = 16, 64, 8

    def __init__(self, break_even: float):
        self.break_even, self.speculating = break_even, True
        self.counts: list[float] = []
        self.needed, self.plain = self.WINDOW, 0

    def take(self, speculative: bool, counts: Sequence[int]) -> None:
        """Learn what a step emitted for each unfinished sequence. Steps launched before the last change of mind are
        none of either phase."""
        if speculative != self.speculating:
            return
        if not speculative:
            self.plain += 1
            if self.plain >= self.PLAIN:
                self.speculating, self.counts, self.needed = True, [], self.PROBE
            return
        self.counts = [*self.counts[1 - self.WINDOW :], statistics.fmean(counts)]
        if len(self.counts) >= self.needed:
            self.needed = self.WINDOW
            if statistics.fmean(self.counts) < self.break_even:
                self.speculating, self.plain = False, 0
