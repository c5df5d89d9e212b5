"""`org/name`: where a model of the Hugging Face hub lies in the cache of this machine. Nothing is downloaded here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from support.errors import BadFileError

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # one slash, and no part that starts with a dot
COMMIT = re.compile(r"[0-9a-f]{8,64}")


def cache_folder() -> Path:
    """The folder in which the hub's own client keeps what it downloads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def local_path(name: str | Path) -> Path:
    """`name` as a path. Where nothing is there and it reads like `org/name`, the snapshot that the cache has of `main`.

    Raises BadFileError in one line if the cache does not have it.
    """
    path, text = Path(name), os.fspath(name)
    if not REPO.fullmatch(text) or "--" in text or path.exists():  # the cache writes a slash as --
        return path
    download = f"Run python -m scripts.download {text} and pass the folder that it prints."
    cache = cache_folder()
    folder = cache / f"models--{text.replace('/', '--')}"
    if not folder.is_dir():
        raise BadFileError(f"{text} is no path here, and not in the Hugging Face cache ({cache}). {download}")
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    snapshot = folder / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not snapshot.is_dir():
        raise BadFileError(
            f"{text} is not whole in the Hugging Face cache: {folder} has no snapshot of main. {download}"
        )
    return snapshot
