"""Matrices [N, K] that a directory holds as floats of 8 or 4 bits below common scales: FP8, NF4, FP4, MXFP4 and NVFP4.

FP8: X.weight in float8_e4m3fn, times X.weight_scale or X.weight_scale_inv: a number for the matrix, for each row or for
each block of it. bitsandbytes (NF4, FP4): X.weight uint8 holds two codes in a byte, the high half first, of the values
row after row. A code stands for an entry of the table X.weight.quant_map, times the largest value of its block in
X.weight.absmax. With double quantization these are codes, too: of a table of 256 values, times nested_absmax of their
block, plus an offset.

MXFP4: gpt-oss stores a tensor X of a layer's experts as X_blocks [E, out, in / 32, 16] uint8, where the low half of a
byte comes first, and X_scales [E, out, in / 32] uint8, the exponents of powers of two plus 127.

NVFP4: two codes in a byte, the low half first, below a scale of every 16 columns in float8_e4m3fn. compressed-tensors
has X.weight_packed [N, K / 2], X.weight_scale [N, K / 16] and X.weight_global_scale, by which scales are divided. Those
of modelopt are X.weight, X.weight_scale and the factor X.weight_scale_2. compressed-tensors also has MXFP4, with scales
[N, K / 32] uint8.

All of them are read as floats. The CPU and the Triton kernels keep 4 bits: those of MXFP4 and NVFP4 as they are, the
others in a table of numbers of 8 bits. What a file wants of activations is left aside.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import PackedWeight
from kernels.formats import Blocks, Format, Part
from model import Transformer
from support.files import read_json
from support.reader import check, refusal
from weights.files import FLOATS, Entries, Entry, check_finite
from weights.gguf_types import FITS, FORMATS, kept_slot, nvfp4, pack_kept, powers
from weights.hf import row_order, split_pairs
from weights.stored import Packing, refuse_rotations, without_activations

# What these writers call weights of 4 bits, of which none is an integer.
FP4 = {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "NVFP4", "W4A16_NVFP4"}
MIXED = {"mixed-precision", "MIXED_PRECISION"}  # of these and FP8
# A quant_method with FP8, and a key of the same `quantization_config` with the values that mean FP8.
FP8 = {
    "fp8": ("quant_method", ("fp8",)),
    "fbgemm_fp8": ("quant_method", ("fbgemm_fp8",)),
    "modelopt": ("quant_algo", ("FP8",)),
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized")),
}
NOTES = {  # by kind, where weights became floats, and where the kernels keep their bits
    "mxfp4": ("experts of {} became floats: only the CPU and the Triton kernels keep MXFP4.", ""),
    "fp8": (
        "FP8 weights of {} became floats of --dtype, each rounded once (in bfloat16 by up to 0.2 %), and no activation "
        "is FP8; --quant int8 makes them 8 bits again.",
        "",
    ),
    "fp4": (
        "4-bit weights of {} became floats: only the CPU and the Triton kernels keep them, without --tp.",
        "4-bit weights of {} keep their bits. Activations are not rounded to 4 bits, whatever the file asks for.",
    ),
    "bitsandbytes": (
        "4-bit weights of {} became floats: only the CPU and the Triton kernels keep them, without --tp.",
        "4-bit weights of {} keep their bits; the kernels' table of 8-bit numbers moves a weight by up to 0.4 % of the "
        "largest one in its block.",
    ),
}
FACTOR = [[(torch.float32, ())], [(torch.float32, (1,))]]  # of NVFP4: one number
MXFP4, PACKED, SCALE = FORMATS["MXFP4"], ".weight_packed", ".weight_scale"
STATE = {"shape": [int], "blocksize": int, "nested_blocksize?": int, "nested_offset?": float}


def kind_of(raw: dict[str, Any]) -> str | None:
    """'mxfp4', 'fp4', 'fp8' or 'bitsandbytes' (of 4 bits) if a config.json has such a `quantization_config`."""
    config = raw["quantization_config"]
    method = str(config.get("quant_method")) if isinstance(config, dict) else ""
    if (method, raw.get("model_type")) == ("mxfp4", "gpt_oss"):
        return method
    if method == "bitsandbytes" and config.get("load_in_4bit") is True:
        return method
    if method in ("compressed-tensors", "modelopt") and (found := _formats(config)) & FP4:
        return "fp4" if found <= FP4 | MIXED | {*FP8["compressed-tensors"][1], "FP8"} else None
    return "fp8" if method in FP8 and config.get(FP8[method][0]) in FP8[method][1] else None


def with_own_file(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A config.json with the `quantization_config` that earlier versions of modelopt have in a file of their own."""
    file = directory / "hf_quant_config.json"
    if raw.get("quantization_config") or not file.is_file():
        return raw
    own = check(read_json(file), {"quantization": {"quant_algo?": (str, None)}}, file, "the file")["quantization"]
    return raw | {"quantization_config": own | {"quant_method": "modelopt"}} if own.get("quant_algo") else raw


