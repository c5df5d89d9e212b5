"""The C++ kernels of CPUs: right values, bits that depend on the row alone, and a build that never stops a start."""

import ctypes
import itertools
import math
import operator
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_model import feed, random_tree
from tiny import CTX, eagle_drafter, needs_kernels, nvfp4_blocks, random_blocks, randomise, tiny_head

import kernels
import tree as trees
from cli.prove import is_bitwise
from cli.report import in_parts
from decoding import sampling
from decoding.drafter import Draft, PlainDrafter
from decoding.params import SamplingMode, SamplingParams
from decoding.step import DecodeState, draft_input
from drafters.trees import TreeDrafter
from eagle_draft import EagleHead
from engine.engine import Engine, EngineConfig
from engine.fused import fused_parts, layers_in_parts, stack, static_draft
from engine.stepping import View
from families.config import DeltaConfig, ModelConfig, RopeConfig
from generate import main as generate
from kernels import cpu, records
from kernels.blocks import pack_blocks, stack_blocks
from kernels.formats import Part
from kernels.packing import dequantize
from layers.build import build_transformer
from layers.recurrent import new_memory
from model import Transformer
from support import native
from weights import small_floats
from weights.files import Entry
from weights.gguf_types import FORMATS, nvfp4, read_blocks, source_of
from weights.quantized import QuantSpec, pack_
from weights.rounding import quantize_

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (1, 2, 3, 4, 7, 8, 16, 26, 60)
FORMS = {
    "int4": (4, 128, ""), "int4 zeros": (4, 64, "zeros"), "int4 mins": (4, 32, "mins"), "int8": (8, 0, ""),
    "int8 groups": (8, 32, "groups"),
}  # fmt: skip
# The types of GGUF files, and two weights of parts with different types.
STORED = [(kind,) for kind in FORMATS] + [("Q4_K", "Q6_K"), ("Q5_0", "Q3_K", "IQ4_XS"), ("NVFP4",), ("NVFP4", "Q6_K")]


def backend() -> kernels.KernelBackend:
    return kernels.KernelBackend("cpu", "cpu")


def weight(form: str, n: int = 96, k: int = 256) -> kernels.PackedWeight:
    """A random weight as it is stored, in layout 'plain'."""
    bits, group, extra = FORMS[form]
    g = torch.Generator().manual_seed(n + k)
    grid = (k // group if group else 1, n)
    scales = torch.rand(grid, generator=g) * 0.02 + 0.001
    if bits == 8:
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=g)
        return kernels.pack_int8(codes, scales.half() if extra else scales[0], torch.float32, "plain")
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    zeros = torch.randint(0, 16, grid, dtype=torch.uint8, generator=g) if extra == "zeros" else None
    mins = torch.randn(grid, generator=g).half() * 0.1 if extra == "mins" else None
    return kernels.pack_int4(codes, scales.half(), zeros, group, None, torch.float32, "plain", mins=mins)


def tiles(plain: kernels.PackedWeight, reuse: bool = False) -> kernels.PackedWeight:
    """The same weight in the layout that the backend chooses."""
    with backend().active():
        if plain.bits == 8:
            return kernels.pack_int8(plain.weight, plain.scales, torch.float32, reuse=reuse)
        more = (plain.scales, plain.zeros, plain.group_size, None, torch.float32)
        return kernels.pack_int4(plain.weight, *more, mins=plain.mins, reuse=reuse)


