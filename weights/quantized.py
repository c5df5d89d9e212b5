"""Linears and experts whose weights are int8 or int4, and what to quantize to.

A quantized module keeps the tensors as they are stored, whatever the device is:

int4  `qweight` uint8 [out, in/2] (byte j holds column 2j in its low half and column 2j+1 in its high half), `scales`
      fp16 [in/G, out]; of other makers `zeros` uint8 [in/G, out] (8 if absent) and `perm` int32 [in] (stored column j
      multiplies input perm[j]). weight = (q - zero) * scale. Instead of zeros there may be `mins` fp16 [in/G, out]:
      weight = q * scale + min
int8  `qweight` int8 [out, in], `scales` fp32 [out], or fp16 [in/G, out]. weight = q * scale

Mixtral's experts add a leading axis. After loading, `pack_` gives every module the layout that its kernel reads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from kernels.tuned import counters_of
from model import Experts, SelfCounting, Transformer
from support.errors import BadFileError, UsageError
from support.reader import check
from weights.shards import RankConcat, RankEmbedding, common_rows

MODES = ("int8", "int4")
ALGORITHMS = ("rtn", "gptq")
HEADS = ("fp16", "int8", "int4")
GROUPS = (32, 64, 128)
TENSORS = ("qweight", "scales", "zeros", "mins", "perm")
# The embedding that layers have of their own, under our name and Hugging Face's. A step reads a row of it for each token,
# so it is held as it is stored where that takes less memory.
PER_LAYER = ("token_inputs.embed_tokens.weight", "embed_tokens_per_layer.weight")
# Tables whose rows are looked up, so that they are neither rounded nor packed, but for a tied embedding.
LOOKED_UP = ("embed_tokens.weight", "predecessor.weight", "successor.weight")
Stored = Mapping[str, Tensor]  # the tensors of one quantized weight, by the names of TENSORS


@dataclass(frozen=True)
class QuantSpec:
    """What to quantize to. `group_size` counts for int4 only.

    With `act_order` GPTQ updates the input columns by descending activation energy. The groups stay where they are, so
    nothing is permuted when the model runs. Raises UsageError for values that are not supported.
    """

    mode: str = "int4"
    group_size: int = 128
    algorithm: str = "rtn"
    act_order: bool = False
    lm_head: str = "int8"

    def __post_init__(self) -> None:
        allowed = {"mode": MODES, "group_size": GROUPS, "algorithm": ALGORITHMS, "lm_head": HEADS}
        for name, values in allowed.items():
            if (value := vars(self)[name]) not in values:
                listed = ", ".join(map(str, values))
                raise UsageError(f"quantization {name} = {value!r:.80}; allowed: {listed}.")
        if self.act_order and self.algorithm != "gptq":
            raise UsageError("--act-order orders GPTQ's column updates; add --algorithm gptq.")

    def bits(self, name: str, in_features: int) -> int:
        """Bits of the linear `name`: 4, 8, or 16 if it is left alone: a router, a shared expert's gate, the few rows of a
        recurrent layer that become exponents, an fp16 LM head.

        Raises UsageError if the group size does not divide its inputs.
        """
        leaf = name.rpartition(".")[2]
        kind = "fp16" if leaf in ("router", "shared_gate", "ba") else self.lm_head if leaf == "lm_head" else self.mode
        if kind == "int4" and in_features % self.group_size:
            fits = [str(g) for g in GROUPS if in_features % g == 0]
            advice = f"use --group-size {' or '.join(fits)}" if fits else "use --mode int8"
            problem = f"group size {self.group_size} does not divide its {in_features} inputs"
            raise UsageError(f"{name}: {problem}; {advice}.")
        return {"fp16": 16, "int8": 8, "int4": 4}[kind]


SPEC = {"mode": str, "group_size": int, "algorithm": str, "act_order?": bool, "lm_head": str}
VERSION = 1


def spec_to_json(spec: QuantSpec) -> dict[str, Any]:
    """The `eaglet_quant` object of a config.json."""
    return {"version": VERSION, **asdict(spec)}


def read_spec(value: Any, where: str) -> QuantSpec:
    """The QuantSpec of an `eaglet_quant` object. Raises ValueError for another version or for unknown values."""
    if (version := check(value, {"version": int}, where, "eaglet_quant")["version"]) != VERSION:
        versions = f"eaglet_quant version {version!r:.40}, this program reads version {VERSION}"
        raise ValueError(f"{where}: {versions}. Quantize the original checkpoint again.")
    check(value, SPEC, where, "eaglet_quant")
    try:
        return QuantSpec(**{name: value[name] for name in vars(QuantSpec()) if name in value})
    except UsageError as error:
        raise BadFileError(f"{where}: {error}") from error


def empty_tensors(shape: tuple[int, ...], bits: int, group_size: int) -> Stored:
    """Meta tensors for a weight of `shape` that is rounded here, so without zeros and perm."""
    lead, N, K = shape[:-2], *shape[-2:]
    layout = {"qweight": ((N, K // 2), torch.uint8), "scales": ((K // group_size, N), torch.float16)}
    if bits == 8:
        layout = {"qweight": ((N, K), torch.int8), "scales": ((N,), torch.float32)}
    return {k: torch.empty(*lead, *size, dtype=d, device="meta") for k, (size, d) in layout.items()}


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 [..., in], two in a byte, uint8 [..., in / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


class QuantLinear(SelfCounting):
    """A linear over stored tensors. With an expert axis it is one matrix kind of all experts.

    The kernel's packing is made once per dtype and kept. If the packed form is lossless, the original tensors are freed:
    on CUDA at once, and for a dequantized matrix by `pack_`.
    """

    def __init__(self, stored: Mapping[str, Tensor | None], bias: Tensor | None = None, per_token: int = 0):
        """per_token: how many experts each token uses, if there are any."""
        super().__init__()
        codes = stored["qweight"]
        self.bits = 4 if codes.dtype == torch.uint8 else 8
        self.per_token = per_token
        self.out_features, self.in_features = codes.shape[-2], codes.shape[-1] * 8 // self.bits
        grouped = stored["scales"].dim() == codes.dim()
        self.group_size = self.in_features // (stored["scales"].shape[-2] if grouped else 1)
        self.experts = codes.shape[0] if codes.dim() == 3 else 0
        for name in TENSORS:
            self.register_buffer(name, stored.get(name))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.packed: kernels.PackedWeight | None = None
        self.packed_for: torch.dtype | None = None

    def pack(self, dtype: torch.dtype, reuse: bool = False) -> kernels.PackedWeight:
        """What the active kernel backend reads for activations of `dtype`. Kept; make it before tracing with `pack_`."""
        if self.packed is None or (self.packed_for != dtype and self.qweight is not None):
            self.packed = self._pack(dtype, "auto", reuse)
            self.packed_for = dtype
            if self.packed.layout == "planes" and self.qweight.is_cuda:
                self.qweight = None
                # those of int4 lie in the packed weight
                self.scales, self.zeros, self.mins = self.packed.scales, self.packed.zeros, None
        return self.packed

    def repack(self, dtype: torch.dtype) -> None:
        """Pack for the backend that is active now. A dense matrix or tiles replace the codes, which follow from them.

        Under Triton's interpreter the codes stay. A CPU has a second backend there, which may need them next.
        """
        if self.qweight is None:
            return
        self.packed, replaced = None, not kernels.INTERPRETED
        if self.pack(dtype, replaced).layout in ("dense", "tiles") and replaced:
            self.qweight = None
        if self.packed.layout == "tiles":  # one copy of everything
            self.scales, self.mins, self.zeros = self.packed.scales, self.packed.mins, None

    def _pack(self, dtype: torch.dtype, layout: str, reuse: bool = False) -> kernels.PackedWeight:
        def pack(rows: slice, reuse: bool = False) -> kernels.PackedWeight:
            codes, scales = self.qweight[rows], self.scales[rows]
            if self.bits == 8:
                return replace(kernels.pack_int8(codes, scales, dtype, layout, reuse=reuse), perm=self.perm)
            zeros = None if self.zeros is None else self.zeros[rows]
            how = {"mins": self.mins, "reuse": reuse}
            return kernels.pack_int4(codes, scales, zeros, self.group_size, self.perm, dtype, layout, **how)

        if not self.experts or layout == "plain":
            return pack(slice(None), reuse)
        first = pack(slice(1))
        if first.layout in ("plain", "tiles"):  # views of what is stored, or what takes its place
            return pack(slice(None), reuse)
        # One expert at a time: unpacked codes are eight times as large as packed ones, and there may be many experts.
        weight = first.weight.new_empty(self.experts, *first.weight.shape[1:])
        weight[:1].copy_(first.weight)
        for e in range(1, self.experts):
            weight[e : e + 1].copy_(pack(slice(e, e + 1)).weight)
        kept = {} if first.scales is None else {"scales": self.scales}  # only of int8
        return replace(first, weight=weight, **kept)

    def forward(self, x: Tensor, residual: Tensor | None = None, gated: int = 0) -> Tensor:
        """x [..., in] -> [..., out] (+ residual). gated: one of `kernels.GATES`, for [..., out / 2]."""
        return kernels.packed_linear(x, self.pack(x.dtype), self.bias, residual, gated)

    def heads(self, x: Tensor, head_dim: int, *turn: Any) -> tuple[Tensor, Tensor | None]:
        """`forward` of the projection of queries, keys and values, and then `kernels.rope_write_kv` with `turn`."""
        return kernels.packed_linear_rope(x, self.pack(x.dtype), self.bias, head_dim, *turn)

    def logits(self, x: Tensor) -> Tensor:
        """`forward` of a language-model head: the same values in float32 or wider."""
        return kernels.packed_linear(x, self.pack(x.dtype), self.bias, wide=True)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [(E,) out, in] with its columns in the order of the inputs, computed in fp32 and rounded once.

        If a packed matrix has replaced the codes, it was rounded to the dtype that it was packed for before.
        """
        plain = self.packed if self.qweight is None else self._pack(dtype, "plain")
        weight = kernels.dequantize(plain, dtype)
        return weight if self.perm is None else weight[..., self.perm.argsort()]

    def rows(self, ids: Tensor) -> Tensor:
        """The rows ids [M] of the matrix [out, in], float32 [M, in]. Nothing else is dequantized."""
        if self.qweight is None:
            rows = kernels.packed_rows(self.packed, ids)
            return rows if self.perm is None else rows[:, self.perm.argsort()]
        stored = dict(self.named_buffers())
        rows = {name: stored[name][..., ids] for name in stored.keys() - {"qweight", "perm"}}
        return QuantLinear(stored | rows | {"qweight": self.qweight[ids]}).dequantize()

    def weight_bytes_read(self, nodes: int) -> float:
        """Bytes that a forward of `nodes` rows reads. Of experts, those that are expected to be touched count."""
        codes, held = (self.qweight, self) if self.qweight is not None else (self.packed.weight, self.packed)
        parts = (codes, held.scales, held.zeros, held.mins)
        share = 1 - (1 - self.per_token / self.experts) ** nodes if self.experts else 1.0
        return share * sum(t.nbytes for t in parts if t is not None) + sum(p.nbytes for p in self.parameters())

    def _apply(self, fn, recurse: bool = True):
        """Move between devices. A change of dtype is meant for activations, so the scales stay as they were stored."""
        kept = {name: self._buffers[name] for name in ("scales", "mins")}
        super()._apply(fn, recurse)
        for name, stored in kept.items():
            if stored is not None and self._buffers[name].dtype != stored.dtype:
                self._buffers[name] = stored.to(self._buffers[name].device)
        if self.qweight is not None:
            self.packed = None
        elif fn(self.packed.weight[:0]).device != self.packed.weight.device:
            raise ValueError("packed weights cannot move to another device; load the model again on that one.")
        return self


