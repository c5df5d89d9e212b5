"""Paired benchmark of decoding arms on the same weights, in one process: numbers that can be checked.

    python -m scripts.bench                                             # the demo model, every drafter found beside it
    python -m scripts.bench --checkpoint DIR --questions FILE.jsonl --template vicuna --temperature 0 1 --json out.jsonl
    python -m scripts.bench --arm "wide=eagle=eagle3;tree=dynamic:60,7,10" --arm "deep=eagle=eagle3;tree=chain:7"
    python -m scripts.bench --baseline hf
    python -m scripts.bench --checkpoint DIR --eagle HEAD                       # plain decoding, and this head
    python -m scripts.bench --suite paper --checkpoint DIR --eagle HEAD --questions mt_bench/question.jsonl
    python -m scripts.bench --checkpoint DIR --eagle HEAD --questions mt_bench/question.jsonl --behind 500,4000
    python -m scripts.bench --checkpoint FILE.gguf --kernels cpu --only plain --baseline hf --baseline llama.cpp
    python -m scripts.bench --checkpoint FILE.gguf --clients 1,2,4,8,16 --baseline llama.cpp
    python -m scripts.bench --checkpoint FILE.gguf --clients 1 --prompt-tokens 64,2000 --baseline llama.cpp
    python -m scripts.bench --shape llama-3-8b --quant int4 --steps 128,2048 --widths 16,60 --arm "e3=eagle=random:3"

An arm is NAME=OPTIONS: `key=value` pairs of options of `load`, separated by `;`. The first arm is plain decoding, and
every ratio refers to it. Arms run interleaved, each run from empty caches. Token ids are counted up to the first stop.
An arm that promises the `same tokens` and breaks the promise gets no speedup (exit code 1). Arms with the `same
distribution` or of an `other engine` get a ratio with that label. results/README.md says what every field means.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench import behind
from bench.arms import NO_STOP, SHARED, SUITES, arms_of
from bench.measure import Bench, run_session
from bench.paper import SUITE_TABLES
from bench.peers import LIBRARIES, check_peers, peers_of
from bench.random_models import SHAPES, random_engine
from bench.records import Line, Lines, Settings, broken, environment
from bench.report import report
from bench.steps import SLACK, client_lines, numbers, step_lines
from bench.suites import add_questions, ask
from cli.report import ranks_json
from decoding.params import SamplingParams
from engine.load import load
from loading.options import add_options, add_sampling, options_from
from support.errors import INTERRUPTED, UsageError, at_least, command_parser, run_parsed
from support.files import check_folder
from support.machine import copy_bandwidth
from support.progress import Progress
from weights.quantized import weights_digest


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_parser("scripts.bench", __doc__)
    many = {"action": "append", "default": []}
    add_options(parser, *SHARED)
    add = parser.add_argument_group("arms").add_argument
    add("--arm", **many, metavar="NAME=OPTIONS", help="an arm beside plain decoding (repeatable)")
    add("--suite", choices=tuple(SUITES), help="every head with the trees of the EAGLE paper, or by tree and rule")
    own = "an arm that drafts with this head (repeatable); with --suite the heads (default: those beside the model)"
    add("--eagle", **many, metavar="HEAD", help=own)
    only = "of the default arms only these (plain is always in; without it, --arm and --eagle replace them)"
    add("--only", default="", metavar="A,B", help=only)
    what = "hf: transformers, two caches; llama.cpp (also with the heads of our arms), ik_llama.cpp: on the same GGUF "
    what += "file; torch: on its int4 kernel"
    add("--baseline", **many, choices=tuple(LIBRARIES), help=what)
    add = parser.add_argument_group("questions")
    add_questions(add, "--limit")
    what = "behind so many tokens of chat, document and code; a run goes on from the text of the run before"
    add.add_argument("--behind", type=numbers, default=[], metavar="500,4000", help=what)
    add_sampling(parser, "top_k", "top_p", "seed", "max_new_tokens", max_new_tokens=64)
    add = parser.add_argument_group("measuring").add_argument
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--reps", type=at_least(1), default=3)
    add("--max-seconds", type=float, default=80, help="no repetition starts that would end later (0: no limit)")
    add("--warmup-runs", type=at_least(1), default=3, help="at most this many per arm, until two agree within 1 %%")
    add = parser.add_argument_group("engine alone").add_argument
    add("--shape", choices=tuple(SHAPES), help="random weights of this shape, for --steps and peers")
    for name, default, example, what in (
        ("--steps", [], "128,2048", "the time of a step of every arm behind so many tokens"),
        ("--widths", [], "8,60", "with --steps: also plain steps of so many nodes"),
        ("--batches", [1], "1,4", "with --steps: with so many sequences"),
        ("--clients", [], "1,8", "decode for so many clients together, llama.cpp too; greedily"),
        ("--prompt-tokens", [200], "64,2000", "with --clients: tokens of every client's prompt"),
    ):
        add(name, type=numbers, default=default, metavar=example, help=what)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="JSON lines: every run, then the summary; -: the summary on stdout")
    add("-q", "--quiet", action="store_true", help="no progress line")
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings from the flags. Raises UsageError for values that make no sense."""
    several, foreign = (args.tp or 1) > 1, args.shape or args.baseline
    for wrong, message in (
        (args.max_new_tokens < 2, "--max-new-tokens is too small; allowed: 2 or more."),
        (args.suite and (args.shape or args.arm), "--suite has arms of its own; leave --shape and --arm out."),
        (several and foreign, "--tp splits a checkpoint among our own engines; leave --shape and --baseline out."),
        (args.behind and args.baseline, "--behind compares our own arms; leave --baseline out."),
        (args.lora and foreign, "--lora changes a checkpoint of ours; leave --shape and --baseline out."),
        (several and args.clients, "--clients measures one process; leave --tp out."),
    ):
        if wrong:
            raise UsageError(message)
    given = {f.name: vars(args)[f.name] for f in fields(Settings) if f.name in vars(args)}
    return Settings(tuple(dict.fromkeys(args.temperature)), random_weights=bool(args.shape), **given)