def _formats(config: dict[str, Any]) -> set[str]:
    """What a `quantization_config` calls the formats of its matrices."""
    groups = [config.get(key) for key in ("config_groups", "quantized_layers")]
    parts = [config, *(part for group in groups if isinstance(group, dict) for part in group.values())]
    names = (part.get(key) for part in parts if isinstance(part, dict) for key in ("format", "quant_algo"))
    return {name for name in names if isinstance(name, str)}


def float_entries(entries: Entries, config: Any, where: str) -> dict[str, Entry]:
    """The entries of a directory with floats in the place of smaller ones and what belongs to them: [N, K] in float32,
    of MXFP4 [E, in, out] in bfloat16, which holds the values exactly.

    config: the `quantization_config`. Raises ValueError in one line for tensors that are missing or do not fit.
    """
    group = {"weights?": ({"block_structure?": ([int], None)}, None)}
    known = {"weight_block_size?": ([int], None), "config_groups?": ({"*": group}, None)}
    check(config, known, where, "quantization_config")
    refuse_rotations(config, where)
    groups = (config.get("config_groups") or {}).values()
    blocks = [config.get("weight_block_size"), *((g.get("weights") or {}).get("block_structure") for g in groups)]
    block = next(filter(None, blocks), None)
    found = without_activations(entries)
    for name, entry in entries.items():
        if (matrix := scaled(entries, name, where)) or (matrix := coded(entries, name, where)):
            for part in matrix.parts:
                del found[part]
            found[name.replace(PACKED, ".weight")] = Entry(matrix.shape, torch.float32, entry.file, matrix.floats)
        elif entry.dtype == "F8_E4M3" and len(entry.shape) == 2 and not name.endswith(SCALE):
            scale = found.pop(f"{name}_scale_inv", None) or found.pop(f"{name}_scale", None)
            counts = (*scale.shape, 1, 1)[:2] if scale else ()
            sizes = block or [_shares(size, max(count, 1)) for size, count in zip(entry.shape, counts, strict=False)]
            fits = len(sizes) == 2 and min(sizes) > 0 and counts == tuple(map(_shares, entry.shape, sizes))
            if not fits or scale.dtype not in FLOATS:
                has = f"{scale.dtype} {list(scale.shape)}" if scale else "missing"
                raise refusal(where, f"the scale of {name} is {has}, which does not fit FP8 {list(entry.shape)}.")
            read = partial(_fp8, entry, scale, sizes)
            found[name] = entry._replace(dtype=torch.float32, read=read)
        elif name.endswith("_blocks"):
            base, shape = name.removesuffix("_blocks"), entry.shape
            scale = found.pop(f"{base}_scales", None)
            kinds = {part.dtype for part in (entry, scale) if part}
            if not scale or kinds != {torch.uint8} or len(shape) != 4 or (*scale.shape, 16) != shape:
                raise ValueError(
                    f"{entry.file}: {base} is no matrix in MXFP4, or its scales are missing or do not fit."
                )
            del found[name]
            read = partial(_mxfp4, entry, scale)
            found[base] = Entry((shape[0], 32 * shape[2], shape[1]), torch.bfloat16, entry.file, read)
    return found


