"""Quantized checkpoints: our own format, and the published 4-bit ones.

Ours is a config.json with `eaglet_quant` and one model.safetensors. Its tensors are those of `weights.quantized`, under
the names of the modules' state dict.

Published are GPTQ, AWQ (gemm) and compressed-tensors pack-quantized. Their codes are unpacked and put in our layout,
exactly. Projections that our modules fuse (q, k and v, for example) must share their groups. What such a checkpoint does
not quantize is read as floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from kernels import PackedWeight
from model import Experts, Transformer
from support.reader import check, refusal
from weights.files import FLOATS, IGNORED, INTEGERS, Destination, Entries, check_entries, check_finite, few_names
from weights.hf import parameter_sources, read_parameter, row_order, views_for
from weights.quantized import (
    GROUPS,
    FloatLinear,
    QuantEmbedding,
    QuantExperts,
    QuantLinear,
    QuantSpec,
    Stored,
    apply_spec_,
    pack_nibbles,
    replace_module,
    set_tensor,
)

Part = dict[str, Tensor | None]  # one published linear, as `_read_linear` returns it
# The quantized weight of a parameter, from its name, the names of its sources and its slot in the model; None for floats.
Packing = Callable[[str, list[str], Tensor], Stored | PackedWeight | None]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where columns 0 to 7 lie in a word of AWQ


def check_stored(expected: Mapping[str, Tensor], entries: Entries, where: str) -> None:
    """`check_entries` for a quantized module. expected: its tensors, of which those of integers have exact dtypes."""
    exact = {name: slot.dtype for name, slot in expected.items() if not slot.is_floating_point()}
    check_entries({name: tuple(slot.shape) for name, slot in expected.items()}, entries, where, exact)


def read_stored(entries: Entries, name: str, where: str) -> Tensor:
    """One tensor of a quantized module. Raises ValueError in one line for values that it cannot have."""
    tensor = entries[name].read()
    if tensor.is_floating_point():
        check_finite(tensor, name, where)
    if name.endswith(".perm") and tensor.sort().values.tolist() != list(range(len(tensor))):
        raise ValueError(f"{where}: {name} is not a permutation of the inputs.")
    if name.endswith(".zeros") and (tensor > 15).any():
        raise ValueError(f"{where}: {name} holds zeros above 15. Damaged file?")
    return tensor


def fill_stored(model: Transformer, entries: Entries, spec: QuantSpec, where: str, to: Destination) -> None:
    """Make a meta model a quantized one and fill it from entries under its state-dict names, one tensor at a time.

    Embedding, norms and biases are cast. Codes and scales stay exactly as they are stored. Raises ValueError in one line
    for tensors that do not match.
    """
    expected = dict(apply_spec_(model, spec, entries).state_dict())
    check_stored(expected, entries, where)
    done, total = 0, sum(slot.nbytes for slot in expected.values())
    for name, slot in expected.items():
        tensor = read_stored(entries, name, where)
        cast = to.dtype if slot.is_floating_point() and not name.endswith(".scales") else None
        set_tensor(model, name, tensor.to(to.device, cast, copy=True))  # a copy lets go of the mapped file
        done += slot.nbytes
        to.progress(done, total, name)


class Layout(NamedTuple):
    """How published weights are packed. group_size: -1 for whole rows, None if the config does not say it."""

    kind: str  # gptq | gptq_v2 | awq | pack-quantized
    group_size: int | None
    symmetric: bool


def published_layout(config: Any, where: str) -> Layout:
    """What a `quantization_config` says. Raises ValueError for anything but 4-bit integer weights."""
    keys = "quant_method format checkpoint_format version".split()
    shape = dict.fromkeys((f"{key}?" for key in keys), (str, int, None)) | {"sym?": (bool, None)}
    scheme = {"num_bits?": (int, None), "group_size?": (int, None)}
    group = {"weights?": (scheme, None), "input_activations?": (dict, None)}
    shape |= {"config_groups?": ({"*": group}, None)}
    shape |= dict.fromkeys(("bits?", "w_bit?", "group_size?", "q_group_size?"), (int, None))
    check(config, shape, where, "quantization_config")
    method, bits, act = config.get("quant_method"), config.get("bits", config.get("w_bit")), None
    size = config.get("group_size", config.get("q_group_size"))
    kind = {"gptq": config.get("checkpoint_format", "gptq"), "awq": "awq"}.get(method, config.get("format"))
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        schemes = [group.get("weights") or {} for group in groups]
        bits, size = ({scheme.get(key) for scheme in schemes} for key in ("num_bits", "group_size"))
        bits = bits.pop() if len(bits) == 1 else sorted(map(str, bits))
        size = size.pop() if len(size) == 1 else None
        act = next((g["input_activations"] for g in groups if g.get("input_activations")), None)
    gemm = method != "awq" or str(config.get("version", "gemm")).lower() == "gemm"
    if kind not in ("gptq", "gptq_v2", "awq", "pack-quantized") or bits != 4 or act or not gemm:
        raise ValueError(
            f"{where}: quantization_config with quant_method {method!r:.30}, format {kind!r:.30}, {bits!s:.30} bits is "
            "not supported; supported: GPTQ, AWQ (gemm) and compressed-tensors pack-quantized, 4-bit weights, 16-bit "
            "activations."
        )
    if size is not None and size != -1 and not 1 <= size <= 2**31:
        raise ValueError(f"{where}: group_size is {size}; allowed: 1 or more, or -1 for whole rows.")
    return Layout(kind, size, config.get("sym") is True)


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """int32 -> uint8, the eight nibbles of each word side by side along `dim`, lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    unpacked = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & 15
    return unpacked.flatten(dim, dim + 1).to(torch.uint8)


