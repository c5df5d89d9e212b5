"""Which kernels the compile gate compiles: with which constants, pointers and compiler options, as our operators do."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import fake_cuda
import torch
import triton.language as tl

import eagle_draft
import kernels
from decoding import sampling, step, verify
from kernels import choice, draft, experts, growing, kv, records
from kernels.attention import attend_kernel, attention_tiles
from kernels.experts import expert_kernel
from kernels.linear import NO_HEADS, launch_tile, linear_kernel, planes_topk
from kernels.packing import panel_words
from kernels.panels import kernel_forms, panels_bytes, triton_rows
from kernels.tuned import SPLIT_M, linear_config, unsplit
from weights import mxfp4
from weights.gguf_types import FORMATS

ARCHITECTURES = (86, 89, 90, 120)
QUICK_ARCHITECTURES = (86, 90)  # of tests that run without --slow
LIMITS = {8: 2.7, 16: 2.7, 32: 3.5}  # rows -> thread instructions per int4 weight, in these forms of fp16 layers:
MAIN = ("", "narrow", "gate-up", "top-10", "experts", "experts gate-up", "fp16-acc", "qkv")
# The linear layers: (bits, dtype, numbers of tokens, forms). A form is as `linear` takes it.
LINEARS = (
    (4, "fp16", (8, 16, 32, 64), ("", "gate-up", "zeros")),
    (4, "bf16", (16, 32, 64), ("",)),
    (4, "bf16", (64,), ("gate-up", "zeros", "gate-up zeros")),
    (4, "fp16", (16, 64), ("ragged",)),
    (4, "fp16", (16, 32, 64), ("fp16-acc",)),
    (4, "fp16", (16,), ("narrow",)),
    (4, "fp16", (16, 32, 64), ("qkv",)),
    (4, "fp16", (64,), ("qkv qk-norm", "qkv int8-cache", "qkv fp16-acc")),
    (4, "bf16", (16, 64), ("qkv g32 zeros", "qkv qk-norm int8-cache")),
    (8, "fp16", (16, 64), ("qkv",)),
    (16, "bf16", (16, 64), ("qkv",)),
    (4, "fp16", (64,), ("zeros narrow", "gate-up fp16-acc")),
    # Small groups have many scales, so that registers are short.
    (4, "fp16", (16, 64), ("g64", "g32")),
    (4, "bf16", (16, 64), ("g64 zeros", "g32 zeros")),
    (4, "bf16", (32,), ("g32 zeros",)),
    (4, "bf16", (64,), ("g64 gate-up", "g32 gate-up", "g32 gate-up zeros")),
    (8, "fp16", (16, 32, 64), ("",)),
    (8, "fp16", (16, 64), ("gate-up",)),
    (8, "bf16", (16, 64), ("",)),
    (8, "bf16", (64,), ("gate-up",)),
    (16, "fp16", (16,), ("",)),
    (16, "bf16", (16, 32), ("",)),
    (16, "bf16", (64,), ("gate-up",)),
    (4, "fp16", (16,), ("experts", "experts gate-up", "experts zeros", "experts g32 zeros")),
    (4, "bf16", (16,), ("experts gate-up", "experts g32 gate-up", "experts zeros", "experts g32 gate-up zeros")),
    (8, "fp16", (16,), ("experts", "experts gate-up")),
    (16, "fp16", (16,), ("experts", "experts gate-up")),
    # as in a prompt
    (4, "fp16", (512,), ("", "gate-up", "zeros", "g32", "g32 zeros", "fp16-acc")),
    (4, "bf16", (512,), ("", "g64", "g64 zeros", "g32 gate-up")),
    (8, "fp16", (512,), ("", "gate-up")),
    (16, "bf16", (512,), ("", "gate-up")),
    *((bits, dtype, (32,), ("top-10",)) for bits in (4, 8) for dtype in ("fp16", "bf16")),
)
# The main int4 loop, and those that have been too large: (bits, dtype, tokens, form, architectures). With --slow
# all four have them, among the others.
QUICK = (
    (4, "fp16", 8, "", (86, 90)),
    (4, "fp16", 32, "gate-up", (86,)),
    (4, "fp16", 64, "zeros", (90,)),
    (4, "bf16", 32, "g32 zeros", (86,)),
    (4, "bf16", 16, "experts g32 gate-up", (90,)),
)


class Variant(NamedTuple):
    """One kernel with the constants it is compiled for."""

    name: str
    kernel: object
    pointers: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]
    weights: float = 0.0  # how many are decoded per thread and turn of the loop; 0 if it is no matrix product
    limit: float = math.inf  # of instructions per weight
    quantized: bool = False
    uneven: tuple[str, ...] = ()  # more arguments that need not be multiples of 16


def linear(bits: int, dtype: str, tokens: int, form: str, arch: int = 86) -> Variant:
    """The kernel as `packed_linear` launches it for a 4096 x 4096 layer on sm_`arch`.

    `form` holds words. experts: as `packed_experts` launches it; g64, g32: groups of so many weights instead of 128;
    zeros: with zero points; gate-up: two matrices at once; fp16-acc: sums in fp16; ragged: sizes that do not divide the
    tiles; narrow: a tile of 64 rows; top-10: an LM head that keeps 10 values; qkv: 16 heads
    of queries and 8 of keys turned behind it; qk-norm: normed before; int8-cache: into such a cache.
    """
    words = form.split()
    expert, zeros, gated, ragged, top = (w in words for w in ("experts", "zeros", "gate-up", "ragged", "top-10"))
    group = next((int(word[1:]) for word in words if word in ("g64", "g32")), 128)
    config = linear_config(4096, 4096, bits, capability=divmod(arch, 10))
    if expert:
        config = unsplit(config)
    if "narrow" in words:
        config = config._replace(block_n=64, warps=2, wide_n=0)
    norms = "qk-norm" in words
    block, tile, options = launch_tile(config, tokens, gated, group if bits == 4 else 0, zeros, bits, norms=norms)
    act = f"*{dtype}"
    pointers = {"x": act, "w": act if bits == 16 else "*i32", "s": "*fp32" if bits == 8 else "*fp16", "z": "*u8"}
    pointers["out"] = "*fp32" if top else act
    constants = dict(BITS=bits, GROUP=group, ZEROS=zeros, GATED=gated, FORMS=(), EVEN_K=not ragged)
    constants |= dict(BN=block, BT=tile, ACC=tl.float16 if "fp16-acc" in words else tl.float32, NATIVE=True)
    if expert:
        pointers |= dict.fromkeys(("pairs", "used", "offsets"), "*i32")
    else:
        pointers |= dict(bias=act, residual=act, turned=act, ids="*i32", part="*fp32", count="*i32")
        constants |= dict(BIAS=False, RESIDUAL=not gated and not top, SPLIT=4, SERIAL=tokens > SPLIT_M)
        constants |= dict(TOPK=10 if top else 0)
        pointers |= dict.fromkeys(("cos", "sin", "kv", "kv_scales", "slots", "q_weight", "k_weight", "arrived"), act)
        constants |= NO_HEADS
    if "qkv" in words:
        int8 = "int8-cache" in words
        pointers |= dict(cos="*fp32", sin="*fp32", slots="*i64", arrived="*i32")
        pointers |= dict(kv="*i8", kv_scales="*fp32") if int8 else {}
        constants |= dict(HQ=16, HKV=8, HD=128, LEVELS=7, QK_NORM=norms, INT8=int8, POOLED=True)
        constants["RESIDUAL"] = False
    name = f"{'experts' if expert else 'linear'} w{bits} {dtype} M<={tokens}" + f" g{group}" * (bits == 4)
    name = " ".join([name, *(word for word in words if word not in ("experts", f"g{group}"))])
    weights = block * 128 / (options["num_warps"] * 32) * (1 + gated)
    main = bits == 4 and dtype == "fp16" and form in MAIN
    # Hopper's own instructions for many rows are longer, and quicker.
    wide = tokens <= 32 and config.on(tokens) != config
    limit = LIMITS.get(32 if wide else tokens, math.inf) if main else math.inf
    kernel = expert_kernel if expert else linear_kernel
    return Variant(name, kernel, pointers, constants, options, weights, limit, bits < 16)


def attention(
    dtype: str, chain: bool = False, window: int = 0, int8: bool = False, dim: int = 128, arch: int = 86
) -> Variant:  # fmt: skip
    """The kernel as `tree_attention` launches it."""
    act = f"*{dtype}"
    pointers = dict(
        q=act, kv="*i8" if int8 else act, kv_scales="*fp32" if int8 else act, segments="*i64", start="*i64", out=act
    )
    pointers |= dict(sinks=act, visible="*u8", positions="*i64", acc_part="*fp32", ml_part="*fp32", arrived="*i32")
    label = f"{dtype}{' prompt' if chain else ''}{f' window {window}' if window else ''}"
    label += " int8 cache" * int8 + f" hd {dim}" * (dim != 128)
    tiles = attention_tiles(dim, 4, int8, chain, window, arch // 10 == 9)
    constants = dict(HKV=8, HD=dim, HDP=dim, WINDOW=window, CHAIN=chain)
    constants |= dict(INT8=int8, CAP=0.0, SINKS=False, POOLED=True)
    constants |= {key: value for key, value in tiles.items() if key.isupper()} | dict(NATIVE=True)
    options = {key: value for key, value in tiles.items() if key.islower()}
    return Variant(f"attention {label}", attend_kernel, pointers, constants, options)


# Weights with the types of a file: (dtype, numbers of tokens, forms). A form is types and words as `linear` takes them.
PANELS = (
    ("fp16", (16,), tuple(kind for kind in FORMATS if kind not in ("Q4_K", "Q6_K"))),
    ("bf16", (16, 32, 64), ("Q4_K", "Q6_K", "Q5_K")),
    ("bf16", (16, 64), ("MXFP4", "Q4_K gate-up", "Q4_K Q6_K", "Q5_K gate-up", "Q4_K norm", "Q4_K Q6_K qkv")),
    ("fp16", (64,), ("Q3_K", "Q8_0", "IQ4_XS", "Q5_0 Q4_1 Q8_0 qkv", "Q6_K gate-up", "IQ4_XS gate-up")),
    ("bf16", (512,), ("Q4_K", "Q6_K", "Q5_K gate-up", "MXFP4", "Q4_K Q6_K")),
    ("fp16", (512,), ("Q3_K", "Q8_0", "Q5_1", "IQ4_XS gate-up")),
    ("fp16", (32,), ("Q6_K top-10", "Q8_0 top-10")),
    ("bf16", (16,), ("MXFP4 experts", "Q4_K experts gate-up", "Q6_K experts", "Q5_K experts gate-up")),
)


def panels(dtype: str, tokens: int, form: str, arch: int = 86) -> Variant:
    """`linear` for a weight with the types that form begins with."""
    types = FORMATS | {"MXFP4": mxfp4.FORM}
    own, words = [], form.split()
    while words and words[0] in types:
        own.append((2048, *types[words.pop(0)].numbers()))
    bits = max(low + high for _, low, high, *_ in own)
    base = linear(4, dtype, tokens, " ".join(words), arch)
    config = linear_config(4096, 4096, bits, capability=divmod(arch, 10))
    config = unsplit(config) if "experts" in words else config
    gated = base.constants["GATED"]
    block, tile, options = launch_tile(
        config, min(32, tokens) if "top-10" in words else tokens, gated, bits=bits, forms=True
    )
    constants = base.constants | dict(BITS=0, GROUP=0, FORMS=kernel_forms(tuple(own)), BN=block, BT=tile)
    pointers = base.pointers | dict(s="*i16", z="*i32")
    # With a single high bit decoded weights do go through shared memory.
    quantized = all(high != 1 for _, _, high, *_ in own)
    weights = block * 128 / (options["num_warps"] * 32) * (1 + gated)
    name = f"{'experts' if 'experts' in words else 'linear'} {dtype} M<={tokens} {form}"
    return Variant(name, base.kernel, pointers, constants, options, weights, quantized=quantized)


KINDS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


def of_launch(name: str, launch: fake_cuda.Launch) -> Variant:
    """The kernel as Triton would compile it for a recorded launch."""
    fixed = {p.name for p in launch.kernel.params if p.is_constexpr}
    general = {p.name for p in launch.kernel.params if p.do_not_specialize}
    pointers, constants, uneven = {}, {}, []
    for key, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            pointers[key] = KINDS[value.dtype]
        elif key in fixed or (value == 1 and key not in general):
            constants[key] = value
        else:
            pointers[key] = "fp32" if isinstance(value, float) else "i32"
            uneven += [key] * (isinstance(value, float) or value % 16 != 0 or key in general)
    return Variant(name, launch.kernel, pointers, constants, launch.options, uneven=tuple(uneven))


def recorded_launches() -> list[Variant]:
    """The kernels of the small work of a step, for the largest vocabulary and trees and for a batch, of norms and rotary
    positions, and of weights that are written out."""
    found = []
    with torch._subclasses.fake_tensor.FakeTensorMode(), fake_cuda.Indexing():
        for B, V, K, N, half in ((1, 128256, 10, 60, torch.bfloat16), (4, 32000, 8, 24, torch.float16)):
            with fake_cuda.recorded() as launches:
                launch_small_work(B, V, K, N, half)
                launch_norms_and_rows(B, half)
            found += [of_launch(f"{x.kernel.__name__} {i} batch {B}", x) for i, x in enumerate(launches)]
    return found


def recurrent(dtype: str) -> list[Variant]:
    """The kernels of a recurrent layer with 32 heads of 128, for texts as for trees."""
    kind, K, D, heads, dim = getattr(torch, dtype), 4, 8, 32, 128
    row = 2 * heads * dim + 2 * heads

    def new(*shape, kind=kind):
        return torch.empty(shape, dtype=kind, device="cuda")

    with torch._subclasses.fake_tensor.FakeTensorMode(), fake_cuda.Indexing(), fake_cuda.recorded() as launches:
        counts = [new(1, kind=kind) for kind in (torch.int64, torch.bool, torch.int64)]
        memory = new(1, heads, dim, dim, kind=torch.float32), new(1, K + D, row), new(1, 26, row)
        weights, walk = (new(row - 2 * heads, 1, K), new(heads), new(heads)), new(1, 26, 3, kind=torch.int64)
        read = kernels.delta_rule.triton(new(1, 26, row), *weights, records.Memory(*memory, *counts), walk)
        kernels.gated_norm.triton(read, new(1, 26, row)[..., : heads * dim], new(dim), 1e-6)
    return [of_launch(f"{launch.kernel.__name__} {dtype}", launch) for launch in launches]


def launch_small_work(B: int, V: int, K: int, N: int, half: torch.dtype) -> None:
    """Launch these kernels on empty tensors as their operators do, in every mode of sampling. V: of the vocabulary; K:
    children of a node; N: nodes of the tree."""

    def new(*shape, kind=torch.int64):
        return torch.empty(shape, dtype=kind, device="cuda")

    wide, flag, D, S, H = torch.float32, torch.bool, 9, 4096, 4096
    settings = choice.Settings(new(B, 1, 1, kind=wide), new(B, 1, 1), *(new(B, 1, 1, kind=wide) for _ in "pm"))
    ids, noise, drafted = new(V), new(B, D + 1, V, kind=wide), new(B, 1, V, kind=wide)
    choose, draft_topk = sampling._choose.triton, sampling._draft_topk.triton
    sampling.noise_ahead.triton(new(B), new(B), D, new(V))
    for kind, filters in itertools.product((half, wide), (False, True)):
        choose(new(B, N, V, kind=kind), noise, new(B, N), settings, filters)
        draft_topk(new(B, K, V, kind=kind), drafted, ids, settings, filters, True, K)
        draft_topk(new(B, K, V, kind=kind), drafted, None, settings, filters, False, K)
    choose(new(B, N, V, kind=wide), None, None, settings, False)
    draft_topk(new(B, K, V, kind=wide), None, None, settings, False, False, K)
    best = planes_topk.shapes(new(B * K, 1, kind=wide), None, None, K)
    choice.merge_topk(best, new(V // 128, B * K, K + 2, kind=wide), new(V // 128, B * K, K, kind=torch.int32))
    rotary = records.Rotary(new(S, 64, kind=wide), new(S, 64, kind=wide))
    draft.place_rows.triton(new(B), new(1, N), rotary, S, 0, None, None, 0, new(B, 2))
    draft.place_rows.triton(new(B), new(1, 0), rotary, S, D, new(B), new(B, S), 1, None)
    table, feature = new(V, H, kind=half), new(B, D, H, kind=half)
    for source, norm, keep in ((new(B, K), None, False), *((None, new(H, kind=half), keep) for keep in (False, True))):
        eagle_draft.join_rows.triton(table, new(B, K), feature, source, norm, norm, 1e-5, keep)
    first = new(B, K), new(B, K, kind=wide)
    for known in (None, ids):
        pool = growing._grow.triton([], *first, known)
        growing._grow.triton([*pool[:4], pool[6]], new(B, K, K), new(B, K, K, kind=wide), known)
        growing._select.triton(new(B, 710), new(B, 710, kind=wide), new(B, 710), new(B), known, N, D, None)
    turned, layers = (new(B, D, 64, kind=wide), new(B, D, 64, kind=wide)), 5
    context, cache = new(B, D, layers, 2, 8, 128, kind=half), new(layers, 2, B, 8, S, 128, kind=half)
    kernels.write_context.triton(context, new(layers, 128, kind=half), 1e-6, *turned, cache, new(B, D))
    slots, delta, base = new(B, 16, H, kind=half), new(B, 16, 4 * H // 16, kind=half), new(2, 2, H, kind=half)
    for residual in (None, slots):
        kernels.convolve.triton(slots, delta, base, int(residual is not None), residual)
    short = new(B, 15, 16, kind=wide), new(B, 15, 16)
    codebook, mixed = new(V, 256, kind=half), new(B, 15, 256, kind=half)
    for soft, known in (
        (None, (new(B, K, 256, kind=half), None, None, None)),
        (settings.temperature, (None, new(B, K), codebook, mixed)),
    ):
        kernels.follow.triton(*short, kernels.Parents(codebook, *known), soft, 3, K)
    growing.best_prefixes.triton(new(B, 15, K), new(B, 15, K, kind=wide), new(B), N)
    verify.accept.triton(*(new(B, N) for _ in range(3)), new(B, N, N, kind=flag), new(B, N, kind=flag), new(B, N), D)
    accepted = records.Accepted(new(B, D + 1), new(B), new(B), new(B, D + 1))
    state = dict(tokens=new(B, S), ring=new(8, B, 2 + 2 * (D + 1)), stop_ids=new(B, 8), step=new(1))
    state |= dict.fromkeys(("n", "root", "count", "produced", "limit"), new(B)) | dict(done=new(B, kind=flag))
    state |= dict(features=new(B, D + 1, 3 * H, kind=half), segments=new(B, 2))
    for rows in (0, 65):
        buffers = records.StepBuffers(**state, history=new(B, rows, 3 * H, kind=half))
        step._write.triton(accepted, new(B, N, kind=flag), new(B, N, 3 * H, kind=half), buffers)
    for row, kind in ((128, half), (132, torch.int8)):
        kv.commit_kv.triton(new(32, 2, 1, 8, S, row, kind=kind), new(B, D + 1), new(B, D + 1))
    for (E, k), kind in itertools.product(((8, 2), (128, 8)), (half, wide) if B == 1 else ()):
        for rows in (1, 200):
            experts.route.triton(new(rows, E, kind=kind), k, True)
        experts.mix.triton(new(B, k, H, kind=kind), new(B, k, kind=kind), new(B, H, kind=kind))


def launch_norms_and_rows(B: int, half: torch.dtype) -> None:
    """The same for norms, rotary positions, and the rows or the whole of a matrix."""

    def new(*shape, kind=half):
        return torch.empty(shape, dtype=kind, device="cuda")

    kernels.rms_norm.triton(new(B, 4096), new(4096), 1e-5)
    angles, slots = [new(B, 26, 64, kind=torch.float32)] * 2, new(B, 26, kind=torch.int64)
    for kind, norms in ((half, (None, None)), (half, (new(128), new(128))), (torch.int8, (None, None))):
        cache = new(2, 1, 8, 4096, 132 if kind == torch.int8 else 128, kind=kind)
        kernels.rope_write_kv.triton(new(B, 26, 48, 128), *angles, cache, slots, *norms, 1e-5, False, False)
    for dim, shares in itertools.product((256, 512), (False, True)):  # heads of Gemma 4
        wide = [new(B, 26, dim // 2, kind=torch.float32)] * 2, new(2, 1, 1, 4096, dim), slots
        qkv, norms = new(B, 26, 8 if shares else 10, dim), (new(dim), None if shares else new(dim))
        kernels.rope_write_kv.triton(qkv, *wide[0], *wide[1:], *norms, 1e-5, True, shares)
    for bits, group, zeros in ((4, 128, False), (4, 32, True), (8, 0, False)):
        words = new(32, 32, 4 * panel_words(bits, group, zeros), kind=torch.int32)
        scales = new(4096, kind=torch.float32) if bits == 8 else None
        weight = kernels.PackedWeight("planes", bits, group, 4096, 4096, words, scales)
        kernels.dequantize(weight, half, fused=True)
    for form in FORMATS.values():
        words, facts = new(panels_bytes(form, 4096, 4096) // 4, kind=torch.int32), ((4096, *form.numbers()),)
        for ids in (None, new(26, kind=torch.int64)):
            triton_rows(words, facts, 4096, 4096, ids, half)


def variants(quick: bool = False, arch: int = 86) -> list[Variant]:
    """All kernel variants. quick: of the main int4 loop and one of each kind that has been too large, those of `arch`."""
    attends = functools.partial(attention, arch=arch)
    if quick:
        found = [linear(bits, dtype, m, form, arch) for bits, dtype, m, form, archs in QUICK if arch in archs]
        return found + [attends("fp16", dim=256), *recurrent("float16")]
    found = [
        linear(bits, dtype, m, form, arch) for bits, dtype, tokens, forms in LINEARS for form in forms for m in tokens
    ]
    found += [panels(dtype, m, form, arch) for dtype, tokens, forms in PANELS for form in forms for m in tokens]
    for int8, dim in itertools.product((False, True), (64, 128, 256, 512)):
        found += [attends("bf16", int8=int8, dim=dim), attends("fp16", window=4096, int8=int8, dim=dim)]
        if dim > 64:
            found.append(attends("fp16", chain=True, int8=int8, dim=dim))
            found.append(attends("bf16", chain=True, window=4096, int8=int8, dim=dim))
    return found + recorded_launches() + recurrent("float16") + recurrent("bfloat16")
