"""How a caller gets the chunks of its requests: streams for threads and for asyncio, and who runs the steps meanwhile.

A caller that waits alone runs the steps itself, in its own thread. As soon as another one waits too, or where asyncio
waits, the engine's own thread runs them for all, until nothing is left to decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from engine.batch import Batch
from engine.request import Inbox, Request
from engine.results import Chunk, GenerationResult
from support.machine import release_threads

NAME = "eaglet"  # of the threads that decode
YIELD = 1e-3  # seconds that the engine's thread leaves to a caller that wants the engine for itself


class Driver:
    """Decides which thread runs the requests of a batch."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.submit = batch.submit
        self._turn = threading.RLock()  # who has it runs the steps
        self._guard = threading.Lock()
        self._guests = 0  # that wait to have the engine for themselves
        self._pumping = False  # whether the engine's own thread runs, or is about to

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block nobody else runs steps. The block may be entered again within itself."""
        self._guests += 1
        try:
            self._turn.acquire()
        finally:
            self._guests -= 1
        try:
            yield
        finally:
            self._turn.release()

    def settle(self) -> None:
        """End the requests that shall end, after the step that runs now."""
        with self.alone():
            self.batch.settle()

    def serve(self, inbox: Inbox) -> None:
        """Return when the inbox has something to read. Meanwhile this thread runs steps, unless another one does."""
        if inbox.ready:
            return
        if self._pumping or not self._turn.acquire(blocking=False):
            self.pump()
            inbox.wait()
            return
        try:
            while not inbox.ready and not (self._pumping or self._guests):
                self.batch.iterate()
        finally:
            self._turn.release()
        if not inbox.ready:
            release_threads()  # of this thread, because another one goes on
            time.sleep(YIELD if self._guests else 0)
            self.serve(inbox)

    def pump(self) -> None:
        """Have the engine's own thread run steps until nothing is left to decode. Returns at once."""
        with self._guard:
            if not self._pumping:
                self._pumping = True
                # Python ends a daemon thread wherever it is, and a C++ function that is ended so aborts the process.
                threading.Thread(target=self._pump, name=NAME, daemon=False).start()

    def _pump(self) -> None:
        while True:
            with self._guard:
                if not self.batch.busy or not _program_runs():
                    self._pumping = False
                    break
            with self.alone():
                self.batch.iterate()
            if self._guests:
                time.sleep(YIELD)
        release_threads()


def _program_runs() -> bool:
    """Whether a thread is left that Python waits for at its end, besides those that decode. Otherwise nobody can read."""
    return any(t.name != NAME and not t.daemon and t.is_alive() for t in threading.enumerate())


class Stream(Iterator[Chunk]):
    """An iterator of Chunks. Its `results` fill while it runs. `result` is that of the first sequence.

    Any number of streams may run on one engine, also in one thread. They are decoded together, as many as the engine has
    rows, and the others wait for a row in the order of their first steps. A stream that nobody reads goes on while others
    are read.

    Leaving a stream early (break, Ctrl-C) is safe. Where the stream has a name, it lives as long as the name does, so
    close it, or write `with engine.generate(prompt) as stream:`, which closes it at the end of the block.
    """

    def __init__(self, requests: Sequence[Request], driver: Driver):
        """requests: of one inbox, and not queued yet."""
        self.results = [request.result for request in requests]
        self.result = self.results[0]
        self._requests = requests
        self.inbox = requests[0].inbox
        self._driver = driver
        self._entered = self._stopped = False
        self._entering = threading.Lock()
        self._reading = threading.RLock()

    def start(self, listener: Callable[[], None] | None = None) -> None:
        """Queue the requests now, not at the first step. listener: the engine's own thread decodes, and calls this
        whenever there is news."""
        with self._entering:
            if self._entered:
                return
            self._entered = True
            if listener is not None:
                self.inbox.listener = listener
            for request in self._requests:
                self._driver.submit(request)
        if listener is not None:
            self._driver.pump()

    @property
    def began(self) -> float:
        """When the first request got a row of the engine (`time.perf_counter`), 0.0 before that."""
        return min((request.began for request in self._requests if request.began), default=0.0)

    def __next__(self) -> Chunk:
        with self._reading:
            self.start()
            self._driver.serve(self.inbox)
            if self._stopped:
                self.close()
            chunk = self.inbox.take()
        if chunk is None:
            release_threads()  # the next request may run in another thread
            raise StopIteration
        return chunk

    def stop(self) -> None:
        """End the stream soon, without waiting for it. Any thread may call this.

        The thread that reads the stream finds its end after the step, or the part of the prompt, that runs now.
        """
        self._stopped = True
        for request in self._requests:
            request.stopping = True

    def close(self) -> None:
        """Stop here. Sequences that had not finished are marked as interrupted.

        What was decoded so far stays in the caches, so a request that goes on from there starts fast. Any thread may
        call this: a step that runs in another thread ends first. Closing twice does nothing.
        """
        self.stop()
        with self._entering:
            entered, self._entered = self._entered, True
        if not entered:
            for request in self._requests:
                request.end()
        elif not all(request.ended for request in self._requests):
            self._driver.settle()
        self.inbox.chunks.clear()
        release_threads()  # the next request may run in another thread

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.stop()  # any thread may collect garbage, also one that runs a step

    def run(self) -> list[GenerationResult]:
        """Run to the end and return the results."""
        for _ in self:
            pass
        return self.results


class AsyncStream(AsyncIterator[Chunk]):
    """An asynchronous iterator of Chunks: `async for chunk in engine.agenerate(prompt)`.

    It is to an asyncio task what a Stream is to a thread, with the same `results` and `result`. The steps run in the
    engine's own thread, whether or not the task reads. A stream ends when the task that reads it is cancelled, when
    `aclose()` is called, and when it is dropped.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self.results, self.result = stream.results, stream.result
        self._news = asyncio.Event()
        self._reader: asyncio.Task[Any] | None = None

    async def __anext__(self) -> Chunk:
        task = asyncio.current_task()
        if self._reader is not task:
            self._reader = task
            ended = weakref.WeakMethod(self._end_with)  # a task that lives on must not keep a stream that it dropped
            task.add_done_callback(lambda task: (end := ended()) and end(task))
        self._stream.start(partial(call_in, asyncio.get_running_loop(), self._news.set))
        try:
            while not self._stream.inbox.ready:
                await self._news.wait()
                self._news.clear()
        except BaseException:  # the task was cancelled
            self._stream.stop()
            raise
        chunk = self._stream.inbox.take()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _end_with(self, task: asyncio.Task[Any]) -> None:
        """Stop the stream if the task that has ended is the one that reads it, whatever still refers to the stream."""
        if self._reader is task:
            self._stream.stop()

    async def aclose(self) -> None:
        """Stop here. Sequences that had not finished are marked as interrupted."""
        await asyncio.to_thread(self._stream.close)

    async def run(self) -> list[GenerationResult]:
        """Run to the end and return the results."""
        async for _ in self:
            pass
        return self.results


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Have an event loop call a function. Any thread may ask for it."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)
