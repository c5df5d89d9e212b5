"""The embedded demo model: its corpus and tokenizer, its geometry, its training, and the directory that is written.

The corpus is the standard library's sources as one stream of tokens, in the tokenizer that is made from them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Transformer
from model_config import ModelConfig, RopeConfig
from support.files import write_json, write_text
from support.texts import HELD_OUT, LEFT_OUT, read_source, stdlib_files
from training.loop import Run, World
from training.optim import Recipe, init_weights, optimizers, update
from weights.hf import save_hf

VOCAB_SIZE = 4096
LENGTHS = (512, 1024)  # of the training windows: in the first 60 % of the steps, and after
SAVE_EVERY = 200  # steps
RECIPE = Recipe(side_lr=4e-3)
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
CARD = """# The demo model

A LLaMA-architecture model of {parameters:.2f} M parameters (8 layers, hidden 256, 4 query
and 2 key-value heads, tied embeddings, 4096-piece BPE with byte fallback), made by `python -m scripts.train_demo`.

| | |
|---|---|
| data | standard library of CPython {version}: {corpus} |
| left out | tests, generated tables ({left_out}) |
| held out | {held_out} |
| training | {steps} steps of {batch_tokens} tokens, seed {seed}, {where} |
| last training loss | {loss:.3f} nats per token |
| bits per byte | {seen:.3f} on the first training windows, {held:.3f} on the held-out modules (bf16 weights) |

The sources are under the PSF licence; the weights are a small statistical summary of them and write Python-like
text, not correct programs.
"""


@dataclass
class Corpus:
    """Token streams (BOS + file + EOS, one after another), their sizes in UTF-8 bytes, and their tokenizer's file."""

    train: np.ndarray  # int32
    held_out: np.ndarray  # int32
    train_bytes: int
    held_out_bytes: int
    files: int
    tokenizer: Path

    def __str__(self) -> str:
        tokens = len(self.train) / 1e6
        return f"{self.files} files, {self.train_bytes / 1e6:.1f} MB, {tokens:.2f} M tokens"


def train_tokenizer(files: list[Path], out: Path) -> None:
    """Write a sentencepiece BPE model with byte fallback that keeps every space of the source."""
    text = out.with_suffix(".txt")
    text.write_text("\n".join(map(read_source, files)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(out.with_suffix("")),
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        split_digits=True,
        character_coverage=0.9995,
        max_sentence_length=16384,
        input_sentence_size=400_000,
        minloglevel=2,
    )
    text.unlink()


def load_corpus(work: Path) -> Corpus:
    """Encode the standard library with the tokenizer in `work`, which is trained first if there is none.

    Raises ValueError in one line for a tokenizer that this command did not make.
    """
    train_files, held_out_files = stdlib_files()
    tokenizer = work / "tokenizer.model"
    if not tokenizer.exists():
        print("training the tokenizer ...", file=sys.stderr)
        train_tokenizer(train_files, tokenizer)
    advice = "Delete it or give another --work."
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{tokenizer}: not a sentencepiece model. {advice}") from error
    if (size := processor.vocab_size()) != VOCAB_SIZE:
        raise ValueError(f"{tokenizer} has {size} pieces, expected {VOCAB_SIZE}. {advice}")

    def encode(files: list[Path]) -> tuple[np.ndarray, int]:
        ids: list[int] = []
        size = 0
        for text in map(read_source, files):
            size += len(text.encode())
            ids += [processor.bos_id(), *processor.encode(text), processor.eos_id()]
        return np.array(ids, dtype=np.int32), size

    train, train_bytes = encode(train_files)
    held_out, held_out_bytes = encode(held_out_files)
    return Corpus(train, held_out, train_bytes, held_out_bytes, len(train_files), tokenizer)


def batch(stream: np.ndarray, rng: np.random.Generator, count: int, length: int) -> Tensor:
    """`count` windows of `length` + 1 tokens at random places, int64 [count, length + 1]."""
    starts = rng.integers(0, len(stream) - length - 1, count)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))


