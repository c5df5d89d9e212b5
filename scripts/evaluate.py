"""Quality of a model on text: perplexity, bits per byte, and KL divergence against another checkpoint.

    python -m scripts.evaluate --checkpoint DIR                          # held-out standard library modules
    python -m scripts.evaluate --checkpoint INT4_DIR --against DIR --text FILE

Every token is scored once, with at least `--window - --stride` tokens of context where the text has them. Tasks
such as gsm8k are asked by lm-evaluation-harness, which knows how to talk to a server (docs/server.md).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import Engine
from load import load
from model import Transformer
from options import add_options, options_from
from support.errors import UsageError, command_parser, run_command
from support.progress import Progress
from support.texts import read_texts, stdlib_texts
from weights.rounding import Tally

OPTIONS = ("checkpoint", "device", "dtype")
HELD_OUT = "held-out standard library modules"


@dataclass(frozen=True)
class Scored:
    """A text's ids, the index of the first one that is scored, and the UTF-8 bytes that the scored ones spell."""

    ids: list[int]
    first: int
    size: int


def encode(texts: Sequence[str], tokenizer, max_tokens: int) -> list[Scored]:
    """Texts as ids, up to `max_tokens` in all (the last text is cut). Raises UsageError if there is nothing to score.

    A BOS is context and never scored. Without one the first token is context, and its bytes do not count.
    """
    out: list[Scored] = []
    left = max_tokens
    for text in texts:
        if left < 2:
            break
        ids, bos = with_bos(tokenizer, text)
        if len(ids) > left:
            text = text[: max(1, len(text) * left // len(ids))]
            ids, bos = with_bos(tokenizer, text)
        size = len(text.encode()) - (0 if bos else len(tokenizer.decode(ids[:1]).encode()))
        if len(ids) > max(1, bos):
            out.append(Scored(ids, max(1, bos), size))
        left -= len(ids)
    if not out:
        raise UsageError("the text is empty; nothing to score.")
    return out


def with_bos(tokenizer, text: str) -> tuple[list[int], int]:
    """The ids of a text with what the tokenizer puts before a text but without an end token, and how many go before."""
    plain, ids = tokenizer.encode(text, add_bos=False), tokenizer.encode(text)
    before = next((k for k in range(len(ids)) if ids[k : k + len(plain)] == plain), 0)
    return ids[: before + len(plain)], before


def windows(length: int, first: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, from): rows start..end-1 of a text are run, targets from..end-1 are scored, each exactly once."""
    done = first
    while done < length:
        end = min(length, window if done == first else done + stride)
        yield max(0, end - window), end, done
        done = end


@torch.inference_mode()
def logits_of(model: Transformer, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] after every id, without a cache, on the CPU."""
    tokens = torch.tensor([list(ids)], device=model.device)
    return model.logits(model.forward_train(tokens)[0])[0].cpu()


def evaluate(
    model: Transformer,
    texts: Sequence[Scored],
    window: int = 1024,
    stride: int = 512,
    against: Transformer | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Perplexity and bits per byte of `model`, from forwards over `window` tokens that score `stride` new ones each.

    With a reference model (`against`) also its perplexity, the mean KL(reference || model) in nats, and the share of
    positions with the same most likely token. Raises UsageError for a stride that leaves no context, ArithmeticError for
    logits that are not finite.
    """
    if not 1 <= stride <= window - 1:
        raise UsageError(f"--stride is {stride}; allowed: 1 to --window - 1 = {window - 1}.")
    tally = Tally()
    count = sum(len(t.ids) - t.first for t in texts)
    for text in texts:
        for start, end, scored in windows(len(text.ids), text.first, window, stride):
            rows = slice(scored - start - 1, end - start - 1)
            ids, targets = text.ids[start:end], torch.tensor(text.ids[scored:end])
            logits = logits_of(model, ids)[rows]
            if not bool(torch.isfinite(logits).all()):
                raise ArithmeticError(f"logits are not finite in tokens {start} to {end}; are the weights damaged?")
            tally.add(logits if against is None else logits_of(against, ids)[rows], logits, targets)
            progress(tally.positions / count)
    report = tally.report()
    size = sum(t.size for t in texts)
    out: dict[str, Any] = {
        "tokens": tally.positions,
        "bytes": size,
        "perplexity": report["perplexity_after"],
        "nats_per_token": tally.after / tally.positions,
        "bits_per_byte": tally.after / math.log(2) / max(1, size),
    }
    if against is not None:
        out["against_perplexity"] = report["perplexity_before"]
        out |= {name: report[name] for name in ("mean_kl", "top1_agreement")}
    return out


def score(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Score the text with the engine's model, and with the reference if there is one. Raises UsageError."""
    if engine.tokenizer is None:
        raise UsageError(f"{args.checkpoint} has no tokenizer files; text cannot be scored.")
    if args.max_tokens < 2:
        raise UsageError(f"--max-tokens is {args.max_tokens}; allowed: 2 or more.")
    texts = list(read_texts(args.text) if args.text else stdlib_texts(held_out=True))
    scored = encode(texts, engine.tokenizer, args.max_tokens)
    models = [engine.model]
    if args.against:
        reference = load(args.against, **options_from(args, "device", "dtype"))
        if reference.tokenizer is None or encode(texts, reference.tokenizer, args.max_tokens) != scored:
            raise UsageError("--against has another tokenizer: the models would be scored on other tokens.")
        models.append(reference.model)
        if models[0].config.vocab_size != models[1].config.vocab_size:
            raise UsageError("--against has another vocabulary size; KL compares equal vocabularies.")
    window = min(args.window, *(model.rotary.length for model in models))
    stride = min(args.stride, window - 1)
    progress, started = Progress(args.json), time.perf_counter()
    with engine.backend.active():
        result = evaluate(models[0], scored, window, stride, *models[1:], progress=progress)
    progress.close()
    return {
        "checkpoint": Path(args.checkpoint).resolve().name,
        "against": Path(args.against).resolve().name if args.against else None,
        "text": Path(args.text).name if args.text else HELD_OUT,
        "dtype": engine.options.dtype,
        "window": window,
        "stride": stride,
        **result,
        "seconds": time.perf_counter() - started,
    }


def run(args: argparse.Namespace) -> None:
    """Run the tasks, or score the text and print the result."""
    engine = load(**options_from(args, *OPTIONS))
    result = score(args, engine)
    if args.json:
        print(json.dumps(result))
        return
    amount = f"{result['tokens']:,} tokens, {result['bytes']:,} bytes"
    print(f"{result['checkpoint']}  {result['dtype']}   {result['text']}: {amount}")
    print(f"perplexity     {result['perplexity']:.4f}")
    print(f"bits per byte  {result['bits_per_byte']:.4f}")
    if args.against:
        print(f"against        {result['against']}: perplexity {result['against_perplexity']:.4f}")
        print(f"mean KL        {result['mean_kl']:.5f} nats   same top token {result['top1_agreement']:.2%}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.evaluate", __doc__)
    add_options(parser, *OPTIONS)
    add = parser.add_argument
    add("--against", metavar="DIR", help="reference checkpoint with the same tokenizer: KL and agreement with it")
    add("--text", metavar="FILE", help=f"text, or .jsonl of texts (default: {HELD_OUT})")
    add("--max-tokens", type=int, default=16384)
    add("--window", type=int, default=1024, help="tokens per forward")
    add("--stride", type=int, default=512, help="tokens scored per forward after the first")
    add("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
