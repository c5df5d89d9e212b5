"""Where the prompt cache of a server keeps its files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path

from engine import Engine
from support import cache

SAMPLE = 64  # values of every weight that tell models apart


def prompt_folder(engine: Engine, keep: bool) -> Path:
    """The folder for this engine's prompts.

    With `keep` every server of the same model and options has the same one. Otherwise it belongs to this process, and
    what processes left that ended without cleaning up is deleted.
    """
    place = cache.folder() / "prompts"
    if keep:
        return place / _fingerprint(engine)
    for old in place.glob("process-*"):
        if re.fullmatch(r"process-\d+", old.name) and not _runs(int(old.name.removeprefix("process-"))):
            shutil.rmtree(old, ignore_errors=True)
    return place / f"process-{os.getpid()}"


def _runs(process: int) -> bool:
    """Whether a process of this number runs. On Windows this cannot be asked without harm, so it counts as running."""
    if os.name == "nt":
        return True
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True


def _fingerprint(engine: Engine) -> str:
    """A name for everything that the rows of the caches depend on."""
    options = engine.options
    how = (engine.model.config, engine.backend.mode, options and (options.quant, options.kv, options.activations))
    digest = hashlib.sha256(repr(how).encode())
    for module in (engine.model, *engine.drafter.cached_models):
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.flatten()[:SAMPLE].tolist()}".encode())
    shapes = [(tuple(t.shape), str(t.dtype)) for t in (engine.state.kv, *engine.drafter.caches)]
    digest.update(repr(shapes).encode())
    return digest.hexdigest()[:24]
