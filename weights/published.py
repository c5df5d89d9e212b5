"""Published 4-bit checkpoints: GPTQ, AWQ (gemm) and compressed-tensors pack-quantized.

Their codes are unpacked and put in our layout, exactly. Projections that our modules fuse (q, k and v, for example)
must share their groups. What such a checkpoint does not quantize is read as floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from model import Experts, Transformer
from weights.files import IGNORED, Destination, Entries
from weights.hf import parameter_sources, read_parameter, views_for
from weights.quantized import GROUPS, QuantExperts, QuantLinear, replace_module, set_tensor

Part = dict[str, Tensor | None]  # one published linear, as `_read_linear` returns it
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where columns 0 to 7 lie in a word of AWQ


def published_layout(config: Any, where: str) -> str:
    """How the weights that a `quantization_config` describes are packed.

    Returns 'gptq', 'gptq_v2', 'awq' or 'pack-quantized'. Raises ValueError for anything but 4-bit integer weights.
    """
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
        found = f"quantization_config with quant_method {method!r}, format {kind!r}, {bits} bits"
        known = "GPTQ, AWQ (gemm) and compressed-tensors pack-quantized, 4-bit weights, 16-bit activations"
        raise ValueError(f"{where}: {found} is not supported; supported: {known}.")
    return kind


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """int32 -> uint8, the eight nibbles of each word side by side along `dim`, lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    unpacked = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & 15
    return unpacked.flatten(dim, dim + 1).to(torch.uint8)


def _read_linear(read: Callable[[str], Tensor | None], kind: str, base: str, where: str, symmetric: bool) -> Part:
    """One published linear as codes [N, K], scales and zeros [K/G, N], and g_idx [K] or None."""
    compressed = kind == "pack-quantized"
    names = ("weight_packed", "weight_scale") if compressed else ("qweight", "scales", "qzeros")
    found = [read(f"{base}.{name}") for name in names]
    for name, tensor in zip(names, found, strict=True):
        if tensor is None:
            raise ValueError(f"{where}: tensor {base + '.' + name!r} is missing. Is a shard missing?")
    packed, scales = found[:2]
    if not scales.isfinite().all():
        raise ValueError(f"{where}: the scales of {base} hold NaN or infinite values.")
    g_idx = read(f"{base}.weight_g_idx" if compressed else f"{base}.g_idx")
    if compressed:
        shape, zeros = read(f"{base}.weight_shape"), read(f"{base}.weight_zero_point")
        N, K = shape.tolist() if shape is not None else (packed.shape[0], packed.shape[1] * 8)
        codes, scales = _nibbles(packed, 1)[:, :K], scales.T
        if zeros is not None:
            zeros = _nibbles(zeros, 0)[:N].T if zeros.dtype == torch.int32 else (zeros.T + 8).to(torch.uint8)
    elif kind == "awq":
        unpacked = (_nibbles(tensor, 1).unflatten(1, (-1, 8)) for tensor in (packed, found[2]))
        codes, zeros = (columns[:, :, list(AWQ_ORDER)].flatten(1) for columns in unpacked)
        codes = codes.T
    else:
        codes, zeros = _nibbles(packed, 0).T, _nibbles(found[2], 1)
        zeros = (zeros + 1) & 15 if kind == "gptq" else zeros  # the first format stores zero - 1
    (N, K), grid = codes.shape, scales.shape
    if len(grid) != 2 or grid[1] != N or K % grid[0] or (zeros is not None and zeros.shape != grid):
        raise ValueError(f"{where}: {base}: scales {list(grid)} or zeros do not fit a [{N}, {K}] weight.")
    if symmetric and kind == "gptq" and (zeros == 9).all():
        zeros = None  # some writers label the second format as the first
    g_idx = None if g_idx is None or (g_idx < 0).all() else g_idx.long()
    return {"codes": codes, "scales": scales, "zeros": zeros, "g_idx": g_idx}


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
        found = f"groups of {size} columns or an uneven g_idx"
        raise ValueError(f"{where}: {found}; supported groups are 32, 64, 128, -1.")
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
    kind = published_layout(config, where)
    used: set[str] = set()
    marker = ".weight_packed" if kind == "pack-quantized" else ".qweight"
    sources, slots = parameter_sources(model, views_for(model, entries)), dict(model.named_parameters())
    tied = model.lm_head is None

    def read(name: str) -> Tensor | None:
        used.add(name)
        return entries[name].read() if name in entries else None

    def part(base: str) -> Part:
        return _read_linear(read, kind, base, where, bool(config.get("sym")))

    for done, (ours, names) in enumerate(sources.items()):
        slot, bases = slots[ours], [name.removesuffix(".weight") for name in names]
        if bases[0] + marker in entries:
            stacks = model.config.num_local_experts if slot.dim() == 3 else 1
            per, at = len(bases) // stacks, f"{where}: {ours}"
            fused = [_fuse([part(b) for b in bases[i * per :][:per]], at) for i in range(stacks)]
            stored = fused[0] if slot.dim() == 2 else _stack_experts(fused, at)
            install(model, ours, {k: v.to(to.device) for k, v in stored.items()}, slot, at)
        else:
            used.update(names)
            tensor = read_parameter(entries, names, slot.shape, where)
            set_tensor(model, ours, tensor.to(to.device, to.dtype))
        to.progress(done + 1, len(sources), ours)
    for name in entries.keys() - used:
        spare = IGNORED.fullmatch(name) or (tied and name == "lm_head.weight")
        spare = spare or name.endswith(".bias") and not entries[name].read().any()  # AutoGPTQ's zero biases
        if not spare:
            raise ValueError(f"{where}: unexpected tensor {name!r}; config.json describes another model.")


def install(model: Transformer, parameter: str, stored: dict[str, Tensor], slot: Tensor, where: str) -> None:
    """Put a QuantLinear in the place of the linear, or of the experts' matrix, that `parameter` belongs to."""
    if slot.dim() == 3:
        name, block = parameter, parameter.rpartition(".")[0]
        experts = model.get_submodule(block)
        if isinstance(experts, Experts):
            experts = QuantExperts(experts.router, nn.Module(), nn.Module(), experts.per_token)
            replace_module(model, block, experts)
        linear = QuantLinear(stored, None, experts.per_token)
    else:
        name = parameter.removesuffix(".weight")
        linear = QuantLinear(stored, model.get_submodule(name).bias)
    shape, expected = [linear.out_features, linear.in_features], list(slot.shape[-2:])
    if shape != expected:
        raise ValueError(f"{where} is {shape}, expected {expected} by config.json.")
    replace_module(model, name, linear)
