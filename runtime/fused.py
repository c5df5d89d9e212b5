"""What runs all layers, or drafts a tree, in one call on a CPU, where calling small operators takes longer than they do.

What the C++ kernels make of weights (`stack`, `static_draft`) are tensors that only these kernels can read. They keep the
weights alive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import kernels
import sampling
from drafters.base import Draft, DraftInput, StepParts
from drafters.tree_drafter import TreeDrafter
from eagle_draft import EagleDrafter, EagleHead
from model import MLP, Block, Nodes, RMSNorm, Transformer
from weights.quantized import QuantLinear, TiedEmbedding


def fused_parts() -> StepParts:
    """The parts of a step in which the C++ kernels run layers in one call, if they have all that the layers need."""
    known: dict[nn.Module | TreeDrafter, Tensor | None] = {}

    def stacked(owner: nn.Module, layers: Sequence[nn.Module], **how: Any) -> Tensor | None:
        if owner not in known:
            known[owner] = stack(layers, **how)
        return known[owner]

    def block(
        layer: Block, x: Tensor, normed: Tensor | None, nodes: Nodes, kv: Tensor, after: RMSNorm
    ) -> tuple[Tensor, Tensor | None]:
        found = stacked(layer, [layer])
        if found is None or kv.dtype != torch.float32:
            return Block.forward(layer, x, normed, nodes, kv, after)
        return _run(x, None, found, nodes, kv[None])[0], None

    def layers(
        model: Transformer, x: Tensor, nodes: Nodes, kv: Tensor, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        found = stacked(model, model.layers, norm=model.norm.weight)
        if found is None or kv.dtype != torch.float32:
            return model.run_layers(x, nodes, kv, taps, block)
        normed, tapped = _run(x, None, found, nodes, kv, taps)
        return normed, tapped if taps else None

    def draft_layer(head: EagleHead, residual: Tensor, joined: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        found = stacked(head, [head.layer], input_norm=False)
        if found is None:
            return EagleHead.layer_forward(head, residual, joined, nodes, kv)
        residual, x = head.layer_inputs(residual, joined)
        return _run(x, residual, found, nodes, kv[None])[0]

    def draft_tree(drafter: TreeDrafter, inputs: DraftInput) -> Draft | None:
        if drafter not in known:
            known[drafter] = static_draft(drafter)
        found, mode = known[drafter], inputs.mode
        problem = "a head of this kind is not pruned" if found is None and drafter.p_min else ""
        able = kernels.use_cpu("draft_tree", inputs.features, problem=problem)
        if found is None or mode.penalties or mode.filters or not able:
            return None
        text = inputs.tokens, inputs.n, inputs.root, inputs.features.contiguous(), inputs.count
        noise = drafter.shared_noise and mode.sample, inputs.sampling.seed, inputs.sampling.temperature
        p_min = drafter.p_min if drafter.prunes(mode) else 0.0
        how = drafter.cache, kernels.round_activations(), p_min, drafter.ngram_nodes
        return Draft(*torch.ops.eaglet_cpu.draft_tree.default(found, *text, *noise, *how))

    return StepParts(layers, draft_layer, draft_tree=draft_tree)


def _run(
    x: Tensor, residual: Tensor | None, stacked: Tensor, nodes: Nodes, kv: Tensor, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """x float32 [B, T, in] -> [B, T, H] after all layers and the norm, and the inputs of the layers `taps` side by side.

    Where the first norm is lacking, x is normed already, and `residual` is what the attention adds to.
    kv [L, 2, B, Hkv, S, hd] has the keys and values of each layer side by side.
    """
    sight = (visible.expand(len(x), -1, -1) for visible in (nodes.visible, nodes.visible_window))
    shared = (nodes.cos, nodes.sin, nodes.slots, nodes.start, nodes.positions, *sight)
    cos, sin, *where = (t.contiguous() for t in shared)
    residual = None if residual is None else residual.contiguous()
    run = torch.ops.eaglet_cpu.layers.default
    return run(x.contiguous(), residual, stacked, cos, sin, kv, *where, kernels.round_activations(), taps)


def stack(layers: Sequence[nn.Module], norm: Tensor | None = None, input_norm: bool = True) -> Tensor | None:
    """Layers for `_run`, or None if the C++ kernels do not have all of them.

    norm: of the last layer's output, with the eps of the others. input_norm: whether a layer norms its input itself.
    """
    weights = [layer_weights(layer, input_norm) for layer in layers]
    if any(found is None for found in weights):
        return None
    attention, eps = layers[0].attention, layers[0].post_norm.eps
    windows = [layer.attention.window for layer in layers]
    flat = [t for found in weights for t in found]
    scale = 1 / math.sqrt(attention.head_dim)
    return torch.ops.eaglet_cpu.stack_layers.default(flat, norm, windows, eps, scale)


def layer_weights(layer: nn.Module, input_norm: bool) -> list[Tensor] | None:
    """The weights of a layer, or None if the C++ kernels do not have all of it.

    They are the norms before attention and MLP and those of q and k, then the weights of qkv, o, gate_up and down.
    """
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, MLP) or attention.head_dim % 16:
        return None
    norms = layer.input_norm if input_norm else None, layer.post_norm, attention.q_norm, attention.k_norm
    linears = [linear_weights(linear) for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    if None in linears or mlp.gate_up.packed.n % (2 * kernels.CPU_TILE):  # a tile would hold rows of both halves
        return None
    return [*given(*norms), *(t for linear in linears for t in linear)]


def linear_weights(linear: nn.Module) -> list[Tensor] | None:
    """Codes, scales, mins and bias of a linear layer, or None if the C++ kernels do not have it."""
    packed = linear.packed if isinstance(linear, QuantLinear) else None
    if packed is None or packed.layout != "tiles" or packed.perm is not None:
        return None
    return given(packed.weight, packed.scales, packed.mins, linear.bias)


def given(*values: RMSNorm | Tensor | None) -> list[Tensor]:
    """Tensors, or the weights of norms, for the C++ kernels. What is None is an empty tensor."""
    weights = (value.weight if isinstance(value, RMSNorm) else value for value in values)
    return [torch.empty(0) if t is None else t for t in weights]


def static_draft(drafter: TreeDrafter) -> Tensor | None:
    """What `eaglet_cpu.draft_tree` drafts with, or None if it does not draft with such a head or such a tree.

    It holds the weights of the head's layer, fc, LM head and embedding, the norms of embedding, feature and output, the
    rotary tables and the draft vocabulary; of the tree its nodes and its levels.
    """
    if type(drafter) is not EagleDrafter or drafter.dynamic or drafter.multi_round:
        return None
    head, tables = drafter.head, drafter.tree
    config, layer = head.config, head.layer
    target = head.target
    embedding = head.embed_tokens or target.embed_tokens
    table = linear_weights(embedding.head[0]) if isinstance(embedding, TiedEmbedding) else None
    if isinstance(embedding, nn.Embedding) and embedding.weight.dtype == torch.float32:
        table = given(embedding.weight, None, None, None)
    lm_head = head.lm_head or target.lm_head
    linears = layer_weights(layer, False), linear_weights(head.fc), lm_head and linear_weights(lm_head), table
    odd = config.fc_norm or config.norm_before_fc or config.norm_output or config.layer.hidden_size % 8
    if odd or None in linears:
        return None
    norms = (layer.input_norm, layer.hidden_norm) if config.version == 3 else (None, None)
    ids = torch.arange(target.config.vocab_size) if head.draft_ids is None else head.draft_ids
    others = given(*norms, head.norm, head.rotary.cos, head.rotary.sin, head.draft_ids, sampling.hash_ids(ids))
    children = max(tables.max_children, 1)
    tree = [tables.source_row * children + tables.rank, tables.parent, tables.depth, tables.valid]
    for level, picks in zip(tables.levels, drafter.picks, strict=True):
        tree += [*picks, level.visible, level.node, level.valid]
    tree = [t.contiguous() for t in tree]
    scale = 1 / math.sqrt(layer.attention.head_dim)
    numbers = children, layer.post_norm.eps, scale, config.norm_before_residual, drafter.scoring == "noisy"
    weights = [t for found in linears for t in found]
    return torch.ops.eaglet_cpu.tree_draft.default([*weights, *others], tree, *numbers)
