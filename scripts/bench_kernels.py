"""Micro-benchmark of the small-M linears by layer shape: one JSON line per (model, layer, kernel, M).

`python -m scripts.bench_kernels [--models NAME ...] [--m 1 4 8 ...] [--kernels ...] [--json FILE]` measures GB/s of
weight bytes, the share of the copy bandwidth measured first on the same device, and the time over the M = 1 time.
Weights rotate through buffers larger than the last-level cache, so every call reads DRAM. Calls are timed inside a CUDA
graph where there is one. `--device cpu --quick` runs
the references on small shapes: it proves that the script runs, its times mean nothing for a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels
from bench.random_models import SHAPES
from bench.steps import captured, milliseconds
from kernels.tuned import LinearConfig, linear_config, read_tuned, tuned_file, write_tuned
from support.errors import command_parser, run_command
from support.files import append_json_lines
from support.machine import copy_bandwidth, synchronize

MODELS = ("llama-2-13b", "llama-2-70b", "llama-2-7b", "llama-3-8b", "mixtral-8x7b")
TOKENS = (1, 4, 8, 16, 24, 32, 48, 64, 104, 256)
# 'int4-dequant' runs what packed_linear runs above kernels.SMALL_M rows, at any number of rows. It shows where the two
# ways meet, so that the bound can be set there.
# 'int4-gated' is the gate-up layer as the model runs it: SiLU(first half) * second half in the same kernel. 'tinygemm' is
# PyTorch's own kernel, which gpt-fast uses for int4.
KERNELS = (
    "int4", "int8", "half", "int4-gated", "int4-dequant", "int8-dequant", "cublas", "tinygemm",
)  # fmt: skip
GROUP = 128


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
def measure(calls: list[Callable[[], Tensor]], device: torch.device, repeats: int) -> float:
    """Median seconds per call. The list holds the same call on different weight buffers.

    On CUDA all calls are one graph. Raises RuntimeError for a call that cannot be captured.
    """

    def run() -> None:
        for call in calls:
            call()

    replay = captured(run, device)
    replay()  # the first replay uploads the graph
    samples = [milliseconds(replay, partial(synchronize, device), device) for _ in range(repeats)]
    return statistics.median(samples) / 1e3 / len(calls)


def dequantized(x: Tensor, weight: kernels.PackedWeight) -> Tensor:
    """x @ W^T by way of the whole matrix in x's dtype. On CUDA that is our fused kernel and cuBLAS."""
    return x @ kernels.dequantize(weight, x.dtype, fused=weight.layout == "planes" and x.is_cuda).mT


