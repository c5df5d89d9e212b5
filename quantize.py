"""int8 and int4 weights: the stored format, quantized modules, RTN and GPTQ, published formats, receipts.

    python quantize.py                                       # demo/ -> demo-int4/, and what it cost in quality
    python quantize.py --checkpoint DIR --mode int4 --algorithm gptq

Stored plainly, whatever the GPU. int4: `qweight` uint8 [out, in/2] (byte j: column 2j low, 2j+1 high), `scales` fp16
[in/G, out], optional `zeros` uint8 [in/G, out] (absent: 8), optional `perm` int32 [in] (stored column j multiplies
input perm[j]); weight = (q - zero) * scale. int8: `qweight` int8 [out, in], `scales` fp32 [out]. Mixtral's experts
add a leading axis. Kernels get their own packing after loading. It does not know generation, trees or drafters.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import math
import os
import random
import shutil
import sys
import sysconfig
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import artefacts
import kernels
from model import DTYPES, ConfigReader, Experts, ModelConfig, RopeConfig, Transformer
from tokenizer import load_tokenizer

VERSION = 1  # of the stored format
MODES, ALGORITHMS, HEADS, GROUPS = ("int8", "int4"), ("rtn", "gptq"), ("fp16", "int8", "int4"), (32, 64, 128)
ABSURD_KL = 2.0  # nats per token: past this the result is broken, not merely bad, and is never written
WINDOW, CALIBRATION_WINDOWS, EVALUATION_WINDOWS, BATCH = 512, 128, 16, 4  # tokens; sequences
CLIPS = [
    1 - i / 40 for i in range(17)
]  # clip ratios tried per group: the first clips nothing, 7/8 uses -8 for the peak
GPTQ_BLOCK, GPTQ_DAMPING = 128, 0.01  # columns updated together; share of the mean diagonal
COPIED = "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json "
COPIED += "generation_config.json chat_template.jinja chat_template.json"
# The default texts are the standard library's sources: these modules measure, the rest calibrates. The demo model was
# trained with the same split (scripts.train_demo; a test compares the lists).
HELD_OUT = "argparse.py csv.py heapq.py json queue.py statistics.py textwrap.py zipfile.py".split()
LEFT_OUT = "encodings pydoc_data site-packages test tests idle_test __pycache__ _bundled".split()

Progress = Callable[[int, int, str], None]


class UsageError(ValueError):
    """Options that cannot work together or with this model (exit code 2)."""


@dataclass(frozen=True)
class QuantSpec:
    """What to quantize to; stored as `eaglet_quant` in config.json. `group_size` counts for int4 only.

    act_order: GPTQ updates input columns by descending activation energy. Groups stay where they are, so nothing is
    permuted when the model runs.
    """

    mode: str = "int4"
    group_size: int = 128
    algorithm: str = "rtn"
    act_order: bool = False
    lm_head: str = "int8"

    def __post_init__(self) -> None:
        allowed = {"mode": MODES, "group_size": GROUPS, "algorithm": ALGORITHMS, "lm_head": HEADS}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                listed = ", ".join(map(str, values))
                raise UsageError(f"quantization {name} = {getattr(self, name)!r}; allowed: {listed}.")
        if self.act_order and self.algorithm != "gptq":
            raise UsageError("--act-order orders GPTQ's column updates; add --algorithm gptq.")

    def bits(self, name: str, in_features: int) -> int:
        """4, 8 or 16 (left alone: routers, an fp16 LM head) for the linear `name`; UsageError if groups do not fit."""
        leaf = name.rpartition(".")[2]
        kind = "fp16" if leaf == "router" else self.lm_head if leaf == "lm_head" else self.mode
        if kind == "int4" and in_features % self.group_size:
            fits = [str(g) for g in GROUPS if in_features % g == 0]
            advice = f"use --group-size {' or '.join(fits)}" if fits else "use --mode int8"
            raise UsageError(
                f"{name}: group size {self.group_size} does not divide its {in_features} inputs; {advice}."
            )
        return {"fp16": 16, "int8": 8, "int4": 4}[kind]

    @classmethod
    def read(cls, config: Any, where: str) -> QuantSpec:
        """From the `eaglet_quant` object of a config.json; ValueError for another version or unknown values."""
        version = config.get("version") if isinstance(config, dict) else None
        if version != VERSION:
            raise ValueError(
                f"{where}: eaglet_quant version {version!r}, this program reads version {VERSION}. "
                "Quantize the original checkpoint again."
            )
        read = ConfigReader(config, f"{where} (eaglet_quant)")
        allowed = {"mode": MODES, "algorithm": ALGORITHMS, "lm_head": HEADS}
        texts = {key: read.text(key, None, values) for key, values in allowed.items()}
        return cls(group_size=read.integer("group_size"), act_order=read.boolean("act_order", False), **texts)


# ---- numbers ----------------------------------------------------------------------------------------------


def _round(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes (still floats) of groups [..., G] under scales [...]; a zero scale codes zeros."""
    safe = torch.where(scales == 0, 1, scales).float()
    return (groups / safe[..., None]).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def fit_scales(groups: Tensor, bits: int, importance: Tensor | None = None, clip: bool = True) -> Tensor:
    """The scale of each group [..., G] with the least squared error over CLIPS, judged after rounding the scale.

    importance weighs the squared errors, broadcast to groups (GPTQ: mean squared activation). clip = False: plain round
    to nearest. Returns [...], fp16 for int4, else fp32. int4 scales may be negative: that puts the spare level -8 on
    the side where the group needs it.
    """
    shape, groups = groups.shape[:-1], groups.reshape(-1, groups.shape[-1])
    weights = None if importance is None else importance.expand(*shape, -1).reshape(groups.shape)
    out, rows = [], max(1, (1 << 20) // groups.shape[-1])  # a chunk stays in cache
    for at in range(0, groups.shape[0], rows):
        chunk = groups[at : at + rows].float()
        peak = chunk.abs().amax(-1) / (2 ** (bits - 1) - 1)
        best, least = None, None
        for ratio in CLIPS if clip else CLIPS[:1]:
            for sign in (1, -1) if bits == 4 and clip else (1,):
                scales = (peak * (ratio * sign)).to(torch.float16 if bits == 4 else torch.float32)
                error = (_round(chunk, scales, bits) * scales.float()[:, None] - chunk).square_()
                error = (error if weights is None else error * weights[at : at + rows]).sum(-1)
                best = scales if best is None else torch.where(error < least, scales, best)
                least = error if least is None else torch.minimum(error, least)
        out.append(best)
    scales = torch.cat(out).view(shape)
    if not scales.isfinite().all():
        raise ValueError("a weight is NaN, infinite or too large for fp16 scales (past 458752).")
    return scales


def _stored(codes: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """Codes [..., N, K] around zero and scales [..., N, K/G] in the stored layout."""
    if bits == 8:
        return {"qweight": codes.to(torch.int8).contiguous(), "scales": scales[..., 0].contiguous()}
    nibbles = (codes + 8).to(torch.uint8)
    return {"qweight": nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), "scales": scales.mT.contiguous()}


def quantize_rtn(weight: Tensor, bits: int, group_size: int, clip: bool = True) -> dict[str, Tensor]:
    """Round weight [..., N, K] to the nearest level, scales by `fit_scales`. Returns the stored tensors."""
    grouped = weight.unflatten(-1, (-1, group_size if bits == 4 else weight.shape[-1]))
    scales = fit_scales(grouped, bits, clip=clip)
    return _stored(_round(grouped.float(), scales, bits).flatten(-2), scales, bits)


def quantize_gptq(weight: Tensor, hessian: Tensor, bits: int, group_size: int, act_order: bool = False):
    """GPTQ (arXiv 2210.17323): what rounding a column breaks is mended by the columns after it.

    weight [N, K]; hessian [K, K] fp32: sum of x x^T over the linear's inputs, any scale; all zero (an expert that no
    token chose) gives RTN. Returns the stored tensors.
    """
    (N, K), group = weight.shape, group_size if bits == 4 else weight.shape[1]
    energy, factor, order = _inverse_factor(hessian, act_order)
    scales, fixed = torch.empty(N, K // group, device=weight.device), act_order or bits == 8
    if fixed:  # groups are not met one after the other: fit their scales to the weights as they were
        scales = fit_scales(weight.unflatten(-1, (-1, group)), bits, energy.view(-1, group)).float()
    columns = weight.float().T[order].contiguous()  # [K, N]: rows are input columns, in update order
    codes, group_of = torch.empty_like(columns), (order // group).tolist()
    for start in range(0, K, GPTQ_BLOCK):
        stop = min(start + GPTQ_BLOCK, K)
        errors = torch.empty(stop - start, N, device=weight.device)
        for k in range(start, stop):
            if not fixed and k % group == 0:
                fitted = fit_scales(columns[k : k + group].T, bits, energy[k : k + group])
                scales[:, k // group] = fitted.float()
            scale = scales[:, group_of[k]]
            codes[k] = _round(columns[k, :, None], scale, bits)[:, 0]
            errors[k - start] = (columns[k] - codes[k] * scale) / factor[k, k]
            columns[k:stop] -= factor[k, k:stop, None] * errors[k - start]
        columns[stop:] -= factor[start:stop, stop:].T @ errors
    return _stored(codes[order.argsort()].T, scales.to(torch.float16 if bits == 4 else torch.float32), bits)


def _inverse_factor(hessian: Tensor, act_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Damped diagonal, upper Cholesky factor of the inverse in update order, update order."""
    eye = torch.eye(hessian.shape[0], device=hessian.device)
    hessian = eye if hessian.diagonal().sum() == 0 else hessian
    energy = hessian.diagonal()
    order = torch.arange(energy.numel(), device=energy.device)
    if act_order:
        order = energy.argsort(descending=True, stable=True)
    for attempt in range(6):  # near-singular calibration: damp harder
        damped = hessian + eye * (energy.mean() * GPTQ_DAMPING * 4**attempt)
        lower, failed = torch.linalg.cholesky_ex(damped[order][:, order])
        upper, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and not failed_too and upper.isfinite().all():
            return damped.diagonal(), upper, order
    raise ValueError("GPTQ: calibration activations are degenerate or not finite; use another --calibration.")


def relative_error(weight: Tensor, restored: Tensor) -> float:
    """||restored - weight|| / ||weight|| in fp32."""
    return float((restored.float() - weight.float()).norm() / weight.float().norm().clamp(min=1e-30))


# ---- modules ----------------------------------------------------------------------------------------------


class QuantLinear(nn.Module):
    """A linear over stored tensors (module docstring), or with an expert axis all experts' weights of one kind.

    The kernel's packing is made once per dtype and cached. Where it says all that the codes say, these are dropped:
    plane words on CUDA at once, a dequantized matrix by `pack_`.
    """

    def __init__(self, stored: Mapping[str, Tensor], bias: Tensor | None = None, per_token: int = 0):
        """per_token: experts each token uses, where there is an expert axis."""
        super().__init__()
        codes = stored["qweight"]
        self.bits, self.per_token = 4 if codes.dtype == torch.uint8 else 8, per_token
        self.out_features, self.in_features = codes.shape[-2], codes.shape[-1] * 8 // self.bits
        self.group_size = self.in_features // (stored["scales"].shape[-2] if self.bits == 4 else 1)
        self.experts = codes.shape[0] if codes.dim() == 3 else 0
        for name in ("qweight", "scales", "zeros", "perm"):
            self.register_buffer(name, stored.get(name))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.packed: kernels.PackedWeight | None = None
        self.packed_for: torch.dtype | None = None

    @classmethod
    def empty(cls, shape, bits: int, group_size: int, extra: tuple[str, ...] = (), **options) -> QuantLinear:
        """Meta tensors for a weight of `shape`; extra: 'zeros', 'perm'."""
        lead, N, K = shape[:-2], *shape[-2:]
        if bits == 8:
            layout = {"qweight": ((N, K), torch.int8), "scales": ((N,), torch.float32)}
        else:
            grid = (K // group_size, N)
            layout = {"qweight": ((N, K // 2), torch.uint8), "scales": (grid, torch.float16)}
            layout |= {"zeros": (grid, torch.uint8)} if "zeros" in extra else {}
        stored = {k: torch.empty(*lead, *size, dtype=d, device="meta") for k, (size, d) in layout.items()}
        if "perm" in extra:
            stored["perm"] = torch.empty(K, dtype=torch.int32, device="meta")
        return cls(stored, **options)

    def pack(self, dtype: torch.dtype) -> kernels.PackedWeight:
        """What the active kernel backend reads for activations of `dtype`; cached. Call it before tracing (`pack_`)."""
        if self.packed is None or (self.packed_for != dtype and self.qweight is not None):
            self.packed, self.packed_for = self._pack(dtype, "auto"), dtype
            if self.packed.layout == "planes" and self.qweight.is_cuda:
                self.qweight = None
        return self.packed

    def release(self) -> None:
        """Drop the codes if they are packed as a dense matrix, which takes their place for good (any dtype reads it). Not
        under Triton's interpreter (debugging): there a CPU has a second backend, which they may be packed for next."""
        if self.packed is not None and self.packed.layout == "dense" and not kernels.INTERPRETED:
            self.qweight = None

    def _pack(self, dtype: torch.dtype, layout: str) -> kernels.PackedWeight:
        def pack(rows: slice) -> kernels.PackedWeight:
            codes, scales = self.qweight[rows], self.scales[rows]
            if self.bits == 8:
                return kernels.pack_int8(codes, scales, dtype, layout)
            zeros = None if self.zeros is None else self.zeros[rows]
            return kernels.pack_int4(codes, scales, zeros, self.group_size, self.perm, dtype, layout)

        if not self.experts or layout == "plain":
            return pack(slice(None))
        first = pack(slice(1))
        if first.layout == "plain":  # views of what is stored
            return pack(slice(None))
        # One expert at a time: unpacked codes are eight times as large as packed ones, and there may be many experts.
        weight = first.weight.new_empty(self.experts, *first.weight.shape[1:])
        weight[:1].copy_(first.weight)
        for e in range(1, self.experts):
            weight[e : e + 1].copy_(pack(slice(e, e + 1)).weight)
        kept = {} if first.scales is None else {"scales": self.scales, "zeros": self.zeros}
        return replace(first, weight=weight, **kept)

    def forward(self, x: Tensor, residual: Tensor | None = None, gated: bool = False) -> Tensor:
        """x [..., in] -> [..., out] (+ residual), or SiLU(first half) * second half [..., out / 2] if gated."""
        return kernels.packed_linear(x, self.pack(x.dtype), self.bias, residual, gated)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [(E,) out, in], columns in the order of the inputs; computed in fp32, rounded once (and to the
        dtype it was packed for, where that took the place of the codes)."""
        plain = self.packed if self.qweight is None else self._pack(dtype, "plain")
        weight = kernels.dequantize(plain, dtype)
        return weight if self.perm is None else weight[..., self.perm.argsort()]

    def weight_bytes_read(self, nodes: int) -> float:
        """Bytes that a forward of `nodes` rows reads; of experts, those expected to be touched."""
        codes = max(1, self.experts) * self.in_features * self.out_features * self.bits / 8
        others = sum(t.numel() * t.element_size() for t in (self.scales, self.zeros) if t is not None)
        share = 1 - (1 - self.per_token / self.experts) ** nodes if self.experts else 1.0
        return share * (codes + others) + sum(p.numel() * p.element_size() for p in self.parameters())

    def _apply(self, fn, recurse: bool = True):
        """Moves between devices. A change of dtype is for activations: scales stay as they were stored."""
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        if self.qweight is not None:
            self.packed = None
        elif self.packed.weight.device != self.scales.device:
            raise ValueError(
                "packed weights cannot move to another device; load the model again on that one."
            )
        return self


class QuantExperts(nn.Module):
    """`model.Experts` with quantized matrices: same router, same routing, same call."""

    route, forward = Experts.route, Experts.forward

    def __init__(self, router: nn.Linear, gate_up: nn.Module, down: nn.Module, per_token: int):
        super().__init__()
        self.router, self.gate_up, self.down, self.per_token = router, gate_up, down, per_token

    def mixture(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weight, index = self.route(rows)
        gate_up, down = self.gate_up.pack(x.dtype), self.down.pack(x.dtype)
        return kernels.packed_experts(rows, index, weight, gate_up, down).view(x.shape)


def pack_(module: nn.Module, dtype: torch.dtype) -> None:
    """Pack all quantized weights for the active kernel backend, before tracing, and drop the codes that the packing
    replaces; those that keep theirs can be packed again for another backend. On a CPU plain float32 weights of wide
    layers (and a tied head) are laid out column by column, values unchanged: one row times such a matrix is 2 to 3
    times as fast, many rows are no slower."""
    for child in module.modules():
        tied = isinstance(child, nn.Embedding) and isinstance(module, Transformer) and module.lm_head is None
        if isinstance(child, nn.Linear) or tied:
            w = child.weight
            if w.device.type == "cpu" and w.dtype == torch.float32 and w.shape[0] >= w.shape[1]:
                w.data = w.data.t().contiguous().t()
        if isinstance(child, QuantLinear):
            child.packed = None if child.qweight is not None else child.packed
            child.pack(dtype)
            child.release()


def held_bytes(stored: Mapping[str, Any], dtype: torch.dtype, device: str, backend: str = "auto") -> int:
    """Bytes that a model or head takes after loading and `pack_`, from its stored tensors (anything with shape and
    dtype, such as checkpoint.Entry): ours exactly, published layouts within a few per cent.

    device: 'cpu' or 'cuda'; backend: mode of the kernels.KernelBackend. Which packing they get is kernels' decision; a
    test compares the two.
    """
    planes = dtype != torch.float64 and (backend == "triton" or (backend == "auto" and device == "cuda"))
    dense = not planes and device == "cpu" and dtype != torch.bfloat16
    total = 0
    for name, tensor in stored.items():
        if isinstance(tensor.dtype, str):
            continue  # a kind without a torch dtype: loading refuses it by name
        leaf, shape, width = name.rpartition(".")[2], tensor.shape, tensor.dtype.itemsize
        count = math.prod(shape)
        if leaf in ("qweight", "weight_packed"):
            ours, bits = width == 1, 8 if tensor.dtype == torch.int8 else 4
            values = count * width * 8 // bits
            twice = not planes and device == "cpu" and bits == 4 and len(shape) == 2 and shape[0] % 16 == 0
            if dense:
                total += values * dtype.itemsize
            elif planes and ours:  # rows are padded to blocks of 128; counters of the split sums
                rows, per_row = count // shape[-1], shape[-1] * 8 // bits
                total += rows * -(-per_row // 128) * 16 * bits + 4 * (kernels.SMALL_M // 32) * -(
                    -shape[-2] // 16
                )
            else:  # torch's int4pack cannot be read back: the codes stay beside it
                total += count * width * (2 if twice else 1)
        elif leaf in ("scales", "weight_scale"):
            paired = not planes and not dense and device == "cpu" and width == len(shape) == 2
            total += count * (width + (2 * dtype.itemsize if paired else 0))
        elif leaf in ("qzeros", "weight_zero_point"):
            total += count * (8 if width == 4 else 1)
        elif leaf in ("zeros", "perm") or not tensor.dtype.is_floating_point:
            total += count * width
        else:
            total += count * dtype.itemsize
    return total


def tuned_file() -> Path:
    """Where the tilings that scripts.bench_kernels --tune measured lie."""
    return artefacts.cache() / "kernels.json"


def read_tuned(gpu: str, path: Path | None = None) -> tuple[dict[str, kernels.LinearConfig], str]:
    """(layer shape -> tiling measured on this GPU, note). A malformed file counts as none, and the note says why."""
    path = path or tuned_file()
    try:
        if not path.exists():
            return {}, ""
        read = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(read, dict) or read.get("version") != 1 or not isinstance(read.get("gpus"), dict):
            raise ValueError("not a version 1 file")
        return {key: _tiling(key, row) for key, row in read["gpus"].get(gpu, {}).items()}, ""
    except (OSError, ValueError, AttributeError) as error:
        return {}, f"{path} is ignored: {error}. Run python -m scripts.bench_kernels --tune again."


def _tiling(key: str, row: Any) -> kernels.LinearConfig:
    allowed = ((16, 32, 64, 128, 256), range(1, 65), (1, 2, 4, 8), range(1, 9), ("float32", "float16"))
    fits = isinstance(row, list) and len(row) == len(allowed)
    if not fits or any(
        isinstance(x, bool | float) or x not in ok for x, ok in zip(row, allowed, strict=True)
    ):
        raise ValueError(f"{key}: {row!r:.80} is no tiling")
    return kernels.LinearConfig(*row)


def write_tuned(gpu: str, configs: Mapping[str, kernels.LinearConfig], path: Path | None = None) -> None:
    """Add one GPU's tilings to the file; other GPUs and shapes keep theirs. Atomic; a malformed file is replaced."""
    path = path or tuned_file()
    known, gpus = read_tuned(gpu, path), {}
    if path.exists() and not known[1]:
        gpus = json.loads(path.read_text(encoding="utf-8"))["gpus"]
    gpus[gpu] = {key: list(config) for key, config in (known[0] | dict(configs)).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps({"version": 1, "gpus": gpus}, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def quantizable(
    module: nn.Module, spec: QuantSpec
) -> Iterator[tuple[str, nn.Module, dict[str, Tensor], int]]:
    """(name, module, its weights by full name, bits) of every linear and experts module that `spec` quantizes."""
    for name, child in list(module.named_modules()):
        weights = {}
        if isinstance(child, Experts):
            weights = {f"{name}.gate_up": child.gate_up, f"{name}.down": child.down}
        elif isinstance(child, nn.Linear):
            weights = {name: child.weight}
        bits = min((spec.bits(full, w.shape[-1]) for full, w in weights.items()), default=16)
        if bits < 16:
            yield name, child, weights, bits


def apply_spec_(module: nn.Module, spec: QuantSpec, names: Any = ()) -> nn.Module:
    """Swap every linear (and Mixtral's experts) for an empty quantized one on the meta device; returns `module`.

    For a Transformer (a tied LM head gets a quantized copy of its own unless spec.lm_head is fp16) and for any other
    module made of linears, such as an EAGLE head. names: tensors in the file; they tell where zeros and perms are.
    """
    if isinstance(module, Transformer) and module.lm_head is None and spec.lm_head != "fp16":
        config = module.config
        module.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    for name, child, weights, bits in quantizable(module, spec):
        new = []
        for full, weight in weights.items():
            extra = tuple(k for k in ("zeros", "perm") if f"{full}.{k}" in names)
            options = {"bias": getattr(child, "bias", None), "per_token": getattr(child, "per_token", 0)}
            new.append(QuantLinear.empty(weight.shape, bits, spec.group_size, extra, **options))
        parent, _, leaf = name.rpartition(".")
        if isinstance(child, Experts):
            new = [QuantExperts(child.router, *new, child.per_token)]
        setattr(module.get_submodule(parent), leaf, new[0])
    return module


def quantize_(module: nn.Module, spec: QuantSpec) -> dict[str, float]:
    """Round every linear of a module in memory (RTN), in place. Returns the relative weight errors by name."""
    floats, errors = dict(module.named_parameters()), {}
    if isinstance(module, Transformer) and module.lm_head is None:
        floats["lm_head.weight"] = module.embed_tokens.weight
    for name, child in apply_spec_(module, spec).named_modules():
        if isinstance(child, QuantLinear):
            weight = floats[name if child.experts else f"{name}.weight"].detach()
            for key, value in quantize_rtn(weight, child.bits, spec.group_size).items():
                setattr(child, key, value)
            errors[name] = relative_error(weight, child.dequantize())
    return errors


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer called `name`."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in owner._parameters else tensor)


def adopt_(module: nn.Module, tensors: Mapping[str, Tensor], device, dtype: torch.dtype) -> None:
    """Put tensors into a module (an EAGLE head), swapping the linears whose codes are among them; scales keep theirs."""
    for name, tensor in tensors.items():
        base, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            old, (parent, _, own) = module.get_submodule(base), base.rpartition(".")
            parts = {key: tensors.get(f"{base}.{key}") for key in ("qweight", "scales", "zeros", "perm")}
            new = QuantLinear({k: v.to(device) for k, v in parts.items() if v is not None}, old.bias)
            shapes = [[linear.out_features, linear.in_features] for linear in (new, old)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{base} is {shapes[0]}, expected {shapes[1]}: not a head for this model.")
            setattr(module.get_submodule(parent), own, new)
        elif leaf not in ("scales", "zeros", "perm"):
            set_tensor(module, name, tensor.to(device, dtype if tensor.is_floating_point() else None))


# ---- reading quantized directories (called by checkpoint.load_model) -------------------------------------------


def load_quantized(
    directory: str | Path,
    raw: dict[str, Any],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    max_positions: int | None = None,
) -> Transformer:
    """Our quantized directory, or a published GPTQ, AWQ or compressed-tensors (W4A16) one, as a ready Transformer.

    raw: its config.json. dtype: of embedding, norms and biases (default: config.json's); stored codes and scales are
    kept exactly. One module at a time, so nothing is held twice. Strict: ValueError names file and tensor.
    """
    import checkpoint  # the layer below: it reads files for us and hands quantized directories over

    where = str(Path(directory) / "config.json")
    config = checkpoint.load_config(directory)
    entries = checkpoint.read_entries(checkpoint.tensor_files(Path(directory)))
    model, dtype, spec = checkpoint.build_model(config), dtype or DTYPES[config.dtype], None
    if raw.get("eaglet_quant"):
        spec = QuantSpec.read(raw["eaglet_quant"], where)
        apply_spec_(model, spec, entries)
        fill_(model, entries, str(directory), device, dtype, progress)
    else:
        _fill_published(model, entries, raw["quantization_config"], where, device, dtype, progress)
    model.quant = spec.mode if spec else f"int4 ({raw['quantization_config']['quant_method']})"  # for reports
    model.rotary.build(device, min(max_positions or config.max_positions, config.max_positions))
    return model.eval().requires_grad_(False)


def fill_(
    module: nn.Module, entries: Mapping[str, Any], where: str, device, dtype, progress: Progress | None
) -> None:
    """Fill a meta module from entries (checkpoint.Entry) with exactly its state-dict names, shapes and kinds."""
    import checkpoint

    expected, done = dict(module.state_dict()), 0
    for what, odd in (("missing", expected.keys() - entries), ("unexpected", entries.keys() - expected)):
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ValueError(f"{where}: {what} tensor {min(odd)!r}{more}. Quantize the original again.")
    for name, slot in expected.items():
        entry, floats = entries[name], slot.is_floating_point()
        kind = entry.dtype in checkpoint.FLOATS if floats else entry.dtype == slot.dtype
        if entry.shape != tuple(slot.shape) or not kind:
            found, wanted = f"{entry.dtype} {list(entry.shape)}", f"{slot.dtype} {list(slot.shape)}"
            hint = "eaglet_quant in config.json and the weights do not belong together"
            raise ValueError(f"{where}: {name} is {found}, expected {wanted}; {hint}.")
    total = sum(t.numel() * t.element_size() for t in expected.values())
    for name, slot in expected.items():
        tensor, floats = entries[name].read(), slot.is_floating_point()
        if floats:
            checkpoint.check_finite(tensor, name, where)
        if name.endswith(".perm") and tensor.sort().values.tolist() != list(range(len(tensor))):
            raise ValueError(f"{where}: {name} is not a permutation of the inputs.")
        half = dtype if floats and not name.endswith(".scales") else None
        set_tensor(module, name, tensor.to(device, half, copy=True))  # off the mapped file
        done += slot.numel() * slot.element_size()
        if progress is not None:
            progress(done, total, name)


def parameter_sources(model: Transformer, entries: Mapping[str, Any]):
    """(our parameter -> the Hugging Face tensors whose rows it consists of, in order; Hugging Face name -> view)."""
    from checkpoint import hf_views

    views = hf_views(model, any(name.endswith(".experts.gate_up_proj") for name in entries))
    ours: dict[int, list[str]] = {}
    for hf, view in views.items():
        ours.setdefault(id(view if view._base is None else view._base), []).append(hf)
    return {name: ours[id(p)] for name, p in model.named_parameters()}, views


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """int32 -> uint8, eight nibbles of each word side by side along `dim`, lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    unpacked = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & 15
    return unpacked.flatten(dim, dim + 1).to(torch.uint8)


def _published_kind(config: Any, where: str) -> str:
    """'gptq', 'gptq_v2', 'awq' or 'pack-quantized'; ValueError for anything else than 4-bit integer weights."""
    config = config if isinstance(config, dict) else {}
    method, bits, act = config.get("quant_method"), config.get("bits", config.get("w_bit")), None
    kind = {"gptq": config.get("checkpoint_format", "gptq"), "awq": "awq"}.get(method, config.get("format"))
    if method == "compressed-tensors":
        groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, dict)]
        bits = {(g.get("weights") or {}).get("num_bits") for g in groups}
        bits = bits.pop() if len(bits) == 1 else sorted(map(str, bits))
        act = next((g["input_activations"] for g in groups if g.get("input_activations")), None)
    gemm = method != "awq" or str(config.get("version", "gemm")).lower() == "gemm"
    if kind not in ("gptq", "gptq_v2", "awq", "pack-quantized") or bits != 4 or act or not gemm:
        raise ValueError(
            f"{where}: quantization_config with quant_method {method!r}, format {kind!r}, {bits} bits is not supported; "
            "supported: GPTQ, AWQ (gemm) and compressed-tensors pack-quantized, 4-bit weights, 16-bit activations."
        )
    return kind


def _published_weight(read: Callable, kind: str, base: str, where: str) -> dict[str, Tensor | None]:
    """One published linear as codes [N, K], scales and zeros [K/G, N], g_idx [K] or None."""
    ct = kind == "pack-quantized"
    names = ("weight_packed", "weight_scale", "weight_zero_point") if ct else ("qweight", "scales", "qzeros")
    packed, scales, zeros = found = [read(f"{base}.{name}") for name in names]
    for name, tensor in zip(names[: 3 - ct], found, strict=False):
        if tensor is None:
            raise ValueError(f"{where}: tensor {base + '.' + name!r} is missing. Is a shard missing?")
    if not scales.isfinite().all():
        raise ValueError(f"{where}: the scales of {base} hold NaN or infinite values.")
    g_idx = read(f"{base}.weight_g_idx" if ct else f"{base}.g_idx")
    if ct:
        shape = read(f"{base}.weight_shape")
        N, K = shape.tolist() if shape is not None else (packed.shape[0], packed.shape[1] * 8)
        codes, scales = _nibbles(packed, 1)[:, :K], scales.T
        if zeros is not None:
            zeros = _nibbles(zeros, 0)[:N].T if zeros.dtype == torch.int32 else (zeros.T + 8).to(torch.uint8)
    elif kind == "awq":
        order = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))  # where columns 0..7 lie in a word
        codes, zeros = (_nibbles(t, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1) for t in (packed, zeros))
        codes = codes.T
    else:
        codes, zeros = _nibbles(packed, 0).T, _nibbles(zeros, 1)
        zeros = (zeros + 1) & 15 if kind == "gptq" else zeros  # the first format stores zero - 1
    (N, K), grid = codes.shape, scales.shape
    if len(grid) != 2 or grid[1] != N or K % grid[0] or (zeros is not None and zeros.shape != grid):
        raise ValueError(f"{where}: {base}: scales {list(grid)} or zeros do not fit a [{N}, {K}] weight.")
    g_idx = None if g_idx is None or (g_idx < 0).all() else g_idx.long()
    return {"codes": codes, "scales": scales, "zeros": zeros, "g_idx": g_idx}


def fuse_published(parts: list[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """Stored tensors of one weight whose rows are these parts (q, k, v), exactly. Groups longer than 128 (or the whole
    row) repeat their scale; act-order becomes `perm`, which all parts must share since they share their input."""
    K, groups = parts[0]["codes"].shape[1], parts[0]["scales"].shape[0]
    size = K // groups
    natural = torch.arange(K) // size
    orders = [natural if part["g_idx"] is None else part["g_idx"] for part in parts]
    if any(len(p["scales"]) != groups for p in parts) or any(not torch.equal(o, orders[0]) for o in orders):
        raise ValueError(f"{where}: fused projections differ in group size or act-order: not supported.")
    ours = next((g for g in reversed(GROUPS) if size % g == 0), 0)
    if not ours or not torch.equal(orders[0].sort().values, natural):
        raise ValueError(
            f"{where}: groups of {size} columns or an uneven g_idx: supported are 32, 64, 128, -1."
        )
    perm = None if torch.equal(orders[0], natural) else orders[0].argsort(stable=True)
    codes = torch.cat([part["codes"] for part in parts])
    codes = codes if perm is None else codes[:, perm]
    scales = torch.cat([part["scales"] for part in parts], 1).repeat_interleave(size // ours, 0)
    half = scales.to(torch.float16)
    exact = torch.equal(half.to(scales.dtype), scales)
    stored = {"qweight": codes[:, 0::2] | (codes[:, 1::2] << 4), "scales": half if exact else scales.float()}
    if any(part["zeros"] is not None and (part["zeros"] != 8).any() for part in parts):
        zeros = [torch.full_like(p["scales"], 8) if p["zeros"] is None else p["zeros"] for p in parts]
        stored["zeros"] = torch.cat([z.to(torch.uint8) for z in zeros], 1).repeat_interleave(size // ours, 0)
    return stored if perm is None else stored | {"perm": perm.to(torch.int32)}


def _fill_published(model, entries, config, where: str, device, dtype, progress: Progress | None) -> None:
    """Swap in and fill what is quantized in `entries`; read the rest as floats. Everything must be there and be used."""
    import checkpoint

    kind, used, tied = _published_kind(config, where), set(), model.lm_head is None
    marker = ".weight_packed" if kind == "pack-quantized" else ".qweight"
    (sources, _), slots = parameter_sources(model, entries), dict(model.named_parameters())

    def read(name: str) -> Tensor | None:
        used.add(name)
        return entries[name].read() if name in entries else None

    def part(base: str) -> dict[str, Tensor]:
        out = _published_weight(read, kind, base, where)
        if config.get("sym") and kind == "gptq" and (out["zeros"] == 9).all():
            out["zeros"] = None  # a writer that labels the second format as the first
        return out

    for done, (ours, names) in enumerate(sources.items()):
        slot, bases = slots[ours], [name.removesuffix(".weight") for name in names]
        if bases[0] + marker in entries:
            stacks = model.config.num_local_experts if slot.dim() == 3 else 1
            per, at = len(bases) // stacks, f"{where}: {ours}"
            fused = [fuse_published([part(b) for b in bases[i * per :][:per]], at) for i in range(stacks)]
            stored = fused[0] if slot.dim() == 2 else _stack_experts(fused, at)
            _install(model, ours, {k: v.to(device) for k, v in stored.items()}, slot, at)
        else:
            parts = [read(name) for name in names]
            if lacking := [name for name, tensor in zip(names, parts, strict=True) if tensor is None]:
                raise ValueError(f"{where}: tensor {lacking[0]!r} is missing. Is a shard missing?")
            tensor = torch.cat(parts)
            if tensor.numel() != slot.numel() or tensor.shape[-1] != slot.shape[-1]:
                raise ValueError(f"{where}: {names[0]} {list(parts[0].shape)} does not fit config.json.")
            checkpoint.check_finite(tensor, names[0], entries[names[0]].file)
            set_tensor(model, ours, tensor.view(slot.shape).to(device, dtype))
        if progress is not None:
            progress(done + 1, len(sources), ours)
    for name in entries.keys() - used:
        spare = checkpoint.IGNORED.fullmatch(name) or (tied and name == "lm_head.weight")
        spare = spare or name.endswith(".bias") and not entries[name].read().any()  # AutoGPTQ's zero biases
        if not spare:
            raise ValueError(f"{where}: unexpected tensor {name!r}; config.json describes another model.")


def _stack_experts(fused: list[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    perms = [one.pop("perm", None) for one in fused]
    if any(
        p is not perms[0] and (p is None or perms[0] is None or not torch.equal(p, perms[0])) for p in perms
    ):
        raise ValueError(f"{where}: experts with different act-orders are not supported; use static groups.")
    if any("zeros" in one for one in fused):
        for one in fused:
            one.setdefault("zeros", torch.full(one["scales"].shape, 8, dtype=torch.uint8))
    stored = {key: torch.stack([one[key] for one in fused]) for key in fused[0]}
    return stored if perms[0] is None else stored | {"perm": perms[0]}


def _install(model: nn.Module, parameter: str, stored: dict[str, Tensor], slot: Tensor, where: str) -> None:
    """Put a QuantLinear in the place of the module (or the experts' parameter) that `parameter` belongs to."""
    owner = parameter if slot.dim() == 3 else parameter.removesuffix(".weight")
    parent, _, leaf = owner.rpartition(".")
    holder = model.get_submodule(parent)
    if slot.dim() == 3 and isinstance(holder, Experts):
        holder = QuantExperts(holder.router, nn.Module(), nn.Module(), holder.per_token)
        model.get_submodule(parent.rpartition(".")[0]).mlp = holder
    bias = getattr(getattr(holder, leaf), "bias", None)
    linear = QuantLinear(stored, bias, getattr(holder, "per_token", 0))
    shape, expected = [linear.out_features, linear.in_features], list(slot.shape[-2:])
    if shape != expected:
        raise ValueError(f"{where} is {shape}, expected {expected} by config.json.")
    setattr(holder, leaf, linear)


# ---- quantizing a directory --------------------------------------------------------------------------------


@dataclass
class Tally:
    """Quality of one model against another on the same tokens, in nats."""

    positions: int = 0
    before: float = 0.0
    after: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, before: Tensor, after: Tensor, targets: Tensor) -> None:
        """Logits [M, V] of both models, targets int64 [M]; 128 rows at a time, large vocabularies are wide."""
        for p, q, ids in zip(before.split(128), after.split(128), targets.split(128), strict=True):
            p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            self.positions += ids.numel()
            self.before += float(F.nll_loss(p, ids, reduction="sum"))
            self.after += float(F.nll_loss(q, ids, reduction="sum"))
            self.divergence += float((p.exp() * (p - q)).sum())
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def report(self) -> dict[str, float]:
        """Perplexities, mean KL(before || after), share of equal most likely tokens."""
        return {
            "perplexity_before": math.exp(min(self.before / self.positions, 700)),
            "perplexity_after": math.exp(min(self.after / self.positions, 700)),
            "mean_kl": self.divergence / self.positions,
            "top1_agreement": self.agreed / self.positions,
        }


@torch.no_grad()
def measure(before: Transformer, after: Transformer, tokens: Tensor) -> dict[str, float]:
    """`Tally.report` of two loaded models on tokens [W, T + 1]: what a receipt says, computed independently of it."""
    tally = Tally()
    for row in tokens:
        logits = [m.logits(m.forward_train(row[None, :-1].to(m.device))[0])[0].cpu() for m in (before, after)]
        tally.add(*logits, row[1:])
    return tally.report()


@torch.no_grad()
def quantize_module_(
    module: nn.Module,
    prefix: str,
    spec: QuantSpec,
    stored: dict[str, Tensor],
    half: torch.dtype,
    run: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Round the linears of a float module one after the other: each sees what its rounded predecessors produce.

    stored: gets the tensors to write under full names (what is not quantized in dtype `half`); what it holds already is
    used instead of computed. run: feeds the calibration activations through `module` (GPTQ). The module is left with
    the weights that the stored tensors stand for. Returns their relative errors.
    """
    errors = {}
    for _, child, weights, bits in quantizable(module, spec):
        for full, weight in weights.items():
            key = prefix + full
            if f"{key}.qweight" not in stored and spec.algorithm == "gptq":
                matrices = weight if weight.dim() == 3 else [weight]
                options = (bits, spec.group_size, spec.act_order)
                sums = _hessians(child, full.endswith(".down"), weight, run)
                parts = [quantize_gptq(w, h, *options) for w, h in zip(matrices, sums, strict=True)]
                out = {k: torch.stack([part[k] for part in parts]) for k in parts[0]}
                out = out if weight.dim() == 3 else parts[0]
            elif f"{key}.qweight" not in stored:
                out = quantize_rtn(weight, bits, spec.group_size)
            else:
                out = {k: stored[f"{key}.{k}"] for k in ("qweight", "scales")}
            stored |= {f"{key}.{k}": v.cpu() for k, v in out.items()}
            restored = QuantLinear(out).dequantize().to(weight.device)
            errors[key] = relative_error(weight, restored)
            weight.copy_(restored)
    for name, tensor in module.named_parameters():
        if f"{prefix}{name.removesuffix('.weight')}.qweight" not in stored:
            tensor.copy_(stored.setdefault(prefix + name, tensor.to("cpu", half, copy=True)))
    return errors


def _hessians(child: nn.Module, down: bool, weight: Tensor, run: Callable[[], None]) -> list[Tensor]:
    """Sum of x x^T over the calibration inputs of a linear, or of each expert's `gate_up` or `down`."""
    K, experts = weight.shape[-1], weight.shape[0] if weight.dim() == 3 else 1
    sums = [torch.zeros(K, K, device=weight.device) for _ in range(experts)]

    def add(_, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        index = child.route(x)[1] if isinstance(child, Experts) else None
        for e, total in enumerate(sums):
            rows = x if index is None else x[(index == e).any(-1)]
            if index is not None and down:
                gate, up = (rows @ child.gate_up[e].T).chunk(2, -1)
                rows = F.silu(gate) * up
            total.addmm_(rows.T, rows)

    handle = child.register_forward_pre_hook(add)
    try:
        run()
    finally:
        handle.remove()
    return sums


def _through(forward: Callable[[Tensor], Tensor], states: Tensor, device, keep: bool = True) -> None:
    """states [W, T, H] on the host -> forward(states), in place, a batch at a time; keep = False throws it away."""
    for i in range(0, len(states), BATCH):
        out = forward(states[i : i + BATCH].to(device))
        if keep:
            states[i : i + BATCH] = out.cpu()


class _Source:
    """An unquantized model directory, read one parameter of ours at a time; `model` stays on the meta device."""

    def __init__(self, directory: Path):
        import checkpoint

        config_file, self.directory, self.files = directory / "config.json", directory, None
        self.raw = checkpoint.read_json(config_file) if config_file.exists() else None
        if done := [key for key in ("eaglet_quant", "quantization_config") if (self.raw or {}).get(key)]:
            raise UsageError(
                f"{directory} is already quantized ({done[0]} in config.json); use the original."
            )
        self.open()
        self.raw = self.raw or checkpoint.config_to_hf(self.config)  # Meta's format has no config.json
        self.model = checkpoint.build_model(self.config)
        self.names, views = parameter_sources(self.model, self.entries)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        shapes = {name: tuple(view.shape) for name, view in views.items()}
        checkpoint.check_entries(shapes, self.entries, str(directory))
        dtype = self.entries[self.names["embed_tokens.weight"][0]].dtype
        self.half = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16

    def open(self) -> None:
        """Map the files (anew: pages that were read stop counting as memory of this process)."""
        from checkpoint import open_model

        self.config, self.entries = open_model(self.directory)
        self.tied = self.config.tie_word_embeddings
        if self.tied:
            self.entries.pop("lm_head.weight", None)
        stats = [(self.directory / file).stat() for file in sorted({e.file for e in self.entries.values()})]
        found = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
        if self.files not in (None, found):
            raise ValueError(f"{self.directory}: the weights changed while they were read. Start again.")
        self.files = found

    def read(self, name: str, device) -> Tensor:
        from checkpoint import check_finite

        tensor = torch.cat([self.entries[hf].read() for hf in self.names[name]]).view(self.shapes[name])
        check_finite(tensor, name, str(self.directory))
        return tensor.to(device, torch.float32)


@torch.no_grad()
def quantize_checkpoint(
    directory: str | Path,
    out: str | Path,
    spec: QuantSpec,
    calibration: Tensor,
    evaluation: Tensor,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    refuse_kl: float | None = None,
    finish: Callable[[Path], dict[str, Any]] = lambda unfinished: {},
) -> dict[str, Any]:
    """Quantize a model directory layer by layer into the directory `out`; returns its receipt.

    One layer is in memory (in fp32) beside the activations of the texts. These pass through the float and the quantized
    layers side by side, so quality is measured without ever holding a model. Finished layers wait in OUT.partial: after
    an interruption the same call goes on from there (a note on the exception says so). `out` appears complete or not at
    all; of a run that would end the same way again nothing is left.

    Args:
        calibration: int64 [W, T], what GPTQ sees; evaluation: int64 [W, T + 1], what the receipt measures.
        refuse_kl: highest mean KL (nats) that is written; ABSURD_KL holds in any case.
        finish: called with the finished but not yet renamed directory; adds to it and to the receipt.
    """
    import checkpoint

    out, started, source = Path(out), time.time(), _Source(Path(directory))
    apply_spec_(copy.deepcopy(source.model), spec)  # refuses groups that do not fit before any work
    model, gptq, errors, stored, accepted = source.model, spec.algorithm == "gptq", {}, {}, False
    work = _partial(out, [asdict(spec), source.raw, source.files, _digest(calibration)])

    def step(unit: str, module: nn.Module, prefix: str, forward: Callable[[Tensor], Tensor]) -> None:
        """Quantize `module`, or take over what an interrupted run has stored of it."""
        path, fed = work / f"{unit}.safetensors", lambda: _through(forward, inputs, device, keep=False)
        known = {k: e.read() for k, e in checkpoint.read_entries([path]).items()} if path.exists() else {}
        errors.update(quantize_module_(module, prefix, spec, known, source.half, fed))
        for name in (n for n, tensor in known.items() if tensor.is_floating_point()):
            checkpoint.check_finite(known[name], name, "result")
        if not path.exists():
            with _one_line(path):
                checkpoint.write_safetensors(path, known)
        stored.update(
            {k: e.read() for k, e in checkpoint.read_entries([path]).items()}
        )  # mapped, not in memory

    try:
        embedding = nn.Embedding(1, 1)
        set_tensor(embedding, "weight", source.read("embed_tokens.weight", device))
        table, inputs = embedding.weight.clone(), calibration[:0]
        before = embedding(evaluation[:, :-1].to(device)).cpu()
        step("embedding", embedding, "embed_tokens.", embedding)
        after, inputs = (embedding(ids.to(device)).cpu() for ids in (evaluation[:, :-1], calibration))
        model.rotary.build(device, max(after.shape[1], inputs.shape[1]))
        for i, block in enumerate(model.layers):
            source.open()
            for name in [name for name, _ in block.named_parameters()]:
                set_tensor(block, name, source.read(f"layers.{i}.{name}", device))

            def forward(x: Tensor, block: nn.Module = block) -> Tensor:
                return block.forward_train(x, *model.rotary(torch.arange(x.shape[1], device=x.device)[None]))

            _through(forward, before, device)
            step(f"layer-{i:04}", block, f"layers.{i}.", forward)
            for states in (after, inputs):
                _through(forward, states, device)
            block.to("meta")
            if progress is not None:
                progress(i + 1, len(model.layers) + 1, f"layer {i}")
        head = nn.Sequential(OrderedDict(norm=model.norm, lm_head=nn.Linear(1, 1, bias=False)))
        set_tensor(head, "norm.weight", source.read("norm.weight", device))
        set_tensor(head, "lm_head.weight", table if source.tied else source.read("lm_head.weight", device))
        plain, tally = copy.deepcopy(head), Tally()
        step("head", head, "", head)
        for row, x, y in zip(evaluation, before, after, strict=True):
            tally.add(plain(x.to(device)).cpu(), head(y.to(device)).cpu(), row[1:])
        if source.tied and spec.lm_head == "fp16":
            del stored["lm_head.weight"]
        quality, limit = tally.report(), min(ABSURD_KL, ABSURD_KL if refuse_kl is None else refuse_kl)
        if not quality["mean_kl"] <= limit:  # NaN too
            change = f"perplexity {quality['perplexity_before']:.3f} -> {quality['perplexity_after']:.3f}"
            why = f"mean KL {quality['mean_kl']:.4f} nats, {change}; the limit is {limit:g}"
            raise ValueError(f"refused: {why}. Nothing was written; try gptq, int8 or smaller groups.")
        accepted = True
        worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
        receipt = {
            "spec": asdict(spec),
            **quality,
            "worst_layers": [{"name": name, "relative_error": error} for name, error in worst],
            "bytes_before": sum(math.prod(e.shape) * e.dtype.itemsize for e in source.entries.values()),
            "bytes_after": sum(t.numel() * t.element_size() for t in stored.values()),
            "evaluation": {"tokens": evaluation[:, 1:].numel(), "sha256": _digest(evaluation)},
            "calibration": {"tokens": calibration.numel(), "sha256": _digest(calibration)} if gptq else None,
            "computed_in": f"float32 on {device}",
        }
        raw = {k: v for k, v in source.raw.items() if k != "dtype"}
        raw["torch_dtype"] = str(source.half).removeprefix("torch.")
        raw["eaglet_quant"] = {"version": VERSION, **asdict(spec)}

        def fill(unfinished: Path) -> None:
            checkpoint.write_safetensors(unfinished / "model.safetensors", stored)
            checkpoint.write_json(unfinished / "config.json", raw)
            files = [source.directory / name for name in COPIED.split()]
            if not (source.directory / "config.json").exists():  # Meta keeps the tokenizer one folder up
                files.insert(0, source.directory.absolute().parent / "tokenizer.model")
            for file in files:
                if file.is_file():
                    shutil.copyfile(file, unfinished / file.name)
            receipt.update(finish(unfinished))
            receipt.update(seconds=round(time.time() - started, 1), peak_memory_bytes=peak_memory())
            checkpoint.write_json(unfinished / "receipt.json", receipt)

        _write_whole(out, fill)
    except Exception as error:
        room = isinstance(error.__cause__, OSError) or not isinstance(error, ValueError)  # disk, memory
        if gptq and (room or accepted) and any(work.glob("*.safetensors")):
            error.add_note(f"The finished layers wait in {work}: the same command goes on from there.")
        else:  # cheap to do again, or sure to end like this again
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work)
    if progress is not None:
        progress(1, 1, "")
    return receipt


def _digest(value: Any) -> str:
    data = (
        value.numpy().tobytes() if isinstance(value, Tensor) else json.dumps(value, sort_keys=True).encode()
    )
    return hashlib.sha256(data).hexdigest()


def _partial(out: Path, identity: Any) -> Path:
    """OUT.partial for this very job: one of another job is cleared."""
    work = out.with_name(out.name + ".partial")
    with _one_line(work):
        if not (work / _digest(identity)).exists():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            (work / _digest(identity)).touch()
    return work


def _write_whole(out: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary directory and rename it to `out`: it appears whole or not at all; an older one stays till then."""
    unfinished, old = (out.with_name(f"{out.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        with _one_line(out):
            unfinished.mkdir(parents=True)
            fill(unfinished)
            if out.exists():
                os.replace(out, old)
            os.replace(unfinished, out)
    except BaseException:
        if old.exists():
            os.replace(old, out)
        raise
    finally:
        for rest in (unfinished, old):
            shutil.rmtree(rest, ignore_errors=True)


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror or error}). Free space or choose another --out; nothing "
            "half-written was left."
        ) from error


def peak_memory() -> int | None:
    """Highest resident memory of this process so far, bytes; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- texts and command line -------------------------------------------------------------------------------


def stdlib_texts(held_out: bool) -> Iterator[str]:
    """Sources of the running interpreter's standard library, in a fixed shuffled order."""
    root, paths = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        skip = any(p in LEFT_OUT or p.startswith(("config-", "_sysconfigdata")) for p in parts)
        if not skip and (parts[0] in HELD_OUT) == held_out:
            paths.append(path)
    random.Random(0).shuffle(paths)
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")


def read_texts(path: str | Path) -> list[str]:
    """A text file, or the texts of a .jsonl file: strings, or objects with "text", "messages" or "conversations"."""
    path, texts = Path(path), []
    try:
        content = path.read_text(encoding="utf-8")
        for line in content.splitlines() if path.suffix == ".jsonl" else ():
            value = json.loads(line) if line.strip() else ""
            if isinstance(value, dict):
                turns = (
                    value.get("messages") or value.get("conversations") or [{"content": value.get("text")}]
                )
                value = "\n\n".join(turn.get("content") or turn.get("value") for turn in turns)
            texts.append(value + "")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not UTF-8 text, or not JSON lines with text ({error}).") from error
    return texts if path.suffix == ".jsonl" else [content]


def token_windows(texts: Iterable[str], tokenizer: Any, vocab_size: int, count: int, length: int) -> Tensor:
    """Up to `count` windows [W, length] spread evenly over the texts; without a tokenizer uniformly random ids."""
    if tokenizer is None:
        return torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(length))
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text)
        if len(ids) >= 8 * count * length:  # more is only slower to encode
            break
    count = min(count, len(ids) // length)
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens, at least {length} are needed; pass a longer one.")
    starts = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
    return torch.tensor([ids[at : at + length] for at in starts])


def quantize_head(path: str | Path, target: ModelConfig, spec: QuantSpec):
    """The EAGLE head at `path` rounded (RTN): (config.json, tensors, its part of the receipt)."""
    import checkpoint
    from eagle_draft import EagleHead

    file, spec = checkpoint.read_eagle(path, target), replace(spec, algorithm="rtn", act_order=False)
    with torch.device("meta"):
        head = EagleHead(file.config, checkpoint.build_model(target), file.tensors.get("draft_ids"))
    for name, tensor in file.tensors.items():
        set_tensor(head, name, tensor)
    errors = quantize_(head, spec)
    wide = {n for n, t in head.state_dict().items() if t.dtype == torch.float32 and not n.endswith(".scales")}
    tensors = {n: t.half() if n in wide else t for n, t in head.state_dict().items()}
    config = {"eaglet_quant": {"version": VERSION, **asdict(spec)}, "eaglet_head": asdict(file.config)}
    sizes = [sum(t.numel() * t.element_size() for t in group.values()) for group in (file.tensors, tensors)]
    return config, tensors, {"bytes_before": sizes[0], "bytes_after": sizes[1], "worst": max(errors.values())}


def read_head(directory: str | Path):
    """A directory of `--eagle` as a checkpoint.EagleFile; its tensors have stored names: `adopt_` puts them in a head."""
    import checkpoint

    where = Path(directory) / "config.json"
    raw = checkpoint.read_json(where)
    QuantSpec.read(raw.get("eaglet_quant"), str(where))
    try:
        given = raw["eaglet_head"]
        layer = {k: tuple(v) if isinstance(v, list) else v for k, v in given["layer"].items()}
        layer = ModelConfig(**layer | {"rope": RopeConfig(**layer["rope"])})
        config = checkpoint.EagleConfig(**given | {"layer": layer, "taps": tuple(given["taps"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where}: eaglet_head does not describe a head ({error}). Quantize it again."
        ) from error
    entries = checkpoint.read_entries(checkpoint.tensor_files(Path(directory)))
    return checkpoint.EagleFile(config, {name: entry.read() for name, entry in entries.items()}, [])


def measure_tau(
    directory: Path, head: str, tensors: dict[str, Tensor] | None, prompts: list[list[int]], device: str
) -> float:
    """Mean tokens per greedy step of a model directory with an EAGLE head, or with `tensors` in that head."""
    from generate import load
    from sampling import SamplingParams

    engine = load(directory, eagle=head, eagle_always=True, device=device)
    if tensors is not None:
        adopt_(engine.head, tensors, engine.model.device, engine.model.dtype)
    steps: list[int] = []
    for ids in prompts:
        params = SamplingParams(max_new_tokens=min(128, engine.ctx - len(ids)))
        steps += map(len, engine.generate(ids, params).run()[0].tokens_per_step)
    return sum(steps) / max(1, len(steps))


def out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out, before (generate's plan) or while it was allocated."""
    planned = isinstance(error, ValueError) and getattr(error, "code", None) == 4  # generate.UserError
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return planned or on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def show(receipt: dict[str, Any]) -> str:
    """The receipt for people."""
    r, spec = receipt, receipt["spec"]
    change = r["perplexity_after"] / r["perplexity_before"] - 1
    lines = [
        f"quality     perplexity {r['perplexity_before']:.3f} -> {r['perplexity_after']:.3f} ({change:+.2%})   mean KL "
        f"{r['mean_kl']:.4f} nats   same top token {r['top1_agreement']:.2%}   over {r['evaluation']['tokens']:,} tokens",
        f"size        {r['bytes_before'] / 1e6:.1f} MB -> {r['bytes_after'] / 1e6:.1f} MB   LM head {spec['lm_head']}",
        "worst       " + "   ".join(f"{w['name']} {w['relative_error']:.2%}" for w in r["worst_layers"]),
    ]
    if "head" in r:
        tau = ["not measured" if t is None else f"{t:.2f}" for t in (r["tau_before"], r["tau_after"])]
        lines.append(
            f"EAGLE head  {r['head']['bytes_before'] / 1e6:.1f} MB -> {r['head']['bytes_after'] / 1e6:.1f} MB   "
            f"tau {tau[0]} -> {tau[1]}"
        )
        lines += [f"note        {note}" for note in r["notes"]]
    memory = f"   peak memory {r['peak_memory_bytes'] / 1e9:.2f} GB" if r["peak_memory_bytes"] else ""
    return "\n".join([*lines, f"took        {r['seconds']:.0f} s{memory}"])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        default=str(Path(__file__).parent / "demo"),
        metavar="DIR",
        help="default: the demo model",
    )
    add("--mode", choices=MODES, default="int4")
    add("--out", metavar="DIR", help="default: CHECKPOINT-MODE")
    add("--group-size", type=int, choices=GROUPS, default=128, help="columns that share an int4 scale")
    add("--algorithm", choices=ALGORITHMS, default="rtn", help="gptq: slower, better; needs calibration text")
    add("--act-order", action="store_true", help="GPTQ: columns by activation energy")
    add("--calibration", metavar="FILE", help="text or .jsonl for GPTQ; default: Python's standard library")
    add("--lm-head", choices=HEADS, default="int8")
    add("--eagle", metavar="HEAD", help="quantize this EAGLE head too (to OUT/eagle) and compare tau")
    add(
        "--eagle-mode", choices=("int8", "int4"), help="of the head (default: --mode); int8 keeps more of tau"
    )
    add("--refuse-kl", type=float, metavar="NATS", help="write nothing if the mean KL is higher")
    add("--eval-text", metavar="FILE", help="text of the receipt; default: held-out standard library modules")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--debug", action="store_true", help="full tracebacks")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 usage, 3 bad file or refused, 4 memory, 5 internal)."""
    args = build_parser().parse_args(argv)
    kinds = {UsageError: 2, ValueError: 3}
    try:
        print(show(_main(args)))
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the layers already finished", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            raise
        code = next((code for kind, code in kinds.items() if isinstance(error, kind)), 5)
        code = 4 if out_of_memory(error) else code
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        line_start = "\r\033[K" if sys.stderr.isatty() else ""
        text = " ".join(" ".join([str(error), *getattr(error, "__notes__", [])]).split())
        print(f"{line_start}error  {name}{text}", file=sys.stderr)
        return code


def _main(args: argparse.Namespace) -> dict[str, Any]:
    import checkpoint

    spec = QuantSpec(args.mode, args.group_size, args.algorithm, args.act_order, args.lm_head)
    directory = Path(args.checkpoint)
    out = Path(args.out) if args.out else directory.with_name(f"{directory.resolve().name}-{args.mode}")
    if not directory.is_dir():
        raise UsageError(f"--checkpoint {directory} is not a directory.")
    if out.exists() and not (out / "receipt.json").is_file():
        raise UsageError(f"--out {out} exists and is not an earlier result; choose another name.")
    if args.calibration and spec.algorithm != "gptq":
        raise UsageError("--calibration is text for GPTQ; add --algorithm gptq.")
    if args.refuse_kl is not None and not args.refuse_kl > 0:
        raise UsageError(f"--refuse-kl is {args.refuse_kl}; it must be above 0 nats.")
    config = checkpoint.load_config(directory)
    tokenizer, length = load_tokenizer(directory, config.vocab_size), min(WINDOW, config.max_positions - 1)
    texts = read_texts(args.eval_text) if args.eval_text else stdlib_texts(held_out=True)
    evaluation = token_windows(texts, tokenizer, config.vocab_size, EVALUATION_WINDOWS, length + 1)
    calibration = evaluation[:0, :-1]
    if spec.algorithm == "gptq":
        texts = read_texts(args.calibration) if args.calibration else stdlib_texts(held_out=False)
        calibration = token_windows(texts, tokenizer, config.vocab_size, CALIBRATION_WINDOWS, length)

    def progress(done: int, total: int, what: str) -> None:
        if sys.stderr.isatty():
            end = "" if done < total else "\r\033[K"
            print(f"\rquantizing  {done}/{total}  {what:<12}", end=end, file=sys.stderr, flush=True)

    head_spec = replace(spec, mode=args.eagle_mode or spec.mode)
    head = quantize_head(args.eagle, config, head_spec) if args.eagle else None

    def finish(unfinished: Path) -> dict[str, Any]:
        if head is None:
            return {}
        (target := unfinished / "eagle").mkdir()
        checkpoint.write_json(target / "config.json", head[0])
        checkpoint.write_safetensors(target / "model.safetensors", head[1])
        prompts = [row[: min(64, length // 2)].tolist() for row in evaluation[:12]]
        found: dict[str, Any] = {"head": head[2], "tau_before": None, "tau_after": None, "notes": []}
        for key, model, tensors in (("tau_before", directory, None), ("tau_after", unfinished, head[1])):
            try:  # a model is quantized because it is too large: that must not cost the result
                found[key] = measure_tau(model, args.eagle, tensors, prompts, args.device)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                why = " ".join(str(error).split()) or type(error).__name__
                found["notes"].append(f"{key} was not measured, the model does not fit in memory: {why}")
        return found

    return quantize_checkpoint(
        directory, out, spec, calibration, evaluation, args.device, progress, args.refuse_kl, finish
    )


if __name__ == "__main__":
    sys.exit(main())
