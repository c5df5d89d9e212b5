"""The JSON of a request, read strictly: what is wrong with it is an error that names the field."""

from __future__ import annotations

import json
import math
from typing import Any

from support.reader import parse_json

INVALID, FORBIDDEN, BUSY, SERVER = "invalid_request_error", "permission_error", "rate_limit_error", "server_error"


class ApiError(Exception):
    """An answer in the form of OpenAI's API that says in one line what is wrong, or why it cannot be done now."""

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


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises ApiError for anything else, and for texts that no answer could repeat."""
    try:
        value = parse_json(data, "the body", advice=False)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    for name, part in value.items():
        try:
            json.dumps([name, part], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            known = name.encode("ascii", "backslashreplace").decode()
            raise wrong(known, "cannot be used: it has half of a surrogate pair, which is no character") from None
    return value


def _kind(value: object) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class Fields:
    """One object of a request. A field that is null counts as left out, as in OpenAI's API."""

    def __init__(self, values: object, where: str = ""):
        """where: what leads to this object from the body, such as "messages[2].". It begins every name in an error."""
        if not isinstance(values, dict):
            raise wrong(where.rstrip(".") or "body", f"must be an object, not {_kind(values)}")
        self.values: dict[str, Any] = values
        self.where = where

    def name(self, field: str) -> str:
        """The field as an error calls it."""
        return self.where + field

    def given(self, field: str) -> bool:
        """Whether the field is there."""
        return self.values.get(field) is not None

    def get(self, field: str, kind: type, default: Any = None) -> Any:
        """The value of a field that must have a certain type: str, bool, int, float, list or dict."""
        value = self.values.get(field)
        if value is None:
            return default
        fits = isinstance(value, int | float if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            wanted = {str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "an array"}
            raise wrong(self.name(field), f"must be {wanted.get(kind, 'an object')}, not {_kind(value)}")
        if kind is float and not _finite(value):
            raise wrong(self.name(field), "must be a finite number")
        return value

    def required(self, field: str, kind: type) -> Any:
        """The same for a field that must be there."""
        if not self.given(field):
            raise ApiError(400, f"{self.name(field)} is missing", self.name(field), "missing_required_parameter")
        return self.get(field, kind)

    def integer(self, field: str, low: int, high: int, default: int) -> int:
        """An integer between two limits."""
        value = self.get(field, int, default)
        if not low <= value <= high:
            raise wrong(self.name(field), f"is {value!r:.40}; allowed: {low} to {high}")
        return value

    def inner(self, field: str) -> Fields:
        """The object in a field; an empty one if the field is left out."""
        return Fields(self.get(field, dict, {}), self.name(f"{field}."))

    def items(self, field: str) -> list[Fields]:
        """The objects of an array; none if the field is left out."""
        return [Fields(value, f"{self.name(field)}[{i}].") for i, value in enumerate(self.get(field, list, []))]

    def refuse(self, field: str, allowed: tuple, why: str) -> None:
        """Refuse a field that is known but not supported, unless its value asks for nothing."""
        value = self.values.get(field)
        if value is not None and value not in allowed:
            raise unsupported(self.name(field), why)


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
