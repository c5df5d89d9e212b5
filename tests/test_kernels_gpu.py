"""The kernels on a CUDA device: correctness against float64, and rows whose bits depend neither on M nor on
their neighbours.

`make gpu` (pytest -m gpu) runs these tests. They are skipped where there is no device.
"""

import itertools

import pytest
import test_delta
import test_launches
import test_panels
import torch
from test_kernels import error, experts_definition, linear_definition, pack, stored

import eagle_draft
import kernels
from families.config import DeltaConfig
from kernels import packed_experts, packed_linear
from kernels.blocks import stack_blocks
from kernels.experts import mix, sort_pairs
from kernels.packing import pack_panels
from kernels.records import Memory
from layers.recurrent import new_memory
from weights.gguf_types import FORMATS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (6144, 4096), (1000, 1120)]
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def quantized(bits, n, k, dtype, group=128, zeros=False, experts=(), config=None):
    """(a packed weight on the device, its float64 matrix)."""
    weights = stored(bits, n, k, group, zeros, n + k, experts, "cuda", 0.1)
    plain, packed = (pack(bits, weights, dtype, layout, config) for layout in ("plain", "planes"))
    return packed, kernels.dequantize(plain, torch.float64)


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("bits,dtype,group,zeros", [
    (4, torch.float16, 128, False), (4, torch.bfloat16, 128, False), (4, torch.float16, 32, True),
    (8, torch.float16, 0, False), (8, torch.bfloat16, 0, False), (16, torch.bfloat16, 0, False),
])  # fmt: skip
def test_linear_on_device(n, k, bits, dtype, group, zeros):
    """The packed linear, plain and gated, equals the float64 product for 1 to 300 rows, and leaves its counters at 0."""
    if bits == 4 and k % group:
        group = 32
    packed, matrix = quantized(bits, n, k, dtype, group, zeros)
    for m in (1, 7, 16, 24, 33, 64, 104, 300):  # from 65 rows several tiles, from 257 as in a prompt
        x = torch.randn(m, k, device="cuda").to(dtype)
        for gated in (False, True):
            residual = torch.randn(m, n >> gated, device="cuda").to(dtype)
            got = packed_linear(x, packed, residual=residual, gated=gated)
            assert error(got, linear_definition(x, matrix, None, residual, gated)) < TOLERANCE[dtype]
            assert not packed.counters.any()


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("bits,dtype", [(4, torch.float16), (4, torch.bfloat16), (8, torch.float16), (8, torch.bfloat16),
                                        (16, torch.float16), (16, torch.bfloat16)])  # fmt: skip
def test_linear_rows_are_bitwise_independent(n, k, bits, dtype):
    """A row has the same bits alone, in a forward of up to 104 rows, in a prompt of 300 and beside NaN rows. Identical
    tokens need this."""
    group = 128 if k % 128 == 0 else 32
    packed, _ = quantized(bits, n, k, dtype, group)
    x = torch.randn(300, k, device="cuda").to(dtype)
    for gated in (False, True):
        alone = torch.cat([packed_linear(x[i : i + 1], packed, gated=gated) for i in range(104)])
        for m in (8, 16, 17, 32, 64, 104, 300):
            assert torch.equal(packed_linear(x[:m], packed, gated=gated)[:104], alone[:m])
        noisy = torch.full_like(x, float("nan"))
        noisy[5] = x[5]
        assert torch.equal(packed_linear(noisy, packed, gated=gated)[5], alone[5])
        for _ in range(20):  # a race in the split-K hand-over
            assert torch.equal(packed_linear(x[:32], packed, gated=gated), alone[:32])


