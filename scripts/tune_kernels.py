"""Times the tilings of the quantized linears of a model family on this GPU, and keeps the fastest for generate.py.

`python -m scripts.tune_kernels [--models NAME ...] [--seconds S]` times every layer shape at 1, 16 and 60 rows. Weights
rotate through buffers larger than the last-level cache, so every call reads DRAM. Calls are timed inside a CUDA graph.
Before that, the kernels are compiled side by side on all cores.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import kernels
from bench.random_models import SHAPES
from bench.steps import captured
from kernels.tuned import LinearConfig, gpu_facts, linear_config, read_tuned, tuned_file, write_tuned
from support.errors import UsageError, at_least, command_parser, run_parsed
from support.machine import seconds

ROWS = 1, 16, 60  # of x: plain decoding, a small tree and a large one
MODELS = ("llama-2-13b", "llama-2-70b", "llama-2-7b", "llama-3-8b", "mixtral-8x7b")
GROUP = 128
DEVICE = torch.device("cuda")


def layers(model: str) -> dict[str, tuple[int, int]]:
    """(out features, in features) of every linear of a model, its LM head included; of one expert where there are
    several."""
    c = SHAPES[model]
    queries, values = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    up, down = ("expert_up", "expert_down") if c.num_local_experts else ("gate_up", "down")
    return {
        "qkv": (queries + 2 * values, c.hidden_size),
        "o": (c.hidden_size, queries),
        up: (2 * c.intermediate_size, c.hidden_size),
        down: (c.hidden_size, c.intermediate_size),
        "lm_head": (c.vocab_size, c.hidden_size),
    }


@torch.no_grad()
def measure(calls: list[Callable[[], Tensor]], repeats: int) -> float:
    """Median seconds per call. The list holds the same call on different weight buffers.

    All calls are one graph. Raises RuntimeError for a call that cannot be captured.
    """
    replay = captured(lambda: [call() for call in calls], DEVICE)
    replay()  # the first replay uploads the graph
    return statistics.median(seconds(replay, DEVICE) for _ in range(repeats)) / len(calls)


def random_weight(bits: int, n: int, k: int, dtype: torch.dtype, config: LinearConfig) -> kernels.PackedWeight:
    """A weight [n, k] of random values in layout 'planes', with this tiling."""
    if bits == 8:
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=DEVICE)
        return kernels.pack_int8(codes, torch.rand(n, device=DEVICE), dtype, "planes", config)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(k // GROUP, n, device=DEVICE).half()
    return kernels.pack_int4(codes, scales, dtype=dtype, layout="planes", config=config)


def candidates(base: LinearConfig, k: int) -> list[LinearConfig]:
    """The default tiling first, then all others: splits of the sum with four blocks of 128 k values each, narrow and wide
    programs on few and on many rows, and stages."""
    splits = [split for split in (1, 2, 4, 8) if split == 1 or k >= 512 * split]
    tiles = (64, 2, 0, 0), (64, 2, 128, 4), (128, 4, 0, 0)
    others = [
        LinearConfig(block, split, warps, stages, base.accumulate, wide_n, wide_warps)
        for split, (block, warps, wide_n, wide_warps), stages in itertools.product(splits, tiles, (3, 4))
    ]
    return list(dict.fromkeys((base, *others)))


def compile_tiling(bits: int, gated: bool, dtype: torch.dtype, config: LinearConfig) -> None:
    """Run a small product with this tiling, so that Triton's cache has its kernels for weights of any size."""
    for rows in ROWS:
        x = torch.zeros(rows, 2048, dtype=dtype, device=DEVICE)
        with contextlib.suppress(*refused()):
            kernels.packed_linear(x, random_weight(bits, 512, 2048, dtype, config), gated=gated)


def refused() -> tuple[type[Exception], ...]:
    """What a tiling raises that a device cannot run. Triton's OutOfResources is not a RuntimeError."""
    return (RuntimeError, *((kernels.triton.runtime.errors.TritonError,) if kernels.triton is not None else ()))


def fastest(tilings: list[LinearConfig], time_of: Callable[[LinearConfig], float]) -> LinearConfig | None:
    """The fastest tiling, or None where all are refused. The default, the first one, stays unless another is 2 % faster.

    time_of raises RuntimeError or a Triton error for a tiling that the device cannot run.
    """
    seconds = {}
    for config in tilings:
        with contextlib.suppress(*refused()):
            seconds[config] = time_of(config)
    return min(seconds, key=lambda config: seconds[config] * (1 if config == tilings[0] else 1.02), default=None)


def tune_device(args: argparse.Namespace) -> None:
    """Time the tilings of every layer of --models on the first GPU, print the best and keep them in the file --tuned.

    Each shape is written as soon as it is known, the largest first. Shapes that the file holds are skipped, and none is
    begun after --seconds. Raises UsageError where there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UsageError("tilings are measured on a GPU, and there is no CUDA device here.")
    models, path, began = args.models, args.tuned, time.monotonic()
    dtype, properties = getattr(torch, args.dtype), torch.cuda.get_device_properties(DEVICE)
    gated = {layers(m)["gate_up"] for m in models if "gate_up" in layers(m)}

    def time_of(n: int, k: int, bits: int, config: LinearConfig) -> float:
        # so many are larger than the last-level cache, so that every call reads DRAM
        buffers, calls = min(64, max(2, 4 * properties.L2_cache_size // (n * k * bits // 8) + 1)), []
        for x in (torch.randn(m, k, device=DEVICE, dtype=dtype) for m in ROWS):
            for _ in range(buffers):
                packed = random_weight(bits, n, k, dtype, config)
                calls.append(partial(kernels.packed_linear, x, packed, gated=(n, k) in gated))
        return measure(calls, args.repeats)

    shapes = {(n, k, bits) for m in models for n, k in layers(m).values() for bits in (4, 8)}
    known = read_tuned(properties.name, path)[0]
    # Those of an int4 model come first: int4 layers and an int8 LM head.
    shapes = sorted(shapes, key=lambda s: ((s[2] == 4) == (s[0] < 30000), s[0] * s[1]), reverse=True)
    shapes = [shape for shape in shapes if kernels.shape_key(*shape) not in known]
    gpu = gpu_facts(properties)
    tilings = {(n, k, bits): candidates(linear_config(n, k, bits, *gpu), k) for n, k, bits in shapes}
    jobs = {(bits, (n, k) in gated, dtype, config) for (n, k, bits), found in tilings.items() for config in found}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_tiling, *job) for job in jobs]:
            done.result()
    for count, (shape, found) in enumerate(tilings.items()):
        if time.monotonic() - began > args.seconds:
            print(f"out of time: {len(shapes) - count} shapes keep their default tilings", flush=True)
            break
        if best := fastest(found, partial(time_of, *shape)):
            key = kernels.shape_key(*shape)
            print(json.dumps({"shape": key} | best._asdict()), flush=True)
            write_tuned(properties.name, {key: best}, path)
    print(f"the tilings of {properties.name} are in {path}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.tune_kernels", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    add("--repeats", type=at_least(1), default=25)
    add("--seconds", type=float, default=float("inf"), help="begin no shape later than this")
    add("--tuned", type=Path, default=tuned_file(), help="file that the tilings are added to")
    return run_parsed(parser, tune_device, argv)


if __name__ == "__main__":
    sys.exit(main())
