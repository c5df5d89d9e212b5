"""The tables and figures of the EAGLE paper, for any checkpoint and heads, beside the published numbers.

    python -m scripts.paper_tables --quick                       # the demo: measure what is missing, write the page
    python -m scripts.paper_tables --render                      # only write docs/paper_tables.md from the cells
    python -m scripts.paper_tables --plan                        # what would be measured
    python -m scripts.paper_tables --checkpoint DIR --eagle HEAD --suite mt_bench/question.jsonl \
        --suite humaneval/question.jsonl --template llama-2-chat --system paper --int4 INT4_DIR --cells llama.jsonl

One cell is one drafter against plain decoding on the same prompts, paired and interleaved by scripts.bench; it is one
JSON line with every run, the machine and the command. Cells that are there already (same weights, drafter, prompts and
settings) are not run again, so an interrupted run goes on where it stopped. The page is computed from the lines alone; a
cell that was not run says so, with the reason. Published numbers: benchmarks/paper_eagle1.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from bench.arms import DYNAMIC
from bench.paper_cells import measure
from bench.paper_page import ROOT, render
from load import DEMO
from model import DTYPES
from support.errors import USAGE

CELLS = ROOT / "benchmarks" / "results" / "paper_tables_demo.jsonl"


PAGE = ROOT / "docs" / "paper_tables.md"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts.paper_tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", default=str(DEMO), metavar="DIR", help="model directory (default: the embedded demo)")
    add(
        "--eagle",
        action="append",
        default=[],
        metavar="HEAD",
        help="EAGLE head (repeatable; default: those in the checkpoint's folders)",
    )
    add(
        "--ablation",
        action="append",
        default=[],
        metavar="HEAD",
        help="head for Table 6 or Figure 8; its CARD.json says what it is",
    )
    add("--medusa", metavar="PATH", help="Medusa heads")
    add(
        "--draft-checkpoint",
        action="append",
        default=[],
        metavar="DIR",
        help="draft LLM (repeatable: a distilled and a plain one)",
    )
    add("--int4", metavar="DIR", help="the model quantized by quantize.py (default: rounded in memory)")
    add(
        "--suite",
        action="append",
        default=[],
        metavar="FILE",
        help="questions in MT-bench layout (repeatable): mt_bench, humaneval, gsm8k, alpaca; stdlib: the built-in ones",
    )
    add("--questions", type=int, default=0, metavar="N", help="the first N questions of every suite")
    add("--template", metavar="NAME", help="as in scripts.bench")
    add("--system", metavar="TEXT", help="as in scripts.bench")
    add("--format", default="auto", choices=("auto", "chat", "text"))
    add("--max-new-tokens", type=int, help="default: 64, with --quick 48")
    add("--reps", type=int, help="default: 3, with --quick 1")
    add("--seed", type=int, default=0)
    add("--batches", type=int, nargs="+", default=[1, 2, 3, 4], metavar="B", help="batch sizes of Table 7")
    add(
        "--largest-batch",
        type=int,
        default=0,
        metavar="CAP",
        help="also the largest batch whose caches fit the free memory, up to CAP",
    )
    add(
        "--dynamic",
        default=DYNAMIC,
        metavar="TREE",
        help=f"dynamic tree of the figures (default: {DYNAMIC})",
    )
    add("--quick", action="store_true", help="3 prompts, 48 tokens, 1 repetition: the demo within minutes")
    add("--max-seconds", type=float, default=0, help="start no further cell after this time (0: no limit)")
    add("--device", choices=("cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES))
    add("--compile", action="store_true")
    add("--kernels", default="auto", choices=("auto", "triton", "reference"))
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--run", action="store_true", help="only measure what is missing")
    mode.add_argument("--render", action="store_true", help="only write the page")
    mode.add_argument("--plan", action="store_true", help="only list the cells")
    add(
        "--cells",
        default=str(CELLS),
        metavar="JSONL",
        help="the measured cells (default: benchmarks/results/paper_tables_demo.jsonl)",
    )
    add("--page", default=str(PAGE), metavar="MD", help="the page (default: docs/paper_tables.md)")
    add("--debug", action="store_true", help="full tracebacks")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure and render; exit codes as generate.py, 130 after Ctrl-C (what was measured is kept)."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    args.command = " ".join(["python -m scripts.paper_tables", *(_public(a) for a in argv)])
    args.questions = args.questions or (3 if args.quick else 0)
    for name, usual, quick in (("max_new_tokens", 64, 48), ("reps", 3, 1)):
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else usual)
    if min(args.batches) < 1 or args.reps < 1 or args.max_new_tokens < 3:
        print("error  --batches and --reps start at 1, --max-new-tokens at 3.", file=sys.stderr)
        return USAGE
    try:
        if not args.render:
            measure(args, lambda text: print(text, file=sys.stderr, flush=True))
        if not args.run and not args.plan:
            render(args.cells, args.page)
            print(f"wrote {args.page}")
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        if args.debug:
            raise
        print(f"error  {' '.join(str(error).split())}", file=sys.stderr)
        return getattr(error, "code", USAGE)
    return 0


def _public(argument: str) -> str:
    """An argument without the folders of this machine."""
    return Path(argument).name if argument.startswith(("/", "~")) else argument


if __name__ == "__main__":
    raise SystemExit(main())
