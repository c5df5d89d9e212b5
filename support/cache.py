"""TODO."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

MARKER = ".eaglet-artefacts"  # only a folder with this file is ever cleared


VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class Entry(NamedTuple):
    """One subfolder of the cache."""

    key: str
    files: int
    bytes: int


def folder() -> Path:
    """Where we keep what this machine found out (compiled code, tilings, trees): $EAGLET_CACHE, or ~/.cache/eaglet."""
    return Path(os.environ.get("EAGLET_CACHE") or Path.home() / ".cache" / "eaglet")


def root() -> Path:
    """The folder of all compiled artefacts; need not exist."""
    return folder() / "compiled"


def key(device: str) -> str:
    """Name of this installation's subfolder: versions, device (as `describe_device` names it), digest of our sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    parts = [f"{name}{_version(name)}" for name in ("torch", "triton")] + [device, digest.hexdigest()[:12]]
    return re.sub(r"[^A-Za-z0-9.+]+", "_", "-".join(parts))


def _version(package: str) -> str:
    try:
        return version(package) if importlib.util.find_spec(package) else ""
    except PackageNotFoundError:
        return ""


def use(device: str) -> tuple[Path, str]:
    """Point Inductor and Triton at this installation's folder, made if missing: before anything is compiled. Returns it
    and how it was found. Variables that the user has set are left alone. ValueError where it cannot be written."""
    for name in VARIABLES:
        given = Path(os.environ.get(name) or root())
        by_torch = any(part.startswith("torchinductor_") for part in given.parts)  # its default, not a wish
        if not given.is_relative_to(root()) and not by_torch:
            return given, f"set by ${name}"
    folder = root() / key(device)
    others = [e.key for e in entries() if e.key != folder.name]
    found = "found" if folder.is_dir() else f"new, {len(others)} of other versions" if others else "new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (root() / MARKER).touch()
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}; set EAGLET_CACHE to a writable folder.") from error
    os.environ.update({name: str(folder / sub) for name, sub in VARIABLES.items()})
    return folder, found


def tally(counters: Mapping[str, Mapping[str, int]]) -> tuple[int, int]:
    """(graphs reused, graphs compiled) of this process, from `torch._dynamo.utils.counters`."""
    seen = counters.get("inductor", {})
    missed = sum(seen.get(name, 0) for name in ("fxgraph_cache_miss", "fxgraph_cache_bypass"))
    return seen.get("fxgraph_cache_hit", 0), missed


def entries() -> list[Entry]:
    """What the cache holds, by name."""
    found = []
    for folder in sorted(p for p in root().iterdir() if p.is_dir()) if root().is_dir() else ():
        sizes = [p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
        found.append(Entry(folder.name, len(sizes), sum(sizes)))
    return found


def clear() -> list[Entry]:
    """Delete the compiled artefacts, and nothing else; returns what went. ValueError if the folder is not ours."""
    folder, gone = root(), entries()
    if not folder.exists():
        return []
    strange = [
        p.name for p in folder.iterdir() if p.name != MARKER and not (p.is_dir() and "torch" in p.name)
    ]
    if folder.is_symlink() or not (folder / MARKER).is_file() or strange:
        why = f"it holds {strange[0]!r:.60}" if strange else "it was not made by eaglet"
        raise ValueError(f"{folder} is not cleared: {why}. Delete it yourself, or set EAGLET_CACHE.")
    for entry in gone:
        path = folder / entry.key
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    return gone
