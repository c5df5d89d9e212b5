"""TODO."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import kernels
from kernels.tuned import write_tuned

# layer -> (out features, in features); experts: one expert's matrices
LAYERS = {
    "llama-2-7b": {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)},
    "llama-2-13b": {"qkv": (15360, 5120), "o": (5120, 5120), "gate_up": (27648, 5120), "down": (5120, 13824)},
    "llama-2-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "llama-3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "mixtral-8x7b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "expert_up": (28672, 4096),
        "expert_down": (4096, 14336),
    },
}


HEADS = {
    "llama-2-7b": 32000,
    "llama-2-13b": 32000,
    "llama-2-70b": 32000,
    "llama-3-8b": 128256,
    "mixtral-8x7b": 32000,
}


TOKENS = (1, 4, 8, 16, 24, 32, 48, 64, 104, 256)


# 'int4-dequant': what happens above kernels.SMALL_M rows, at any M, so that the bound can be set where the two meet
KERNELS = ("int4", "int8", "half", "int4-dequant", "int8-dequant", "cublas", "tinygemm", "torchao", "gemlite")


PEERS = KERNELS[5:]


def layers(model: str) -> dict[str, tuple[int, int]]:
    """All layer shapes of a model, its LM head included."""
    shapes = LAYERS[model]
    return shapes | {"lm_head": (HEADS[model], shapes["qkv"][1])}


@torch.no_grad()
def measure(calls: list[Callable[[], Tensor]], device: torch.device, repeats: int) -> float:
    """Median seconds per call; the list holds the same call on different weight buffers. On CUDA all calls are one
    graph, timed by events; RuntimeError where a call cannot be captured."""
    for call in calls:
        call()
    samples = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()  # the first replay uploads the graph
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3 / len(calls))
    else:
        for _ in range(repeats):
            begin = time.perf_counter()
            for call in calls:
                call()
            samples.append((time.perf_counter() - begin) / len(calls))
    return statistics.median(samples)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second (read plus written) of a plain copy: the yardstick of every share."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure([lambda: target.copy_(source)], device, 9)


def dequantized(x: Tensor, weight: kernels.PackedWeight) -> Tensor:
    """x @ W^T by way of the whole matrix in x's dtype: on CUDA our fused kernel and cuBLAS."""
    return x @ kernels.dequantize(weight, x.dtype, fused=weight.layout == "planes" and x.is_cuda).mT