def stored_weight(kinds: tuple[str, ...], n: int = 96, k: int = 256) -> kernels.PackedWeight:
    """A weight [n, k] of random blocks of these types, in parts of different heights where they are several."""
    heights = [n] if len(kinds) == 1 else [16 + 8 * i for i in range(len(kinds) - 1)]
    heights += [n - sum(heights)] if len(kinds) > 1 else []

    def part(kind: str, rows: int, seed: int) -> Part:
        if kind == "NVFP4":
            return Part(nvfp4(k), rows, k, [nvfp4_blocks(rows, k, seed)])
        return Part(FORMATS[kind], rows, k, [read_blocks(kind, random_blocks(kind, rows, k, seed))])

    return pack_blocks([part(kind, rows, seed) for seed, (kind, rows) in enumerate(zip(kinds, heights, strict=True))])


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_reach_their_tiles_from_the_rows_of_a_file(kind):
    """Tiles are bit-equal whether C++ reads the codes off a file's rows or is given codes that numpy read."""
    rows = random_blocks(kind, 24, 512, 5)
    packed = [
        pack_blocks([Part(FORMATS[kind], 24, 512, [read_blocks(kind, rows, stored)], source)])
        for stored, source in ((True, source_of(kind)), (False, cpu.CODES))
    ]
    assert torch.equal(packed[0].weight, packed[1].weight) and packed[0].weight.any()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as the kernel rounds them: int8 with one scale per 32 columns, in float64."""
    blocks = x.unflatten(-1, (-1, cpu.BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(most > 0, 127 / most, 0)).round()
    return (codes.double() * (most / 127).double()).flatten(-2)


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n,k", [(8, 32), (24, 256), (96, 256), (576, 1536)])  # a gate has whole tiles, or half ones
def test_products_equal_their_definition(form, n, k):
    """Catches a code, scale, zero point or min that meets another column, a forgotten offset, activations that are
    rounded under --activations float, a bias that is added after the gate, the wrong half of a gate, and a residual of
    another row. Rounding them as the kernel does leaves only float32 sums to differ."""
    k = max(k, FORMS[form][1])
    plain = weight(form, n, k)
    packed, matrix = tiles(plain), dequantize(plain, torch.float64)
    assert packed.layout == "tiles" and torch.equal(dequantize(packed, torch.float32), dequantize(plain, torch.float32))
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(n))
    x[4, :32] = 0  # a block of zeros has no scale
    for activations in ("float", "int8"):
        with kernels.KernelBackend("cpu", "cpu", activations).active():
            got = kernels.packed_linear(x, packed)
            want = (rounded(x) if activations == "int8" else x.double()) @ matrix.T
            assert (got - want).abs().max() <= 2e-6 * want.abs().max()
            for rows in (1, 3, 4):
                assert torch.equal(kernels.packed_linear(x[:rows], packed), got[:rows])
    bias, x = torch.randn(n), x.view(3, 3, k)
    for used, gated in itertools.product((None, bias), (0, *kernels.GATES.values())):
        residual = torch.randn(3, 3, n // 2 if gated else n)
        want = kernels.epilogue(got.view(3, 3, n), used, residual, gated)
        fused = kernels.packed_linear(x, packed, used, residual, gated)
        assert (fused - want).abs().max() <= 2e-6 * want.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n,k", [(8, 3), (24, 100), (96, 256)])
def test_float_products_are_exact_and_row_by_row_the_same(dtype, n, k):
    """Catches a value that 16 bits do not hold, an odd last tile, the wrong half of a gate, and bits that depend on the
    width."""
    matrix = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype).float()
    with backend().active():
        packed = kernels.pack_float(matrix)
    assert packed.bits == 8 * dtype.itemsize and torch.equal(dequantize(packed, torch.float32), matrix)
    x, want = torch.randn(13, k), None
    for gated in (False, True)[: 1 + (n % 16 == 0)]:
        want = kernels.epilogue(x.double() @ matrix.double().T, None, None, gated)
        got = kernels.packed_linear(x, packed, gated=gated)
        assert torch.allclose(got.double(), want, atol=1e-5 * k, rtol=1e-5)
        for width in range(1, 13):
            assert torch.equal(kernels.packed_linear(x[:width], packed, gated=gated), got[:width]), width


@needs_kernels
@pytest.mark.parametrize("kinds", STORED, ids=" ".join)
@pytest.mark.parametrize("activations", ["int8", "float"])
def test_products_with_the_types_of_files_equal_their_definition(kinds, activations):
    """Catches a code, scale or min of a file's type that meets another column or row, a missing offset, parts that write
    over each other, a gate across parts, and bits of a row that depend on the number of rows."""
    packed, x = stored_weight(kinds), torch.randn(60, 256, generator=torch.Generator().manual_seed(0))
    matrix, bias = kernels.dequantize(packed, torch.float64), torch.randn(96)
    with kernels.KernelBackend("cpu", "cpu", activations).active():
        got = kernels.packed_linear(x, packed, bias)
        want = (rounded(x) if activations == "int8" else x.double()) @ matrix.T + bias
        assert (got - want).abs().max() <= 2e-6 * want.abs().max()
        residual = torch.randn(60, 96)
        assert torch.equal(kernels.packed_linear(x, packed, bias, residual), got + residual)
        gated = kernels.packed_linear(x, packed, bias, gated=True)
        assert torch.allclose(gated, kernels.epilogue(got, None, None, True), rtol=1e-5, atol=1e-5)
        for width in WIDTHS:
            assert torch.equal(kernels.packed_linear(x[:width], packed, bias), got[:width]), width
            assert torch.equal(kernels.packed_linear(x[:width], packed, bias, gated=True), gated[:width]), width


@needs_kernels
def test_groups_that_the_kernels_do_not_have_are_refused():
    """Catches a type of files that is added in Python alone, and that the C++ kernels would read past its end."""
    packed = stored_weight(["Q4_0"])
    packed.scales[:, 4] = 16
    with backend().active(), pytest.raises(RuntimeError, match="know no such groups"):
        kernels.packed_linear(torch.randn(1, 256), packed)


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [32, 24])
def test_columns_are_reordered_once(n, gated):
    """Catches a permutation (act-order) that is applied twice where a gate is not computed in the kernel."""
    plain, perm, x = weight("int4", n), torch.randperm(256), torch.randn(3, 256)
    with backend().active():
        packed = kernels.pack_int4(plain.weight, plain.scales, None, plain.group_size, perm, torch.float32)
    want = kernels.packed_linear(x[:, perm], tiles(plain), gated=gated)
    assert torch.equal(kernels.packed_linear(x, packed, gated=gated), want)


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_row_do_not_depend_on_other_rows_or_threads(form):
    """Catches a kernel whose speculative and plain decoding could choose different tokens, an overflow that int8 hides,
    and one that reaches other rows."""
    packed, x, threads = tiles(weight(form, 576, 256)), torch.randn(60, 256), torch.get_num_threads()
    alone = torch.cat([kernels.packed_linear(row[None], packed, gated=True) for row in x])
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for width in WIDTHS:
                assert torch.equal(kernels.packed_linear(x[:width], packed, gated=True), alone[:width]), width
    finally:
        torch.set_num_threads(threads)
    rest = [0, 1, 3, 4]
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[2, 40] = bad
        got = kernels.packed_linear(x[:5], packed, gated=True)
        assert not got[2].isfinite().any() and torch.equal(got[rest], alone[rest])


TEAM = """
import os, sys, threading, time, torch
import kernels
callers = sys.argv[1] == "callers"
x, weight = torch.randn(512 if callers else 16384, 256), torch.rand(256)
with kernels.KernelBackend("cpu").active(), torch.inference_mode():
    torch.set_num_threads(1)
    want = kernels.rms_norm(x, weight, 1e-5)
    torch.set_num_threads(3 if callers else 64)

def same(calls):
    with kernels.KernelBackend("cpu").active(), torch.inference_mode():
        return all(torch.equal(kernels.rms_norm(x, weight, 1e-5), want) for _ in range(calls))

