"""Weights as a file has quantized them, in tiles for the CPU kernels: codes of 2 to 8 bits below scales of scales.

A value is scale * sub_scale * (code - offset) + min * sub_min, where a table may turn codes into other numbers. A scale
and a min belong to a unit of columns of one row, the small factors below them to groups of 16 or 32 columns.

A weight has one or more parts, which lie one behind the other: rows that share a format. In each part the codes of all
tiles come first. A block of 32 columns of 8 rows has runs of 32 bytes, whose byte (r, c) belongs to row r and column
4 j + c. The first `low` runs hold the low bits of codes: as many j as fit into a byte, the first in the lowest bits.
`high` more runs hold the bits above them. Behind the codes lie the factors of every unit of 8 rows: scales, mins, and for
each group its small factors of 8 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import kernels.cpu as cpu
from kernels.packing import PackedWeight

NUMBERS_OF_PART = 11  # that say how its rows lie, in a table of 64-bit numbers


class Format(NamedTuple):
    """How a weight is quantized. low, high: bits of a code in the two kinds of runs. Only 2 bits have nibbles for small
    factors, which lie in one byte then."""

    low: int
    high: int = 0
    group: int = 32  # columns that share the small factors
    unit: int = 32  # columns that share a scale and a min
    offset: int = 0
    nested: bool = False  # whether there are small factors
    minima: bool = False
    table: tuple[int, ...] = ()  # what 16 codes stand for, from 0 to 255

    @property
    def nibbles(self) -> bool:
        """Whether a small scale and a small min share a byte."""
        return self.low + self.high == 2

    def bytes(self, n: int, k: int) -> int:
        """The bytes of n rows of k columns."""
        factors = (0 if not self.nested else 1 if self.nibbles else 1 + self.minima) * k // self.group
        return n * (k * (self.low + self.high) // 8 + 2 * (1 + self.minima) * (k // self.unit) + factors)


class Blocks(NamedTuple):
    """Some rows of a quantized weight. Factors that the format lacks are None."""

    codes: Tensor  # [N, K] uint8, or the rows of a file that hold the codes
    scales: Tensor  # [N, K / unit] fp16
    mins: Tensor | None = None  # [N, K / unit] fp16
    sub_scales: Tensor | None = None  # [N, K / group] int8
    sub_mins: Tensor | None = None  # [N, K / group] uint8

    def floats(self, form: Format) -> Tensor:
        """The values in float32 [N, K]: products are exact, and a min is added with one rounding."""

        def factors(large: Tensor, small: Tensor | None) -> Tensor:
            wide = large.float()[..., None]
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
    source: cpu.Source = cpu.CODES  # where the pieces have their codes


def fits_blocks(n: int, k: int, form: Format) -> bool:
    """Whether rows can be a part: whole tiles of 8 rows and whole units."""
    return n % cpu.TILE == 0 and k % form.unit == 0


def pack_blocks(parts: Sequence[Part]) -> PackedWeight:
    """The parts of one weight [N, K], whose codes and factors stay as they are, in layout 'tiles'."""
    table = [(*_numbers(part), *_words(part.form.table)) for part in parts]
    whole = torch.empty(sum(part.form.bytes(part.n, part.k) for part in parts), dtype=torch.uint8)
    places = whole.split([part.form.bytes(part.n, part.k) for part in parts])
    for part, place in zip(parts, places, strict=True):
        _fill(part, place)
    rows, bits = sum(part.n for part in parts), max(part.form.low + part.form.high for part in parts)
    return PackedWeight("tiles", bits, 0, rows, parts[0].k, whole, torch.tensor(table))


def stack_blocks(experts: Sequence[PackedWeight]) -> PackedWeight:
    """One matrix kind of all experts, which have the same formats."""
    weight, table = (torch.stack([getattr(e, name) for e in experts]) for name in ("weight", "scales"))
    return replace(experts[0], weight=weight, scales=table)


def _numbers(part: Part) -> list[int]:
    form = part.form
    return [part.n, part.k, form.low, form.high, form.group, form.unit, form.offset, form.nested, form.minima]


def _words(table: tuple[int, ...]) -> list[int]:
    """A table of 16 bytes as two numbers of 64 bits, zeros for none."""
    return np.array(table or [0] * 16, np.uint8).view(np.int64).tolist()


def _fill(part: Part, place: Tensor) -> None:
    """Write a part's codes and factors."""
    form, n, k, pieces, source = part
    size = n * k * (form.low + form.high) // 8
    codes, factors = place[:size].view(n // cpu.TILE, -1), place[size:].view(n // cpu.TILE, -1)
    tile = 0
    for piece in pieces:
        tiles = slice(tile, tile + len(piece.codes) // cpu.TILE)
        cpu.put_codes(piece.codes, source, codes[tiles], form.low, form.high)
        factors[tiles] = _factors(piece, form)
        tile = tiles.stop


def _factors(piece: Blocks, form: Format) -> Tensor:
    """uint8 [N / 8, bytes of a tile's factors]."""

    def units(values: Tensor) -> Tensor:  # [N, units * x] -> [N / 8, units, x, 8]
        return values.view(len(values) // 8, 8, piece.scales.shape[1], -1).permute(0, 2, 3, 1)

    large = [
        units(values).contiguous().view(torch.uint8) for values in (piece.scales, piece.mins) if values is not None
    ]
    parts = [part.flatten(2) for part in large]
    if piece.sub_scales is not None:
        small = [units(piece.sub_scales.view(torch.uint8))]
        if piece.sub_mins is not None:
            high = units(piece.sub_mins)
            small = [small[0] | (high << 4)] if form.nibbles else [*small, high]
        parts.append(torch.stack(small, 3).flatten(2))
    return torch.cat(parts, 2).flatten(1)
