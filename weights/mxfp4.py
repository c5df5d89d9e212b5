"""gpt-oss's experts in MXFP4: two 4-bit floats in a byte, and a power of two for each 32 of them.

A tensor X of a layer's experts is stored as X_blocks [E, out, in / 32, 16] uint8, where the low half of a byte comes
first, and X_scales [E, out, in / 32] uint8, the exponents plus 127. For the CPU and the Triton kernels both stay as they
are. Elsewhere they become floats, which hold the same values.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import PackedWeight
from kernels.formats import Blocks, Part
from model import Transformer
from weights.files import Entries, Entry
from weights.gguf_types import FITS, FORMATS, kept_tensor, pack_kept, powers
from weights.hf import split_pairs
from weights.stored import Packing

FORM = FORMATS["MXFP4"]


def _blocks(codes: Tensor, exponents: Tensor) -> Blocks:
    """An expert's matrix [out, in]: bytes [out, in / 32, 16] as codes, and exponents [out, in / 32] as scales."""
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-3)
    return Blocks(codes, powers(exponents, codes))


def _floats(blocks: Entry, scales: Entry) -> Tensor:
    """The values [E, in, out] in bfloat16, which holds them exactly."""
    experts = zip(blocks.read(), scales.read(), strict=True)  # one at a time, because codes take memory
    return torch.stack([_blocks(*expert).floats(FORM).to(torch.bfloat16) for expert in experts]).mT


def float_entries(entries: Entries, config: Any, where: str) -> dict[str, Entry]:
    """The entries of a directory with floats [E, in, out] in the place of blocks and scales.

    Raises ValueError in one line for blocks without their scales, and for those of another type.
    """
    found = {}
    for name, blocks in entries.items():
        base = name.removesuffix("_blocks")
        if base == name:
            if not name.endswith("_scales") or f"{name.removesuffix('_scales')}_blocks" not in entries:
                found[name] = blocks
            continue
        scales = entries.get(f"{base}_scales")
        if scales is None or blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[-1] != 16:
            raise ValueError(f"{blocks.file}: {name} is no matrix in MXFP4, or its scales are missing.")
        if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
            raise ValueError(f"{blocks.file}: {base}_scales {list(scales.shape)} does not fit {name}.")
        E, rows, groups, _ = blocks.shape
        read = partial(_floats, blocks, scales)
        found[base] = Entry((E, 32 * groups, rows), torch.bfloat16, blocks.file, read)
    return found


def kept(entries: Entries, layout: str, where: str) -> dict[str, Tensor]:
    """What a layout keeps of the blocks and scales in `entries`, without values, for the plan of the memory.

    layout: "tiles" of the CPU kernels, or "panels" of Triton's.
    """
    shapes = {name.removesuffix("_blocks"): e.shape for name, e in entries.items() if name.endswith("_blocks")}
    return {name: kept_tensor("MXFP4", N, 32 * groups, layout, E) for name, (E, N, groups, _) in shapes.items()}


def packing(model: Transformer, entries: Entries, layout: str, where: str, device: torch.device | str) -> Packing:
    """What keeps experts in a layout, with our order of rows. entries: the directory's own. layout: as of `kept`."""

    def packed(ours: str, names: list[str], slot: Tensor) -> PackedWeight | None:
        if slot.dim() != 3:
            return None
        name = names[0]

        def part(codes: Tensor, exponents: Tensor) -> Part:
            blocks = _blocks(codes, exponents)
            if blocks.scales.dtype != torch.float16 or not FITS[layout]([blocks.codes.shape], [FORM]):
                raise ValueError(f"{name}: the kernels cannot hold its shape or scales. Use --kernels reference.")
            ordered = Blocks(*(split_pairs(t[None], f"{name}_bias")[0].contiguous() for t in blocks[:2]))
            return Part(FORM, *ordered.codes.shape, [ordered])

        stored = (entries[name + leaf].read() for leaf in ("_blocks", "_scales"))
        return pack_kept(([part(*expert)] for expert in zip(*stored, strict=True)), True, layout, device)

    return packed
