"""Train the embedded demo model: a small LLaMA on the CPython standard library's own sources.

    python -m scripts.train_demo                      # the recipe that made demo/: over an hour on 2 CPU cores
    python -m scripts.train_demo --steps 200 --out runs/try --work runs/try-work

Deterministic by --seed on one machine and number of threads. State lies in WORK/train_state.pt: after Ctrl-C the same
command goes on from there, to the same weights. The corpus is found through `sysconfig`: every .py file except tests,
generated tables and the held-out modules named below.
"""

from __future__ import annotations

import argparse
import sys

import torch

from training.corpus import LENGTHS
from training.demo_model import train


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 usage, 3 bad work directory or file, 130 Ctrl-C)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="demo")
    parser.add_argument("--work", default="runs/train_demo", help="tokenizer, training state")
    parser.add_argument("--steps", type=int, default=1250)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0 = torch's default)")
    parser.add_argument("--compile", action="store_true", help="compile the loss (faster after a minute)")
    args = parser.parse_args(argv)
    longest = max(LENGTHS)
    for name, low in (("steps", 1), ("batch_tokens", longest), ("seed", 0), ("threads", 0)):
        if (value := getattr(args, name)) < low:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be {low} or more")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        train(args)
    except KeyboardInterrupt as stop:
        where = f" {stop}" if str(stop) else ""
        print(f"\ninterrupted{where}; the same command goes on from the last saved state", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error  {' '.join(str(error).split())}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
