"""Sending an answer while it is decoded, and noticing that nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serving.errors import ApiError
from serving.preparing import Prepared
from serving.scheduler import Job, engine_error
from serving.writers import Message, Writer

PING = b": waiting\n\n"  # a comment, which clients skip
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on at once
]


async def client_left(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(job: Job, prepared: Prepared, writer: Writer) -> None:
    """Read all news of a job into its answers. Raises what stopped the decoding."""
    async for event in job.events():
        if event is not None:
            answer = prepared.answers[event.index]
            answer.take(event.chunks, prepared.ask.logprobs is not None)
            if event.result is not None:
                answer.end(event.result)
    writer.queue_seconds = job.queue_seconds


async def event_bytes(job: Job, prepared: Prepared, writer: Writer) -> AsyncIterator[bytes]:
    """The events of a stream, encoded. All that is known at one moment comes together.

    Nothing comes before the first news of the job, so that an error until then has a status of its own.
    """
    begun = False
    async for event in job.events():
        messages: list[Message] = []
        if not begun:
            begun = True
            messages += writer.start()
        if event is not None:
            answer = prepared.answers[event.index]
            part = answer.take(event.chunks, prepared.ask.logprobs is not None)
            messages += writer.part(part._replace(seen=event.seen))
            writer.queue_seconds = job.queue_seconds
            if event.result is not None:
                messages += writer.part(answer.end(event.result))
        if messages or event is None:
            yield b"".join(message.encode() for message in messages) or PING
    if all(answer.result is not None for answer in prepared.answers):
        yield b"".join(message.encode() for message in writer.end())


class EventStream:
    """The ASGI response of a stream. It cancels its job when the client leaves, or takes nothing for too long."""

    def __init__(self, job: Job, prepared: Prepared, writer: Writer, send_seconds: float, ended: Callable[[str], None]):
        """ended: called once with how it ended: "", "cancelled" or "slow"."""
        self.job = job
        self.lines = event_bytes(job, prepared, writer)
        self.send_seconds = send_seconds
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(client_left(receive))
        sender = asyncio.create_task(self._send(scope, receive, send))
        how = "cancelled"
        try:
            await asyncio.wait({watcher, sender}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                error = sender.exception()
                if error is not None and not isinstance(error, TimeoutError):
                    raise error
                how = "slow" if error else ""
        finally:
            self.job.cancel()
            watcher.cancel()
            sender.cancel()
            self.ended(how)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async for data in self.lines:
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._body(send, data)
        except (ApiError, TimeoutError):
            raise
        except Exception as failure:
            error = engine_error(failure)
            if not begun:
                await error_response(error)(scope, receive, send)
                return
            await self._body(send, Message(error.body()).encode())
        await self._body(send, b"", more=False)

    async def _body(self, send: Send, data: bytes, more: bool = True) -> None:
        async with asyncio.timeout(self.send_seconds):
            await send({"type": "http.response.body", "body": data, "more_body": more})


def error_response(error: ApiError) -> JSONResponse:
    """An error as an HTTP response."""
    return JSONResponse(error.body(), error.status, error.headers)
