"""Train the embedded demo model: a small LLaMA on the CPython standard library's own sources.

    python -m scripts.train_demo                      # the recipe that made demo/: over an hour on 2 CPU cores
    python -m scripts.train_demo --steps 200 --out runs/try --work runs/try-work

Deterministic by --seed on one machine and number of threads. State lies in WORK/train_state.pt: after Ctrl-C the same
command goes on from there, to the same weights. The corpus is found through `sysconfig`: every .py file except tests,
generated tables and the held-out modules named below.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import save_hf
from model import ModelConfig, RopeConfig, Transformer

HELD_OUT = (
    "argparse.py",
    "csv.py",
    "heapq.py",
    "json",
    "queue.py",
    "statistics.py",
    "textwrap.py",
    "zipfile.py",
)
LEFT_OUT = (
    "encodings",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "_bundled",
)
VOCAB_SIZE = 4096
LENGTHS = (512, 1024)  # of the training windows: in the first 60 % of the steps, and after
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


@dataclass
class Corpus:
    """Token streams (BOS + file + EOS, one after another) and their sizes in UTF-8 bytes."""

    train: np.ndarray
    held_out: np.ndarray
    train_bytes: int
    held_out_bytes: int
    files: int


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """(training files, held-out files) of the running interpreter's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held = [], []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(p in LEFT_OUT or p.startswith(("config-", "_sysconfigdata")) for p in parts):
            continue
        (held if parts[0] in HELD_OUT else train).append(path)
    return train, held


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")


def train_tokenizer(files: list[Path], out: Path) -> None:
    """Sentencepiece BPE with byte fallback that keeps every space of the source."""
    text = out.with_suffix(".txt")
    text.write_text("\n".join(read_text(p) for p in files), encoding="utf-8")
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


def load_corpus(tokenizer_path: Path) -> Corpus:
    """Encode the standard library. ValueError in one line for a tokenizer that this script did not make."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"{tokenizer_path}: not a sentencepiece model. Delete it or give another --work."
        ) from error
    if (size := processor.vocab_size()) != VOCAB_SIZE:
        raise ValueError(
            f"{tokenizer_path} has {size} pieces, expected {VOCAB_SIZE}: it is from another run. Delete it or give "
            "another --work."
        )

    def encode(files: list[Path]) -> tuple[np.ndarray, int]:
        ids, size = [], 0
        for path in files:
            text = read_text(path)
            size += len(text.encode())
            ids += [processor.bos_id(), *processor.encode(text), processor.eos_id()]
        return np.array(ids, dtype=np.int32), size

    train_files, held_files = stdlib_files()
    train, train_bytes = encode(train_files)
    held, held_bytes = encode(held_files)
    return Corpus(train, held, train_bytes, held_bytes, len(train_files))


def batch(stream: np.ndarray, rng: np.random.Generator, count: int, length: int) -> Tensor:
    starts = rng.integers(0, len(stream) - length - 1, count)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))


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


def init_weights(model: Transformer, generator: torch.Generator) -> None:
    """Normal(0, 0.02) embeddings, fan-in scaled matrices, zeroed residual outputs (each block starts as identity)."""
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            torch.nn.init.zeros_(p)
        else:
            std = 0.02 if "embed" in name else 1 / math.sqrt(p.shape[-1])
            torch.nn.init.normal_(p, std=std, generator=generator)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz steps; for hidden matrices. Source: K. Jordan, 2024."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly: quintic Newton-Schulz iteration on the spectral-normalised input."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def optimizers(model: Transformer) -> list[torch.optim.Optimizer]:
    hidden = [
        p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n
    ]
    rest = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n or "lm_head" in n]
    adam = torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    return [Muon(hidden, lr=0.02), adam]


def learning_rate(step: int, steps: int) -> float:
    """Factor on the peak rate: short warm-up, flat, then linear to zero over the last 45 %."""
    warm, cool = min(1.0, (step + 1) / 50), min(1.0, (steps - step) / (0.45 * steps))
    return warm * cool


def update(optims: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """One step of every optimizer at `factor` of its peak rates; the gradients are used up."""
    for optim in optims:
        for group in optim.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * factor
        optim.step()
        optim.zero_grad(set_to_none=True)


def save_state(path: Path, **state) -> None:
    """Save through a temporary name, so that an interruption never leaves half a state."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def read_state(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The state of this very run; ValueError in one line for a damaged file or another run's, naming what differs."""
    advice = "Delete it or give another --work."
    try:
        state = torch.load(path, weights_only=True)
        found = state["run"]
        different = next((key for key, value in run.items() if found[key] != value), None)
    except Exception as error:  # whatever a damaged or foreign file raises
        raise ValueError(f"{path}: not a training state of this script. {advice}") from error
    if different is not None:
        values = f"{different} {found[different]!r:.60}, here {run[different]!r:.60}"
        raise ValueError(
            f"{path} is from another run ({values}). Match it, delete it or give another --work."
        )
    return state


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of a step, where the state is whole: the yielded function says whether it was pressed.
    Pressed again it interrupts at once."""
    pressed: list[int] = []

    def press(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


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


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 usage, 3 bad work directory or file, 130 Ctrl-C)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="demo")
    parser.add_argument("--work", default="runs/train_demo", help="tokenizer, training state")
    parser.add_argument("--steps", type=int, default=1250)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0 = torch's default)")
    parser.add_argument("--compile", action="store_true", help="compile the loss (faster after a minute)")
    args = parser.parse_args(argv)
    longest = max(LENGTHS)
    for name, low in (("steps", 1), ("batch_tokens", longest), ("seed", 0), ("threads", 0)):
        if (value := getattr(args, name)) < low:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be {low} or more")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        train(args)
    except KeyboardInterrupt as stop:
        where = f" {stop}" if str(stop) else ""
        print(f"\ninterrupted{where}; the same command goes on from the last saved state", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error  {' '.join(str(error).split())}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
