"""One replica: an engine in a process that Ray has started. The front (`serving.replicas`) calls its methods."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cli.report import Report
from decoding.params import SamplingParams
from engine.engine import Engine
from engine.intake import Result
from engine.ranks import RankLost
from engine.results import Chunk, GenerationResult
from engine.streams import Stream
from serving.scheduler import is_set
from serving.server import PromptCacheLimits, keep_prompts
from support.errors import INTERNAL
from support.machine import describe_device, versions

HEARTBEAT = 1.0  # seconds after which a replica answers although it has no news
GATHER = 0.04  # seconds between two answers; the first tokens and the ends do not wait


NOTHING = Chunk(0, [], "")


class Facts(NamedTuple):
    """What the front has to know of a replica that is ready."""

    ctx: int
    slots: int
    adapters: tuple[str, ...]
    build: dict[str, str]  # equal ones compute the same bits
    place: str
    lines: list[str]  # the report of what was loaded


class Made(NamedTuple):
    """What became of one request since the last news."""

    number: int
    chunk: Chunk  # of all its steps
    end: GenerationResult | Exception | None  # None: it goes on

    def then(self, later: Made) -> Made:
        """This, and what came later."""
        a, b = self.chunk, later.chunk
        chunk = Chunk(a.row, a.token_ids + b.token_ids, a.text + b.text, [*a.logprobs, *b.logprobs])
        return Made(self.number, chunk, later.end)


class News(NamedTuple):
    """What a replica has done since the last news."""

    made: list[Made]
    figures: dict[str, float]  # see `Intake.figures`


class Replica:
    """The actor. Its methods run on one event loop, in the order of their calls. The engine decodes in its own thread."""

    def __init__(self, options: dict[str, Any], cache: PromptCacheLimits | None, deadline: float):
        """options: keyword arguments of `load`. deadline: seconds after which an engine that does not move hangs."""
        self._options = options
        self._cache = cache
        self._deadline = deadline
        self._moved = -1, 0.0  # how many parts the engine had run, and when that was first seen
        self._engine: Engine | None = None
        self._facts: Facts | None = None
        self._streams: dict[int, Stream] = {}
        self._silent: set[int] = set()  # requests without a token so far
        self._made: dict[int, Made] = {}  # since the last news
        self._lock = threading.Lock()  # of `_made`
        self._some, self._urgent = asyncio.Event(), asyncio.Event()  # there is news; it shall go out at once
        self._told = 0.0  # when the last news went out

    async def load(self) -> Facts:
        """Load the model, unless that is done. What an earlier call had begun is given up. Raises what `load` raises."""
        for stream in self._streams.values():
            stream.stop()
        self._streams.clear()
        self._made.clear()
        if self._facts is None:
            self._loop = asyncio.get_running_loop()
            lines: list[str] = []
            report = Report(False, lines.append)
            self._engine = engine = report.load(self._options)
            if self._cache:
                keep_prompts(engine, self._cache, report.line)
            engine.warm_up(None, engine.batch_size)
            device = describe_device(engine.model.device)
            build = {"device": device, "kernels": engine.backend.describe()} | versions()
            place = f"process {os.getpid()} on {socket.gethostname()}"
            self._facts = Facts(engine.ctx, engine.batch_size, engine.adapters, build, place, lines)
        return self._facts

    async def begin(self, number: int, prompt: list[int], params: SamplingParams, adapter: str) -> None:
        """Begin a request."""
        try:
            stream = self._engine.generate(prompt, params, adapter)
        except Exception as error:
            self._put(Made(number, NOTHING, error))
            return
        self._streams[number] = stream
        self._silent.add(number)
        stream.start(functools.partial(self._read, number, stream))

    async def news(self, stopping: Sequence[int]) -> News:
        """What has happened since the last call, at most HEARTBEAT seconds later. stopping: requests that shall end."""
        for number in stopping:
            if number in self._streams:
                self._streams[number].stop()
        if await is_set(self._some, HEARTBEAT):
            await is_set(self._urgent, self._told + GATHER - time.monotonic())
        self._some.clear()
        self._urgent.clear()
        with self._lock:
            made, self._made = list(self._made.values()), {}
        self._told = time.monotonic()
        parts, since = self._moved
        if parts != self._engine.batch.parts or not self._streams:
            self._moved = self._engine.batch.parts, self._told
        elif self._told - since > self._deadline:
            os._exit(INTERNAL)
        return News(made, self._engine.figures()[""])

    async def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        """deed(engine, *arguments), as `Intake.together` has it."""
        return await asyncio.to_thread(self._engine.together, deed, *arguments)

    async def close(self) -> None:
        """Keep on disk what shall be kept."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def _read(self, number: int, stream: Stream) -> None:
        """Read what a stream has made. The engine's thread calls this."""
        while self._streams.get(number) is stream and stream.inbox.ready:
            try:
                chunk = stream.inbox.take()
            except (torch.AcceleratorError, RankLost):  # nothing can run here any more: Ray starts another process
                os._exit(INTERNAL)
            except Exception as error:
                self._put(Made(number, NOTHING, error))
            else:
                self._put(Made(number, chunk or NOTHING, None if chunk else stream.result))

    def _put(self, made: Made) -> None:
        """Add what became of a request to the next news. The first tokens and the end are urgent."""
        with self._lock:
            earlier = self._made.get(made.number)
            self._made[made.number] = earlier.then(made) if earlier else made
        urgent = made.end is not None or made.number in self._silent
        self._silent.discard(made.number)
        if made.end is not None:
            self._streams.pop(made.number, None)
        for event in (self._some, self._urgent) if urgent else (self._some,):
            if not event.is_set():  # waking the loop for every step would slow the steps down
                self._loop.call_soon_threadsafe(event.set)
