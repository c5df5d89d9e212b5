"""Weights with the types of a file in the Triton kernels: packing, and every kernel against plain code.

Tests named `test_interpreted_*` need TRITON_INTERPRET=1 before Triton is imported.
tests/test_interpreter_steps.py runs them.
"""

from dataclasses import replace

import pytest
import torch
from test_kernels import TRITON, error, experts_definition, linear_definition
from test_model import run
from tiny import held, interpreted, nvfp4_blocks, random_blocks

import kernels
from engine.load import load
from kernels import KernelBackend, packed_linear
from kernels.blocks import stack_blocks
from kernels.experts import packed_experts, sort_pairs
from kernels.formats import Blocks, Format, Part
from kernels.packing import from_parts, pack_panels
from kernels.panels import from_panels, panels_bytes, to_panels
from weights.checkpoint import Checkpoint
from weights.gguf_types import FORMATS, nvfp4, read_blocks

KINDS = (*FORMATS, "NVFP4")


def piece(kind: str, n: int, k: int, seed: int = 0) -> Blocks:
    """Random rows of a type."""
    if kind == "NVFP4":
        return nvfp4_blocks(n, k, seed)
    if kind != "MXFP4":
        return read_blocks(kind, random_blocks(kind, n, k, seed))
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, -3, (n, k // 32), generator=g)
    return Blocks(torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=g), (2.0**exponents).half())


def form_of(kind: str, k: int) -> Format:
    return nvfp4(k) if kind == "NVFP4" else FORMATS[kind]


def part(kind: str, n: int, k: int, seed: int = 0) -> Part:
    return Part(form_of(kind, k), n, k, [piece(kind, n, k, seed)])


def floats(*parts: Part) -> torch.Tensor:
    """The values of the parts in float32, by the definition of the types."""
    return torch.cat([part.pieces[0].floats(part.form) for part in parts])


def plain_factors(rows: Blocks) -> Blocks:
    """The rows with factors of few bits, whose sums are exact in any order. The interpreter uses NumPy, whose
    order depends on the tile."""
    scales, mins = (None if t is None else torch.full_like(t, 2**-7) for t in (rows.scales, rows.mins))
    small, small_mins = (None if t is None else t & 3 for t in (rows.sub_scales, rows.sub_mins))
    if scales.dtype == torch.float32:  # powers of two
        small = small * 8 + 56
    return Blocks(rows.codes, scales, mins, small, small_mins)


def columns(*kinds: str) -> int:
    """A small K that has several panels, the last of them not full where a type allows it."""
    return 512 if any(form_of(kind, 32).unit == 256 for kind in kinds) else 160


@pytest.mark.parametrize("kind", KINDS)
def test_panels_hold_the_codes_and_factors_of_the_file(kind):
    """A code or factor that lands elsewhere or loses a bit, and more bytes than the file has."""
    n, k, form = 40, columns(kind), form_of(kind, columns(kind))
    rows = piece(kind, n, k)
    for got, want in zip(from_panels(to_panels(rows, form), form, n, k), rows, strict=True):
        assert got is want is None or torch.equal(got, want)
    pieces = [Blocks(*(t if t is None else t[at] for t in rows)) for at in (slice(32), slice(32, n))]
    packed = pack_panels([Part(form, n, k, pieces)])
    assert torch.equal(kernels.dequantize(packed, torch.float32), rows.floats(form))
    again = from_parts(*packed.parts())
    assert again.forms == packed.forms and Format.from_numbers(again.forms[0][1:]) == form
    # Where a scale of 256 columns has no min, a zero takes its place.
    large = form_of(kind, 4096)
    assert panels_bytes(large, 4096, 4096) <= 1.03 * large.bytes(4096, 4096)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_linear_of_every_type(kind, monkeypatch):
    """A wrong address, mask, shift, scale or min, and a row that depends on the forward's width, on its neighbours or on
    whether it is one of a long prompt; rows of an embedding that are decoded otherwise than the matrix."""
    own = part(kind, 40, columns(kind))
    packed, want, ids = pack_panels([own]), floats(own), torch.tensor([[39, 0], [5, 5]])
    x = torch.randn(60, own.k).half()
    with KernelBackend("reference").active():
        assert torch.equal(kernels.packed_rows(packed, ids), want[ids])
    with TRITON.active():
        assert torch.equal(kernels.packed_rows(packed, ids), want[ids])
        assert error(packed_linear(x[:3], packed), x[:3].double() @ want.half().double().mT) < 1e-3
        plain = plain_factors(own.pieces[0])
        again = replace(packed, config=packed.config._replace(split_k=2))
        rows = packed_linear(x, again)
        monkeypatch.setattr(kernels.linear, "SPLIT_M", 16)  # as in a prompt: one program makes both parts of a sum
        assert torch.equal(packed_linear(x, again), rows)
        packed, x = pack_panels([own._replace(pieces=[plain])]), torch.randint(-4, 5, x.shape).half()
        x[0], got = 1, packed_linear(x[:1].fill_(1), packed)
        assert torch.equal(got[0].double(), plain.floats(own.form).double().sum(1).half().double())
        x[1:] = float("nan")
        assert torch.equal(packed_linear(x, packed)[:1], got) and not packed.counters.any()


