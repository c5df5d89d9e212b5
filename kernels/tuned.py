"""How a linear layer is cut into tiles: the default rule, and tilings measured on a GPU and kept in a file.

`python -m scripts.bench_kernels --tune` measures and writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support import cache
from support.files import read_json, write_text
from support.reader import check, refusal

# The most rows of x that one program multiplies.
TILE_M = 64
# The most rows of x that one launch multiplies, and the widest prefill chunk. For more rows the weight is
# written out in 16 bits and multiplied by cuBLAS. The number is an estimate for an RTX 3090. Writing out an
# int4 weight moves 2.5 bytes, which takes 3.1 ps. The product then takes 2 M / 71e12 s per weight, over the
# share of the matrix rate that is reached: perhaps 60 % in our kernel and 85 % in cuBLAS. Both ways take the
# same time near M = 220. On an H100 our kernel is ahead for longer. scripts.bench_kernels times both ways.
SMALL_M = 256


class LinearConfig(NamedTuple):
    """The tiling of one layer shape on one GPU. No field depends on the number of rows M, and only `split_k`
    changes the order in which the products of a row are added."""

    block_n: int = 128  # output columns of one program
    split_k: int = 1  # programs that share one sum
    warps: int = 4
    stages: int = 4
    # With 'float16' the products of a group are summed at twice the rate on GeForce. The groups are always
    # added in float32.
    accumulate: str = "float32"


# Values that each field of a `LinearConfig` may have in the file.
ALLOWED = ((16, 32, 64, 128, 256), range(1, 65), (1, 2, 4, 8), range(1, 9), ("float32", "float16"))


def linear_config(n: int, k: int, bits: int, multiprocessors: int = 82) -> LinearConfig:
    """The default tiling of a weight [n, k], from its shape and the GPU's number of multiprocessors alone.

    Every multiprocessor runs two programs at a time. split_k fills such waves of programs best, with at least
    four blocks of 128 k values for each program. Among equals the smallest split_k wins.
    """
    block_n = 128 if bits < 16 and n >= 4096 else 64
    tiles = -(-n // block_n)
    slots = 2 * multiprocessors

    def used_share(split: int) -> float:
        waves = -(-tiles * split // slots)
        return round(tiles * split / (waves * slots), 2)

    most = max(1, min(16, -(-k // 512)))
    split_k = max(range(1, most + 1), key=lambda split: (used_share(split), -split))
    return LinearConfig(block_n, split_k, stages=4 if bits == 4 else 3)


def shape_key(n: int, k: int, bits: int) -> str:
    """The name of a layer shape in `KernelBackend.configs` and in the file."""
    return f"{n}x{k} w{bits}"


def tuned_file() -> Path:
    """The file of measured tilings in the cache folder. It need not exist."""
    return cache.folder() / "kernels.json"


def read_tuned(gpu: str, path: Path | None = None) -> tuple[dict[str, LinearConfig], str]:
    """The tilings measured on `gpu`, by `shape_key`, and a note. If the file is malformed, there are no
    tilings and the note says why. Otherwise the note is empty."""
    path = path or tuned_file()
    try:
        return {key: _tiling(key, row) for key, row in _stored(path).get(gpu, {}).items()}, ""
    except ValueError as error:
        return {}, f"{error} It is ignored. Run python -m scripts.bench_kernels --tune again."


def write_tuned(gpu: str, configs: Mapping[str, LinearConfig], path: Path | None = None) -> None:
    """Add the tilings of one GPU to the file. Other GPUs and other shapes keep theirs. A malformed file is
    replaced. The file is written whole or not at all."""
    path = path or tuned_file()
    known, note = read_tuned(gpu, path)
    gpus = {} if note else _stored(path)
    gpus[gpu] = {key: list(config) for key, config in (known | dict(configs)).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"version": 1, "gpus": gpus}, indent=1) + "\n")


def _stored(path: Path) -> dict[str, Any]:
    """GPU -> `shape_key` -> the fields of a tiling, not checked. Empty if there is no file. ValueError if it
    is not ours."""
    if not path.exists():
        return {}
    read = check(read_json(path), {"version": int, "gpus": {"*": {"*": list}}}, path, "the file of tilings")
    if read["version"] != 1:
        raise refusal(path, "it is not a version 1 file of tilings.")
    return read["gpus"]


def _tiling(key: str, row: list[Any]) -> LinearConfig:
    fits = len(row) == len(ALLOWED) and all(x in allowed for x, allowed in zip(row, ALLOWED, strict=True))
    if not fits or any(isinstance(x, bool | float) for x in row):
        raise refusal(key, f"{row!r:.80} is not a tiling.")
    return LinearConfig(*row)