def random_weight(
    kind: str, n: int, k: int, dtype: torch.dtype, device: torch.device, layout: str = "auto", config=None
) -> kernels.PackedWeight:
    """A packed weight [n, k] with random values. kind: int4, int8, half (our kernel) or cublas."""
    if kind == "int8":
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
        return kernels.pack_int8(codes, torch.rand(n, device=device), dtype, layout, config)
    if kind == "int4":
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        scales = torch.rand(k // GROUP, n, device=device).half()
        return kernels.pack_int4(codes, scales, dtype=dtype, layout=layout, config=config)
    weight = torch.randn(n, k, device=device, dtype=dtype)
    return kernels.pack_half(weight, "dense" if kind == "cublas" else layout)


def _tinygemm(n: int, k: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    weight = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(k // GROUP, n, 2, device=device, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, weight, GROUP, scales)


def weight_bytes(name: str, n: int, k: int, dtype: torch.dtype) -> int:
    """Bytes of weights that one call of a kernel reads."""
    if name in ("half", "cublas"):
        return n * k * dtype.itemsize
    if name.startswith("int8"):
        return n * k + 4 * n
    return n * k // 2 + (2 if name.startswith("int4") else 4) * (n * k // GROUP)


def rotating(size: int, device: torch.device) -> int:
    """How many buffers of `size` bytes are larger than the last-level cache, so that every call reads DRAM."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 16
    return min(64, max(2, 4 * cache // size + 1))


def make_kernel(
    name: str, n: int, k: int, dtype: torch.dtype, device: torch.device, buffers: int
) -> tuple[list[Callable[[Tensor], Tensor]], torch.dtype]:
    """Functions x [m, k] -> y [m, n] on `buffers` weights, and the dtype that x must have.

    Raises what torch raises where it has no kernel of the name tinygemm.
    """
    if name == "tinygemm":
        return [_tinygemm(n, k, device) for _ in range(buffers)], torch.bfloat16
    kind, _, form = name.partition("-")
    linears = {"": kernels.packed_linear, "gated": partial(kernels.packed_linear, gated=True), "dequant": dequantized}
    linear = linears[form]
    weights = [random_weight(kind, n, k, dtype, device) for _ in range(buffers)]
    return [lambda x, w=weight: linear(x, w) for weight in weights], dtype


def time_kernel(
    name: str, n: int, k: int, tokens: Sequence[int], dtype: torch.dtype, device: torch.device, repeats: int,
    bandwidth: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """What a kernel's lines say: one dictionary per number of rows in `tokens`, and `skipped` where it raised.

    bandwidth: of a copy, in bytes per second.
    """
    size = weight_bytes(name, n, k, dtype)
    lines: list[dict[str, Any]] = []
    first = None
    try:
        functions, takes = make_kernel(name, n, k, dtype, device, rotating(size, device))
        for m in tokens:
            x = torch.randn(m, k, device=device, dtype=takes)
            s = measure([partial(f, x) for f in functions], device, repeats)
            first = first or s
            lines.append({
                "m": m, "us": round(s * 1e6, 2), "gbs": round(size / s / 1e9, 1),
                "share_of_copy": round(size / s / bandwidth, 3), "over_first_m": round(s / first, 3),
            })  # fmt: skip
    except Exception as problem:  # whatever a kernel raises is its result
        lines.append({"skipped": f"{type(problem).__name__}: {problem}"[:300]})
    return lines


def candidates(base: LinearConfig, k: int) -> list[LinearConfig]:
    """The default tiling first, then its neighbours: split-K, rows per tile, warps and stages."""
    splits = {1, max(1, base.split_k // 2), base.split_k, min(2 * base.split_k, max(1, k // 256))}
    near = [base._replace(split_k=split, block_n=block) for split in sorted(splits) for block in (64, 128)]
    near += [base._replace(warps=warps) for warps in (2, 4, 8) if warps != base.warps]
    near += [base._replace(stages=base.stages + change) for change in (-1, 1)]
    return list(dict.fromkeys([base, *near]))


def tune(
    shapes: list[tuple[int, int, int]],
    time_of: Callable[[int, int, int, LinearConfig], float],
    default_of: Callable[[int, int, int], LinearConfig] = linear_config,
) -> dict[str, LinearConfig]:
    """The fastest tiling of every (n, k, bits). The default stays unless another is 2 % faster.

    time_of raises RuntimeError or a Triton error for a tiling that the device cannot run.
    """
    best: dict[str, LinearConfig] = {}
    refused: tuple[type[Exception], ...] = (RuntimeError,)
    if kernels.triton is not None:  # its OutOfResources is not a RuntimeError
        refused += (kernels.triton.runtime.errors.TritonError,)
    for n, k, bits in shapes:
        default, *others = candidates(default_of(n, k, bits), k)
        seconds = {}
        for config in (default, *others):
            with contextlib.suppress(*refused):
                seconds[config] = time_of(n, k, bits, config)
        if seconds:
            fastest = min(seconds, key=seconds.get)
            keep = seconds.get(default, math.inf) <= 1.02 * seconds[fastest]
            best[kernels.shape_key(n, k, bits)] = default if keep else fastest
    return best


def tune_device(
    models: Sequence[str], dtype: torch.dtype, device: torch.device, repeats: int, path: Path, seconds: float
) -> None:
    """Time the tilings of every layer of `models` on this GPU, print the best and keep them in the file `path`.

    Each shape is written as soon as it is known, the largest first. Shapes that the file holds are skipped, and none is
    begun after `seconds`.
    """
    began = time.monotonic()
    properties = torch.cuda.get_device_properties(device)
    gated = {layers(m)["gate_up"] for m in models if "gate_up" in layers(m)}

    def time_of(n: int, k: int, bits: int, config: kernels.LinearConfig) -> float:
        buffers, calls = rotating(n * k * bits // 8, device), []
        for x in (torch.randn(m, k, device=device, dtype=dtype) for m in (1, 16, 32)):
            for _ in range(buffers):
                packed = random_weight(f"int{bits}", n, k, dtype, device, "planes", config)
                calls.append(partial(kernels.packed_linear, x, packed, gated=(n, k) in gated))
        return measure(calls, device, repeats)

    shapes = {(n, k, bits) for m in models for n, k in layers(m).values() for bits in (4, 8)}
    known = read_tuned(properties.name, path)[0]
    # Those of an int4 model come first: int4 layers and an int8 LM head.
    shapes = sorted(shapes, key=lambda s: ((s[2] == 4) == (s[0] < 30000), s[0] * s[1]), reverse=True)
    shapes = [shape for shape in shapes if kernels.shape_key(*shape) not in known]
    gpu = properties.multi_processor_count, (properties.major, properties.minor), "GeForce" in properties.name
    count = 0
    for shape in shapes:
        if time.monotonic() - began > seconds:
            print(f"out of time: {len(shapes) - count} shapes keep their default tilings", flush=True)
            break
        best = tune([shape], time_of, lambda n, k, bits: linear_config(n, k, bits, *gpu))
        for key, config in best.items():
            print(json.dumps({"shape": key} | config._asdict()), flush=True)
        write_tuned(properties.name, best, path)
        count += 1
    print(f"{count} tilings of {properties.name} written to {path}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("scripts.bench_kernels", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    add("--m", type=int, nargs="+", default=list(TOKENS), help="rows of x")
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--repeats", type=int, default=25)
    add("--quick", action="store_true", help="shapes divided by 16, two M, one repeat")
    add("--tune", action="store_true", help="time tilings and keep the fastest for generate.py")
    add("--seconds", type=float, default=float("inf"), help="with --tune: begin no shape later than this")
    add("--tuned", type=Path, default=tuned_file(), help="file that --tune adds to")
    add("--json", type=Path, help="append the lines to this file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line per cell; 1 if nothing could be measured."""
    parser = build_parser()
    args = parser.parse_args(argv)
    return run_command(lambda: start(args, parser), args.debug)


def start(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Check the arguments, and time or tune."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device here; use --device cpu --quick to try the script")
    if min(args.m) < 1 or args.repeats < 1:
        parser.error("--m and --repeats must be at least 1")
    if not args.tune:
        return run(args, device, dtype)
    if device.type != "cuda":
        parser.error("--tune measures a GPU; there is nothing to tune on a CPU")
    tune_device(args.models, dtype, device, args.repeats, args.tuned, args.seconds)
    return 0


def run(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> int:
    """Time every kernel on every layer."""
    divide, tokens, repeats = (16, args.m[:2], 1) if args.quick else (1, args.m, args.repeats)
    bandwidth = copy_bandwidth(device, (1 << 24) if args.quick else None)
    where = "cpu (reference; not a GPU measurement)"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    common = dict(device=where, torch=torch.__version__, dtype=args.dtype, copy_gbs=round(bandwidth / 1e9, 1))
    measured = 0
    shapes = [(model, layer, *shape) for model in args.models for layer, shape in layers(model).items()]
    for (model, layer, n, k), kernel in itertools.product(shapes, args.kernels):
        n, k = n // divide, max(128, k // divide // 128 * 128)
        if kernel.endswith("gated") and layer != "gate_up":
            continue
        row = common | dict(model=model, layer=layer, n=n, k=k, kernel=kernel)
        for line in time_kernel(kernel, n, k, tokens, dtype, device, repeats, bandwidth):
            measured += "us" in line
            print(json.dumps(row | line), flush=True)
            if args.json:
                append_json_lines(args.json, row | line)
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
