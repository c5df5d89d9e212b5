"""Quality of a model on text: perplexity, bits per byte, and KL divergence against another checkpoint.

    python -m scripts.evaluate --checkpoint DIR                          # held-out standard library modules
    python -m scripts.evaluate --checkpoint INT4_DIR --against DIR --text FILE
    python -m scripts.evaluate --checkpoint DIR --eagle DIR/eagle3 --lm-eval gsm8k,arc_easy --limit 100

Every token is scored once, with at least `--window - --stride` tokens of context where the text has them. The adapter to
lm-evaluation-harness (`pip install lm-eval`) generates through the engine: a draft head makes it faster, not different.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench.evaluate import encode, evaluate, run_harness
from engine import Engine
from load import load
from options import add_options, options_from
from support.errors import UsageError, command_parser, run_command
from support.progress import Progress
from support.texts import read_texts, stdlib_texts

OPTIONS = ("checkpoint", "device", "dtype", "eagle")
HELD_OUT = "held-out standard library modules"


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
    if args.lm_eval:
        tasks = [task.strip() for task in args.lm_eval.split(",") if task.strip()]
        print(json.dumps(run_harness(engine, tasks, args.shots, args.limit), default=str))
        return
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
    add("--lm-eval", default="", metavar="TASKS", help="comma-separated tasks of lm-evaluation-harness instead")
    add("--shots", type=int, help="with --lm-eval: few-shot examples")
    add("--limit", type=int, help="with --lm-eval: examples per task")
    add("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
