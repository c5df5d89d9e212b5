"""The endpoints, and who may use them: reading a request, running it, writing the answer; the page and the figures."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cli.steps import with_drawings
from engine.intake import Intake
from serving.completions import ChatWriter, CompletionWriter, Writer
from serving.extras import FACTS, SMALL, Deed, Facts
from serving.fields import FORBIDDEN, SERVER, ApiError, parse_object
from serving.messages import MessageWriter, message_ask
from serving.metrics import Metrics
from serving.requests import Parse, chat_ask, completion_ask, response_ask
from serving.responses import ResponseWriter
from serving.scheduler import Scheduler, ServeSettings
from serving.streaming import Reply, error_response
from support.errors import one_line

READING = ("/", "/health", "/metrics", "/v1/models", *FACTS)
ENDPOINTS: dict[str, tuple[Parse, type[Writer]]] = {  # what reads a request, and what writes its answer
    "/v1/chat/completions": (chat_ask, ChatWriter),
    "/v1/completions": (completion_ask, CompletionWriter),
    "/v1/responses": (response_ask, ResponseWriter),
    "/v1/messages": (message_ask, MessageWriter),
}
PATHS = (*READING, *ENDPOINTS, *SMALL)
BODY_SECONDS = 30  # for a request's body to arrive
READ_ON = 16  # a body so many times as large as allowed is still read, so that its sender gets the answer
CLIENT_LEFT = 499  # the status of an answer that nobody reads
OPEN_PATHS = ("/", "/health")  # need no key; the page asks its user for it
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Private-Network": "true",  # a page of the internet asks for this computer
    "Access-Control-Max-Age": "600",
}
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Api:
    """The server's state and its endpoints."""

    def __init__(self, engine: Intake, settings: ServeSettings, say: Callable[[str], None]):
        """say: is given a line about every request."""
        self.engine = engine
        self.settings = settings
        self.say = say
        self.scheduler = Scheduler(engine, settings)
        self.metrics = Metrics(PATHS)
        self.created = int(time.time())

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            *(Route(path, partial(self.answer, kinds=kinds), methods=["POST"]) for path, kinds in ENDPOINTS.items()),
            *(Route(path, partial(self.small, deed=deed), methods=["POST"]) for path, deed in SMALL.items()),
            Route("/", chat_page(), methods=["GET"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.figures),
            *(Route(path, partial(self.told, facts=facts)) for path, facts in FACTS.items()),
        ]
        handlers = {kind: self._error for kind in (ApiError, ClientDisconnect, HTTPException, Exception)}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self.settings, self.metrics, self._refused)

    async def answer(self, request: Request, kinds: tuple[Parse, type[Writer]]) -> ASGIApp:
        """One request, from its body to its answer. kinds: an entry of ENDPOINTS."""
        self.scheduler.check()
        parse, writer_class = kinds
        writer = writer_class(await self.scheduler.admit(parse, await read_body(request, self.settings.max_body)))
        return Reply(writer, self.settings.send_seconds, partial(self._ended, request.scope["path"], writer))

    async def small(self, request: Request, deed: Deed) -> Response:
        """A request that decodes nothing. One that runs the model does so between two steps of the others."""
        self.scheduler.check()
        body = parse_object(await read_body(request, self.settings.max_body))
        loop = asyncio.get_running_loop()
        told = await loop.run_in_executor(self.scheduler.preparing, deed, self.engine, self.settings, body)
        return JSONResponse(told)

    async def told(self, request: Request, facts: Facts) -> Response:
        """A request for facts that do not change."""
        return JSONResponse(facts(self.engine, self.settings))

    async def _error(self, request: Request, error: Exception) -> Response:
        """The answer for an error of an endpoint, for an unknown path, or for a method that a path does not have."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_LEFT)
        if isinstance(error, HTTPException):
            if error.status_code == 405 and request.method == "OPTIONS":
                return Response(status_code=204, headers=error.headers)
            code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
            what = f"{request.method} {request.scope['path']!r:.80}: {error.detail}"
            if error.status_code == 404:
                what += f"; there are GET {', '.join(READING)} and POST {', '.join((*ENDPOINTS, *SMALL))}"
            elif error.status_code == 405:
                what += f"; allowed: {(error.headers or {}).get('Allow', 'none')}"
            error = ApiError(error.status_code, what, None, code)
        elif not isinstance(error, ApiError):
            error = ApiError(500, one_line(error, notes=False), None, "internal_error", SERVER)
        return self._refused(request.scope["path"], error)

    def _refused(self, path: str, error: ApiError) -> Response:
        """The answer for an error, and a line about it."""
        self.say(f"{path if path in PATHS else repr(path)[:80]}   {error.status}   {error.message:.300}")
        return error_response(error)

    def _ended(self, path: str, writer: Writer, how: str) -> None:
        """Count a request that has ended, and say a line about it. how: "", "cancelled" or "slow"."""
        counts = self.metrics.counts
        counts["cancelled_total"] += how == "cancelled"
        counts["slow_clients_total"] += how == "slow"
        results = [answer.result for answer in writer.job.answers]
        results = [result for result in results if result.new_tokens or result.stop_reason == "length"]
        self.metrics.decoded(results, writer.job.queue_seconds)
        figures = writer.timings(results)
        read = f"{figures['prompt_n']:,} + {figures['cache_n']:,} cached"
        rate, steps = f"{figures['predicted_per_second']:.1f} tok/s", figures["steps"]
        if drafted := sum(len(result.drafted) for result in results):
            rate += f"   tau {figures['tau']:.2f}" + (f" in {drafted} of {steps} steps" if drafted < steps else "")
        made = sum(result.new_tokens for result in results)
        notes = [f"ignored: {', '.join(writer.job.ignored)}"] if writer.job.ignored else []
        self.say("   ".join([path, f"prompt {read} tok", f"{made:,} tok", rate, *notes, *([how] if how else [])]))

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        name = request.path_params["name"]
        if name not in self._names:
            known = ", ".join(map(repr, self._names))
            raise ApiError(404, f"there is no model {name!r:.80}; there is {known}", "model", "model_not_found")
        return JSONResponse(self._model(name))

    @property
    def _names(self) -> tuple[str, ...]:
        """The base model, or the only adapter's, and the adapters among which a request chooses."""
        return self.settings.model, *self.engine.adapters

    def _model(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self.created, "owned_by": "eaglet"}
        chats = bool(self.engine.tokenizer and self.engine.tokenizer.chat_template_source)
        return about | {"max_model_len": self.engine.ctx, "chat_template": chats}

    async def health(self, request: Request) -> Response:
        """GET /health"""
        if self.scheduler.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        if problem := self.engine.problem:
            return JSONResponse({"status": problem}, 503, {"Retry-After": "5"})
        return JSONResponse({"status": "ok"})

    async def figures(self, request: Request) -> Response:
        """GET /metrics"""
        return PlainTextResponse(self.metrics.text(self.scheduler), media_type="text/plain; version=0.0.4")