@pytest.mark.parametrize("bits,dtype", [(4, torch.float16), (8, torch.float16), (16, torch.bfloat16)])
def test_experts_on_device(bits, dtype):
    """The grouped product equals its dense definition, and a row alone has the same bits."""
    (up, up_matrix), (down, down_matrix) = (
        quantized(bits, n, k, dtype, experts=(8,)) for n, k in ((2048, 1024), (1024, 1024))
    )
    for tokens in (1, 5, 26, 60):
        x = torch.randn(tokens, 1024, device="cuda").to(dtype)
        ids = torch.rand(tokens, 8, device="cuda").topk(2).indices
        weights = torch.rand(tokens, 2, device="cuda")
        want = experts_definition(x, weights, ids, up_matrix, down_matrix)
        got = packed_experts(x, sort_pairs(weights, ids, 8), up, down)
        assert error(got, want) < 2 * TOLERANCE[dtype]
        one = packed_experts(x[:1], sort_pairs(weights[:1], ids[:1], 8), up, down)
        assert torch.equal(got[:1], one)


@pytest.mark.parametrize("experts,count", [(8, 2), (128, 8)])
def test_routes_and_their_sum_on_device(experts, count):
    """Which experts a row uses, and the sum of their outputs, depend on the row alone and are what plain code says."""
    for tokens in (1, 26, 200):
        logits = torch.randn(tokens, experts, device="cuda").half()
        got, want = kernels.route(logits, count, True), kernels.route.reference(logits, count, True)
        assert all(torch.equal(a, b) for a, b in zip(got[1:], want[1:], strict=True))
        torch.testing.assert_close(got.weights, want.weights)
        assert torch.equal(kernels.route(logits[-1:], count, True).weights[0], got.weights[-1])
        y, rest = (torch.randn(tokens, *more, 2048, device="cuda").half() for more in ((count,), ()))
        mixed = mix(y, got.weights, rest)
        torch.testing.assert_close(mixed, mix.reference(y, got.weights, rest), rtol=4e-3, atol=4e-3)
        assert torch.equal(mix(y[-1:], got.weights[-1:], rest[-1:])[0], mixed[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(
    "heads,dim,start",
    [((32, 8), 128, 700), ((32, 32), 128, 37), ((8, 2), 64, 2000), ((4, 4), 80, 129), ((16, 2), 512, 700)],
)
def test_attention_on_device(dtype, window, heads, dim, start):
    """Tree attention agrees with float64, and decoding a committed path plainly gives the bits of the tree's rows."""
    slots, T = 2100, 26
    tree = test_delta.random_tree(T, seed=2)
    depth = tree.sum(1) - 1
    q = torch.randn(1, heads[0], T, dim, device="cuda").to(dtype)
    kv = torch.randn(2, 1, heads[1], slots, dim, device="cuda").to(dtype)
    n, scale = torch.tensor([start], device="cuda"), dim**-0.5
    case = (n, tree[None].cuda(), (start + depth)[None].cuda(), window, scale)
    got = kernels.tree_attention(q, kv, *case)
    assert error(got.cpu(), attention_wanted(q, kv, *case)) < TOLERANCE[dtype]
    path = [int(i) for i in tree[T - 1].nonzero()]
    moved = kv.clone()
    moved[:, :, :, start : start + len(path)] = kv[:, :, :, [start + i for i in path]]
    for d, node in enumerate(path):
        alone = torch.randn_like(q)
        alone[:, :, 0] = q[:, :, node]
        later = moved.clone()
        later[:, :, :, start + d + 1 :] = float("nan")
        positions = torch.full((1, T), start + d, device="cuda")
        out = kernels.tree_attention(
            alone, later, n + d, torch.eye(T, dtype=torch.bool, device="cuda")[None], positions, window, scale
        )
        assert torch.equal(out[:, 0], got[:, node])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_and_rope_on_device(dtype):
    """Norm and rope agree with their references, where the cache is int8 up to one level of rounding, and a normed row
    alone has the same bits."""
    x, w = torch.randn(26, 4096, device="cuda").to(dtype), torch.randn(4096, device="cuda").to(dtype)
    got = kernels.rms_norm(x, w, 1e-5)
    assert error(got, kernels.rms_norm.reference(x.double(), w.double(), 1e-5)) < TOLERANCE[dtype]
    assert torch.equal(kernels.rms_norm(x[3:4], w, 1e-5), got[3:4])
    x, w = torch.randn(480, 576, device="cuda").to(dtype), torch.randn(576, device="cuda").to(dtype)
    for rows in (1, 8, 9, 60):
        assert torch.equal(kernels.rms_norm(x[:rows], w, 1e-5), kernels.rms_norm(x, w, 1e-5)[:rows])
    qkv, angle = torch.randn(2, 26, 48, 128, device="cuda").to(dtype), torch.randn(2, 26, 64, device="cuda")
    slots = torch.stack([torch.arange(30, 56), torch.arange(3, 29)]).cuda()
    for kept in (dtype, torch.int8):
        caches = torch.zeros(2, 2, 2, 8, 64, 128 + 4 * (kept == torch.int8), device="cuda", dtype=kept)
        out, _ = kernels.rope_write_kv(qkv, angle.cos(), angle.sin(), caches[0], slots)
        want, _ = kernels.rope_write_kv.reference(qkv, angle.cos(), angle.sin(), caches[1], slots, None, None, 0.0)
        assert error(out, want.double()) < TOLERANCE[dtype]
        if kept == dtype:
            assert error(caches[0], caches[1].double()) < TOLERANCE[dtype]
            continue
        got, want = kernels.dequantize_rows(caches, torch.float64)
        assert (got - want).abs().max() <= 1.01 * want.abs().max() / 127 and error(got, want) < 1e-2


@pytest.mark.parametrize(
    "normed,int8", [(False, False), (True, False), (False, True), ("values", False), ("alone", True)]
)
def test_heads_turned_behind_their_projection_on_device(normed, int8):
    """The projection with rope built in gives the bits of a linear and a rope launch, three times in a row.
    normed: "values", too, or queries "alone"."""
    packed, _ = quantized(4, 6144, 4096, torch.float16)
    weight = torch.randn(128, device="cuda").half() if normed else None
    for rows in (1, 5, 16, 26, 60, 64):
        x, angle = torch.randn(1, rows, 4096, device="cuda").half(), torch.randn(1, rows, 64, device="cuda")
        slots = torch.randperm(rows, device="cuda")[None]
        shape, kind = (2, 1, 8, rows + 1, 128 + 4 * int8), torch.int8 if int8 else torch.float16
        caches = [torch.zeros(shape, dtype=kind, device="cuda") for _ in range(2)]
        more = weight, None if normed == "alone" else weight, 1e-5, normed in ("values", "alone"), normed == "alone"
        turn = [(angle.cos(), angle.sin(), cache, slots, *more) for cache in caches]
        want, _ = kernels.rope_write_kv(packed_linear(x, packed).unflatten(-1, (48, 128)), *turn[0])
        for _ in range(3):
            x = x.clone()
            got, arrived = kernels.packed_linear_rope(x, packed, None, 128, *turn[1])
            assert torch.equal(got, want) and torch.equal(*caches)
        assert not arrived.any() and not packed.counters.any()


@pytest.mark.parametrize("gated", [False, True])
def test_fp16_accumulation_on_device(gated):
    """With fp16 accumulation the linear is within 1 % of float64, and a row alone has the same bits."""
    config = kernels.linear_config(4096, 4096, 4)._replace(accumulate="float16")
    packed, matrix = quantized(4, 4096, 4096, torch.float16, config=config)
    x = torch.randn(60, 4096, device="cuda").half()
    got = packed_linear(x, packed, gated=gated)
    assert error(got, linear_definition(x, matrix, None, None, gated)) < 1e-2
    assert torch.equal(packed_linear(x[:1], packed, gated=gated), got[:1])


@pytest.mark.parametrize("bits,dtype", [(4, torch.float16), (8, torch.bfloat16), (16, torch.float16)])
@pytest.mark.parametrize("rows", [1, 10, 60, 300])
def test_topk_on_device(bits, dtype, rows):
    """The fused top-k has the ids and values of a top-k of the logits, and their log of the sum."""
    packed, _ = quantized(bits, 32000, 1024, dtype)
    x = torch.randn(rows, 1024, device="cuda").to(dtype)
    want = kernels.topk_reference(packed_linear(x, packed), 10)
    got = kernels.packed_topk(x, packed, 10)
    assert torch.equal(got.values, want.values) and torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.log_total, want.log_total, rtol=1e-5, atol=1e-4)
    assert not packed.counters.any()


def attention_inputs(batch, T, start, slots, heads=(8, 2), dim=128, dtype=torch.float16):
    """The arguments of `tree_attention` for causal rows. Every sequence starts at another position."""
    q = torch.randn(batch, heads[0], T, dim, device="cuda").to(dtype)
    kv = torch.randn(2, batch, heads[1], slots, dim, device="cuda").to(dtype)
    n = torch.tensor([start - 100 * b for b in range(batch)], device="cuda")
    visible = torch.ones(T, T, dtype=torch.bool, device="cuda").tril().expand(batch, T, T).contiguous()
    return q, kv, n, visible, n[:, None] + torch.arange(T, device="cuda")


def attention_wanted(q, kv, *rest):
    """The reference in float64 on the CPU."""
    case = [c.cpu() if hasattr(c, "cpu") else c for c in rest]
    return kernels.tree_attention.reference(q.double().cpu(), kv.double().cpu(), *case)


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("start,slots", [(300, 600), (1500, 9000)])
def test_attention_rows_do_not_depend_on_the_tree(dim, int8, start, slots):
    """Attention rows have the same bits in steps of 1, 26, 60 and 200 rows, also where 3 query heads share a key head,
    and agree with float64. Rows of a prompt have the bits that they have in a step of their own."""
    for heads in ((8, 2), (9, 3)):
        q, kv, n, visible, positions = attention_inputs(2, 200, start, slots, heads, dim)
        kv = kernels.quantize_rows(kv) if int8 else kv
        outs = {}
        for T in (1, 26, 60, 200):
            case = q[:, :, :T].contiguous(), kv, n, visible[:, :T, :T].contiguous(), positions[:, :T].contiguous()
            outs[T] = kernels.tree_attention(*case, 0, dim**-0.5)
        assert all(torch.equal(out, outs[200][:, :T]) for T, out in outs.items())
        wide = kernels.dequantize_rows(kv, torch.float64) if int8 else kv
        want = attention_wanted(q, wide, n, visible, positions, 0, dim**-0.5)
        assert error(outs[200].cpu(), want) < TOLERANCE[torch.float16]
        prompt = kernels.tree_attention(q, kv, n, visible, positions, 0, dim**-0.5, None, 0.0, None, None, 0, True)
        assert error(prompt.cpu(), want) < TOLERANCE[torch.float16]
        for t in (0, 9, 50, 199):
            own = slice(t, t + 1)
            case = q[:, :, own].contiguous(), kv, n + t, visible[:, :1, :1].contiguous(), positions[:, own].contiguous()
            assert torch.equal(kernels.tree_attention(*case, 0, dim**-0.5), prompt[:, own])


@pytest.mark.parametrize("dim,int8", list(itertools.product((128, 256, 512), (False, True))))
@pytest.mark.parametrize("window", [0, 200])
def test_prefill_attention_on_device(dim, int8, window):
    """Attention of 256 rows, with and without a window, agrees with float64."""
    q, kv, n, visible, positions = attention_inputs(1, 256, 700, 1100, dim=dim, dtype=torch.bfloat16)
    if window:
        age = positions[0][:, None] - positions[0]
        visible = visible & (age < window)
    kv = kernels.quantize_rows(kv) if int8 else kv
    got = kernels.tree_attention(q, kv, n, visible, positions, window, dim**-0.5, None, 0.0, None, None, 0, True)
    wide = kernels.dequantize_rows(kv, torch.float64) if int8 else kv
    want = attention_wanted(q, wide, n, visible, positions, window, dim**-0.5)
    assert error(got.cpu(), want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name,cases", [
    ("noise_is_the_generators", [()]), ("choice_is_the_plain_one", [(5,), (5000,)]), ("rows_are_placed", [()]),
    ("draft_topk_is_the_plain_one", [(97, True, True), (5000, True, False), (9000, False, True)]),
    ("merge_takes_the_best_of_all_tiles", [(5, 4), (1002, 10)]),
    ("trees_grow_as_in_plain_code", [(4, 3, 14), (8, 2, 24), (1, 3, 4)]),  # expand, select, accept, commit, keep, move
])  # fmt: skip
def test_the_small_work_of_a_step_on_device(name, cases):
    """What the interpreter shows of these kernels on a CPU, and a device may compute in another way: a race between the
    threads of a program, shared memory that is read too early, a shift or an integer of another width."""
    with torch.device("cuda"), kernels.KernelBackend("auto", "cuda").active() as backend:
        for case in cases:
            torch.manual_seed(0)
            getattr(test_launches, f"test_interpreted_{name}")(backend, *case)


