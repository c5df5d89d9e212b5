"""Micro-benchmark of the small-M linears by layer shape: one JSON line per (model, layer, kernel, M).

`python -m scripts.bench_kernels [--models NAME ...] [--m 1 4 8 ...] [--kernels ...] [--json FILE]` measures GB/s of
weight bytes, the share of the copy bandwidth measured first on the same device, and the time over the M = 1 time.
Weights rotate through buffers larger than the last-level cache, so every call reads DRAM. Calls are timed inside a CUDA
graph where there is one. Peers that are not installed are reported as such, never guessed. `--device cpu --quick` runs
the references on small shapes: it proves that the script runs, its times mean nothing for a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch

from bench.kernels import KERNELS, MODELS, PEERS, TOKENS, layers, time_kernel, tune_device
from kernels.tuned import tuned_file
from support.errors import command_parser, run_command
from support.files import append_json_lines
from support.machine import copy_bandwidth


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
    add("--fp16-sums", action="store_true", help=(
        "with --tune on an RTX 30 or 40: try int4 with sums in fp16, promoted to fp32 once per group; "
        "activations in the thousands may overflow"
    ))  # fmt: skip
    add("--seconds", type=float, default=float("inf"), help="with --tune: begin no shape later than this")
    add("--tuned", type=Path, default=tuned_file(), help="file that --tune adds to")
    add("--json", type=Path, help="append the lines to this file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line per cell; 1 if nothing could be measured (peers alone may all decline)."""
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
    tune_device(args.models, dtype, device, args.repeats, args.tuned, args.fp16_sums, args.seconds)
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
    return 0 if measured or set(args.kernels) <= set(PEERS) else 1


if __name__ == "__main__":
    sys.exit(main())
