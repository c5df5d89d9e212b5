"""How GGUF's types store values: the bytes of their blocks as codes and factors, exactly (`kernels.blocks`)."""

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels import PackedWeight
from kernels.blocks import NUMBERS_OF_PART, fits_blocks, pack_blocks, stack_blocks
from kernels.cpu import Place, Source
from kernels.formats import FP8_FACTORS, Blocks, Format, Part
from kernels.packing import pack_panels
from kernels.panels import fits_panels, panels_bytes
from kernels.tuned import counters_of

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGER_TYPES = {"I32": torch.int32, "I64": torch.int64}  # only draft heads have them
PLAIN_TYPES = FLOAT_TYPES | INTEGER_TYPES
# What the codes of IQ4_NL and IQ4_XS stand for, with 128 added.
LEVELS = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # the values of MXFP4's codes
GROUPS_OF_32 = {"unit": 256, "nested": True}
GROUPS_OF_16 = {"group": 16, "unit": 256, "nested": True}


def nvfp4(k: int) -> Format:
    """The format of NVFP4 in rows of k columns: scales in float8_e4m3fn of 16 columns, below one in float32."""
    return Format(4, group=16, unit=k, offset=12, nested=FP8_FACTORS, table=tuple(value + 12 for value in TWICE))


class Type(NamedTuple):
    """A type of tensors: the values of a block and its bytes.

    form: None for floats.
    places: where a block has the low bits of its codes, and the bits above them: the first byte, and bytes of a run.
    """

    name: str
    values: int
    size: int
    form: Format | None = None
    places: Sequence[tuple[int, int]] = ()


# By their numbers in a file.
TYPES = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    30: Type("BF16", 1, 2),
    26: Type("I32", 1, 4),
    27: Type("I64", 1, 8),
    2: Type("Q4_0", 32, 18, Format(4, offset=8), [(2, 16)]),
    3: Type("Q4_1", 32, 20, Format(4, minima=True), [(4, 16)]),
    6: Type("Q5_0", 32, 22, Format(4, 1, offset=16), [(6, 16), (2, 1)]),
    7: Type("Q5_1", 32, 24, Format(4, 1, minima=True), [(8, 16), (4, 1)]),
    8: Type("Q8_0", 32, 34, Format(8, offset=128), [(2, 32)]),
    10: Type("Q2_K", 256, 84, Format(2, minima=True, **GROUPS_OF_16), [(16, 32)]),
    11: Type("Q3_K", 256, 110, Format(2, 1, offset=4, **GROUPS_OF_16), [(32, 32), (0, 32)]),
    12: Type("Q4_K", 256, 144, Format(4, minima=True, **GROUPS_OF_32), [(16, 32)]),
    13: Type("Q5_K", 256, 176, Format(4, 1, minima=True, **GROUPS_OF_32), [(48, 32), (16, 32)]),
    14: Type("Q6_K", 256, 210, Format(4, 2, offset=32, **GROUPS_OF_16), [(0, 64), (128, 32)]),
    20: Type("IQ4_NL", 32, 18, Format(4, offset=128, table=LEVELS), [(2, 16)]),
    39: Type("MXFP4", 32, 17, Format(4, offset=128, table=tuple(value + 128 for value in TWICE)), [(1, 16)]),
    23: Type("IQ4_XS", 256, 136, Format(4, offset=128, table=LEVELS, **GROUPS_OF_32), [(8, 16)]),
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
FORMATS = {kind.name: kind.form for kind in TYPES.values() if kind.form}
FITS = {"tiles": fits_blocks, "panels": fits_panels}  # whether a layout holds matrices of these shapes and formats


def source_of(kind: str) -> Source:
    """Where the codes are in rows of one of FORMATS. Those of Q8_0 are signed, so their highest bit is turned here."""
    _, values, size, form, places = BY_NAME[kind]
    bits = zip(places, (form.low, form.high), strict=False)
    return Source(values, size, *(Place(at, count, run) for (at, run), count in bits), turned=128 * (kind == "Q8_0"))


