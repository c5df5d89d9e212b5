"""What Gemma 4 adds: keys and values that layers share, inputs of each layer, and experts beside an MLP."""

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from families.config import ModelConfig
from kernels.records import Memory, Nodes
from layers.blocks import NormedBlock
from layers.experts import WeighedExperts
from model import MLP, Attention, Block, RMSNorm, Transformer, apply_rope, linear


class SharingAttention(Attention):
    """Attention with normed values. They may be the keys, and both those of another layer, in whose cache they lie."""

    def __init__(self, config: ModelConfig, layer: int = 0, in_size: int | None = None):
        super().__init__(config, layer, in_size)
        self.shares = config.source(layer) != layer
        self.keys_as_values = self.in_parts = config.keys_as_values and not self.window
        projected = 0 if self.shares else 1 if self.keys_as_values else 2
        rows = (self.heads + projected * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(self.qkv.in_features, rows, bias=config.qkv_bias)
        self.k_norm = None if self.shares else self.k_norm

    def head_norms(self) -> tuple[Tensor, Tensor | None, float]:
        return self.q_norm.weight, self.k_norm and self.k_norm.weight, self.q_norm.eps

    def all_heads(self, x: Tensor) -> Tensor:
        """A layer that shares keys has queries alone."""
        heads = super().all_heads(x)
        if self.keys_as_values and not self.shares:
            heads = torch.cat((heads, heads[..., self.heads :, :]), -2)
        return heads

    def turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().turned(heads, cos, sin)
        return q, k, kernels.rms_norm(v, v.new_ones(self.head_dim), self.q_norm.eps)

    def turn(self, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor) -> tuple:
        return *super().turn(cos, sin, slots, kv), True, self.shares

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, shared: Tensor) -> Tensor:
        """shared [B, T, 2 Hkv hd]: keys and values that several layers have, or [B, T, 0]. One writes them in place, the
        others read them."""
        heads = self.all_heads(x)
        if self.shares:
            q = apply_rope(self.q_norm(heads), *self.own_turn(cos, sin)).transpose(1, 2)
            k, v = shared.unflatten(-1, (2, self.kv_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = self.turned(heads, cos, sin)
            if shared.numel():
                shared.copy_(torch.stack((k, v)).detach().permute(1, 3, 0, 2, 4).flatten(2))
        return linear(self.o, self.attend_train(q, k, v))


class FactoredExperts(WeighedExperts):
    """Each expert has a factor, and the router reads something else than the experts."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.factors = nn.Parameter(torch.ones(config.num_local_experts))

    def weighed(self, weights: Tensor, ids: Tensor) -> Tensor:
        return weights * self.factors[ids]

    def forward(self, x: Tensor, routed: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]. routed [B, T, H]: what the router reads."""
        return self.chosen(x.flatten(0, -2), routed.flatten(0, -2), None).view(x.shape)


class Beside(nn.Module):
    """Experts beside an MLP that every token uses. Both have norms of their own, and so has the router."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.dense = MLP(H, config.dense_size, activation=config.activation)
        self.experts = FactoredExperts(config)
        self.router_norm, self.experts_norm = RMSNorm(H, eps), RMSNorm(H, eps)
        self.dense_out, self.experts_out = RMSNorm(H, eps), RMSNorm(H, eps)

    def forward(self, normed: Tensor, x: Tensor) -> Tensor:
        """normed [B, T, H]: what the MLP reads, x: the residual state, which the others norm. -> [B, T, H]."""
        mixed = self.experts(self.experts_norm(x), routed=self.router_norm(x))
        return self.dense_out(self.dense(normed)) + self.experts_out(mixed)


class TokenInputs(nn.Module):
    """What the layers add of the token itself: an embedding for each layer, and a projection of the first embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.size, L = config.token_inputs, config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, L * self.size)
        self.projection = nn.Linear(config.hidden_size, L * self.size, bias=False)
        self.norm = RMSNorm(self.size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """tokens [B, T], their embeddings x [B, T, H] -> [B, T, L size]."""
        projected = (self.projection(x) * x.shape[-1] ** -0.5).unflatten(-1, (-1, self.size))
        return (self.norm(projected).flatten(-2) + self.embed_tokens(tokens).to(x.dtype) * self.size**0.5) * 2**-0.5


class TokenGate(nn.Module):
    """What one layer adds of its part of `TokenInputs`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.token_inputs, bias=False)
        self.projection = nn.Linear(config.token_inputs, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.activation = kernels.GATES[config.activation]

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """x [B, T, H], own [B, T, size] -> [B, T, H], with x added."""
        gated = kernels.gate(torch.cat((self.gate(x), own), -1), self.activation)
        return x + self.norm(self.projection(gated))


class Gemma4Block(NormedBlock):
    """A layer that also adds its part of `TokenInputs`, if there are any. What leaves it is multiplied by a number."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, layer: int):
        super().__init__(config, attention, mlp)
        first = layer * config.token_inputs
        self.own_inputs, self.shared = slice(first, first + config.token_inputs), config.shared_columns(layer)
        self.token_gate = TokenGate(config) if config.token_inputs else None
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        x = x + self.attention_norm(self.attention(self.input_norm(x), nodes, kv))
        return self.feed_forward(x, nodes.token_inputs)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, carried: Tensor) -> Tensor:
        attended = self.attention.forward_train(self.input_norm(x), cos, sin, carried[..., self.shared])
        return x + self.attention_norm(attended)

    def feed_forward(self, x: Tensor, carried: Tensor | None) -> Tensor:
        """carried [B, T, at least L size] begins with the `TokenInputs` of all layers."""
        normed = self.post_norm(x)
        x = x + self.mlp_norm(self.mlp(normed, x) if isinstance(self.mlp, Beside) else self.mlp(normed))
        if self.token_gate is not None:
            x = self.token_gate(x, carried[..., self.own_inputs])
        return x * self.factor


class Gemma4Transformer(Transformer):
    """A Transformer whose layers may have `TokenInputs`."""

    def __init__(self, config: ModelConfig, block: Callable[[ModelConfig, int], Block]):
        super().__init__(config, block)
        self.token_inputs = TokenInputs(config) if config.token_inputs else None

    def forward(
        self, tokens: Tensor, nodes: Nodes, kv_cache: Sequence[Tensor], taps: tuple[int, ...] = (),
        layers: Callable | None = None, memory: Memory | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        x = self.embed(tokens)
        if self.token_inputs is not None:
            nodes = nodes._replace(token_inputs=self.token_inputs(tokens, x))
        return (layers or Transformer.run_layers)(self, x, nodes, kv_cache, taps, memory)

    def carry(self, tokens: Tensor, x: Tensor) -> tuple[Tensor]:
        """`TokenInputs`, and room for keys and values that layers share: [B, T, config.carried]."""
        carried = x.new_zeros(*tokens.shape, self.config.carried)
        if self.token_inputs is not None:
            own = self.token_inputs(tokens, x.detach())
            carried[..., : own.shape[-1]] = own.detach()
        return (carried,)

    def weight_bytes(self, nodes: int = 1) -> float:
        row = self.config.token_inputs * len(self.layers) * self.dtype.itemsize
        return super().weight_bytes(nodes) + nodes * row
