"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle_draft import EagleHead
from model import Block, Nodes, Transformer

# What --compile does: (what goes through Inductor, Inductor's mode, whether a GPU's step is captured as one CUDA graph).
# regions: one block for all layers, one draft layer, the step's tail; whole: the step in one piece (for comparison).
COMPILE_MODES = {
    "graph": ("regions", None, True),
    "max-autotune": ("regions", "max-autotune-no-cudagraphs", True),
    "capture": ("", None, True),
    "regions": ("regions", None, False),
    "inductor": ("whole", None, False),
    "reduce-overhead": ("whole", "reduce-overhead", False),
}


class CompiledStep:
    """The parts of a step that --compile compiles: one block for all layers, one draft layer for all levels of a width,
    and the tail. That takes seconds; the whole step in one piece takes minutes, and on a CPU it runs slower than eager.
    On a CPU the block alone repays its compilation, elsewhere a captured graph wants few kernels everywhere."""

    def __init__(
        self,
        model: Transformer,
        drafter: Any,
        step: Callable,
        settle: Callable,
        every: bool | None = None,
        **how: Any,
    ):
        """step, settle: the engine's `decode_step` and `settle_step`. every: compile all three parts (default: unless on
        a CPU). how: options of torch.compile."""
        # every width of every engine is a variant of the same few functions
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        block, layer, tail = (
            torch.compile(f, fullgraph=True, dynamic=False, **how)
            for f in (Block.forward, EagleHead.layer_forward, settle)
        )

        def draft_layer(
            head: EagleHead, embedding: Tensor, feature: Tensor, nodes: Nodes, kv: Tensor
        ) -> Tensor:
            # Levels of one width differ in how many rows they may see, which only the attention looks at, and in the
            # strides of features that are one row repeated.
            torch._dynamo.maybe_mark_dynamic(nodes.visible, 2)
            return layer(head, embedding, feature.contiguous(), nodes, kv)

        every = model.device.type != "cpu" if every is None else every
        inner = getattr(drafter, "drafter", drafter)  # inside n-grams
        hooks = [(model, "run_block", block), (getattr(inner, "model", None), "run_block", block)]
        hooks += [(getattr(inner, "head", None), "run_layer", draft_layer)] if every else []
        self.hooks = [hook for hook in hooks if hook[0] is not None]
        self.settle, self.plain_step = tail if every else None, step

    def call(self, function: Callable, *arguments: Any, **named: Any) -> Any:
        """function(...) with the compiled parts in place; other engines on the same modules keep theirs."""
        before = [vars(part)[name] for part, name, _ in self.hooks]
        for part, name, compiled in self.hooks:
            vars(part)[name] = compiled
        try:
            return function(*arguments, **named)
        finally:
            for (part, name, _), plain in zip(self.hooks, before, strict=True):
                vars(part)[name] = plain

    def step(self, *arguments: Any, mark: Callable[[str], None] | None = None) -> Any:
        """`decode_step`, its parts compiled."""
        return self.call(self.plain_step, *arguments, mark=mark, settle=self.settle)
