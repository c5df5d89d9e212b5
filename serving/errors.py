"""Errors that a client gets, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

INVALID, FORBIDDEN, BUSY, SERVER = "invalid_request_error", "permission_error", "rate_limit_error", "server_error"


class ApiError(Exception):
    """An answer that says in one line what is wrong with a request, or why it cannot be done now."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        retry_after: int | None = None,
        close: bool = False,
    ):
        """The HTTP status, and the fields of the error object.

        Args:
            param: the field of the request that is wrong.
            kind: the error's `type`.
            retry_after: seconds after which the client may try again.
            close: end the connection after this answer.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
        self.headers |= {"Connection": "close"} if close else {}

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def wrong(param: str, why: str) -> ApiError:
    """The error for a field with a value that is not allowed."""
    return ApiError(400, f"{param} {why}", param, "invalid_value")


def unsupported(param: str, why: str) -> ApiError:
    """The error for a field that the API knows and this server does not."""
    return ApiError(400, f"{param} is not supported: {why}", param, "unsupported_parameter")


def too_long(param: str, message: str) -> ApiError:
    """The error for a prompt that does not fit into the context."""
    return ApiError(400, message, param, "context_length_exceeded")
