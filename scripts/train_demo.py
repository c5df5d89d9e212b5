"""Train the embedded demo model: a small LLaMA on the CPython standard library's own sources.

    python -m scripts.train_demo                      # the recipe that made demo/: over an hour on 2 CPU cores
    python -m scripts.train_demo --steps 200 --out runs/try --work runs/try-work

The result depends on --seed alone, on one machine with one number of threads. The training state is kept in
WORK/train_state.pt: after Ctrl-C the same command goes on from there, to the same weights. The corpus is the running
interpreter's standard library: every .py file except tests, generated tables and the modules held out for measuring.
"""

from __future__ import annotations

import sys

from support.errors import at_least
from training import demo_model
from training.command import run, run_parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 usage, 3 bad work directory or file, 130 Ctrl-C)."""
    parser = run_parser(__doc__, steps=1250)
    parser.add_argument("--out", default="demo")
    parser.add_argument("--work", default="runs/train_demo", help="tokenizer, training state")
    parser.add_argument("--batch-tokens", type=at_least(max(demo_model.LENGTHS)), default=4096)
    parser.add_argument("--compile", action="store_true", help="compile the loss (faster after a minute)")
    return run(parser.parse_args(argv), demo_model.train)


if __name__ == "__main__":
    sys.exit(main())
