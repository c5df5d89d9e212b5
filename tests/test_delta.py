"""Recurrent layers: nodes of trees have the bits of separate sequences, and the memory follows the accepted path.

Tests named `test_interpreted_*` ask the reference and C++, and where tests/test_interpreter.py runs them, with
TRITON_INTERPRET=1 before Triton is imported, the kernels of Triton.
"""

from dataclasses import replace

import pytest
import torch
from tiny import interpreted, needs_kernels

import kernels
from engine.first_look import Comparison
from families.config import DeltaConfig
from kernels.records import Memory
from layers.recurrent import new_memory

# A head is one program of Triton's interpreter, or three in `test_interpreted_rule_equals_its_reference`.
SIZES = DeltaConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=8 if kernels.INTERPRETED else 24, kernel=4)
ROW = SIZES.channels + 2 * SIZES.value_heads


def weights(sizes: DeltaConfig = SIZES) -> tuple[torch.Tensor, ...]:
    """conv, A_log and dt_bias, as `kernels.delta_rule` takes them."""
    generator = torch.Generator().manual_seed(1)
    conv = torch.randn(sizes.channels, 1, sizes.kernel, generator=generator)
    return conv, torch.rand(sizes.value_heads, generator=generator), torch.randn(sizes.value_heads, generator=generator)


def one_layer(batch: int, nodes: int = 1, depth: int = 0, sizes: DeltaConfig = SIZES) -> Memory:
    """An empty memory of one layer."""
    return next(new_memory(sizes, 1, batch, nodes, depth, torch.float32, torch.device("cpu")).layers())


def read_text(layer: Memory, rows: torch.Tensor, keep: int | None = None) -> torch.Tensor:
    """Walk rows [B, T, R] of a text, of which the first `keep` count, and take them into the memory."""
    layer.keep.fill_(rows.shape[1] if keep is None else keep)
    read = kernels.delta_rule(rows, *weights(), layer, None)
    layer.path[:, : SIZES.kernel - 1] = kernels.next_window(layer, rows, SIZES.kernel - 1)
    layer.pending.zero_()
    layer.keep.zero_()
    return read


def random_tree(size: int, seed: int) -> torch.Tensor:
    """Ancestors [N, N] of a random tree, each node its own."""
    generator = torch.Generator().manual_seed(seed)
    ancestors = torch.eye(size, dtype=torch.bool)
    for i in range(1, size):
        ancestors[i] |= ancestors[int(torch.randint(max(0, i - 5), i, (), generator=generator))]
    return ancestors


def test_a_walk_is_depth_first():
    """Catches an order in which a node comes before its parent, or between the nodes of another subtree."""
    for seed in range(50):
        ancestors = random_tree(12, seed)
        walk = kernels.depth_first(ancestors[None])[0]
        parent = [max((j for j in range(12) if ancestors[i, j] and j != i), default=-1) for i in range(12)]
        expected = []

        def visit(node: int, depth: int) -> None:
            children = [i for i in range(12) if parent[i] == node]  # noqa: B023
            expected.append([node, depth, int(len(children) > 1)])  # noqa: B023
            for child in children:
                visit(child, depth + 1)

        visit(0, 0)
        assert walk.tolist() == expected
    alone = kernels.depth_first(torch.eye(5, dtype=torch.bool)[None])[0]  # rows that pad a forward
    assert alone.tolist() == [[i, 0, 0] for i in range(5)]


