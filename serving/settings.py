"""The limits of a server, and what it calls its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MB = 1 << 20
MAX_CHOICES = 16  # answers that one request may ask for
PING_SECONDS = 15  # a stream without news gets a comment after this time, so that no proxy ends it
BODY_SECONDS = 30  # for a request's body to arrive
HEADER_BYTES = 16 << 10


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `python -m scripts.serve` decides about the server, apart from the engine."""

    model: str = "model"  # what the API calls the model
    api_key: str | None = None
    loopback: bool = True  # whether only this machine can reach the server
    max_queue: int = 8  # requests that may wait for the one that runs
    max_body: int = 2 * MB  # bytes of a request
    max_tokens: int | None = None  # tokens of one answer; None: what is left of the context
    max_seconds: float = 600  # a request that decodes for longer ends as at its token limit
    send_seconds: float = 30  # a client that takes nothing for so long is given up
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling settings where a client gives none