@interpreted
def test_interpreted_weights_of_several_types():
    """Rows of one type decoded as those of another, a gate whose halves differ, and a best row of the second type."""
    parts = [part("Q4_K", 32, 256), part("Q3_K", 32, 256, 1), part("Q6_K", 40, 256, 2)]
    packed, want = pack_panels(parts), floats(*parts)
    x, bias, residual = torch.randn(2, 256).half(), torch.randn(104).half(), torch.randn(2, 104).half()
    exact = x.double() @ want.half().double().mT
    with TRITON.active():
        assert packed.config.block_n == 32
        assert error(packed_linear(x, packed, bias, residual), exact + bias.double() + residual.double()) < 1e-3
        want_gated = linear_definition(x / 16, want.half().double(), None, None, 1)
        assert error(packed_linear(x / 16, packed, gated=1), want_gated) < 2e-3
        assert torch.equal(kernels.packed_rows(packed, torch.arange(104)), want)
        best = kernels.packed_topk(x, packed, 4)
        assert torch.equal(best.ids[:, 0], exact.argmax(-1)) and (best.ids[0] >= 0).all()


@interpreted
@pytest.mark.parametrize("kind,down,wide", [("Q4_K", "Q6_K", 256), ("Q4_1", "MXFP4", 64)])
def test_interpreted_experts_of_a_type(kind, down, wide):
    """An expert that begins elsewhere, gate rows without their up rows, and minima that are left out."""
    ups, downs = [part(kind, 2 * wide, wide, e) for e in range(3)], [part(down, 40, wide, e) for e in range(3)]
    gate_up, back = (stack_blocks([pack_panels([p]) for p in parts]) for parts in (ups, downs))
    x, weights = torch.randn(3, wide).half() / (wide - 48), torch.rand(3, 2)
    ids = torch.tensor([[0, 2], [2, 0], [0, 2]])
    with TRITON.active():
        got = packed_experts(x, sort_pairs(weights, ids, 3), gate_up, back)
    matrices = ([floats(p).half().double() for p in parts] for parts in (ups, downs))
    assert error(got, experts_definition(x, weights, ids, *matrices)) < 3e-3


@interpreted
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_interpreted_model_keeps_the_types_of_its_file(tiny_checkpoint, tmp_path, family):
    """A file whose fused matrices mix types: floats in their place, a plan that counts something else, an embedding in
    another dtype, and tokens that are not those of the float weights."""
    kinds = {"attn_k": "Q4_0", "attn_v": "Q5_1", "ffn_gate": "Q4_1", "token_embd": "Q5_0", "ffn_down": "Q8_0"}
    test_gguf = pytest.importorskip("test_gguf")  # which needs the gguf package
    path = test_gguf.mixed_file(tmp_path / "m.gguf", Checkpoint.open(tiny_checkpoint(family)), kinds)
    engine = load(path, kernels="triton", device="cpu", dtype="float16", ctx=64, compile=False)
    layer = engine.model.layers[0]
    kept = layer.attention.qkv, layer.mlp.gate_up, layer.mlp.down
    assert [len(m.packed.forms) for m in kept] == [3, 2 if family == "llama" else 1, 1]
    checkpoint = Checkpoint.open(path, layout="panels")
    assert checkpoint.notes == [] and engine.model.embed_tokens(torch.tensor([[3]])).dtype == torch.float16
    assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.01)
    tokens = torch.randint(3, 128, (1, 5), generator=torch.Generator().manual_seed(0))
    with engine.backend.active():
        got = run(engine.model, tokens, 5)
    want = run(checkpoint.load(dtype=torch.float32, floats=True), tokens, 5)
    assert (want - got).abs().max() < 0.01 * want.abs().max()
