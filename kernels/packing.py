"""Weights in the layout that their backend reads: packing, and the way back to a matrix.

The layout 'planes' of Triton: 128 k values of one output row are KP = 16 (int4) or 32 (int8) int32 words.
Word i holds the codes of k = i, i + KP, i + 2 KP, ..., the first one in its lowest bits, so that one load
feeds every matrix product of the block from registers. Codes are unsigned, with the zero point in the middle
(8 or 128). A panel holds such a block of 32 rows: their words, then with int4 their fp16 scales and the bytes of their
zero points, group after group. The panels of 128 rows lie side by side, and then come those of the next 128 k values,
so that what a program reads in one turn is contiguous: [..., N / 128, K / 128, 4 panels]. A weight with the types of a
file (`PackedWeight.forms`) lies as `kernels.panels` describes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.cpu as cpu
import kernels.panels as panels
from kernels.backend import active_backend, constexpr_function, jit, operation, tl, use_cpu, use_triton
from kernels.formats import Blocks, Format, Part
from kernels.tuned import LinearConfig, counters_of, gpu_facts, linear_config, shape_key


@constexpr_function
def decode_ptx(bits: int, bf16: bool, small: bool = False) -> str:
    """PTX for `inline_asm_elementwise(pack=2)`: two words in, 32 / bits registers of two half values out.

    A code is ORed into the mantissa of 1024.0 (fp16) or 128.0 (bf16). Then the offset is subtracted. In fp16
    every second nibble is read where it is, as 16 times the code, and scaled by 1/16. bf16 has only 7 bits of
    mantissa, so the top bit of a byte is turned into 128 or 256 and added. small: fp16 codes of 4 bits divided by 16, so
    that their sums in fp16 have room.
    """
    planes = 32 // bits
    if bits == 4:
        constants = (0xC308C308, 0x3F803F80, 0x43004300) if bf16 else (0x64086408, 0x2C002C00, 0xD480D480)
        constants = (0xD408D408, 0x1C001C00, 0xC480C480, 0x2C002C00) if small else constants
    else:
        constants = (0xBF80BF80, 0x43804380, 0x43004300) if bf16 else (0x64806480,)
    body = [f"mov.b32 c{i}, 0x{value:08x};" for i, value in enumerate(constants, 1)]
    for word, pick in (("lo", "0x5410"), ("hi", "0x7632")):
        body.append(f"prmt.b32 {word}, ${planes}, ${planes + 1}, {pick};")
    for plane in range(planes):
        word = "lo" if plane < planes // 2 else "hi"
        j = plane % (planes // 2)
        out = f"${plane}"
        in_place = bits == 4 and not bf16 and j % 2 == 1
        shift = bits * (j - in_place)
        if shift and not in_place:
            body.append(f"shr.u32 s, {word}, {shift};")
        source = "s" if shift else word
        if bits == 4 and bf16:
            body.append(f"lop3.b32 t, {source}, 0x000f000f, c3, 0xEA; fma.rn.bf16x2 {out}, t, c2, c1;")
        elif bits == 8 and bf16:
            body.append(f"lop3.b32 t, {source}, 0x007f007f, c3, 0xEA;")
            body.append(f"lop3.b32 u, {source}, 0x00800080, c2, 0x6A; fma.rn.bf16x2 {out}, u, c1, t;")
        elif in_place:
            body.append(f"lop3.b32 t, {source}, 0x00f000f0, 0x64006400, 0xEA; fma.rn.f16x2 {out}, t, c2, c3;")
        else:
            mask = "0x000f000f" if bits == 4 else "0x00ff00ff"
            last = f"fma.rn.f16x2 {out}, t, c4, c1;" if small else f"sub.rn.f16x2 {out}, t, c1;"
            body.append(f"lop3.b32 t, {source}, {mask}, 0x64006400, 0xEA; {last}")
    return "{ .reg .b32 lo, hi, s, t, u, c1, c2, c3, c4; " + " ".join(body) + " }"


@jit
def decode(w, BITS: tl.constexpr, DT: tl.constexpr, NATIVE: tl.constexpr, SMALL: tl.constexpr = False):
    """int32 words -> 32 / BITS planes of codes in DT, zero points at 0, and all divided by 16 if SMALL (fp16 of int4).
    Not NATIVE: without inline PTX."""
    COUNT: tl.constexpr = 32 // BITS
    TEXT: tl.constexpr = decode_ptx(BITS, DT == tl.bfloat16, SMALL)
    REGISTERS: tl.constexpr = "=r," * COUNT + "r,r"
    if not NATIVE:
        planes = ()
        for p in tl.static_range(COUNT):
            code = (((w >> (BITS * p)) & (2**BITS - 1)) - 2 ** (BITS - 1)).to(tl.float32)
            planes += ((code * 0.0625 if SMALL else code).to(DT),)
        return planes
    elif DT == tl.float16:
        return tl.inline_asm_elementwise(TEXT, REGISTERS, [w], (tl.float16,) * COUNT, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(TEXT, REGISTERS, [w], (tl.bfloat16,) * COUNT, is_pure=True, pack=2)


@constexpr_function
def panel_words(bits: int, group: int, zeros: bool) -> int:
    """The int32 words of a panel in layout 'planes'."""
    return 128 * bits + ((24 if zeros else 16) * (128 // group) if bits == 4 else 0)


LAYOUTS = ("planes", "tiles", "plain", "dense", "cpu")


class PackedTensors(NamedTuple):
    """The tensors of a `PackedWeight` as the operators of linear layers take them."""

    weight: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    counters: Tensor | None
    mins: Tensor | None


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in the layout that its backend reads, made by `pack_int4`, `pack_int8` or `pack_half`.

    layout: 'planes' (for Triton), 'tiles' (for `kernels.cpu`), 'plain' (as stored), 'dense' (dequantized once)
    or 'cpu' (torch's int4pack). Dimensions of `weight` before [N, ...] are experts. n and k are the numbers of
    output and input features. In layout 'planes' scales and zeros of int4 lie inside `weight`.
    """

    layout: str
    bits: int
    group_size: int
    n: int
    k: int
    weight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    mins: Tensor | None = None  # what code 0 stands for, instead of zeros
    perm: Tensor | None = None
    # How many partial sums of a tile have arrived. All are zero between launches.
    counters: Tensor | None = None
    config: LinearConfig = LinearConfig()
    forms: panels.Forms = ()  # how a file has quantized its rows, in layout 'planes'

    @property
    def has_zeros(self) -> bool:
        """Whether groups have zero points, wherever they lie."""
        inside = self.layout == "planes" and self.bits == 4 and not self.forms
        return self.weight.shape[-1] == 4 * panel_words(4, self.group_size, True) if inside else self.zeros is not None

    def parts(self) -> tuple[PackedTensors, list[int]]:
        """This weight for an operator, which `from_parts` turns back: without perm."""
        numbers = [LAYOUTS.index(self.layout), self.bits, self.group_size, self.n, self.k]
        tiling = [*self.config._replace(accumulate=int(self.config.accumulate == "float16"))]
        numbers += tiling + [number for form in self.forms for number in form]
        return PackedTensors(self.weight, self.scales, self.zeros, self.counters, self.mins), numbers

    def expert(self, e: int) -> PackedWeight:
        """The matrix of one expert."""
        names = ("weight", "scales", "zeros", "mins")
        return replace(self, **{n: None if (t := getattr(self, n)) is None else t[e] for n in names})

    def reorder(self, x: Tensor) -> Tensor:
        """The columns of x [..., K] in the order in which the weight stores them."""
        return x if self.perm is None else x.index_select(-1, self.perm)


