"""The cache folder: what this machine found out, and compiled code between processes.

Compiling a block takes seconds to minutes and gives the same code every time. The caches of Inductor and Triton
therefore lie in $EAGLET_CACHE/compiled (default: ~/.cache/eaglet/compiled), in one subfolder for each combination of
torch, triton, device and our own sources. Inductor keys everything else by its own hash.

What we keep ourselves is written by `store` and read by `fetch`, which compares it with the digest in the file. So what a
full disk, a killed process or a failing disk left is made again, and is never taken for what was stored.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from support.files import written_whole
from support.reader import refusal

MARKER = ".eaglet-artefacts"  # `clear` deletes only in a folder that holds this file
MAGIC = b"eaglet entry 1\n"
LARGEST_ABOUT = 64 << 20  # bytes
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
SOURCES = Path(__file__).resolve().parent.parent
# Folders whose code is never traced, and so never changes what was compiled.
UNTRACED = {"tests", "scripts", "package", "bench", "training", "cli", "serving"}


class Entry(NamedTuple):
    """One subfolder of the cache."""

    key: str
    files: int
    bytes: int


def folder() -> Path:
    """The folder of everything that is kept (compiled code, tilings, tuned trees): $EAGLET_CACHE or ~/.cache/eaglet."""
    return Path(os.environ.get("EAGLET_CACHE") or Path.home() / ".cache" / "eaglet")


class Kept(NamedTuple):
    """What `store` kept: a payload, and a few JSON values about it."""

    about: dict[str, Any]
    payload: bytes


def store(path: Path, payload: bytes | memoryview, about: Mapping[str, Any] | None = None, mode: int = 0o644) -> None:
    """Keep a payload and a few JSON values about it in a file, which is written whole or not at all.

    The file begins with MAGIC, the SHA-256 of what follows up to the payload (the length of `about` in 8 bytes, its JSON,
    and the SHA-256 of the payload), and that part itself. mode: the file's permissions. Raises OSError where it cannot be
    written.
    """
    text = json.dumps(about or {}).encode()
    head = len(text).to_bytes(8, "little") + text + hashlib.sha256(payload).digest()
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as part:
        part.touch(mode)
        with open(part, "wb") as file:
            file.write(MAGIC + hashlib.sha256(head).digest() + head)
            file.write(payload)


def read(path: Path, payload: bool = True) -> Kept:
    """What `store` kept in a file; without `payload` only what is about it, and an empty payload.

    Raises BadFileError in one line for a file that is damaged, or no such file, and OSError where it cannot be read.
    """
    with open(path, "rb") as file:
        start = file.read(len(MAGIC) + 40)
        size = int.from_bytes(start[-8:], "little")
        head = start[-8:] + (file.read(size + 32) if size <= LARGEST_ABOUT else b"")
        if not start.startswith(MAGIC) or hashlib.sha256(head).digest() != start[len(MAGIC) : -8]:
            raise refusal(path, "damaged, or not written by this version.", "Delete it.")
        data = file.read() if payload else b""
    if payload and hashlib.sha256(data).digest() != head[-32:]:
        raise refusal(path, "damaged: its bytes are not those that were written.", "Delete it.")
    return Kept(json.loads(head[8:-32]), data)


def fetch(path: Path, payload: bool = True) -> Kept | None:
    """`read`, but None where there is no such file. A file that is damaged is deleted and counts as none."""
    try:
        return read(path, payload)
    except OSError:  # there is none, or it cannot be read now and may be whole
        return None
    except ValueError:
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def seal(path: Path) -> None:
    """Keep the digest of a file that another program reads by its name, such as a library, in an entry beside it."""
    store(path.with_name(f"{path.name}.seal"), b"", {"sha256": _digest(path)})


def sealed(path: Path) -> bool:
    """Whether a file is there and is what it was when it was sealed."""
    kept = fetch(path.with_name(f"{path.name}.seal"))
    return kept is not None and path.is_file() and kept.about == {"sha256": _digest(path)}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def root() -> Path:
    """The folder of all compiled code. It need not exist."""
    return folder() / "compiled"


def key(device: str) -> str:
    """The name of this installation's subfolder: versions, `device` (from `describe_device`) and our sources' digest."""
    digest = hashlib.sha256()
    for path in _traced_sources():
        digest.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes())
    parts = [f"{name}{version_of(name) or ''}" for name in ("torch", "triton")] + [device, digest.hexdigest()[:12]]
    return re.sub(r"[^A-Za-z0-9.+]+", "_", "-".join(parts))


def _traced_sources() -> list[Path]:
    """Our files at the top and one folder down, without the folders in UNTRACED."""
    packages = [p.parent for p in SOURCES.glob("*/__init__.py") if p.parent.name not in UNTRACED]
    return sorted(path for place in (SOURCES, *packages) for path in place.glob("*.py"))


def version_of(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def use(device: str) -> tuple[Path, str]:
    """Point Inductor and Triton at this installation's folder. Call this before anything is compiled.

    Returns the folder and how it was found. Variables that the user has set are left alone. Raises ValueError where
    the folder cannot be written.
    """
    for name in VARIABLES:
        given = Path(os.environ.get(name) or root())
        # torch itself sets the variable to a folder of this name; that is no wish of the user
        by_torch = any(part.startswith("torchinductor_") for part in given.parts)
        if not given.is_relative_to(root()) and not by_torch:
            return given, f"set by ${name}"
    place = root() / key(device)
    others = [e.key for e in entries() if e.key != place.name]
    state = "found" if place.is_dir() else f"new, {len(others)} of other versions" if others else "new"
    try:
        place.mkdir(parents=True, exist_ok=True)
        (root() / MARKER).touch()
    except OSError as error:
        raise ValueError(f"{place}: {error.strerror}; set EAGLET_CACHE to a writable folder.") from error
    os.environ.update({name: str(place / sub) for name, sub in VARIABLES.items()})
    return place, state


def tally(counters: Mapping[str, Mapping[str, int]]) -> tuple[int, int]:
    """(graphs reused, graphs compiled) by this process. `counters` is `torch._dynamo.utils.counters`."""
    seen = counters.get("inductor", {})
    missed = sum(seen.get(name, 0) for name in ("fxgraph_cache_miss", "fxgraph_cache_bypass"))
    return seen.get("fxgraph_cache_hit", 0), missed


def entries() -> list[Entry]:
    """What the cache of compiled code holds, by name."""
    held = []
    for place in sorted(root().glob("*/")):
        sizes = [p.stat().st_size for p in place.rglob("*") if p.is_file() and not p.is_symlink()]
        held.append(Entry(place.name, len(sizes), sum(sizes)))
    return held


def clear() -> list[Entry]:
    """Delete the compiled code and nothing else. Returns what was deleted. ValueError if the folder is not ours."""
    place = root()
    gone = entries()
    if not place.exists():
        return []
    strange = [p.name for p in place.iterdir() if p.name != MARKER and not (p.is_dir() and "torch" in p.name)]
    if place.is_symlink() or not (place / MARKER).is_file() or strange:
        why = f"it holds {strange[0]!r:.60}" if strange else "it was not made by eaglet"
        raise ValueError(f"{place} is not cleared: {why}. Delete it yourself, or set EAGLET_CACHE.")
    for entry in gone:
        path = place / entry.key
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    return gone
