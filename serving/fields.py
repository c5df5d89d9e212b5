"""Reading the fields of a JSON object strictly: a value of the wrong type is an error that names the field."""

from __future__ import annotations

import math
from typing import Any

from serving.errors import ApiError, unsupported, wrong
from support.reader import parse_json


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises ApiError for anything else."""

    try:
        value = parse_json(data, "the body")
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    return value


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class Fields:
    """One object of a request. A field that is null counts as left out, as in OpenAI's API."""

    def __init__(self, values: Any, where: str = ""):
        """where: what leads to this object from the body, such as "messages[2].". It begins every name in an error."""
        if not isinstance(values, dict):
            raise wrong(where.rstrip(".") or "body", f"must be an object, not {_kind(values)}")
        self.values = values
        self.where = where

    def name(self, field: str) -> str:
        """The field as an error calls it."""
        return self.where + field

    def given(self, field: str) -> bool:
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

    def integer(self, field: str, low: int, high: int, default: int | None = None) -> int | None:
        """An integer between two limits."""
        value = self.get(field, int, default)
        if value is not None and not low <= value <= high:
            raise wrong(self.name(field), f"is {value!r:.40}; allowed: {low} to {high}")
        return value

    def required(self, field: str, kind: type) -> Any:
        """A field that must be there."""
        value = self.get(field, kind)
        if value is None:
            raise ApiError(400, f"{self.name(field)} is missing", self.name(field), "missing_required_parameter")
        return value

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
