"""TODO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from model import ConfigReader, Experts, SelfCounting, Transformer
from support.errors import UsageError
from weights.files import FLOATS, Progress, check_finite
from weights.hf import hf_views

VERSION = 1  # of the stored format


MODES, ALGORITHMS, HEADS, GROUPS = ("int8", "int4"), ("rtn", "gptq"), ("fp16", "int8", "int4"), (32, 64, 128)


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


class QuantLinear(SelfCounting):
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


def fill_(
    module: nn.Module, entries: Mapping[str, Any], where: str, device, dtype, progress: Progress | None
) -> None:
    """Fill a meta module from entries (checkpoint.Entry) with exactly its state-dict names, shapes and kinds."""

    expected, done = dict(module.state_dict()), 0
    for what, odd in (("missing", expected.keys() - entries), ("unexpected", entries.keys() - expected)):
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ValueError(f"{where}: {what} tensor {min(odd)!r}{more}. Quantize the original again.")
    for name, slot in expected.items():
        entry, floats = entries[name], slot.is_floating_point()
        kind = entry.dtype in FLOATS if floats else entry.dtype == slot.dtype
        if entry.shape != tuple(slot.shape) or not kind:
            found, wanted = f"{entry.dtype} {list(entry.shape)}", f"{slot.dtype} {list(slot.shape)}"
            hint = "eaglet_quant in config.json and the weights do not belong together"
            raise ValueError(f"{where}: {name} is {found}, expected {wanted}; {hint}.")
    total = sum(t.numel() * t.element_size() for t in expected.values())
    for name, slot in expected.items():
        tensor, floats = entries[name].read(), slot.is_floating_point()
        if floats:
            check_finite(tensor, name, where)
        if name.endswith(".perm") and tensor.sort().values.tolist() != list(range(len(tensor))):
            raise ValueError(f"{where}: {name} is not a permutation of the inputs.")
        half = dtype if floats and not name.endswith(".scales") else None
        set_tensor(module, name, tensor.to(device, half, copy=True))  # off the mapped file
        done += slot.numel() * slot.element_size()
        if progress is not None:
            progress(done, total, name)


def parameter_sources(model: Transformer, entries: Mapping[str, Any]):
    """(our parameter -> the Hugging Face tensors whose rows it consists of, in order; Hugging Face name -> view)."""

    views = hf_views(model, any(name.endswith(".experts.gate_up_proj") for name in entries))
    ours: dict[int, list[str]] = {}
    for hf, view in views.items():
        ours.setdefault(id(view if view._base is None else view._base), []).append(hf)
    return {name: ours[id(p)] for name, p in model.named_parameters()}, views
