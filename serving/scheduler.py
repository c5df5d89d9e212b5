"""Requests on the engine: how they become streams, wait in order, are decoded together, and tell what they made."""

import asyncio
import contextlib
import functools
import itertools
import operator
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from cli.steps import StepRecorder
from decoding.params import SamplingParams, per_row, with_suggestions
from engine.grammar_text import GrammarError, ReadGrammar
from engine.intake import Intake
from engine.ranks import RankLost
from engine.results import Chunk, GenerationResult
from engine.streams import Stream, call_in
from serving.answers import Answer, Part
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
        self, engine: Intake, settings: ServeSettings, ask: Ask, params: SamplingParams, streams: Sequence[Stream]
    ):
        self.model = adapter_named(engine, ask.model) or settings.model  # what the answer calls the model
        self.tokenizer = engine.tokenizer
        self.ask = ask
        self.params = params
        grammar = params.grammar
        unenforced = grammar.unenforced if isinstance(grammar, ReadGrammar) else ()
        # What is asked for in vain, each once: it becomes a header, and a chat may hold many images.
        self.ignored = list(dict.fromkeys((*ask.ignored, *(f"JSON schema: {name}" for name in unenforced))))
        stop_ids = engine.stop_ids(params)
        self.answers = [Answer(i, ask, engine.tokenizer, stream, stop_ids) for i, stream in enumerate(streams)]
        self.cancelled = False
        self.failure: Exception | None = None
        self.queued = 0.0  # when it was (`time.perf_counter`)
        self._engine = engine
        self._max_seconds = settings.max_seconds
        self._running = set(self.answers)  # those whose streams have not ended
        self._news: deque[tuple[Answer, Chunk | None]] = deque()  # None: the end of this choice
        self._ended = False
        self._some = asyncio.Event()  # set when there is something to read
        self._urgent = asyncio.Event()  # set when the reader shall not wait for more

    @property
    def results(self) -> list[GenerationResult]:
        """The results of the choices that have ended."""
        return [answer.result for answer in self.answers if answer.finish]

    @property
    def began(self) -> float:
        """When the engine first had a row for it, 0.0 before that."""
        return min((answer.stream.began for answer in self.answers if answer.stream.began), default=0.0)

    @property
    def queue_seconds(self) -> float:
        """How long it waited for a row."""
        return (self.began or time.perf_counter()) - self.queued

    def cancel(self) -> None:
        """Stop after the step, or the part of a prompt, that runs now. A job that still waits gives up its place."""
        self.cancelled = True
        for answer in self.answers:
            answer.stream.stop()

    def start(self, ended: Callable[[], None]) -> None:
        """Queue all streams. Raises ApiError where the steps cannot be recorded.

        ended: is called when nothing more will be decoded, in the event loop that runs now.
        """
        self.queued = time.perf_counter()
        self._call = functools.partial(call_in, asyncio.get_running_loop())  # in the event loop
        self._tell = ended
        if self.ask.steps:  # only such a request is watched, because the engine then waits for the host
            try:
                for answer in self.answers:
                    answer.recorder = StepRecorder(self._engine, answer.result)
            except ValueError as error:
                raise unsupported("eaglet.steps", one_line(error, notes=False)) from None
        for answer in self.answers:
            answer.stream.start(functools.partial(self._read, answer))

    def _read(self, answer: Answer) -> None:
        """Take what a stream has made. The engine's thread calls this."""
        try:
            while answer in self._running and answer.stream.inbox.ready:
                chunk = answer.stream.inbox.take()
                if chunk is not None and answer.recorder:
                    answer.recorder.push(chunk)
                if chunk is not None or not self.cancelled:
                    self._put(answer, chunk)
                if chunk is None:
                    self._close(answer)
        except Exception as error:
            self.failure = error
            self.cancel()
            self._close(answer)
        if time.perf_counter() > self.queued + self._max_seconds:
            answer.stream.stop()

    def _put(self, answer: Answer, chunk: Chunk | None) -> None:
        """Tell the reader, at once if the choice has ended."""
        self._news.append((answer, chunk))
        if chunk is None:
            self._call(self._urgent.set)
        if chunk is None or not self._some.is_set():
            self._call(self._some.set)

    def _close(self, answer: Answer) -> None:
        """A stream has ended."""
        self._running.discard(answer)
        if answer.recorder:
            self._engine.remove_observer(answer.recorder)
        if not self._running:
            self._call(self._end)

    def _end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._some.set()
        self._urgent.set()
        self._tell()

    async def parts(self) -> AsyncIterator[Part | None]:
        """What became certain of the answers, and None when that was nothing for a while. Raises what ended the decoding.

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
            news = [self._news.popleft() for _ in range(len(self._news))]
            for answer, group in itertools.groupby(news, key=operator.itemgetter(0)):
                chunks = [chunk for _, chunk in group]
                yield answer.take([chunk for chunk in chunks if chunk is not None], None in chunks)
            if ended:
                if self.failure is not None:
                    raise self.failure
                return
            await is_set(self._urgent, GATHER)
            self._urgent.clear()

    async def complete(self) -> None:
        """Wait for the whole answers. Raises what stopped the decoding."""
        async for _ in self.parts():
            pass


async def is_set(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set, after waiting for that for at most so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def prepare(engine: Intake, settings: ServeSettings, parse: Parse, body: bytes) -> Job:
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
    return Job(engine, settings, ask, params, streams)


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
        return sum(job.began > 0 for job in self.jobs)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return len(self.jobs) - self.running

    @property
    def tokens_per_second(self) -> float:
        """What the jobs under way get together, each at its own mean rate so far."""
        return sum(answer.result.tokens_per_second for job in self.jobs for answer in job.answers)

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

    async def admit(self, parse: Parse, body: bytes) -> Job:
        """Read a request off the event loop (`prepare`), and queue it. Raises ApiError if the queue is full, and for all
        that is wrong with the request."""
        loop = asyncio.get_running_loop()
        job = await loop.run_in_executor(self.preparing, prepare, self.engine, self.settings, parse, body)
        self._check_room()
        job.start(functools.partial(self._ended, job))
        self.jobs.add(job)
        return job

    def _ended(self, job: Job) -> None:
        if isinstance(job.failure, torch.AcceleratorError | RankLost):
            self.broken = self.draining = True  # no kernel runs any more in this process, or another one is gone
        self._seconds += 0.2 * (time.perf_counter() - job.queued - self._seconds)
        self.jobs.discard(job)


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
