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
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from cli.report import Report
from decoding.step import Observer
from engine.grammar import Grammars
from engine.intake import Intake, Result
from engine.ranks import RankLost
from engine.request import Inbox, Request
from engine.results import Chunk, GenerationResult
from loading.options import LoadOptions, options_from
from serving.fields import SERVER, ApiError
from serving.replica import Facts, Made, News, Replica
from serving.server import PromptCacheLimits, keep_prompts
from support.errors import UsageError, bad_files, one_line
from support.machine import default_threads
from text.tokenizer import load_tokenizer

BLOCK = 16  # tokens of a text that are remembered together
SEEN = 1 << 16  # blocks that are remembered of each replica
BLAME = 5.0  # deaths of replicas for which a request alone is to blame, after which it ends
LOADS = 20  # ends of a replica that is not ready yet, after which it is given up
DEADLINE = 120.0  # seconds; a replica whose requests have not moved for so long hangs
TICK = 1.0  # seconds between two looks at requests that wait
CLOSING = 10.0  # seconds that replicas get for their end
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


class Spot:
    """What decides whether a replica gets a request: what it runs, and what its caches may hold."""

    def __init__(self, number: int, slots: int = 0):
        self.number = number
        self.slots = slots
        self.running: dict[int, Passage] = {}
        self.seen: OrderedDict[int, None] = OrderedDict()  # keys of texts, the latest last

    def remember(self, keys: Sequence[int]) -> None:
        """The caches hold this text now."""
        for key in keys:
            self.seen[key] = None
            self.seen.move_to_end(key)
        while len(self.seen) > SEEN:
            self.seen.popitem(last=False)

    def common(self, keys: Sequence[int]) -> int:
        """How many blocks of a text the caches may hold."""
        return next((i for i, key in enumerate(keys) if key not in self.seen), len(keys))


def choose(keys: Sequence[int], spots: Sequence[Spot]) -> Spot:
    """The spot that has seen the most of a text, if that is half of it or more. Else the one with the least to do."""
    common = [spot.common(keys) for spot in spots]
    if 0 < len(keys) <= 2 * max(common):
        spots = [spot for spot, blocks in zip(spots, common, strict=True) if blocks == max(common)]
    return min(spots, key=lambda spot: (len(spot.running) / spot.slots, len(spot.seen)))


class OtherTokens(RuntimeError):
    """A replica has answered a request in another way than the one before it."""


class Passage:
    """A request on its way through one replica after another."""

    def __init__(self, request: Request):
        self.request = request
        self.keys = block_keys(request.prompt, request.adapter)
        self.blame = 0.0  # for the deaths of replicas that ran it
        self._tokens = self._characters = 0  # that this replica has given

    def begin_again(self, share: float) -> None:
        """The next replica begins at the first token. share: of the blame for the end of this one."""
        self.blame += share
        self._tokens = self._characters = 0

    def take(self, chunk: Chunk) -> None:
        """Hand on what is new. Raises OtherTokens where the rest is not what was handed on before."""
        result = self.request.result
        ids, text = chunk.token_ids, chunk.text
        known = result.token_ids[self._tokens : self._tokens + len(ids)]
        shown = result.text[self._characters : self._characters + len(text)]
        self._tokens += len(ids)
        self._characters += len(text)
        if ids[: len(known)] != known or not text.startswith(shown):
            raise OtherTokens("a replica that took over has answered otherwise; their devices or builds are not equal")
        new = Chunk(chunk.row, ids[len(known) :], text[len(shown) :], chunk.logprobs[len(known) :])
        if new.token_ids or new.text:
            result.token_ids += new.token_ids
            result.text += new.text
            self.request.inbox.put(new)

    def end(self, end: GenerationResult | Exception | None) -> None:
        """The request ends: with its result, with an error, or because nobody reads it (None)."""
        result, failed = self.request.result, isinstance(end, Exception)
        if isinstance(end, GenerationResult):
            if end.token_ids[: len(result.token_ids)] != result.token_ids:
                end = OtherTokens("the result of a replica has other tokens than its chunks; please report this")
            else:
                vars(result).update(vars(end))
        elif not failed:
            result.stop_reason = "interrupted"
        self.request.ended = True
        self.request.inbox.end(end if isinstance(end, Exception) else None)