def loss_of(model: Transformer, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each next token of tokens [B, T + 1]."""
    hidden_states, _ = model.forward_train(tokens[:, :-1])
    return F.cross_entropy(model.logits(hidden_states).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: Transformer, stream: np.ndarray, size: int, length: int = 1024, most: int = 64) -> float:
    """Bits per UTF-8 byte over up to `most` consecutive windows of the stream, which has `size` bytes."""
    count = min(most, (len(stream) - 1) // length)
    windows = torch.from_numpy(stream[: count * length + 1].astype(np.int64))
    total = 0.0
    for i in range(0, count, 4):
        rows = torch.stack([windows[j * length : (j + 1) * length + 1] for j in range(i, min(i + 4, count))])
        total += float(loss_of(model, rows)) * rows.shape[0]
    return total / count / math.log(2) * (len(stream) / size)


def train(args: argparse.Namespace) -> None:
    """Train in args.work, going on from what lies there, then write args.out.

    Raises ValueError in one line for a work directory of another run, and KeyboardInterrupt after Ctrl-C.
    """
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(work)
    print(f"corpus  {corpus}", file=sys.stderr)
    torch.manual_seed(args.seed)
    model = Transformer(CONFIG)
    init_weights(model, torch.Generator().manual_seed(args.seed))
    model.rotary.build("cpu")
    optims = optimizers(model, RECIPE)
    loss_fn = torch.compile(loss_of) if args.compile else loss_of

    def train_step(step: int) -> tuple[float, list[float], int]:
        rng = np.random.default_rng((args.seed, step))
        length = LENGTHS[step >= 0.6 * args.steps]
        tokens = batch(corpus.train, rng, args.batch_tokens // length, length)
        loss = loss_fn(model, tokens)
        loss.backward()
        update(optims, RECIPE.factor(step, args.steps))
        return float(loss.detach()), [], args.batch_tokens

    identity = {"--steps": args.steps, "--seed": args.seed, "--batch-tokens": args.batch_tokens}
    identity["model"] = repr(CONFIG)
    # Another Python has another library.
    identity["corpus"] = hashlib.sha256(corpus.train.tobytes()).hexdigest()
    run = Run(model, optims, identity, work / "train_state.pt", World(0, 1, torch.device("cpu")))
    run.fit(train_step, args.steps, SAVE_EVERY)
    average = functools.reduce(lambda loss, newer: 0.98 * loss + 0.02 * newer, run.curve)
    export(model, corpus, args, run.seconds, average)


def export(model: Transformer, corpus: Corpus, args: argparse.Namespace, seconds: float, loss: float) -> None:
    """Write the Hugging Face directory (bf16), and CARD.md with what was measured on the rounded weights."""
    out = Path(args.out)
    model.eval().to(torch.bfloat16).float()
    held = bits_per_byte(model, corpus.held_out, corpus.held_out_bytes)
    seen = bits_per_byte(model, corpus.train, corpus.train_bytes)
    save_hf(model.to(torch.bfloat16), out)
    shutil.copyfile(corpus.tokenizer, out / "tokenizer.model")
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    flags = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "add_prefix_space": False}
    tokenizer = {"tokenizer_class": "LlamaTokenizer", "model_max_length": 2048, **specials, **flags}
    write_json(out / "tokenizer_config.json", tokenizer)
    write_json(out / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    threads = torch.get_num_threads()
    card = CARD.format(
        **vars(args),
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        version=platform.python_version(),
        corpus=corpus,
        left_out=", ".join(LEFT_OUT),
        held_out=", ".join(HELD_OUT),
        where=f"{seconds / 60:.0f} minutes on a CPU ({threads} threads), torch {torch.__version__}",
        loss=loss,
        seen=seen,
        held=held,
    )
    write_text(out / "CARD.md", card)
    print(f"held-out {held:.3f} bits per byte, training {seen:.3f}; wrote {out}", file=sys.stderr)
