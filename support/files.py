"""Reading files strictly and writing them whole: a reader never sees half a file, and a failure leaves the old one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.reader import INDEX_LIMIT, JSON_LIMIT, check, json_lines, parse_json, refusal  # noqa: F401


def read_json(path: str | Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Read a JSON object. Raises BadFileError for a missing, oversized, malformed or other file."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror}).") from error
    value = parse_json(data, path, limit)
    if not isinstance(value, dict):
        raise refusal(path, f"expected a JSON object, found {type(value).__name__}.")
    return value


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name to write to, and rename it to `path` at the end.

    After a failure (a full disk, Ctrl-C) the temporary file is deleted and an older file at `path` is untouched. An
    OSError about the temporary file names `path`.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.filename != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # the user knows it by this name
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole, as UTF-8."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file whole, indented and with sorted keys."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def directory_written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill, and rename it to `path` at the end.

    An older directory at `path` stays in its place until then. After a failure the temporary directory is deleted.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f"{path.name}.{os.getpid()}.old")
    try:
        with writing_errors(path):
            unfinished.mkdir(parents=True)
            yield unfinished
            if path.exists():
                os.replace(path, old)
            os.replace(unfinished, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        raise
    finally:
        for rest in (unfinished, old):
            shutil.rmtree(rest, ignore_errors=True)


@contextlib.contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a one-line ValueError that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{path}: cannot be written ({reason}). Free space or choose another place; nothing half-written was left."
        ) from error


def append_json_lines(path: str | Path, *values: dict[str, Any]) -> None:
    """Append a line for every value to a JSON-lines file; the lines are on the disk when this returns.

    An interrupted run may have left a last line without its end. That line is cut off first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.write(b"".join(json.dumps(value).encode() + b"\n" for value in values))
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: str | Path, shape: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The JSON objects of a JSON-lines file, in order; [] for a missing file.

    A last line without its end was left by an interrupted run and does not count. Raises BadFileError for a file that
    cannot be read, or a line that is not a JSON object of this shape (`support.reader.check`).
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        lines = path.read_bytes()
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror}).") from error
    whole = lines[: lines.rfind(b"\n") + 1]
    return [check(value, shape or {}, where) for where, value in json_lines(whole, path)]


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file with its line ends as they are. Raises BadFileError if it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8 text ({error}).") from error


def replace_block(path: Path, name: str, text: str) -> None:
    """Put `text` between the markers `<!-- NAME -->` and `<!-- /NAME -->`. Raises ValueError if they are missing."""
    old = path.read_text(encoding="utf-8")
    before, begin, rest = old.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not begin or not end:
        raise ValueError(f"{path}: the markers <!-- {name} --> and <!-- /{name} --> are missing.")
    write_text(path, f"{before}{begin}{text}\n{end}{after}")
