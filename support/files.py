"""Reading files strictly and writing them whole: a reader never sees half a file, and a failure leaves the old one."""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.errors import UsageError
from support.reader import INDEX_LIMIT, JSON_LIMIT, check, json_lines, parse_json, refusal  # noqa: F401


def read_bytes(path: str | Path, limit: int = -1) -> bytes:
    """The first `limit` bytes of a file, -1: all. Raises BadFileError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror}).") from error


def read_json(path: str | Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Read a JSON object. Raises BadFileError for a missing, oversized, malformed or other file."""
    return check(parse_json(read_bytes(path, limit + 1), path, limit), {}, path, "the JSON")


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name to write to, and rename it to `path` at the end, when its content is on the disk.

    After a failure (a full disk, Ctrl-C) the temporary file is deleted and an older file at `path` is untouched. What a
    killed process left is deleted when the same file is written again. An OSError about the file names `path`. A link
    stays a link, and a device or a pipe is written to directly.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not (real.is_file() or real.is_dir()):
        yield real
        return
    clean_up(real)
    temporary = real.with_name(f"{real.name}.{os.getpid()}.part")
    try:
        yield temporary
        _to_disk(temporary)
        os.replace(temporary, real)
        _to_disk(real.parent)
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise
        why = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, why, str(path)) from error  # the user knows it by this name
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def clean_up(path: Path) -> None:
    """Delete what dead processes left when they wrote the file or directory `path`, and bring back what they moved away.

    Call it before asking whether something is at `path`.
    """
    beside: list[Path] = []
    with contextlib.suppress(OSError):  # no such folder, or one that cannot be listed
        beside = [entry for entry in path.parent.iterdir() if _is_leftover(entry.name, path.name)]
    for rest in beside:
        with contextlib.suppress(OSError):
            if rest.suffix == ".old" and not path.exists():
                os.replace(rest, path)
            elif rest.is_dir() and not rest.is_symlink():
                shutil.rmtree(rest)
            else:
                rest.unlink()


def _is_leftover(name: str, written: str) -> bool:
    """Whether a process that is no more gave this temporary name to `written`."""
    match = re.fullmatch(re.escape(written) + r"\.(\d{1,9})\.(part|tmp|old)", name)
    return match is not None and not runs(int(match[1]))


def runs(process: int) -> bool:
    """Whether a process of this number runs. Outside of POSIX os.kill does not ask, it kills, so it counts as running."""
    try:
        if os.name == "posix":
            os.kill(process, 0)
    except OSError as error:  # any other one: it lives, and belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True


def _to_disk(path: Path) -> None:
    """Return when the content of a file or the names in a directory are on the disk."""
    if path.is_dir() and os.name != "posix":  # Windows opens no directories
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_folder(flag: str, path: str | Path | None) -> None:
    """Raise UsageError if the file that a flag names could not be written for want of a folder, before any work."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {Path(path).parent}; make it first.")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole, as UTF-8."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file whole, indented and with sorted keys."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def directory_written_whole(path: Path, keep: bool = False) -> Iterator[Path]:
    """Yield a temporary directory to fill, and give it the name `path` at the end, when its content is on the disk.

    An older directory at `path` stays in its place until then, and is replaced in one step. With `keep`, what it has
    under other names is in the new one, too. After a failure the temporary directory is deleted. What a killed process
    left is deleted, or brought back, when the same directory is written again. Raises BadFileError if that is not
    possible.
    """
    real = Path(os.path.realpath(path))
    clean_up(real)
    unfinished = real.with_name(f"{real.name}.{os.getpid()}.tmp")
    try:
        with writing_errors(path):
            shutil.rmtree(unfinished, ignore_errors=True)  # of an earlier process with our number
            unfinished.mkdir(parents=True)
            yield unfinished
            if keep and real.exists():
                made = os.listdir(unfinished)
                shutil.copytree(
                    real, unfinished, symlinks=True, dirs_exist_ok=True, copy_function=_link,
                    ignore=lambda folder, names: made if folder == str(real) else [],
                )  # fmt: skip
            for place in (*unfinished.rglob("*"), unfinished):
                if not place.is_symlink():
                    _to_disk(place)
            _replace_directory(unfinished, real)
            _to_disk(real.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # this file system has no hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _replace_directory(new: Path, path: Path) -> None:
    """Give `new` the name `path`. What was at `path` is deleted."""
    if not path.exists():
        os.replace(new, path)
    elif not _exchange(new, path):  # `clean_up` undoes the first of these renames if the second one does not come
        old = path.with_name(f"{path.name}.{os.getpid()}.old")
        os.replace(path, old)
        try:
            os.replace(new, path)
        except BaseException:
            os.replace(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step. Returns False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):  # another system than Linux, or an older C library
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(a), here, os.fsencode(b), swap) == 0


@contextlib.contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a one-line BadFileError that names `path`."""
    try:
        yield
    except OSError as error:
        what = f"cannot be written ({error.strerror or error}); nothing half-written was left."
        raise refusal(path, what, "Free space or choose another place.") from error


def append_json_lines(path: str | Path, *values: dict[str, Any]) -> None:
    """Append a line for every value to a JSON-lines file; the lines are on the disk when this returns.

    An interrupted run may have left a last line without its end. That line is cut off first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(b"".join(json.dumps(value).encode() + b"\n" for value in values))
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: str | Path, shape: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The JSON objects of a JSON-lines file, in order; [] for a missing file.

    A last line without its end was left by an interrupted run and does not count. Raises BadFileError for a file that
    cannot be read, or a line that is not a JSON object of this shape (`support.reader.check`).
    """
    if not Path(path).exists():
        return []
    lines = read_bytes(path)
    whole = lines[: lines.rfind(b"\n") + 1]
    return [check(value, shape or {}, where) for where, value in json_lines(whole, path)]


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file with its line ends as they are. Raises BadFileError if it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8 text ({error}).") from error
