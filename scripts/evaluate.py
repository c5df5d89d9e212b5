"""Quality of a model on text: perplexity, and KL divergence against another checkpoint.

    python -m scripts.evaluate --checkpoint DIR                          # held-out standard library modules
    python -m scripts.evaluate --checkpoint INT4_DIR --against DIR --text FILE

It is the measure of quantize.py's receipts: windows that are spread over the text, of which every token but the first is
scored. Tasks such as gsm8k are those of lm-evaluation-harness, which asks a server (docs/server.md).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.load import load
from loading.options import add_options, options_from
from model import Transformer
from support.errors import UsageError, at_least, command_parser, run_parsed
from support.progress import Progress
from support.texts import read_texts, stdlib_texts, token_windows
from weights.rounding import Tally

OPTIONS = ("checkpoint", "device", "dtype")
HELD_OUT = "held-out standard library modules"


@torch.inference_mode()
def evaluate(
    models: list[Transformer], windows: Tensor, progress: Callable[[float], None] = lambda share: None
) -> dict[str, Any]:
    """Perplexity of the last of `models` on windows int64 [W, T + 1], each with T tokens to score.

    With two models also the perplexity of the first (the reference), the mean KL(reference || model) in nats, and the
    share of positions with the same most likely token. Raises ArithmeticError for logits that are not finite.
    """
    tally = Tally()
    for number, ids in enumerate(windows):
        tokens = ids[None, :-1]
        logits = [m.logits(m.forward_train(tokens.to(m.device))[0])[0].cpu() for m in models]
        if not all(torch.isfinite(part).all() for part in logits):
            raise ArithmeticError(f"logits are not finite in window {number}; are the weights damaged?")
        tally.add(logits[0], logits[-1], ids[1:])
        progress((number + 1) / len(windows))
    report = tally.report()
    out = {"tokens": tally.positions, "perplexity": report.pop("perplexity_after")}
    against = report.pop("perplexity_before")
    return out | ({"against_perplexity": against, **report} if len(models) > 1 else {})


def run(args: argparse.Namespace) -> None:
    """Score the text, and print the result."""
    engine = load(**options_from(args, *OPTIONS))
    models, tokenizer = [engine.model], engine.tokenizer
    if tokenizer is None:
        raise UsageError(f"{args.checkpoint} has no tokenizer files; text cannot be scored.")
    texts = list(read_texts(args.text) if args.text else stdlib_texts(held_out=True))
    if args.against:
        reference = load(args.against, **options_from(args, "device", "dtype"))
        if reference.tokenizer is None or reference.tokenizer.pieces != tokenizer.pieces:
            raise UsageError("--against has another tokenizer: the models would be scored on other tokens.")
        models.insert(0, reference.model)
    length = min(args.window, *(model.config.max_positions - 1 for model in models))
    count = max(1, args.max_tokens // length)
    windows = token_windows(texts, tokenizer, engine.model.config.vocab_size, count, length + 1)
    progress = Progress(args.json)
    with engine.backend.active():
        result = evaluate(models, windows, progress)
    progress.close()
    names = {name: Path(path).resolve().name for name in ("checkpoint", "against") if (path := vars(args)[name])}
    result = names | {"text": Path(args.text).name if args.text else HELD_OUT, "dtype": engine.options.dtype} | result
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['checkpoint']}  {result['dtype']}   {result['text']}: {result['tokens']:,} tokens")
    print(f"perplexity     {result['perplexity']:.4f}")
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
    add("--max-tokens", type=at_least(2), default=16384)
    add("--window", type=at_least(2), default=512, help="tokens per forward")
    add("--json", action="store_true", help="one JSON object on stdout")
    return run_parsed(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