def _shares(size: int, each: int) -> int:
    return -(-size // each)


def _fp8(weight: Entry, scale: Entry, sizes: list[int]) -> Tensor:
    N, K = weight.shape
    factors = scale.read().float().reshape(-1, _shares(K, sizes[1])).repeat_interleave(sizes[1], 1)[:, :K]
    return weight.read().float() * factors.repeat_interleave(sizes[0], 0)[:N]


def _low_first(data: Tensor) -> Tensor:
    """The codes of bytes [..., n] that hold two each: uint8 [..., 2 n]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _expert(codes: Tensor, exponents: Tensor) -> Blocks:
    """A matrix [out, in] in MXFP4."""
    codes = _low_first(codes).flatten(-2)
    return Blocks(codes, powers(exponents, codes))


def _mxfp4(blocks: Entry, scales: Entry) -> Tensor:
    experts = zip(blocks.read(), scales.read(), strict=True)  # one at a time, because codes take memory
    return torch.stack([_expert(*expert).floats(MXFP4).to(torch.bfloat16) for expert in experts]).mT


class Coded(NamedTuple):
    """A matrix of bitsandbytes. `parts` are its tensors, by their names, which begin with its own."""

    name: str
    shape: tuple[int, ...]
    block: int  # values that share a scale, in the order of the rows
    inner: int  # scales that share a scale
    offset: float  # of such scales
    parts: Mapping[str, Entry]

    def read(self, leaf: str) -> Tensor:
        return self.parts[self.name + leaf].read().flatten()

    def codes(self) -> Tensor:
        """uint8 [N, K]"""
        data = self.read("")
        return torch.stack((data >> 4, data & 15), -1).view(self.shape)

    def scales(self, each: int) -> Tensor:
        """float32 [N, K / each]: of every so many columns, which belong to one block."""
        scales = self.read(".absmax")
        if f"{self.name}.nested_absmax" in self.parts:
            large = self.read(".nested_absmax").repeat_interleave(self.inner)[: len(scales)]
            scales = self.read(".nested_quant_map")[scales.int()] * large + self.offset
        return scales.repeat_interleave(self.block // each)[: math.prod(self.shape) // each].view(self.shape[0], -1)

    def floats(self) -> Tensor:
        """float32 [N, K]"""
        return self.read(".quant_map")[self.codes().int()] * self.scales(1)

    @property
    def form(self) -> Format | None:
        """The format in which kernels keep it, None if they cannot."""
        table = self.read(".quant_map")
        return _form(table)[0] if self.block % 32 == 0 and (table.abs() <= 1).all() else None

    def blocks(self) -> Blocks:
        """All of it in this format."""
        return Blocks(self.codes(), (self.scales(32) / _form(self.read(".quant_map"))[1]).half())


class Scaled(NamedTuple):
    """A matrix of compressed-tensors or modelopt in NVFP4, or in MXFP4 if it has no factor. `parts` are its tensors: the
    codes, the scales, and what all scales are multiplied with, or are divided by where `divides` says so."""

    shape: tuple[int, int]
    parts: Mapping[str, Entry]
    divides: bool

    @property
    def own(self) -> Format:
        """The format that it has."""
        return nvfp4(self.shape[1]) if len(self.parts) == 3 else MXFP4

    @property
    def form(self) -> Format | None:
        """The same if kernels can keep it, else None."""
        return None if self.shape[1] % 32 else self.own

    def blocks(self) -> Blocks:
        """All of it in this format. Raises ValueError for scales that are damaged."""
        (name, data), scale, *factor = self.parts.items()
        data, small = data.read(), scale[1].read().view(torch.uint8)
        if not factor:
            return _expert(data.unflatten(1, (-1, 16)), small)
        number = factor[0][1].read().float().reshape(1, 1)
        large = 128 * (1 / number if self.divides else number)  # 256 for the scales, 1 / 2 for the codes
        if not large.isfinite() or large <= 0 or (small >= 0x7F).any():
            raise ValueError(f"{scale[1].file}: the scales of {name} are not all positive numbers: damaged?")
        return Blocks(_low_first(data), large.expand(len(data), 1).contiguous(), None, small)

    def floats(self) -> Tensor:
        """float32 [N, K]"""
        return self.blocks().floats(self.own)


def scaled(entries: Entries, name: str, where: str) -> Scaled | None:
    """The matrix in NVFP4 or MXFP4 whose codes this tensor or its `weight_packed` holds, or None. Raises ValueError in
    one line if the others do not fit."""
    base = name.removesuffix("_packed")
    packed = f"{base}_packed" in entries
    codes, scale = entries.get(f"{base}_packed" if packed else base), entries.get(f"{base}_scale")
    if not codes or codes.dtype != torch.uint8 or len(codes.shape) != 2 or not (packed or scale):
        return None
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    mx = packed and scale is not None and scale.dtype == torch.uint8
    names = ["_packed" if packed else "", "_scale", *([] if mx else ["_global_scale" if packed else "_scale_2"])]
    parts = {base + leaf: entries[base + leaf] for leaf in names if base + leaf in entries}
    grid = (torch.uint8, (rows, columns // 32)) if mx else ("F8_E4M3", (rows, columns // 16))
    found = [(part.dtype, part.shape) for part in parts.values()][1:]
    if found[:1] != [grid] or columns % (32 if mx else 16) or found[1:] not in ([[]] if mx else FACTOR):
        has = ", ".join(f"{dtype} {list(shape)}".removeprefix("torch.") for dtype, shape in found) or "missing"
        raise refusal(where, f"the scales of {base} are {has:.80}, which fit no NVFP4 or MXFP4 [{rows}, {columns}].")
    return Scaled((rows, columns), parts, packed)


def coded(entries: Entries, name: str, where: str) -> Coded | None:
    """The matrix of bitsandbytes with this name, or None. Raises ValueError in one line if its tensors do not fit."""
    states = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    state = next((state for state in states if state in entries), None)
    if state is None:
        return None
    try:
        facts = json.loads(bytes(entries[state].read().tolist()))
    except (ValueError, TypeError) as error:
        raise refusal(where, f"the quant_state of {name} is no JSON.", "Damaged file?") from error
    check(facts, STATE, where, f"the quant_state of {name}")
    shape, block, inner = tuple(facts["shape"]), facts["blocksize"], facts.get("nested_blocksize", 1)
    values = math.prod(shape) if len(shape) == 2 and min(*shape, block, inner) > 0 else 0
    scales, double, single = _shares(values, max(block, 1)), f"{name}.nested_absmax" in entries, torch.float32
    wanted = {"": (values // 2, torch.uint8), ".quant_map": (16, single)}
    wanted[".absmax"] = scales, torch.uint8 if double else single
    if double:
        wanted |= {".nested_absmax": (_shares(scales, max(inner, 1)), single), ".nested_quant_map": (256, single)}
    parts = {name + leaf: entries[name + leaf] for leaf in wanted if name + leaf in entries}
    found = [(math.prod(part.shape), part.dtype) for part in parts.values()]
    if not values or values % 2 or found != [*wanted.values()]:
        raise refusal(where, f"the tensors of {name} do not fit its quant_state {str(facts):.99}.", "A shard missing?")
    parts[state] = entries[state]
    offset = float(facts.get("nested_offset", 0))
    return Coded(name, shape, min(block, values), min(inner, scales), offset, parts)


def _kept(entries: Entries, name: str, where: str, layout: str) -> tuple[Coded | Scaled | None, Format | None]:
    """The matrix with this name in 4 bits, and its format if the layout can hold it."""
    matrix = scaled(entries, name, where) or coded(entries, name, where)
    form = matrix and matrix.form
    return matrix, form if form and FITS[layout]([matrix.shape], [form]) else None


def kept(entries: Entries, layout: str, where: str) -> dict[str, Tensor]:
    """What a layout keeps of matrices in 4 bits, without values, for the plan of the memory."""
    found = {}
    for name, entry in entries.items():
        if name.endswith("_blocks"):
            E, rows, groups, _ = entry.shape
            found[name.removesuffix("_blocks")] = kept_slot("MXFP4", rows, 32 * groups, layout, E)
            continue
        matrix, form = _kept(entries, name, where, layout)
        if form:
            found[name.replace(PACKED, ".weight")] = kept_slot(form, *matrix.shape, layout)
    return found


def packing(model: Transformer, entries: Entries, layout: str, where: str, device: torch.device | str) -> Packing:
    """What keeps matrices in 4 bits in a layout: "tiles" of the CPU kernels, or "panels" of Triton's.

    entries: the directory's own.
    """

    def rows(name: str, matrix: Coded | Scaled) -> Blocks:
        """Codes and scales in our order of rows."""
        order, blocks = row_order(name, matrix.shape[0], model.config), matrix.blocks()
        check_finite(blocks.scales, name, where)
        if blocks.scales.dtype == torch.float32 and blocks.sub_scales is None:
            raise ValueError(f"{where}: the kernels cannot hold the scales of {name}. Use --kernels reference.")
        return blocks if order is None else Blocks(*(part if part is None else part[order] for part in blocks))

    def expert(name: str, codes: Tensor, exponents: Tensor) -> list[Part]:
        blocks = _expert(codes, exponents)
        if blocks.scales.dtype != torch.float16 or not FITS[layout]([blocks.codes.shape], [MXFP4]):
            raise ValueError(f"{name}: the kernels cannot hold its shape or scales. Use --kernels reference.")
        blocks = Blocks(*(split_pairs(t[None], f"{name}_bias")[0].contiguous() for t in blocks[:2]))
        return [Part(MXFP4, *blocks.codes.shape, [blocks])]

    def packed(ours: str, names: list[str], slot: Tensor) -> PackedWeight | None:
        if f"{names[0]}_blocks" in entries:
            stored = (entries[f"{names[0]}_{leaf}"].read() for leaf in ("blocks", "scales"))
            return pack_kept((expert(names[0], *one) for one in zip(*stored, strict=True)), True, layout, device)
        found = {name: _kept(entries, name, where, layout) for name in names}
        forms = {form for _, form in found.values()}
        if None in forms or len(forms) > 1:
            return None
        experts, form = slot.dim() == 3, forms.pop()
        each = len(names) // (len(slot) if experts else 1)

        def parts(first: int) -> list[Part]:
            pieces = [rows(name, found[name][0]) for name in names[first : first + each]]
            return [Part(form, sum(len(piece.codes) for piece in pieces), pieces[0].codes.shape[1], pieces)]

        return pack_kept(map(parts, range(0, len(names), each)), experts, layout, device)

    return packed


def _form(table: Tensor) -> tuple[Format, int]:
    """A table of values from -1 to 1 in numbers of 8 bits, and what 1 becomes: the one with the least error."""
    units = torch.arange(64, 128)
    numbers = (table * units[:, None]).round()
    best = (numbers / units[:, None] - table).abs().amax(1).argmin()
    return Format(4, offset=128, table=tuple((numbers[best] + 128).int().tolist())), int(units[best])
