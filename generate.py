"""Load a model (and a draft head) and decode.

    python generate.py                                              # the demo model continues a built-in prompt
    python generate.py --checkpoint DIR -p "Why is the sky blue?"   # an instruct model answers, another one continues
    echo "Why is the sky blue?" | python generate.py --checkpoint DIR --eagle HEAD --compile
    python generate.py --checkpoint DIR --chat
    python generate.py --checkpoint DIR --input requests.jsonl --output answers.jsonl

    from generate import SamplingParams, load
    engine = load("demo", eagle="demo/eagle1")
    for chunk in engine.generate(prompt_ids, SamplingParams(max_new_tokens=100)): ...

The text goes to stdout, the report to stderr. Exit codes: 2 usage, 3 bad file, 4 memory, 5 internal, 130 Ctrl-C.
"""

# Nothing here imports torch before the arguments were read and checked, because that takes seconds.
from __future__ import annotations

from support.interrupts import leave_at_once

if __name__ == "__main__":  # before the imports below
    leave_at_once()

import argparse
import functools
import io
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.prompt import DEMO_PROMPT, Prompt, read_prompt, stdin_is_fed
from decoding.params import SamplingParams
from loading.options import DEMO, FULL, add_options, add_replicas, add_sampling, parse_ids, sampling_from, takes_options
from support import cache
from support.errors import Parser, UsageError, run_command
from support.files import check_folder
from support.startup import without_collector

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = ["DEMO_PROMPT", "SamplingParams", "load", "main"]

VERSION = "0.1.0"


@takes_options
def load(checkpoint: str | Path = DEMO, **keywords: Any) -> Engine:
    """Build an engine from a model and, with `eagle=`, a draft head. `engine.load` explains its arguments."""
    from engine.load import load as build

    return build(checkpoint, **keywords)