class FloatLinear(QuantLinear):
    """A linear, or one matrix kind of all experts, kept in the layout of the kernels from the start."""

    def __init__(self, packed: kernels.PackedWeight, bias: nn.Parameter | None = None, per_token: int = 0):
        SelfCounting.__init__(self)
        for name in TENSORS:
            self.register_buffer(name, None)
        self.out_features, self.in_features, self.bits = packed.n, packed.k, packed.bits
        self.packed, self.packed_for, self.perm = packed, None, packed.perm
        self.bias = bias
        self.per_token = per_token
        self.experts = len(packed.weight) if per_token else 0


class QuantEmbedding(FloatLinear):
    """An embedding of its own that is packed. It gives rows in `dtype`."""

    def __init__(self, packed: kernels.PackedWeight, dtype: torch.dtype):
        super().__init__(packed)
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return kernels.packed_rows(self.packed, tokens, self.dtype)

    def weight_bytes_read(self, nodes: int) -> float:
        return 0.0  # as of every embedding


class TiedEmbedding(nn.Module):
    """The embedding of a model whose LM head has the same weight and is packed. It reads rows of that head in `dtype`.

    It holds no weights: a forward reads the LM head's, and `Transformer.weight_bytes` counts the rows.
    """

    def __init__(self, head: QuantLinear, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        self.head = (head,)  # it belongs to the model, so it is no part of this module

    def forward(self, tokens: Tensor) -> Tensor:
        return kernels.packed_rows(self.head[0].pack(torch.float32), tokens, self.dtype)


def lm_head_rows(model: Transformer, ids: Tensor | None = None) -> Tensor:
    """The rows ids [M] of the LM head, or all of them [M, H]; float32 of a quantized one, also of a tied one."""
    head = model.lm_head or model.embed_tokens
    if isinstance(head, RankConcat):
        ids = torch.arange(model.config.vocab_size, device=model.device) if ids is None else ids
        own_rows = head.inner.rows if isinstance(head.inner, QuantLinear) else head.inner.weight.__getitem__
        return common_rows(ids, head.inner.out_features, own_rows, head.shard)
    if not isinstance(head, QuantLinear):
        return head.weight.detach() if ids is None else head.weight.detach()[ids]
    return head.dequantize() if ids is None else head.rows(ids)


def pack_(module: nn.Module, dtype: torch.dtype) -> None:
    """Pack all weights for the active kernel backend. Call this before tracing.

    Codes that the packing replaces are freed. Other weights can be packed again for another backend. The Triton kernels
    take 16-bit linears and experts as they lie, so that a row has the same bits in a forward of any width. The CPU
    kernels take the float32 weights of linears, and of a tied head, in a layout of their own. Without them the weights of
    wide layers are laid out column by column on a CPU: one row times such a float32 matrix was measured 1.1 to 1.3 times
    as fast on an AMD EPYC. The values are unchanged.
    """
    model = module if isinstance(module, Transformer) else None
    head = model.lm_head.inner if model and isinstance(model.embed_tokens, RankEmbedding) else None
    tied_parts = isinstance(head, nn.Linear) and head.weight is model.embed_tokens.inner.weight
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and (packed := kernels.pack_float(child.weight)):
            replace_module(module, name, FloatLinear(packed, child.bias))
        elif isinstance(child, Experts) and not child.is_packed and (packed := kernels.pack_float(child.gate_up)):
            for leaf, weight in {"gate_up": packed, "down": kernels.pack_float(child.down)}.items():
                replace_module(child, leaf, FloatLinear(weight, None, child.per_token))
    if model and model.lm_head is None and (packed := kernels.pack_float(model.embed_tokens.weight)):
        model.lm_head = FloatLinear(packed)
        if packed.layout == "tiles":  # the embedding's own layout is gone
            model.embed_tokens = TiedEmbedding(model.lm_head)
    if tied_parts and isinstance(head := model.lm_head.inner, FloatLinear) and head.packed.layout == "tiles":
        model.embed_tokens.inner = TiedEmbedding(head)
    for child in module.modules():
        tied = isinstance(child, nn.Embedding) and model and model.lm_head is None
        if isinstance(child, nn.Linear) or tied:
            w = child.weight
            if w.device.type == "cpu" and w.dtype == torch.float32 and w.shape[0] >= w.shape[1]:
                w.data = w.data.t().contiguous().t()
        if isinstance(child, QuantLinear):
            child.repack(dtype)


def weights_digest(model: nn.Module) -> str:
    """A hash of every tensor of a model, those that are packed for the kernels included. It reads all of them once."""
    tensors = model.state_dict()
    for place, module in model.named_modules():
        for packed in (value for value in vars(module).values() if isinstance(value, kernels.PackedWeight)):
            tensors |= {f"{place}.{name}": part for name, part in vars(packed).items() if isinstance(part, Tensor)}
    return digest(tensors)


def digest(value: Any) -> str:
    """The SHA-256 of a tensor, of tensors by name, or of what JSON can hold."""
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().flatten().view(torch.uint8).cpu().numpy()).hexdigest()
    if isinstance(value, dict) and all(isinstance(tensor, Tensor) for tensor in value.values()):
        value = {name: [str(t.dtype), list(t.shape), digest(t)] for name, t in value.items()}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def held_dtype(name: str, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a float parameter is held by a model of `dtype`. name: ours."""
    halves = stored in (torch.float16, torch.bfloat16)
    return stored if halves and name.endswith(PER_LAYER) and stored.itemsize < dtype.itemsize else dtype


def padded(rows: int, to: int = 128) -> int:
    """So many rows, rounded up to whole blocks."""
    return -(-rows // to) * to


def _codes_bytes(shape: Sequence[int], width: int, bits: int, layout: str, dtype: torch.dtype) -> int:
    """`held_bytes` of codes of so many bits, whose stored numbers have `width` bytes."""
    *experts, rows, last = shape
    count, columns = math.prod(experts), last * width * 8 // bits
    if layout == "floats":
        return count * rows * columns * dtype.itemsize
    if layout == "tiles" and (rows % kernels.CPU_TILE or columns % 32):  # they become floats
        return count * padded(rows, kernels.CPU_TILE) * columns * 4
    if layout == "planes" and width == 1:  # rows and columns padded to blocks of 128, and counters of the split sums
        return count * padded(rows) * padded(columns) * bits // 8 + 4 * counters_of(rows)
    # torch's int4pack cannot be read back, so the codes stay beside it
    twice = layout == "torch" and bits == 4 and not experts and rows % 16 == 0
    return count * rows * last * width * (2 if twice else 1)


def held_bytes(
    stored: Mapping[str, Any], dtype: torch.dtype, device: str, backend: str = "auto", tied: bool = False,
    rounded: bool = False,
) -> int:  # fmt: skip
    """Bytes that a model or head takes after loading and `pack_`, counted from its stored tensors.

    The kernels decide on the packing. This function repeats their decision, and a test compares the two. The count is
    exact for our own format and within a few per cent for published ones.

    Args:
        stored: anything with a shape and a dtype by name, such as `weights.files.Entry`.
        dtype: of the activations.
        device: 'cpu' or 'cuda'.
        backend: mode of the `kernels.KernelBackend`.
        tied: whether the embedding is a float LM head, too.
        rounded: whether float linears are rounded to int8 (`loading.drafting.round_head_`).
    """
    tiles = backend == "cpu" and dtype == torch.float32
    planes = dtype != torch.float64 and (backend == "triton" or (backend == "auto" and device == "cuda"))
    on_cpu = "torch" if dtype == torch.bfloat16 else "floats"  # where our kernels do not run
    layout = "tiles" if tiles else "planes" if planes else on_cpu if device == "cpu" else ""
    total = 0

    def multiplied(name: str, shape: Sequence[int]) -> bool:
        linear = len(shape) == 2 and name.endswith("weight") and (tied or not name.endswith(LOOKED_UP))
        return linear or (len(shape) == 3 and shape[1] > 1)  # experts, and no convolution

    for name, tensor in stored.items():
        if isinstance(tensor.dtype, str):
            continue  # torch has no such dtype, and loading refuses the tensor by name
        leaf, shape, width = name.rpartition(".")[2], tensor.shape, tensor.dtype.itemsize
        count = math.prod(shape)
        if leaf in ("qweight", "weight_packed"):
            total += _codes_bytes(shape, width, 8 if tensor.dtype == torch.int8 else 4, layout, dtype)
        elif leaf in ("scales", "weight_scale"):
            paired = layout == "torch" and width == len(shape) == 2
            if planes and width == 2:  # inside the packed weight
                count = count // shape[-1] * padded(shape[-1])
            total += count * (width + (2 * dtype.itemsize if paired else 0))
        elif leaf in ("qzeros", "weight_zero_point"):
            total += count * (8 if width == 4 else 1) * (4 if tiles else 1)
        elif leaf in ("mins", "perm") or not tensor.dtype.is_floating_point:
            total += count * width
        elif name.endswith(PER_LAYER):
            total += count * held_dtype(name, tensor.dtype, dtype).itemsize
        elif planes and rounded and multiplied(name, shape):
            total += padded(shape[0]) * padded(shape[1]) + 4 * (shape[0] + counters_of(shape[0]))
        elif tiles and multiplied(name, shape):
            whole = count // shape[-2] * padded(shape[-2], kernels.CPU_TILE)
            total += count + 4 * shape[0] if rounded else whole * width
        else:
            total += count * dtype.itemsize
    return total


def quantizable(module: nn.Module, spec: QuantSpec) -> Iterator[tuple[nn.Module, dict[str, Tensor], int]]:
    """(module, its weights by full name, bits) of every linear and experts module that `spec` quantizes."""
    for name, child in list(module.named_modules()):
        weights = {}
        if isinstance(child, Experts) and not child.is_packed:
            weights = {f"{name}.gate_up": child.gate_up, f"{name}.down": child.down}
        elif isinstance(child, nn.Linear):
            weights = {name: child.weight}
        bits = min((spec.bits(full, w.shape[-1]) for full, w in weights.items()), default=16)
        if bits < 16:
            yield child, weights, bits


def largest_groups(spec: QuantSpec, module: nn.Module) -> QuantSpec:
    """The same with the largest group size that divides the inputs of all that becomes int4 in `module`.

    Raises UsageError if there is none.
    """
    smallest = replace(spec, group_size=GROUPS[0])
    found = [(weights, bits) for _, weights, bits in quantizable(module, smallest)]
    common = math.gcd(*(w.shape[-1] for weights, bits in found if bits == 4 for w in weights.values()))
    return replace(spec, group_size=max(size for size in GROUPS if common % size == 0))


def apply_spec_(module: nn.Module, spec: QuantSpec) -> nn.Module:
    """Swap every linear (and Mixtral's experts) for an empty quantized one on the meta device. Returns `module`.

    The module is a Transformer, or anything else made of linears such as an EAGLE head. A tied LM head gets a quantized
    copy of its own unless spec.lm_head is fp16.
    """
    if isinstance(module, Transformer) and module.lm_head is None and spec.lm_head != "fp16":
        untie_(module)
    for _, weights, bits in quantizable(module, spec):
        for full, weight in weights.items():
            empty = empty_tensors(weight.shape, bits, spec.group_size)
            install_(module, full, empty, weight.shape, full, "meta")
    return module


def untie_(model: Transformer) -> None:
    """Give a model whose LM head is its embedding an LM head of its own, on the meta device."""
    model.lm_head = nn.Linear(*reversed(model.embed_tokens.weight.shape), bias=False, device="meta")


def rows_from(stored: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
    """The rows from `first` on of linears: on the first axis of weights and codes, on the last one of scales."""
    return {k: tensor[first:] if k.endswith("weight") else tensor[..., first:] for k, tensor in stored.items()}


def row_parts(linears: Sequence[nn.Linear | QuantLinear], first: int) -> nn.Linear | QuantLinear:
    """One linear with the rows from `first` on of several that have the same input, none of which is packed."""
    tensors = [rows_from(layer.state_dict(), first) for layer in linears]
    stored = {k: torch.cat([held[k] for held in tensors], 0 if k.endswith("weight") else -1) for k in tensors[0]}
    if "weight" not in stored:
        return QuantLinear(stored)
    out = nn.Linear(*stored["weight"].shape[::-1], bias=False, device="meta")
    out.weight = nn.Parameter(stored["weight"].detach(), requires_grad=False)
    return out


def replace_module(module: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` in the place of the submodule called `name`, or of the experts' parameter."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    owner._parameters.pop(leaf, None)
    setattr(owner, leaf, new)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer called `name`."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in owner._parameters else tensor)


def install_(
    model: nn.Module, parameter: str, weight: Stored | kernels.PackedWeight, size: torch.Size, where: str,
    device: torch.device | str, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Put a quantized module in the place of the module, or of the experts' matrix, that `parameter` belongs to.

    dtype: of the rows that an embedding gives. Raises ValueError for a weight of another shape than `size`.
    """
    kind = FloatLinear
    if not isinstance(weight, kernels.PackedWeight):
        kind, weight = QuantLinear, {leaf: tensor.to(device) for leaf, tensor in weight.items()}
    name = parameter.removesuffix(".weight")
    if len(size) == 3:
        new = kind(weight, None, model.get_submodule(name.rpartition(".")[0]).per_token)
    elif isinstance(old := model.get_submodule(name), nn.Embedding):
        new = QuantEmbedding(weight, dtype)
    else:
        new = kind(weight, old.bias)
    shape, expected = [new.out_features, new.in_features], list(size[-2:])
    if shape != expected:
        raise ValueError(f"{where} is {shape}, expected {expected} by config.json.")
    replace_module(model, name, new)


def adopt_(module: nn.Module, tensors: Mapping[str, Tensor], device, dtype: torch.dtype) -> None:
    """Put tensors into a module such as an EAGLE head. A linear whose codes are among them becomes a quantized one.

    Floats are cast to `dtype`, but scales keep theirs. Raises ValueError for codes of another shape than the linear's.
    """
    for name, tensor in tensors.items():
        base, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            held = {key: tensors[f"{base}.{key}"] for key in TENSORS if f"{base}.{key}" in tensors}
            install_(module, base, held, module.get_submodule(base).weight.shape, base, device)
        elif leaf not in TENSORS:
            set_tensor(module, name, tensor.to(device, dtype if tensor.is_floating_point() else None))
