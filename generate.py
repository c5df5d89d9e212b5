"""Load a model (and a draft head) and decode.

    python generate.py                                              # the demo model continues a built-in prompt
    python generate.py --checkpoint DIR --eagle HEAD --compile -p "Why is the sky blue?"
    python generate.py --checkpoint DIR --chat

    from generate import load
    engine = load("demo", eagle="demo/eagle1")
    for chunk in engine.generate(prompt_ids, SamplingParams(max_new_tokens=100)): ...

The text goes to stdout, the report to stderr. Exit codes: 2 usage, 3 bad file, 4 memory, 5 internal, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path

import torch

from engine import Engine
from load import load
from options import add_options, add_sampling, options_from, parse_ids, sampling_from
from report import prove
from report.gauge import Gauge
from report.lines import Report, result_json
from report.viewer import StepRecorder
from sampling import SamplingParams
from support import cache
from support.errors import INTERRUPTED, BadFileError, Parser, UsageError, run_command
from support.machine import default_device, size_text

__all__ = ["load", "main"]

DEMO_PROMPT = '''def read_file(filename):
    """Return the contents of a file."""
    with open(filename) as f:
'''


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("request").add_argument
    add("-p", "--prompt", help="text to continue")
    add("--prompt-ids", metavar="5,17,9", help="token ids to continue; needs no tokenizer")
    add("--prompt-file", metavar="FILE", help="continue the text of a file")
    add("--chat", action="store_true", help="interactive chat; keeps history and the cache between turns")
    add("--system", help="system message of the chat")
    add("--template", metavar="NAME", help="chat template: vicuna, llama-2-chat, mixtral, or one of the model's")
    add_sampling(parser, max_new_tokens=200)
    add_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--prove", action="store_true", help="replay without the head and compare; exit 1 on a real difference")
    add("--show-tree", action="store_true", help="colour accepted tokens by depth")
    add("--html", metavar="FILE", help="write a page that shows every step's tree")
    add("--gauge", action="store_true", help="time the phases of a step: draft, verify, accept, host")
    add("--json", action="store_true", help="one JSON object on stdout instead of text")
    add("--cache", choices=("show", "clear"), help="list or delete what --compile has kept, and leave")
    add("-q", "--quiet", action="store_true", help="no report")
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
    if args.cache:
        return cache_command(args.cache)
    params = sampling_from(args)
    check_arguments(args)
    request = read_request(args)
    report = Report(args.quiet or args.json)
    started = time.perf_counter()
    options = options_from(args)
    # what compares or shows speculative steps needs all of them
    options["eagle_always"] |= bool(args.prove or args.show_tree or args.html or args.gauge)
    if (args.device or default_device()) == "cpu":
        report.measure(torch.device("cpu"))
    engine = load(progress=report.progress, report=report.line, **options)
    if args.template and engine.tokenizer:
        engine.tokenizer.use_template(args.template)
    report.head(engine, time.perf_counter() - started)
    if args.chat:
        return chat(engine, params, args, report)
    prompts = [prompt_ids(engine, request)] * args.batch_size
    return run_once(engine, prompts, params, args, report)


def cache_command(what: str) -> int:
    """--cache show | clear: the compiled code, never anything else."""
    found = cache.entries() if what == "show" else cache.clear()
    for entry in found:
        print(f"{entry.key}  {entry.files:,} files  {size_text(entry.bytes)}")
    total = f"{len(found)} entries, {size_text(sum(entry.bytes for entry in found))}"
    print(f"{cache.root()}: {total}{' deleted' if what == 'clear' else ''}")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError for arguments that do not go together."""
    drafts = args.eagle or args.drafter or args.draft_checkpoint or args.medusa
    given = [name for name in ("prompt", "prompt_ids", "prompt_file") if vars(args)[name] is not None]
    if args.prove and args.verify != "match":
        raise UsageError("--prove compares tokens; --verify multi-round promises only the distribution.")
    if args.prove and not drafts:
        raise UsageError("--prove replays without the drafter; it needs one, like --eagle HEAD.")
    if len(given) > 1 or (args.chat and given):
        raise UsageError("give one of --prompt, --prompt-ids, --prompt-file, --chat.")
    for_one_request = {
        "--gauge": args.gauge,
        "--prove": args.prove,
        "--show-tree": args.show_tree,
        "--html": args.html,
        "--json": args.json,
        "--batch-size": args.batch_size > 1,
    }
    for flag in (flag for flag, is_given in for_one_request.items() if args.chat and is_given):
        raise UsageError(f"{flag} is for one request; it does not go with --chat.")
    if not args.chat and (args.template or args.system):
        raise UsageError("--template and --system shape a chat; add --chat.")
    if args.batch_size > 1 and (args.show_tree or args.html):
        raise UsageError("--show-tree and --html show one sequence; use --batch-size 1.")


