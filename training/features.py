"""The target's features of the training rows, kept on disk: only the first epoch runs the target."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from support.machine import size_text
from training.data import Batch, TokenData


class TargetRows(NamedTuple):
    """What the target computed for a batch of tokens [B, T]."""

    hidden_states: Tensor  # [B, T, H], what its LM head reads
    features: Tensor  # [B, T, F], what the draft head reads
    best: Tensor | None = None  # int64 [B, T], its most likely next tokens; None: not computed


class KeptFeatures:
    """Hidden states and features in bfloat16, and the most likely next tokens, for every token of the training data.

    A row is filled when a batch needs it for the first time. Files of an interrupted run are used further, as far as the
    checksum of a row says that it is what was written.
    """

    def __init__(self, path: Path, data: TokenData, hidden_size: int, taps_size: int):
        """`taps_size` is the width of features that are not the hidden states themselves, or 0 where they are.

        Raises ValueError if the data is one stream, whose windows never come again, or if the disk has no room.
        """
        if data.stream:
            raise ValueError("--keep-features needs conversations: windows of plain text are never the same again.")
        tokens, width = len(data.ids), hidden_size + taps_size
        needed, free = tokens * (2 * width + 12), shutil.disk_usage(path.parent).free
        if not path.exists() and needed > free:
            raise ValueError(
                f"--keep-features needs {size_text(needed)} in {path.parent}, where {size_text(free)} are free; "
                "train without it, or with less --data."
            )
        self.hidden_size = hidden_size
        self.values = torch.from_file(str(path), True, tokens * width, dtype=torch.bfloat16).view(tokens, width)
        self.best = torch.from_file(str(path.with_suffix(".ids")), True, tokens, dtype=torch.int32)
        # A row's checksum lies where its first token does. A new file is all zeros: nothing is filled yet.
        self.sums = torch.from_file(str(path.with_suffix(".sums")), True, tokens, dtype=torch.int64)
        self.filled: set[int] = set()  # first tokens of the rows that were filled or compared by this process

    def _checksum(self, place: slice) -> int:
        """Of a filled row; never zero."""
        first = zlib.crc32(self.values[place].view(torch.uint8).numpy())
        return 1 << 32 | zlib.crc32(self.best[place].view(torch.uint8).numpy(), first)

    def _has(self, place: slice) -> bool:
        """Whether a row is filled."""
        if place.start not in self.filled and self.sums[place.start] == self._checksum(place):
            self.filled.add(place.start)
        return place.start in self.filled

    @torch.no_grad()
    def of(self, batch: Batch, run: Callable[[Tensor], TargetRows], logits: Callable[[Tensor], Tensor]) -> TargetRows:
        """The features of a batch [B, T], float32 on its device; padding is zero.

        Args:
            run: the target, called for the batch if one of its rows is not filled yet.
            logits: the target's LM head, hidden states [T, H] -> [T, V].
        """
        B, T = batch.tokens.shape
        if not all(map(self._has, batch.places)):
            rows = run(batch.tokens)
            for hidden_states, features, place, length in zip(*rows[:2], batch.places, batch.lengths, strict=True):
                self.values[place, : self.hidden_size] = hidden_states[:length]
                if self.values.shape[1] > self.hidden_size:
                    self.values[place, self.hidden_size :] = features[:length]
                self.best[place] = logits(hidden_states[:length]).argmax(-1).int()
                self.sums[place.start] = self._checksum(place)
                self.filled.add(place.start)
        values = torch.zeros(B, T, self.values.shape[1])
        best = torch.zeros(B, T, dtype=torch.int64)
        for b, (place, length) in enumerate(zip(batch.places, batch.lengths, strict=True)):
            values[b, :length] = self.values[place]
            best[b, :length] = self.best[place]
        values = values.to(batch.tokens.device)
        hidden_states, taps = values.tensor_split([self.hidden_size], -1)
        return TargetRows(hidden_states, taps if taps.shape[-1] else hidden_states, best.to(batch.tokens.device))
