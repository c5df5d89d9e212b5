"""Matrices [N, K] that a directory holds as floats of 8 or 4 bits below common scales: FP8, NF4 and FP4.

FP8: X.weight in float8_e4m3fn, times X.weight_scale or X.weight_scale_inv: a number for the matrix, for each row or for
each block of it. bitsandbytes (NF4, FP4): X.weight uint8 holds two codes in a byte, the high half first, of the values
row after row. A code stands for an entry of the table X.weight.quant_map, times the largest value of its block in
X.weight.absmax. With double quantization these are codes, too: of a table of 256 values, times nested_absmax of their
block, plus an offset.

All of them are read as floats. The CPU and the Triton kernels keep 4 bits, in a table of numbers of 8 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import PackedWeight
from kernels.blocks import stack_blocks
from kernels.formats import Blocks, Format, Part
from model import Transformer
from support.reader import check, refusal
from weights.files import FLOATS, Entries, Entry, check_finite
from weights.gguf_types import FITS, kept_bytes, pack_kept
from weights.hf import row_order
from weights.stored import Packing, refuse_rotations, without_activations

# What a `quantization_config` says of FP8: its quant_method, and of some methods a key with the values that it may have.
FP8 = {"fp8": ("", ()), "fbgemm_fp8": ("", ()), "modelopt": ("quant_algo", ("FP8",))}
FP8 |= {"compressed-tensors": ("format", ("float-quantized", "naive-quantized"))}
FP8 |= {"auto-round": ("packing_format", ("auto_round:fp8_static",))}
NOTES = {  # by kind, and whether the kernels keep the bits
    ("mxfp4", False): "experts of {} became floats: only the CPU and the Triton kernels keep MXFP4.",
    (
        "fp8",
        False,
    ): "FP8 weights of {} became floats, off by up to 0.2 % of a weight in bfloat16, 0.03 % in float16 and 0 in "
    "float32; --quant int8 rounds them to 8 bits again. Activations are no FP8 here.",
    (
        "bitsandbytes",
        False,
    ): "4-bit weights of {} became floats: only the CPU and the Triton kernels keep them, without --tp.",
    (
        "bitsandbytes",
        True,
    ): "4-bit weights of {} stay in 4 bits. The kernels' table has numbers of 8 bits, so a weight is off by "
    "up to 0.4 % of the largest one of its block.",
}
STATE = {"shape": [int], "blocksize": int, "nested_blocksize?": int, "nested_offset?": float}


def kind_of(config: Any) -> str | None:
    """'fp8' or 'bitsandbytes' (of 4 bits) if that is what a `quantization_config` describes."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method == "bitsandbytes":
        return method if config.get("load_in_4bit") is True else None
    key, values = FP8.get(method, ("", ())) if isinstance(method, str) else ("", ())
    return "fp8" if method in FP8 and (not key or config.get(key) in values) else None


def float_entries(entries: Entries, config: Any, where: str) -> dict[str, Entry]:
    """The entries of a directory with floats [N, K] in float32 in the place of smaller ones and what belongs to them.

    config: the `quantization_config`. Raises ValueError in one line for tensors that are missing or do not fit.
    """
    scheme = {"weights?": ({"block_structure?": ([int], None)}, None)}
    known = {"weight_block_size?": ([int], None), "config_groups?": ({"*": scheme}, None)}
    check(config, known, where, "quantization_config")
    refuse_rotations(config, where)
    blocks = [(g.get("weights") or {}).get("block_structure") for g in (config.get("config_groups") or {}).values()]
    block = config.get("weight_block_size") or next(filter(None, blocks), None)
    found = without_activations(entries)
    for name, entry in entries.items():
        own = f"{name}."
        if entry.dtype == "F8_E4M3" and len(entry.shape) == 2:
            scale = found.pop(f"{name}_scale_inv", None) or found.pop(f"{name}_scale", None)
            sizes = _block_of(entry.shape, scale, block)
            if not sizes:
                has = (
                    f"{name}_scale has {list(scale.shape)} scales of {scale.dtype}"
                    if scale
                    else f"{name} has no scales"
                )
                raise refusal(where, f"{has}, which do not fit FP8 {list(entry.shape)}.", "Is a shard missing?")
            read = partial(_fp8, entry, scale, sizes)
            found[name] = entry._replace(dtype=torch.float32, read=read, part=None)
        elif matrix := coded(entries, name, where):
            found = {other: e for other, e in found.items() if not other.startswith(own)}
            found[name] = Entry(matrix.shape, torch.float32, entry.file, matrix.floats)
    return found


