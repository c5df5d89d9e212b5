"""Train a head that drafts a block of tokens at once, in a published layout: DFlash, JetSpec, DSpark or DFlash2.

    python -m scripts.train_block --checkpoint MODEL --data chats.jsonl --kind dspark --slots 7 --out HEAD

The options for data, resuming and --force are those of scripts.train_eagle. Losses, their
weights and masks are those of the papers, as far as they are published; the optimizer is Muon for short runs. The layout
of --kind dflash, jetspec and dflash2 is z-lab's, and that of dspark is DeepSpec's.
"""

import argparse

from support.errors import at_least
from training.blocks import KINDS, BlockTraining
from training.drafters import head_parser, parsed, run_training, tap_list
from weights.block_heads import MARKOV


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    p = head_parser("scripts.train_block", __doc__)
    p.add_argument("--kind", choices=KINDS, required=True)
    add = p.add_argument_group("loss").add_argument
    add("--anchor-share", type=float, default=0.25, help="share of the tokens that blocks stand behind")
    add("--gamma", type=float, help="slots over which the weight of a slot falls to 1 / e (default: as published)")
    add("--noise-share", type=float, default=0.0, help="weight of the loss with shared noise")
    add = p.add_argument_group("head").add_argument
    add("--slots", type=at_least(2), default=8, help="rows of a block")
    add("--layers", type=at_least(1), default=3)
    add("--taps", type=tap_list, help="layers whose input is read (default: spread over the target)")
    add("--markov", choices=MARKOV, default=MARKOV[0], help="dspark: how the token before corrects a slot")
    add("--rank", type=at_least(1), default=64, help="dspark, dflash2: of these corrections")
    p.set_defaults(tree=None)
    return parsed(p, argv)


def main(argv: list[str] | None = None) -> int:
    return run_training(BlockTraining, parse(argv))


if __name__ == "__main__":
    raise SystemExit(main())
