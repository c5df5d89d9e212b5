"""Requests that wait for the engine's one stream, in order, and the one that runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import torch

from engine import Engine
from ranks import RankLost
from runtime.results import Chunk, GenerationResult, Stream
from serving.errors import BUSY, SERVER, ApiError
from serving.news import News
from serving.settings import PING_SECONDS, ServeSettings
from serving.watching import Seen, joined, watched
from support.errors import one_line

Item = tuple[int, tuple[Chunk, Seen] | GenerationResult]  # of a choice: a step, or its end


class Event(NamedTuple):
    """News of a job: steps of a choice, or its result."""

    index: int
    chunks: list[Chunk]
    seen: Seen
    result: GenerationResult | None = None


class Job:
    """One request on an engine: its streams, decoded one after another in the engine's worker thread.

    The thread never waits for a client. What it decodes is kept here until somebody reads it, which is at most the text
    of the answers.
    """

    def __init__(self, engine: Engine, streams: Sequence[Stream], max_seconds: float, steps: bool = False):
        """steps: whether somebody wants to see the steps."""
        self.engine = engine
        self.streams = streams
        self.max_seconds = max_seconds
        self.steps = steps
        self.cancelled = False
        self.asked = time.monotonic()
        self.queue_seconds = 0.0
        self.started = False
        self.task: asyncio.Task[None] | None = None
        self._news: News[Item | BaseException | None] = News()

    def cancel(self) -> None:
        """Stop after the step, or the part of a prompt, that runs now. A job that still waits gives up its place."""
        self.cancelled = True
        for stream in self.streams:
            stream.stop()
        if self.task is not None and not self.started:
            self.task.cancel()

    def run(self) -> None:
        """Decode everything. This runs in the worker thread."""
        until = time.monotonic() + self.max_seconds
        try:
            for index, stream in enumerate(self.streams):
                with stream, watched(self.engine, stream, self.steps) as chunks:
                    for chunk in chunks:
                        self._news.put((index, chunk))
                        if time.monotonic() > until:
                            break
                if self.cancelled:
                    return
                self._news.put((index, stream.result), urgent=True)
        except BaseException as error:
            self._news.put(error, urgent=True)
            raise

    def close(self) -> None:
        """Say that nothing more will come."""
        self._news.put(None, urgent=True)

    async def events(self) -> AsyncIterator[Event | None]:
        """The news of this job, and None when there were none for a while. Raises what stopped the decoding.

        Steps that piled up come together.
        """
        while True:
            items = await self._news.take(PING_SECONDS)
            if not items:
                yield None
            index, steps = 0, list[tuple[Chunk, Seen]]()
            for item in items:
                if item is None or isinstance(item, BaseException):
                    if steps:
                        yield _event(index, steps)
                    if item is None:
                        return
                    raise item
                index, news = item
                if isinstance(news, GenerationResult):
                    yield _event(index, steps, news)
                    steps = []
                else:
                    steps.append(news)
            if steps:
                yield _event(index, steps)


def _event(index: int, steps: list[tuple[Chunk, Seen]], result: GenerationResult | None = None) -> Event:
    return Event(index, [chunk for chunk, _ in steps], joined([seen for _, seen in steps]), result)


class Scheduler:
    """Admits jobs up to a limit and runs them one at a time, in the order in which they came."""

    def __init__(self, engine: Engine, settings: ServeSettings):
        self.engine = engine
        self.settings = settings
        self.jobs: set[Job] = set()  # those that wait and the one that runs
        self.draining = False
        self.broken = False  # whether the GPU can no longer be used
        self._seconds = 1.0  # that a job takes, as a moving mean
        self._turn = asyncio.Lock()

    @property
    def running(self) -> int:
        return sum(job.started for job in self.jobs)

    @property
    def waiting(self) -> int:
        return len(self.jobs) - self.running

    def check(self) -> None:
        """Raise ApiError if no request can be taken now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", None, "shutting_down", SERVER, 5, close=True)
        if len(self.jobs) > self.settings.max_queue:
            seconds = min(60, max(1, round(self._seconds * len(self.jobs))))
            why = f"{self.waiting} requests wait already, which is the limit"
            raise ApiError(429, f"{why}; try again in {seconds} s", None, "queue_full", BUSY, seconds)

    def admit(self, streams: Sequence[Stream], steps: bool = False) -> Job:
        """Queue a job, whose steps are recorded if `steps` says so. Raises ApiError if the queue is full."""
        self.check()
        job = Job(self.engine, streams, self.settings.max_seconds, steps)
        self.jobs.add(job)
        job.task = asyncio.create_task(self._run(job))
        return job

    async def _run(self, job: Job) -> None:
        try:
            async with self._turn:
                job.started = True
                job.queue_seconds = time.monotonic() - job.asked
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self.engine.queue.worker(), job.run)
                took = time.monotonic() - job.asked - job.queue_seconds
                self._seconds += 0.2 * (took - self._seconds)
        except (torch.AcceleratorError, RankLost):  # no kernel runs any more in this process, or another one is gone
            self.broken = self.draining = True
        except Exception:  # the reader of the events reports it
            pass
        finally:
            self.jobs.discard(job)
            job.close()


def engine_error(error: BaseException) -> ApiError:
    """What a client is told when decoding failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, torch.AcceleratorError):
        return ApiError(503, "the GPU failed, and the server ends", None, "device_lost", SERVER)
    if isinstance(error, RankLost):
        return ApiError(503, "a process of the model has ended, and the server ends", None, "rank_lost", SERVER)
    return ApiError(500, f"decoding failed: {one_line(error)}", None, "engine_error", SERVER)
