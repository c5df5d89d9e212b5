"""Requests on the engine: how they become streams, wait in order, are decoded together, and tell what they made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cli.steps import StepRecorder
from decoding.params import SamplingParams, per_row, with_suggestions
from engine.grammar_text import GrammarError, ReadGrammar
from engine.intake import Intake
from engine.ranks import RankLost
from engine.results import GenerationResult
from engine.streams import Stream
from serving.answers import Answer, Event
from serving.fields import BUSY, SERVER, ApiError, blamed, no_replica, parse_object, unsupported
from serving.prompts import adapter_named, drop_oldest, prompts_of, settings_of, too_long
from serving.requests import Ask, Parse
from support.errors import one_line

MB = 1 << 20
NO_TOKEN = 2**31 - 1  # an id that no model has
PING_SECONDS = 15  # a stream without news gets a comment after this time, so that no proxy ends it
GATHER = 0.05  # seconds between two looks at what the engine has decoded


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `python -m scripts.serve` decides about the server, apart from the engine."""

    model: str = "model"  # what the API calls the model
    version: str = "0"  # of this program
    api_keys: tuple[str, ...] = ()  # a client must send one of these; empty: none is needed
    cors_origins: tuple[str, ...] = ()  # pages of these sites may use the server; "*": of all sites
    allowed_hosts: tuple[str, ...] = ()  # names under which a server without a key answers, beside the local ones
    loopback: bool = True  # whether only this machine can reach the server
    max_queue: int = 8  # requests that may wait for a slot
    max_body: int = 2 * MB  # bytes of a request
    max_tokens: int | None = None  # tokens of one answer; None: what is left of the context
    drop_oldest: bool = False  # leave out the oldest turns of a chat that does not fit, instead of refusing it
    max_seconds: float = 600  # a request that decodes for longer ends as at its token limit
    send_seconds: float = 30  # a client that takes nothing for so long is given up
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling settings where a client gives none


