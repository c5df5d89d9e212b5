"""Several engines behind one intake: actors of Ray, each with a GPU, or a share of the CPU, of its own.

The tokens of a request are a function of its prompt, settings and seed, on equal devices and builds. So a replica that
dies costs time, never text: its requests begin again elsewhere, and what was handed out already is compared and skipped.
Ray places the replicas, starts those again that have died, and carries the calls. What is left to decide here is who
decodes what.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cli.report import Report
from decoding.params import with_suggestions
from decoding.step import Observer
from engine.grammar import Grammars
from engine.intake import Intake, Result
from engine.ranks import RankLost
from engine.request import Inbox, Request
from engine.results import Chunk, GenerationResult
from loading.options import LoadOptions, options_from, settings_given
from serving.fields import no_replica
from serving.replica import GATHER, Facts, Made, News, Replica
from serving.server import PromptCacheLimits, keep_prompts
from support.errors import UsageError, bad_files, one_line
from support.machine import default_threads
from text.tokenizer import load_tokenizer

BLOCK = 16  # tokens of a text that are remembered together
SEEN = 1 << 16  # blocks that are remembered of each replica
BLAME = 5.0  # deaths of replicas for which a request alone is to blame, after which it ends
DEADLINE = 120.0  # seconds; a replica whose requests have not moved for so long hangs
TICK = 1.0  # seconds between two looks at requests that wait
CLOSING = 10.0  # seconds that replicas get for their end
NONE_UP = "no replica is up; try again soon"
# Ray reads these when it is imported. It says nothing about processes that end, because we do, and tells its makers
# nothing. It does not start by itself where it is called after its end.
ENVIRONMENT = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
# For a Ray of our own: the engines have the usual priority, and may use much memory, because `load` has planned it.
OWN = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}


def block_keys(ids: Sequence[int], adapter: int = 0) -> list[int]:
    """A number for each beginning of a text that is a multiple of BLOCK tokens long. Equal beginnings have equal ones."""
    keys, key = [], adapter
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hash((key, *ids[start : start + BLOCK]))
        keys.append(key)
    return keys


class Peer:
    """The front's side of one replica: what it runs, and what its caches may hold."""

    def __init__(self, number: int, actor: Any = None, slots: int = 0):
        """actor: Ray's handle."""
        self.number = number
        self.actor = actor
        self.slots = slots
        self.up = self.gone = False  # whether it decodes; whether it never will again
        self.running: dict[int, Passage] = {}
        self.stopping: list[int] = []  # requests whose end it has not been told yet
        self.seen: OrderedDict[int, None] = OrderedDict()  # keys of texts, the latest last
        self.counts = {"replica_deaths_total": 0, "replica_requests_total": 0, "replica_prefix_hits_total": 0}
        self.figures: dict[str, float] = {}  # its own

    def clear(self) -> list[Passage]:
        """Its process has ended. Returns what it was running."""
        lost = list(self.running.values())
        self.counts["replica_deaths_total"] += self.up
        self.up, self.running, self.stopping, self.seen, self.figures = False, {}, [], OrderedDict(), {}
        return lost

    def remember(self, keys: Sequence[int]) -> None:
        """The caches hold this text now."""
        for key in keys:
            self.seen[key] = None
            self.seen.move_to_end(key)
        while len(self.seen) > SEEN:
            self.seen.popitem(last=False)

    def known(self, keys: Sequence[int]) -> int:
        """How many blocks of a text the caches may hold, 0 where that is less than half of it."""
        blocks = next((i for i, key in enumerate(keys) if key not in self.seen), len(keys))
        return blocks if 2 * blocks >= len(keys) else 0


class Queue:
    """What waits for a replica, and which one gets it: the one that has seen the most of its text, if that is half of it
    or more, else the one with the least to do.

    While all are busy, a slot that becomes free goes to the oldest text that no other replica has seen, and every fourth
    one to the oldest of all. Taken strictly in turn, texts would meet strangers, and would be read as a whole.
    """

    def __init__(self, peers: Sequence[Peer]):
        self.peers = peers
        self.waiting: list[tuple[Any, Sequence[int], Peer | None]] = []  # what, its keys, and who has seen them
        self._given = 0

    def put(self, what: Any, keys: Sequence[int], first: bool = False) -> None:
        """Let something wait, behind all others or before them."""
        home = max(self.peers, key=lambda peer: peer.known(keys))
        self.waiting.insert(0 if first else len(self.waiting), (what, keys, home if home.known(keys) else None))

    def take(self, which: Callable[[Any], bool]) -> list[Any]:
        """Take out what need not wait any more."""
        taken = [what for what, _, _ in self.waiting if which(what)]
        self.waiting = [entry for entry in self.waiting if entry[0] not in taken]
        return taken

    def next(self) -> tuple[Any, Peer] | None:
        """What gets a slot now, and whose. None: nothing waits, or all are busy."""
        free = [peer for peer in self.peers if peer.up and len(peer.running) < peer.slots]
        if not (free and self.waiting):
            return None
        self._given += 1
        fitting = (i for i, (_, _, home) in enumerate(self.waiting) if home is None or home in free or not home.up)
        what, keys, _ = self.waiting.pop(next(fitting, 0) if self._given % 4 else 0)
        return what, max(free, key=lambda p: (p.known(keys), -len(p.running) / p.slots, -len(p.seen)))