def without_copy(values: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor, which nobody may write to: torch has no word for that, and would warn."""
    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(values)


def _bits(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Codes of `bits` bits in bytes [..., B] -> [..., 8 B / bits]: the lowest of a run of bytes, then higher ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = data.reshape(*data.shape[:-1], -1, 1, run) >> shifts & np.uint8(2**bits - 1)
    return codes.reshape(*data.shape[:-1], -1)


def _six_bits(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 small scales and the 8 small mins in the 12 bytes of Q4_K and Q5_K."""
    scales, mins, rest = data[..., :4], data[..., 4:8], data[..., 8:]
    both = [(scales, rest & 15), (mins, rest >> 4)]
    return tuple(np.concatenate((first & 63, last | (first >> 2 & 48)), -1) for first, last in both)


def powers(exponents: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """MXFP4's scales of the values TWICE [N, K / 32]: in fp16 if it holds them all exactly, else in float32.

    exponents [N, K / 32] uint8; codes [N, K]. Where all values of 32 are zero, the scale may be any.
    """
    zeros = (codes & 7).unflatten(-1, (-1, 32)).sum(-1) == 0
    exponents = exponents.int().masked_fill(zeros, 128)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents - 128)
    return scales.half() if 104 <= exponents.min() and exponents.max() <= 143 else scales


def read_codes(kind: str, rows: np.ndarray) -> np.ndarray:
    """The codes [N, K] uint8 of rows [N, bytes of a row] uint8 in one of FORMATS."""
    source = source_of(kind)
    data = rows.reshape(len(rows), -1, source.size)
    codes, shift = np.uint8(source.turned), 0
    for at, bits, run in (source.low, source.high):
        if bits:
            codes = codes ^ _bits(data[..., at : at + source.values * bits // 8], bits, run) << shift
        shift = bits
    return codes.reshape(len(rows), -1)


def read_blocks(kind: str, rows: np.ndarray, stored: bool = False) -> Blocks:
    """The codes and factors of rows [N, bytes of a row] uint8 in one of FORMATS. stored: the rows in place of codes."""
    _, _, size, form, _ = BY_NAME[kind]
    data = rows.reshape(len(rows), -1, size)
    if kind == "MXFP4":
        codes = torch.from_numpy(read_codes(kind, rows))
        return Blocks(without_copy(rows) if stored else codes, powers(torch.from_numpy(data[..., 0].copy()), codes))
    halves = data.view(np.uint16)  # blocks of all others have an even number of bytes
    at, small = (0, 1), None  # of the scale and the min of a block, in halves
    if kind == "Q2_K":
        at, small = (40, 41), (data[..., :16] & 15, data[..., :16] >> 4)
    elif kind == "Q3_K":
        at, small = (54, 0), ((_bits(data[..., 96:104], 4, 8) | _bits(data[..., 104:108], 2, 4) << 4) - 32,)
    elif kind in ("Q4_K", "Q5_K"):
        small = _six_bits(data[..., 4:16])
    elif kind == "Q6_K":
        at, small = (104, 0), (data[..., 192:208],)
    elif kind == "IQ4_XS":
        small = ((_bits(data[..., 4:8], 4, 1) | _bits(data[..., 2:4], 2, 1) << 4) - 32,)

    def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.array(values, order="C").reshape(len(rows), -1)).view(dtype)

    scales, mins = (tensor(halves[..., i], torch.float16) for i in at)
    codes = without_copy(rows) if stored else torch.from_numpy(read_codes(kind, rows))
    if small is None:
        return Blocks(codes, scales, mins if form.minima else None)
    found = Blocks(codes, scales, sub_scales=tensor(small[0], torch.int8))
    if form.minima:  # they are subtracted
        found = found._replace(mins=-mins, sub_mins=tensor(small[1], torch.uint8))
    return found


def pack_kept(
    matrices: Iterable[Sequence[Part]], experts: bool, layout: str, device: torch.device | str
) -> PackedWeight:
    """A matrix made of parts, or those of all experts, exactly in their types: in "tiles", or on `device` in "panels"."""
    packed = [pack_panels(parts, device) if layout == "panels" else pack_blocks(parts) for parts in matrices]
    return stack_blocks(packed) if experts else packed[0]


def values_of(kind: str, rows: np.ndarray) -> torch.Tensor:
    """The values of rows as a file holds them: floats, or integers of a type of these."""
    if kind in PLAIN_TYPES:
        return torch.from_numpy(np.array(rows)).view(PLAIN_TYPES[kind])
    _, block, size, *_ = BY_NAME[kind]
    shape, rows = rows.shape[:-1], rows.reshape(-1, rows.shape[-1])  # a vector has no rows
    values = torch.empty(len(rows), rows.shape[1] // size * block)
    for first in range(0, len(rows), 4096):  # codes take memory too
        piece = slice(first, first + 4096)
        values[piece] = read_blocks(kind, rows[piece]).floats(FORMATS[kind])
    return values.view(*shape, -1)


def kept_slot(kind: str | Format, n: int, k: int, layout: str, experts: int = 1) -> torch.Tensor:
    """The bytes of matrices [N, K] that keep their type or format in "tiles" or "panels", without values, for the plan of
    the memory. Experts share the counters of panels."""
    form = FORMATS[kind] if isinstance(kind, str) else kind
    size = form.bytes(n, k) + 8 * NUMBERS_OF_PART
    if layout == "panels":
        size = panels_bytes(form, n, k) + 4 * counters_of(n) // experts
    return torch.empty(experts * size, dtype=torch.uint8, device="meta")