class Peer(Spot):
    """The front's side of one replica."""

    def __init__(self, number: int, actor: Any):
        """actor: Ray's handle."""
        super().__init__(number)
        self.actor = actor
        self.up = self.gone = False  # whether it decodes; whether it never will again
        self.deaths = self.requests = self.prefix_hits = 0  # so far
        self.failures = 0  # ends of its process since it was ready
        self.parts = -1
        self.moved = 0.0  # when its requests went on
        self.figures: dict[str, float] = {}
        self.stopping: list[int] = []  # requests whose end it has not been told yet

    def clear(self) -> None:
        """Its process has ended."""
        self.deaths += self.up
        self.up = False
        self.running.clear()
        self.seen.clear()
        self.stopping.clear()
        self.figures = {}

    def counts(self) -> dict[str, float]:
        """What the front counts of it."""
        totals = {"deaths": self.deaths, "requests": self.requests, "prefix_hits": self.prefix_hits}
        return {"replica_up": int(self.up)} | {f"replica_{name}_total": count for name, count in totals.items()}


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
        self._problem: BaseException | None = None  # why the last one that has gone did not start
        self._waiting: deque[Passage] = deque()
        self._lock = threading.RLock()  # of everything here that changes
        self._number = 0  # of requests that a replica got
        self._closing = threading.Event()
        self.peers = [Peer(i, actor) for i, actor in enumerate(start_actors(asked, options, count, address, cache))]
        self._changed = threading.Condition(self._lock)  # a replica has come or gone
        self._threads = [threading.Thread(target=self._follow, args=(peer,), daemon=True) for peer in self.peers]
        for thread in self._threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._facts is not None or self.lost)
        if self._facts is None:
            self.close()
            raise self._problem
        self.ctx, self.adapters = self._facts.ctx, self._facts.adapters
        self.batch_size = self._facts.slots * count

    # ---- what an intake has ------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        return "" if any(peer.up for peer in self.peers) else "no replica is up; try again soon"

    def figures(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {f'{{replica="{peer.number}"}}': peer.counts() | peer.figures for peer in self.peers}

    def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        """deed(engine, *arguments) on the replica that has the least to do."""
        import ray

        for _ in range(LOADS):
            with self._lock:
                up = [peer for peer in self.peers if peer.up]
                peer = choose([], up) if up else None
            if peer is None:
                break
            try:
                return ray.get(peer.actor.together.remote(deed, *arguments), timeout=self._deadline)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError:
                time.sleep(TICK)  # its thread sees it, too
        raise ApiError(503, "no replica is up; try again soon", None, "no_replica", SERVER, 5)

    def add_observer(self, observer: Observer) -> None:
        raise ValueError("the steps of replicas cannot be watched.")

    def close(self) -> None:
        """End the replicas, and the Ray that was started for them."""
        import ray

        self._closing.set()
        with contextlib.suppress(ray.exceptions.RayError):  # one that has died needs no end
            ray.wait([p.actor.close.remote() for p in self.peers], num_returns=len(self.peers), timeout=CLOSING)
        for peer in self.peers:
            ray.kill(peer.actor)
        for thread in self._threads:
            thread.join()
        ray.shutdown()

    # ---- what the driver of a stream has -----------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Any thread may call this."""
        with self._lock:
            self._waiting.append(Passage(request))
            self._dispatch()

    def pump(self) -> None:
        """The replicas run by themselves."""

    def serve(self, inbox: Inbox) -> None:
        """Return when the inbox has something to read."""
        inbox.wait()

    def settle(self) -> None:
        """End the requests that shall end. A replica hears of it within HEARTBEAT seconds, and nobody waits for that."""
        with self._lock:
            for passage in [*self._waiting, *(p for peer in self.peers for p in peer.running.values())]:
                if passage.request.stopping:
                    self._give_up(passage)

    # ---- who decodes what --------------------------------------------------------------------------------------

    def _give_up(self, passage: Passage, error: Exception | None = None) -> None:
        """End a request here, wherever it is."""
        if passage in self._waiting:
            self._waiting.remove(passage)
        for peer in self.peers:
            for number in [number for number, p in peer.running.items() if p is passage]:
                del peer.running[number]
                peer.stopping.append(number)
        passage.end(error)

    def _dispatch(self) -> None:
        """Hand out the requests that wait, as far as there are free slots."""
        self.settle()
        while self.lost and self._waiting:
            self._waiting.popleft().end(RankLost("no replica is left."))
        while self._waiting:
            free = [peer for peer in self.peers if peer.up and len(peer.running) < peer.slots]
            if not free:
                return
            passage = self._waiting.popleft()
            request, peer = passage.request, choose(passage.keys, free)
            request.began = request.began or time.perf_counter()
            peer.moved = time.monotonic()
            peer.requests += 1
            peer.prefix_hits += bool(passage.keys) and 2 * peer.common(passage.keys) >= len(passage.keys)
            peer.remember(passage.keys)
            self._number += 1
            peer.running[self._number] = passage
            adapter = self.adapters[request.adapter - 1] if request.adapter else ""
            peer.actor.begin.remote(self._number, request.prompt, request.params, adapter)

    def _follow(self, peer: Peer) -> None:
        """Take the news of one replica until it has gone for good. It has this thread for itself."""
        from ray.exceptions import ActorDiedError, RayError, RayTaskError

        while not (self._closing.is_set() or peer.gone):
            try:
                self._ready(peer, self._result(peer.actor.load.remote()))
                self._lose(peer, self._listen(peer))
            except RayTaskError as error:
                self._lose(peer, f"it cannot start: {one_line(error.cause)}", error.cause)
            except ActorDiedError:
                self._lose(peer, "Ray does not start it again", RankLost(f"replica {peer.number} has ended."))
            except RayError:
                self._lose(peer, "its process has ended")
                self._closing.wait(TICK)  # in which Ray begins another one

    def _result(self, reference: Any) -> Any:
        """What a call gives, after a wait without an end: Ray may have no place for the replica yet."""
        import ray

        while True:
            try:
                return ray.get(reference, timeout=TICK)
            except ray.exceptions.GetTimeoutError:
                with self._lock:
                    self._dispatch()

    def _listen(self, peer: Peer) -> str:
        """Take news while the replica runs. Returns why it does not any more."""
        import ray

        while True:
            with self._lock:
                stopping, peer.stopping = peer.stopping, []
            try:
                news = ray.get(peer.actor.news.remote(stopping), timeout=self._deadline)
            except ray.exceptions.GetTimeoutError:
                why = f"it has not answered for {self._deadline:g} s"
                break
            with self._lock:
                self._take(peer, news)
                self._dispatch()
                if news.parts != peer.parts or not peer.running:
                    peer.parts, peer.moved = news.parts, time.monotonic()
                elif time.monotonic() - peer.moved > self._deadline:
                    why = f"its requests have not moved for {self._deadline:g} s"
                    break
        ray.kill(peer.actor, no_restart=False)
        return why

    def _take(self, peer: Peer, news: News) -> None:
        peer.figures = news.figures
        for made in news.made:
            passage = peer.running.get(made.number)
            if passage is not None:
                self._take_one(peer, passage, made)

    def _take_one(self, peer: Peer, passage: Passage, made: Made) -> None:
        result = passage.request.result
        try:
            for chunk in made.chunks:
                passage.take(chunk)
        except OtherTokens as error:
            self.say(f"replica {peer.number}: {error}")
            self._give_up(passage, error)
            return
        result.decode_seconds = time.perf_counter() - passage.request.began  # until its own figure comes
        if made.end is not None:
            del peer.running[made.number]
            peer.remember(block_keys([*passage.request.prompt, *result.token_ids], passage.request.adapter))
            passage.end(made.end)

    # ---- who comes and goes ------------------------------------------------------------------------------------

    def _ready(self, peer: Peer, facts: Facts) -> None:
        with self._changed:
            peer.up, peer.slots, peer.failures, peer.moved = True, facts.slots, 0, time.monotonic()
            if self._facts is None:
                self._facts = facts
                for line in facts.lines:
                    self.say(line)
            self.say(f"replica {peer.number} is ready: {facts.place}, {facts.slots} slots")
            if (facts.build, facts.ctx) != (self._facts.build, self._facts.ctx):
                self.say(
                    f"note    replica {peer.number} is not like the first one; its tokens may differ: {facts.build}"
                )
            self._changed.notify_all()
            self._dispatch()

    def _lose(self, peer: Peer, why: str, final: BaseException | None = None) -> None:
        """A replica has died, and Ray starts it again. Its requests wait again, before all others.

        final: why it will never be ready. If that holds for all, all requests end.
        """
        import ray

        if self._closing.is_set():
            return
        with self._changed:
            lost, was_up = list(peer.running.values()), peer.up
            for passage in lost:
                passage.begin_again(1 / len(lost))
                if passage.blame >= BLAME:
                    passage.end(RuntimeError("several replicas have died while they decoded this request"))
            again = [passage for passage in lost if not passage.request.ended]
            self._waiting.extendleft(reversed(again))
            peer.clear()
            peer.failures += not was_up
            if peer.failures == LOADS:
                final = RankLost(f"replica {peer.number} has ended {LOADS} times before it was ready.")
            if was_up or final:
                self.say(f"replica {peer.number} is lost: {why}; {len(again)} requests begin again on another one")
            if final:
                peer.gone, self._problem = True, final
                ray.kill(peer.actor)
                self.lost = all(peer.gone for peer in self.peers)
            self._changed.notify_all()
            self._dispatch()


def start_actors(
    asked: LoadOptions, options: dict[str, Any], count: int, address: str | None, cache: PromptCacheLimits | None
) -> list[Any]:
    """Reach Ray, or start one, and let it place the replicas. Returns their handles at once."""
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
        try:
            ray.init(address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"--ray-address {address}: {one_line(error)}") from error
        cpus = int(ray.cluster_resources().get("CPU", 1))
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if on_gpu and address is None and gpus < count * ranks:
        ray.shutdown()
        raise UsageError(f"--replicas {count} need {count * ranks} GPUs, and there are {gpus}. Use fewer.")
    threads = asked.threads or max(1, cpus // (count * ranks))
    needs = {"num_cpus": 1, "num_gpus": ranks} if on_gpu else {"num_cpus": threads * ranks if address else 0}
    actor = ray.remote(max_restarts=-1, **needs)(Replica)
    options = {**options, "threads": threads, "device": asked.place}
    return [actor.remote(options, cache) for _ in range(count)]


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
        engine.warm_up()
    return engine
