"""How a file has quantized a weight: codes of 2 to 8 bits below scales of scales, and the values that they stand for.

A value is scale * sub_scale * (code - offset) + min * sub_min, where a table may turn codes into other numbers. A scale
and a min belong to a unit of columns of one row, the small factors below them to groups of 16 or 32 columns.
`kernels.blocks` lays such weights out for the CPU kernels, and `kernels.panels` for Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import CODES, Source

# `Format.nested`: small scales are the bits of float8_e4m3fn, none of them negative, and 2^-8 times the numbers count.
# Scales are float32 then, and belong to a whole row (`unit` is its length).
FP8_FACTORS = 2


class Format(NamedTuple):
    """How a weight is quantized. low, high: bits of a code in the two kinds of runs. Only 2 bits have nibbles for small
    factors, which lie in one byte then."""

    low: int
    high: int = 0
    group: int = 32  # columns that share the small factors
    unit: int = 32  # columns that share a scale and a min
    offset: int = 0
    nested: int = 0  # small factors: 0 none, 1 integers, FP8_FACTORS
    minima: bool = False
    table: tuple[int, ...] = ()  # what 16 codes stand for, from 0 to 255

    @property
    def nibbles(self) -> bool:
        """Whether a small scale and a small min share a byte."""
        return self.low + self.high == 2

    def numbers(self) -> list[int]:
        """All of it as numbers of 64 bits, of which `from_numbers` makes it again: a table of 16 bytes is two of them."""
        return [*map(int, self[:7]), *np.array(self.table or [0] * 16, np.uint8).view(np.int64).tolist()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Format:
        """The format of `numbers`."""
        *facts, nested, minima, first, second = numbers
        table = tuple(np.array([first, second], np.int64).view(np.uint8).tolist()) if first or second else ()
        return cls(*facts, nested, bool(minima), table)

    def bytes(self, n: int, k: int) -> int:
        """The bytes of n rows of k columns in a file, and in `kernels.blocks`."""
        factors = (0 if not self.nested else 1 if self.nibbles else 1 + self.minima) * k // self.group
        scale = 4 if self.nested == FP8_FACTORS else 2
        return n * (k * (self.low + self.high) // 8 + scale * (1 + self.minima) * (k // self.unit) + factors)


class Blocks(NamedTuple):
    """Some rows of a quantized weight. Factors that the format lacks are None."""

    codes: Tensor  # [N, K] uint8, or the rows of a file that hold the codes
    scales: Tensor  # [N, K / unit] fp16, or float32 above FP8_FACTORS
    mins: Tensor | None = None  # [N, K / unit] fp16
    sub_scales: Tensor | None = None  # [N, K / group] int8, or the uint8 of FP8_FACTORS
    sub_mins: Tensor | None = None  # [N, K / group] uint8

    def floats(self, form: Format) -> Tensor:
        """The values in float32 [N, K]: products are exact, and a min is added with one rounding."""

        def factors(large: Tensor, small: Tensor | None) -> Tensor:
            wide = large.float()[..., None]
            if form.nested == FP8_FACTORS:
                small = small.view(torch.float8_e4m3fn).float() / 256
            return wide if small is None else wide * small.float().unflatten(1, (-1, form.unit // form.group))

        codes = torch.tensor(form.table)[self.codes.long()] if form.table else self.codes
        columns = form.group if form.nested else form.unit
        values = (codes.float() - form.offset).unflatten(1, (self.scales.shape[1], -1, columns))
        values = values * factors(self.scales, self.sub_scales)[..., None]
        if self.mins is not None:
            values = values + factors(self.mins, self.sub_mins)[..., None]
        return values.flatten(1)


class Part(NamedTuple):
    """Rows of a weight [N, K] that share a format, in pieces of whole tiles."""

    form: Format
    n: int
    k: int
    pieces: Iterable[Blocks]
    source: Source = CODES  # where the pieces have their codes
