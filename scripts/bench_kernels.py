"""Micro-benchmark of the small-M linears by layer shape: one JSON line per (model, layer, kernel, M).

`python -m scripts.bench_kernels [--models NAME ...] [--m 1 4 8 ...] [--kernels ...] [--json FILE]` measures GB/s of
weight bytes, the share of the copy bandwidth measured first on the same device, and the time over the M = 1 time.
Weights rotate through buffers larger than the last-level cache, so every call reads DRAM; calls are timed inside a CUDA
graph where there is one. Peers that are not installed are reported as such, never guessed. `--device cpu --quick` runs
the references on small shapes: it proves that the script runs, its times mean nothing for a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.kernel_timing import (
    KERNELS,
    LAYERS,
    PEERS,
    TOKENS,
    _tune,
    copy_bandwidth,
    finished,
    layers,
    make_kernel,
    measure,
)
from kernels.tuned import tuned_file


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line per cell; 1 if nothing could be measured (peers alone may all decline)."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_kernels", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=sorted(LAYERS), default=sorted(LAYERS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--m", type=int, nargs="+", default=list(TOKENS), help="rows of x")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="shapes divided by 16, two M, one repeat")
    parser.add_argument(
        "--tune", action="store_true", help="time tilings and keep the fastest for generate.py"
    )
    parser.add_argument(
        "--fp16-sums",
        action="store_true",
        help="with --tune on an RTX 30 or 40: try int4 with sums in fp16, promoted to fp32 once per group; "
        "activations in the thousands may overflow",
    )
    parser.add_argument("--tuned", type=Path, default=tuned_file(), help="file that --tune writes")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument(
        "--resume", action="store_true", help="skip what --json holds for this device and torch"
    )
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="with --resume: and these files")
    args = parser.parse_args(argv)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device here; use --device cpu --quick to try the script")
    if min(args.m) < 1 or args.repeats < 1:
        parser.error("--m and --repeats must be at least 1")
    if args.tune:
        if device.type != "cuda":
            parser.error("--tune measures a GPU; there is nothing to tune on a CPU")
        return _tune(args.models, dtype, device, args.repeats, args.tuned, args.fp16_sums)
    divide, tokens, repeats = (16, args.m[:2], 1) if args.quick else (1, args.m, args.repeats)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 16
    bandwidth = copy_bandwidth(device, (1 << 24) if args.quick else (1 << 29))
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "cpu (reference; not a GPU measurement)"
    )
    common = dict(device=where, torch=torch.__version__, dtype=args.dtype, copy_gbs=round(bandwidth / 1e9, 1))
    done = finished([args.json, *args.done], common) if args.resume and args.json else set()
    out = args.json.open("a") if args.json else None
    measured = len(done)
    for model in args.models:
        for layer, (n, k) in layers(model).items():
            n, k = n // divide, max(128, k // divide // 128 * 128)
            for name in args.kernels:
                row = common | dict(model=model, layer=layer, n=n, k=k, kernel=name)
                if all((n, k, name, m) in done for m in tokens):
                    continue
                bits = dict(int4=4, int8=8, half=16, cublas=16).get(name.partition("-")[0], 4)
                buffers = min(64, max(2, 4 * cache // (n * k * bits // 8) + 1))
                first, lines = None, []
                try:
                    functions, size, takes = make_kernel(name, n, k, dtype, device, buffers)
                    for m in tokens:
                        x = torch.randn(m, k, device=device, dtype=takes)
                        seconds = measure([lambda f=f, x=x: f(x) for f in functions], device, repeats)
                        first = first or seconds
                        lines.append(row | dict(
                            m=m, us=round(seconds * 1e6, 2), gbs=round(size / seconds / 1e9, 1),
                            share_of_copy=round(size / seconds / bandwidth, 3), over_first_m=round(seconds / first, 3),
                        ))  # fmt: skip
                except Exception as problem:  # whatever a peer raises is its result
                    why = (str(problem).splitlines() or [""])[0][:120]
                    lines.append(row | dict(skipped=f"{type(problem).__name__}: {why}"))
                functions = x = None
                for line in lines:
                    measured += "us" in line
                    print(json.dumps(line), flush=True)
                    if out:
                        out.write(json.dumps(line) + "\n")
                        out.flush()
    if out:
        out.close()
    return 0 if measured or set(args.kernels) <= set(PEERS) else 1


if __name__ == "__main__":
    sys.exit(main())
