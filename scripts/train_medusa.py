"""Train Medusa heads for a target (Medusa-1: the target stays frozen).

    python -m scripts.train_medusa --checkpoint demo --data stdlib --out demo/medusa

Head k guesses, from the target's hidden state at a token, the token k + 2 further on. It has one residual block and an
LM head, which is the target's own unless --own-lm-head is given. `--loss ce` is Medusa-1 (the text, weights 0.8^k).
`--loss kl` teaches the target's distribution at that place instead. Data options, resuming and --force are those of
scripts.train_draft. The command writes CARD.json and medusa_lm_head.safetensors with the published names to OUT.
"""

import argparse

from support.errors import at_least
from training.distillation import MedusaTraining, distillation_parser
from training.drafters import parsed, run_training


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    p = distillation_parser("scripts.train_medusa", __doc__)
    p.add_argument("--medusa-heads", type=at_least(1), default=5)
    p.add_argument("--own-lm-head", action="store_true", help="as published: an LM head per head (large)")
    return parsed(p, argv)


def main(argv: list[str] | None = None) -> int:
    return run_training(MedusaTraining, parse(argv))


if __name__ == "__main__":
    raise SystemExit(main())
