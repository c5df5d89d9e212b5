"""Errors that a user can act on, and how a command reports them: one line on stderr and an exit code."""

import argparse
import contextlib
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from support.interrupts import INTERRUPTED, as_exceptions, finish

Failure = TypeVar("Failure", bound=BaseException)
# Exit codes of every command. INTERRUPTED, which is 130, is the fifth.
USAGE, BAD_FILE, MEMORY, INTERNAL = 2, 3, 4, 5


class UserError(ValueError):
    """A mistake that the message explains in one line: what is wrong, where, what is allowed, what to do next."""

    code = USAGE


class UsageError(UserError):
    """Options that are wrong, or that cannot work together or with this model."""


class BadFileError(UserError):
    """A file or directory that cannot be used."""

    code = BAD_FILE


class NotEnoughMemory(UserError):
    """A model or request that does not fit into memory."""

    code = MEMORY


@contextlib.contextmanager
def bad_files() -> Iterator[None]:
    """What a reader refuses in the block is a bad file, unless the error names its own kind."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise BadFileError(one_line(error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, either in the plan or while memory was allocated."""
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    torch = sys.modules.get("torch")  # commands answer --help without loading it
    on_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_cpu or on_gpu or isinstance(error, NotEnoughMemory | MemoryError)


def exit_code(error: Exception) -> int:
    """The exit code for an error. A ValueError that does not name its own kind is about usage."""
    if isinstance(error, UserError):
        return error.code
    if is_out_of_memory(error):
        return MEMORY
    if isinstance(error, ValueError):
        return USAGE
    return BAD_FILE if isinstance(error, OSError) else INTERNAL


def advised(error: Failure, advice: str) -> Failure:
    """The error with what the user of a command may do about it, as a note, which a client of a server does not see."""
    error.add_note(advice)
    return error


def one_line(error: BaseException, notes: bool = True) -> str:
    """The error's message and notes on one line. Errors that no user can cause are named by their type."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    text = " ".join(" ".join([text, *(getattr(error, "__notes__", []) if notes else [])]).split())
    expected = isinstance(error, ValueError | ArithmeticError | OSError) or is_out_of_memory(error)
    return text if expected and text else f"{type(error).__name__}: {text}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, too. An option that does not exist is answered with the nearest one."""

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(flag, re.findall(r"--[a-z-]+", self.format_help()), 1)
            self.error(f"{flag[:60]!r} is no option" + (f"; did you mean {near[0]}?" if near else ""))
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error  {message} (--help lists the options)\n")


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for the command `python -m NAME` whose --help shows the description as it is written, with --debug."""
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"python -m {name}", description=description, formatter_class=style)
    parser.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer that is `low` or more."""

    def integer(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= low:
                return value
        raise argparse.ArgumentTypeError(f"{text!r:.40}; allowed: {low} or more.")

    return integer


def above_zero(text: str) -> float:
    """An argparse type: a finite number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r:.40}; allowed: any number above 0.")


def run_command(body: Callable[[], int | None], debug: bool = False, interrupted: str = "interrupted") -> int:
    """Run the body of a command and return its exit code (None counts as 0).

    An error becomes the line `error  MESSAGE` on stderr. With `debug` it is raised instead, for its traceback.
    `interrupted` is printed after Ctrl-C, with the notes that the KeyboardInterrupt carries.
    """
    pressed: list[int] = []
    try:
        with as_exceptions() as pressed:
            code = body() or 0
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:  # the program that read our output has ended
        sys.stderr.close()
        code = 0
    except (KeyboardInterrupt, Exception) as error:
        if pressed or isinstance(error, KeyboardInterrupt):  # C code may turn one into another error
            code, text = INTERRUPTED, " ".join([interrupted, *getattr(error, "__notes__", [])])
        elif debug:
            raise
        else:
            code = exit_code(error)
            unexpected = code == INTERNAL and not isinstance(error, ArithmeticError)
            text = f"error  {one_line(error)}" + " (--debug shows where)" * unexpected
        clear = "\r\033[K" if sys.stderr.isatty() else ""  # a progress line may still stand on the terminal
        print(clear + text, file=sys.stderr)
    return finish(code)


def run_parsed(
    parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], int | None], argv: Sequence[str] | None
) -> int:
    """Run `body` with what the command line says, as `run_command` does. argv: None for that of this process."""
    args = parser.parse_args(argv)
    return run_command(lambda: body(args), args.debug)
