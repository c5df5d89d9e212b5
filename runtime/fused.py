"""What runs all layers in one call on a CPU, where calling small operators takes longer than they do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import kernels
from drafters.base import StepParts
from eagle_draft import EagleHead
from model import MLP, Block, Nodes, RMSNorm, Transformer
from weights.quantized import QuantLinear


def fused_parts() -> StepParts:
    """The parts of a step in which the C++ kernels run layers in one call, if they have all that the layers need."""
    known: dict[nn.Module, Tensor | None] = {}

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

    return StepParts(layers, draft_layer)


def _run(
    x: Tensor, residual: Tensor | None, stacked: Tensor, nodes: Nodes, kv: Tensor, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    sight = (visible.expand(len(x), -1, -1) for visible in (nodes.visible, nodes.visible_window))
    shared = (nodes.cos, nodes.sin, nodes.slots, nodes.start, nodes.positions, *sight)
    return kernels.cpu_layers(x, residual, stacked, shared, kv, kernels.round_activations(), taps)


def stack(layers: Sequence[nn.Module], norm: Tensor | None = None, input_norm: bool = True) -> Tensor | None:
    """Layers for `kernels.cpu_layers`, or None if the C++ kernels do not have all of them.

    norm: of the last layer's output, with the eps of the others. input_norm: whether a layer norms its input itself.
    """
    weights = [layer_weights(layer, input_norm) for layer in layers]
    if any(found is None for found in weights):
        return None
    attention, eps = layers[0].attention, layers[0].post_norm.eps
    windows = [layer.attention.window for layer in layers]
    flat = [t for found in weights for t in found]
    return kernels.cpu_stack(flat, norm, windows, eps, 1 / math.sqrt(attention.head_dim))


def layer_weights(layer: nn.Module, input_norm: bool) -> list[Tensor] | None:
    """The weights of a layer in the order of `kernels.cpu_stack`, or None if the C++ kernels do not have all of it."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, MLP) or attention.head_dim % 16:
        return None
    nothing = torch.empty(0)
    norms = layer.input_norm if input_norm else None, layer.post_norm, attention.q_norm, attention.k_norm
    found = [nothing if norm is None else norm.weight for norm in norms]
    for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down):
        packed = linear.packed if isinstance(linear, QuantLinear) else None
        if packed is None or packed.layout != "tiles" or packed.perm is not None:
            return None
        found += [nothing if t is None else t for t in (packed.weight, packed.scales, packed.mins, linear.bias)]
    return None if mlp.gate_up.packed.n % (2 * kernels.CPU_TILE) else found  # a tile would hold rows of both halves