if callers:
    done = []
    threads = [threading.Thread(target=lambda: done.append(same(300))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4, done
    child = os.fork()
    if not child:
        os._exit(0 if same(50) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
else:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    end = time.monotonic() + 60
    while not kernels.seconds_alone():  # whose windows are times, so the number of calls depends on the machine
        assert same(10) and time.monotonic() < end
print("right")
"""


@needs_kernels
@pytest.mark.parametrize("what", ["callers", "one processor"])
def test_a_team_of_threads_does_every_row_once(what):
    """Four Python threads that call at once, and a forked child, get the bits of one thread: a chunk that two threads do
    or none, and a child that waits for threads that only its parent has. And where 64 threads share one processor, the
    caller soon works alone: beside other programs, every step waited for a thread that was not running."""
    command = [sys.executable, "-c", TEAM, what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "right\n", done.stderr[-2000:]


ELSEWHERE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
for name, arguments in torch.load(sys.argv[2]):
    results = getattr(torch.ops.eaglet_cpu, name).default(*arguments)
    results = [results] if isinstance(results, torch.Tensor) else results
    print(name, [t.contiguous().view(torch.uint8).tolist() for t in results])
"""


@needs_kernels
def test_an_older_processor_computes_the_same_bits(tmp_path, monkeypatch):
    """Every product, the noise, the choice, the drafted tokens and the recurrent layers of a build for plain AVX2 have
    the bits of the build for this machine. Catches a saturated sum, a forgotten offset, or rounding at another place in
    the branches that machines with VNNI and AVX-512 never run."""
    calls = []
    for form in FORMS:
        packed, x = tiles(weight(form, 96, 256)), torch.randn(5, 256)
        calls.append(("linear", (x, packed.weight, packed.scales, packed.mins, None, None, False, True)))
    for kinds in STORED:
        packed = stored_weight(kinds)
        calls.append(("linear", (torch.randn(5, 256), packed.weight, packed.scales, None, None, None, False, True)))
        calls.append(("rows", (torch.arange(0, 96, 13), packed.weight, packed.scales, None)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with backend().active():
            packed = kernels.pack_float(torch.randn(96, 100).to(dtype).float())
        calls.append(("linear", (torch.randn(9, 100), packed.weight, None, None, None, None, False, True)))
    seed, n, hashes = torch.tensor([1, 2]), torch.tensor([5, 6]), sampling.hash_ids(torch.arange(99))
    z, heat = torch.randn(2, 3, 99), torch.tensor([0.7, 1.0]).view(2, 1, 1)
    noise = torch.ops.eaglet_cpu.noise.default(seed, n, 3, hashes)
    calls += [("noise", (seed, n, 3, hashes)), ("choose", (z, noise, None, heat))]
    calls += [("draft_topk", (z, noise, None, heat, noisy, 7)) for noisy in (False, True)]
    sizes = DeltaConfig(key_heads=1, value_heads=2, key_dim=32, value_dim=136, kernel=4)
    layer = next(new_memory(sizes, 1, 1, 5, 3, torch.float32, torch.device("cpu")).layers())
    layer.memory.normal_()
    rows, numbers = torch.randn(1, 5, sizes.channels + 4), (torch.randn(sizes.channels, 1, 4), *torch.randn(2, 2))
    walk = torch.tensor([[[0, 0, 1], [1, 1, 0], [3, 2, 0], [4, 3, 0], [2, 1, 0]]])
    calls.append(("delta_rule", (rows, *numbers, list(layer), walk)))
    calls.append(("gated_norm", (torch.randn(5, 2, 136), torch.randn(5, 272), torch.randn(136), 1e-6)))
    wanted = []
    for name, arguments in calls:
        results = getattr(torch.ops.eaglet_cpu, name).default(*arguments)
        results = [results] if isinstance(results, torch.Tensor) else results
        wanted.append(f"{name} {[t.contiguous().view(torch.uint8).tolist() for t in results]}")
    monkeypatch.setenv("EAGLET_ISA", "haswell")
    parts = [source for source in cpu.SOURCES if source.name != "cpu_draft.cpp"]  # which calls the others
    library = native.build(parts, cpu.NEEDED, records.header())
    torch.save(calls, tmp_path / "calls.pt")
    command = [sys.executable, "-c", ELSEWHERE, str(library), str(tmp_path / "calls.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == wanted


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_tiles_may_take_the_place_of_the_codes(form):
    """Other tiles where the codes are written over, codes written over without leave, or a place of their own."""
    plain = weight(form, 4104, 128)  # more rows than are packed at a time
    codes, wanted = plain.weight.clone(), tiles(plain)
    assert torch.equal(plain.weight, codes)
    packed = tiles(replace(plain, weight=codes), reuse=True)
    assert torch.equal(packed.weight, wanted.weight) and packed.weight.data_ptr() == codes.data_ptr()


@needs_kernels
def test_no_rows_have_no_product():
    """A crash of the whole process: training calls an LM head without rows where none of them counts."""
    with backend().active():
        assert kernels.packed_linear(torch.zeros(0, 256), tiles(weight(next(iter(FORMS))))).shape == (0, 96)


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_other_dtypes_of_activations_are_computed_in_float32(form):
    """Halves that are read as floats, past the end of the memory: torch.autocast makes such activations."""
    packed = tiles(weight(form))
    x, residual = torch.randn(5, 256).bfloat16(), torch.randn(5, 96).bfloat16()
    with backend().active():
        y = kernels.packed_linear(x, packed, None, residual)
        wanted = kernels.packed_linear(x.float(), packed, None, residual.float())
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted.bfloat16())
    with pytest.raises(RuntimeError, match="another dtype"):
        torch.ops.eaglet_cpu.rms_norm.default(x, torch.ones(256), 1e-5)


def stored(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values as a cache of this dtype holds them."""
    return kernels.quantize_rows(kv) if dtype == torch.int8 else kv.to(dtype)


@needs_kernels
@pytest.mark.parametrize(
    "window, dtype", [(70, torch.float32), (0, torch.float16), (70, torch.bfloat16), (0, torch.int8)]
)
def test_attention_has_the_same_bits_at_every_width_and_number_of_threads(window, dtype):
    """Catches a chunk of positions that begins elsewhere for a node than for history, or sums that follow the threads."""
    S, threads = 150, torch.get_num_threads()
    q, kv = torch.randn(1, 6, S, 32), stored(torch.randn(2, 1, 2, S + 1, 32), dtype)
    ancestors = torch.ones(S, S, dtype=torch.bool).tril()
    if window:
        ancestors &= ~torch.ones(S, S, dtype=torch.bool).tril(-window)

    def attend(width: int) -> torch.Tensor:
        rows = []
        for i in range(0, S, width):
            part = slice(i, min(S, i + width))
            where = torch.tensor([i]), ancestors[None, part, part], torch.arange(S)[None, part]
            rows.append(kernels.tree_attention(q[:, :, part], kv, *where, window, 0.2))
        return torch.cat(rows, 1)

    try:
        with backend().active():
            alone = attend(1)
            for count in (1, 2):
                torch.set_num_threads(count)
                assert all(torch.equal(attend(width), alone) for width in (1, 3, 8, 9, 64, S))
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize(
    "heads, dim, T, n", [((9, 3), 64, 26, 300), ((8, 1), 256, 40, 90), ((2, 2), 32, 1, 127), ((6, 2), 96, 7, 0)]
)
def test_attention_over_bfloat16_equals_its_definition_and_confines_what_is_not_finite(heads, dim, T, n):
    """Catches a product that takes a pair of another row or column, rows of a tree in the wrong order, squares of
    queries that spill into others, and a NaN that reaches queries which do not see it."""
    visible = torch.eye(T, dtype=torch.bool)
    for i in range(1, T):
        visible[i] |= visible[torch.randint(0, i, ())]
    q, kv = torch.randn(1, heads[0], T, dim).bfloat16().float(), torch.randn(2, 1, heads[1], n + T + 1, dim).bfloat16()
    where = torch.tensor([n]), visible[None], n + visible.sum(-1)[None] - 1
    for window, cap, sinks in ((0, 0.0, None), (60, 4.0, torch.randn(heads[0]))):
        shape = window, dim**-0.5, None, cap, sinks
        with backend().active():
            got = kernels.tree_attention(q, kv, *where, *shape)
        want = kernels.tree_attention.reference(q.double(), kv.double(), *where, *shape)
        assert (got - want).norm() < 0.006 * want.norm()
        for which, value in ((0, float("nan")), (1, float("nan")), (1, float("inf"))):
            spoilt, sees = kv.clone(), visible[:, T // 2]
            spoilt[which, :, :, n + T // 2, 3] = value
            with backend().active():
                out = kernels.tree_attention(q, spoilt, *where, *shape)
            assert torch.equal(out[:, ~sees], got[:, ~sees]) and not out[:, sees].isfinite().all(-1).any()


CONFIG = ModelConfig(
    "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=96, max_position_embeddings=CTX,
)  # fmt: skip


def quantized_model(mode: str, **shape) -> Transformer:
    model = build_transformer(replace(CONFIG, **shape)).float()
    randomise(model, 0, 0.3)
    if mode != "float32":
        quantize_(model, QuantSpec(mode, 32, lm_head="int8"))
    model.rotary.build("cpu", CTX)
    with backend().active():
        pack_(model, torch.float32)
    return model


def packed_head(model: Transformer, version: int = 1) -> EagleHead:
    """A head whose trees are drafted in one call."""
    head = tiny_head(model, version=version, head_dim=16, hidden_size=64)
    with backend().active():
        pack_(head, torch.float32)
        assert static_draft(eagle_drafter(head, trees.PAPER25)) is not None
    return head


EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}  # a router whose rows fill no tile
# Gates beside no multiple of 16 columns, where torch's own activations have other bits at the end of a tensor.
SHARED = EXPERTS | {"shared_intermediate_size": 40, "intermediate_size": 48, "norm_topk_prob": False}
CLAMPED = EXPERTS | {"activation": "swiglu_clamped", "expert_bias": True, "sinks": True}


@needs_kernels
@pytest.mark.parametrize("mode,shape", [
    ("float32", {}), ("int8", {}), ("int4", {}), ("float32", SHARED), ("float32", CLAMPED), ("int8", SHARED),
    ("int8", CLAMPED), ("int4", EXPERTS | {"activation": "gelu_tanh"}), ("int8", {"sinks": True}),
    ("int8", {"norms": "both", "activation": "gelu_tanh", "attention_cap": 2.0, "windows": (7, 0)}),
    ("float32", {"norms": "after", "qk_norm": True, "wide_qk_norm": True}),
])  # fmt: skip
def test_rows_of_a_whole_forward_have_the_same_bits_at_every_width(mode, shape):
    """Catches one operation whose bits depend on the width: --prove would then need its tolerance."""
    model = quantized_model(mode, **shape)
    tokens = torch.randint(96, (1, 60), generator=torch.Generator().manual_seed(3))
    logits = []
    with torch.inference_mode(), backend().active() as active:
        for width in (1, 3, 8, 26, 60):
            cache = model.new_cache(1, CTX)
            rows = [feed(model, cache, tokens[:, i : i + width], i, width)[0] for i in range(0, 60, width)]
            logits.append(model.logits(torch.cat(rows, 1)))
            assert torch.equal(logits[-1], logits[0]), width
    assert set(active.declined) <= {"packed_linear"} and (not active.declined or shape is SHARED)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS", "mxfp4"])
def test_experts_with_the_types_of_files_have_the_same_bits_at_every_width(kind):
    """Catches a product of experts, a gate or a bias whose bits depend on how many rows use an expert."""
    generator = torch.Generator().manual_seed(7)

    def experts(n: int, k: int) -> kernels.PackedWeight:
        if kind != "mxfp4":
            raw = [random_blocks(kind, n, k, seed) for seed in range(4)]
            return stack_blocks([pack_blocks([Part(FORMATS[kind], n, k, [read_blocks(kind, r)])]) for r in raw])
        blocks = torch.randint(0, 256, (4, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (4, n, k // 32), generator=generator, dtype=torch.uint8)
        stored = {"up_blocks": blocks, "up_scales": scales}
        entries = {name: Entry(tuple(t.shape), t.dtype, "", partial(torch.clone, t)) for name, t in stored.items()}
        return small_floats.packing(None, entries, "tiles", "", "cpu")("up", ["up"], torch.empty(0, 0, 0))

    def rows(first: int, end: int, gated: int, bias: tuple) -> torch.Tensor:
        routes = kernels.route(logits[first:end], 2, True)
        return kernels.packed_experts(x[first:end], routes, *weights, None, gated, bias)

    weights, x = (experts(512, 256), experts(256, 256)), torch.randn(60, 256, generator=generator)
    logits, *biases = (torch.randn(*size, generator=generator) for size in ((60, 4), (4, 512), (4, 256)))
    for how in ((1, (None, None)), (3, tuple(biases))):
        with torch.inference_mode(), backend().active():
            whole = rows(0, 60, *how)
            assert whole.isfinite().all() and whole.std() > 0
            for width in (1, 7, 26):
                assert torch.equal(torch.cat([rows(i, min(60, i + width), *how) for i in range(0, 60, width)]), whole)


@needs_kernels
@pytest.mark.parametrize("gated", [1, 2, 3])
def test_a_gate_of_any_width_equals_its_definition(gated):
    """Catches the clamp on the wrong half, a NaN that a clamp hides, and columns past the last register."""
    y = torch.randn(5, 42, generator=torch.Generator().manual_seed(gated)) * 6
    y[2, 3] = y[3, 30] = float("nan")
    with backend().active():
        got = kernels.gate(y, gated)
    torch.testing.assert_close(got, kernels.gate(y.double(), gated).float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("tree,mode,p_min,shape", [
    ("paper25", "int4", 0, {}), ("paper25", "float32", 0.02, {}), ("paper25", "int8", 0.02, {}),
    ("chain:4", "float32", 0, {}), ("dynamic:16,4,4", "int4", 0, {}), ("paper25", "int8", 0, EXPERTS),
])  # fmt: skip
def test_speculative_tokens_equal_plain_ones_without_any_tie(tree, mode, p_min, shape):
    """Catches a fork, greedy or sampled. No margin is allowed here."""
    model = quantized_model(mode, **shape)
    more = {"p_min": p_min, "ngram_nodes": 12 if p_min else 0}
    drafter = eagle_drafter(packed_head(model), trees.parse_tree(tree), **more)
    engines = [Engine(model, None, d, EngineConfig(backend=backend(), eagle_always=True)) for d in (None, drafter)]
    for temperature in (0.0, 1.0):
        for seed in range(2):
            params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=40 if shape else 100)
            plain, drafted = (engine.generate([1, 5, 9 + seed], params).run()[0] for engine in engines)
            assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == params.max_new_tokens
    assert is_bitwise(engines[1])


@needs_kernels
@pytest.mark.parametrize("mode", ["float32", "int8"])
@pytest.mark.parametrize("shape", [
    {}, {"qk_norm": True}, {"qkv_bias": True, "o_bias": True, "windows": (7, 0)},
    {"norms": "both", "activation": "gelu_tanh", "attention_cap": 2.0, "windows": (7, 0), "window_rope": RopeConfig(9)},
    {"norms": "after", "unrotated": (1,), "mlp_bias": True},
])  # fmt: skip
def test_a_layer_in_one_call_has_the_bits_of_its_parts(mode, shape):
    """Catches a norm, bias, window, rotation or residual that the fused layer forgets, in target and EAGLE head."""
    model = quantized_model(mode, **shape)
    tokens = torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(5))
    _, ancestors = random_tree(9)
    head = tiny_head(model, version=3, head_dim=16, hidden_size=64)
    parts = fused_parts()
    with torch.inference_mode(), backend().active():
        assert stack(model.layers) is not None
        pack_(head, torch.float32)
        nodes = model.nodes(torch.tensor([0, 3]), (ancestors.sum(1) - 1)[None].expand(2, -1), ancestors[None], CTX)
        caches = [model.new_cache(2, CTX) for _ in range(2)]
        for cache, layers in zip(caches[:2], (None, parts.layers), strict=True):
            cache[0].add_(0.1)
            caches.append(model(tokens, nodes, cache, (0, 1, 2), layers))
        assert torch.equal(caches[0][0], caches[1][0]) and all(map(torch.equal, *caches[2:]))
        inputs = torch.randn(2, 9, 64), torch.randn(2, 9, 128), nodes
        layers = (EagleHead.layer_forward, parts.draft_layer)
        assert torch.equal(*(layer(head, *inputs, *head.new_cache(2, CTX)) for layer in layers))


@needs_kernels
@pytest.mark.parametrize("version", [1, 3, 3.1])
@pytest.mark.parametrize("mode", ["float32", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_in_one_call_has_the_bits_of_its_parts(version, mode, tied):
    """Catches a row of the wrong parent, level, slot or candidate, noise of another depth, a norm of the other
    generation, and a window that one of them lacks. The sequences have trees and lengths of their own."""
    model = quantized_model(mode, tie_word_embeddings=tied)
    norms = {"fc_norm": True, "norm_output": True} if version == 3.1 else {}
    version = int(version)
    head = tiny_head(model, version=version, head_dim=16, hidden_size=64, **norms)
    shapes = [trees.parse_tree("paper25"), trees.chain(4)]
    parts = fused_parts()
    with torch.inference_mode(), backend().active():
        pack_(head, torch.float32)
        drafter = eagle_drafter(head, shapes, 2, window=8 if version == 3 else 0)
        state = random_state(model, drafter, [9, 30], [2, 5], version)
        drafter.cache.normal_(generator=torch.Generator().manual_seed(version))
        state.sampling.temperature.fill_(0.7)
        state.sampling.seed.copy_(torch.tensor([5, 6]))
        noise = sampling.noise_ahead(state.sampling.seed, state.n, drafter.D + 1, state.hashes)
        state.sampling.bias_ids[:, :4] = torch.tensor([[3, 40, 41, 90], [3, 4, 5, 6]])
        state.sampling.bias[:, :4] = torch.tensor([[40.0, -100, 2, -math.inf], [-3, 6, 0, 50]])
        state.sampling.bias_until[:, :4] = torch.tensor([[99, 99, 99, 11], [99, 31, 99, 99]])
        whole: list[torch.Tensor] = []
        for mode in (SamplingMode(), SamplingMode(sample=True), SamplingMode(sample=True, bias=True)):
            inputs = draft_input(state, mode, noise if mode.sample else None)
            caches = drafter.cache.clone(), drafter.cache.clone()
            drafts = []
            for cache, used in zip(caches, (parts._replace(draft_tree=None), parts), strict=True):
                drafter.cache = cache
                drafts.append(drafter.draft(inputs._replace(parts=used)))
            assert parts.draft_tree(drafter, inputs) is not None
            whole.append(drafts[0].tokens)
            assert all(torch.equal(*pair) for pair in zip(*(d[:6] for d in drafts), strict=True))
            for b, known in enumerate((9, 30)):
                assert torch.equal(caches[0][:, b, :, :known], caches[1][:, b, :, :known])
        assert not torch.equal(*whole[1:])
        inputs = inputs._replace(mode=SamplingMode(sample=True, filters=True))
        assert parts.draft_tree(drafter, inputs) is None, "the C++ kernels have no filters"


def random_state(model: Transformer, drafter: TreeDrafter, n: list[int], count: list[int], seed: int, ids: int = 96):
    """The state of sequences with n tokens in the cache and count rows of features, all of them random."""
    state, generator = DecodeState(model, drafter, len(n), 60), torch.Generator().manual_seed(seed)
    state.tokens.random_(0, ids, generator=generator)
    state.features.normal_(generator=generator)
    state.n.copy_(torch.tensor(n))
    state.count.copy_(torch.tensor(count))
    state.root.copy_(state.tokens.gather(1, state.n[:, None])[:, 0])
    state.sampling.seed.fill_(seed)
    return state


def worth_keeping(draft: Draft, p_min: float) -> list[int]:
    """Nodes of a whole tree of one sequence that pruning leaves, by the rule in kernels/cpu_draft.cpp."""
    likely = draft.scores[0].double().exp().tolist()
    expanded, left = {0}, [0]
    for i in range(1, draft.tokens.shape[1]):
        if draft.parent[0, i].item() in expanded and likely[i] >= p_min:
            left.append(i)
            expanded |= {i} if likely[i] >= 2.5 * p_min else set()
    return left


@needs_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("p_min", [0.01, 0.04, 0.2])
def test_a_pruned_tree_has_the_likely_nodes_of_the_whole_one(p_min, temperature):
    """Catches a likely node that is lost, a node under another parent, a row that meets keys of a row left out, and a
    tree that is drafted whole."""
    model = quantized_model("int8")
    head = packed_head(model, 3)
    parts, sizes = fused_parts(), []
    with torch.inference_mode(), backend().active():
        pack_(head, torch.float32)
        head.lm_head.packed.weight.mul_(3)  # some tokens become likely
        drafters = [eagle_drafter(head, trees.parse_tree("paper25"), p_min=p) for p in (1e-30, p_min)]
        for seed in range(8):
            state = random_state(model, drafters[0], [9], [3], seed)
            state.sampling.temperature.fill_(temperature)
            inputs = draft_input(state, SamplingMode(sample=temperature > 0), None, parts)
            whole, pruned = (drafter.draft(inputs) for drafter in drafters)
            left = worth_keeping(whole, p_min)
            places = {node: i for i, node in enumerate(left)}
            assert whole.tokens.shape[1] == 26 and torch.equal(pruned.ancestors, whole.ancestors[:, left][:, :, left])
            for column in ("tokens", "depth", "valid", "scores"):
                assert torch.equal(getattr(pruned, column), getattr(whole, column)[:, left]), column
            assert pruned.parent[0].tolist() == [places[i] for i in whole.parent[0, left].tolist()]
            sizes.append(len(left))
        restricted = inputs._replace(mode=replace(inputs.mode, grammar=True))
        assert drafters[1].draft(restricted).tokens.shape[1] == 26, "forced tokens need the room of the whole tree"
    assert min(sizes) < 26 and (p_min > 0.04 or max(sizes) > 3)


def continuation(text: list[int], differs: float, most: int, p_min: float, produced: int) -> list[int]:
    """What a repeated text is expected to go on with, by the rule in kernels/cpu_draft.cpp."""
    for alike in range(len(text) - 1, 3 if produced >= 4 else len(text), -1):
        ends = [e for e in range(alike, len(text)) if text[e - alike : e] == text[-alike:]]
        if ends:
            period = text[ends[-1] :]
            likely = itertools.accumulate((m * m / (m * m + differs) for m in range(alike, alike + most)), operator.mul)
            return [period[k % len(period)] for k, p in enumerate(likely) if p >= p_min]
    return []


@needs_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_text_repeats_itself_its_continuation_is_drafted(temperature):
    """Catches a continuation of another place or length, a tree that is drafted beside it, a run in one sequence of a
    batch alone, and a head that has not seen the tokens of a run."""
    model = quantized_model("int8")
    head = packed_head(model, 3)
    parts, found = fused_parts(), []
    with torch.inference_mode(), backend().active():
        drafters = [eagle_drafter(head, trees.parse_tree("paper25"), 2, p_min=0.15, ngram_nodes=k) for k in (0, 12)]
        for seed in range(20):
            state = random_state(model, drafters[1], [25 - seed, 30], [2, 3], seed, 3 + seed % 4)
            state.sampling.temperature.fill_(temperature)
            state.produced.fill_(3 if seed == 7 else 30)
            for drafter in drafters:
                drafter.cache.zero_()
            inputs = draft_input(state, SamplingMode(sample=temperature > 0), None, parts)
            tree, draft = (drafter.draft(inputs) for drafter in drafters)
            texts = [row[: n + 1] for row, n in zip(state.tokens.tolist(), state.n.tolist(), strict=True)]
            rule = 5.3 + 2.2 * temperature**2, 12, 0.15, int(state.produced[0])
            wanted = [continuation(text, *rule) for text in texts]
            found.append(all(wanted))
            caches = [d.cache[:, b, :, : state.n[b]] for b in range(2) for d in drafters]
            assert torch.equal(*caches[:2]) and torch.equal(*caches[2:])
            if not all(wanted):
                assert all(map(torch.equal, tree[:6], draft[:6]))
                continue
            for b, (text, ids) in enumerate(zip(texts, wanted, strict=True)):
                real = 1 + len(ids)
                assert draft.tokens[b, :real].tolist() == [text[-1], *ids]
                assert draft.valid[b].tolist() == [i < real for i in range(draft.tokens.shape[1])]
                assert draft.depth[b, :real].tolist() == list(range(real))
                assert draft.ancestors[b, :real, :real].equal(torch.ones(real, real).tril().bool())
    assert True in found and False in found


@needs_kernels
def test_repeated_text_takes_fewer_steps():
    """Catches a run that is drafted and never accepted: the tokens would be right, and the speed lost."""
    model = quantized_model("int4")
    for layer in model.layers:  # without attention every token has one successor, so the text soon goes in circles
        layer.attention.o.packed.scales.zero_()
    head = packed_head(model, 3)
    steps = []
    for ngram_nodes in (0, 12):
        drafter = eagle_drafter(head, trees.parse_tree("paper25"), p_min=0.1, ngram_nodes=ngram_nodes)
        engine = Engine(model, None, drafter, EngineConfig(backend=backend()))
        result = engine.generate([1, 5, 9], SamplingParams(max_new_tokens=100)).run()[0]
        steps.append(result.steps)
    assert steps[1] < 0.5 * steps[0]


@needs_kernels
def test_nodes_are_pruned_by_their_measured_price(monkeypatch):
    """Catches a price that is not measured, measured again for every request, or not used."""
    model, measured = quantized_model("int4"), []

    def measure(engine: Engine, mode: SamplingMode, view: View, *drafters: PlainDrafter) -> tuple[float, ...]:
        measured.append([drafter.N for drafter in drafters])
        return 1.0, 1.4, 4.0

    monkeypatch.setattr(Engine, "_time_steps", measure)
    for by_price, p_min in ((True, 0.13), (False, 0.1)):
        drafter = eagle_drafter(packed_head(model), trees.PAPER25, p_min=0.1, by_price=by_price)
        engine = Engine(model, None, drafter, EngineConfig(backend=backend(), eagle_always=False))
        for seed in range(2):
            engine.generate([1, 2, 3], SamplingParams(max_new_tokens=3, seed=seed)).run()
        assert drafter.p_min == pytest.approx(p_min)
    assert measured == [[1, 5, 17], [1, 26]]  # without a price, a plain step is timed beside the whole tree
    for given, wanted in (
        ((0.0, 0.0, 0.0), (0.05, 0.05, 0.05 / 0.7)), ((9.0, 9.0, 9.0), (0.6, 0.9, 1.0)),
        ((0.1, 0.1, 0.2), (0.13, 0.26, 0.325)), ((0.2, 0.1, 0.1), (0.26, 0.26, 0.3575 / 0.7)),
    ):  # fmt: skip
        drafter.price(*given)
        assert (drafter.p_min, drafter.p_more, drafter.p_forward) == pytest.approx(wanted)


@needs_kernels
def test_pruned_trees_of_a_batch_keep_what_one_of_them_needs():
    """Catches a fork, and a node without its parent, where sequences of a batch have other trees or likely nodes."""
    model = quantized_model("int4")
    head = packed_head(model, 3)
    shapes = [trees.parse_tree("paper25"), trees.chain(4)]
    engines = [Engine(model, None, config=EngineConfig(backend=backend(), batch_size=2))]
    for tree in (shapes, shapes[:1] * 2):
        drafter = eagle_drafter(head, tree, 2, p_min=0.02, ngram_nodes=8)
        engines.append(Engine(model, None, drafter, EngineConfig(batch_size=2, backend=backend(), eagle_always=False)))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=60)
        plain, *drafted = ([r.token_ids for r in e.generate_batch([[1, 5, 9], [4, 2]], params).run()] for e in engines)
        assert all(ids == plain for ids in drafted)
    # With top-k the whole tree is checked. Only then steps are timed, whatever the times say.
    always = Engine(model, None, eagle_drafter(head, shapes, 2, p_min=0.02, ngram_nodes=8),
                    EngineConfig(batch_size=2, backend=backend(), eagle_always=True))  # fmt: skip
    for settings, measured in ((params, False), (replace(params, top_k=5), True)):
        (result,) = always.generate([1, 5, 9], settings).run()
        assert len(result.nodes_per_step) == len(result.drafted) > 0 and set(result.nodes_per_step) <= set(range(34))
        assert result.drafted_nodes == 25 or not measured
        engines[1].generate([1, 5, 9], settings).run()
        plain_step, speculative = engines[1].step_seconds
        assert engines[1].fallback is not None and plain_step > 0 and (speculative > 0) == measured


@needs_kernels
def test_a_tied_embedding_reads_its_rows_off_the_lm_head():
    """Catches a row of another tile or group, and a second copy of the widest matrix."""
    model = build_transformer(replace(CONFIG, tie_word_embeddings=True)).float()
    randomise(model, 3)
    table = model.embed_tokens.weight.detach().clone()
    with torch.inference_mode(), backend().active():
        pack_(model, torch.float32)
        tokens = torch.tensor([[0, 95, 8, 7], [9, 64, 64, 1]])
        assert torch.equal(model.embed_tokens(tokens), table[tokens])
        assert torch.allclose(model.logits(table[tokens]), table[tokens] @ table.T, atol=1e-4)
    assert not [name for name, _ in model.named_parameters() if "embed" in name]
    for form in FORMS:
        packed, matrix = tiles(weight(form)), dequantize(weight(form), torch.float32)
        assert torch.equal(kernels.packed_rows(packed, tokens), matrix[tokens])


@needs_kernels
@pytest.mark.parametrize("shape,what", [
    ({}, ""), (EXPERTS, "experts"), ({"sinks": True}, "attention sinks"),
    ({"residual_multiplier": 0.5}, "a multiplied residual"), ({"head_dim": 24}, "heads of 24"),
    ({"norms": "after", "qk_norm": True, "wide_qk_norm": True}, "norms over all heads"),
    ({"intermediate_size": 44}, "the form of a weight"),
])  # fmt: skip
def test_layers_that_run_in_parts_are_named_with_their_reason(shape, what):
    """Catches a model that decodes more slowly than others of its size, without a word in the report, a fused call on
    layers that it lacks, and a cache that the parts cannot take."""
    model = quantized_model("float32", **shape)
    for kv_dtype in (None, torch.int8, torch.float16) if model.config.head_dim % 16 == 0 else (None,):
        engine = Engine(model, config=EngineConfig(backend=backend(), kv_dtype=kv_dtype))
        assert in_parts(engine) == layers_in_parts(model.layers) == ({what: [0, 1]} if what else {})
        assert len(engine.generate([1, 2, 3], SamplingParams(max_new_tokens=3)).run()[0].token_ids) == 3
    assert (stack(model.layers) is None) == bool(what)


@needs_kernels
def test_layers_cannot_be_read_from_another_tensor():
    """A tensor of numbers that is taken for the memory of layers: a crash instead of an error."""
    x, nothing = torch.zeros(1, 1, 64), torch.zeros(1, 1, dtype=torch.int64)
    visible = nothing[None].bool()
    rotary, kv = [torch.zeros(1, 1, 8)] * 2, torch.zeros(1, 2, 1, 1, 4, 16)
    nodes = records.flat(records.Nodes(*rotary, nothing, nothing, nothing[0], visible, visible))
    with backend().active():
        copied = torch.ops.eaglet_cpu.stack_layers.default([], torch.ones(64), [], [], 0, 1e-5, 1.0, 0.0).clone()
    for other in (torch.tensor([1]), copied):
        with pytest.raises(RuntimeError, match="does not hold layers"):
            torch.ops.eaglet_cpu.layers.default(x, None, other, nodes, kv, True, (), 0, False)


def test_the_table_names_every_operation_and_its_reason(monkeypatch):
    """Catches a report that claims a kernel where the reference runs."""
    monkeypatch.setattr(cpu, "problem", lambda: "")
    table = kernels.KernelBackend("cpu", "cpu").table
    assert table["packed_linear"] == ("cpu", "the device is a CPU") and table["packed_experts"][0] == "reference"
    with pytest.raises(ValueError, match="the device is 'cuda'"):
        kernels.KernelBackend("cpu", "cuda")
    monkeypatch.setattr(cpu, "problem", lambda: "there is no C++ compiler (g++ or clang++)")
    with pytest.raises(ValueError, match="no C.. compiler.*--kernels auto"):
        kernels.KernelBackend("cpu", "cpu")


@needs_kernels
def test_what_does_not_fit_is_declined_with_its_reason():
    """Catches a shape that reaches the kernel and reads past its end."""
    with backend().active() as active:
        packed = kernels.pack_int8(torch.zeros(12, 40, dtype=torch.int8), torch.ones(12), torch.float32)
        assert (packed.layout, packed.bits) == ("tiles", 16) and "[12, 40]" in active.describe()["packed_linear"]
        x = torch.randn(3, 40)
        assert torch.equal(kernels.packed_linear(x, packed), torch.zeros(3, 12))
        wide = kernels.pack_int8(torch.zeros(16, 32, dtype=torch.int8), torch.ones(16), torch.float64)
        assert wide.layout == "dense" and "float32" in active.describe()["packed_linear"]
        x, w = torch.randn(3, 20), torch.ones(20)
        assert torch.equal(kernels.rms_norm(x, w, 1e-6), F.rms_norm(x, (20,), w, 1e-6))
        assert "multiple of 8" in active.describe()["rms_norm"]


BUILD = """
import ctypes, sys
from pathlib import Path
from support import native
print("ready", flush=True)
input()
print(ctypes.CDLL(str(native.build([Path(sys.argv[1])], ()))).answer())
"""


@needs_kernels
def test_two_processes_may_build_at_once(tmp_path, monkeypatch):
    """Two processes that build into one empty folder at the same time can both load what they built, and one file stays.
    Where the folder cannot be made, a library is built elsewhere, once for the process. Catches a library that another
    process has written by half, and a read-only home directory."""
    stub = tmp_path / "stub.cpp"
    stub.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen([sys.executable, "-c", BUILD, str(stub)], cwd=ROOT, **pipes)
    assert other.stdout.readline() == "ready\n"
    other.stdin.write("\n")
    other.stdin.flush()
    assert ctypes.CDLL(str(native.build([stub], ()))).answer() == 42
    assert other.communicate(timeout=120)[0] == "42\n"
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 1
    (tmp_path / "file").touch()  # a file where the folder should be: root may write everywhere else
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path / "file"))
    library = native.build([stub], ())
    assert tmp_path not in library.parents and ctypes.CDLL(str(library)).answer() == 42


@pytest.mark.parametrize("compiler,words", [("/nowhere/g++", "does not start"), ("false", "failed: no message")])
def test_a_failing_build_is_one_line(tmp_path, monkeypatch, capsys, compiler, words):
    """Catches a traceback where there is no compiler, or one that fails."""
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(native, "cpu_flags", lambda: {"avx2", "fma", "f16c"})
    cpu.problem.cache_clear()
    try:
        assert generate(["--kernels", "cpu", "--ctx", "128", "-p", "x"]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1 and "--kernels auto" in error
    finally:
        cpu.problem.cache_clear()


def test_a_build_says_what_is_waited_for(tmp_path, monkeypatch, capsys):
    """A compiler that takes seconds is one line on stderr that goes on while it works; one that takes too long ends."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 0.5\nexit $CODE\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv("CODE", "0")
    monkeypatch.setattr(native, "SAY_SECONDS", 0.2)
    native.compile_library(cpu.SOURCES[:1], tmp_path / "library.so", "")
    error = capsys.readouterr().err
    assert error.startswith("note    building the C++ kernels, once for this machine") and error.count("\n") == 1
    assert ".. " in error and error.endswith(" s\n")
    monkeypatch.setattr(native, "BUILD_SECONDS", 0.1)
    with pytest.raises(ValueError, match="took more than 0.1 seconds"):
        native.compile_library(cpu.SOURCES[:1], tmp_path / "library.so", "")


def test_another_processor_is_named(monkeypatch):
    """Catches an illegal instruction on a machine without AVX2."""
    monkeypatch.setattr(native, "cpu_flags", lambda: {"sse2"})
    with pytest.raises(ValueError, match="has no avx2"):
        native.build(cpu.SOURCES, cpu.NEEDED, records.header())
