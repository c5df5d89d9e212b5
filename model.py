"""The target model: a Transformer as LLaMA, Qwen, Mistral and Mixtral have it. `layers/` has what other families add.

It computes a *forward on nodes*. It gets tokens, their depth below the root, and who may see whom. A prompt chunk is a
chain of nodes, plain decoding is a single node, and a draft tree is a tree of nodes. The model does not know which of
them it computes. Siblings in a tree share a position, but every node has a cache slot of its own.

The model knows nothing of text, sampling, drafters, files, or what a tree means.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import kernels
from families.config import ModelConfig, RopeConfig
from kernels.experts import Routes
from kernels.records import Memory, Nodes, Rotary
from support.machine import zeros


class SelfCounting(nn.Module):
    """A module that counts the weight bytes of a forward itself, because it does not read each parameter once."""

    def weight_bytes_read(self, nodes: int) -> float:
        """Bytes that a forward of `nodes` rows is expected to read of the tensors that this module itself holds."""
        raise NotImplementedError


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis (`kernels.rms_norm`)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, heads, hd] by cos, sin [B, T, hd/2] float32. Dimension i pairs with i + hd/2."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def linear(layer: nn.Module, x: Tensor, residual: Tensor | None = None, gated: int = 0) -> Tensor:
    """layer(x), gated (`kernels.GATES`), + residual. A packed linear does all of it in its kernel."""
    if not isinstance(layer, nn.Linear):
        return layer(x, residual, gated)
    return kernels.epilogue(layer(x), None, residual, gated)


class Attention(nn.Module):
    """Grouped-query attention with fused QKV over a static cache. `in_size` differs from hidden_size in EAGLE-3."""

    in_parts = False  # whether something stands between the projection and the rotation, so that no kernel does both

    def __init__(self, config: ModelConfig, layer: int = 0, in_size: int | None = None):
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads, self.head_dim = config.heads_of(layer)
        self.scale = config.attention_multiplier or 1 / math.sqrt(self.head_dim)
        self.window = config.windows[layer]
        self.first_angle = config.first_angle(layer)  # of those that stand side by side in cos and sin
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(in_size or config.hidden_size, rows, bias=config.qkv_bias)
        self.o = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.o_bias)
        eps = config.rms_norm_eps
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, eps) if config.qk_norm else None for _ in range(2))

    def own_turn(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of this layer's rotation."""
        half = self.head_dim // 2
        if cos.shape[-1] == half:
            return cos, sin
        return cos.narrow(-1, self.first_angle, half), sin.narrow(-1, self.first_angle, half)

    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The weights of the norms of each head of queries and keys before they turn, and eps. No weights: no norms."""
        return (None, None, 0.0) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def all_heads(self, x: Tensor) -> Tensor:
        """x [B, T, in] -> queries, keys and values [B, T, Hq + 2 Hkv, hd]."""
        return self.qkv(x).unflatten(-1, (-1, self.head_dim))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, in] -> rotated q [B, Hq, T, hd], rotated k and plain v [B, Hkv, T, hd], with gradients."""
        return self.turned(self.all_heads(x), cos, sin)

    def turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`project` of what `all_heads` gives."""
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 2)
        q_weight, k_weight, eps = self.head_norms()
        if q_weight is not None:
            q, k = kernels.rms_norm(q, q_weight, eps), kernels.rms_norm(k, k_weight, eps)
        cos, sin = self.own_turn(cos, sin)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def write(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write the keys and values of x [B, T, in] into slots [B, T] of kv (as of `forward`). Returns the rotated
        queries [B, Hq, T, hd], and what `tree_attention` takes as `arrived`."""
        turn = self.turn(cos, sin, slots, kv)
        if self.in_parts or isinstance(self.qkv, nn.Linear):
            return kernels.rope_write_kv(self.all_heads(x), *turn)
        return self.qkv.heads(x, self.head_dim, *turn)  # the kernel of a packed linear does both

    def turn(self, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor) -> tuple[Any, ...]:
        """What `rope_write_kv` takes beside the heads."""
        return *self.own_turn(cos, sin), kv, slots, *self.head_norms()

    def attend(self, q: Tensor, arrived: Tensor | None, nodes: Nodes, kv: Tensor, *scores: Any) -> Tensor:
        """What the queries of `write` read of the cache, [B, T, Hq hd]. scores: `cap` and `sinks`, if any."""
        visible = nodes.visible_window if self.window else nodes.visible
        window = min(self.window, nodes.window) or max(self.window, nodes.window)  # 0 is no limit
        seen = nodes.start, visible, nodes.positions, window
        cap_and_sinks, where = scores or (0.0, None), (nodes.segments, nodes.longest, nodes.chain, nodes.ring)
        return kernels.tree_attention(q, kv, *seen, self.scale, arrived, *cap_and_sinks, *where).flatten(2)

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [B, T, in] -> [B, T, H], with the residual added.

        kv [2, B, Hkv, S, hd], or [2, 1, Hkv, S, hd] with nodes.segments, is written at nodes.slots, then read.
        """
        q, arrived = self.write(x, nodes.cos, nodes.sin, nodes.slots, kv)
        return linear(self.o, self.attend(q, arrived, nodes, kv), residual)

    def attend_train(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of q [B, Hq, T, hd] to k and v [B, Hkv, T, hd] within the window, [B, T, Hq hd]."""
        mask = window_mask(q.shape[2], self.window, q.device) if self.window else None
        how = {"attn_mask": mask, "is_causal": mask is None, "scale": self.scale, "enable_gqa": True}
        return F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2).flatten(2)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The same attention over a whole sequence x [B, T, in], with gradients and without a cache."""
        return linear(self.o, self.attend_train(*self.project(x, cos, sin)))


class MLP(nn.Module):
    """Gated feed-forward with fused gate and up projections (gate rows first)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, activation: str = "silu"):
        super().__init__()
        self.gate = kernels.GATES[activation]
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., H] -> [..., H] (+ residual)."""
        return linear(self.down, linear(self.gate_up, x, gated=self.gate), residual)


class Experts(SelfCounting):
    """A sparse feed-forward: a router in float32, and the top-k experts with their weights.

    `gate_up` and `down` are parameters, or packed linears (`weights.quantized.QuantLinear`) in their place.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, H, I = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down = nn.Parameter(torch.empty(E, H, I))
        self.per_token = config.num_experts_per_tok
        self.normalised = config.norm_topk_prob
        self.gate = kernels.GATES[config.activation]

    @property
    def is_packed(self) -> bool:
        """Whether the kernels hold the matrices of the experts."""
        return isinstance(self.gate_up, nn.Module)

    def logits(self, x: Tensor) -> Tensor:
        """x [M, H] -> the logits [M, E] of the router, whose softmax weighs the experts."""
        return self.router(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, H] -> expert weights [M, k] in x.dtype, expert ids [M, k]."""
        return kernels.choose_experts(self.logits(x), self.per_token, self.normalised)

    def routes(self, x: Tensor) -> Routes:
        """`route` for packed experts."""
        return kernels.route(self.logits(x), self.per_token, self.normalised)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `MLP.forward`."""
        rows, residual = (None if t is None else t.reshape(-1, x.shape[-1]) for t in (x, residual))
        return self.chosen(rows, rows, residual).view(x.shape)

    def chosen(self, x: Tensor, routed: Tensor, residual: Tensor | None) -> Tensor:
        """x [M, H] -> [M, H] (+ residual), by the experts that the router chooses for `routed` [M, H]."""
        if self.is_packed:
            return self.packed(x, self.routes(routed), residual)
        out = self.mixture(x, *self.route(routed))
        return out if residual is None else residual + out

    def packed(self, x: Tensor, routes: Routes, residual: Tensor | None, *biases: Any) -> Tensor:
        """`chosen` of packed experts. biases: what else `packed_experts` takes."""
        packed = self.gate_up.pack(x.dtype), self.down.pack(x.dtype)
        return kernels.packed_experts(x, routes, *packed, residual, self.gate, *biases)

    def mixture(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """The sum of the experts `index` [M, k] times `weight` [M, k], [M, H] -> [M, H]."""
        if index.numel() < self.router.out_features:
            return self.few(x, weight, index)
        out = torch.zeros_like(x)
        for e in range(self.router.out_features):  # with many rows, read every expert once
            share = (weight * (index == e)).sum(-1, keepdim=True)
            # An expert may overflow on rows that it was not chosen for. where() keeps its output out of those rows.
            out += torch.where(share > 0, self.expert(x, e) * share, 0)
        return out

    def few(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """`mixture` that reads only the experts in use, once for each row."""
        hidden = kernels.gate(torch.einsum("mkih,mh->mki", self.gate_up[index], x), self.gate)
        return (torch.einsum("mkhi,mki->mkh", self.down[index], hidden) * weight[..., None]).sum(1)

    def hidden(self, x: Tensor, e: int) -> Tensor:
        """x [M, H] -> what expert e's second matrix reads [M, I]."""
        return kernels.gate(F.linear(x, self.gate_up[e]), self.gate)

    def expert(self, x: Tensor, e: int) -> Tensor:
        """x [M, H] -> what expert e makes of it [M, H]."""
        return F.linear(self.hidden(x, e), self.down[e])

    def weight_bytes_read(self, nodes: int) -> float:
        """Expected bytes of the experts that `nodes` rows are routed to. The router is a module of its own."""
        touched = 1 - (1 - self.per_token / self.router.out_features) ** nodes
        return touched * sum(t.nbytes for t in self.parameters(recurse=False))


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)  # of what the MLP reads
        self.mlp = mlp

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor | Memory) -> Tensor:
        """x [B, T, H] -> [B, T, H]. kv: what this layer keeps, a cache [2, B, Hkv, S, hd] or a memory."""
        x = self.attention(self.input_norm(x), nodes, kv, x)
        return self.mlp(self.post_norm(x), x)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, *carried: Tensor) -> Tensor:
        """The same layer over a whole sequence, with gradients and without a cache. carried: by `Transformer.carry`."""
        return self.feed_forward(self.attend(x, cos, sin, *carried), *carried)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first half of `forward_train`."""
        return x + self.attention.forward_train(self.input_norm(x), cos, sin)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of `forward_train`."""
        return self.mlp(self.post_norm(x), x)