class OtherTokens(RuntimeError):
    """A replica has answered a request in another way than the one before it."""


class Passage:
    """A request on its way through one replica after another."""

    def __init__(self, request: Request):
        self.request = request
        self.result = request.result
        self.keys = block_keys(request.prompt, request.adapter)
        self.blame = 0.0  # for the deaths of replicas
        self._tokens = self._characters = 0  # that this replica has given

    def begin_again(self, blame: float) -> None:
        """The next replica begins at the first token. blame: for the death of this one."""
        self.blame += blame
        self._tokens = self._characters = 0
        if self.blame >= BLAME:
            self.end(RuntimeError("several replicas have died while they decoded this request"))

    def take(self, made: Made) -> None:
        """Hand on what is new. Raises OtherTokens where the rest is not what was handed on before."""
        _, ids, text, logprobs = made.chunk  # of the replica's own stream, in which the request is the only one
        known = self.result.token_ids[self._tokens : self._tokens + len(ids)]
        shown = self.result.text[self._characters : self._characters + len(text)]
        self._tokens += len(ids)
        self._characters += len(text)
        early = isinstance(made.end, GenerationResult) and self._tokens < len(self.result.token_ids)
        if early or ids[: len(known)] != known or not text.startswith(shown):
            raise OtherTokens("a replica that took over has answered otherwise: their devices or builds are not equal")
        new = Chunk(self.request.index, ids[len(known) :], text[len(shown) :], logprobs[len(known) :])
        if new.token_ids or new.text:
            self.result.token_ids += new.token_ids
            self.result.text += new.text
            self.request.inbox.put(new)

    def end(self, end: GenerationResult | Exception | None) -> None:
        """The request ends: with its result, with an error, or because nobody reads it (None)."""
        if isinstance(end, GenerationResult):
            vars(self.result).update(vars(end))
            self.request.finished = True
        self.request.end(end if isinstance(end, Exception) else None)


