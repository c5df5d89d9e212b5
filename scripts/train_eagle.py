"""Train an EAGLE head for any supported target, on conversations or plain text.

    python -m scripts.train_eagle --checkpoint demo --data stdlib --version 1 --out demo/eagle1
    python -m scripts.train_eagle --checkpoint MODEL --data sharegpt.jsonl --version 3 --draft-vocab 32000 --out HEAD
    torchrun --nproc-per-node 4 -m -- scripts.train_eagle ...        # one process per GPU; the -- lets --start through

Data: JSON or JSONL of conversations (ShareGPT `conversations`, OpenAI `messages`; only the assistant's tokens count),
JSONL of {"text"}, a text file, a directory of .txt/.py/.md files, `stdlib` (the demo's corpus), `docstrings` (questions
about the standard library that its docstrings answer), or a tokenised .npz.
Features come from the target while training runs. The result depends on --seed alone, and interrupted runs resume from
--work. The head is written under SafeAILab's tensor names with CARD.json beside it. A head with a better held-out tau is
replaced only with --force. SafeAILab's own code runs its EAGLE-1 heads, and EAGLE-3 heads with --norm-before-residual
off (as --recipe paper has it) and the default --taps. Other EAGLE-3 heads need an engine that reads these from
config.json, such as vLLM.
"""

import argparse
from typing import Any

from support.errors import at_least
from training.drafters import head_parser, parsed, run_training, tap_list
from training.eagle import FEATURE_NOISE, INPUTS, EagleTraining

# Options of one generation of heads: which one, and their defaults.
ONE_VERSION: dict[str, tuple[int, Any]] = {
    "noise": (1, FEATURE_NOISE),
    "feature_weight": (1, 1.0),
    "token_weight": (1, 0.1),
    "noise_share": (3, 0.0),
    "row_share": (3, 1.0),
    "taps": (3, None),
    "norm_before_residual": (3, None),
    "inputs": (1, INPUTS[0]),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    p = head_parser("scripts.train_eagle", __doc__)
    add = p.add_argument
    add("--version", type=float, choices=(1, 3, 3.1), required=True, help="generation; 3.1 has more norms than 3")
    add("--start", metavar="HEAD", help="go on from the weights of a head; it keeps its shape")
    add("--average", type=float, default=0.0, help="share of --start in the written weights; 0.5 often beats both")
    add("--recipe", choices=("small", "paper"), default="small", help="defaults of the optimizer's options")
    add("--autocast", default="auto", choices=("auto", "on", "off"), help="bf16 autocast (auto: on CUDA)")

    add = p.add_argument_group("loss").add_argument
    add("--noise", type=float, help=f"version 1: noise on features, its width at 512 tokens (default: {FEATURE_NOISE})")
    add("--feature-weight", type=float, help="version 1: weight of smooth L1 (default: 1)")
    add("--token-weight", type=float, help="version 1: weight of soft cross-entropy (default: 0.1)")
    add("--noise-share", type=float, help="version 3: weight of the loss with shared noise (default: 0, as published)")
    add("--row-share", type=float, help="version 3: share of the rows that are judged, at random (default: 1)")
    add("--ttt-steps", type=at_least(1), help="steps on the head's own outputs (default: 7, and 1 for version 1)")

    add = p.add_argument_group("head").add_argument
    add("--draft-vocab", type=int, help="draft only the N most frequent tokens of the data (default: all)", metavar="N")
    add("--inputs", choices=INPUTS, help=f"version 1: the paper's input ablation (default: {INPUTS[0]})")
    add("--taps", type=tap_list, help="version 3: layers whose input is read (default: 2, L/2, L-3)")
    normed = "version 3: the residual is the normalised feature (default: on; off in --recipe paper, as SafeAILab's)"
    add("--norm-before-residual", choices=("on", "off"), help=normed)
    add("--max-positions", type=at_least(1), help="max_position_embeddings to write (default: --length)")
    add("--window", type=at_least(0), help="attend to the last N tokens, here and later; 0: all (default: as --start)")

    args = parsed(p, argv)
    for name, (version, default) in ONE_VERSION.items():
        if vars(args)[name] is None:
            vars(args)[name] = default
        elif version != int(args.version):
            p.error(f"--{name.replace('_', '-')} is for --version {version}; leave it out.")
    args.ttt_steps = args.ttt_steps or (1 if args.version == 1 else 7)
    args.norm_before_residual = args.norm_before_residual or ("off" if args.recipe == "paper" else "on")
    return args


def main(argv: list[str] | None = None) -> int:
    return run_training(EagleTraining, parse(argv))


if __name__ == "__main__":
    raise SystemExit(main())
