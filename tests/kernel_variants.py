"""Which kernels the compile gate compiles: with which constants, pointers and compiler options, as our operators do."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import NamedTuple
from unittest import mock

import fake_cuda
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import eagle_draft
import kernels
from decoding import sampling, step, verify
from kernels import choice, draft, experts, growing, kv, records, topk
from kernels.formats import Format
from kernels.linear import planes_linear, planes_topk
from kernels.packing import panel_words
from kernels.panels import panels_bytes, triton_rows
from kernels.projection import planes_linear_rope
from kernels.tuned import linear_config
from weights.gguf_types import FORMATS, nvfp4

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ARCHITECTURES = (86, 89, 90, 120)
QUICK_ARCHITECTURES = (86, 90)  # of tests that run without --slow
LIMITS = {8: 2.7, 16: 2.7, 32: 3.5}  # rows -> thread instructions per int4 weight, in these forms of fp16 layers:
MAIN = ("", "narrow", "gate-up", "top-10", "experts", "experts gate-up", "fp16-acc", "qkv")
# The linear layers: (bits, dtype, numbers of tokens, forms). A form is as `linear` takes it.
LINEARS = (
    (4, "fp16", (8, 16, 32, 64), ("", "gate-up", "zeros")),
    (4, "bf16", (16, 32, 64), ("",)),
    (4, "fp16", (16, 32, 64), ("fp16-acc", "qkv")),
    # Small groups have many scales, so that registers are short.
    (4, "fp16", (16, 64), ("ragged", "g64", "g32")),
    (4, "bf16", (16, 64), ("qkv g32 zeros", "qkv qk-norm int8-cache", "g64 zeros", "g32 zeros")),
    (4, "bf16", (32,), ("g32 zeros",)),
    (4, "bf16", (64,), ("gate-up", "zeros", "gate-up zeros", "g64 gate-up", "g32 gate-up", "g32 gate-up zeros")),
    (4, "fp16", (64,), ("qkv qk-norm", "qkv int8-cache", "qkv fp16-acc", "zeros narrow", "gate-up fp16-acc")),
    (8, "fp16", (16, 32, 64), ("",)),
    (8, "fp16", (16, 64), ("gate-up", "qkv")),
    (8, "bf16", (16, 64), ("",)),
    (8, "bf16", (64,), ("gate-up",)),
    (16, "bf16", (16, 32), ("",)),
    (16, "bf16", (16, 64), ("qkv",)),
    (16, "bf16", (64,), ("gate-up",)),
    (4, "fp16", (16,), ("narrow", "experts", "experts gate-up", "experts zeros", "experts g32 zeros")),
    (4, "bf16", (16,), ("experts gate-up", "experts g32 gate-up", "experts zeros", "experts g32 gate-up zeros")),
    (8, "fp16", (16,), ("experts", "experts gate-up")),
    (16, "fp16", (16,), ("", "experts", "experts gate-up")),
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


def new(*shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
    """An empty tensor on the GPU."""
    return torch.empty(shape, dtype=kind, device="cuda")


@contextlib.contextmanager
def fake_gpu(arch: int = 86):
    """Inside, tensors on sm_`arch` are fake. Gives the list of the launches that are made."""
    capability = mock.patch.object(torch.cuda, "get_device_capability", lambda device: divmod(arch, 10))
    backend = kernels.KernelBackend("auto", "cuda").active()
    with FakeTensorMode(), fake_cuda.Indexing(), capability, backend, fake_cuda.recorded() as launches:
        yield launches


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


def linear(bits: int, dtype: str, tokens: int, form: str, arch: int = 86) -> Variant:
    """The kernel as `packed_linear` launches it for a 4096 x 4096 layer on sm_`arch`, with sums in four parts.

    `form` holds words. types of a file: the weight has 2048 rows of each, whatever `bits` says; experts: as
    `packed_experts` launches it; g64, g32: groups of so many weights instead of 128; zeros: with zero points;
    gate-up: two matrices at once; fp16-acc: sums in fp16; ragged: sizes that do not divide the tiles; narrow: a tile of
    64 rows; top-10: an LM head that keeps 10 values; qkv: 16 heads of queries and 8 of keys turned behind it; qk-norm:
    normed before; int8-cache: into such a cache.
    """
    words, half, types = form.split(), DTYPES[dtype], FORMATS | {"NVFP4": nvfp4(4096)}
    forms = tuple((2048, *types[word].numbers()) for word in words if word in types)
    bits = max((low + high for _, low, high, *_ in forms), default=bits)
    expert, zeros, gated, ragged, top, qkv = (
        word in words for word in ("experts", "zeros", "gate-up", "ragged", "top-10", "qkv")
    )
    group = 0 if bits != 4 or forms else next((int(word[1:]) for word in words if word in ("g64", "g32")), 128)
    config = linear_config(4096, 4096, bits, capability=divmod(arch, 10))._replace(split_k=4)
    if "narrow" in words:
        config = config._replace(block_n=64, warps=2, wide_n=0)
    if "fp16-acc" in words:
        config = config._replace(accumulate="float16")
    with fake_gpu(arch) as launches:
        n, k, lead = 4096, 4112 if ragged else 4096, (8,) * expert
        if forms:
            size = sum(panels_bytes(Format.from_numbers(numbers), rows, k) // 4 for rows, *numbers in forms)
            n, stored = 2048 * len(forms), new(*lead, size, kind=torch.int32)
        elif bits == 16:
            stored = new(*lead, n, k, kind=half)
        else:
            stored = new(*lead, n // 128, -(-k // 128), 4 * panel_words(bits, group, zeros), kind=torch.int32)
        scales = new(*lead, n, kind=torch.float32) if bits == 8 and not forms else None
        facts = dict(scales=scales, counters=new(64, kind=torch.int32), config=config, forms=forms)
        weight = kernels.PackedWeight("planes", bits, group, n, k, stored, **facts).parts()
        x = new(tokens, k, kind=half)
        if expert:
            integers = (new(size, kind=torch.int32) for size in (2 * tokens, 8, 9))
            routes = experts.Routes(new(tokens, 2, kind=half), new(tokens, 2), *integers)
            experts.expert_linear.triton(x, routes, *weight, int(gated))
        elif top:
            planes_topk.triton(x, *weight, 10)
        elif qkv:
            int8, norm = "int8-cache" in words, new(128, kind=half) if "qk-norm" in words else None
            cache = new(2, 1, n // 512, 4096, 128 + 4 * int8, kind=torch.int8 if int8 else half)
            angles = new(1, tokens, 64, kind=torch.float32), new(1, tokens, 64, kind=torch.float32)
            turn = *angles, cache, new(1, tokens), norm, norm, 1e-5, False, False
            planes_linear_rope.triton(x[None], *weight, None, 128, *turn)
        else:
            residual = None if gated else new(tokens, n, kind=half)
            planes_linear.triton(x, *weight, None, residual, int(gated), False)
    name = f"{'experts' if expert else 'linear'}{'' if forms else f' w{bits}'} {dtype} M<={tokens}"
    name = " ".join([name, *([f"g{group}"] if group else []), *(w for w in words if w not in ("experts", f"g{group}"))])
    variant = of_launch(name, launches[0])
    weights = variant.constants["BN"] * 128 / (variant.options["num_warps"] * 32) * (1 + gated)
    main = bits == 4 and dtype == "fp16" and form in MAIN
    # Hopper's own instructions for many rows are longer, and quicker.
    wide = tokens <= 32 and config.on(tokens) != config
    limit = LIMITS.get(32 if wide else tokens, math.inf) if main else math.inf
    # With a single high bit decoded weights do go through shared memory.
    quantized = bits < 16 and all(high != 1 for _, _, high, *_ in forms)
    return variant._replace(weights=weights, limit=limit, quantized=quantized)


def attention(
    dtype: str, chain: bool = False, window: int = 0, int8: bool = False, dim: int = 128, arch: int = 86,
    ring: bool = False, long: bool = False,
) -> Variant:  # fmt: skip
    """The kernel as `tree_attention` launches it. long: with programs that take several splits."""
    with fake_gpu(arch) as launches:
        kind, T, S = DTYPES[dtype], 60 if long else 26, 449 if ring else 40_000 if long else 4000
        cache = new(2, 1, 8, S, dim + 4 * int8, kind=torch.int8 if int8 else kind)
        case = new(1), new(1, T, T, kind=torch.bool), new(1, T), window, 0.3, None, 0.0, None
        case += (None, 0, False, True) if ring else (new(1, 2), S, chain)
        kernels.tree_attention.triton(new(1, 32, T, dim, kind=kind), cache, *case)
    label = f"{dtype}{' prompt' if chain else ''}{f' window {window}' if window else ''}"
    label += " ring" * ring + " long" * long + " int8 cache" * int8 + f" hd {dim}" * (dim != 128)
    return of_launch(f"attention {label}", launches[0])


# Weights with the types of a file: (dtype, numbers of tokens, forms). A form is types and words as `linear` takes them.
PANELS = (
    ("fp16", (16,), tuple(kind for kind in FORMATS if kind not in ("Q4_K", "Q6_K"))),
    ("bf16", (16, 32, 64), ("Q4_K", "Q6_K", "Q5_K")),
    ("bf16", (16, 64), ("MXFP4", "Q4_K gate-up", "Q4_K Q6_K", "Q5_K gate-up", "Q4_K norm", "Q4_K Q6_K qkv")),
    ("fp16", (64,), ("Q3_K", "Q8_0", "IQ4_XS", "Q5_0 Q4_1 Q8_0 qkv", "Q6_K gate-up", "IQ4_XS gate-up")),
    ("bf16", (512,), ("Q4_K", "Q6_K", "Q5_K gate-up", "MXFP4", "Q4_K Q6_K")),
    ("fp16", (512,), ("Q3_K", "Q8_0", "Q5_1", "IQ4_XS gate-up")),
    ("fp16", (32,), ("Q6_K top-10", "Q8_0 top-10")),
    ("fp16", (16, 64), ("NVFP4",)),
    ("bf16", (16, 512), ("NVFP4", "NVFP4 gate-up")),
    ("bf16", (16,), ("MXFP4 experts", "Q4_K experts gate-up", "Q6_K experts", "Q5_K experts gate-up")),
)


def recorded_launches() -> list[Variant]:
    """The kernels of the small work of a step, for the largest vocabulary and trees and for a batch, of norms and rotary
    positions, and of weights that are written out."""
    found = []
    for B, V, K, N, half in ((1, 128256, 10, 60, torch.bfloat16), (4, 32000, 8, 24, torch.float16)):
        with fake_gpu() as launches:
            launch_small_work(B, V, K, N, half)
            launch_norms_and_rows(B, half)
        found += [of_launch(f"{x.kernel.__name__} {i} batch {B}", x) for i, x in enumerate(launches)]
    return found


def recurrent(dtype: str) -> list[Variant]:
    """The kernels of a recurrent layer with 32 heads of 128, for texts as for trees."""
    kind, K, D, heads, dim = getattr(torch, dtype), 4, 8, 32, 128
    row, of = 2 * heads * dim + 2 * heads, functools.partial(new, kind=kind)
    with fake_gpu() as launches:
        counts = new(1), new(1, kind=torch.bool), new(1)
        memory = new(1, heads, dim, dim, kind=torch.float32), of(1, K + D, row), of(1, 26, row)
        weights = of(row - 2 * heads, 1, K), of(heads), of(heads)
        read = kernels.delta_rule.triton(of(1, 26, row), *weights, records.Memory(*memory, *counts), new(1, 26, 3))
        kernels.gated_norm.triton(read, of(1, 26, row)[..., : heads * dim], of(dim), 1e-6)
    return [of_launch(f"{launch.kernel.__name__} {dtype}", launch) for launch in launches]


def launch_small_work(B: int, V: int, K: int, N: int, half: torch.dtype) -> None:
    """Launch these kernels on empty tensors as their operators do, in every mode of sampling. V: of the vocabulary; K:
    children of a node; N: nodes of the tree."""
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
    topk.merge_topk(best, new(V // 128, B * K, K + 2, kind=wide), new(V // 128, B * K, K, kind=torch.int32))
    rotary = records.Rotary(new(S, 64, kind=wide), new(S, 64, kind=wide))
    draft.place_rows.triton(new(B), new(1, N), rotary, S, 0, None, None, 0, new(B, 2))
    draft.place_rows.triton(new(B), new(1, 0), rotary, S, D, new(B), new(B, S), 1, None)
    draft.place_rows.triton(new(B), new(1, N), rotary, S, D, new(B), new(B, S), 0, None, True)
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
    given = (new(B, K, 256, kind=half), None, None, None), (None, new(B, K), codebook, mixed)
    for soft, known in zip((None, settings.temperature), given, strict=True):
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
    """The same for norms, rotary positions, and rows of a matrix."""
    of = functools.partial(new, kind=half)
    kernels.rms_norm.triton(of(B, 4096), of(4096), 1e-5)
    angles, slots = [of(B, 26, 64, kind=torch.float32)] * 2, of(B, 26, kind=torch.int64)
    for kind, norms in ((half, (None, None)), (half, (of(128), of(128))), (torch.int8, (None, None))):
        cache = of(2, 1, 8, 4096, 132 if kind == torch.int8 else 128, kind=kind)
        kernels.rope_write_kv.triton(of(B, 26, 48, 128), *angles, cache, slots, *norms, 1e-5, False, False)
    for dim, shares in itertools.product((256, 512), (False, True)):  # heads of Gemma 4
        wide = [of(B, 26, dim // 2, kind=torch.float32)] * 2, of(2, 1, 1, 4096, dim), slots
        qkv, norms = of(B, 26, 8 if shares else 10, dim), (of(dim), None if shares else of(dim))
        kernels.rope_write_kv.triton(qkv, *wide[0], *wide[1:], *norms, 1e-5, True, shares)
    for form in (*FORMATS.values(), nvfp4(4096)):
        words, facts = of(panels_bytes(form, 4096, 4096) // 4, kind=torch.int32), ((4096, *form.numbers()),)
        triton_rows(of(26, 4096), words, facts, of(26, kind=torch.int64))


def variants(quick: bool = False, arch: int = 86) -> list[Variant]:
    """All kernel variants. quick: of the main int4 loop and one of each kind that has been too large, those of `arch`."""
    attends = functools.partial(attention, arch=arch)
    if quick:
        found = [linear(bits, dtype, m, form, arch) for bits, dtype, m, form, archs in QUICK if arch in archs]
        return found + [attends("fp16", dim=256), *recurrent("float16")]
    found = [
        linear(bits, dtype, m, form, arch) for bits, dtype, tokens, forms in LINEARS for form in forms for m in tokens
    ]
    found += [linear(0, dtype, m, form, arch) for dtype, tokens, forms in PANELS for form in forms for m in tokens]
    for int8, dim in itertools.product((False, True), (64, 128, 256, 512)):
        found += [attends("bf16", int8=int8, dim=dim), attends("fp16", window=4096, int8=int8, dim=dim)]
        if dim > 64:
            found.append(attends("fp16", chain=True, int8=int8, dim=dim))
            found.append(attends("bf16", chain=True, window=4096, int8=int8, dim=dim))
        found += [
            attends("fp16", int8=int8, dim=dim, long=True),
            attends("bf16", window=4096, int8=int8, dim=dim, long=True),
        ]
    found += [attends(dtype, window=256, dim=dim, ring=True) for dtype in ("fp16", "bf16") for dim in (64, 128, 256)]
    return found + recorded_launches() + recurrent("float16") + recurrent("bfloat16")
