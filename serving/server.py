"""The process around the application: its socket, its signals, how it ends, and where it keeps its prompt cache."""

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from engine.engine import Engine
from engine.prompt_cache import FORM, PromptCache
from engine.ranks import RankedEngine
from serving.scheduler import Scheduler, ServeSettings
from support import cache
from support.errors import INTERNAL, UsageError
from support.files import runs
from weights.quantized import weights_digest

CONNECTIONS = 256  # open at the same time; more get 503
KEEP_ALIVE = 75  # seconds that a connection without a request stays open
HEADER_BYTES = 16 << 10


def bind(host: str, port: int, settings: ServeSettings) -> socket.socket:
    """A socket that is bound to the address, and does not listen yet. Raises UsageError if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # ends connections whose other side takes nothing any more
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * settings.send_seconds))
        sock.bind(address)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"cannot listen on {host}:{port} ({why}). Choose another --host or --port.") from error
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to this name or address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


class Server(uvicorn.Server):
    """uvicorn, which at the first signal lets the requests under way end and refuses new ones with 503.

    A second signal ends at once.
    """

    def __init__(self, app: ASGIApp, scheduler: Scheduler, settings: ServeSettings, say: Callable[[str], None]):
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(settings.send_seconds) + 1,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        super().__init__(config)
        self.scheduler = scheduler
        self.say = say

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.scheduler.draining:
            self.should_exit = self.force_exit = True
        self.scheduler.draining = True
        self.say(f"ending: {len(self.scheduler.jobs)} requests under way; another signal ends at once")

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second."""
        if self.scheduler.draining and not self.scheduler.jobs:
            self.should_exit = True
        return await super().on_tick(counter)

    def serve_on(self, sock: socket.socket) -> int:
        """Serve until a signal comes. Returns the exit code."""
        self.run(sockets=[sock])
        return INTERNAL if self.scheduler.broken else 0


class PromptCacheLimits(NamedTuple):
    """The options of the prompt cache."""

    memory_mb: int
    disk_mb: int
    keep: bool  # on disk, for the next start


def keep_prompts(engine: Engine, limits: PromptCacheLimits, say: Callable[[str], None]) -> None:
    """Have an engine keep earlier prompts within these limits."""
    if limits.memory_mb and isinstance(engine, RankedEngine):
        say("note    with --tp the last prompt is reused, and earlier ones are not kept (--prompt-cache-mb)")
    elif limits.memory_mb:
        folder = prompt_folder(engine, limits.keep) if limits.disk_mb else None
        engine.keep_prompts(PromptCache(limits.memory_mb, limits.disk_mb, folder, limits.keep))


def prompt_folder(engine: Engine, keep: bool) -> Path:
    """The folder for this engine's prompts.

    With `keep` every server of the same model and options has the same one. Otherwise it belongs to this process, and
    what processes left that ended without cleaning up is deleted.
    """
    place = cache.folder() / "prompts"
    if keep:
        return place / _fingerprint(engine)
    for old in place.glob("process-*"):
        if re.fullmatch(r"process-\d+", old.name) and not runs(int(old.name.removeprefix("process-"))):
            shutil.rmtree(old, ignore_errors=True)
    return place / f"process-{os.getpid()}"


def _fingerprint(engine: Engine) -> str:
    """A name for everything that the rows of the caches depend on. It reads all weights once."""
    options = engine.options
    how = (engine.model.config, engine.backend.mode, options and (options.quant, options.kv, options.activations))
    how += engine.drafter.ring, engine.drafter.kept, FORM
    digest = hashlib.sha256(repr(how).encode())
    for model in (engine.model, *engine.drafter.cached_models):
        digest.update(weights_digest(model).encode())
    kept = *engine.state.kv, *engine.drafter.caches, *(engine.state.memory or ())
    shapes = [(tuple(t.shape), str(t.dtype)) for t in kept]
    digest.update(repr(shapes).encode())
    return digest.hexdigest()[:24]