@pytest.mark.parametrize("norms,pick", [(False, True), (True, False), (True, True)])
def test_joined_rows_on_device(norms, pick):
    """A feature of another row, and a norm that is forgotten or used for the other half."""
    table, features = torch.randn(90, 4096, device="cuda").half(), torch.randn(2, 5, 4096, device="cuda").half()
    tokens, source = (torch.randint(0, n, (2, 5), device="cuda") for n in (90, 5))
    weights = [torch.rand(4096, device="cuda").half() + 0.5 for _ in range(2)] if norms else [None, None]
    case = table, tokens, features, source if pick else None, *weights, 1e-5, norms
    for got, want in zip(eagle_draft.join_rows(*case), eagle_draft.join_rows.reference(*case), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("types", [[kind] for kind in [*FORMATS, "MXFP4"]] + [["Q4_K", "Q5_K", "Q6_K"]], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_a_file_on_device(types, dtype):
    """Every type of a file equals the float64 product of its values, plain and gated. A row has the same bits at every
    width. Looked-up rows are the values."""
    parts = [test_panels.part(kind, 256, 1024, seed) for seed, kind in enumerate(types)]
    packed, want = pack_panels(parts, "cuda"), test_panels.floats(*parts).cuda()
    x = torch.randn(104, 1024, device="cuda").to(dtype) / 64
    ids = torch.tensor([[3, 255], [0, 7]], device="cuda")
    assert torch.equal(kernels.packed_rows(packed, ids, dtype), want[ids].to(dtype))
    for gated in (0, 1):
        y = linear_definition(x, want.to(dtype).double(), None, None, gated)
        alone = torch.cat([packed_linear(x[i : i + 1], packed, gated=gated) for i in range(104)])
        assert error(alone, y) < TOLERANCE[dtype] and not packed.counters.any()
        assert all(torch.equal(packed_linear(x[:m], packed, gated=gated), alone[:m]) for m in (8, 17, 33, 64, 104))
        for times in (3, 20):  # as in a prompt, and two launches
            assert torch.equal(packed_linear(torch.cat([x] * times), packed, gated=gated)[:104], alone)
        text = torch.cat([x] * 20)[None]  # longer than any chunk of a prompt
        assert torch.equal(packed_linear(text, packed, gated=gated)[0, :104], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "half", "int4", "minima"])
@pytest.mark.parametrize("n,k,gated", [(960, 576, 0), (576, 576, 0), (3072, 576, 1), (576, 1536, 0), (8192, 576, 0)])
def test_rows_at_the_shapes_of_a_small_model_on_device(n, k, gated, kind, dtype):
    """576 is no multiple of 128, and groups of 32 have minima. A row has the same bits alone and among 480."""
    if kind == "minima":  # as a file is read that is not kept in its own types
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales, mins = (torch.rand(k // 32, n, device="cuda").half() * 2e-3 for _ in range(2))
        weight = kernels.pack_int4(codes, scales, group_size=32, dtype=dtype, mins=-8 * mins)
    elif kind in ("half", "int4"):
        weight, _ = quantized(16 if kind == "half" else 4, n, k, dtype, 32)
    else:
        weight = pack_panels([test_panels.part(kind, n, k)], "cuda")
    x, residual = (torch.randn(480, size, device="cuda").to(dtype) for size in (k, n >> gated))
    x = x / 64
    few = [0, 7, 8, 17, 31, 59, 255, 256, 479]
    alone = torch.cat([packed_linear(x[i : i + 1], weight, None, residual[i : i + 1], gated) for i in few])
    assert torch.isfinite(alone).all()
    for rows in (8, 9, 16, 17, 32, 60, 256, 257, 480):
        own = [i for i in few if i < rows]
        got = packed_linear(x[:rows], weight, None, residual[:rows], gated)
        assert torch.equal(got[own], alone[: len(own)]), rows
    assert not weight.counters.any()


@pytest.mark.parametrize("kind,down", [("Q4_K", "Q6_K"), ("Q5_1", "MXFP4")])
def test_experts_with_the_types_of_a_file_on_device(kind, down):
    """The product with experts of a type equals that with each expert alone, and a row alone has the same bits."""
    each = [(test_panels.part(kind, 1024, 512, e), test_panels.part(down, 512, 512, e)) for e in range(4)]
    up, back = (stack_blocks([pack_panels([pair[i]], "cuda") for pair in each]) for i in (0, 1))
    x, weights = torch.randn(26, 512, device="cuda").half() / 256, torch.rand(26, 2, device="cuda")
    ids = torch.rand(26, 4, device="cuda").topk(2).indices
    got = packed_experts(x, sort_pairs(weights, ids, 4), up, back)
    want = torch.zeros_like(x)
    for e, pair in enumerate(each):
        gate_up, own = (pack_panels([part], "cuda") for part in pair)
        share = (weights * (ids == e)).sum(1, keepdim=True)
        want += (share * packed_linear(packed_linear(x, gate_up, gated=1), own)).half()
    assert error(got, want.double()) < 2 * TOLERANCE[torch.float16]
    one = packed_experts(x[:1], sort_pairs(weights[:1], ids[:1], 4), up, back)
    assert torch.equal(got[:1], one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_memory_of_recurrent_layers_on_device(dtype):
    """The delta rule equals its reference at real sizes. A node has the bits of a separate sequence, and a text leaves
    the same memory however it is cut."""
    sizes = DeltaConfig(4, 8, 128, 128, 4)
    row = sizes.channels + 2 * sizes.value_heads
    facts = [weight.cuda().to(dtype) for weight in test_delta.weights(sizes)]
    text, tree = (torch.randn(2, n, row, device="cuda").to(dtype) for n in (100, 26))
    trees = torch.stack([test_delta.random_tree(26, seed) for seed in (1, 2)]).cuda()

    def empty() -> Memory:
        return next(new_memory(sizes, 1, 2, 26, 25, dtype, torch.device("cuda")).layers())

    def read(layer: Memory, rows: torch.Tensor) -> torch.Tensor:
        layer.keep.fill_(rows.shape[1])
        out = kernels.delta_rule(rows, *facts, layer, None)
        layer.path[:, :3] = kernels.next_window(layer, rows, 3)
        return out

    whole, parts, wanted = empty(), empty(), empty()
    out = read(whole, text)
    assert torch.equal(torch.cat([read(parts, rows) for rows in text.split((1, 60, 39), 1)], 1), out)
    assert torch.equal(whole.memory, parts.memory)
    wanted.keep.fill_(100)
    assert error(out, kernels.delta_rule.reference(text, *facts, wanted, None).double()) < 1e-4
    together = kernels.delta_rule(tree, *facts, whole, kernels.depth_first(trees))
    for node in (0, 3, 11, 25):
        for b in range(2):
            own = torch.cat((text, tree[:, trees[b, node]]), 1)
            assert torch.equal(read(empty(), own)[b, -1], together[b, node])
    gate, norm = torch.randn(2, 26, 8 * 128, device="cuda").to(dtype), torch.randn(128, device="cuda").to(dtype)
    normed, plain = (f(together, gate, norm, 1e-6) for f in (kernels.gated_norm, kernels.gated_norm.reference))
    assert error(normed, plain.double()) < TOLERANCE[dtype]
