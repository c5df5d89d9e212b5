"""TODO."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import ModelConfig, RopeConfig, Transformer
from support.texts import HELD_OUT, LEFT_OUT, stdlib_files
from training.corpus import (
    LENGTHS,
    VOCAB_SIZE,
    Corpus,
    batch,
    load_corpus,
    train_tokenizer,
)
from training.optim import (
    deferred_interrupt,
    init_weights,
    learning_rate,
    optimizers,
    read_state,
    save_state,
    update,
)
from weights.hf import save_hf

SAVE_EVERY = 200  # steps


CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)


def loss_of(model: Transformer, tokens: Tensor) -> Tensor:
    hidden_states, _ = model.forward_train(tokens[:, :-1])
    return F.cross_entropy(model.logits(hidden_states).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(
    model: Transformer, stream: np.ndarray, size: int, length: int = 1024, most: int = 64
) -> float:
    """Bits per UTF-8 byte over up to `most` consecutive windows of the stream."""
    count = min(most, (len(stream) - 1) // length)
    windows = torch.from_numpy(stream[: count * length + 1].astype(np.int64))
    total = 0.0
    for i in range(0, count, 4):
        rows = torch.stack([windows[j * length : (j + 1) * length + 1] for j in range(i, min(i + 4, count))])
        total += float(loss_of(model, rows)) * rows.shape[0]
    return total / count / math.log(2) * (len(stream) / size)


def train(args: argparse.Namespace) -> None:
    """Train (or go on training) in args.work, then export to args.out. KeyboardInterrupt after Ctrl-C, state saved."""
    out, work = Path(args.out), Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    train_files, _ = stdlib_files()
    tokenizer_path = work / "tokenizer.model"
    if not tokenizer_path.exists():
        print("training the tokenizer ...", file=sys.stderr)
        train_tokenizer(train_files, tokenizer_path)
    corpus = load_corpus(tokenizer_path)
    print(
        f"corpus  {corpus.files} files  {corpus.train_bytes / 1e6:.1f} MB  {len(corpus.train) / 1e6:.2f} M tokens",
        file=sys.stderr,
    )
    torch.manual_seed(args.seed)
    model = Transformer(CONFIG)
    init_weights(model, torch.Generator().manual_seed(args.seed))
    model.rotary.build("cpu")
    optims, first, elapsed, average = optimizers(model), 0, 0.0, None
    state_path = work / "train_state.pt"
    run = {"steps": args.steps, "seed": args.seed, "batch_tokens": args.batch_tokens, "model": repr(CONFIG)}
    run["corpus"] = hashlib.sha256(corpus.train.tobytes()).hexdigest()  # another Python has another library
    if state_path.exists():
        state = read_state(state_path, run)
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        first, elapsed, average = state["step"], state["seconds"], state["average"]
        print(f"resumed at step {first}", file=sys.stderr)
    loss_fn = torch.compile(loss_of) if args.compile else loss_of
    started = time.time() - elapsed
    with deferred_interrupt() as interrupted:
        for step in range(first, args.steps):
            rng = np.random.default_rng((args.seed, step))
            length = LENGTHS[step >= 0.6 * args.steps]
            tokens = batch(corpus.train, rng, args.batch_tokens // length, length)
            loss = loss_fn(model, tokens)
            loss.backward()
            update(optims, learning_rate(step, args.steps))
            value = float(loss.detach())
            average = value if average is None else 0.98 * average + 0.02 * value
            spent = time.time() - started
            if step % 10 == 9 or step == args.steps - 1:
                left = spent / (step + 1) * (args.steps - step - 1)
                rate = (step + 1) * args.batch_tokens / spent
                print(
                    f"\rstep {step + 1}/{args.steps}  loss {average:.3f}  {rate:.0f} tok/s"
                    f"  {left / 60:.0f} min left   ",
                    end="\n" if step % 100 == 99 else "",
                    file=sys.stderr,
                    flush=True,
                )
            stop = interrupted()
            if stop or step % SAVE_EVERY == SAVE_EVERY - 1 or step == args.steps - 1:
                weights, moments = model.state_dict(), [o.state_dict() for o in optims]
                state = {"run": run, "step": step + 1, "seconds": spent, "average": average}
                save_state(state_path, model=weights, optims=moments, **state)
            if stop:
                raise KeyboardInterrupt(f"after step {step + 1}; state is in {state_path}")
    export(model, corpus, tokenizer_path, out, args, time.time() - started, average)


def export(model, corpus: Corpus, tokenizer_path: Path, out: Path, args, seconds: float, loss: float) -> None:
    """Write the Hugging Face directory (bf16) and CARD.md with what was really measured, on the rounded weights."""
    model.eval().to(torch.bfloat16).float()
    held = bits_per_byte(model, corpus.held_out, corpus.held_out_bytes)
    seen = bits_per_byte(model, corpus.train, corpus.train_bytes)
    save_hf(model.to(torch.bfloat16), out)
    (out / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    flags = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "add_prefix_space": False}
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "LlamaTokenizer", "model_max_length": 2048, **specials, **flags}, indent=2
        )
        + "\n"
    )
    (out / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2}, indent=2) + "\n"
    )
    version = ".".join(map(str, sys.version_info[:3]))
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    size = f"{corpus.files} files, {corpus.train_bytes / 1e6:.1f} MB, {len(corpus.train) / 1e6:.2f} M tokens"
    where = (
        f"{seconds / 60:.0f} minutes on a CPU ({torch.get_num_threads()} threads), torch {torch.__version__}"
    )
    (out / "CARD.md").write_text(
        f"""# The demo model

A LLaMA-architecture model of {parameters:.2f} M parameters (8 layers, hidden 256, 4 query
and 2 key-value heads, tied embeddings, 4096-piece BPE with byte fallback), made by `python -m scripts.train_demo`.

| | |
|---|---|
| data | standard library of CPython {version}: {size} |
| left out | tests, generated tables ({", ".join(LEFT_OUT)}) |
| held out | {", ".join(HELD_OUT)} |
| training | {args.steps} steps of {args.batch_tokens} tokens, seed {args.seed}, {where} |
| last training loss | {loss:.3f} nats per token |
| bits per byte | {seen:.3f} on the first training windows, {held:.3f} on the held-out modules (bf16 weights) |

The sources are under the PSF licence; the weights are a small statistical summary of them and write Python-like
text, not correct programs.
"""
    )
    print(f"\nheld-out {held:.3f} bits per byte, training {seen:.3f}; wrote {out}", file=sys.stderr)
