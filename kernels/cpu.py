"""The CPU backend: C++ kernels that are built once for this machine, and the layout of their weights.

They are in cpu_linear.cpp, cpu_attention.cpp, cpu.cpp (whole decoder layers), cpu_step.cpp (the small work of a step),
cpu_draft.cpp (draft trees), cpu_delta.cpp (recurrent layers) and cpu_pack.cpp (codes from a file's rows to tiles).

For int4 and int8 weights a row of activations is rounded to int8 with one scale per 32 columns, and products are summed
as integers, or (--activations float) the row stays as it is. The bits of a row's result depend neither on the other rows
nor on their number.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.records import header
from support import native

FILES = "cpu.cpp cpu_linear.cpp cpu_attention.cpp cpu_delta.cpp cpu_draft.cpp cpu_pack.cpp cpu_step.cpp"
SOURCES = [Path(__file__).with_name(name) for name in f"{FILES} cpu.h pairs.h registers.h team.h".split()]
BLOCK, TILE = 32, 8  # columns that share a scale of the activations; output rows of a tile. As in cpu.h
NEEDED = ("avx2", "fma", "f16c")


@functools.cache
def problem() -> str:
    """Why the kernels cannot run in this process, or "". The first call loads them and builds them where needed."""
    try:
        torch.ops.load_library(str(native.build(SOURCES, NEEDED, header())))
    except (ValueError, OSError) as error:
        return " ".join(str(error).split())[:300]
    return ""


def multiplies_bfloat16(head_dim: int) -> bool:
    """Whether attention over a bfloat16 cache multiplies bfloat16 here, with sums in float32, instead of floats."""
    return head_dim % 32 == 0 and not problem() and torch.ops.eaglet_cpu.pair_products.default()


def seconds_alone() -> float:
    """For how long threads have worked alone so far, because others only held them up (kernels/team.h)."""
    return 0.0 if problem() else torch.ops.eaglet_cpu.seconds_alone.default()


def fits(n: int, k: int, group_size: int) -> bool:
    """Whether a weight [n, k] can be packed: whole tiles, and groups of whole blocks. group_size 0: one per row."""
    return n % TILE == 0 and k % BLOCK == 0 and group_size % BLOCK == 0


class Place(NamedTuple):
    """Where a block of a file has some bits of its codes. A run of bytes holds the lowest bits of its first columns, then
    higher bits of the next ones."""

    at: int = 0  # the first byte
    bits: int = 0  # 0 for none
    run: int = 1  # bytes


class Source(NamedTuple):
    """Where the codes of a file's rows are, which consist of blocks."""

    values: int  # of a block, a multiple of 32 and at most 256
    size: int  # bytes of a block
    low: Place
    high: Place = Place()  # the bits above those of `low`
    turned: int = 0  # bits of a code that are the other way round


CODES = Source(32, 32, Place(0, 8, 32))  # rows of bytes that are the codes


def put_codes(rows: Tensor, source: Source, out: Tensor, low: int, high: int = 0) -> None:
    """Write the codes of rows [N, bytes] uint8 into contiguous tiles out [N / 8, bytes of a tile] uint8.

    low, high: bits of a code in the two kinds of runs that `kernels.blocks` describes. Raises ValueError where the
    kernels cannot run.
    """
    if problem():
        raise ValueError(f"no tiles without the C++ kernels, because {problem()}. Use --kernels reference.")
    numbers = [source.values, source.size, *source.low, *source.high, source.turned]
    torch.ops.eaglet_cpu.put_codes.default(rows, out, numbers, low, high)


def tile_scales(scales: Tensor) -> Tensor:
    """scales [..., groups, N] -> [..., N / 8, groups, 8]."""
    return scales.unflatten(-1, (-1, TILE)).transpose(-3, -2).contiguous()
