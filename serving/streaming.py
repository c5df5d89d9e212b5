"""Sending an answer, whole or while it is decoded, and noticing that nobody waits for it any more."""

import asyncio
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serving.completions import Message, Writer
from serving.fields import ApiError
from serving.scheduler import engine_error

HEADER_CHARACTERS = 500
PING = b": waiting\n\n"  # a comment, which clients skip
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on at once
]


class Reply:
    """The ASGI response of a job. It cancels the job when the client leaves, or takes nothing for too long."""

    def __init__(self, writer: Writer, send_seconds: float, ended: Callable[[str], None]):
        """ended: called once with how it ended: "", "cancelled" or "slow"."""
        self.writer = writer
        self.job = writer.job
        self.send_seconds = send_seconds
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_client_left(receive))
        reply = self._stream if self.job.ask.stream else self._whole
        sender = asyncio.create_task(reply(scope, receive, send))
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

    @property
    def _headers(self) -> dict[str, str]:
        told = ", ".join(self.job.ignored).encode("ascii", "replace").decode()
        return {"X-Ignored": told[:HEADER_CHARACTERS]} if told else {}

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.job.complete()
            response = JSONResponse(self.writer.whole(), headers=self._headers)
        except Exception as failure:
            response = error_response(engine_error(failure))
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what becomes certain, all that is known at one moment together.

        Nothing is sent before the first news of the job, so that an error until then has a status of its own.
        """
        begun = False
        try:
            async for part in self.job.parts():
                messages: list[Message] = []
                if not begun:
                    begun = True
                    told = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *told]})
                    messages += self.writer.start()
                if part is not None:
                    messages += self.writer.part(part)
                if messages or part is None:
                    await self._body(send, *messages)
            if len(self.job.results) == len(self.job.answers):
                await self._body(send, *self.writer.end())
        except TimeoutError:
            raise
        except Exception as failure:
            error = engine_error(failure)
            if not begun:
                await error_response(error)(scope, receive, send)
                return
            await self._body(send, self.writer.error(error))
        await self._body(send, more=False)

    async def _body(self, send: Send, *messages: Message, more: bool = True) -> None:
        """Send messages, or where there are none a comment. more: this is not the end."""
        data = b"".join(message.encode() for message in messages)
        async with asyncio.timeout(self.send_seconds):
            await send({"type": "http.response.body", "body": data or (PING if more else b""), "more_body": more})


async def _client_left(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: ApiError) -> JSONResponse:
    """An error as an HTTP response."""
    return JSONResponse(error.body(), error.status, error.headers)