def prepare(args: argparse.Namespace, progress: Progress) -> tuple[Bench, dict[str, Any]]:
    """The arms and questions that the flags ask for, and what the JSON says of the model."""
    settings = settings_of(args)
    if args.shape:
        base = random_engine(args.shape, **options_from(args, *SHARED[1:]))
    else:
        base = load(**options_from(args, *SHARED))
    least = max((context + SLACK for context in args.steps), default=0)
    least = max([least, *(length + behind.SLACK + args.max_new_tokens for length in args.behind)])
    asked, args.limit = args.limit or behind.ASKED, 0 if args.behind else args.limit
    questions, prompts, ctx = ask(args, base, 128, args.ctx, least)
    if least > ctx:
        raise UsageError(f"the longest text needs {least} of {ctx} tokens of context.")
    if args.behind:
        questions = behind.questions_behind(args.behind, base, prompts, questions[:asked], questions[asked:])
    model = {
        "checkpoint": args.shape or Path(args.checkpoint).resolve().name,
        "weights_sha256": None if args.shape else weights_digest(base.model)[:16],
        "dtype": base.options.dtype,
        "quant": base.model.quant or "none",
        "ctx": ctx,
        "template": base.tokenizer.chat_template_source if prompts.chat else None,
        **ranks_json(base),
    }
    stops = base.stop_ids(SamplingParams()) or NO_STOP
    arms = arms_of(args, base, ctx)
    arms += peers_of(args, base, ctx, arms)
    for arm in arms:
        arm.reuse = bool(args.behind)
    return Bench(arms, questions, prompts, settings, stops, ctx, progress, environment(base.model.device)), model


def run(args: argparse.Namespace) -> int:
    """Measure what the flags ask for, write the files and print the report. Returns the exit code."""
    if args.json != "-":
        check_folder("--json", args.json)
    check_peers(args)
    lines, progress = Lines(args.json), Progress(args.quiet)
    bench, model = prepare(args, progress)
    bandwidth = copy_bandwidth(bench.arms[0].engine.model.device)
    alone: list[Iterable[Line]] = []
    if args.steps:
        alone.append(step_lines(bench.arms, args.steps, args.widths, args.batches, bench.ctx, bandwidth))
    if args.clients:
        text = [token for question in bench.questions for token in bench.prompts.first(question)]
        params = SamplingParams(max_new_tokens=args.max_new_tokens, stop_ids=NO_STOP)
        alone.append(client_lines(bench.arms, args.clients, args.prompt_tokens, text, params))
    compared = bool(args.questions or not alone) and not args.clients
    summary = run_session(bench, itertools.chain(*alone), compared, model, bandwidth, lines.write)
    progress.close()
    lines.write(summary)
    written = lines.close(summary["interrupted"])
    report(summary)
    if args.suite and (tables := SUITE_TABLES[args.suite](summary)):
        print(f"\n{tables}")
    if args.json == "-":
        print(json.dumps(summary))
    if summary["interrupted"]:
        kept = f"; the runs that were done are in {written}" if written else ""
        print(f"interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    return int(bool(summary["failed"]) or any(map(broken, summary["rows"])))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Exit code 1: an arm gave other tokens than it promises, or failed."""
    return run_parsed(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
