"""One engine in several processes, each with a part of the model on a GPU (or CPU) of its own: tensor parallelism.

Rank 0 is the process that the user started. It takes the requests and leads. The others follow: they run the same engine
on the same requests, and what they compute is the same, because they draw the same noise and see the same logits. So
nothing about a token is sent between them but the sums of the layers. The leader only says which step of which request
comes next, because requests end early, and it compares from time to time what everyone has decoded.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from decoding.drafter import Drafter
from decoding.params import SamplingParams
from engine.batch import Batch
from engine.engine import Engine, Result
from engine.prompt_cache import PromptCache
from engine.request import Request
from engine.runner import Times
from engine.stepping import EngineConfig
from model import Transformer
from support.errors import INTERNAL, UsageError, UserError, one_line
from support.interrupts import held_back
from text.tokenizer import Tokenizer
from weights.shards import ExchangeFailed, exchanging

CHECK_EVERY = 16  # steps between two comparisons of what the ranks have decoded
# How long a rank waits for the next request. A rank that dies ends the wait at once.
IDLE = datetime.timedelta(days=365)
MEETING = datetime.timedelta(seconds=60)  # how long the ranks wait for each other while they start
# How long rank 0 waits for the others after that. One may read its part of a model, or compile, for some minutes.
TOGETHER = datetime.timedelta(minutes=10)
ENDING = datetime.timedelta(seconds=5)  # how long it waits for them to end
PATIENCE = 0.7  # seconds that an exchange may still take after Ctrl-C
FAILURES = (ExchangeFailed, dist.DistError)  # of an exchange


class RankLost(UserError):
    """The processes of one engine can no longer go on together."""

    code = INTERNAL


class OtherRank(UserError):
    """Another process of the engine could not load its part, or loaded a part of another model. All ranks know it."""


class Ranks:
    """One process's view of all processes of an engine. Create it in all of them at the same time."""

    def __init__(
        self, rank: int, size: int, device: str, meeting_point: str, children: Sequence[subprocess.Popen] = ()
    ):
        """A rank on a GPU takes the GPU of its number among the ranks of its machine.

        meeting_point: a URL of torch.distributed, the same for all. children: the processes that rank 0 started.
        """
        if rank:  # Ctrl-C reaches all processes of a terminal, and rank 0 acts on it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        self.rank = rank
        self.size = size
        self.here = ranks_here(size)
        self.children = children
        self.engines = 0  # that were made for these processes
        self.by = "nccl" if device == "cuda" else "gloo"  # what they exchange with
        self.alarm = Alarm(children, device) if children else None
        if self.here == size:  # nothing listens on another interface
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        try:
            store = next(dist.rendezvous(meeting_point, rank, size, timeout=MEETING))[0]
        except dist.DistError as error:  # torchrun's meeting point waits by itself
            raise RankLost(f"not all processes of --tp {size} have come: {one_line(error)}") from error
        self._wait_for_all(store)
        with self.lost(), exchanging():
            dist.init_process_group(self.by, store=store, rank=rank, world_size=size, timeout=MEETING)
            self.control = dist.new_group(backend="gloo", timeout=MEETING)
        for group in (dist.group.WORLD, self.control):
            _set_pg_timeout(IDLE if rank else TOGETHER, group)
        atexit.register(self.end if rank == 0 else close)

    def _wait_for_all(self, store: dist.Store) -> None:
        """Return when all ranks have come. Waiting in Python, not in torch, hears Ctrl-C and sees a process that ends."""
        store.set(f"here{self.rank}", "")
        deadline = time.monotonic() + MEETING.total_seconds()
        while missing := [rank for rank in range(self.size) if not store.check([f"here{rank}"])]:
            if ended := self._ended():
                raise RankLost(f"a process of --tp {self.size} ended before all had met ({ended}).")
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise RankLost(f"--tp {self.size}: rank {names} did not come within {MEETING.seconds} s; start again.")
            time.sleep(0.05)

    def _ended(self) -> str:
        """The processes that this one started and that have ended, in words."""
        statuses = [(rank, child.poll()) for rank, child in enumerate(self.children, 1)]
        return ", ".join(f"rank {rank} with status {status}" for rank, status in statuses if status is not None)

    def tell(self, *words: object) -> tuple:
        """Rank 0 says what comes next. The others call it without words, and get what rank 0 says."""
        told = [words]
        with self.lost(), exchanging():
            dist.broadcast_object_list(told, 0, self.control)
        return told[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        values = [None] * self.size
        with self.lost(), exchanging():
            dist.all_gather_object(values, value, self.control)
        return values

    def heard(self, value: Any, error: str = "") -> list[Any]:
        """What all ranks say while they load, in their order. All ranks call it, also one that cannot go on.

        error: why this rank cannot, or "". Raises OtherRank, in one line, in the ranks that could.
        """
        told = self.gather((value, error))
        for rank, (_, problem) in enumerate(told):
            if problem and not error:
                raise OtherRank(f"rank {rank}: {problem}")
        return [theirs for theirs, _ in told]

    @contextlib.contextmanager
    def lost(self) -> Iterator[None]:
        """Turn the failure of an exchange into RankLost, which names the processes that have ended."""
        try:
            with self.alarm.set() if self.alarm else contextlib.nullcontext():
                yield
        except FAILURES as error:
            raise self.loss() from error

    def loss(self) -> RankLost:
        """The error for an exchange that has just failed."""
        deadline = time.monotonic() + 1.0  # a process closes its connections shortly before its status can be seen
        while not (ended := self._ended()) and self.children and time.monotonic() < deadline:
            time.sleep(0.01)
        what = ended or "rank 0, or one of the others"
        how = f"has ended ({what})" if ended or not self.children else "does not answer"
        return RankLost(f"a process of --tp {self.size} {how}; start again.")

    def leave(self) -> None:
        """Close the connections, when all ranks are done."""
        with self.lost(), exchanging():
            dist.barrier(self.control)
        close()

    def end(self) -> None:
        """Rank 0 tells the other processes to exit. It runs when the program ends; a second call does nothing."""
        atexit.unregister(self.end)
        deadline = time.monotonic() + ENDING.total_seconds()
        with contextlib.suppress(RankLost):
            _set_pg_timeout(ENDING, self.control)
            self.tell(0, "end")
            self.leave()
        close()
        for child in self.children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
        self.children = ()


class Alarm:
    """Lets rank 0 hear Ctrl-C while it waits for a process that does not answer: the others are killed, so the wait ends.

    Python acts on a signal between two of its instructions, and an exchange is a single one. A thread sees it before.
    """

    def __init__(self, children: Sequence[subprocess.Popen], device: str):
        self.children = children
        self.computes = device == "cpu"  # who uses the CPU computes; who waits for a GPU uses it, too
        self.waits = 0  # that have begun or ended: an odd number within one
        self.heard, self.told = os.pipe()
        os.set_blocking(self.told, False)
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Watch over the block. Signals reach the main thread alone, and a block within another one is part of it."""
        if self.waits % 2 or threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = signal.set_wakeup_fd(self.told, warn_on_full_buffer=False)
        self.waits += 1
        try:
            yield
        finally:
            self.waits += 1
            signal.set_wakeup_fd(usual)

    def _watch(self) -> None:
        while number := os.read(self.heard, 1):
            wait = self.waits
            while number[0] == signal.SIGINT and wait % 2 and wait == self.waits:
                spent = time.process_time()
                time.sleep(PATIENCE)
                if wait == self.waits and not (self.computes and time.process_time() - spent > PATIENCE / 2):
                    for child in self.children:
                        child.kill()
                    break


def close() -> None:
    """Close the connections of this process, whatever the others do. Without it the process would end with an abort."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_here(size: int) -> int:
    """How many of the ranks run on this machine: all of them, unless torchrun says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


def meet(size: int, device: str, options: dict[str, Any], follower: str) -> Ranks:
    """Bring the processes of an engine together. Under torchrun they exist already, else this one starts the others.

    Args:
        options: keyword arguments of `load`, with which the others load their parts.
        follower: the module whose `follow_leader` the others run, by the name that it has here.

    Raises:
        UsageError: for a number of processes, or of GPUs, that does not fit.
        RankLost: where a process ends too early, or does not come within a minute.
    """
    started = os.environ.get("WORLD_SIZE")
    if started is not None and int(started) != size:
        raise UsageError(f"--tp {size}, but torchrun started {started} processes; give both the same number.")
    here = ranks_here(size)
    if device == "cuda" and torch.cuda.device_count() < here:
        raise UsageError(f"--tp {size} needs {here} GPUs here, and there are {torch.cuda.device_count()}. Use fewer.")
    if started is not None:
        return Ranks(int(os.environ["RANK"]), size, device, "env://")
    folder = tempfile.mkdtemp(prefix="eaglet-")  # only this user can read it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    meeting_point = f"file://{folder}/meeting"
    words = [sys.executable, "-c", f"from {follower} import follow_leader; follow_leader()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children: list[subprocess.Popen] = []
    try:
        for rank in range(1, size):
            told = {"rank": rank, "size": size, "device": device, "meeting_point": meeting_point, "options": options}
            # In a process group of its own, for Ctrl-C would otherwise end it with a traceback while it starts.
            child = subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, text=True, process_group=0)
            children.append(child)
            child.stdin.write(json.dumps(told, default=str) + "\n")
            child.stdin.flush()  # and it stays open, for its end tells the child that this process has ended
        return Ranks(0, size, device, meeting_point, children)
    except BaseException:
        for child in children:
            child.kill()
        raise


def end_with_the_leader() -> None:
    """Wait until the process that started this one has ended, and end, too: also where it was killed while it loaded."""
    sys.stdin.read()
    os._exit(INTERNAL)


class RankedBatch(Batch):
    """The requests of an engine in several processes. Rank 0 says which of them begin and end, and when all go on.

    All ranks call `go_on`, `stop` and `compare` at the same time (`_together`).
    """

    engine: RankedEngine

    def __init__(self, engine: RankedEngine):
        super().__init__(engine)
        self.known: dict[int, Request] = {}  # those whose tokens are compared next, by the number that all ranks know
        self._arrived: deque[Request] = deque()
        self._count = 0  # of requests

    @property
    def busy(self) -> bool:
        return bool(self._arrived) or super().busy

    def submit(self, request: Request) -> None:
        self._arrived.append(request)

    def begin(self, prompt: list[int], params: SamplingParams) -> None:
        """Queue a request that rank 0 has got. The other ranks call it."""
        [request] = self.engine.requests([prompt], [params])
        self._enter(request)

    def _enter(self, request: Request) -> None:
        self.known[self._count] = request
        self._count += 1
        self.waiting.append(request)

    def _together(self, name: str, *arguments: object) -> None:
        """Call one of these methods here and, as rank 0, in the other ranks, which `follow`."""
        self.engine.tell(name, *arguments)
        getattr(self, name)(*arguments)

    def settle(self) -> None:
        ending = [number for number, request in self.known.items() if request.stopping and not request.ended]
        if ending:
            try:
                with interrupts_wait():
                    self._together("stop", ending)
            except RankLost as error:  # Ctrl-C may have ended the others: then their requests end here
                self._lose(error)

    def stop(self, numbers: Sequence[int]) -> None:
        """End these requests."""
        for number in numbers:
            self._end(self.known[number])

    def iterate(self) -> None:
        self.settle()
        try:
            self._lead()
        except RankLost as error:
            self._lose(error)

    def _lose(self, error: RankLost) -> None:
        """End all requests, since nothing can go on."""
        self._abandon(error)
        self.waiting += self._arrived
        self._arrived.clear()
        for request in list(self.waiting):
            self._end(request, error)

    def _lead(self) -> None:
        with interrupts_wait(), self.engine.ranks.lost():
            while self._arrived:
                request = self._arrived[0]
                self.engine.tell("begin", request.prompt, request.params)
                self._enter(self._arrived.popleft())
            self._together("go_on")
            if self.parts % CHECK_EVERY == 0 or not self.busy:
                self._together("compare")

    def compare(self) -> None:
        """Raise RankLost unless all ranks have decoded the same tokens so far."""
        texts = self.engine.ranks.gather([list(request.result.token_ids) for request in self.known.values()])
        for rank, theirs in enumerate(texts):
            if theirs != texts[0]:
                why = "a bug, or hardware that computes differently"
                raise RankLost(f"rank {rank} decoded other tokens than rank 0: {why}.")
        self.known = {number: request for number, request in self.known.items() if not request.ended}

    def _abandon(self, error: Exception | None) -> None:
        if isinstance(error, FAILURES):
            lost = self.engine.ranks.loss()
            if self.engine.ranks.rank:  # this process ends, and rank 0 says why
                raise lost from error
            error = lost
        super()._abandon(error)


def _by_all(deed: Callable[..., Result]) -> Callable[..., Result]:
    """A method of Engine as one that all ranks run (`RankedEngine.together`)."""
    return lambda engine, *arguments: engine.together(deed, *arguments)


class RankedEngine(Engine):
    """An Engine whose model is one part of several. In rank 0 it leads, in the others `follow` runs it.

    It does not fall back to plain decoding while drafting does not pay, because the ranks measure different times, and no
    step runs ahead of the host, because an observer in one rank would hold it back there alone.
    """

    batches = RankedBatch
    patience = 0  # the ranks measure different times, and have to take equally many steps

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        drafter: Drafter | None,
        config: EngineConfig,
        ranks: Ranks,
    ):
        super().__init__(model, tokenizer, drafter, replace(config, eagle_always=True, lag=0))
        self.ranks = ranks
        self.number = ranks.engines  # among those that share the processes, which all make them in the same order
        ranks.engines += 1

    def tell(self, *words: object) -> None:
        """Rank 0 says what comes next to the others, which `follow`."""
        if self.ranks.rank == 0:
            self.ranks.tell(self.number, *words)

    def _line(self, measure: Callable[[], tuple[float, float]], rows: int, what: str) -> Times:
        """All ranks go by the times of rank 0, or they would prune their trees differently."""
        return self.ranks.gather(Times(measure(), int(self.state.n.max())))[0]

    def sibling(self, drafter: Drafter | None, config: EngineConfig) -> Engine:
        return RankedEngine(self.model, self.tokenizer, drafter, config, self.ranks)

    def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        with self.driver.alone():
            while self.ranks.rank == 0 and self.batch.full:  # a deed may need a row
                self.batch.iterate()
            self.tell("together", deed, *arguments)
            return deed(self, *arguments)

    # what an Engine does alone, all ranks do together
    twin, warm_up, margin, forget = map(_by_all, (Engine.twin, Engine.warm_up, Engine.margin, Engine.forget))

    def keep_prompts(self, cache: PromptCache) -> None:
        """Earlier prompts are not kept: only the last one's keys and values can be reused."""


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: a step that only one rank leaves would keep the others waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with held_back(signal.SIGINT) as came:
        try:
            yield
        except RankLost:
            if not came:  # else the alarm has ended the others
                raise


def follow(engine: RankedEngine, ranks: Ranks) -> None:
    """Do in this process what rank 0 says, until it ends."""
    engines: dict[int, RankedEngine] = {engine.number: engine}
    with ranks.lost():
        while True:
            match ranks.tell():
                case _, "end":
                    return ranks.leave()
                case number, "together", deed, *arguments:
                    with contextlib.suppress(ValueError):  # rank 0 raises it, too
                        made = deed(engines[number], *arguments)
                        if isinstance(made, RankedEngine):
                            engines[made.number] = made
                case number, name, *arguments:  # of a method of its batch
                    getattr(engines[number].batch, name)(*arguments)
