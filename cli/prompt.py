"""What a command line asks to decode: a text, a file, standard input, or token ids. This file imports no torch."""

import argparse
import os
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from support.errors import BadFileError, UsageError, one_line

DEMO_PROMPT = '''def read_file(filename):
    """Return the contents of a file."""
    with open(filename) as f:
'''


@dataclass(frozen=True)
class Prompt:
    """What to decode. With `ids` the text is unused."""

    text: str
    ids: list[int] | None = None
    message: bool = False  # whether a model with a chat template takes it as a user's message
    echo: bool = False  # whether a continuation is printed behind it


def read_prompt(args: argparse.Namespace) -> Prompt:
    """The prompt that the arguments name, or what a pipe or file at stdin holds, or else the built-in text.

    Raises UsageError for a file or pipe that holds nothing.
    """
    if args.prompt_ids:
        return Prompt("", ids=list(args.prompt_ids[0]))
    if args.prompt:
        return Prompt(args.prompt[0], message=not args.raw, echo=True)
    name = args.prompt_file[0] if args.prompt_file else None
    if name is None and not stdin_is_fed():
        return Prompt(DEMO_PROMPT, echo=True)
    try:
        text = read_stdin() if name in (None, "-") else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"--prompt-file {name or '-'}: {one_line(error)}") from error
    if not text:
        where = "standard input" if name is None else f"--prompt-file {name}"
        raise UsageError(f"{where}: it is empty; give a prompt{', like -p TEXT' * (name is None)}.")
    return Prompt(text, message=not args.raw)


def stdin_is_fed() -> bool:
    """Whether stdin is a pipe or a file. Containers, cron and CI start programs with /dev/null or none at all."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin else 0
    except (OSError, ValueError):  # closed, or an object of a program that runs this one
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_stdin() -> str:
    """All of stdin, as UTF-8. Says on stderr what is waited for if nothing comes at once."""
    if os.name == "posix" and not select.select([sys.stdin], [], [], 1)[0]:
        print("note    waiting for a prompt on stdin (-p TEXT gives one; Ctrl-D ends it)", file=sys.stderr, flush=True)
    return sys.stdin.buffer.read().decode()