class Replicas(Intake):
    """Takes requests for several engines. It is also the driver of its streams."""

    def __init__(
        self,
        options: dict[str, Any],
        count: int,
        address: str | None = None,
        cache: PromptCacheLimits | None = None,
        template: str | None = None,
        say: Callable[[str], None] = lambda line: None,
        deadline: float = DEADLINE,
    ):
        """Start the replicas, and return when the first one is ready.

        Args:
            options: keyword arguments of `load`, the same for all.
            address: of a Ray that runs; None starts one on this machine, which ends with `close`.
            cache: for earlier prompts, of each replica.
            template: the chat template.
            say: is given a line about every replica that comes or goes.
            deadline: seconds after which a replica whose requests have not moved is started again.

        Raises UsageError where Ray is missing or cannot be reached, and what `load` raises.
        """
        asked = LoadOptions(**options)
        asked.validate()
        with bad_files():
            checkpoint = asked.open_checkpoint()
            self.tokenizer = load_tokenizer(checkpoint.tokenizer_source, checkpoint.config.vocab_size)
        if template and self.tokenizer is not None:
            self.tokenizer.use_template(template)
        self.model_config, self.generation = checkpoint.config, checkpoint.generation
        self.grammars = Grammars(self.tokenizer, checkpoint.config.vocab_size)
        self.driver = self
        self.say = say
        self._deadline = deadline
        self._facts: Facts | None = None  # of the first one that was ready
        self._changed = threading.Condition()  # guards everything here: a replica has come or gone
        self._number = 0  # of requests that a replica got
        self._settled = 0.0  # when requests were last looked at that may have been stopped
        self._closing = threading.Event()
        self._failure: BaseException | None = None  # why the last one that has gone for good could not start
        actors = start_actors(asked, count, address, cache, deadline)
        self.peers = [Peer(number, actor) for number, actor in enumerate(actors)]
        self._queue = Queue(self.peers)
        self._threads = [threading.Thread(target=self._follow, args=(peer,), daemon=True) for peer in self.peers]
        for thread in self._threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._facts is not None or all(peer.gone for peer in self.peers))
        if self._facts is None:
            self.close()
            raise self._failure
        self.ctx, self.adapters = self._facts.ctx, self._facts.adapters
        self.batch_size = self._facts.slots * count

    # ---- what an intake has ------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        return "" if any(peer.up for peer in self.peers) else NONE_UP

    def figures(self) -> dict[str, dict[str, float]]:
        return {f'{{replica="{p.number}"}}': {"replica_up": int(p.up)} | p.counts | p.figures for p in self.peers}

    def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        """deed(engine, *arguments) on the replica that has the least to do."""
        import ray

        try:
            peer = min((peer for peer in self.peers if peer.up), key=lambda peer: len(peer.running))
            return ray.get(peer.actor.together.remote(deed, *arguments), timeout=self._deadline)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except (ray.exceptions.RayError, ValueError):  # it has died, or none is up
            raise no_replica(NONE_UP) from None

    def add_observer(self, observer: Observer) -> None:
        raise ValueError("the steps of replicas cannot be watched.")

    def close(self) -> None:
        """End the replicas, and the Ray that was started for them."""
        import ray

        self._closing.set()
        with contextlib.suppress(ray.exceptions.RayError):  # a replica that is not up needs no end
            if ends := [peer.actor.close.remote() for peer in self.peers if peer.up]:
                ray.wait(ends, num_returns=len(ends), timeout=CLOSING)
        for peer in self.peers:
            ray.kill(peer.actor)
        for thread in self._threads:
            thread.join()
        ray.shutdown()

    # ---- what the driver of a stream has -----------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Any thread may call this."""
        with self._changed:
            passage = Passage(request)
            self._queue.put(passage, passage.keys)
            self._dispatch()

    def pump(self) -> None:
        """The replicas run by themselves."""

    def serve(self, inbox: Inbox) -> None:
        """Return when the inbox has something to read."""
        inbox.wait()

    def settle(self) -> None:
        """End the requests that shall end. A replica hears of it within a second, and nobody waits for that."""
        with self._changed:
            self._settled = time.monotonic()
            for passage in self._queue.take(lambda passage: passage.request.stopping):
                passage.end(None)
            for peer in self.peers:
                for number in [number for number, passage in peer.running.items() if passage.request.stopping]:
                    peer.stopping.append(number)
                    peer.running.pop(number).end(None)

    # ---- who decodes what: the caller of these holds `_changed` ------------------------------------------------

    def _dispatch(self) -> None:
        """Hand out the requests that wait, as far as there are free slots."""
        if time.monotonic() > self._settled + GATHER:  # it looks at all requests
            self.settle()
        if all(peer.gone for peer in self.peers):
            for passage in self._queue.take(lambda passage: True):
                passage.end(RankLost("no replica is left."))
        while given := self._queue.next():
            (passage, peer), request = given, given[0].request
            request.began = request.began or time.perf_counter()
            peer.counts["replica_requests_total"] += 1
            peer.counts["replica_prefix_hits_total"] += peer.known(passage.keys) > 0
            peer.remember(passage.keys)
            self._number += 1
            peer.running[self._number] = passage
            adapter = self.adapters[request.adapter - 1] if request.adapter else ""
            peer.actor.begin.remote(self._number, request.prompt, request.params, adapter)

    def _take(self, peer: Peer, made: Made) -> None:
        """Take what became of one request."""
        passage, end = peer.running.get(made.number), made.end
        if passage is None:  # it was stopped
            return
        try:
            passage.take(made)
        except OtherTokens as error:
            self.say(f"replica {peer.number}: {error}")
            peer.stopping.append(made.number)
            end = error
        passage.result.decode_seconds = time.perf_counter() - passage.request.began  # until its own figure comes
        if end is not None:
            del peer.running[made.number]
            peer.remember(block_keys([*passage.request.prompt, *passage.result.token_ids], passage.request.adapter))
            passage.end(end)

    def _join(self, peer: Peer, facts: Facts) -> None:
        """A replica is ready."""
        if self._facts is None:
            self._facts = facts
            for line in facts.lines:
                self.say(line)
        self.say(f"replica {peer.number} is ready: {facts.place}, {facts.slots} slots")
        if (facts.build, facts.ctx) != (self._facts.build, self._facts.ctx):
            self.say(f"note    replica {peer.number} is not like the first one; its tokens may differ: {facts.build}")
        peer.up, peer.slots = True, facts.slots

    def _lose(self, peer: Peer, why: str, failure: BaseException | None = None) -> None:
        """A replica has died, and Ray starts it again. Its requests wait again, before all others.

        failure: why it will never be ready again. When that holds for all, all requests end.
        """
        if self._closing.is_set():
            return
        said = peer.up or failure is not None  # else another process ends before it is ready, and Ray's logs say why
        lost = peer.clear()
        for passage in lost:
            passage.begin_again(1 / len(lost))
        again = [passage for passage in lost if not passage.request.ended]
        for passage in reversed(again):
            self._queue.put(passage, passage.keys, first=True)
        if said:
            moved = f"; {len(again)} requests begin again on another one" if again else ""
            self.say(f"replica {peer.number} is lost: {why}{moved}")
        if failure is not None:
            peer.gone, self._failure = True, failure

    # ---- the threads, one for each replica ---------------------------------------------------------------------

    def _follow(self, peer: Peer) -> None:
        """Take the news of one replica until it has gone for good."""
        import ray
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

        asked = peer.actor.load.remote()
        while not (self._closing.is_set() or peer.gone):
            try:
                told = ray.get(asked, timeout=self._deadline if peer.up else TICK)
            except GetTimeoutError:
                if not peer.up:  # it loads, or Ray has no place for it yet
                    told = None
                else:
                    told = f"it has not answered for {self._deadline:g} s", None
                    ray.kill(peer.actor, no_restart=False)
            except RayTaskError as error:
                told = f"it has failed: {one_line(error.cause)}", error.cause
                ray.kill(peer.actor)
            except ActorDiedError:
                told = "Ray does not start it again", RankLost(f"replica {peer.number} has ended.")
            except RayError:
                told = "its process has ended", None
            with self._changed:
                match told:
                    case Facts():
                        self._join(peer, told)
                    case News():
                        peer.figures = told.figures
                        for made in told.made:
                            self._take(peer, made)
                    case why, failure:
                        self._lose(peer, why, failure)
                self._dispatch()
                self._changed.notify_all()
                stopping, peer.stopping = peer.stopping, []
            if peer.up:
                asked = peer.actor.news.remote(stopping)
            elif told is not None:
                self._closing.wait(TICK)  # in which Ray begins another process
                asked = peer.actor.load.remote()


