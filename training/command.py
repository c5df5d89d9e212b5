"""What the training commands share: options, and how a run ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from support.errors import Parser, at_least, run_command


def run_parser(doc: str, steps: int) -> argparse.ArgumentParser:
    """The options of every training command. `steps` is the default of --steps."""
    p = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=at_least(1), default=steps)
    p.add_argument("--seed", type=at_least(0), default=0)
    p.add_argument("--threads", type=at_least(0), default=0, help="CPU threads (0 = torch's default)")
    p.add_argument("--debug", action="store_true", help="tracebacks")
    return p


def drafter_parser(doc: str, steps: int, length: int, eval_every: int) -> argparse.ArgumentParser:
    """The options of every command that trains a drafter. The numbers are defaults."""
    p = run_parser(doc, steps)
    add = p.add_argument
    add("--checkpoint", required=True, help="the target: anything that generate.py takes")
    add("--data", required=True, help="JSON/JSONL, text file, directory, `stdlib`, `docstrings`, or tokenised .npz")
    add("--held-out", help="the same kinds (default: 5 %% of --data; of stdlib, the modules held out)")
    add("--out", required=True, help="folder to write")
    add("--work", help="tokenised data and training state (default: in runs/, by the name of --out)")
    add("--batch", type=at_least(1), default=8, help="sequences of a micro-batch, per process")
    add("--accumulate", type=at_least(1), default=1, help="micro-batches per optimizer step")
    add("--length", type=at_least(8), default=length, help="tokens of a training window")
    add("--regenerate", type=at_least(0), default=0, metavar="N", help="train on N dialogues or texts of the target")
    add("--regenerate-tokens", type=at_least(1), default=256, help="most tokens of an answer")
    add("--regenerate-temperature", type=float, default=1.0)
    add("--chat-template", help="a built-in template, or a named one of the model")
    add("--eval-every", type=at_least(0), default=eval_every, help="steps between measurements (0: at the end only)")
    add("--eval-prompts", type=at_least(1), default=8)
    add("--eval-tokens", type=at_least(2), default=96, help="new tokens per prompt")
    add("--prompt-length", type=at_least(2), default=64, help="tokens of a plain-text prompt")
    add("--tree", default="paper25", help="of the measurements")
    add("--save-every", type=at_least(1), default=100)
    add("--pause-at", type=at_least(1), help="stop after this step; the same command goes on from there")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the target")
    add("--force", action="store_true", help="replace what is at --out, better or not")
    return p


def distillation_parser(doc: str) -> argparse.ArgumentParser:
    """The options of the commands that distil a draft LLM or Medusa heads."""
    p = drafter_parser(doc, steps=600, length=256, eval_every=0)
    p.add_argument("--lr", type=float, default=1.0, help="factor on the learning rates")
    p.add_argument("--loss", choices=("kl", "ce"), default="kl", help="the target's distribution, or text")
    return p


def parsed(p: argparse.ArgumentParser, argv: list[str] | None, runs: str = "runs") -> argparse.Namespace:
    """The options of a command that trains a drafter; --work is by default a folder in `runs`."""
    args = p.parse_args(argv)
    args.work = args.work or f"{runs}/{Path(args.out).name}"
    return args


def run(args: argparse.Namespace, train: Callable[[argparse.Namespace], object]) -> int:
    """Call `train(args)`. Returns the exit code: 1 a better drafter stays, 2 usage, 3 bad file, 130 Ctrl-C."""

    def body() -> None:
        train(args)

    if args.threads:
        torch.set_num_threads(args.threads)
    code = run_command(body, args.debug, "interrupted; the same command goes on from the last saved state")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A thread of gloo may still hold a tensor, and a tensor that is freed while Python shuts down aborts the process
        # (pytorch issue 190489). So one of several processes leaves without shutting Python down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
