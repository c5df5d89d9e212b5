"""Structured input, read strictly: every JSON text that a user or a download brings passes through this file.

Whatever is wrong with it is a BadFileError of one line that names the file and the key.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from support.errors import BadFileError, UserError, advised

JSON_LIMIT = 4 << 20  # bytes of a config.json
INDEX_LIMIT = 64 << 20  # bytes of a shard index, a tokenizer.json, a safetensors header, or a line of JSON
DEPTH = 100  # objects and arrays inside each other
DIGITS = 60  # of an integer; tokenizers say 10^30 where they mean no limit
LONGEST = 200  # characters of what is wrong
NAMES = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
NAMES |= {int: "an integer", float: "a number"}


def refusal(where: object, problem: str, advice: str = "") -> BadFileError:
    """The error to raise for a problem in the file `where`. It has one line, and a long problem is cut."""
    text = " ".join(problem[: 4 * LONGEST].split())
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."
    return BadFileError(f"{where}: {text}{' ' * bool(advice)}{advice}")


@contextlib.contextmanager
def one_line_errors(what: str, advice: str, named: str = "") -> Iterator[None]:
    """Any failure becomes a ValueError of one line, also a Rust panic, which is a BaseException.

    named: the file, where an error that names it, or a UserError, is passed on as it is.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if named and (isinstance(error, UserError) or named in str(error)):
            raise
        detail = " ".join(str(error).split())[:LONGEST].rstrip(".") or type(error).__name__
        raise advised(ValueError(f"{what}: {detail}."), advice) from error


def parse_json(data: bytes | str, where: object, limit: int = INDEX_LIMIT, advice: bool = True) -> Any:
    """The value of a JSON text of at most `limit` bytes. advice: errors say what to do with the file.

    Raises BadFileError for text that is malformed, repeats a key in an object, nests deeper than DEPTH, or has a number
    that is not finite or an integer of more than DIGITS digits.
    """
    which = "Is it the right file?"
    if len(data) > limit:
        raise refusal(where, f"more than {limit:,} bytes, which is the most that is read.", which * advice)
    numbers = {"parse_constant": _no_number, "parse_float": _finite, "parse_int": _integer}
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique, **numbers)
        level = [value]
        for _ in range(DEPTH + 1):
            level = [v for box in level if isinstance(box, dict | list) for v in _inside(box)]
    except RecursionError:
        level = [None]
    except ValueError as error:
        raise refusal(where, f"not valid JSON ({error}).", "Download it again, or correct it." * advice) from error
    if level:
        raise refusal(where, f"nested deeper than {DEPTH} levels.", which * advice)
    return value


def json_lines(text: str | bytes, where: object) -> Iterator[tuple[str, Any]]:
    """(the line as messages call it, its value) for every line of JSON that is not blank."""
    for number, line in enumerate(text.split("\n" if isinstance(text, str) else b"\n"), 1):
        if line.strip():
            yield f"{where}, line {number}", parse_json(line, f"{where}, line {number}")


def _inside(box: dict | list) -> Sequence[Any]:
    return box.values() if isinstance(box, dict) else box


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} occurs twice")
    return value


def _no_number(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {digits:.30} is too large")
    return value


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"the integer {digits:.10}... has {len(digits):,} digits")
    return int(digits)


def check(value: Any, shape: Any, where: object, name: str = "it") -> Any:
    """The value, if it has a shape. Raises BadFileError that names the first part that does not fit.

    Args:
        shape: a type, where float also allows integers and `object` allows everything; a tuple of shapes that are all
            allowed, None for null; a list of one shape for all items of an array; or a dictionary of the shapes of keys,
            where `key?` may be missing and `*` stands for all keys that are not named.
    """
    choices = shape if isinstance(shape, tuple) else (shape,)
    kinds = [one if isinstance(one, type) else type(one) for one in choices]
    fitting = [one for one, kind in zip(choices, kinds, strict=True) if is_a(value, kind)]
    if not fitting:
        wanted = " or ".join(NAMES[kind] for kind in kinds)
        raise refusal(where, f"{name} is {value!r:.60}, expected {wanted or 'no such key'}.")
    shape = fitting[0]
    if isinstance(shape, list):
        for i, item in enumerate(value):
            check(item, shape[0], where, f"{name}[{i}]")
    if isinstance(shape, dict):
        for key, inner in shape.items():
            key, may_be_missing = key.removesuffix("?"), key.endswith("?")
            if key == "*":
                for other in value.keys() - {known.removesuffix("?") for known in shape}:
                    check(value[other], inner, where, f"{name}.{other:.60}")
            elif key in value:
                check(value[key], inner, where, f"{name}.{key}")
            elif not may_be_missing:
                raise refusal(where, f"{name} has no {key!r}.")
    return value


def is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a kind. true and false are no numbers, and every integer is a number, too."""
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, (int, float) if kind is float else kind)


class ConfigReader:
    """Typed reads from a JSON object. A wrong type or range is a ValueError that names the key and the file `where`.

    A key that is missing or null has the value of `defaults`, or else the one that the read names.
    """

    def __init__(self, config: Any, where: str, defaults: dict[str, Any] | None = None):
        self.config, self.where, self.defaults = check(config, {}, where, "the JSON"), where, defaults or {}

    def error(self, text: str) -> BadFileError:
        """The error to raise for something wrong in this file."""
        return refusal(self.where, text)

    def _checked(self, key: str, default: Any, allows: Callable[[Any], bool], allowed: str) -> Any:
        value = self.config.get(key)
        value = self.defaults.get(key, default) if value is None else value
        if value is None:
            raise self.error(f"required key {key!r} is missing.")
        if not allows(value):
            raise self.error(f"{key} = {value!r:.60} is not supported, expected {allowed}.")
        return value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        allowed = f"an integer in [{low}, {high}]"
        return self._checked(key, default, lambda value: is_a(value, int) and low <= value <= high, allowed)

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        allowed = f"a number in [{low}, {high}]"
        return float(self._checked(key, default, lambda value: is_a(value, float) and low <= value <= high, allowed))

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return self._checked(key, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, key: str, default: str | None, allowed: Sequence[str]) -> str:
        return self._checked(key, default, lambda value: value in allowed, f"one of {', '.join(allowed)}")
