"""TODO."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kernels
from support.cache import folder


def tuned_file() -> Path:
    """Where the tilings that scripts.bench_kernels --tune measured lie."""
    return folder() / "kernels.json"


def read_tuned(gpu: str, path: Path | None = None) -> tuple[dict[str, kernels.LinearConfig], str]:
    """(layer shape -> tiling measured on this GPU, note). A malformed file counts as none, and the note says why."""
    path = path or tuned_file()
    try:
        if not path.exists():
            return {}, ""
        read = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(read, dict) or read.get("version") != 1 or not isinstance(read.get("gpus"), dict):
            raise ValueError("not a version 1 file")
        return {key: _tiling(key, row) for key, row in read["gpus"].get(gpu, {}).items()}, ""
    except (OSError, ValueError, AttributeError) as error:
        return {}, f"{path} is ignored: {error}. Run python -m scripts.bench_kernels --tune again."


def _tiling(key: str, row: Any) -> kernels.LinearConfig:
    allowed = ((16, 32, 64, 128, 256), range(1, 65), (1, 2, 4, 8), range(1, 9), ("float32", "float16"))
    fits = isinstance(row, list) and len(row) == len(allowed)
    if not fits or any(
        isinstance(x, bool | float) or x not in ok for x, ok in zip(row, allowed, strict=True)
    ):
        raise ValueError(f"{key}: {row!r:.80} is no tiling")
    return kernels.LinearConfig(*row)


def write_tuned(gpu: str, configs: Mapping[str, kernels.LinearConfig], path: Path | None = None) -> None:
    """Add one GPU's tilings to the file; other GPUs and shapes keep theirs. Atomic; a malformed file is replaced."""
    path = path or tuned_file()
    known, gpus = read_tuned(gpu, path), {}
    if path.exists() and not known[1]:
        gpus = json.loads(path.read_text(encoding="utf-8"))["gpus"]
    gpus[gpu] = {key: list(config) for key, config in (known[0] | dict(configs)).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps({"version": 1, "gpus": gpus}, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
