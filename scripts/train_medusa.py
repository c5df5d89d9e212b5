"""Train Medusa heads for a target (Medusa-1: the target stays frozen).

    python -m scripts.train_medusa --checkpoint demo --data stdlib --out demo/medusa

Head k guesses, from the target's hidden state at a token, the token k + 2 further on: one residual block and an LM head,
the target's own unless --own-lm-head. `--loss ce` is Medusa-1 (the text, weights 0.8^k), `--loss kl` teaches the target's
law at that place instead. Data options, resuming and --force as in scripts.train_draft. Writes CARD.json and
medusa_lm_head.safetensors with the published names to OUT.
"""

from __future__ import annotations

import argparse
import sys

from training.drafters import checked, common_parser, run
from training.medusa import train


def parser() -> argparse.ArgumentParser:
    p = common_parser(__doc__)
    p.add_argument("--medusa-heads", type=int, default=5)
    p.add_argument("--own-lm-head", action="store_true", help="as published: an LM head per head (large)")
    return p


def main(argv: list[str] | None = None) -> int:
    return run(train, checked(parser(), argv))


if __name__ == "__main__":
    sys.exit(main())
