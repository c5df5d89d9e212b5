"""The files a benchmark writes while it runs, how they are read again, and the checksums of their lines."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

from support.errors import UsageError
from support.files import read_json_lines
from support.reader import check

# What is read again of the lines of a file, as shapes of `support.reader.check`.
PLACE = {"suite": str, "temperature": float, "arm": str}
RUN = PLACE | {"question": (str, int), "turn": int, "rep": int, "prompt_sha256": str, "ids_sha256": str}
RATES = {"tokens_per_second": (float, None), "tau": (float, None), "speedup": ({"median": (float, None)}, None)}
SUMMARY = dict.fromkeys(("environment", "settings", "model"), dict)
SUMMARY |= {"rows": [PLACE | RATES], "arms": [{"arm": str, "options": dict}]}


class Lines:
    """A JSON-lines file that is complete after every line.

    It is called PATH.part until it is closed, so a run that was killed leaves its lines there, and so does one that was
    interrupted where PATH holds an earlier one. The path "-" or None means that there is no file.
    """

    def __init__(self, path: str | None):
        self.path = path if path and path != "-" else None
        self.file: TextIO | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Add a line and hand it to the system."""
        if self.path:
            self.file = self.file or open(f"{self.path}.part", "w", encoding="utf-8")
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def close(self, interrupted: bool = False) -> str | None:
        """Give the file its name. Returns the name that it has then."""
        if not self.file:
            return None
        os.fsync(self.file.fileno())
        self.file.close()
        if interrupted and os.path.exists(self.path):
            return f"{self.path}.part"
        os.replace(f"{self.path}.part", self.path)
        return self.path


def sealed(line: dict[str, Any]) -> dict[str, Any]:
    """The line with a checksum of its content, for lines that later runs go on from."""
    return line | {"checksum": _checksum(json.loads(json.dumps(line)))}  # as it will be read


def intact(line: dict[str, Any]) -> bool:
    """Whether a line is what was written. Lines from before there were checksums have none, and count."""
    kept = {name: value for name, value in line.items() if name != "checksum"}
    return line.get("checksum") in (None, _checksum(kept))


def _checksum(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]


def read_lines(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(run lines, summary line) of a file written by --json. Raises ValueError if it is not one."""
    lines = read_json_lines(path)
    runs = [check(line, RUN, path, "a run") for line in lines if line.get("type") == "run"]
    summaries = [check(line, SUMMARY, path, "the summary") for line in lines if line.get("type") == "summary"]
    if not summaries:
        raise UsageError(f"{path}: not a file of scripts.bench --json (no summary line).")
    return runs, summaries[-1]
