"""TODO."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from support.errors import UsageError


class Lines:
    """A JSON-lines file that is complete line by line and takes its name when closed; "-" or None: no file."""

    def __init__(self, path: str | None):
        self.path = path if path and path != "-" else None
        self.file = open(f"{self.path}.part", "w", encoding="utf-8") if self.path else None

    def write(self, line: dict[str, Any]) -> None:
        if self.file:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()
            os.replace(f"{self.path}.part", self.path)
            self.file = None


class Progress:
    """A line on stderr with the time left: live on a terminal, else every 20 seconds."""

    def __init__(self, quiet: bool):
        self.quiet, self.live, self.last = quiet, sys.stderr.isatty(), time.perf_counter()

    def __call__(self, share: float, text: str) -> None:
        if self.quiet:
            return
        if self.live:
            print(f"\r\033[K{share:4.0%}  {text}", end="", file=sys.stderr, flush=True)
        elif time.perf_counter() - self.last > 20:
            self.last = time.perf_counter()
            print(f"{share:4.0%}  {text}", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.live and not self.quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def read_lines(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(run lines, summary line) of a file written by --json; UserError if it is not one."""
    try:
        lines = [
            json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        runs = [line for line in lines if line["type"] == "run"]
        summary = next(line for line in reversed(lines) if line["type"] == "summary")
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UsageError(f"{path}: not a file of scripts.bench --json ({error!r:.80}).") from error
    return runs, summary