def build_parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    usage = "python generate.py [-p TEXT | -f FILE | --chat | --input FILE] [--checkpoint DIR] [--eagle HEAD] [options]"
    parser = Parser(prog="generate.py", usage=usage, description=__doc__, formatter_class=style)
    request = parser.add_argument_group("request")
    add = functools.partial(request.add_argument, action="append", default=[])  # `check_arguments` allows one prompt
    add("-p", "--prompt", metavar="TEXT", help="a message to an instruct model, or text for another model to continue")
    add("-f", "--prompt-file", metavar="FILE", help="the same from a file; - is stdin, and a pipe is read without it")
    add("--prompt-ids", type=parse_ids, metavar="5,17,9", help="token ids to continue; needs no tokenizer")
    add = request.add_argument
    add("--input", metavar="FILE", help="a file of requests, as OpenAI's batch API has them: one JSON object a line")
    add("--output", metavar="FILE", help="--input: the answers, in the same order; a run that was interrupted goes on")
    add("--batch-size", type=int, default=1, metavar="N",
        help="answers to the prompt, with seeds seed, seed + 1, ... (default: 1)")  # fmt: skip
    add("--raw", action="store_true", help="continue the prompt as plain text, whatever the model is")
    add("--chat", action="store_true", help="interactive chat; keeps history and the cache between turns")
    add("--system", metavar="TEXT", help="system message, before the prompt or of the chat")
    add("--when-full", choices=FULL, default=FULL[0],
        help="--chat: what happens when the context is full (default: refuse)")  # fmt: skip
    templates = "vicuna, llama-2-chat, mixtral, or one of the model's (default: the model's)"
    add("--template", metavar="NAME", help=f"chat template: {templates}")
    add_sampling(parser, of_model=True, max_new_tokens="200, or to a message what is left of the context")
    add_options(parser)
    add_replicas(parser)
    add = parser.add_argument_group("output").add_argument
    add("--prove", action="store_true", help="replay without the head and compare; exit 1 on a real difference")
    add("--show-tree", action="store_true", help="draw the tree of every step while it decodes, then the text by depth")
    add("--html", metavar="FILE", help="write a page with the tree of every step, tau and milliseconds")
    add("--gauge", action="store_true", help="time the phases of a step: draft, verify, accept, host")
    add("--json-schema", metavar="FILE", help="the text is JSON that follows this JSON schema")
    add("--json", action="store_true", help="one JSON object on stdout instead of text")
    add("-q", "--quiet", action="store_true", help="no report")
    add = parser.add_argument_group("this program").add_argument
    add("--cache", choices=("show", "clear"), help="list or delete what --compile has kept, and leave")
    add("--version", action="store_true", help="print the version, and leave")
    add("--debug", action="store_true", help="full tracebacks")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows '?'
            stream.reconfigure(errors="replace")
    return run_command(lambda: run(args), args.debug)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments ask for."""
    if args.version:
        print(f"eaglet {VERSION}  torch {version('torch')}  python {platform.python_version()}")
        return 0
    if args.cache:
        return cache_command(args.cache)
    sampling_from(args)  # refuses settings that are out of range
    check_arguments(args)
    if args.input:
        from serving.batch import run_file

        return run_file(args)
    prompt = Prompt("") if args.chat else read_prompt(args)
    with without_collector(freeze=__name__ == "__main__"):
        from cli.once import run_request

    return run_request(args, prompt)


def cache_command(what: str) -> int:
    """--cache show | clear: the compiled code, never anything else."""
    from support.machine import size_text

    entries = cache.entries() if what == "show" else cache.clear()
    for entry in entries:
        print(f"{entry.key}  {entry.files:,} files  {size_text(entry.bytes)}")
    total = f"{len(entries)} entries, {size_text(sum(entry.bytes for entry in entries))}"
    print(f"{cache.root()}: {total}{' deleted' if what == 'clear' else ''}")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError for arguments that do not go together."""
    given = [name for name in ("prompt", "prompt_ids", "prompt_file") for _ in vars(args)[name]]
    names = "raw gauge prove show_tree html json json_schema".split()
    alone = [f"--{name.replace('_', '-')}" for name in names if vars(args)[name]]
    alone += ["--grammar"] * ("grammar" in args) + ["--batch-size"] * (args.batch_size > 1)
    message = args.chat or (given and not args.prompt_ids) or (not given and stdin_is_fed())
    shaped = (args.template or args.system) and not args.input
    lossy, drawn = args.verify != "match", args.show_tree or args.html
    one = f"{' '.join(alone[:1])} is for one request; it does not go with --chat or --input."
    problems = {
        "--input FILE and --output FILE belong together; give both.": (args.input is None) != (args.output is None),
        "--prove compares tokens; --verify multi-round promises only the distribution.": args.prove and lossy,
        "give one of --prompt, --prompt-file, --prompt-ids, --chat, --input.":
            len(given) + args.chat + bool(args.input) > 1,
        one: alone and (args.chat or args.input),
        "--when-full is for a chat; add --chat.": args.when_full != FULL[0] and not args.chat,
        "--replicas answer a file of requests; add --input and --output.": args.replicas and not args.input,
        "--system is part of a request; put it into the messages of --input.": args.input and args.system,
        "--template and --system shape a message: give -p TEXT without --raw, or add --chat.":
            shaped and (args.raw or not message),
        "give one of --grammar, --json-schema.": args.json_schema and "grammar" in args,
        "--logprobs are part of the JSON output; add --json.":
            ("logprobs" in args or "prompt_logprobs" in args) and not args.json,
        f"--batch-size is {args.batch_size}; allowed: 1 or more.": args.batch_size < 1,
        "--show-tree and --html show one sequence; use --batch-size 1.": args.batch_size > 1 and drawn,
    }  # fmt: skip
    for problem in (problem for problem, is_there in problems.items() if is_there):
        raise UsageError(problem)
    check_folder("--html", args.html)
    check_folder("--output", args.output)


if __name__ == "__main__":
    raise SystemExit(main())