def from_parts(tensors: PackedTensors, numbers: list[int]) -> PackedWeight:
    """The weight of `PackedWeight.parts`."""
    layout, bits, group_size, n, k, *rest = numbers
    tiling, rest = LinearConfig(*rest[: len(LinearConfig._fields)]), rest[len(LinearConfig._fields) :]
    config = tiling._replace(accumulate="float16" if tiling.accumulate else "float32")
    forms = tuple(tuple(rest[at : at + panels.NUMBERS]) for at in range(0, len(rest), panels.NUMBERS))
    return PackedWeight(LAYOUTS[layout], bits, group_size, n, k, **tensors._asdict(), config=config, forms=forms)


def _codes(stored: Tensor, bits: int) -> Tensor:
    """The unsigned codes uint8 [..., K] of int4 [..., K/2], where the low half of byte j holds k = 2 j, or of int8."""
    return stored.view(torch.uint8) ^ 128 if bits == 8 else torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


def to_planes(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [..., K] -> int32 words [..., ceil(K/128) * 4 bits] of layout 'planes'. Codes past K are
    zero points."""
    blocks = F.pad(codes.to(torch.int32), (0, -codes.shape[-1] % 128), value=2 ** (bits - 1))
    blocks = blocks.unflatten(-1, (-1, 32 // bits, 4 * bits))
    words = blocks[..., 0, :].clone()
    for plane in range(1, 32 // bits):
        words |= blocks[..., plane, :] << bits * plane
    return words.flatten(-2)


def from_planes(words: Tensor, bits: int, k: int) -> Tensor:
    """The inverse of `to_planes`: unsigned codes [..., K] as int32."""
    shifts = bits * torch.arange(32 // bits, dtype=torch.int32, device=words.device)[:, None]
    return ((words.unflatten(-1, (-1, 1, 4 * bits)) >> shifts) & (2**bits - 1)).flatten(-3)[..., :k]


def _to_panels(words: Tensor, scales: Tensor | None, zeros: Tensor | None, group: int, bits: int) -> Tensor:
    """Words [..., N, K / 128 * 4 bits] of `to_planes`, scales and zeros [..., K/G, N] -> layout 'planes'."""
    rows = F.pad(words, (0, 0, 0, -words.shape[-2] % 128))
    parts = [rows.unflatten(-1, (-1, 4 * bits)).unflatten(-3, (-1, 4, 32)).movedim(-2, -4).flatten(-2)]
    blocks = parts[0].shape[-3]
    for table in (scales, zeros):
        if table is not None:
            pad = (0, -table.shape[-1] % 128, 0, blocks * (128 // group) - table.shape[-2])
            table = F.pad(table, pad).unflatten(-1, (-1, 4, 32)).unflatten(-4, (blocks, -1))
            parts.append(table.movedim(-4, -2).movedim(-5, -4).flatten(-2).contiguous().view(torch.int32))
    return torch.cat(parts, -1).flatten(-2)


def _from_panels(weight: PackedWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The inverse of `_to_panels`: words, scales and zeros of a weight in layout 'planes'."""
    blocks = weight.weight.unflatten(-1, (4, -1))  # [..., N / 128, K / 128, 4, words of a panel]
    four = weight.bits == 4
    words = blocks[..., : 128 * weight.bits].unflatten(-1, (32, -1)).movedim(-4, -2)
    words = words.flatten(-2).flatten(-4, -2)[..., : weight.n, :]
    if not four:
        return words, weight.scales, None

    def table(part: Tensor, dtype: torch.dtype) -> Tensor:
        rows = part.contiguous().view(dtype).unflatten(-1, (-1, 32))  # [..., N / 128, K / 128, 4, groups, 32]
        rows = rows.movedim((-5, -4, -3, -2), (-3, -5, -2, -4)).flatten(-3).flatten(-3, -2)
        return rows[..., : weight.k // weight.group_size, : weight.n]

    count = 16 * (128 // weight.group_size)
    zeros = table(blocks[..., 512 + count :], torch.uint8) if weight.has_zeros else None
    return words, table(blocks[..., 512 : 512 + count], torch.float16), zeros


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix [..., N, K] that a packed weight stands for, rounded once from float32 or wider to `dtype`.

    Columns keep the stored order if `perm` is set. Not for layout 'cpu'.
    """
    if (weight.layout == "tiles" or weight.forms) and weight.weight.dim() in (2, 4):
        return torch.stack([dequantize(weight.expert(e), dtype) for e in range(len(weight.weight))])
    if weight.layout == "tiles":
        return packed_rows(weight, torch.arange(weight.n), dtype)
    if weight.layout == "dense" or weight.bits == 16:
        return weight.weight.to(dtype)
    if weight.forms:
        return panels.matrix(weight.weight, weight.forms, weight.n, weight.k).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if weight.layout == "planes":
        words, scales, zeros = _from_panels(weight)
        codes = from_planes(words, weight.bits, weight.k)
    else:
        codes, scales, zeros = _codes(weight.weight, weight.bits), weight.scales, weight.zeros
    codes = codes.to(wide).unflatten(-1, (-1, weight.group_size or weight.k))
    scales = scales.to(wide).mT[..., None] if weight.group_size else scales.to(wide)[..., None, None]
    if weight.mins is not None:
        return (codes * scales + weight.mins.to(wide).mT[..., None]).flatten(-2).to(dtype)
    zeros = 2 ** (weight.bits - 1) if zeros is None else zeros.to(wide).mT[..., None]
    return ((codes - zeros) * scales).flatten(-2).to(dtype)


def _tiles_problem(plain: PackedWeight, dtype: torch.dtype) -> str:
    """Why the CPU kernels cannot multiply with a weight, or ""."""
    if dtype != torch.float32:
        return "the dtype is not float32"
    if cpu.fits(plain.n, plain.k, plain.group_size):
        return ""
    return f"a weight [{plain.n}, {plain.k}] becomes floats, as tiles of {cpu.TILE} x {cpu.BLOCK} do not fill it"


def _choose_layout(plain: PackedWeight, dtype: torch.dtype) -> str:
    """The layout for the active backend. On a CPU the fastest one was measured: torch's int4 and int8
    products for bfloat16, a matrix that is dequantized once for every other dtype."""
    grouped_int8 = plain.bits == 8 and plain.group_size
    problem = "the dtype is float64" if dtype == torch.float64 else ""
    problem = "scales of groups are not fp16" if plain.group_size and plain.scales.dtype != torch.float16 else problem
    if use_triton("packed_linear", plain.weight, problem):
        return "planes"
    if plain.bits in (4, 8) and use_cpu("packed_linear", problem=_tiles_problem(plain, dtype)):
        return "tiles"
    on_cpu = plain.weight.device.type == "cpu"
    if plain.bits == 16 or grouped_int8 or (on_cpu and dtype != torch.bfloat16):
        return "dense"
    return "cpu" if on_cpu and plain.weight.dim() == 2 and plain.bits == 4 and plain.n % 16 == 0 else "plain"


def _middle(plain: PackedWeight) -> Tensor:
    """What code 8 stands for, per group [..., K/G, N] in float32."""
    if plain.mins is not None:
        return plain.mins.float() + 8 * plain.scales.float()
    return 0 * plain.scales if plain.zeros is None else (8 - plain.zeros.float()) * plain.scales.float()


def _pack(
    plain: PackedWeight, dtype: torch.dtype, layout: str, config: LinearConfig | None, reuse: bool = False
) -> PackedWeight:
    if layout == "auto":
        layout = _choose_layout(plain, dtype)
    if layout == "dense":
        floats = dequantize(plain, dtype)
        if use_cpu("packed_linear", floats):  # in whose product a row has the same bits at every width
            return replace(_float_tiles(floats), perm=plain.perm)
        return replace(plain, layout=layout, weight=floats, scales=None, zeros=None, mins=None)
    if layout == "cpu":
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_codes(plain.weight, 4).to(torch.int32), 1)
        scales = torch.stack((plain.scales.to(dtype), _middle(plain).to(dtype)), -1)
        return replace(plain, layout=layout, weight=packed, scales=scales, zeros=None, mins=None)
    if layout == "tiles":
        return _to_tiles(plain, reuse)
    if layout == "plain":
        return plain
    device = plain.weight.device
    # The kernels for the types of a file have minima, and 8 bits with groups.
    if plain.mins is not None or (plain.bits == 8 and plain.group_size):
        if plain.weight.dim() > 2:
            experts = [_pack(plain.expert(e), dtype, layout, config) for e in range(len(plain.weight))]
            return replace(experts[0], weight=torch.stack([expert.weight for expert in experts]))
        form = Format(8, offset=128) if plain.bits == 8 else Format(4, minima=True)
        tables = [t for t in (plain.scales, plain.mins) if t is not None]
        factors = (t.mT.repeat_interleave(plain.group_size // 32, 1).contiguous() for t in tables)
        part = Part(form, plain.n, plain.k, [Blocks(_codes(plain.weight, plain.bits), *factors)])
        return replace(pack_panels([part], device, config), perm=plain.perm)
    counters = torch.zeros(counters_of(plain.n), dtype=torch.int32, device=device)
    packed = replace(plain, layout=layout, config=config or _tiling(plain), counters=counters)
    if plain.bits == 16:
        return replace(packed, weight=plain.weight.contiguous())
    inside = (plain.scales, plain.zeros) if plain.bits == 4 else (None, None)
    words = to_planes(_codes(plain.weight, plain.bits), plain.bits)
    weight = _to_panels(words, *inside, plain.group_size, plain.bits)
    return replace(packed, weight=weight, scales=None if plain.bits == 4 else plain.scales, zeros=None)


def _tiling(plain: PackedWeight) -> LinearConfig:
    """How layout 'planes' is cut on the weight's device: as measured, if the active backend knows it, or by rule."""
    device, backend = plain.weight.device, active_backend()
    measured = backend.configs.get(shape_key(plain.n, plain.k, plain.bits)) if backend and not plain.forms else None
    if measured is not None:
        return measured
    gpu = gpu_facts(torch.cuda.get_device_properties(device)) if device.type == "cuda" else ()
    config = linear_config(plain.n, plain.k, plain.bits, *gpu)
    starts = [*itertools.accumulate(rows for rows, *_ in plain.forms[:-1])]
    rows, wide = (math.gcd(block, *starts) for block in (config.block_n, config.wide_n))  # a tile lies in one format
    config = config._replace(block_n=rows, warps=min(config.warps, rows // 32))
    return config if wide == config.wide_n else config._replace(wide_n=0, wide_warps=0)


def pack_panels(
    parts: Sequence[Part], device: torch.device | str = "cpu", config: LinearConfig | None = None
) -> PackedWeight:
    """The parts of one weight [N, K], whose codes and factors stay as they are, in layout 'planes'."""
    forms = tuple((part.n, *part.form.numbers()) for part in parts)
    rows, bits = sum(part.n for part in parts), max(part.form.low + part.form.high for part in parts)
    weight = panels.pack(parts, device)
    counters = torch.zeros(counters_of(rows), dtype=torch.int32, device=device)
    plain = PackedWeight("planes", bits, 0, rows, parts[0].k, weight, counters=counters, forms=forms)
    return replace(plain, config=config or _tiling(plain))


def kernel_views(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """(words, scales, zeros) as the kernels take a weight in layout 'planes'. What it lacks is a placeholder."""
    words = packed.weight
    if packed.forms:
        return words, words.view(torch.int16), words
    if packed.bits == 4:
        return words, words.view(torch.float16), words.view(torch.uint8)
    return words, words if packed.scales is None else packed.scales, words


def _to_tiles(plain: PackedWeight, reuse: bool) -> PackedWeight:
    """The layout of the CPU kernels. What code 0 stands for becomes mins, unless it follows from the scales.

    reuse: the tiles take the place of the codes, which are as long.
    """
    place = plain.weight if reuse and plain.weight.is_contiguous() else torch.empty_like(plain.weight)
    lead = plain.weight.shape[:-2]  # experts
    tiles = place.view(torch.uint8).view(*lead, plain.n // cpu.TILE, plain.k // cpu.BLOCK, 32 * plain.bits)
    rows = 4096  # at a time, so that an LM head takes little more than its place
    stored = plain.weight.flatten(0, -2)
    for part, out in zip(stored.split(rows), tiles.flatten(0, -3).split(rows // cpu.TILE), strict=True):
        cpu.put_codes(_codes(part, plain.bits), cpu.CODES, out.flatten(1), plain.bits)
    scales, mins = plain.scales.view(*lead, -1, plain.n), plain.mins
    if plain.zeros is not None:
        mins = -plain.zeros.float() * scales.float()
    mins = None if mins is None else cpu.tile_scales(mins)
    return replace(plain, layout="tiles", weight=tiles, scales=cpu.tile_scales(scales), zeros=None, mins=mins)


def pack_int4(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None = None, group_size: int = 128,
    perm: Tensor | None = None, dtype: torch.dtype = torch.float16, layout: str = "auto",
    config: LinearConfig | None = None, mins: Tensor | None = None, reuse: bool = False,
) -> PackedWeight:  # fmt: skip
    """Stored int4 -> what the active backend reads, for activations of `dtype`.

    qweight uint8 [..., N, K/2]; scales [..., K/G, N]; zeros uint8 like scales, or None for 8. Leading
    dimensions are experts. mins float16 like scales, instead of zeros and not for experts: weight = q * scale
    + min. perm int [K] (desc_act): column j of the stored matrix multiplies x[..., perm[j]]. config: the
    tiling, by default a measured one of the active backend or `linear_config`.

    layout 'auto' is 'planes' on Triton. On a CPU it is torch's int4pack for bfloat16, otherwise the matrix is
    dequantized once, which is fastest there and takes N K values of memory. reuse: qweight is not needed any
    more, so that tiles for the CPU kernels may be written over it.

    Raises ValueError for a group size other than 32, 64, 128 or one that does not divide K, and for scales of
    another shape.
    """
    n = qweight.shape[-2]
    k = 2 * qweight.shape[-1]
    if group_size not in (32, 64, 128) or k % group_size:
        raise ValueError(f"int4: group size {group_size} does not fit K = {k}. Use a divisor: 32, 64 or 128.")
    if scales.shape != (*qweight.shape[:-2], k // group_size, n):
        raise ValueError(f"int4: scales {tuple(scales.shape)} do not match a [{n}, {k}] weight, want [K/G, N]")
    plain = PackedWeight("plain", 4, group_size, n, k, qweight, scales, zeros, mins, perm)
    return _pack(plain, dtype, layout, config, reuse)


def pack_int8(
    qweight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float16, layout: str = "auto",
    config: LinearConfig | None = None, reuse: bool = False,
) -> PackedWeight:  # fmt: skip
    """Stored int8 [..., N, K] with scales [..., N] -> what the active backend reads, as `pack_int4` does it.
    On a CPU bfloat16 keeps int8 (torch's int8pack), other dtypes are dequantized once. Scales [..., K/G, N] belong to
    groups of G columns. The CPU kernels and Triton keep such a weight in int8, elsewhere it is dequantized once.
    ValueError for scales of another shape."""
    n, k = qweight.shape[-2:]
    grouped = qweight.dim() == scales.dim()
    groups = scales.shape[-2] if grouped else 1
    wanted = (*qweight.shape[:-2], groups, n) if grouped else qweight.shape[:-1]
    if scales.shape != wanted or k % groups:
        raise ValueError(f"int8: scales {tuple(scales.shape)} do not match the weight {tuple(qweight.shape)}")
    plain = PackedWeight("plain", 8, k // groups if grouped else 0, n, k, qweight, scales)
    return _pack(plain, dtype, layout, config, reuse)


def pack_float(weight: Tensor) -> PackedWeight | None:
    """A float weight [..., N, K] for the kernels of the active backend, its values unchanged. None if none takes it.

    Triton reads a 16-bit weight where it lies. The CPU kernels take a float32 weight in tiles, of which the last has rows
    of zeros where N does not divide, in 16 bits if those hold all of its values exactly.
    """
    weight = weight.detach()
    if weight.dtype in (torch.float16, torch.bfloat16) and use_triton("packed_linear", weight):
        return pack_half(weight, "planes")
    return _float_tiles(weight) if use_cpu("packed_linear", weight) else None


def _float_tiles(weight: Tensor) -> PackedWeight:
    n, k = weight.shape[-2:]
    stored = next((t for t in (weight.bfloat16(), weight.half()) if torch.equal(t.float(), weight)), weight)
    tiles = F.pad(stored, (0, 0, 0, -n % cpu.TILE)).unflatten(-2, (-1, cpu.TILE)).mT.contiguous()
    return PackedWeight("tiles", 8 * tiles.itemsize, 0, n, k, tiles)


def packed_rows(weight: PackedWeight, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows ids [...] of a weight in layout 'tiles' or 'dense', of one in 16 bits, or of one with the types of a file,
    [..., K] in `dtype`."""
    if weight.forms:
        return panel_rows(ids, *weight.parts(), dtype)
    if weight.layout != "tiles":
        return weight.weight[ids].to(dtype)
    rows = torch.ops.eaglet_cpu.rows.default(ids.flatten(), weight.weight, weight.scales, weight.mins)
    return rows.view(*ids.shape, weight.k).to(dtype)


def _triton_rows(out, ids, tensors, numbers, dtype) -> None:
    weight = from_parts(tensors, numbers)
    panels.triton_rows(out.view(-1, weight.k), weight.weight, weight.forms, ids.reshape(-1).contiguous())


def _row_shapes(ids, tensors, numbers, dtype) -> Tensor:
    return tensors.weight.new_empty(*ids.shape, from_parts(tensors, numbers).k, dtype=dtype)


@operation("panel_rows", "packed_linear", _triton_rows, _row_shapes)
def panel_rows(ids: Tensor, tensors: PackedTensors, numbers: list[int], dtype: torch.dtype) -> Tensor:
    """`packed_rows` of a weight with the types of a file."""
    return dequantize(from_parts(tensors, numbers), dtype)[ids]


def pack_half(weight: Tensor, layout: str = "auto", config: LinearConfig | None = None) -> PackedWeight:
    """A 16-bit weight [..., N, K] for our kernel, or for torch's matmul where that is the backend."""
    return _pack(PackedWeight("plain", 16, 0, *weight.shape[-2:], weight), weight.dtype, layout, config)
