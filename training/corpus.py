"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from torch import Tensor

from support.texts import read_source, stdlib_files

VOCAB_SIZE = 4096


LENGTHS = (512, 1024)  # of the training windows: in the first 60 % of the steps, and after


@dataclass
class Corpus:
    """Token streams (BOS + file + EOS, one after another) and their sizes in UTF-8 bytes."""

    train: np.ndarray
    held_out: np.ndarray
    train_bytes: int
    held_out_bytes: int
    files: int


def train_tokenizer(files: list[Path], out: Path) -> None:
    """Sentencepiece BPE with byte fallback that keeps every space of the source."""
    text = out.with_suffix(".txt")
    text.write_text("\n".join(read_source(p) for p in files), encoding="utf-8")
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
            text = read_source(path)
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