def known_path(path: str) -> str:
    """A path as the endpoints have it. Clients also write it without /v1, with it twice, and with more slashes."""
    plain = f"/{'/'.join(filter(None, path.split('/')))}"
    short = re.sub("^(/v1)+(?=/)", "", plain)
    named = short.startswith("/models/")
    return next((each for each in (f"/v1{short}", short) if named or each in PATHS), plain)


def unpacked(data: bytes, coding: str, limit: int) -> bytes:
    """A body as it was before its Content-Encoding. Raises ApiError if it has another one, or is damaged or too large."""
    if coding in ("", "identity"):
        return data
    if coding not in ("gzip", "x-gzip", "deflate"):
        why = f"the Content-Encoding {coding!r:.40} is not supported; allowed: gzip, deflate, or none"
        raise ApiError(415, why, None, "unsupported_encoding")
    for bits in (32 + zlib.MAX_WBITS, -zlib.MAX_WBITS):  # with a header, or as some clients send deflate
        reader = zlib.decompressobj(bits)
        with contextlib.suppress(zlib.error):
            text = reader.decompress(data, limit + 1)
            if len(text) > limit:
                raise ApiError(413, f"the body unpacks to more than {limit:,} bytes", None, "request_too_large")
            if reader.eof and not reader.unused_data:
                return text
    raise ApiError(400, f"the body is not what its Content-Encoding {coding} says", None, "invalid_encoding")


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body, unpacked. Raises ApiError if it is too large, takes too long, or cannot be unpacked."""
    stated = int(request.headers.get("content-length", 0))  # h11 lets no other text than digits through
    large = ApiError(413, f"the body is larger than {limit:,} bytes", None, "request_too_large", close=True)
    if stated > READ_ON * limit:
        raise large
    parts: list[bytes] = []
    total = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                total += len(part)
                if total <= limit:
                    parts.append(part)
                elif total > READ_ON * limit:
                    break
    except TimeoutError:
        why = f"the body did not arrive within {BODY_SECONDS} s"
        raise ApiError(408, why, None, "request_timeout", close=True) from None
    if total > limit:
        raise large
    return unpacked(b"".join(parts), request.headers.get("content-encoding", "").strip().lower(), limit)


class Guard:
    """ASGI middleware: the API key, the names of the server, pages of other sites, and the count of answers."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, metrics: Metrics, refused: Callable[[str, ApiError], Response]
    ):
        """refused: makes an answer of a path and an error."""
        self.app = app
        self.refused = refused
        self.settings = settings
        self.metrics = metrics
        self.names = (*LOCAL_NAMES, *settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.answered(scope["path"], message["status"])
                message["headers"] = [*message.get("headers", ()), *shared]
            await send(message)

        app, scope = self.app, scope | {"path": known_path(scope["path"])}
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        # whether pages of this origin may use the server although it is another site
        listed = bool(origin) and not {origin, "*"}.isdisjoint(self.settings.cors_origins)
        shared = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")] if listed else []
        try:
            # A browser asks before it sends the request itself, and it asks without the key.
            if listed and scope["method"] == "OPTIONS":
                asked = headers.get("access-control-request-headers", "")
                app = Response(status_code=204, headers=PREFLIGHT | {"Access-Control-Allow-Headers": asked})
            else:
                self._check(scope["path"], headers, listed)
        except ApiError as error:
            app = self.refused(scope["path"], error)
        await app(scope, receive, counted)

    def _check(self, path: str, headers: Headers, listed: bool) -> None:
        """Raise ApiError unless this client may make this request. listed: whether its origin may use the server."""
        host = headers.get("host", "")
        try:
            hostname = urlsplit(f"//{host}").hostname
        except ValueError:
            raise ApiError(400, "the Host header is no name or address", None, "wrong_host") from None
        origin = headers.get("origin", f"http://{host}")
        if origin.partition("://")[2] != host and not listed:
            raise ApiError(403, "pages of other sites may not use this server", None, "wrong_origin", FORBIDDEN)
        if not self.settings.api_keys:
            # Such a server listens on this machine alone, to which a page of another site could give a name of its own.
            if host and hostname not in self.names:
                why = f"without an API key this server answers under the names {', '.join(self.names)} only"
                raise ApiError(403, why, None, "wrong_host", FORBIDDEN)
            return
        if path in OPEN_PATHS:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")  # how Anthropic's clients send it
        # all are compared, so that the time tells nothing about them
        known = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.settings.api_keys]
        if not any(known):
            why = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, why, None, "invalid_api_key")


HERE = Path(__file__).parent
# The page may run its own scripts and style, which it names by their hashes, and talk to its own server. That is all.
POLICY = (
    "default-src 'none'; connect-src 'self'; script-src {scripts}; style-src {style}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def chat_page() -> HTMLResponse:
    """The page with its headers. The same answer serves every request."""
    files = ("page.html", "page.css", "page.js", "markdown.js", "answer.js", "vendor/markdown-it.min.js")
    page, style, script, *parts, library = (with_drawings((HERE / name).read_text(encoding="utf-8")) for name in files)
    script = script.replace("%markdown.js%", parts[0]).replace("%answer.js%", parts[1])
    page = page.replace("%page.css%", style).replace("%markdown-it.min.js%", library).replace("%page.js%", script)
    headers = {
        "Content-Security-Policy": POLICY.format(scripts=f"{_hash(library)} {_hash(script)}", style=_hash(style)),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)


def _hash(text: str) -> str:
    """How a Content-Security-Policy names a script or a style that stands in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