def _read_linear(entries: Entries, layout: Layout, base: str, K: int, where: str) -> Part:
    """One published linear of K inputs as codes [N, K], scales and zeros [K/G, N], and g_idx [K] or None.

    Raises ValueError unless every tensor has the dtype and the shape that the layout and the others ask for.
    """
    compressed, awq = layout.kind == "pack-quantized", layout.kind == "awq"
    names = "weight_packed weight_scale weight_zero_point weight_g_idx" if compressed else "qweight scales qzeros g_idx"
    packed, scale, zero, index = names.split()

    def read(name: str, dtypes: Iterable[torch.dtype], *shape: int) -> Tensor:
        if (entry := entries.get(f"{base}.{name}")) is None:
            raise refusal(where, f"tensor {base + '.' + name!r} is missing.", "Is a shard missing?")
        if entry.dtype not in dtypes or entry.shape != shape:
            has = f"{base}.{name} is {entry.dtype} {list(entry.shape)[:9]}"
            wanted = f"{' or '.join(str(d).removeprefix('torch.') for d in dtypes)} {list(shape)}"
            raise refusal(where, f"{has}, which does not fit a weight of {K} inputs: expected {wanted}.")
        return entry.read()

    words = (torch.int32,)
    rows = shape[compressed ^ 1] if len(shape := entries[f"{base}.{packed}"].shape) == 2 else 0
    N = rows * (8 if awq else 1)
    grid = entries[f"{base}.{scale}"].shape if f"{base}.{scale}" in entries else ()
    groups = grid[compressed] if len(grid) == 2 else 0
    if layout.group_size:
        groups = 1 if layout.group_size == -1 else -(-K // layout.group_size)
    codes = read(packed, words, *((N, -(-K // 8)) if compressed else (K, rows) if awq else (K // 8, N)))
    scales = read(scale, FLOATS, *((N, groups) if compressed else (groups, N)))
    check_finite(scales, f"{base}.{scale}", where)
    if not groups or K % groups:
        raise ValueError(f"{where}: {base}: {groups} groups do not fit a [{N}, {K}] weight.")
    g_idx = read(index, (torch.int32, torch.int64), K) if f"{base}.{index}" in entries else None
    zeros = None
    if compressed:
        codes, scales = _nibbles(codes, 1)[:, :K], scales.T
        if f"{base}.weight_shape" in entries and (given := read("weight_shape", INTEGERS, 2).tolist()) != [N, K]:
            raise ValueError(f"{where}: {base}.weight_shape is {given}, expected {[N, K]}.")
        if f"{base}.{zero}" in entries:
            whole = entries[f"{base}.{zero}"].dtype == torch.int8
            zeros = read(zero, (torch.int32, torch.int8), N if whole else -(-N // 8), groups)
            zeros = zeros.T.int() + 8 if whole else _nibbles(zeros, 0)[:N].T
            if whole and not 0 <= zeros.min() <= zeros.max() <= 15:
                raise ValueError(f"{where}: {base}.{zero} holds values outside -8 to 7.")
    elif awq:
        unpacked = (_nibbles(t, 1).unflatten(1, (-1, 8)) for t in (codes, read(zero, words, groups, rows)))
        codes, zeros = (columns[:, :, list(AWQ_ORDER)].flatten(1) for columns in unpacked)
        codes = codes.T
    else:
        codes, zeros = _nibbles(codes, 0).T, _nibbles(read(zero, words, groups, -(-N // 8)), 1)[:, :N]
        zeros = (zeros + 1) & 15 if layout.kind == "gptq" else zeros  # the first format stores zero - 1
    if layout.symmetric and layout.kind == "gptq" and (zeros == 9).all():
        zeros = None  # some writers label the second format as the first
    g_idx = None if g_idx is None or (g_idx < 0).all() else g_idx.long()
    return {"codes": codes, "scales": scales, "zeros": None if zeros is None else zeros.to(torch.uint8), "g_idx": g_idx}


def _fuse(parts: list[Part], where: str) -> dict[str, Tensor]:
    """The stored tensors of one weight whose rows are these parts (q, k and v, for example), exactly.

    Groups longer than 128 columns repeat their scale. Act-order becomes `perm`. All parts must have the same, since they
    read the same input.
    """
    K, groups = parts[0]["codes"].shape[1], parts[0]["scales"].shape[0]
    size = K // groups
    natural = torch.arange(K) // size
    orders = [natural if part["g_idx"] is None else part["g_idx"] for part in parts]
    if any(len(p["scales"]) != groups for p in parts) or any(not torch.equal(o, orders[0]) for o in orders):
        raise ValueError(f"{where}: fused projections differ in group size or act-order: not supported.")
    ours = next((g for g in reversed(GROUPS) if size % g == 0), 0)
    if not ours or not torch.equal(orders[0].sort().values, natural):
        raise ValueError(f"{where}: groups of {size} columns or an uneven g_idx; supported groups are 32, 64, 128, -1.")
    perm = None if torch.equal(orders[0], natural) else orders[0].argsort(stable=True)
    codes = torch.cat([part["codes"] for part in parts])
    codes = codes if perm is None else codes[:, perm]
    scales = torch.cat([part["scales"] for part in parts], 1).repeat_interleave(size // ours, 0)
    half = scales.to(torch.float16)
    exact = torch.equal(half.to(scales.dtype), scales)
    stored = {"qweight": pack_nibbles(codes), "scales": half if exact else scales.float()}
    if any(part["zeros"] is not None and (part["zeros"] != 8).any() for part in parts):
        zeros = [torch.full_like(p["scales"], 8) if p["zeros"] is None else p["zeros"] for p in parts]
        stored["zeros"] = torch.cat([z.to(torch.uint8) for z in zeros], 1).repeat_interleave(size // ours, 0)
    return stored if perm is None else stored | {"perm": perm.to(torch.int32)}


def _stack_experts(fused: list[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """The stored tensors of all experts of a layer, with a leading axis. They must share their act-order."""
    perms = [one.pop("perm", None) for one in fused]
    shared = perms[0]
    if any((p is None) != (shared is None) or (p is not None and not torch.equal(p, shared)) for p in perms):
        raise ValueError(f"{where}: experts with different act-orders are not supported; use static groups.")
    if any("zeros" in one for one in fused):
        for one in fused:
            one.setdefault("zeros", torch.full(one["scales"].shape, 8, dtype=torch.uint8))
    stored = {key: torch.stack([one[key] for one in fused]) for key in fused[0]}
    return stored if shared is None else stored | {"perm": shared}


def fill_published(model: Transformer, entries: Entries, config: Any, where: str, to: Destination) -> None:
    """Make a meta model a quantized one where `entries` hold codes, and fill it. What is not quantized is cast.

    `config` is the `quantization_config`. Raises ValueError in one line for a tensor that is missing, left over, damaged
    or of another shape than config.json says.
    """
    layout = published_layout(config, where)
    used: set[str] = set()
    marker = ".weight_packed" if layout.kind == "pack-quantized" else ".qweight"
    kinds = "qweight scales qzeros g_idx weight_packed weight_scale weight_shape weight_zero_point weight_g_idx".split()
    tied = model.lm_head is None

    def part(base: str, slot: Tensor) -> Part:
        if base + marker not in entries:
            raise ValueError(f"{where}: tensor {base + marker!r} is missing. Is a shard missing?")
        used.update(f"{base}.{kind}" for kind in kinds)
        read = _read_linear(entries, layout, base, slot.shape[-1], where)
        order = row_order(f"{base}.weight", len(read["codes"]), model.config)
        if order is None:
            return read
        axis = {"codes": 0, "scales": 1, "zeros": 1}  # of the rows
        return {k: t.index_select(axis[k], order) if k in axis and t is not None else t for k, t in read.items()}

    def packed(ours: str, names: list[str], slot: Tensor) -> Stored | None:
        bases = [name.removesuffix(".weight") for name in names]
        if bases[0] + marker not in entries:
            used.update(names)
            return None
        stacks = model.config.num_local_experts if slot.dim() == 3 else 1
        per, at = len(bases) // stacks, f"{where}: {ours}"
        fused = [_fuse([part(base, slot) for base in bases[i * per :][:per]], at) for i in range(stacks)]
        return fused[0] if slot.dim() == 2 else _stack_experts(fused, at)

    fill_parameters(model, parameter_sources(model, views_for(model, entries)), entries, packed, where, to)
    for name in entries.keys() - used:
        spare = IGNORED.fullmatch(name) or (tied and name == "lm_head.weight")
        spare = spare or name.endswith(".bias") and not entries[name].read().any()  # AutoGPTQ's zero biases
        if not spare:
            raise ValueError(f"{where}: unexpected {few_names([name])}; config.json describes another model.")


def fill_parameters(
    model: Transformer, sources: Mapping[str, list[str]], entries: Entries, packed: Packing, where: str, to: Destination
) -> None:
    """Fill a meta model, one of our parameters at a time: with a quantized module, or else with floats of `to.dtype`.

    Args:
        sources: of our parameters (`weights.hf.parameter_sources`).
        packed: says which parameters stay quantized.

    Raises ValueError in one line for a tensor that is missing, of another shape, or not finite.
    """
    slots = dict(model.named_parameters())
    for done, (ours, names) in enumerate(sources.items()):
        weight, shape = packed(ours, names, slots[ours]), slots[ours].shape
        if weight is None:
            set_tensor(model, ours, read_parameter(entries, names, shape, where).to(to.device, to.dtype))
        else:
            _install(model, ours, weight, shape, f"{where}: {ours}", to)
        to.progress(done + 1, len(sources), ours)


def _install(
    model: Transformer, parameter: str, weight: Stored | PackedWeight, size: torch.Size, where: str, to: Destination
) -> None:
    """Put a quantized module in the place of the module, or of the experts' matrix, that `parameter` belongs to."""
    kind = FloatLinear
    if not isinstance(weight, PackedWeight):
        kind, weight = QuantLinear, {leaf: tensor.to(to.device) for leaf, tensor in weight.items()}
    name = parameter.removesuffix(".weight")
    if len(size) == 3:
        block = parameter.rpartition(".")[0]
        experts = model.get_submodule(block)
        if isinstance(experts, Experts):
            experts = QuantExperts(experts, nn.Module(), nn.Module())
            replace_module(model, block, experts)
        new = kind(weight, None, experts.per_token)
    elif isinstance(old := model.get_submodule(name), nn.Embedding):
        new = QuantEmbedding(weight, to.dtype)
    else:
        new = kind(weight, old.bias)
    shape, expected = [new.out_features, new.in_features], list(size[-2:])
    if shape != expected:
        raise ValueError(f"{where} is {shape}, expected {expected} by config.json.")
    replace_module(model, name, new)