def read_request(args: argparse.Namespace) -> str | list[int]:
    """The text or ids to continue that the arguments name, or the built-in text."""
    if args.prompt_ids is not None:
        return list(parse_ids(args.prompt_ids, "--prompt-ids"))
    if args.prompt_file is None:
        return DEMO_PROMPT if args.prompt is None else args.prompt
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {args.prompt_file}: {error}") from error


def prompt_ids(engine: Engine, text: str | list[int]) -> list[int]:
    """The ids of a request's prompt."""
    if isinstance(text, list):
        return text
    if engine.tokenizer is None:
        raise BadFileError(
            f"{engine.options.checkpoint} has no tokenizer files (tokenizer.json or tokenizer.model). Pass --prompt-ids."
        )
    if len(text) > 16 * engine.ctx:  # no tokenizer makes so few tokens of so long a text
        raise UsageError(f"the prompt has {len(text):,} characters, far more than ctx {engine.ctx:,} holds.")
    return engine.tokenizer.encode(text)


def run_once(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, args: argparse.Namespace, report: Report
) -> int:
    """Decode one batch, show it, and do what else was asked for with it."""
    recorder = StepRecorder(engine) if args.show_tree or args.html else None
    gauge = Gauge(engine) if args.gauge else None
    stream = engine.generate_batch(prompts, params)
    show = not args.json and engine.tokenizer is not None and not args.show_tree
    if show and args.prompt_ids is None and args.prompt_file is None:
        print(DEMO_PROMPT if args.prompt is None else args.prompt, end="")
    interrupted = False
    try:
        for chunk in stream:
            if show and args.batch_size == 1:
                print(chunk.text, end="", flush=True)
            elif not args.json and engine.tokenizer is None:
                print(*chunk.token_ids, sep=",", end=",", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    results = stream.results
    longest = max(results, key=lambda result: result.steps)
    if args.json:
        print(json.dumps(result_json(engine, results) | ({"gauge_ms": gauge.split(longest)} if gauge else {})))
    else:
        if show and args.batch_size > 1:
            for b, result in enumerate(results):
                print(f"\n--- seed {params.seed + b} ---\n{result.text}", end="")
        if args.show_tree:
            print(recorder.coloured(results[0]), end="")
        print(flush=True)
    report.tail(engine, results, params)
    if gauge:
        report.line(f"gauge    {gauge.line(longest)}")
    if args.html:
        recorder.write_html(args.html, results[0])
        report.line(f"html     {args.html}")
    if interrupted:
        return INTERRUPTED
    if not args.prove:
        return 0
    proof = prove.prove(engine, prompts, params, results)
    print(prove.verdict(proof, engine.options.dtype), file=sys.stderr)
    return 0 if prove.holds(proof) else 1


def chat(engine: Engine, params: SamplingParams, args: argparse.Namespace, report: Report) -> int:
    """Read user turns from the terminal. /reset forgets, /exit or end of file leaves, Ctrl-C stops a reply."""
    if engine.tokenizer is None:
        raise BadFileError(f"{args.checkpoint} has no tokenizer files; --chat needs one.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while True:
        try:
            text = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except UnicodeDecodeError as error:
            print(f"error  not UTF-8: {error}", file=sys.stderr, flush=True)
            continue
        if text == "/exit":
            return 0
        if text == "/reset":
            messages = list(opening)
        if text in ("", "/reset"):
            continue
        messages.append({"role": "user", "content": text})
        try:
            stream = engine.generate(engine.tokenizer.encode_chat(messages), params)
        except ValueError as error:  # the conversation has outgrown the context, or the template refuses it
            messages.pop()
            print(f"error  {error} (/reset starts over)", file=sys.stderr, flush=True)
            continue
        started = False
        try:
            for chunk in stream:
                piece = chunk.text if started else chunk.text.lstrip()
                started = started or bool(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
        print(flush=True)
        messages.append({"role": "assistant", "content": stream.result.text.strip()})
        report.tail(engine, stream.results, params)


if __name__ == "__main__":
    raise SystemExit(main())
