"""How a linear layer is cut into tiles: the default rule, and tilings measured on a GPU and kept in a file.

`python -m scripts.tune_kernels` measures and writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support import cache
from support.reader import refusal

# The most rows of x that one program multiplies.
TILE_M = 64
# Up to so many rows of x the programs of a launch share sums. With more rows there are programs enough, and each one
# makes all parts of its sums.
SPLIT_M = 256
# The most rows of x that one launch multiplies, and the widest chunk of a prompt. More rows are several launches.
SMALL_M = 2048


# Up to so many rows of x a launch has the narrow tiles of `LinearConfig`, and with more the wide ones.
FEW_ROWS = 8


class LinearConfig(NamedTuple):
    """The tiling of one layer shape on one GPU. Only `split_k` changes the order in which the products of a row are
    added, and it does not depend on the number of rows."""

    block_n: int = 128  # output columns of one program
    split_k: int = 1  # programs that share one sum
    warps: int = 4
    stages: int = 4
    # With 'float16' the products of a group of int4 are summed at twice the rate on GeForce, with codes divided by 16
    # against overflow. The groups are always added in float32.
    accumulate: str = "float32"
    # Output columns and warps of a program on more than FEW_ROWS rows; 0: those above.
    wide_n: int = 0
    wide_warps: int = 0

    def on(self, rows: int) -> LinearConfig:
        """The tiling of a launch on so many rows."""
        if rows <= FEW_ROWS or not self.wide_n:
            return self
        return self._replace(block_n=self.wide_n, warps=self.wide_warps)


# The most programs that share one sum by default.
MOST_SPLITS = 4


def linear_config(
    n: int, k: int, bits: int, multiprocessors: int = 82, capability: tuple[int, int] = (8, 6), geforce: bool = False
) -> LinearConfig:
    """The default tiling of a weight [n, k], from its shape and the GPU alone.

    A GeForce card since Ampere adds fp16 products in fp16, whatever the number of rows is, because all rows must be
    added up alike.

    It takes the tiling that lets the busiest multiprocessor end first, with at least four blocks of 128 k values
    for each program. Partial sums of 60 rows may be a quarter of the weight's bytes. A warp has 32 output columns.

    On Hopper measured tilings decide (`results/h200_linear_tilings.jsonl`): programs of two warps on few rows, up to
    seven of them on a multiprocessor, and of four warps on many. Fewer splits would be quicker for 60 rows
    and slower for 1 to 24.
    """
    blocks = -(-k // 128)
    if capability[0] == 9 and bits < 16:
        most = 7 * multiprocessors // -(-n // 64)
        split = max(s for s in (1, 2, 4, 8) if s == 1 or s <= most and blocks >= 4 * s)
        return LinearConfig(64, split, 2, 3, wide_n=128, wide_warps=4)
    even = n * k / multiprocessors

    def cost(config: LinearConfig) -> float:
        """Estimated time, as the number of weights that a multiprocessor can load in it."""
        programs = -(-(-(-n // config.block_n) * config.split_k) // multiprocessors)  # on the busiest one
        fit = resident(config, bits, capability)
        work = -(-blocks // config.split_k) * config.block_n * 128
        # What does not fit beside the others runs after them. Six warps load a multiprocessor's share of the memory's
        # rate. With more of them it may load 1.4 shares.
        rounds, rest = divmod(programs, fit)
        rounds = [fit] * rounds + [rest] * (rest > 0)
        seconds = max(even, sum(count * work / min(1.4, count * config.warps / 6) for count in rounds))
        if config.split_k > 1:  # The hand-over takes as long as loading 16 KB, and meanwhile little else is loaded.
            seconds += (16384 + 2 * partial_bytes(config, n, 60) / multiprocessors) * 8 / bits
        return seconds * (1.05 if config.block_n == 64 else 1)  # A narrow tile reads x more often.

    wide = [] if bits == 16 else [128]  # On Hopper four warps would use wgmma, which was not measured with 16 bits.
    splits = range(1, max(1, min(MOST_SPLITS, blocks // 4)) + 1)
    found = [
        LinearConfig(block, split, block // 32, stages)
        for split in splits
        for block in [*wide, 64]
        for stages in ([4, 3] if bits == 4 else [3])
    ]
    found = [config for config in found if 4 * partial_bytes(config, n, 60) <= n * k * bits / 8]
    best = min(found, key=cost)
    return best._replace(accumulate="float16") if geforce and bits == 4 and capability >= (8, 6) else best


def gpu_facts(properties: Any) -> tuple[int, tuple[int, int], bool]:
    """What `linear_config` asks about a GPU, from what torch knows of it."""
    return properties.multi_processor_count, (properties.major, properties.minor), "GeForce" in properties.name


def resident(config: LinearConfig, bits: int, capability: tuple[int, int]) -> int:
    """How many programs on 16 rows a multiprocessor runs at once, by its shared memory and its registers."""
    shared = 1024 * (228 if capability[0] in (9, 10) else 164 if capability == (8, 0) else 100)
    stage = 128 * (config.block_n * bits // 8 + 16 * 2)  # of the weight, and of x in 16 bits
    # Reductions take 0.5 KB and the driver takes 1 KB. A warp has up to 128 registers per thread.
    return max(1, min(shared // ((config.stages - 1) * stage + 1536), 16 // config.warps))


def partial_bytes(config: LinearConfig, n: int, tokens: int) -> int:
    """Bytes that splits add to a launch on `tokens` rows, written and read again. n counts gate and up rows."""
    return 2 * 4 * (config.split_k - 1) * n * tokens


def counters_of(n: int) -> int:
    """How many counters the launches of a weight of n rows need: of the tiles whose sums are shared, and of the heads
    that are turned behind them."""
    return SPLIT_M // 32 * -(-n // 16)


def shape_key(n: int, k: int, bits: int) -> str:
    """The name of a layer shape in `KernelBackend.configs` and in the file."""
    return f"{n}x{k} w{bits}"


def tuned_file() -> Path:
    """The file of measured tilings in the cache folder. It need not exist."""
    return cache.folder() / "tilings"


def read_tuned(gpu: str, path: Path | None = None) -> tuple[dict[str, LinearConfig], str]:
    """The tilings measured on `gpu`, by `shape_key`, and a note. If the file is damaged, there are no
    tilings and the note says why. Otherwise the note is empty."""
    try:
        gpus = _stored(path or tuned_file())
    except ValueError as error:
        return {}, f"{error} It is ignored. Run python -m scripts.tune_kernels again."
    return {key: LinearConfig(*row) for key, row in gpus.get(gpu, {}).items()}, ""


def write_tuned(gpu: str, configs: Mapping[str, LinearConfig], path: Path) -> None:
    """Add the tilings of one GPU to the file. Other GPUs and other shapes keep theirs. A damaged file is
    replaced. The file is written whole or not at all."""
    _, damaged = read_tuned(gpu, path)
    gpus = {} if damaged else _stored(path)
    gpus[gpu] = gpus.get(gpu, {}) | {key: list(config) for key, config in configs.items()}
    cache.store(path, b"", {"fields": LinearConfig._fields, "gpus": gpus})


def _stored(path: Path) -> dict[str, Any]:
    """GPU -> `shape_key` -> the fields of a tiling. Empty if there is no file. ValueError if it is damaged."""
    if not path.exists():
        return {}
    about = cache.read(path).about
    if about.get("fields") != list(LinearConfig._fields):
        raise refusal(path, "it is not a file of tilings of this version.")
    return about["gpus"]
