"""Step times of real model shapes with random weights: one JSON line per cell, written as soon as it is measured.

    python -m scripts.step_time --json FILE              # what `make gpu` measures; finished cells are skipped
    python -m scripts.step_time --json FILE --full       # and the rest
    python -m scripts.step_time --json FILE --device cpu --tiny     # the same code on small shapes, for tests
    python -m scripts.step_time --json FILE --start cold # one start of the 8B shape: imports to the first tokens

A cell is a target, a draft head, a tree and a context. Its weights are random but of the real shapes, made on the device
in their final format. A step's work depends on shapes and on the context alone, so its time is that of a trained model
of the same shape. Acceptance on random weights means nothing (almost every draft is rejected), so tokens/s is only given
for a stated tau and labelled synthetic.

The context stays fixed: before every timed step, outside the timed events, the sequence is set back to `context` cached
tokens. `step_ms` is the time between two CUDA events around one step (one graph replay). `wall_ms` is the engine's own
loop, host and read-back included, over a request whose context passes from below to above the nominal one. The
difference of the two is the host's gap.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

STARTED = time.time()  # a start is measured from here, before the imports that take long

import torch  # noqa: E402

from bench.step_cells import full_cells, quick_cells, tiny_cells  # noqa: E402
from bench.step_run import Run, machine, run_start, utc  # noqa: E402
from kernels import can_overlap  # noqa: E402
from support.errors import command_parser, run_command  # noqa: E402
from support.files import append_json_lines  # noqa: E402
from support.machine import copy_bandwidth  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("scripts.step_time", __doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, help="append one line per cell to this file")
    add("--done", type=Path, nargs="*", default=[], help="further files whose finished cells are skipped")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--full", action="store_true", help="also the cells of make gpu-full")
    add("--tiny", action="store_true", help="small shapes only: tries the script, measures nothing")
    add("--only", default="", metavar="TEXT", help="cells whose name contains TEXT")
    add("--list", action="store_true", help="print the cells and exit")
    add("--run", nargs="+", choices=("engine", "graph", "eager"), help=(
        "ways to run a step, tried in order; engine: as `generate.py --compile`; graph: uncompiled, captured in a CUDA "
        "graph (default: engine graph; on a CPU: eager)"
    ))  # fmt: skip
    add("--seconds", type=float, default=0, help="start no cell later than this (0: no limit)")
    add("--cell-seconds", type=float, default=300, help="limit of one cell")
    add("--steps", type=int, default=32, help="steps of the engine's own loop")
    add("--repeats", type=int, default=30, help="timed steps")
    add("--synthetic-tau", type=float, default=4.0, help="tau assumed where none is published")
    add("--skip-failed", action="store_true", help="do not retry cells that failed")
    add("--no-launches", dest="launches", action="store_false", help="do not count launches")
    add("--start", metavar="LABEL", help="measure one start instead; LABEL: cold or warm")
    add("--since", type=float, help="with --start: when the command was given, Unix seconds")
    add("--bandwidth", action="store_true", help="only the environment and the copy bandwidth")
    return parser


def main(argv: list[str] | None = None) -> int:
    """0: every cell has a figure; 1: some failed; 2: usage; POISONED: run again with --skip-failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    return run_command(lambda: run(args, parser), args.debug, "interrupted; the finished cells are kept")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Do what the arguments ask for. Returns the exit code."""
    cells = tiny_cells() if args.tiny else quick_cells() + (full_cells() if args.full else [])
    cells = [cell for cell in dict.fromkeys(cells) if args.only in cell.key]
    if args.list:
        print("\n".join(cell.key for cell in cells))
        return 0
    device = torch.device(args.device)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the script")
    if device.type == "cpu" and not args.tiny:
        parser.error("--device cpu needs --tiny: the real shapes are for a GPU")
    if args.steps < 2 or args.repeats < 1:
        parser.error("--steps must be at least 2 and --repeats at least 1")
    cells = [cell for cell in cells if not cell.overlap or can_overlap(device)]
    if not cells:
        parser.error(f"no cell's name contains {args.only!r}; --list prints them")
    env = machine(device)
    if args.start:
        return run_start(args.start, args.json, args.since or STARTED, device, env, args.tiny)
    if args.bandwidth:
        line = {"type": "environment", "environment": env, "utc": utc()}
        line["copy_gbs"] = round(copy_bandwidth(device) / 1e9, 2)
        append_json_lines(args.json, line)
        print(json.dumps(line), flush=True)
        return 0
    return Run(args, device, env, STARTED).over(cells)


if __name__ == "__main__":
    sys.exit(main())
