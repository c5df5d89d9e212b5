"""TODO."""

from __future__ import annotations


class UsageError(ValueError):
    """Options that cannot work together or with this model (exit code 2)."""


USAGE, BAD_FILE, MEMORY, INTERNAL, INTERRUPTED = 2, 3, 4, 5, 130


class UserError(ValueError):
    """A one-line message for the user and the exit code that goes with it."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
