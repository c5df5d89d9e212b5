"""Step times of real model shapes with random weights: one JSON line per cell, written as soon as it is measured.

    python -m scripts.step_time --json FILE              # what `make gpu` measures; finished cells are skipped
    python -m scripts.step_time --json FILE --full       # and the rest
    python -m scripts.step_time --json FILE --device cpu --tiny     # the same code on small shapes, for tests
    python -m scripts.step_time --json FILE --start cold # one start of the 8B shape: imports to the first tokens

A cell is a target, a draft head, a tree and a context. Its weights are random but of the real shapes, made on the device
in their final format, so the time of a step is that of a trained model of the same shape: a step's work depends on
shapes and on the context alone. Acceptance on random weights means nothing (almost every draft is rejected), so tokens/s
is only given for a stated tau and labelled synthetic.

The context stays fixed: before every timed step, outside the timed events, the sequence is set back to `context` cached
tokens (`pin`); the cache below holds the keys and values of a real prompt. `step_ms` is the time between two CUDA events
around one step (one graph replay); `wall_ms` is the engine's own loop, host and read-back included, over a request whose
context passes from below to above the nominal one; their difference is the host's gap.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from bench.environment import environment
from bench.step_cells import full_cells, quick_cells, tiny_cells
from bench.step_time import Run, append, bandwidth, run_start, utc


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="append one line per cell to this file")
    parser.add_argument(
        "--done", type=Path, nargs="*", default=[], help="further files whose finished cells are skipped"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--full", action="store_true", help="also the cells of make gpu-full")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes only: tries the script, measures nothing"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="print the cells and exit")
    parser.add_argument("--run", nargs="+", choices=("engine", "graph", "eager"), help=(
        "ways to run a step, tried in order; engine: as `generate.py --compile`; graph: uncompiled, captured in a CUDA "
        "graph (default: engine graph; on a CPU: eager)"
    ))  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=0, help="start no cell later than this (0: no limit)"
    )
    parser.add_argument("--cell-seconds", type=float, default=300, help="limit of one cell")
    parser.add_argument("--steps", type=int, default=32, help="steps of the engine's own loop")
    parser.add_argument("--repeats", type=int, default=30, help="timed steps")
    parser.add_argument(
        "--synthetic-tau", type=float, default=4.0, help="tau assumed where none is published"
    )
    parser.add_argument("--skip-failed", action="store_true", help="do not retry cells that failed")
    parser.add_argument("--no-launches", dest="launches", action="store_false", help="do not count launches")
    parser.add_argument("--start", metavar="LABEL", help="measure one start instead; LABEL: cold or warm")
    parser.add_argument("--since", type=float, help="with --start: when the command was given, Unix seconds")
    parser.add_argument(
        "--bandwidth", action="store_true", help="only the environment and the copy bandwidth"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """0: every cell has a figure; 1: some failed; 2: usage; POISONED: run again with --skip-failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
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
    if not cells:
        parser.error(f"no cell's name contains {args.only!r}; --list prints them")
    env = environment(device)
    env["git"]["commit"] = env["git"]["commit"] or os.environ.get("EAGLET_COMMIT")  # a copy without its .git
    if args.start:
        return run_start(args.start, args, device, env)
    if args.bandwidth:
        line = {
            "type": "environment",
            "environment": env,
            "copy_gbs": round(bandwidth(device) / 1e9, 2),
            "utc": utc(),
        }
        append(args.json, line)
        print(json.dumps(line), flush=True)
        return 0
    return Run(args, device, env).over(cells)


if __name__ == "__main__":
    sys.exit(main())
