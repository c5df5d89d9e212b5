"""Layers whose sum differs from LLaMA's."""

import torch.nn as nn
from torch import Tensor

from families.config import ModelConfig
from kernels.records import Memory, Nodes
from model import Block, RMSNorm


def normed_by(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """norm(x), or x where there is no norm."""
    return x if norm is None else norm(x)


class ScaledBlock(Block):
    """What attention and MLP add is multiplied by a number."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        self.multiplier = config.residual_multiplier

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor | Memory) -> Tensor:
        return self.feed_forward(x + self.multiplier * self.attention(self.input_norm(x), nodes, kv))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.multiplier * self.attention.forward_train(self.input_norm(x), cos, sin)

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.multiplier * self.mlp(self.post_norm(x))


class NormedBlock(Block):
    """What attention and MLP add is normed, too, or (with norms "after") only that."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        if config.norms == "after":
            self.input_norm = self.post_norm = None
        self.attention_norm, self.mlp_norm = (RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor | Memory) -> Tensor:
        return self.feed_forward(x + self.attention_norm(self.attention(normed_by(self.input_norm, x), nodes, kv)))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.attention_norm(self.attention.forward_train(normed_by(self.input_norm, x), cos, sin))

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp_norm(self.mlp(normed_by(self.post_norm, x)))
