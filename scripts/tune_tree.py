"""Finds the draft tree that decodes fastest on this machine, and keeps it for `--tree auto`.

    python -m scripts.tune_tree --checkpoint DIR --eagle HEAD          # then: python generate.py ... --tree auto
    python -m scripts.tune_tree --questions FILE.jsonl --trees chain:2 chain:4 dynamic:16,4,4

About ten trees, the default one and plain decoding run in turn on the same prompts. The fastest tree is written if it is
faster than the default and than plain decoding. Its file is kept in the cache folder, by model, head, device and options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.race import DEFAULT, PLAIN, TUNED_FOR, report, tune
from drafting import tuned_tree_path
from options import LoadOptions, add_options, options_from
from support.errors import UsageError, command_parser, run_command
from support.files import write_json
from support.progress import Progress
from weights.heads import read_eagle


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("scripts.tune_tree", __doc__)
    add = parser.add_argument
    add_options(parser, *TUNED_FOR, ctx=512)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--questions", metavar="FILE.jsonl", help="questions in MT-bench layout (their first turns)")
    source.add_argument("--text", metavar="FILE", help="cut the prompts from this text")
    add("--format", default="auto", choices=("auto", "chat", "text"), help="how questions are rendered")
    add("--template", metavar="NAME", help="chat template: vicuna, llama-2-chat, mixtral, ...")
    add("--system", help="system message; `paper`: LLaMA-2-chat's")
    add("--trees", nargs="+", metavar="TREE", help="race these trees instead of the ten that are built in")
    add("--out", metavar="FILE", help="write here, whatever won, instead of where --tree auto looks")
    add("--prompts", type=int, default=8)
    add("--prompt-tokens", type=int, default=96)
    add("--max-new-tokens", type=int, default=64)
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    add("--seed", type=int, default=1)
    add("--reps", type=int, default=3, help="repetitions, of which the median counts")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Fill in the head. Raises UsageError for numbers that make no sense."""
    if args.eagle is None:  # the checkpoint's first head
        heads = sorted(p for p in Path(args.checkpoint).glob("eagle*") if p.is_dir())
        if not heads:
            raise UsageError(f"no eagle* folder in {args.checkpoint}; give --eagle HEAD.")
        args.eagle = str(heads[0])
    for name, least in (("prompts", 1), ("prompt_tokens", 1), ("max_new_tokens", 2), ("reps", 1)):
        if vars(args)[name] < least:
            raise UsageError(f"--{name.replace('_', '-')} is {vars(args)[name]}; allowed: {least} or more.")


def run(args: argparse.Namespace) -> int:
    """Race, write the tree and print the report. Returns 1 where no tree is worth writing."""
    check_arguments(args)
    content = tune(args, Progress(args.quiet))
    print(report(content))
    won = content["winner"] not in (PLAIN, DEFAULT)
    if not won and not args.out:
        print("nothing was written, because leaving --tree out is at least as fast.")
        return 1
    path = Path(args.out or "")
    if not args.out:
        options = LoadOptions(**options_from(args, *TUNED_FOR))
        checkpoint = options.open_checkpoint()
        overrides = dict(item.split("=", 1) for item in options.eagle_config)
        path = tuned_tree_path(options, checkpoint, read_eagle(options.eagle, checkpoint.config, overrides))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    print(f"written to {path}" + ("" if args.out else "   (--tree auto)"))
    return 0 if won else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    sys.exit(main())
