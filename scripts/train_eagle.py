"""Train an EAGLE head for any supported target, on conversations or plain text.

    python -m scripts.train_eagle --checkpoint demo --data stdlib --version 1 --out demo/eagle1
    python -m scripts.train_eagle --checkpoint MODEL --data sharegpt.jsonl --version 3 --draft-vocab 32000 --out HEAD
    torchrun --nproc-per-node 4 -m scripts.train_eagle ...           # one process per GPU

Data: JSON or JSONL of conversations (ShareGPT `conversations`, OpenAI `messages`; only the assistant's tokens count),
JSONL of {"text"}, a text file, a directory of .txt/.py/.md files, `stdlib` (the demo's corpus), or a tokenised .npz.
Features come from the target as training runs. Deterministic by --seed; interrupted runs resume from --work. The head is
written under SafeAILab's tensor names with CARD.json beside it, and never over a head with a better held-out tau (--force
does). SafeAILab's own code runs its EAGLE-1 heads, and EAGLE-3 heads with --norm-before-residual off (as --recipe paper
has it) and the default --taps; other EAGLE-3 heads need an engine that reads these from config.json, such as vLLM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from eagle_draft import FEATURE_NOISE
from training.eagle import WorseHead, train
from training.eagle_head import INPUTS


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add(
        "--checkpoint",
        required=True,
        help="the target: any directory generate.py takes, quantized ones included",
    )
    add("--data", required=True, help="JSON/JSONL, text file, directory, `stdlib`, or tokenised .npz")
    add(
        "--held-out",
        help="the same kinds (default: the last 5 %% of --data; for stdlib, the demo's held-out modules)",
    )
    add("--version", type=int, choices=(1, 3), required=True)
    add("--out", required=True, help="folder of the head")
    add("--work", help="tokenised data and training state (default: runs/train_eagle/NAME of --out)")
    add("--steps", type=int, default=1500)
    add("--batch", type=int, default=8, help="sequences of a micro-batch, per process")
    add("--accumulate", type=int, default=1, help="micro-batches per optimiser step")
    add("--length", type=int, default=512, help="tokens of a training window")
    add(
        "--recipe",
        choices=("small", "paper"),
        default="small",
        help="optimiser settings; the next seven override",
    )
    add("--optimizer", choices=("muon", "adamw"))
    add("--lr", type=float)
    add("--warmup", type=int, help="steps")
    add("--cooldown", type=float, help="share of the steps over which the rate falls to zero")
    add("--weight-decay", type=float)
    add("--clip", type=float, help="gradients: by value (version 1) or norm (version 3)")
    add(
        "--noise",
        type=float,
        default=FEATURE_NOISE,
        help="version 1: width of the noise on features at 512 tokens",
    )
    add("--feature-weight", type=float, default=1.0, help="version 1: weight of smooth L1")
    add("--token-weight", type=float, default=0.1, help="version 1: weight of soft cross-entropy")
    add("--ttt-steps", type=int, default=7, help="version 3: steps of the training-time test")
    add("--draft-vocab", type=int, help="version 3: size of the draft vocabulary (default: all tokens)")
    add("--inputs", choices=INPUTS, default=INPUTS[0], help="the paper's input ablation")
    add("--intermediate-size", type=int, help="of the head's MLP (default: the target's)")
    add("--heads", type=int, help="attention heads of the head (default: the target's)")
    add("--taps", type=_taps, help="version 3: layers whose input is read (default: 2, L/2, L-3)")
    add(
        "--norm-before-residual",
        choices=("on", "off"),
        help="version 3: the layer's residual is the normalised feature, as speculators trains heads (default: on; with "
        "--recipe paper off, as SafeAILab's code reads them)",
    )
    add("--rope-theta", type=float, help="RoPE base of the head (default: 10000)")
    add("--max-positions", type=int, help="max_position_embeddings to write (default: --length)")
    add(
        "--regenerate",
        type=int,
        default=0,
        metavar="N",
        help="train on the target's own text: N dialogues or windows",
    )
    add("--regenerate-tokens", type=int, default=256, help="most tokens of an answer")
    add("--regenerate-temperature", type=float, default=1.0)
    add("--chat-template", help="a built-in template, or a named one of the model")
    add(
        "--eval-every",
        type=int,
        default=250,
        help="steps between measurements of held-out tau (0: at the end only)",
    )
    add("--eval-prompts", type=int, default=8)
    add("--eval-tokens", type=int, default=96, help="new tokens per prompt")
    add("--prompt-length", type=int, default=64, help="tokens of a plain-text prompt")
    add("--tree", default="paper25", help="of the measurements")
    add("--save-every", type=int, default=100)
    add("--pause-at", type=int, help="stop after this step; the same command goes on from there")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto, cpu, cuda")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the target")
    add("--autocast", default="auto", choices=("auto", "on", "off"), help="bf16 autocast (auto: on CUDA)")
    add("--threads", type=int, default=0, help="CPU threads (0 = torch's default)")
    add("--compile", action="store_true", help="compile the forwards (faster after some minutes)")
    add("--force", action="store_true", help="replace what is at --out, better or not")
    add("--debug", action="store_true", help="tracebacks")
    return p


def _taps(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(argv)
    low = {"steps": 1, "batch": 1, "accumulate": 1, "length": 8, "ttt_steps": 1, "eval_prompts": 1, "eval_tokens": 2,
           "prompt_length": 2, "save_every": 1}  # fmt: skip
    for name, least in low.items():
        if getattr(args, name) < least:
            p.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: at least {least}")
    args.norm_before_residual = args.norm_before_residual or ("off" if args.recipe == "paper" else "on")
    args.work = args.work or f"runs/train_eagle/{Path(args.out).name}"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        train(args)
    except ValueError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorseHead) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