def _block_of(shape: tuple[int, ...], scale: Entry | None, block: list[int] | None) -> tuple[int, ...]:
    """The rows and columns of a matrix that share a scale, () if scales do not fit. block: that of the config."""
    if scale is None or scale.dtype not in FLOATS or len(scale.shape) > 2:
        return ()
    counts = (*scale.shape, 1, 1)[:2]
    if block and len(block) == 2 and min(block) > 0 and counts == tuple(map(_shares, shape, block)):
        return tuple(block)
    even = all(counts) and not any(size % count for size, count in zip(shape, counts, strict=True))
    return tuple(size // count for size, count in zip(shape, counts, strict=True)) if even else ()


def _shares(size: int, each: int) -> int:
    return -(-size // each)


def _fp8(weight: Entry, scale: Entry, sizes: tuple[int, ...]) -> Tensor:
    N, K = weight.shape
    factors = scale.read().float().reshape(_shares(N, sizes[0]), _shares(K, sizes[1]))
    columns = factors.repeat_interleave(sizes[1], 1)[:, :K]
    return weight.read().float() * columns.repeat_interleave(sizes[0], 0)[:N]


class Coded(NamedTuple):
    """A matrix of bitsandbytes. `parts` are its tensors by the last words of their names."""

    shape: tuple[int, ...]
    block: int  # values that share a scale, in the order of the rows
    nested: tuple[int, float]  # the same of scales that are codes, and what is added to them
    parts: Mapping[str, Entry]

    def codes(self) -> Tensor:
        """uint8 [N, K]"""
        data = self.parts["weight"].read().flatten()
        return torch.stack((data >> 4, data & 15), -1).view(self.shape)

    def table(self) -> Tensor:
        """float32 [16]"""
        return self.parts["quant_map"].read()

    def scales(self, each: int) -> Tensor:
        """float32 [N K / each], where `each` divides the values of a block."""
        scales = self.parts["absmax"].read()
        if "nested_absmax" in self.parts:
            size, offset = self.nested
            large = self.parts["nested_absmax"].read().repeat_interleave(size)[: len(scales)]
            scales = self.parts["nested_quant_map"].read()[scales.int()] * large + offset
        return scales.repeat_interleave(self.block // each)[: math.prod(self.shape) // each]

    def floats(self) -> Tensor:
        """float32 [N, K]"""
        return self.table()[self.codes().int()] * self.scales(1).view(self.shape)


def coded(entries: Entries, name: str, where: str) -> Coded | None:
    """The matrix of bitsandbytes with this name, or None. Raises ValueError in one line if its tensors do not fit."""
    state = next(
        (entries[key] for t in ("nf4", "fp4") if (key := f"{name}.quant_state.bitsandbytes__{t}") in entries), None
    )
    if state is None:
        return None
    try:
        facts = json.loads(bytes(state.read().tolist()))
    except (ValueError, TypeError) as error:
        raise refusal(where, f"the quant_state of {name} is no JSON.", "Damaged file?") from error
    facts = check(facts, STATE, where, f"the quant_state of {name}")
    shape, block, inner = tuple(facts["shape"]), facts["blocksize"], facts.get("nested_blocksize", 0)
    leaves = ["absmax", "quant_map"]
    leaves += ["nested_absmax", "nested_quant_map"] if f"{name}.nested_absmax" in entries else []
    parts = {leaf: entries[f"{name}.{leaf}"] for leaf in leaves if f"{name}.{leaf}" in entries} | {
        "weight": entries[name]
    }
    has = {leaf: (math.prod(part.shape), part.dtype) for leaf, part in parts.items()}
    double = "nested_absmax" in parts
    fits = len(shape) == 2 and min(shape) > 0 and block > 0 and (inner > 0 or not double)
    if fits:
        values, scales = math.prod(shape), _shares(math.prod(shape), block)
        wanted = {"weight": (values // 2, torch.uint8), "quant_map": (16, torch.float32)}
        wanted["absmax"] = scales, torch.uint8 if double else torch.float32
        if double:
            wanted |= {
                "nested_absmax": (_shares(scales, inner), torch.float32),
                "nested_quant_map": (256, torch.float32),
            }
        fits = values % 2 == 0 and has == wanted
    if not fits:
        raise refusal(
            where, f"the tensors of {name} do not fit its quant_state {str(facts):.200}.", "Is a shard missing?"
        )
    return Coded(shape, block, (inner, float(facts.get("nested_offset", 0))), parts)


def kept(entries: Entries, layout: str, where: str) -> dict[str, Tensor]:
    """What a layout keeps of matrices of bitsandbytes, without values, for the plan of the memory."""
    found = {}
    for name in entries:
        if (matrix := coded(entries, name, where)) and _fits(matrix, layout):
            for leaf, size in kept_bytes("IQ4_NL", *matrix.shape, layout).items():  # of the same size
                found[f"{name}.{leaf}"] = torch.empty(size, dtype=torch.uint8, device="meta")
    return found


def _fits(matrix: Coded, layout: str) -> bool:
    return matrix.block % 32 == 0 and FITS[layout]([matrix.shape], [Format(4)])


def packing(model: Transformer, entries: Entries, layout: str, where: str, device: torch.device | str) -> Packing:
    """What keeps matrices of bitsandbytes in a layout: "tiles" of the CPU kernels, or "panels" of Triton's."""

    def rows(matrix: Coded, name: str, unit: int) -> tuple[Tensor, Tensor]:
        """Codes and scales in our order of rows."""
        N, K = matrix.shape
        scales = (matrix.scales(32) / unit).view(N, K // 32).half()
        check_finite(scales, name, where)
        order = row_order(name, N, model.config) if "attn." in name else None
        order = slice(None) if order is None else order
        return matrix.codes()[order], scales[order]

    def packed(ours: str, names: list[str], slot: Tensor) -> PackedWeight | None:
        matrices = [coded(entries, name, where) for name in names]
        if not all(matrix and _fits(matrix, layout) and matrix.shape[1] == slot.shape[-1] for matrix in matrices):
            return None
        tables = [matrix.table() for matrix in matrices]
        if any(not torch.equal(table, tables[0]) for table in tables):
            return None
        form, unit = _form(tables[0])
        each = len(names) // (len(slot) if slot.dim() == 3 else 1)
        found = []
        for first in range(0, len(names), each):
            some = [rows(m, n, unit) for m, n in zip(matrices[first:][:each], names[first:][:each], strict=True)]
            codes, scales = (torch.cat(tensors) for tensors in zip(*some, strict=True))
            found.append(pack_kept([Part(form, *codes.shape, [Blocks(codes, scales)])], layout, device))
        return stack_blocks(found) if slot.dim() == 3 else found[0]

    return packed


def _form(table: Tensor) -> tuple[Format, int]:
    """A table of values from -1 to 1 in numbers of 8 bits, and what 1 becomes: the one with the least error."""
    units = torch.arange(64, 128)
    numbers = (table * units[:, None]).round()
    best = (numbers / units[:, None] - table).abs().amax(1).argmin()
    return Format(4, offset=128, table=tuple((numbers[best] + 128).int().tolist())), int(units[best])
