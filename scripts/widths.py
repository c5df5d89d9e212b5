"""How long a whole forward takes by its number of nodes, LM head included.

    python -m scripts.widths --checkpoint FILE.gguf --baseline llama.cpp --json out.json
    python -m scripts.widths --checkpoint demo --quant int4 --nodes 1 8 26

A tree pays if many nodes cost little more than one. All widths are timed in turn, and the table shows medians. llama.cpp
evaluates a batch of as many tokens and gives the logits of all of them, as verifying needs it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.peers import check_peers, is_gguf
from bench.widths import measure, show
from load import load
from options import add_options, options_from
from support.errors import at_least, command_parser, run_command
from support.files import check_folder, write_json

SHARED = ("checkpoint", "device", "dtype", "quant", "threads", "kernels", "activations")


def run(args: argparse.Namespace, argv: list[str]) -> None:
    """Measure and print."""
    check_folder("--json", args.json)
    check_peers(args.baseline, is_gguf(args.checkpoint), args.device)
    engine = load(**options_from(args, *SHARED), ctx=64)
    gguf = args.checkpoint if args.baseline else None
    report = {"command": " ".join(["python -m scripts.widths", *argv])}
    report |= measure(engine, args.nodes, args.context, args.repeats, gguf)
    if args.json:
        write_json(args.json, report)
    print(show(report))


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser("scripts.widths", __doc__)
    add_options(parser, *SHARED)
    add = parser.add_argument
    add("--nodes", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16, 26, 60])
    add("--context", type=at_least(1), default=200, help="cached tokens (default: 200)")
    add("--repeats", type=at_least(1), default=15, help="rounds (default: 15)")
    add("--baseline", choices=("llama.cpp",), action="append", default=[], help="time it beside ours, on a GGUF file")
    add("--json", type=Path, help="write what was measured")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args, argv), args.debug)


if __name__ == "__main__":
    sys.exit(main())