def make_kernel(name: str, n: int, k: int, dtype: torch.dtype, device: torch.device, buffers: int):
    """(functions x -> y on rotating weights, weight bytes a call reads, dtype that x must have); raises what the library
    raises where it is absent or declines."""
    functions, size = [], 0
    takes = {"tinygemm": torch.bfloat16, "torchao": torch.bfloat16, "gemlite": torch.float16}.get(name, dtype)
    ours, _, dequant = name.partition("-")
    for _ in range(buffers):
        if name in ("half", "cublas"):
            weight = torch.randn(n, k, device=device, dtype=dtype)
            packed = kernels.pack_half(weight) if name == "half" else kernels.pack_half(weight, "dense")
            size = weight.numel() * weight.element_size()
        elif ours == "int8":
            weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
            packed = kernels.pack_int8(weight, torch.rand(n, device=device), dtype)
            size = n * k + 4 * n
        elif ours == "int4":
            weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
            scales = torch.rand(k // 128, n, device=device).half()
            packed = kernels.pack_int4(weight, scales, dtype=dtype)
            size = n * k // 2 + 2 * scales.numel()
        elif name == "tinygemm":
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
            weight = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
            scales = torch.rand(k // 128, n, 2, device=device, dtype=torch.bfloat16)
            size = n * k // 2 + 2 * scales.numel()
            functions.append(lambda x, w=weight, s=scales: torch.ops.aten._weight_int4pack_mm(x, w, 128, s))
            continue
        elif name == "torchao":
            from torchao.quantization import Int4WeightOnlyConfig, quantize_

            module = torch.nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
            try:  # the packing that runs without further packages; older releases know no other
                config = Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
            except TypeError:
                config = Int4WeightOnlyConfig(group_size=128)
            quantize_(module, config)
            size = n * k // 2 + 4 * n * k // 128
            functions.append(module)
            continue
        elif name == "gemlite":
            from gemlite.helper import A16Wn

            codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
            scales = torch.rand(n, k // 128, device=device).half()
            module = A16Wn(device=str(device)).from_weights(codes, scales, torch.full_like(scales, 8), 4, 128)
            size = n * k // 2 + 4 * n * k // 128
            functions.append(module)
            continue
        else:
            raise ValueError(f"unknown kernel '{name}', use one of {', '.join(KERNELS)}")
        functions.append(lambda x, w=packed: (dequantized if dequant else kernels.packed_linear)(x, w))
    return functions, size, takes


def finished(paths: Sequence[Path], common: dict) -> set[tuple[int, int, str, int]]:
    """(n, k, kernel, rows) of earlier lines from the same surroundings (the copy bandwidth of the day aside)."""
    same, found = {key: common[key] for key in ("device", "torch", "dtype")}, set()
    for text in (text for path in paths if path.exists() for text in path.read_text().splitlines()):
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a run that was killed
            continue
        if "us" in line and all(line.get(key) == value for key, value in same.items()):
            found.add((line["n"], line["k"], line["kernel"], line["m"]))
    return found


def candidates(
    n: int, k: int, bits: int, multiprocessors: int, half: bool = False
) -> list[kernels.LinearConfig]:
    """The default tiling first, then its neighbours: split-K, rows per tile, warps and stages. half: for int4 all of them
    with sums in fp16, too, promoted to fp32 once per group (int8 has no groups)."""
    base = kernels.linear_config(n, k, bits, multiprocessors)
    splits = {1, max(1, base.split_k // 2), base.split_k, min(2 * base.split_k, max(1, k // 256))}
    found = [base._replace(split_k=split, block_n=block) for split in sorted(splits) for block in (64, 128)]
    found += [
        base._replace(warps=8),
        base._replace(stages=base.stages - 1),
        base._replace(stages=base.stages + 1),
    ]
    found += [c._replace(accumulate="float16") for c in [base, *found] if half and bits == 4]
    return list(dict.fromkeys([base, *found]))


def tune(
    shapes: list[tuple[int, int, int]],
    time_of: Callable[[int, int, int, kernels.LinearConfig], float],
    multiprocessors: int = 82,
    half: bool = False,
) -> dict[str, kernels.LinearConfig]:
    """The fastest tiling of every (n, k, bits); the default stays unless another is 2 % faster. time_of raises
    RuntimeError or a Triton error (OutOfResources is not a RuntimeError) for a tiling the device cannot run. half: see
    `candidates`."""
    best, refused = {}, (RuntimeError,)
    if kernels.triton is not None:
        refused += (kernels.triton.runtime.errors.TritonError,)
    for n, k, bits in shapes:
        times = {}
        for config in candidates(n, k, bits, multiprocessors, half):
            try:
                times[config] = time_of(n, k, bits, config)
            except refused:
                continue
        default = kernels.linear_config(n, k, bits, multiprocessors)
        if times:
            fastest = min(times, key=times.get)
            keep = default in times and times[default] <= 1.02 * times[fastest]
            best[kernels.shape_key(n, k, bits)] = default if keep else fastest
    return best


def _tune(
    models: list[str], dtype: torch.dtype, device: torch.device, repeats: int, path: Path, half: bool
) -> int:
    properties = torch.cuda.get_device_properties(device)

    def time_of(n: int, k: int, bits: int, config: kernels.LinearConfig) -> float:
        buffers, calls = min(64, max(2, 4 * properties.L2_cache_size // (n * k * bits // 8) + 1)), []
        for x in (torch.randn(m, k, device=device, dtype=dtype) for m in (1, 16)):
            for _ in range(buffers):
                if bits == 4:
                    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
                    scales = torch.rand(k // 128, n, device=device).half()
                    packed = kernels.pack_int4(codes, scales, dtype=dtype, layout="planes", config=config)
                else:
                    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
                    scales = torch.rand(n, device=device)
                    packed = kernels.pack_int8(codes, scales, dtype, "planes", config)
                calls.append(lambda x=x, w=packed: kernels.packed_linear(x, w))
        return measure(calls, device, repeats)

    shapes = sorted({(n, k, bits) for m in models for n, k in layers(m).values() for bits in (4, 8)})
    # GeForce cards of these generations sum fp16 products in fp32 at half rate.
    half = half and dtype == torch.float16 and (properties.major, properties.minor) in ((8, 6), (8, 9))
    best = tune(shapes, time_of, properties.multi_processor_count, half)
    for key, config in best.items():
        print(json.dumps(dict(shape=key) | config._asdict()), flush=True)
    write_tuned(properties.name, best, path)
    print(f"{len(best)} tilings of {properties.name} written to {path}", file=sys.stderr)
    return 0
