"""Train a small draft LLM for a target by distillation (DistillSpec, forward KL).

    python -m scripts.train_draft --checkpoint demo --data stdlib --out demo/draft
    python -m scripts.train_draft --checkpoint MODEL --data sharegpt.jsonl --regenerate 5000 --hidden 512 --out DRAFT

The draft has the target's vocabulary and tokenizer; its tied embedding starts as the leading directions of the target's
LM head. `--loss kl` teaches it the target's whole law after every token, `--loss ce` the text alone. With --regenerate
the text is the target's own (the on-policy data of DistillSpec). Data options as in scripts.train_eagle. Interrupted runs
resume from --work, deterministic by --seed. A draft with a better held-out tau is never replaced (--force does).
"""

from __future__ import annotations

import argparse
import sys

from training.draft_model import train
from training.drafters import checked, common_parser, run


def parser() -> argparse.ArgumentParser:
    p = common_parser(__doc__)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--intermediate", type=int, help="default: 3 x --hidden")
    p.add_argument("--heads", type=int, help="default: --hidden / 64")
    return p


def main(argv: list[str] | None = None) -> int:
    return run(train, checked(parser(), argv))


if __name__ == "__main__":
    sys.exit(main())
