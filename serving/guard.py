"""Who may talk to the server. One check stands before everything else, so that no path is forgotten."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import FORBIDDEN, ApiError
from serving.metrics import Metrics
from serving.settings import ServeSettings
from serving.streaming import error_response

OPEN_PATHS = ("/", "/health")  # need no key; the page asks its user for it
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Guard:
    """ASGI middleware: the API key, the names of the server, pages of other sites, and the count of answers."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics):
        self.app = app
        self.settings = settings
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.answered(scope["path"], message["status"])
            await send(message)

        if scope["type"] != "http":
            return
        app = self.app
        try:
            self._check(scope)
        except ApiError as error:
            app = error_response(error)
        await app(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError unless this client may make this request."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise ApiError(403, "pages of other sites may not use this server", None, "wrong_origin", FORBIDDEN)
        if self.settings.api_key is None:
            # Without a key, a page could reach the server through a name of its own that leads to this machine.
            if self.settings.loopback and host and urlsplit(f"//{host}").hostname not in LOCAL_NAMES:
                why = "without an API key this server answers under the names localhost and 127.0.0.1 only"
                raise ApiError(403, why, None, "wrong_host", FORBIDDEN)
            return
        if scope["path"] in OPEN_PATHS:
            return
        kind, _, given = headers.get(b"authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(), self.settings.api_key.encode())
        if kind.lower() != "bearer" or not known:
            why = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, why, None, "invalid_api_key")
