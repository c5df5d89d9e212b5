"""Compiles the repeated parts of a step, once for each number of rows (`--compile`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drafters.base import StepParts
from eagle_draft import EagleHead
from model import Block, Nodes, Transformer
from step import accept_and_commit


def compile_parts(on_gpu: bool, mode: str | None = None, backend: str | Callable = "inductor") -> StepParts:
    """The parts of a step, compiled: one block for all layers, one draft layer for all levels of a width, and the tail.

    This takes seconds. The whole step in one piece takes minutes, and on a CPU it is slower than no compilation. On a CPU
    only the block repays its compilation, while a captured graph wants few kernels everywhere. mode and backend are
    those of torch.compile.
    """
    # every width of every engine is a variant of the same few functions
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    block, layer, tail = (
        torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)
        for function in (Block.forward, EagleHead.layer_forward, accept_and_commit)
    )

    def run_block(layer: Block, x: Tensor, normed: Tensor | None, *rest) -> tuple[Tensor, Tensor]:
        # The first layer must not be a variant of its own.
        return block(layer, x, layer.input_norm(x) if normed is None else normed, *rest)

    def draft_layer(head: EagleHead, residual: Tensor, joined: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        # Levels of one width differ in the number of rows that they may see, which only the attention looks at.
        torch._dynamo.maybe_mark_dynamic(nodes.visible, 2)
        return layer(head, residual, joined, nodes, kv)

    layers = partial(Transformer.run_layers, block=run_block)
    return StepParts(layers, draft_layer, tail) if on_gpu else StepParts(layers)