class RotaryTable(nn.Module):
    """cos and sin for positions 0..length-1, in float32 whatever the model's dtype, side by side for all rotations."""

    def __init__(self, ropes: Sequence[tuple[RopeConfig, int]], length: int):
        """ropes: the rotations, each with the size of a head."""
        super().__init__()
        self.ropes = ropes
        self.length = length
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def build(self, device: torch.device | str, length: int | None = None) -> None:
        """Fill the tables on `device`. `__init__` cannot do it, as it may run on the meta device."""
        self.length = length or self.length
        with torch.device("cpu"):
            positions, tables = torch.arange(self.length).float()[:, None], []
            for rope, head_dim in self.ropes:
                inv, scale = rope.frequencies(head_dim, self.length)
                tables.append((positions * inv, torch.where(inv > 0, scale, 1.0)))
            self.cos = torch.cat([angles.cos() * scale for angles, scale in tables], 1).to(device)
            self.sin = torch.cat([angles.sin() * scale for angles, scale in tables], 1).to(device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [...] -> cos, sin [..., hd / 2 of each rotation]. Rows that never count may be past the end."""
        flat = positions.clamp(max=self.length - 1)
        return self.cos[flat], self.sin[flat]


def plain_block(config: ModelConfig, layer: int) -> Block:
    """A layer of LLaMA, or with experts of Mixtral."""
    dense = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)
    return Block(config, Attention(config, layer), Experts(config) if config.num_local_experts else dense)


class Transformer(nn.Module):
    """The target: embedding, blocks, final norm, LM head. `layers.build` makes those of all families."""

    def __init__(self, config: ModelConfig, block: Callable[[ModelConfig, int], Block] = plain_block):
        """block: makes the layer of a number."""
        super().__init__()
        self.config = config
        self.quant: str | None = None  # how the weights are quantized, for reports; None: they are floats
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryTable(config.ropes, config.max_positions)
        self.kv_places = config.kv_places

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self.norm.weight.dtype

    def new_cache(self, batch_size: int, slots: int, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """A zeroed KV cache [L, 2, B, Hkv, S, hd] for each size of heads. The last slot takes every write past the end.

        With dtype torch.int8 the rows are quantized and hd + 4 bytes long (`kernels.quantize_rows`). ValueError if
        head_dim is not a multiple of 4 then.
        """
        caches, scale = [], kernels.KV_SCALE * (dtype == torch.int8)
        for (kv_heads, head_dim), layers in self.config.kv_layers.items():
            if dtype == torch.int8 and head_dim % 4:
                raise ValueError(f"--kv int8 needs a head_dim divisible by 4, not {head_dim}. Use --kv model.")
            shape = (len(layers), 2, batch_size, kv_heads, slots, head_dim + scale)
            caches.append(zeros(shape, dtype or self.dtype, self.device))
        return tuple(caches)

    def new_memory(self, _batch_size: int, _nodes: int = 1, _depth: int = 0) -> Memory | None:
        """What layers keep beside keys and values, for trees of so many nodes, root included, and that depth: nothing."""
        return None

    def nodes(
        self, n: Tensor, depth: Tensor, ancestors: Tensor, slots: int, segments: Tensor | None = None,
        chain: bool = False,
    ) -> Nodes:  # fmt: skip
        """Positions, slots and visibility of T nodes behind n [B] cached tokens.

        depth [B, T] int64; ancestors [B, T, T] bool, each node its own ancestor; slots: rows of the cache, or with
        segments of a sequence at most; segments, chain: as of `Nodes`.
        """
        rotary = Rotary(self.rotary.cos, self.rotary.sin)
        where = kernels.place_rows(n, depth, rotary, slots, 0, None, None, 0, segments)
        nodes = nodes_at(where, n, ancestors, max(self.config.windows))
        return nodes._replace(segments=segments, longest=slots, chain=chain)

    def forward(
        self, tokens: Tensor, nodes: Nodes, kv_cache: Sequence[Tensor], taps: tuple[int, ...] = (),
        layers: Callable | None = None, memory: Memory | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Forward on nodes, without a host sync. All shapes depend on B, T and S only.

        Args:
            tokens: int64 [B, T].
            nodes: from `self.nodes`.
            kv_cache: from `new_cache`, of one sequence with nodes.segments. It is written at nodes.slots.
            taps: layers whose *input* residual state to return (EAGLE-3), ascending. num_layers is after the last layer.
            layers: runs all layers instead of `run_layers`, with the same arguments but the last.
            memory: from `new_memory`. What the rows would add to it lies in `fresh` afterwards.

        Returns:
            hidden_states [B, T, H] after the final norm, which the LM head and EAGLE-1 read, and the tapped states
            [B, T, len(taps) * H] or None.
        """
        return (layers or Transformer.run_layers)(self, self.embed(tokens), nodes, kv_cache, taps, memory)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> what the first layer reads, [B, T, H]."""
        x = self.embed_tokens(tokens)
        return x if self.config.embedding_multiplier == 1 else x * self.config.embedding_multiplier

    def run_layers(
        self, x: Tensor, nodes: Nodes, kv_cache: Sequence[Tensor], taps: tuple[int, ...], memory: Memory | None = None,
        block: Callable | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """`forward` of the embeddings x [B, T, H]. block: runs a layer instead of its own `forward`."""
        tapped = []
        for i, (layer, own) in enumerate(zip(self.layers, self.kept(kv_cache, memory), strict=True)):
            tapped += [x] * taps.count(i)
            x = block(layer, x, nodes, own) if block else layer(x, nodes, own)
        tapped += [x] * taps.count(len(self.layers))
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def kept(self, kv_cache: Sequence[Tensor], _memory: Memory | None) -> list[Tensor]:
        """What each layer keeps: its part of a cache."""
        return [kv_cache[kind][place] for kind, place in self.kv_places.values()]

    def lm_head_bytes(self) -> float:
        """Weight bytes that the LM head reads."""
        return self.embed_tokens.weight.nbytes if self.lm_head is None else weight_bytes(self.lm_head)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., H] -> logits [..., V] in float32 (float64 stays)."""
        if self.lm_head is None or isinstance(self.lm_head, nn.Linear):
            out = self.narrow_logits(hidden_states)
            return out if out.dtype == torch.float64 else out.float()
        return self.scaled(self.lm_head.logits(hidden_states))  # a quantized one stores them so at once

    def narrow_logits(self, hidden_states: Tensor) -> Tensor:
        """`logits` in the dtype that the LM head computes in."""
        if self.lm_head is None:
            return self.scaled(F.linear(hidden_states, self.embed_tokens.weight))
        return self.scaled(self.lm_head(hidden_states))

    def scaled(self, logits: Tensor) -> Tensor:
        """What the LM head computes -> logits, multiplied and capped."""
        cap = self.config.logits_cap
        logits = logits if self.config.logits_multiplier == 1 else logits * self.config.logits_multiplier
        return logits if cap == 0 else cap * torch.tanh(logits / cap)

    def carry(self, _tokens: Tensor, _x: Tensor) -> tuple[Tensor, ...]:
        """What goes from layer to layer beside x, the embeddings of tokens [B, T], in `forward_train`: nothing."""
        return ()

    def forward_train(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] -> hidden_states and tapped states as in `forward`, with gradients and without a cache."""
        cos, sin = self.rotary(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.embed(tokens)
        carried = self.carry(tokens, x)
        tapped = []
        for i, block in enumerate(self.layers):
            tapped += [x] * taps.count(i)
            x = block.forward_train(x, cos, sin, *carried)
        tapped += [x] * taps.count(len(self.layers))
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def weight_bytes(self, nodes: int = 1) -> float:
        """Bytes of weights that one forward of `nodes` rows reads, of the embedding table only the rows it looks up."""
        return weight_bytes(self, nodes) + nodes * self.config.hidden_size * self.dtype.itemsize

    def kv_bytes(self, context: int, element_size: int | None = None) -> float:
        """Bytes of keys and values that one forward reads at `context` cached tokens."""
        return float(self.config.kv_values(context) * (element_size or self.dtype.itemsize))


def nodes_at(where: tuple[Tensor, ...], start: Tensor, visible: Tensor, window: int = 0) -> Nodes:
    """Nodes for T rows, placed by `kernels.place_rows`, that can see the cache region from slot `start` [B] on.

    visible [B, T, R] bool. window: of layers of a target or a draft model. The region rows must be the T queries then.
    """
    positions, slots, cos, sin, *_ = where
    near = visible & (positions[:, None, :] > positions[:, :, None] - window) if window else visible
    return Nodes(cos, sin, positions, slots, start, visible, near)


def window_mask(length: int, window: int, device: torch.device | str) -> Tensor:
    """Which of `length` tokens each may see: those up to itself, and with a window no others, bool [T, T]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - (window or length))


def chain_ancestors(batch_size: int, length: int, device: torch.device | str) -> Tensor:
    """The causal mask of T known tokens: a lower triangle, bool [B, T, T]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(batch_size, -1, -1)


def weight_bytes(module: nn.Module, nodes: int = 1) -> float:
    """Bytes of weights that a forward of `nodes` rows reads from `module`, of experts the expected share, and of
    embedding tables only the one that is a Transformer's tied LM head."""
    tied_head = module.embed_tokens if isinstance(module, Transformer) and module.lm_head is None else None
    total = 0.0
    for child in module.modules():
        if isinstance(child, SelfCounting):
            total += child.weight_bytes_read(nodes)
        elif child is tied_head or not isinstance(child, nn.Embedding):
            total += sum(p.numel() * p.element_size() for p in child.parameters(recurse=False))
    return total
