"""The endpoints: reading a request, running it on the engine, writing the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine import Engine
from serving.asking import Parse, chat_ask, completion_ask, response_ask
from serving.completions import ChatWriter, CompletionWriter
from serving.errors import SERVER, ApiError
from serving.guard import Guard
from serving.metrics import Metrics
from serving.page import chat_page
from serving.preparing import Prepared, prepare
from serving.responses import ResponseWriter
from serving.scheduler import Job, Scheduler, engine_error
from serving.settings import BODY_SECONDS, ServeSettings
from serving.streaming import EventStream, client_left, collect, error_response
from serving.writers import Writer
from support.errors import one_line

READ_ON = 16  # a body so many times as large as allowed is still read, so that its sender gets the answer
CLIENT_LEFT = 499  # the status of an answer that nobody reads


class Api:
    """The server's state and its endpoints."""

    def __init__(self, engine: Engine, settings: ServeSettings, say: Callable[[str], None]):
        """say: is given a line about every request."""
        self.engine = engine
        self.settings = settings
        self.say = say
        self.scheduler = Scheduler(engine, settings)
        self.metrics = Metrics()
        self.created = int(time.time())
        self._page = chat_page()
        self._preparing = ThreadPoolExecutor(1, "eaglet-prepare")

    def app(self) -> ASGIApp:
        """The ASGI application."""

        def post(path: str, parse: Parse, writer: type[Writer]) -> Route:
            async def endpoint(request: Request) -> ASGIApp:
                return await self.answer(request, parse, writer)

            return Route(path, endpoint, methods=["POST"])

        routes = [
            post("/v1/chat/completions", chat_ask, ChatWriter),
            post("/v1/completions", completion_ask, CompletionWriter),
            post("/v1/responses", response_ask, ResponseWriter),
            Route("/", self.chat),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.figures),
        ]
        handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self.settings, self.metrics)

    async def answer(self, request: Request, parse: Parse, writer_class: type[Writer]) -> ASGIApp:
        """One request, from its body to its answer."""
        self.scheduler.check()
        try:
            body = await read_body(request, self.settings.max_body)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        loop = asyncio.get_running_loop()
        work = (self._preparing, prepare, self.engine, self.settings, parse, body)
        prepared = await loop.run_in_executor(*work)
        writer = writer_class(prepared, self.settings.model, self.engine.tokenizer)
        job = self.scheduler.admit(prepared.streams, prepared.ask.steps)

        def ended(how: str) -> None:
            self._ended(request.url.path, how, prepared, writer)

        if prepared.ask.stream:
            return EventStream(job, prepared, writer, self.settings.send_seconds, ended)
        return await self._whole(request, job, prepared, writer, ended)

    async def _whole(
        self, request: Request, job: Job, prepared: Prepared, writer: Writer, ended: Callable[[str], None]
    ) -> Response:
        """The answer in one piece, unless the client leaves before it is complete."""
        collector = asyncio.create_task(collect(job, prepared, writer))
        watcher = asyncio.create_task(client_left(request.receive))
        how = "cancelled"
        try:
            await asyncio.wait({collector, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not collector.done():
                return Response(status_code=CLIENT_LEFT)
            how = ""
            if (failure := collector.exception()) is not None:
                raise engine_error(failure)
            return JSONResponse(writer.whole())
        finally:
            job.cancel()
            collector.cancel()
            watcher.cancel()
            ended(how)

    def _ended(self, path: str, how: str, prepared: Prepared, writer: Writer) -> None:
        """Count a request that has ended, and say a line about it."""
        counts = self.metrics.counts
        counts["cancelled_total"] += how == "cancelled"
        counts["slow_clients_total"] += how == "slow"
        results = [stream.result for stream in prepared.streams if stream.result.new_tokens]
        self.metrics.decoded(results)
        figures = writer.timings()
        read = f"{figures['prompt_n']:,} + {figures['cache_n']:,} cached"
        rate = f"{figures['predicted_per_second']:.1f} tok/s   tau {figures['tau']:.2f}"
        made = sum(result.new_tokens for result in results)
        self.say(f"{path}   prompt {read} tok   {made:,} tok   {rate}" + (f"   {how}" if how else ""))

    async def chat(self, request: Request) -> Response:
        """GET /"""
        return self._page

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        name = request.path_params["name"]
        if name != self.settings.model:
            raise ApiError(404, f"there is no model {name!r:.80}; there is {self.settings.model!r}", "model",
                           "model_not_found")  # fmt: skip
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        about = {"id": self.settings.model, "object": "model", "created": self.created, "owned_by": "eaglet"}
        chats = bool(self.engine.tokenizer and self.engine.tokenizer.chat_template_source)
        return about | {"max_model_len": self.engine.ctx, "chat_template": chats}

    async def health(self, request: Request) -> Response:
        """GET /health"""
        if self.scheduler.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def figures(self, request: Request) -> Response:
        """GET /metrics"""
        text = self.metrics.text(self.scheduler, self.engine.prompt_cache)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body. Raises ApiError if it is too large or takes too long."""
    declared = request.headers.get("content-length", "")
    stated = int(declared) if declared.isdecimal() else 0
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
    return b"".join(parts)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """An unknown path, or a method that a path does not have."""
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    what = f"{request.method} {request.url.path!r:.80}: {error.detail}"
    return error_response(ApiError(error.status_code, what, None, code))


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, one_line(error), None, "internal_error", SERVER))
