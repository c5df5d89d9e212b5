"""Ctrl-C at any moment of a command: one line and the exit code 130, also while its modules are still imported."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit code


def leave(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """End the process here, with one line on stderr."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def leave_at_once() -> None:
    """Let Ctrl-C end the process from here on, until `as_exceptions` begins and after it ends.

    A command calls this before it imports anything large. Half an import has nothing to clean up. An exception there
    would be a traceback, and C code may turn it into another error or drop it. A process that was started to ignore
    Ctrl-C goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
        sys.unraisablehook = _unraisable
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Python's own end has nothing to interrupt


def _unraisable(problem: sys.UnraisableHookArgs) -> None:
    """Python drops an exception in a destructor or a callback. Ctrl-C must not be lost there."""
    if problem.exc_type is KeyboardInterrupt:
        leave()
    sys.__unraisablehook__(problem)


@contextlib.contextmanager
def as_exceptions() -> Iterator[list[int]]:
    """Inside the block, Ctrl-C is a KeyboardInterrupt, so that what was begun is cleaned up.

    While a module is imported it ends the process instead: torch's C++ code aborts where an exception comes in between.
    Yields a list that is empty until Ctrl-C was pressed. Outside of commands nothing changes.
    """
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        caller = frame
        while caller:
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                leave()
            caller = caller.f_back
        pressed.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not leave:
        yield pressed
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, leave)


@contextlib.contextmanager
def held_back(*numbers: int) -> Iterator[list[int]]:
    """Let signals with these numbers wait for the end of the block. Only the main thread may call this.

    Yields a list of those that came. A process that is started inside has them as usual.
    """
    came: list[int] = []
    usual = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


def finish(code: int) -> int:
    """The exit code of a command that has said all it has to say. From here on Ctrl-C changes nothing.

    After Ctrl-C the process ends here. Python's own end may take a second, and it would replace the exit code by a signal
    where the KeyboardInterrupt came through an `exec`.
    """
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if code == INTERRUPTED:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or not there at all
                    stream.flush()
            atexit._run_exitfuncs()  # other processes of this command are sent away there
            os._exit(code)
    return code
