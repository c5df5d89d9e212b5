"""TODO."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# bytes of a config.json; of a shard index or a safetensors header
JSON_LIMIT, INDEX_LIMIT = 4 << 20, 64 << 20


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from `path`. ValueError in one line for a missing, oversized, malformed or non-object file."""

    def refuse(token: str) -> NoReturn:
        raise json.JSONDecodeError(f"{token} is not JSON", token, 0)

    try:
        if (size := path.stat().st_size) > limit:
            raise ValueError(f"{path}: {size:,} bytes, at most {limit:,} are read. Is it the right file?")
        value = json.loads(path.read_bytes(), parse_constant=refuse)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to, renamed to `path` at the end; a failure (a full disk, Ctrl-C) leaves neither."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON through a temporary name, so that a reader never sees half a file."""
    with written_whole(path) as part:
        part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def replace_block(path: Path, name: str, text: str) -> None:
    """Put text between `<!-- NAME -->` and `<!-- /NAME -->`; ValueError if the markers are missing."""
    old = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in old or end not in old:
        raise ValueError(f"{path}: markers {begin.strip()} and {end} are missing.")
    head, rest = old.split(begin, 1)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{head}{begin}{text}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")
    os.replace(temporary, path)