class Job:
    """One request on an engine: its streams, decoded in the engine's own thread.

    That thread never waits for a client. What it decodes is kept here until somebody reads it, which is at most the text
    of the answers.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Intake,
        settings: ServeSettings,
        ask: Ask,
        params: SamplingParams,
        streams: Sequence[Stream],
    ):
        """loop: the one whose tasks read the events."""
        self.model = adapter_named(engine, ask.model) or settings.model  # what the answer calls the model
        self.tokenizer = engine.tokenizer
        self.ask = ask
        self.params = params
        grammar = params.grammar
        unenforced = grammar.unenforced if isinstance(grammar, ReadGrammar) else ()
        self.ignored = [*ask.ignored, *(f"JSON schema: {name}" for name in unenforced)]  # what is asked for in vain
        self.streams = streams
        self.cancelled = False
        self.failure: Exception | None = None
        self.finished = asyncio.Event()  # set when nothing more will be decoded
        self.task: asyncio.Task[None] | None = None
        self.answers = [Answer(i, ask, engine.tokenizer, engine.stop_ids(params)) for i in range(len(streams))]
        self._engine = engine
        self._max_seconds = settings.max_seconds
        self._asked = self._until = 0.0
        self._recorders: list[StepRecorder | None] = [None] * len(streams)
        self._left = len(streams)  # streams that have not ended
        self._ended = False
        self._loop = loop
        self._events: deque[Event] = deque()
        self._some = asyncio.Event()  # set when there is something to read
        self._urgent = asyncio.Event()  # set when the reader shall not wait for more

    @property
    def results(self) -> list[GenerationResult]:
        """The results of the choices that have ended."""
        return [answer.result for answer in self.answers if answer.result is not None]

    @property
    def started(self) -> bool:
        """Whether the engine has a row for it, or had one."""
        return any(stream.began for stream in self.streams)

    @property
    def queue_seconds(self) -> float:
        """How long it waited for a row."""
        began = min((stream.began for stream in self.streams if stream.began), default=time.perf_counter())
        return began - self._asked

    def cancel(self) -> None:
        """Stop after the step, or the part of a prompt, that runs now. A job that still waits gives up its place."""
        self.cancelled = True
        for stream in self.streams:
            stream.stop()

    def start(self) -> None:
        """Queue all streams. Raises ApiError where the steps cannot be recorded."""
        self._asked = time.perf_counter()
        self._until = time.monotonic() + self._max_seconds
        if self.ask.steps:  # only such a request is watched, because the engine then waits for the host
            try:
                self._recorders = [StepRecorder(self._engine, stream.result) for stream in self.streams]
            except ValueError as error:
                raise unsupported("eaglet.steps", one_line(error, notes=False)) from None
        for index, stream in enumerate(self.streams):
            stream.start(functools.partial(self._news, index))

    def _news(self, index: int) -> None:
        """Take what a stream has made. The engine's thread calls this."""
        stream = self.streams[index]
        try:
            while stream.ready:
                chunk = stream.take()
                if chunk is None:
                    if not self.cancelled:
                        self._put(Event(index, [], stream.result))
                    self._close(index)
                    return
                recorder = self._recorders[index]
                if recorder:
                    recorder.push(chunk)
                self._put(Event(index, [chunk], seen=_seen(recorder, stream.result) if recorder else {}))
        except Exception as error:
            self.failure = error
            self.cancel()
            self._close(index)
            return
        if time.monotonic() > self._until:
            stream.stop()

    def _close(self, index: int) -> None:
        """A stream has ended."""
        recorder, self._recorders[index] = self._recorders[index], None
        if recorder:
            self._engine.remove_observer(recorder)
        self._left -= 1
        if not self._left:
            self._set(self.finished)

    def end(self) -> None:
        """Say that nothing more will come."""
        self._ended = True
        self._set(self._some, self._urgent)

    def _put(self, event: Event) -> None:
        """Tell the reader, at once if the choice has ended."""
        self._events.append(event)
        if event.result is not None:
            self._set(self._some, self._urgent)
        elif not self._some.is_set():
            self._set(self._some)

    def _set(self, *events: asyncio.Event) -> None:
        """Set events of the loop. The engine's thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            for event in events:
                self._loop.call_soon_threadsafe(event.set)

    async def events(self) -> AsyncIterator[Event | None]:
        """What this job made, and None when that was nothing for a while. Raises what stopped the decoding.

        The worker and the loop share Python's lock and often the cores, so a task that woke up for every step would slow
        the steps down. What comes first is taken at once. After that the task comes back every GATHER seconds, or when a
        choice has ended, and steps that piled up come together.
        """
        while True:
            if not await is_set(self._some, PING_SECONDS):
                yield None
                continue
            self._some.clear()
            ended = self._ended  # whatever came before the end is there by now
            for event in self._take():
                yield event
            if ended:
                if self.failure is not None:
                    raise self.failure
                return
            await is_set(self._urgent, GATHER)
            self._urgent.clear()

    async def complete(self) -> None:
        """Wait for the whole answers. Raises what stopped the decoding."""
        async for event in self.events():
            if event is not None:
                self.answers[event.index].take(event)

    def _take(self) -> list[Event]:
        """The events so far, those of one choice as one."""
        taken: list[Event] = []
        for _ in range(len(self._events)):
            event = self._events.popleft()
            if taken and taken[-1].index == event.index:
                taken[-1].add(event)
            else:
                taken.append(event)
        return taken


async def is_set(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set, after waiting for that for at most so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _seen(recorder: StepRecorder, result: GenerationResult) -> dict[str, Any]:
    """What a stream says of its last step, for those who draw the trees."""
    if recorder.views:
        return {"steps": [asdict(recorder.views[-1])]}
    return {"first": recorder.first, "scores": recorder.meaning(result.temperature), "steps": []}


def prepare(loop: asyncio.AbstractEventLoop, engine: Intake, settings: ServeSettings, parse: Parse, body: bytes) -> Job:
    """Read a request and make its streams, which have not started. Raises ApiError for anything that is wrong with it.

    This takes a while, so it runs off the event loop.
    """
    ask = parse(parse_object(body))
    if ask.messages and (ask.drop_oldest or settings.drop_oldest):
        drop_oldest(engine, ask)
    ask.prompt_ids = prompts = prompts_of(engine, ask)
    given = {"seed": secrets.randbits(32)} | settings.defaults | ask.given
    if ask.messages:
        given |= settings_of(engine.tokenizer, ask)
    if ask.logprobs is not None:
        given["logprobs"] = ask.logprobs
    if ask.ignore_eos or ask.stop_token_ids:
        own = (NO_TOKEN,) if ask.ignore_eos else engine.stop_ids(SamplingParams())
        given["stop_ids"] = (*own, *ask.stop_token_ids)
    streams: list[Stream] = []
    for ids in prompts:
        room = engine.ctx - len(ids)
        if room < min(1, given.get("max_new_tokens", 1)):
            held = f"the context holds {engine.ctx:,}"
            raise too_long(ask, f"the prompt has {len(ids):,} tokens, and {held}, with at least one new token")
        most = min(room, given.get("max_new_tokens", room), settings.max_tokens or room)
        with blamed(None):
            params, _ = with_suggestions(engine.generation, given | {"max_new_tokens": most})
        with blamed(ask.source):
            streams += [engine.generate(ids, own, adapter_named(engine, ask.model)) for own in per_row(params, ask.n)]
    return Job(loop, engine, settings, ask, params, streams)


class Scheduler:
    """Admits jobs up to a limit. The engine decodes as many together as it has rows, in the order in which they came."""

    def __init__(self, engine: Intake, settings: ServeSettings):
        self.engine = engine
        self.settings = settings
        self.jobs: set[Job] = set()  # those that wait and those that run
        self.draining = False
        self.broken = False  # whether the GPU can no longer be used
        self.preparing = ThreadPoolExecutor(1, "eaglet-prepare")  # reads requests, one at a time
        self._seconds = 1.0  # that a job takes, as a moving mean

    @property
    def running(self) -> int:
        """How many jobs are decoded."""
        return sum(job.started for job in self.jobs)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return len(self.jobs) - self.running

    @property
    def tokens_per_second(self) -> float:
        """What the jobs under way get together, each at its own mean rate so far."""
        running = (job for job in self.jobs if not job.finished.is_set())
        return sum(stream.result.tokens_per_second for job in running for stream in job.streams)

    def check(self) -> None:
        """Raise ApiError if no request can be taken now."""
        if problem := self.engine.problem:
            raise no_replica(problem)
        self._check_room()

    def _check_room(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down", None, "shutting_down", SERVER, 5, close=True)
        if len(self.jobs) >= self.settings.max_queue + self.engine.batch_size:
            seconds = min(60, max(1, round(self._seconds * len(self.jobs) / self.engine.batch_size)))
            why = f"{self.waiting} requests wait already, which is the limit"
            raise ApiError(429, f"{why}; try again in {seconds} s", None, "queue_full", BUSY, seconds)

    async def job(self, parse: Parse, body: bytes) -> Job:
        """Read a request off the event loop (`prepare`)."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.preparing, prepare, loop, self.engine, self.settings, parse, body)

    def admit(self, job: Job) -> None:
        """Queue a job. Raises ApiError if the queue is full, and where the job cannot be watched as it asks."""
        self._check_room()
        job.start()
        self.jobs.add(job)
        job.task = asyncio.create_task(self._follow(job))

    async def _follow(self, job: Job) -> None:
        asked = time.monotonic()
        await job.finished.wait()
        if isinstance(job.failure, torch.AcceleratorError | RankLost):
            self.broken = self.draining = True  # no kernel runs any more in this process, or another one is gone
        self._seconds += 0.2 * (time.monotonic() - asked - self._seconds)
        self.jobs.discard(job)
        job.end()


def engine_error(error: BaseException) -> ApiError:
    """What a client is told when decoding failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GrammarError):
        return ApiError(400, one_line(error, notes=False), None, "invalid_grammar")
    if isinstance(error, torch.AcceleratorError):
        return ApiError(503, "the GPU failed, and the server ends", None, "device_lost", SERVER, 5)
    if isinstance(error, RankLost):
        return ApiError(503, "a process of the model has ended, and the server ends", None, "rank_lost", SERVER, 5)
    return ApiError(500, f"decoding failed: {one_line(error, notes=False)}", None, "engine_error", SERVER)
