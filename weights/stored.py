"""Quantized checkpoints: our own format, and the published ones of integers.

Ours is a config.json with `eaglet_quant` and one model.safetensors. Its tensors are those of `weights.quantized`, under
the names of the modules' state dict.

Published are GPTQ, AWQ (gemm), AutoRound, compressed-tensors and the int8 of bitsandbytes. Their codes of 4 or 8 bits are
unpacked and put in our layout, exactly. The shapes of its tensors tell the bits of a matrix. Projections that our modules
fuse (q, k and v, for example) must share bits and groups. What such a checkpoint does not quantize is read as floats.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import PackedWeight
from model import Transformer
from support.reader import check, refusal
from weights.files import FLOATS, IGNORED, INTEGERS, Destination, Entries, Entry, check_entries, check_finite, few_names
from weights.hf import checked_sources, hf_views, parameter_sources, read_parameter, row_order
from weights.quantized import GROUPS, QuantSpec, Stored, apply_spec_, held_dtype, install_, pack_nibbles, set_tensor

Part = dict[str, Tensor]  # one published linear, as `_read_linear` returns it
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
    return tensor


def fill_stored(model: Transformer, entries: Entries, spec: QuantSpec, where: str, to: Destination) -> None:
    """Make a meta model a quantized one and fill it from entries under its state-dict names, one tensor at a time.

    Embedding, norms and biases are cast. Codes and scales stay exactly as they are stored. Raises ValueError in one line
    for tensors that do not match.
    """
    expected = dict(apply_spec_(model, spec).state_dict())
    check_stored(expected, entries, where)
    done, total = 0, sum(slot.nbytes for slot in expected.values())
    for name, slot in expected.items():
        tensor = read_stored(entries, name, where)
        cast = to.dtype if slot.is_floating_point() and not name.endswith(".scales") else None
        cast = cast and held_dtype(name, tensor.dtype, cast)
        set_tensor(model, name, tensor.to(to.device, cast, copy=True))  # a copy lets go of the mapped file
        done += slot.nbytes
        to.progress(done, total, name)


# The bits that matrices of a layout may have. "gptq" stores zeros minus 1, and "gptq_v2" as they are.
LAYOUTS = {"gptq": (4, 8), "gptq_v2": (4, 8), "awq": (4,), "pack-quantized": (4, 8), "int-quantized": (8,)}
AUTO_ROUND = {"auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_awq": "awq"}
AUTO_ROUND |= {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq"}
# Scales for the rounding of activations, keys and values, which are not rounded so here.
UNREAD = tuple(
    ".input_global_scale .input_scale .input_scale_ub .input_zero_point .activation_scale .k_scale .v_scale".split()
)
ROTATIONS = "transform_config", "rotation_config"  # matrices that a model would have to multiply its activations with


class Layout(NamedTuple):
    """How published weights are packed. group_size: -1 for whole rows, None if the shapes say it."""

    kind: str  # one of LAYOUTS
    group_size: int | None
    symmetric: bool
    bits: tuple[int, ...] = (4,)  # that a matrix may have, those of most matrices first
    activations: int = 16  # bits that the checkpoint wants for activations


def published_layout(config: Any, where: str) -> Layout:
    """What a `quantization_config` says. Raises ValueError for anything but integer weights of 4 or 8 bits."""
    keys = "quant_method format checkpoint_format packing_format version".split()
    shape = dict.fromkeys((f"{key}?" for key in keys), (str, int, None))
    shape |= dict.fromkeys(("sym?", "load_in_8bit?"), (bool, None))
    scheme = {"num_bits?": (int, None), "group_size?": (int, None)}
    group = {"weights?": (scheme, None), "input_activations?": ({"num_bits?": (int, None)}, None)}
    shape |= {"config_groups?": ({"*": group}, None)}
    shape |= dict.fromkeys(("bits?", "w_bit?", "group_size?", "q_group_size?", "act_bits?"), (int, None))
    check(config, shape, where, "quantization_config")
    method, bits = config.get("quant_method"), {config.get("bits", config.get("w_bit"))}
    sizes = {config.get("group_size", config.get("q_group_size"))}
    act = config.get("act_bits")
    kinds = {"gptq": config.get("checkpoint_format", "gptq"), "awq": "awq"}
    kinds["auto-round"] = kinds["intel/auto-round"] = AUTO_ROUND.get(config.get("packing_format"))
    kind = kinds.get(method, config.get("format"))
    if method == "bitsandbytes" and config.get("load_in_8bit"):
        kind, bits = "int-quantized", {8}
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        schemes = [group.get("weights") or {} for group in groups]
        bits, sizes = ({scheme.get(key) for scheme in schemes} for key in ("num_bits", "group_size"))
        act = max([(g.get("input_activations") or {}).get("num_bits") or 0 for g in groups], default=0)
    own = len(sizes) != 1 or config.get("extra_config") or config.get("dynamic")  # for some matrices
    size = None if own else sizes.pop()
    gemm = method != "awq" or str(config.get("version", "gemm")).lower() == "gemm"
    refuse_rotations(config, where)
    if not bits or not bits <= set(LAYOUTS.get(kind, ())) or not gemm:
        found = f"quant_method {method!r:.30}, format {kind!r:.30}, {', '.join(map(str, bits)):.30} bits"
        known = "GPTQ, AutoRound, pack-quantized of 4 or 8 bits, AWQ (gemm), int8 (int-quantized, bitsandbytes)"
        problem = f"quantization_config with {found} is not supported"
        raise ValueError(f"{where}: {problem}; supported: {known}, NF4, FP4, FP8.")
    if size is not None and size != -1 and not 1 <= size <= 2**31:
        raise ValueError(f"{where}: group_size is {size}; allowed: 1 or more, or -1 for whole rows.")
    bits = sorted(LAYOUTS[kind] if own else bits, key=lambda b: (b not in bits, b))
    return Layout(kind, size, config.get("sym") is True, tuple(bits), act or 16)


def refuse_rotations(config: dict[str, Any], where: str) -> None:
    """Raise ValueError in one line if a `quantization_config` wants activations to be rotated."""
    if rotated := [key for key in ROTATIONS if config.get(key)]:
        raise ValueError(f"{where}: quantization_config with a {rotated[0]} is not supported.")


def without_activations(entries: Entries) -> dict[str, Entry]:
    """The entries without those for the rounding of activations."""
    return {name: entry for name, entry in entries.items() if not name.endswith(UNREAD)}


def packed_entries(entries: Entries) -> dict[str, Entry]:
    """The entries with int8 matrices [N, K] under the names of packed words, X.weight_packed and X.weight_scale.

    bitsandbytes has 127 times the scales, in X.SCB [N].
    """
    found = without_activations(entries)
    for name, entry in entries.items():
        base = name.removesuffix(".weight")
        if base == name or entry.dtype != torch.int8 or len(entry.shape) != 2:
            continue
        found[f"{base}.weight_packed"] = found.pop(name)
        found.pop(f"{base}.weight_format", None)
        leaf, most = ("SCB", 127) if f"{base}.SCB" in found else ("weight_scale", 1)
        scale, rows = found.get(f"{base}.{leaf}"), entry.shape[0]
        if scale and math.prod(scale.shape) in (1, rows):
            del found[f"{base}.{leaf}"]
            read = partial(_column, scale, rows, most)
            found[f"{base}.weight_scale"] = scale._replace(shape=(rows, 1), read=read, part=None)
    return found


def _column(scale: Entry, rows: int, most: int) -> Tensor:
    return (scale.read() / most).reshape(-1, 1).expand(rows, 1)


def held_codes(entries: Entries, layout: Layout) -> dict[str, Entry]:
    """The entries for the plan of the memory: words of 8-bit codes count as these, and their zeros are not kept."""
    found = dict(entries)
    for name, entry in entries.items() if layout.bits[0] == 8 else ():
        if name.endswith((".qzeros", ".weight_zero_point")):
            del found[name]
        elif name.endswith((".qweight", ".weight_packed")):
            shape = *entry.shape[:-1], entry.shape[-1] * entry.dtype.itemsize
            found[name] = entry._replace(dtype=torch.int8, shape=shape)
    return found


def _codes(words: Tensor, bits: int = 4) -> Tensor:
    """int32 [N, W] -> uint8 [N, 32 W / bits], the codes of each word side by side, lowest first."""
    unpacked = (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)
    return unpacked.flatten(1).to(torch.uint8)


def _fitting(
    entries: Entries, name: str, dtypes: Iterable[torch.dtype], shape: tuple[int, ...], what: str, where: str
) -> Tensor:
    """A tensor of one of these dtypes and of this shape. Raises ValueError if it is missing, or does not fit `what`."""
    if (entry := entries.get(name)) is None:
        raise refusal(where, f"tensor {name!r} is missing.", "Is a shard missing?")
    if entry.dtype not in dtypes or entry.shape != shape:
        has = f"{name} is {entry.dtype} {list(entry.shape)[:9]}"
        wanted = f"{' or '.join(str(d).removeprefix('torch.') for d in dtypes)} {list(shape)}"
        raise refusal(where, f"{has}, which does not fit {what}: expected {wanted}.")
    return entry.read()


def _read_linear(entries: Entries, layout: Layout, base: str, K: int, where: str) -> Part:
    """One published linear of K inputs as codes [N, K], scales and zeros [K/G, N], and g_idx [K].

    Codes of 4 bits are uint8, and those of 8 bits int8, whose zeros are all in the middle.
    Raises ValueError unless every tensor has the dtype and the shape that the layout and the others ask for.
    """
    compressed, awq = layout.kind in ("pack-quantized", "int-quantized"), layout.kind == "awq"
    names = "weight_packed weight_scale weight_zero_point weight_g_idx" if compressed else "qweight scales qzeros g_idx"
    packed, scale, zero, index = names.split()

    def read(name: str, dtypes: Iterable[torch.dtype], *shape: int) -> Tensor:
        return _fitting(entries, f"{base}.{name}", dtypes, shape, f"a weight of {K} inputs", where)

    words, whole = (torch.int32,), layout.kind == "int-quantized"
    shape = entries[f"{base}.{packed}"].shape
    shape = shape if len(shape) == 2 else (0, 0)
    fits = (bits for bits in layout.bits if shape[compressed] == -(-K * bits // 32))
    bits = next(fits, layout.bits[0])
    each, middle = 1 if whole else 32 // bits, 2 ** (bits - 1)
    rows = shape[compressed ^ 1]
    N = rows * (8 if awq else 1)
    grid = entries[f"{base}.{scale}"].shape if f"{base}.{scale}" in entries else ()
    groups = grid[compressed] if len(grid) == 2 else 0
    if layout.group_size:
        groups = 1 if layout.group_size == -1 else -(-K // layout.group_size)
    sizes = (N, -(-K // each)) if compressed else (K, rows) if awq else (K // each, N)
    codes = read(packed, (torch.int8,) if whole else words, *sizes)
    scales = read(scale, FLOATS, *((N, groups) if compressed else (groups, N)))
    check_finite(scales, f"{base}.{scale}", where)
    if not groups or K % groups:
        raise ValueError(f"{where}: {base}: {groups} groups do not fit a [{N}, {K}] weight.")
    g_idx = read(index, (torch.int32, torch.int64), K) if f"{base}.{index}" in entries else None
    zeros = None
    if compressed:
        codes, scales = codes.view(torch.uint8) ^ 128 if whole else _codes(codes, bits)[:, :K], scales.T
        if f"{base}.weight_shape" in entries and (given := read("weight_shape", INTEGERS, 2).tolist()) != [N, K]:
            raise ValueError(f"{where}: {base}.weight_shape is {given}, expected {[N, K]}.")
        if f"{base}.{zero}" in entries:
            signed = entries[f"{base}.{zero}"].dtype == torch.int8
            zeros = read(zero, (torch.int32, torch.int8), N if signed else -(-N // (32 // bits)), groups).T
            zeros = zeros.int() + middle if signed else _codes(zeros, bits)[:, :N]
            if signed and not 0 <= zeros.min() <= zeros.max() < 2 * middle:
                raise ValueError(f"{where}: {base}.{zero} holds values outside {-middle} to {middle - 1}.")
    elif awq:
        unpacked = (_codes(t).unflatten(1, (-1, 8)) for t in (codes, read(zero, words, groups, rows)))
        codes, zeros = (columns[:, :, list(AWQ_ORDER)].flatten(1) for columns in unpacked)
        codes = codes.T
    else:
        codes, zeros = _codes(codes.T, bits), _codes(read(zero, words, groups, -(-N // each)), bits)[:, :N]
        zeros = (zeros + 1) & (2 * middle - 1) if layout.kind == "gptq" else zeros  # the first format stores zero - 1
    zeros = torch.full(scales.shape, middle) if zeros is None else zeros
    if layout.symmetric and layout.kind == "gptq" and (zeros == middle + 1).all():
        zeros = zeros - 1  # some writers label the second format as the first
    if bits == 8:
        if (zeros != middle).any():
            raise ValueError(f"{where}: {base} has 8 bits and zero points; supported: symmetric weights of 8 bits.")
        codes = (codes ^ 128).view(torch.int8)
    g_idx = torch.arange(K) // (K // groups) if g_idx is None or (g_idx < 0).all() else g_idx.long()
    return {"codes": codes, "scales": scales, "zeros": zeros.to(torch.uint8), "g_idx": g_idx}


def _fuse(parts: list[Part], where: str) -> dict[str, Tensor]:
    """The stored tensors of one weight whose rows are these parts (q, k and v, for example), exactly.

    Groups longer than 128 columns repeat their scale. Codes of 4 bits have zeros, also where all are in the middle.
    Act-order becomes `perm`. All parts must have the same, since they read the same input.
    """
    K, groups = parts[0]["codes"].shape[1], parts[0]["scales"].shape[0]
    size = K // groups
    natural = torch.arange(K) // size
    orders = [part["g_idx"] for part in parts]
    kinds, eight = {(len(p["scales"]), p["codes"].dtype) for p in parts}, parts[0]["codes"].dtype == torch.int8
    if len(kinds) > 1 or any(not torch.equal(o, orders[0]) for o in orders):
        raise ValueError(f"{where}: fused projections differ in group size or act-order, or in bits: not supported.")
    rows = eight and groups == 1  # int8 has a layout with one scale for each row
    ours = size if rows else next((g for g in reversed(GROUPS) if size % g == 0), 0)
    if not ours or not torch.equal(orders[0].sort().values, natural):
        raise ValueError(f"{where}: groups of {size} columns or an uneven g_idx; supported groups are 32, 64, 128, -1.")
    perm = None if torch.equal(orders[0], natural) else orders[0].argsort(stable=True)
    codes = torch.cat([part["codes"] for part in parts])
    codes = codes if perm is None else codes[:, perm]
    scales = torch.cat([part["scales"] for part in parts], 1).repeat_interleave(size // ours, 0)
    half = scales.to(torch.float16)
    exact = torch.equal(half.to(scales.dtype), scales)
    stored = {"qweight": codes.contiguous() if eight else pack_nibbles(codes)}
    stored["scales"] = scales[0].float() if rows else half if exact else scales.float()
    if not eight:
        stored["zeros"] = torch.cat([part["zeros"] for part in parts], 1).repeat_interleave(size // ours, 0)
    return stored if perm is None else stored | {"perm": perm.to(torch.int32)}


def _stack_experts(fused: list[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """The stored tensors of all experts of a layer, with a leading axis. They must share their act-order."""
    perms = [one.pop("perm", None) for one in fused]
    shared = perms[0]
    if any((p is None) != (shared is None) or (p is not None and not torch.equal(p, shared)) for p in perms):
        raise ValueError(f"{where}: experts with different act-orders are not supported; use static groups.")
    stored = {key: torch.stack([one[key] for one in fused]) for key in fused[0]}
    return stored if shared is None else stored | {"perm": shared}


def fill_published(model: Transformer, entries: Entries, config: Any, where: str, to: Destination) -> None:
    """Make a meta model a quantized one where `entries` hold codes, and fill it. What is not quantized is cast.

    `config` is the `quantization_config`. Raises ValueError in one line for a tensor that is missing, left over, damaged
    or of another shape than config.json says.
    """
    layout = published_layout(config, where)
    used: set[str] = set()
    marker = ".qweight" if layout.kind in ("gptq", "gptq_v2", "awq") else ".weight_packed"
    kinds = "qweight scales qzeros g_idx weight_packed weight_scale weight_shape weight_zero_point weight_g_idx".split()
    tied = model.lm_head is None

    def part(base: str, slot: Tensor) -> Part:
        if base + marker not in entries:
            raise ValueError(f"{where}: {base + marker!r} is missing beside others with codes. Is a shard missing?")
        used.update(f"{base}.{kind}" for kind in kinds)
        read = _read_linear(entries, layout, base, slot.shape[-1], where)
        order = row_order(f"{base}.weight", len(read["codes"]), model.config)
        if order is None:
            return read
        axis = {"codes": 0, "scales": 1, "zeros": 1}  # of the rows
        return {k: t.index_select(axis[k], order) if k in axis else t for k, t in read.items()}

    def packed(ours: str, names: list[str], slot: Tensor) -> Stored | None:
        bases = [name.removesuffix(".weight") for name in names]
        if not any(base + marker in entries for base in bases):
            used.update(names)
            return None
        stacks = model.config.num_local_experts if slot.dim() == 3 else 1
        per, at = len(bases) // stacks, f"{where}: {ours}"
        fused = [_fuse([part(base, slot) for base in bases[i * per :][:per]], at) for i in range(stacks)]
        stored = fused[0] if slot.dim() == 2 else _stack_experts(fused, at)
        return {leaf: tensor for leaf, tensor in stored.items() if leaf != "zeros" or (tensor != 8).any()}

    fill_parameters(model, parameter_sources(model, hf_views(model, entries)), entries, packed, where, to)
    for name in entries.keys() - used:
        spare = IGNORED.fullmatch(name) or (tied and name == "lm_head.weight")
        spare = spare or name.endswith(".bias") and not entries[name].read().any()  # AutoGPTQ's zero biases
        if not spare:
            raise ValueError(f"{where}: unexpected {few_names([name])}; config.json describes another model.")


def fill_kept(model: Transformer, entries: Entries, packed: Packing, where: str, to: Destination) -> None:
    """`fill_parameters` from exactly the tensors of the model."""
    fill_parameters(model, checked_sources(model, entries, where), entries, packed, where, to)


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
    done, total = 0, sum(slots[ours].nbytes for ours in sources)
    for ours, names in sources.items():
        weight, slot = packed(ours, names, slots[ours]), slots[ours]
        if weight is None:
            stored = entries[names[0]].dtype if names[0] in entries else to.dtype
            dtype = held_dtype(ours, stored, to.dtype)
            set_tensor(model, ours, read_parameter(entries, names, slot.shape, where, to.device, dtype))
        else:
            install_(model, ours, weight, slot.shape, f"{where}: {ours}", to.device, to.dtype)
        done += slot.nbytes
        to.progress(done, total, ours)
