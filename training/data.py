"""Tokenised training data: rows of tokens, which of them count, and the micro-batches that every step takes.

What a step takes depends on the seed and on the number of the step alone, so a resumed run sees the same rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from support.files import written_whole
from training.loop import World


@dataclass(frozen=True)
class TokenData:
    """Tokenised rows: row k is ids[starts[k]:starts[k + 1]]; `mask` marks the tokens that count (the assistant's).

    A `stream` (plain text) is sampled in windows at any offset. Otherwise a row is one conversation, cut to the window.
    """

    ids: np.ndarray  # int32
    mask: np.ndarray  # bool
    starts: np.ndarray  # int64 [rows + 1]
    stream: bool

    @classmethod
    def from_rows(cls, rows: list[tuple[list[int], list[bool]]]) -> TokenData:
        """Conversations, each as (ids, mask)."""
        ids = np.array([t for row, _ in rows for t in row], dtype=np.int32)
        mask = np.array([m for _, row in rows for m in row], dtype=bool)
        starts = np.cumsum([0, *(len(row) for row, _ in rows)], dtype=np.int64)
        return cls(ids, mask, starts, False)

    @classmethod
    def from_stream(cls, ids: np.ndarray | list[int]) -> TokenData:
        """One stream of text, all of whose tokens count."""
        return cls(np.asarray(ids, dtype=np.int32), np.ones(len(ids), bool), np.array([0, len(ids)]), True)

    @classmethod
    def load(cls, path: Path) -> TokenData:
        """Read an .npz file. Raises ValueError if it holds other arrays."""
        with np.load(path) as file:
            if missing := {"ids", "mask", "starts", "stream"} - set(file.files):
                raise ValueError(f"{path}: {sorted(missing)} missing; expected ids, mask, starts, stream.")
            return cls(file["ids"], file["mask"], file["starts"], bool(file["stream"]))

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        with written_whole(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **vars(self))

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def row(self, k: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, mask) of the first `length` tokens of row k; of a stream, the k-th window of `length`."""
        low, high = (k * length, len(self.ids)) if self.stream else (self.starts[k], self.starts[k + 1])
        high = min(high, low + length)
        return self.ids[low:high], self.mask[low:high]

    def sample(self, seed: int, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, mask) number `index` of an endless series: random windows, or every row once per epoch."""
        if self.stream:
            start = np.random.default_rng((seed, index)).integers(0, max(1, len(self.ids) - length + 1))
            return self.ids[start : start + length], self.mask[start : start + length]
        epoch, place = divmod(index, self.rows)
        return self.row(int(_permutation(seed, epoch, self.rows)[place]), length)

    def split(self, share: float) -> tuple[TokenData, TokenData]:
        """The first rows (of a stream: tokens) for training, and the last `share` of them held out."""
        if self.stream:
            row = 1
            starts = np.array([0, int(len(self.ids) * (1 - share)), len(self.ids)])
        else:
            row = min(self.rows - 1, max(1, round(self.rows * (1 - share))))
            starts = self.starts
        cut = int(starts[row])
        train = TokenData(self.ids[:cut], self.mask[:cut], starts[: row + 1], self.stream)
        held_out = TokenData(self.ids[cut:], self.mask[cut:], starts[row:] - cut, self.stream)
        if not train.mask.any() or not held_out.mask.any():
            raise ValueError(f"{self.rows} rows are too few to hold some out; give more --data or a --held-out.")
        return train, held_out


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


@dataclass(frozen=True)
class Batch:
    """One micro-batch: tokens int64 [B, T] padded at the end, mask bool [B, T], each row's number and own length."""

    tokens: Tensor
    mask: Tensor
    numbers: Sequence[int]
    lengths: Sequence[int]


def step_batches(data: TokenData, step: int, world: World, args: argparse.Namespace) -> tuple[list[Batch], float]:
    """This process's micro-batches of a step, and how many tokens count in the whole step (all processes, at least 1).

    The step's rows depend on (seed, step) and on their total number alone, however they are dealt out.
    """
    total = args.batch * args.accumulate * world.size
    rows = [(k, *data.sample(args.seed, k, args.length)) for k in range(step * total, (step + 1) * total)]
    count = float(sum(mask[1:].sum() for _, _, mask in rows))
    rows.sort(key=lambda row: (-len(row[1]), row[0]))  # rows of like length together: less padding
    batches = []
    for a in range(world.rank, args.accumulate * world.size, world.size):
        numbers, ids, masks = zip(*rows[a * args.batch : (a + 1) * args.batch], strict=True)
        lengths = [len(row) for row in ids]
        longest = max(2, *lengths)
        padded = (np.stack([np.pad(row, (0, longest - len(row))) for row in part]) for part in (ids, masks))
        tokens, mask = (torch.from_numpy(array).to(world.device) for array in padded)
        batches.append(Batch(tokens.long(), mask, numbers, lengths))
    return batches, max(1.0, count)
