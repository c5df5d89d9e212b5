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
from sampling import SamplingParams
from support.errors import UsageError, command_parser, run_command
from support.progress import Progress
from support.texts import read_texts, stdlib_texts
from weights.rounding import Tally

OPTIONS = ("checkpoint", "device", "dtype", "eagle")
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


# ---- lm-evaluation-harness --------------------------------------------------------------------------------


class Answers:
    """Answers the three kinds of requests of the harness with an Engine. Requests are objects with `.args`."""

    def __init__(self, engine: Engine, max_new_tokens: int = 256):
        super().__init__()
        if engine.tokenizer is None:
            raise UsageError("lm-evaluation-harness asks with text; this checkpoint has no tokenizer.")
        self.engine, self.max_new_tokens = engine, max_new_tokens

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> (log-probability of the continuation, whether it is the greedy one)."""
        return [self._continuation(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """(text,) -> log-probability of the whole text, in windows of the model's context without overlap."""
        out, ctx = [], self.engine.ctx
        for request in requests:
            ids, before = with_bos(self.engine.tokenizer, request.args[0])
            if not before:  # the harness's convention: the end token is the context of the first one
                ids = [*self._end(), *ids]
            spans = windows(len(ids), 1, ctx, max(1, ctx - 1))
            out.append(sum(self._score(ids[start:first], ids[first:end])[0] for start, end, first in spans))
        return out

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """(context, {"until": [...], "max_gen_toks": n, "temperature": t}) -> text, without the stop string."""
        out = []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else until
            limit = min(int(options.get("max_gen_toks") or self.max_new_tokens), self.engine.ctx // 2)
            sampled = options.get("do_sample", bool(options.get("temperature")))
            params = SamplingParams(
                temperature=float(options.get("temperature") or 1.0) if sampled else 0.0,
                top_p=float(options.get("top_p") or 1.0),
                max_new_tokens=limit,
                stop=tuple(text for text in until if text)[:16],
            )
            prompt = self._context(context)[-(self.engine.ctx - limit) :]
            out.append(self.engine.generate(prompt, params).run()[0].text)
        return out

    def _end(self) -> list[int]:
        return list(self.engine.stop_ids(SamplingParams())[:1])

    def _context(self, text: str) -> list[int]:
        return with_bos(self.engine.tokenizer, text)[0] or self._end()

    def _continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        """Score a continuation. The context's trailing spaces belong to it, and a long context is cut on the left."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        head, whole = self._context(context), self._context(context + continuation)
        target = whole[min(len(head), len(whole) - 1) :]
        room = max(1, self.engine.ctx - len(target))
        return self._score(head[-room:], target)

    def _score(self, context: list[int], target: list[int]) -> tuple[float, bool]:
        with self.engine.backend.active():
            logits = logits_of(self.engine.model, [*context, *target][:-1])[len(context) - 1 :]
        ids = torch.tensor(target)
        scores = logits.double().log_softmax(-1).gather(1, ids[:, None])
        return float(scores.sum()), bool((logits.argmax(-1) == ids).all())


def run_harness(engine: Engine, tasks: Sequence[str], shots: int | None, limit: int | None) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness. Raises UsageError with the command that installs it when it is missing."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
    except ImportError as error:
        raise UsageError("--lm-eval needs lm-evaluation-harness: pip install lm-eval") from error
    model = type("EagletLM", (Answers, LM), {})(engine)
    return simple_evaluate(model=model, tasks=list(tasks), num_fewshot=shots, limit=limit)["results"]


# ---- the command ------------------------------------------------------------------------------------------


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
