"""Weights as a file has quantized them, in tiles for the CPU kernels.

A weight (`kernels.formats`) has one or more parts, one behind the other: rows that share a format. In each part the codes
of all tiles come first. A block of 32 columns of 8 rows has runs of 32 bytes, whose byte (r, c) belongs to row r and
column 4 j + c. The first `low` runs hold the low bits of codes: as many j as fit into a byte, the first in the lowest
bits. `high` more runs hold the bits above them. Behind the codes lie the factors of every unit of 8 rows: scales, mins,
and for each group its small factors of 8 rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import kernels.cpu as cpu
from kernels.formats import Blocks, Format, Part
from kernels.packing import PackedWeight

NUMBERS_OF_PART = 11  # that say how its rows lie, in a table of 64-bit numbers


def fits_blocks(shapes: Sequence[tuple[int, int]], forms: Sequence[Format]) -> bool:
    """Whether matrices of these shapes and formats can be parts of one weight: whole tiles of 8 rows and whole units."""
    return all(n % cpu.TILE == 0 and k % form.unit == 0 for (n, k), form in zip(shapes, forms, strict=True))


def pack_blocks(parts: Sequence[Part]) -> PackedWeight:
    """The parts of one weight [N, K], whose codes and factors stay as they are, in layout 'tiles'."""
    table = [(part.n, part.k, *part.form.numbers()) for part in parts]
    whole = torch.empty(sum(part.form.bytes(part.n, part.k) for part in parts), dtype=torch.uint8)
    places = whole.split([part.form.bytes(part.n, part.k) for part in parts])
    for part, place in zip(parts, places, strict=True):
        _fill(part, place)
    rows, bits = sum(part.n for part in parts), max(part.form.low + part.form.high for part in parts)
    return PackedWeight("tiles", bits, 0, rows, parts[0].k, whole, torch.tensor(table))


def stack_blocks(experts: Sequence[PackedWeight]) -> PackedWeight:
    """One matrix kind of all experts, which have the same formats."""
    tables = None if experts[0].forms else torch.stack([e.scales for e in experts])
    return replace(experts[0], weight=torch.stack([e.weight for e in experts]), scales=tables)


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

    large = (values for values in (piece.scales, piece.mins) if values is not None)
    parts = [units(values).contiguous().view(torch.uint8).flatten(2) for values in large]
    if piece.sub_scales is not None:
        small = [units(piece.sub_scales.view(torch.uint8))]
        if piece.sub_mins is not None:
            high = units(piece.sub_mins)
            small = [small[0] | (high << 4)] if form.nibbles else [*small, high]
        parts.append(torch.stack(small, 3).flatten(2))
    return torch.cat(parts, 2).flatten(1)
