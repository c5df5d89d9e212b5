"""Who has an engine: requests of many threads and asyncio tasks run one after another, in order.

A caller is an asyncio task, or else a thread. A request asks for its lease at its first step, and callers wait in the
order in which they asked. A caller who asks again while its own last request is unfinished does not wait for itself:
the new request takes the engine over, and the old one can do no further step. So no caller can lock itself out.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from support.machine import release_threads

OVERTAKEN = (
    "another request started on this engine and replaced this stream's state; finish one stream before the next "
    "(several prompts at once: generate_batch)."
)
BLOCKED = (
    "this request would wait for another one and block the event loop of this thread; use engine.agenerate here, or "
    "close the other stream first."
)


def _this_caller() -> Any:
    """The asyncio task that runs here, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return task or threading.current_thread()


class Left(Exception):
    """Ends the work on a prompt that nobody waits for any more."""


class LeaseQueue:
    """The queue of an engine: one request has the lease, and the others wait in order."""

    def __init__(self) -> None:
        # Reentrant, because collecting garbage may end an abandoned stream at any line, also while the lock is held.
        self._lock = threading.RLock()
        self._waiting: deque[Lease] = deque()
        self._current: Lease | None = None
        self._worker: ThreadPoolExecutor | None = None

    def worker(self) -> ThreadPoolExecutor:
        """The one thread in which the steps of asyncio's requests run. It starts with the first of them."""
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "eaglet")
            return self._worker

    def _advance(self) -> None:
        while self._current is None and self._waiting:
            lease = self._waiting.popleft()
            if lease.granted.set_running_or_notify_cancel():  # False: its caller gave up
                self._current = lease
                lease.granted.set_result(None)


class Lease:
    """One request's right to use the engine, or its place in the queue. `with lease:` waits for it and gives it back."""

    def __init__(self, queue: LeaseQueue):
        self._queue = queue
        self.granted: Future[None] = Future()
        self.ending = False  # whether the request shall end soon
        self._asked = False
        self._task = False  # whether an asyncio task asked; its steps run in another thread
        # Weak, because a finished task or thread must not keep a stream alive that it abandoned.
        self._caller: weakref.ref[Any] = weakref.ref(self)

    @property
    def held(self) -> bool:
        """Whether this request has the lease now."""
        return self._queue._current is self

    def ask(self, task: Any = None) -> Future[None]:
        """Queue up, if that has not happened yet. the future is done when this request has the engine.

        Args:
            task: the asyncio task that asks; default: the caller is found out.
        """
        queue, caller = self._queue, task or _this_caller()
        with queue._lock:
            self._task = task is not None
            current, again, self._caller = queue._current, self._asked, weakref.ref(caller)
            if again:
                return self.granted
            self._asked = True
            # A step of a cancelled task may still run in the worker, and only what runs there, too, comes after it.
            own = current is not None and current._caller() is caller and (self._task or not current._task)
            if not own:
                queue._waiting.append(self)
                queue._advance()
            elif self.granted.set_running_or_notify_cancel():
                queue._current = self
                self.granted.set_result(None)
            return self.granted

    def wait(self) -> bool:
        """Wait for the lease. False if the request was closed meanwhile.

        Raises RuntimeError where waiting would stop the event loop of this thread.
        """
        granted = self.granted if self._task else self.ask()
        if not granted.done() and isinstance(_this_caller(), asyncio.Task):
            self.end()
            raise RuntimeError(BLOCKED)
        try:
            granted.result()
        except CancelledError:
            return False
        return True

    def check(self) -> None:
        """Say that the caller of this line runs the next step. Raises RuntimeError if another request has the lease."""
        with self._queue._lock:
            if not self.held:
                raise RuntimeError(OVERTAKEN)
            if not self._task:
                self._caller = weakref.ref(_this_caller())

    def leave(self) -> None:
        """Say, in any thread, that the request shall end after the step or the part of a prompt that runs."""
        self.ending = True
        self.granted.cancel()  # wakes a thread that waits for this lease

    def go_on(self) -> None:
        """Raise Left if the request shall end."""
        if self.ending:
            raise Left

    def end(self, last: Callable[[], None] | None = None) -> None:
        """Give the lease back, or give up waiting for it.

        Args:
            last: what is done first if this request still has the lease. No other request gets it meanwhile.
        """
        release_threads()  # the next request may run in another thread
        with self._queue._lock:
            if self.held:
                if last is not None:
                    last()
                self._queue._current = None
            else:
                self.granted.cancel()
            self._queue._advance()

    def __enter__(self) -> Lease:
        try:
            self.wait()
        except BaseException:  # Ctrl-C while it waited
            self.end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
