"""Find the draft tree that is fastest on this machine for a model and its EAGLE head, and prove it end to end.

    python -m scripts.tune_tree                                     # the demo model and its first head
    python -m scripts.tune_tree --checkpoint DIR --eagle HEAD --questions mt_bench.jsonl --template vicuna
    python -m scripts.tune_tree --text FILE --stats earlier.json --out tree.json
    python generate.py --eagle HEAD --tree auto                     # uses what was found

1. Costs: the time of a verification by its width, of a draft level by its width, of extending the draft cache and of
   dynamic drafting, timed in turn (medians).
2. Acceptance: on half of the prompts, a wide static tree gives the chance that the target takes child r of an accepted
   node, by depth and rank. A large dynamic tree per TOPK gives tau of every smaller one. Both per temperature.
3. Search: the static tree with the most expected tokens per second by dynamic programming (Sequoia, arXiv 2402.12374,
   with the cost of draft levels in it), and the best dynamic tree of a grid. The fastest of them on those same prompts
   is chosen.
4. Proof: it runs against paper25, the default dynamic tree and plain decoding on the other half of the prompts, paired,
   interleaved and with the same tokens. It is written only if it wins. Otherwise the best of the known trees is written,
   and the report says so. Where plain decoding is faster than all of them, nothing is written without --out.

The file is what `--tree FILE.json` takes, in the place where `--tree auto` looks. Exit codes: 1 no tree pays, 2 usage, 3
bad file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.tree_costs import LEVEL_DEPTH
from bench.tree_tuning import TUNED_FOR, report, tune
from options import LoadOptions, add_options, options_from
from support.errors import UsageError, command_parser, run_command
from support.files import write_json
from support.machine import default_device
from support.progress import Progress
from tree import MAX_DEPTH
from tree_choice import tuned_tree_path
from weights.heads import read_eagle

LIMITS = {  # smallest and largest value of the numeric flags
    "max_nodes": (8, 128), "max_depth": (LEVEL_DEPTH, MAX_DEPTH), "prompts": (2, 10000), "max_new_tokens": (2, 1 << 20),
    "reps": (1, 1000), "rounds": (1, 1000), "prompt_tokens": (1, 1 << 20),
}  # fmt: skip


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
    add("--stats", metavar="FILE", help="take the acceptance statistics from an earlier file of this program")
    add("--out", metavar="FILE", help="write here instead of where --tree auto looks")
    add("--prompts", type=int, default=16, help="half for the statistics, half for the verification")
    add("--prompt-tokens", type=int, default=96)
    add("--max-new-tokens", type=int, default=64)
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    add("--seed", type=int, default=1)
    add("--reps", type=int, default=3, help="repetitions of the verification")
    add("--rounds", type=int, default=9, help="repetitions of every timing")
    add("--max-nodes", type=int, help="greatest tree to consider (default: 32 on a CPU, 64 on a GPU)")
    add("--max-depth", type=int, default=8)
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Fill in defaults. Raises UsageError for numbers that make no sense."""
    if args.eagle is None:  # the checkpoint's first head
        found = sorted(p for p in Path(args.checkpoint).glob("eagle*") if p.is_dir())
        if not found:
            raise UsageError(f"no eagle* folder in {args.checkpoint}; give --eagle HEAD.")
        args.eagle = str(found[0])
    args.max_nodes = args.max_nodes or (64 if (args.device or default_device()) == "cuda" else 32)
    for name, (low, high) in LIMITS.items():
        value = vars(args)[name]
        if not low <= value <= high:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; allowed: {low} to {high}.")


def run(args: argparse.Namespace) -> int:
    """Tune, write the tree and print the report. Returns 1 where no tree is worth writing."""
    check_arguments(args)

    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    content = tune(args, say, Progress(args.quiet))
    pays = content["winner"] != "plain decoding"
    path = Path(args.out or "")
    if not args.out and not pays:
        print(f"{report(content)}\nnothing was written; --out FILE keeps the tree and the statistics")
        return 1
    if not args.out:
        options = LoadOptions(**options_from(args, *TUNED_FOR))
        checkpoint = options.open_checkpoint()
        overrides = dict(item.split("=", 1) for item in options.eagle_config)
        path = tuned_tree_path(options, checkpoint, read_eagle(options.eagle, checkpoint.config, overrides))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    print(f"{report(content)}\nwritten to {path}" + ("" if args.out else "   (--tree auto)"))
    return 0 if pays else 1


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
