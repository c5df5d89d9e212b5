"""Attention that differs from LLaMA's in one thing each."""

import math
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from families.config import ModelConfig
from kernels.records import Nodes
from model import Attention, RMSNorm, linear, window_mask


class ShapedAttention(Attention):
    """Scores s become cap * tanh(s / cap), or each head has the score of one more key, without a value (sinks)."""

    def __init__(self, config: ModelConfig, layer: int = 0, in_size: int | None = None):
        super().__init__(config, layer, in_size)
        self.cap = config.attention_cap
        self.sinks = nn.Parameter(torch.empty(self.heads)) if config.sinks else None

    def attend(self, q: Tensor, arrived: Tensor | None, nodes: Nodes, kv: Tensor, *_: Any) -> Tensor:
        return super().attend(q, arrived, nodes, kv, self.cap, self.sinks)

    def attend_train(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(window_mask(q.shape[2], self.window, q.device), 0.0, -math.inf)
        out = kernels.shaped_attention(q, k, v, mask, self.scale, self.cap, self.sinks)
        return out.transpose(1, 2).flatten(2)


class GatedAttention(Attention):
    """What attention gives is multiplied by a gate for each query. The projection begins with the gates."""

    in_parts = True

    def __init__(self, config: ModelConfig, layer: int = 0, in_size: int | None = None):
        super().__init__(config, layer, in_size)
        rows = self.o.in_features + self.qkv.out_features
        self.qkv = nn.Linear(self.qkv.in_features, rows, bias=config.qkv_bias)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, in] -> what `all_heads` gives, and the gates [B, T, Hq hd] before their sigmoid."""
        qkv, size = self.qkv(x), self.heads * self.head_dim
        gates, qkv = qkv.split((size, qkv.shape[-1] - size), -1)
        return qkv.unflatten(-1, (-1, self.head_dim)), gates

    def all_heads(self, x: Tensor) -> Tensor:
        return self.split(x)[0]

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor, residual: Tensor | None = None) -> Tensor:
        heads, gates = self.split(x)
        q, arrived = kernels.rope_write_kv(heads, *self.turn(nodes.cos, nodes.sin, nodes.slots, kv))
        return linear(self.o, self.attend(q, arrived, nodes, kv) * kernels.sigmoid(gates), residual)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, gates = self.split(x)
        return linear(self.o, self.attend_train(*self.turned(heads, cos, sin)) * kernels.sigmoid(gates))


class WideNormAttention(Attention):
    """The norms of queries and keys are over all heads at once."""

    in_parts = True

    def __init__(self, config: ModelConfig, layer: int = 0, in_size: int | None = None):
        super().__init__(config, layer, in_size)
        sizes, eps = (self.heads * self.head_dim, self.kv_heads * self.head_dim), config.rms_norm_eps
        self.q_norm, self.k_norm = (RMSNorm(size, eps) for size in sizes)

    def head_norms(self) -> tuple[None, None, float]:
        return None, None, 0.0

    def all_heads(self, x: Tensor) -> Tensor:
        rows, kv_rows = self.q_norm.weight.numel(), self.k_norm.weight.numel()
        q, k, v = self.qkv(x).split((rows, kv_rows, kv_rows), -1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), -1).unflatten(-1, (-1, self.head_dim))


class ScaledQueries(Attention):
    """Queries are multiplied by something behind their rotation."""

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [B, Hq, T, hd], rotated, times its factors. positions [B, T]."""
        raise NotImplementedError

    def attend(self, q: Tensor, arrived: Tensor | None, nodes: Nodes, kv: Tensor, *_: Any) -> Tensor:
        return super().attend(self.scaled(q, nodes.positions), arrived, nodes, kv)

    def attend_train(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend_train(self.scaled(q, torch.arange(q.shape[2], device=q.device)[None]), k, v)


class LateNormAttention(ScaledQueries):
    """The norms of queries and keys are behind their rotation.

    A head is as long after its rotation as before, so the norms divide before it. Their weights come after it, those of
    the keys with the queries, too: only products of both matter.
    """

    def head_norms(self) -> tuple[Tensor, Tensor, float]:
        ones = torch.ones_like(self.q_norm.weight)
        return ones, ones, self.q_norm.eps

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        return q * (self.q_norm.weight * self.k_norm.weight)


class GrowingAttention(ScaledQueries):
    """Queries grow with the logarithm of their position (`RopeConfig.query_growth`)."""

    def __init__(self, config: ModelConfig, layer: int = 0, in_size: int | None = None):
        super().__init__(config, layer, in_size)
        self.growth, self.period = config.rope.query_growth, config.rope.original_max_positions

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        factors = 1 + self.growth * torch.log(1 + torch.floor(positions / self.period))
        return q * factors[:, None, :, None].to(q.dtype)
