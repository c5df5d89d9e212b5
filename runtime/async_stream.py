"""A stream for asyncio: its steps run in a worker thread, so the event loop stays free."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any

from runtime.results import Chunk, GenerationResult, Stream


class AsyncStream:
    """An asynchronous iterator of Chunks: `async for chunk in engine.agenerate(prompt)`.

    It is to an asyncio task what a Stream is to a thread. Requests of other tasks and threads wait in order, and a task
    that starts another request before its own stream has ended takes the engine over. A stream is closed when the task
    that reads it is cancelled or ends, when `aclose()` is called, and when it is dropped.
    """

    def __init__(self, stream: Stream, worker: Executor):
        self._stream = stream
        self._worker = worker  # one thread: a close that is handed in runs after the step before it
        self._watched: tuple[asyncio.Task[Any], Callable[[asyncio.Task[Any]], None]] | None = None

    @property
    def results(self) -> list[GenerationResult]:
        """The outcomes of all sequences. They fill while the stream runs."""
        return self._stream.results

    @property
    def result(self) -> GenerationResult:
        """The outcome of the first sequence. It is complete when the stream has ended."""
        return self._stream.result

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in a task
        self._end_with(task)
        arrived = False
        try:
            await asyncio.wrap_future(self._stream.lease.ask(task))
            chunk = await asyncio.wrap_future(self._worker.submit(next, self._stream, None))
            arrived = True
        finally:
            if not arrived:  # the task was cancelled, or the step failed
                self._close_soon()
        if chunk is None:
            self._forget_task()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Stop here, and let the next request run. Sequences that had not finished are marked as interrupted."""
        self._forget_task()
        await asyncio.wrap_future(self._worker.submit(self._stream.close))

    async def run(self) -> list[GenerationResult]:
        """Run to the end and return the results."""
        async for _ in self:
            pass
        return self.results

    def _end_with(self, task: asyncio.Task[Any]) -> None:
        """Close the stream when the task that reads it ends, whatever still refers to the stream."""
        if self._watched is not None and self._watched[0] is task:
            return
        self._forget_task()
        reference = weakref.ref(self)  # a task that lives on must not keep a stream that it dropped

        def ended(task: asyncio.Task[Any]) -> None:
            stream = reference()
            if stream is not None:
                stream._close_soon()

        self._watched = task, ended
        task.add_done_callback(ended)

    def _forget_task(self) -> None:
        if self._watched is not None:
            task, ended = self._watched
            task.remove_done_callback(ended)
        self._watched = None

    def _close_soon(self) -> None:
        self._worker.submit(self._stream.close)