@pytest.mark.parametrize("batch", [3] if kernels.INTERPRETED else [1, 3])
def test_interpreted_nodes_have_the_bits_of_separate_sequences(each, batch):
    """Catches a sibling's memory or convolution window under a node, also of nodes that pad a forward, which are all
    roots, a path that is advanced twice or not at all, and bits that depend on the number of rows."""
    count = 1 if kernels.INTERPRETED else 20 // batch
    for seed in range(11, 11 + count):
        generator = torch.Generator().manual_seed(seed)
        size = 1 + seed % 12
        text, path, tree = (torch.randn(batch, n, ROW, generator=generator) for n in (5, 4, size))
        each = torch.stack([random_tree(size, seed * batch + b) for b in range(batch)])
        each[2:] = torch.eye(size, dtype=torch.bool)
        layer = one_layer(batch, size, max(4, int(each.sum(-1).max()) - 1))
        read_text(layer, text)
        layer.path[:, 3:7] = path
        layer.pending[:] = torch.tensor((4, 1, 0)[:batch])
        out = kernels.delta_rule(tree, *weights(), layer, kernels.depth_first(each))
        for b, pending in enumerate((4, 1, 0)[:batch]):
            known, alone = torch.cat((text[b], path[b, :pending])), one_layer(1)
            read_text(alone, known[None])
            assert torch.equal(layer.memory[b], alone.memory[0])
            for node in (0, size // 2, size - 1) if kernels.INTERPRETED else range(size):
                alone = one_layer(1)
                own = torch.cat((known, tree[b, each[b, node]]))
                for rows in own[None].split(len(own) if kernels.INTERPRETED else 1, 1):
                    expected = read_text(alone, rows)
                assert torch.equal(out[b, node], expected[0, -1])


def test_interpreted_memory_advances_along_the_accepted_path(each):
    """Catches pending rows that are dropped or advanced twice, a wrong window behind them, and a finished sequence that
    goes on."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(3, 5, ROW, generator=generator)
    path, last = torch.randn(3, 4, ROW, generator=generator), torch.randn(3, 1, ROW, generator=generator)
    layer = one_layer(3, 1, 3)
    read_text(layer, text)
    layer.path[:, SIZES.kernel - 1 :] = path
    layer.pending[:] = torch.tensor([4, 2, 3])
    layer.frozen[2] = True
    before = layer.memory.clone()
    read = kernels.delta_rule(last, *weights(), layer, kernels.depth_first(torch.ones(3, 1, 1, dtype=torch.bool)))
    for b, count in ((0, 4), (1, 2)):
        alone = one_layer(1)
        read_text(alone, torch.cat((text[b : b + 1], path[b : b + 1, :count]), 1))
        assert torch.equal(layer.memory[b], alone.memory[0])
        assert torch.equal(read[b], read_text(alone, last[b : b + 1])[0])
    assert torch.equal(layer.memory[2], before[2])


@pytest.mark.parametrize(
    "chunks", [(1, 5, 3)] if kernels.INTERPRETED else [(1,) * 14, (5, 9), (9, 5), (2, 1, 11), (14,)]
)
def test_interpreted_chunks_of_a_text_leave_the_same_memory(each, chunks):
    """Catches a window that is cut at the border of a chunk, and padding that is taken into the memory, or by Triton even
    read."""
    rows = torch.randn(2, sum(chunks), ROW, generator=torch.Generator().manual_seed(3))
    whole, parts, out = one_layer(2), one_layer(2), []
    expected = read_text(whole, rows)
    for part in rows.split(chunks, 1):
        size, value = part.shape[1], torch.nan if kernels.INTERPRETED else 7.0
        read = read_text(parts, torch.nn.functional.pad(part, (0, 0, 0, 3), value=value), size)
        out.append(read[:, :size])
        assert not kernels.INTERPRETED or not read[:, size:].any()
    assert torch.equal(torch.cat(out, 1), expected)
    assert torch.equal(parts.memory, whole.memory) and torch.equal(parts.path[:, :3], whole.path[:, :3])


def test_interpreted_rule_equals_its_definition(each):
    """Catches a wrong gate, norm, scale or decay: float64 and plain loops, from the published formulas."""
    conv, a_log, dt_bias = (w.double() for w in weights())
    rows = torch.randn(1, 8, ROW, generator=torch.Generator().manual_seed(5))
    got = read_text(one_layer(1), rows)[0]
    d, x = SIZES, torch.nn.functional.pad(rows[0].double(), (0, 0, 3, 0))
    memory = torch.zeros(d.value_heads, d.key_dim, d.value_dim, dtype=torch.float64)
    keys = d.key_heads * d.key_dim
    for t in range(8):
        mixed = torch.nn.functional.silu((x[t : t + 4, : d.channels].T * conv[:, 0]).sum(1))
        q, k, v = mixed.split((keys, keys, d.values))
        b, a = rows[0, t, d.channels :].double().chunk(2)
        for head in range(d.value_heads):
            own = slice(head // 2 * d.key_dim, (head // 2 + 1) * d.key_dim)
            query, key = (z[own] / (z[own].square().sum() + 1e-6).sqrt() for z in (q, k))
            value = v[head * d.value_dim : (head + 1) * d.value_dim]
            memory[head] *= torch.exp(-a_log[head].exp() * torch.nn.functional.softplus(a[head] + dt_bias[head]))
            memory[head] += torch.outer(key, b[head].sigmoid() * (value - key @ memory[head]))
            assert torch.allclose(got[t, head].double(), query @ memory[head] / d.key_dim**0.5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interpreted_gated_norm_equals_its_definition(each, dtype):
    """Catches a norm over the wrong axis, a gate without its silu or read as if it were not a part of wider rows, and
    columns past the end of a head; and a row has the same bits among others."""
    generator = torch.Generator().manual_seed(0)
    x, wide = torch.randn(2, 5, 4, 24, generator=generator), torch.randn(2, 5, 200, generator=generator).to(dtype)
    weight, gate = torch.randn(24, generator=generator).to(dtype), wide[..., 50:146]
    got = kernels.gated_norm(x, gate, weight, 1e-6)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    expected = normed.flatten(-2) * torch.nn.functional.silu(gate.double())
    assert got.dtype == dtype and torch.allclose(
        got.double(), expected, rtol=2e-3 * (dtype == torch.float16), atol=1e-5
    )
    for t in range(5):
        assert torch.equal(kernels.gated_norm(x[:1, t : t + 1], gate[:1, t : t + 1], weight, 1e-6), got[:1, t : t + 1])


@needs_kernels
def test_real_sizes_equal_the_reference_with_any_number_of_threads():
    """Catches a whole block of registers or the columns behind it at a wrong place, the memory of another layer, bits
    that depend on the number of threads or rows, and a buffer that two memories of a tree share."""
    sizes = DeltaConfig(key_heads=2, value_heads=4, key_dim=128, value_dim=136, kernel=4)
    generator, row = torch.Generator().manual_seed(0), sizes.channels + 2 * sizes.value_heads
    text, tree, path = (torch.randn(2, n, row, generator=generator) for n in (40, 12, 4))
    walk = kernels.depth_first(torch.stack([random_tree(12, seed) for seed in (3, 4)]))

    def results(mode: str, parts: int) -> list[torch.Tensor]:
        stored = new_memory(sizes, 3, 2, 12, 9, torch.float32, torch.device("cpu"))
        layer, read = list(stored.layers())[1], []
        with kernels.KernelBackend(mode, "cpu").active() as active:
            for part in text.chunk(parts, 1):
                layer.keep.fill_(part.shape[1])
                read.append(kernels.delta_rule(part, *weights(sizes), layer, None))
                layer.path[:, :3] = kernels.next_window(layer, part, 3)
            layer.path[:, 3:7] = path
            layer.pending[:] = torch.tensor([4, 2])
            tree_read = kernels.delta_rule(tree, *weights(sizes), layer, walk)
        assert not active.declined and not stored.memory[:, ::2].any()
        return [torch.cat(read, 1), tree_read, layer.memory]

    expected, threads = results("reference", 1), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        got = results("cpu", 40)
        torch.set_num_threads(3)
        assert all(map(torch.equal, results("cpu", 1), got))
    finally:
        torch.set_num_threads(threads)
    for ours, reference in zip(got, expected, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("sizes,why", [
    (replace(SIZES, value_dim=20), "multiple of 8"), (replace(SIZES, kernel=3), "not over 4 rows"),
])  # fmt: skip
def test_sizes_without_a_kernel_are_named(sizes, why):
    """Catches a size for which C++ reads past the end of a head or of the convolution."""
    layer, row = one_layer(1, sizes=sizes), sizes.channels + 2 * sizes.value_heads
    layer.keep.fill_(5)
    with kernels.KernelBackend("cpu", "cpu").active() as active:
        assert kernels.delta_rule(torch.randn(1, 5, row), *weights(sizes), layer, None).isfinite().all()
    assert why in active.declined["delta_rule"]


# ---- Triton's interpreter ----------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype,columns", [(torch.float32, 24), (torch.float16, 8)])
def test_interpreted_rule_equals_its_reference(each, dtype, columns):
    """Catches a wrong head, column, address, window, gate or decay, in a layer among others whose batch is strided, of
    which one sequence has finished; and the first look, which makes the same comparison of the memory."""
    generator, tolerance, sizes = torch.Generator().manual_seed(0), 1e-5, replace(SIZES, value_dim=columns)
    row = sizes.channels + 2 * sizes.value_heads
    text, tree, path = (torch.randn(2, n, row, generator=generator).to(dtype) for n in (4, 6, 6))
    layers = new_memory(sizes, 2, 2, 6, 5, dtype, torch.device("cpu")).layers()
    own, other = next(layers), next(layers)
    facts = [w.to(dtype) for w in weights(sizes)]
    for layer in (own, other):
        layer.keep[:] = torch.tensor([3, 1])
        layer.pending[:], layer.frozen[:] = 0, False
        with (each if layer is other else kernels.KernelBackend("reference")).active():
            read = kernels.delta_rule(text, *facts, layer, None)
            if layer is own:
                expected = read
    for b, keep in ((0, 3), (1, 1)):
        assert (read[b, :keep] - expected[b, :keep]).abs().max() < tolerance and not read[b, keep:].any()
    assert (own.memory - other.memory).abs().max() < tolerance and other.memory.any()
    other.path[:, 3:], other.path[:, :3] = path, text[:, :3]
    other.pending[:], other.frozen[:] = torch.tensor([3, 2]), torch.tensor([False, True])
    walk = kernels.depth_first(torch.stack([random_tree(6, 1), random_tree(6, 4)]))
    comparison, before = Comparison(tolerance), other.memory.clone()
    with kernels.watched(comparison):
        kernels.delta_rule(tree, *facts, other, walk)
    assert len(comparison.compared) == 1 and not comparison.found.wrong
    assert torch.equal(other.memory[1], before[1]) and not torch.equal(other.memory[0], before[0])
