"""Acceptance of draft heads on held-out text: tau by tree, temperature and noise; n-alpha on a chain.

    python -m scripts.acceptance                         # the demo heads on held-out standard-library code
    python -m scripts.acceptance --checkpoint DIR --eagle HEAD --text FILE --json out.json
    python -m scripts.acceptance --ablation runs/a/CARD.json runs/b/CARD.json      # add heads trained on other inputs
    python -m scripts.acceptance --readme docs/results.md      # write the table between the page's markers

Every arm decodes the same prompts. `same` counts prompts whose tokens equal plain decoding's (multi-round does not
promise that). tau counts tokens per target forward, the target's own included. k-alpha is the chance that the draft at
depth k+1 of a chain is accepted once all shallower ones were (eagle.md 6.2), over all steps of all prompts but the last
step of each: the length limit or a stop may have cut that one, which is no rejection.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.acceptance import TREES, add_ablation, measure, tables
from options import add_options
from support.errors import run_command
from support.files import read_json, replace_block, write_json


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "checkpoint", "dtype", "ctx", dtype="float32", ctx=512)
    parser.add_argument("--eagle", action="append", help="head (repeatable; default: CHECKPOINT/eagle*)")
    parser.add_argument("--text", help="held-out text (default: the demo's held-out modules)")
    parser.add_argument("--trees", nargs="+", default=list(TREES))
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", default="benchmarks/results/demo_acceptance.json")
    parser.add_argument("--ablation", nargs="+", help="only add these CARD.json files to the JSON")
    parser.add_argument("--readme", help="only rewrite this file's table from the JSON")
    parser.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def run(args: argparse.Namespace, argv: list[str]) -> None:
    """Measure and print, or only rewrite a file from what was measured."""
    path = Path(args.json)
    if args.readme:
        replace_block(Path(args.readme), "acceptance", tables(read_json(path)))
    elif args.ablation:
        add_ablation(path, args.ablation)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"command": " ".join(["python -m scripts.acceptance", *argv]), **measure(args)}
        write_json(path, report)
        print(tables(report))


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    return run_command(lambda: run(args, argv), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
