"""Conversations for training a draft head, written by the model itself: its own questions, then its answers.

    python -m scripts.make_chats --checkpoint DIR --out chats.jsonl --count 4000
    python -m scripts.train_eagle --checkpoint DIR --data chats.jsonl --out head

The questions are sampled from the opening of the chat template's user turn. Half of them begin with words that are given,
such as "Write a Python function that", so that all kinds of tasks occur. Half of the answers are the most likely ones
and half are sampled at T = 1. What is empty, repeats itself, or (a question) does not end is left out. After an
interruption the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from load import load
from options import add_options, options_from
from support.errors import UsageError, at_least, command_parser, run_command
from training.chats import write_answers, write_questions

LOADED = ("checkpoint", "batch_size", "ctx", "device", "dtype", "kernels", "compile")


def run(args: argparse.Namespace) -> None:
    """Write the questions, then the answers."""
    engine = load(**options_from(args, *LOADED))
    if engine.tokenizer is None:
        raise UsageError(f"--checkpoint {args.checkpoint}: it has no tokenizer, so it cannot chat.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    questions = write_questions(engine, engine.tokenizer, args.out.with_suffix(".questions.jsonl"), args)
    count = write_answers(engine, engine.tokenizer, questions, args.out, args)
    print(f"{count:,} conversations in {args.out}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.make_chats", __doc__)
    add_options(parser, *LOADED, batch_size=32, ctx=1024)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON lines to write; the questions are kept beside it")
    add("--count", type=at_least(1), default=4000, help="questions to try (default: 4000)")
    add("--question-tokens", type=at_least(8), default=128, help="most tokens of a question (default: 128)")
    add("--answer-tokens", type=at_least(8), default=256, help="most tokens of an answer (default: 256)")
    add("--seed", type=at_least(0), default=0)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    sys.exit(main())
