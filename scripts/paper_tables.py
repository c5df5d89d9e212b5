"""The tables and figures of the EAGLE paper, for any checkpoint and heads, beside the published numbers.

    python -m scripts.paper_tables --quick                       # the demo: measure what is missing, write the page
    python -m scripts.paper_tables --render                      # only write docs/paper_tables_demo.md from the cells
    python -m scripts.paper_tables --plan                        # what would be measured
    python -m scripts.paper_tables --checkpoint DIR --eagle HEAD --questions mt_bench/question.jsonl \\
        --questions humaneval/question.jsonl --template llama-2-chat --system paper --int4 INT4_DIR --cells llama.jsonl

One cell is one drafter against plain decoding on the same prompts, paired and interleaved. It is one JSON line with every
run, the machine and the command. A cell that is there already (same weights, drafter, prompts and settings) is not run
again, so an interrupted run goes on where it stopped. The page is computed from the lines alone. A cell that was not run
says so, with the reason. Published numbers: benchmarks/paper_eagle1.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.arms import DYNAMIC
from bench.paper_cells import measure
from bench.paper_page import ROOT, render
from options import add_options
from support.errors import UsageError, command_parser, run_command
from support.files import check_folder

CELLS = ROOT / "benchmarks" / "results" / "paper_tables_demo.jsonl"
DOCS = ROOT / "docs"


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("scripts.paper_tables", __doc__)
    add_options(parser, "checkpoint", "device", "dtype", "compile", "kernels")
    many = {"action": "append", "default": []}
    add = parser.add_argument_group("drafters").add_argument
    add("--eagle", **many, metavar="HEAD", help="EAGLE head (repeatable; default: those in the checkpoint's folders)")
    add("--ablation", **many, metavar="HEAD", help="head for Table 6 or Figure 8; its CARD.json says what it is")
    add("--medusa", **many, metavar="PATH", help="Medusa heads")
    add("--draft-checkpoint", **many, metavar="DIR", help="draft LLM (repeatable: a distilled and a plain one)")
    add("--int4", metavar="DIR", help="the model quantized by quantize.py (default: rounded in memory)")
    add = parser.add_argument_group("questions").add_argument
    files = "mt_bench, humaneval, gsm8k, alpaca; stdlib: the built-in ones"
    add("--questions", **many, metavar="FILE", help=f"questions in MT-bench layout (repeatable): {files}")
    add("--limit", type=int, default=0, metavar="N", help="the first N questions of every file")
    add("--template", metavar="NAME", help="as in scripts.bench")
    add("--system", metavar="TEXT", help="as in scripts.bench")
    add("--format", default="auto", choices=("auto", "chat", "text"))
    add = parser.add_argument_group("measuring").add_argument
    add("--max-new-tokens", type=int, help="default: 64, with --quick 48")
    add("--reps", type=int, help="default: 3, with --quick 1")
    add("--seed", type=int, default=0)
    add("--batches", type=int, nargs="+", default=[1, 2, 3, 4], metavar="B", help="batch sizes of Table 7")
    largest = "also the largest batch whose caches fit the free memory, up to CAP"
    add("--largest-batch", type=int, default=0, metavar="CAP", help=largest)
    add("--dynamic", default=DYNAMIC, metavar="TREE", help=f"dynamic tree of the figures (default: {DYNAMIC})")
    add("--quick", action="store_true", help="3 prompts, 48 tokens, 1 repetition: the demo within minutes")
    add("--max-seconds", type=float, default=0, help="start no further cell after this time (0: no limit)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--run", action="store_true", help="only measure what is missing")
    add("--render", action="store_true", help="only write the page")
    add("--plan", action="store_true", help="only list the cells")
    add = parser.add_argument_group("output").add_argument
    where = "benchmarks/results/paper_tables_demo.jsonl"
    add("--cells", default=str(CELLS), metavar="JSONL", help=f"the measured cells (default: {where})")
    where = "docs/NAME.md for benchmarks/results/NAME.jsonl, otherwise beside the cells"
    add("--page", metavar="MD", help=f"the page (default: {where})")
    return parser


def page_of(cells: Path) -> Path:
    """Where the page of a cell file belongs."""
    page = cells.with_suffix(".md")
    return DOCS / page.name if page.resolve().parent == CELLS.parent else page


def run(args: argparse.Namespace) -> None:
    args.limit = args.limit or (3 if args.quick else 0)
    if args.max_new_tokens is None:
        args.max_new_tokens = 48 if args.quick else 64
    if args.reps is None:
        args.reps = 1 if args.quick else 3
    if min(args.batches) < 1 or args.reps < 1 or args.max_new_tokens < 3:
        raise UsageError("--batches and --reps start at 1, --max-new-tokens at 3.")
    args.page = args.page or str(page_of(Path(args.cells)))
    check_folder("--page", args.page)
    if not args.render:
        measure(args, lambda text: print(text, file=sys.stderr, flush=True))
    if not args.run and not args.plan:
        render(args.cells, args.page)
        print(f"wrote {args.page}")


def main(argv: list[str] | None = None) -> int:
    """Measure and render; exit codes as generate.py, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    # The command in the cells does not name folders of this machine.
    words = (Path(word).name if word.startswith(("/", "~")) else word for word in argv)
    args.command = " ".join(["python -m scripts.paper_tables", *words])
    return run_command(lambda: run(args), args.debug, interrupted="interrupted; what was measured is kept")


if __name__ == "__main__":
    raise SystemExit(main())
