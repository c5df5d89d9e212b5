"""What runs a layer in one call on a CPU, where calling thirty small operators per layer takes longer than they do."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import kernels
from drafters.base import StepParts
from eagle_draft import EagleHead
from model import MLP, Attention, Block, Nodes, RMSNorm
from weights.quantized import QuantLinear


def fused_parts() -> StepParts:
    """The parts of a step in which a layer is one call to the C++ kernels, if they have all that the layer needs."""
    known: dict[nn.Module, list[Tensor] | None] = {}

    def weights_of(owner: nn.Module, input_norm: nn.Module | None, layer: nn.Module) -> list[Tensor] | None:
        if owner not in known:
            known[owner] = layer_weights(input_norm, layer.attention, layer.post_norm, layer.mlp)
        return known[owner]

    def block(
        layer: Block, x: Tensor, normed: Tensor | None, nodes: Nodes, kv: Tensor, after: RMSNorm
    ) -> tuple[Tensor, Tensor | None]:
        weights = weights_of(layer, layer.input_norm, layer)
        if weights is None or kv.dtype != torch.float32:
            return Block.forward(layer, x, normed, nodes, kv, after)
        return _run(layer, x, None, weights, nodes, kv), None

    def draft_layer(head: EagleHead, residual: Tensor, joined: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        weights = weights_of(head, None, head.layer)
        if weights is None:
            return EagleHead.layer_forward(head, residual, joined, nodes, kv)
        residual, x = head.layer_inputs(residual, joined)
        return _run(head.layer, x, residual, weights, nodes, kv)

    return StepParts(block, draft_layer)


def _run(
    layer: nn.Module, x: Tensor, residual: Tensor | None, weights: list[Tensor], nodes: Nodes, kv: Tensor
) -> Tensor:
    attention = layer.attention
    visible = (nodes.visible_window if attention.window else nodes.visible).expand(len(x), -1, -1)
    shared = (nodes.cos, nodes.sin, nodes.slots, nodes.start, visible, nodes.positions)
    scale, rounds = 1 / math.sqrt(attention.head_dim), kernels.round_activations()
    return kernels.cpu_layer(x, residual, weights, shared, kv, attention.window, layer.post_norm.eps, scale, rounds)


def layer_weights(
    input_norm: nn.Module | None, attention: Attention, post_norm: nn.Module, mlp: nn.Module
) -> list[Tensor] | None:
    """The weights in the order of `kernels.cpu_layer`, or None if the C++ kernels do not have all of the layer."""
    if not isinstance(mlp, MLP) or attention.head_dim % 16:
        return None
    nothing = torch.empty(0)
    found = [
        nothing if norm is None else norm.weight for norm in (input_norm, post_norm, attention.q_norm, attention.k_norm)
    ]
    for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down):
        packed = linear.packed if isinstance(linear, QuantLinear) else None
        if packed is None or packed.layout != "tiles" or packed.perm is not None:
            return None
        found += [nothing if t is None else t for t in (packed.weight, packed.scales, packed.mins, linear.bias)]
    return None if mlp.gate_up.packed.n % (2 * kernels.CPU_TILE) else found  # a tile would hold rows of both halves