def start_actors(asked: LoadOptions, count: int, address: str | None, *arguments: object) -> list[Any]:
    """Reach Ray, or start one, and let it place the replicas. Returns their handles at once.

    asked: for each of them. arguments: of Replica, after the options of `load`.
    """
    for name, value in {**ENVIRONMENT, **({} if address else OWN)}.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UsageError('--replicas needs Ray: pip install "ray>=2.60"') from None

    ranks, on_gpu = asked.tp or 1, asked.place == "cuda"
    quiet = {"log_to_driver": False, "logging_level": "FATAL", "configure_logging": True}
    if address is None:
        cpus = default_threads()
        ray.init(num_cpus=max(cpus, count * ranks), include_dashboard=False, object_store_memory=100 << 20, **quiet)
    else:
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            why = f"--ray-address {address}: {one_line(error)}. A Ray with a token needs RAY_AUTH_MODE=token."
            raise UsageError(why) from error
        cpus = int(ray.cluster_resources().get("CPU", 1))
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if on_gpu and address is None and gpus < count * ranks:
        ray.shutdown()
        raise UsageError(f"--replicas {count} need {count * ranks} GPUs, and there are {gpus}. Use fewer.")
    threads = asked.threads or max(1, cpus // (count * ranks))
    needs = {"num_cpus": 1, "num_gpus": ranks} if on_gpu else {"num_cpus": threads * ranks if address else 0}
    actor = ray.remote(max_restarts=-1, **needs)(Replica)
    options = vars(replace(asked, threads=threads, device=asked.place))
    return [actor.remote(options, *arguments) for _ in range(count)]


def load_engine(args: argparse.Namespace, report: Report, cache: PromptCacheLimits | None = None) -> Intake:
    """What the arguments of a command name: an engine in this process, or replicas. cache: for earlier prompts."""
    options = options_from(args)
    if args.replicas:
        return Replicas(options, args.replicas, args.ray_address, cache, args.template, report.line)
    if args.ray_address:
        raise UsageError("--ray-address is where --replicas are; add --replicas N.")
    engine = report.load(options, args.template)
    if cache:
        keep_prompts(engine, cache, report.line)
        engine.warm_up(with_suggestions(engine.generation, settings_given(args))[0], engine.batch_size)
    return engine
