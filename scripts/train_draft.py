"""Train a small draft LLM for a target by distillation (DistillSpec, forward KL).

    python -m scripts.train_draft --checkpoint demo --data stdlib --out demo/draft
    python -m scripts.train_draft --checkpoint MODEL --data chats.jsonl --hidden 512 --out DRAFT

The draft has the target's vocabulary and tokenizer. Its tied embedding starts as the leading directions of the target's
LM head. `--loss kl` teaches it the target's whole distribution after every token, `--loss ce` the text alone. DistillSpec
trains on the target's own text, which scripts.make_chats writes. The data options are those of scripts.train_eagle. The
result depends on --seed alone, and interrupted runs resume from --work. A draft with a better held-out tau is replaced
only with --force.
"""

import argparse

from support.errors import at_least
from training.distillation import DraftModelTraining, distillation_parser
from training.drafters import parsed, run_training


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    p = distillation_parser("scripts.train_draft", __doc__)
    p.add_argument("--layers", type=at_least(1), default=2)
    p.add_argument("--hidden", type=at_least(1), default=128)
    p.add_argument("--intermediate", type=at_least(1), help="default: 3 x --hidden")
    p.add_argument("--heads", type=at_least(1), help="default: --hidden / 64")
    return parsed(p, argv)


def main(argv: list[str] | None = None) -> int:
    return run_training(DraftModelTraining, parse(argv))


if __name__ == "__main__":
    raise SystemExit(main())
