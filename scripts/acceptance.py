"""Acceptance of draft heads on held-out text: tau by tree, temperature and noise; n-alpha on a chain.

    python -m scripts.acceptance                         # the demo heads on held-out standard-library code
    python -m scripts.acceptance --checkpoint DIR --eagle HEAD --text FILE --json out.json
    python -m scripts.acceptance --checkpoint FILE.gguf --eagle HEAD --questions mt_bench/question.jsonl --json out.json
    python -m scripts.acceptance --ablation runs/a/CARD.json runs/b/CARD.json      # add heads trained on other inputs
    python -m scripts.acceptance --readme docs/results.md      # write the table between the page's markers

Every arm decodes the same prompts. `same` counts prompts whose tokens equal plain decoding's (multi-round does not
promise that). tau counts tokens per target forward, the target's own included. k-alpha is the chance that the draft at
depth k+1 of a chain is accepted once all shallower ones were, over all steps of all prompts but the last
step of each: the length limit or a stop may have cut that one, which is no rejection.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.acceptance import TREES, add_ablation, measure, tables
from options import add_options
from support.errors import command_parser, run_command
from support.files import read_json, replace_block, write_json


def run(args: argparse.Namespace, argv: list[str]) -> None:
    """Measure and print, or only rewrite a file from what was measured."""
    if args.readme:
        replace_block(args.readme, args.block, tables(read_json(args.json)))
    elif args.ablation:
        add_ablation(args.json, args.ablation)
    else:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"command": " ".join(["python -m scripts.acceptance", *argv]), **measure(args)}
        write_json(args.json, report)
        print(tables(report))


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser("scripts.acceptance", __doc__)
    add_options(parser, "checkpoint", "dtype", "ctx", dtype="float32", ctx=512)
    add = parser.add_argument
    add("--eagle", action="append", help="head (repeatable; default: CHECKPOINT/eagle*)")
    add("--text", help="held-out text (default: the demo's held-out modules)")
    add("--questions", action="append", default=[], help="questions in MT-bench layout, asked as chats (repeatable)")
    add("--trees", nargs="+", default=list(TREES))
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    add("--prompts", type=int, default=12, help="windows of the text, or questions of every file (default: 12)")
    add("--prompt-tokens", type=int, default=128)
    add("--max-new-tokens", type=int, default=128)
    add("--json", type=Path, default=Path("benchmarks/results/demo_acceptance.json"))
    add("--ablation", type=Path, nargs="+", help="only add these CARD.json files to the JSON")
    add("--readme", type=Path, help="only rewrite this file's table from the JSON")
    add("--block", default="acceptance", metavar="NAME", help="the markers around that table (default: acceptance)")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args, argv), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
