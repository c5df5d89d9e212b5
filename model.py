"""The target model: one Transformer for LLaMA, Qwen, Gemma, gpt-oss and others (`families.table.FAMILIES`).

It computes a *forward on nodes*. It gets tokens, their positions (the depth below the root), and who may see whom. A
prompt chunk is a chain of nodes, plain decoding is a single node, and a draft tree is a tree of nodes. The model does
not know which of them it computes. Siblings in a tree share a position, but every node has a cache slot of its own.

The model knows nothing of text, sampling, drafters, files, or what a tree means.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import kernels
from families.config import DeltaConfig, ModelConfig, RopeConfig
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


def linear(
    layer: nn.Module, x: Tensor, residual: Tensor | None = None, gated: int = 0, multiplier: float = 1.0
) -> Tensor:
    """layer(x), gated (`kernels.GATES`), times multiplier, + residual.

    Packed linears do all of it in the epilogue of their kernel. After an nn.Linear it is plain code.
    """
    if multiplier != 1:
        return residual + multiplier * linear(layer, x, None, gated)
    if not isinstance(layer, nn.Linear):
        return layer(x, residual, gated)
    return kernels.epilogue(layer(x), None, residual, gated)


class Attention(nn.Module):
    """Grouped-query attention with fused QKV over a static cache. `in_size` differs from hidden_size in EAGLE-3."""

    def __init__(self, config: ModelConfig, layer: int = 0, in_size: int | None = None):
        super().__init__()
        self.cap = config.attention_cap
        self.multiplier = config.residual_multiplier
        self.heads = config.num_attention_heads
        self.kv_heads, hd = config.heads_of(layer)
        self.head_dim = hd
        self.scale = config.attention_multiplier or 1 / math.sqrt(hd)
        self.growth, self.period = config.rope.query_growth, config.rope.original_max_positions
        self.window = config.windows[layer]
        self.first_angle = config.first_angle(layer)  # of those that stand side by side in cos and sin
        self.gated = config.output_gate  # the projection then begins with a gate for each query head
        self.shares = config.source(layer) != layer  # keys and values of another layer, in whose cache they lie
        self.keys_as_values = config.keys_as_values and not self.window
        self.value_norm = config.value_norm
        projected = 0 if self.shares else 1 if self.keys_as_values else 2
        qkv_heads = self.heads * (1 + self.gated) + projected * self.kv_heads
        self.qkv = nn.Linear(in_size or config.hidden_size, qkv_heads * hd, bias=config.qkv_bias)
        self.o = nn.Linear(self.heads * hd, config.hidden_size, bias=config.o_bias)
        self.sinks = nn.Parameter(torch.empty(self.heads)) if config.sinks else None
        self.wide_norm, self.late_norm = config.wide_qk_norm, config.late_qk_norm
        sizes = (self.heads * hd, self.kv_heads * hd) if self.wide_norm else (hd, hd)
        self.q_norm, self.k_norm = (RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None for size in sizes)
        self.k_norm = None if self.shares else self.k_norm

    def own_turn(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of this layer's rotation."""
        half = self.head_dim // 2
        if cos.shape[-1] == half:
            return cos, sin
        return cos.narrow(-1, self.first_angle, half), sin.narrow(-1, self.first_angle, half)

    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The weights of the norms of each head of queries and keys before they turn, and eps. No weights: no norms.

        A head is as long after its rotation as before. So norms behind the rotation divide before it, and their weights
        wait until `turned_queries`.
        """
        if self.q_norm is None or self.wide_norm:
            return None, None, 0.0
        weights = self.q_norm.weight, self.k_norm and self.k_norm.weight
        if self.late_norm:
            weights = (torch.ones_like(self.q_norm.weight),) * 2
        return *weights, self.q_norm.eps

    def turned_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [B, Hq, T, hd], rotated, times all factors that are behind the rotation. positions [B, T].

        Of late norms these are the weights of keys, too: only products of queries and keys matter.
        """
        if self.late_norm:
            q = q * (self.q_norm.weight * self.k_norm.weight)
        if self.growth:
            factors = 1 + self.growth * torch.log(1 + torch.floor(positions / self.period))
            q = q * factors[:, None, :, None].to(q.dtype)
        return q

    def all_heads(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [B, T, in] -> queries, keys and values [B, T, Hq + 2 Hkv, hd], normed if that is over all heads at once, and
        the gates [B, T, Hq hd] of what attention gives, if there are any. A layer that shares keys has queries alone."""
        qkv, gates = self.qkv(x), None
        if self.gated:
            size = self.heads * self.head_dim
            gates, qkv = qkv.split((size, qkv.shape[-1] - size), -1)
        if self.wide_norm:
            rows, kv_rows = self.q_norm.weight.numel(), self.k_norm.weight.numel()
            q, k, v = qkv.split((rows, kv_rows, kv_rows), -1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), -1)
        if self.keys_as_values and not self.shares:
            qkv = torch.cat((qkv, qkv[..., self.heads * self.head_dim :]), -1)
        return qkv.unflatten(-1, (-1, self.head_dim)), gates

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, in] -> rotated q [B, Hq, T, hd], rotated k and plain v [B, Hkv, T, hd], with gradients."""
        return self.turned(self.all_heads(x)[0], cos, sin)

    def turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`project` of heads [B, T, Hq + 2 Hkv, hd]."""
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 2)
        q_weight, k_weight, eps = self.head_norms()
        if q_weight is not None:
            q, k = kernels.rms_norm(q, q_weight, eps), kernels.rms_norm(k, k_weight, eps)
        if self.value_norm:
            v = kernels.rms_norm(v, v.new_ones(self.head_dim), self.q_norm.eps)
        cos, sin = self.own_turn(cos, sin)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, heads: Tensor, gates: Tensor | None, residual: Tensor | None, multiplier: float) -> Tensor:
        """What attention gives [B, T, Hq, hd], times the gates, -> [B, T, H], times multiplier (+ residual)."""
        out = heads.reshape(*heads.shape[:2], -1)
        out = out if gates is None else out * kernels.sigmoid(gates)
        return linear(self.o, out, residual, multiplier=multiplier)

    def write(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Write the keys and values of x [B, T, in] into slots [B, T] of kv, which is as of `forward`.

        Returns the rotated queries [B, Hq, T, hd], what `tree_attention` takes as `arrived`, and the gates as of
        `all_heads`.
        """
        gates = None
        turn = *self.own_turn(cos, sin), kv, slots, *self.head_norms(), self.value_norm, self.shares
        if isinstance(self.qkv, nn.Linear) or self.wide_norm or self.gated or self.keys_as_values:
            heads, gates = self.all_heads(x)
            q, arrived = kernels.rope_write_kv(heads, *turn)
        else:
            q, arrived = self.qkv.heads(x, self.head_dim, *turn)
        return q, arrived, gates

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [B, T, in] -> [B, T, H], with the residual added.

        kv [2, B, Hkv, S, hd], or [2, 1, Hkv, S, hd] with nodes.segments, is written at nodes.slots, then read. A layer
        that shares keys only reads it.
        """
        q, arrived, gates = self.write(x, nodes.cos, nodes.sin, nodes.slots, kv)
        q = self.turned_queries(q, nodes.positions)
        visible = nodes.visible_window if self.window else nodes.visible
        window = min(self.window, nodes.window) or max(self.window, nodes.window)  # 0 is no limit
        seen = nodes.start, visible, nodes.positions, window
        shape = self.scale, arrived, self.cap, self.sinks
        out = kernels.tree_attention(q, kv, *seen, *shape, nodes.segments, nodes.longest, nodes.chain, nodes.ring)
        return self.output(out, gates, residual, self.multiplier)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, shared: Tensor | None = None) -> Tensor:
        """The same attention over a whole sequence x [B, T, in], with gradients and without a cache.

        shared [B, T, 2 Hkv hd]: keys and values that several layers have. One writes them in place, the others read them.
        """
        B, T = x.shape[:2]
        heads, gates = self.all_heads(x)
        if self.shares:
            q = apply_rope(self.q_norm(heads), *self.own_turn(cos, sin)).transpose(1, 2)
            k, v = shared.view(B, T, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = self.turned(heads, cos, sin)
            if shared is not None and shared.numel():
                shared.copy_(torch.stack((k, v)).detach().permute(1, 3, 0, 2, 4).flatten(2))
        q = self.turned_queries(q, torch.arange(T, device=x.device)[None])
        mask = None
        if self.window or self.cap or self.sinks is not None:
            i = torch.arange(T, device=x.device)
            mask = (i[:, None] >= i) & (i > i[:, None] - (self.window or T))
        if self.cap or self.sinks is not None:
            mask = torch.where(mask, 0.0, -math.inf)
            out = kernels.shaped_attention(q, k, v, mask, self.scale, self.cap, self.sinks)
        else:
            how = {"attn_mask": mask, "is_causal": mask is None, "scale": self.scale, "enable_gqa": True}
            out = F.scaled_dot_product_attention(q, k, v, **how)
        return self.output(out.transpose(1, 2), gates, None, 1.0)


class DeltaNet(nn.Module):
    """A recurrent layer in place of attention: a short convolution, and the gated delta rule (`kernels.delta`)."""

    multiplier = 1.0  # of what a block adds, as of Attention

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.sizes = sizes = config.delta
        H, heads = config.hidden_size, sizes.value_heads
        self.qkvz = nn.Linear(H, sizes.channels + sizes.values, bias=False)  # z is the gate of the output
        self.ba = nn.Linear(H, 2 * heads, bias=False)  # how strongly a token writes, and how much the memory fades
        self.conv = nn.Parameter(torch.empty(sizes.channels, 1, sizes.kernel))
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps)
        self.out = nn.Linear(sizes.values, H, bias=False)

    def forward(self, x: Tensor, nodes: Nodes, layer: Memory, residual: Tensor | None = None) -> Tensor:
        """x [B, T, H] -> [B, T, H], with the residual added. layer: what this layer keeps; `fresh` gets the rows."""
        rows, z = self.projected(x)
        read = self.read(rows, z, layer, None if nodes.chain else nodes.walk)
        fresh = kernels.next_window(layer, rows, self.sizes.kernel - 1) if nodes.chain else rows
        layer.fresh[:, : fresh.shape[1]] = fresh
        return linear(self.out, read, residual)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> rows [B, T, R] as `kernels.delta_rule` takes them, and gates [B, T, Hv dv] of the output."""
        qkv, z = self.qkvz(x).split((self.sizes.channels, self.sizes.values), -1)
        return torch.cat((qkv, self.ba(x)), -1), z

    def read(self, rows: Tensor, z: Tensor, layer: Memory, walk: Tensor | None) -> Tensor:
        """What the rows read of the memory, normed and gated, [B, T, Hv dv]."""
        read = kernels.delta_rule(rows, self.conv, self.A_log, self.dt_bias, layer, walk)
        return kernels.gated_norm(read, z, self.norm.weight, self.norm.eps)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, _shared: Tensor | None = None) -> Tensor:
        """The same layer over a whole sequence x [B, T, H], from an empty memory. No gradients flow through it."""
        layer = next(iter(new_memory(self.sizes, 1, len(x), 0, 0, x.dtype, x.device).layers()))
        layer.keep.fill_(x.shape[1])
        rows, z = self.projected(x)
        quick = x.device.type == "cpu" and x.dtype == torch.float32 and not kernels.cpu_problem()
        with kernels.KernelBackend("cpu" if quick else "auto", x.device.type).active():
            read = self.read(rows, z, layer, None)
        return self.out(read)


class MLP(nn.Module):
    """Gated feed-forward with fused gate and up projections (gate rows first)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, multiplier: float = 1.0,
        activation: str = "silu",
    ):  # fmt: skip
        super().__init__()
        self.multiplier = multiplier
        self.gate = kernels.GATES[activation]
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., H] -> [..., H] (+ residual)."""
        hidden = linear(self.gate_up, x, gated=self.gate)
        return linear(self.down, hidden, residual, multiplier=self.multiplier)


class Experts(SelfCounting):
    """A sparse feed-forward: a router in float32, the top-k experts with their weights, and a shared expert.

    `gate_up` and `down` are parameters, or packed linears (`weights.quantized.QuantLinear`) in their place.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, H, I = config.num_local_experts, config.hidden_size, config.intermediate_size
        bias, shared = config.expert_bias, config.shared_intermediate_size
        self.router = nn.Linear(H, E, bias=bias)
        self.correction = nn.Parameter(torch.zeros(E)) if config.sigmoid_router else None
        self.factors = nn.Parameter(torch.ones(E)) if config.mlp_beside else None  # of the experts' weights
        self.multiplier = config.experts_multiplier
        self.gate_up = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down = nn.Parameter(torch.empty(E, H, I))
        self.gate_up_bias, self.down_bias = (nn.Parameter(torch.empty(E, n)) if bias else None for n in (2 * I, H))
        self.shared = MLP(H, shared) if shared else None
        self.shared_gate = nn.Linear(H, 1, bias=False) if shared and config.shared_gate else None
        self.per_token = config.num_experts_per_tok
        self.normalised = config.norm_topk_prob
        self.gate = kernels.GATES[config.activation]

    @property
    def is_packed(self) -> bool:
        """Whether the kernels hold the matrices of the experts."""
        return isinstance(self.gate_up, nn.Module)

    def logits(self, x: Tensor) -> Tensor:
        """x [M, H] -> the logits [M, E] of the router, whose softmax weighs the experts.

        Where a sigmoid weighs them and a correction is added for the choice, the others get -inf, and the chosen ones
        the logarithms of their sigmoids.
        """
        logits = self.router(x)
        if self.correction is None:
            return logits
        scores = logits.float().sigmoid() + self.correction
        others = scores.sort(dim=-1, descending=True, stable=True).indices[:, self.per_token :]
        return F.logsigmoid(logits).scatter(-1, others, -math.inf)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, H] -> expert weights [M, k] in x.dtype, expert ids [M, k]."""
        weight, index = kernels.choose_experts(self.logits(x), self.per_token, self.normalised)
        return self.weighed(weight, index), index

    def weighed(self, weights: Tensor, ids: Tensor) -> Tensor:
        """The weights of chosen experts, times the factors that a model has for them."""
        weights = weights if self.factors is None else weights * self.factors[ids]
        return weights if self.multiplier == 1 else weights * self.multiplier

    def forward(self, x: Tensor, residual: Tensor | None = None, routed: Tensor | None = None) -> Tensor:
        """As `MLP.forward`. routed [..., H]: what the router reads, if it is not x."""
        if self.shared is not None:
            added = self.shared(x)
            if self.shared_gate is not None:
                added = kernels.sigmoid(self.shared_gate(x)) * added
            residual = added if residual is None else residual + added
        rows, residual, routed = (None if t is None else t.reshape(-1, x.shape[-1]) for t in (x, residual, routed))
        routed = rows if routed is None else routed
        if self.is_packed:
            routes = kernels.route(self.logits(routed), self.per_token, self.normalised)
            routes = routes._replace(weights=self.weighed(routes.weights, routes.ids))
            packed = self.gate_up.pack(x.dtype), self.down.pack(x.dtype)
            biases = self.gate_up_bias, self.down_bias
            return kernels.packed_experts(rows, routes, *packed, residual, self.gate, biases).view(x.shape)
        out = self.mixture(rows, *self.route(routed))
        return (out if residual is None else residual + out).view(x.shape)

    def mixture(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """The sum of the experts `index` [M, k] times `weight` [M, k], [M, H] -> [M, H]."""
        # With few rows, read only the experts that the rows use.
        if index.numel() < self.router.out_features:
            up, down = (0 if b is None else b[index] for b in (self.gate_up_bias, self.down_bias))
            hidden = kernels.gate(torch.einsum("mkih,mh->mki", self.gate_up[index], x) + up, self.gate)
            rows = torch.einsum("mkhi,mki->mkh", self.down[index], hidden) + down
            return (rows * weight[..., None]).sum(1)
        # With many rows, read every expert once.
        out = torch.zeros_like(x)
        for e in range(self.router.out_features):
            share = (weight * (index == e)).sum(-1, keepdim=True)
            hidden, down = self.hidden(x, e), None if self.down_bias is None else self.down_bias[e]
            # An expert may overflow on rows that it was not chosen for. where() keeps its output out of those rows.
            out += torch.where(share > 0, F.linear(hidden, self.down[e], down) * share, 0)
        return out

    def hidden(self, x: Tensor, e: int) -> Tensor:
        """x [M, H] -> what expert e's second matrix reads [M, I]."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias[e]
        return kernels.gate(F.linear(x, self.gate_up[e], bias), self.gate)

    def weight_bytes_read(self, nodes: int) -> float:
        """Expected bytes of the experts that `nodes` rows are routed to. The router is a module of its own."""
        touched = 1 - (1 - self.per_token / self.router.out_features) ** nodes
        return touched * sum(t.nbytes for t in self.parameters(recurse=False))


def normed_by(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """norm(x), or x where there is no norm."""
    return x if norm is None else norm(x)


class Beside(nn.Module):
    """Experts beside an MLP that every token uses (Gemma 4). Both have norms of their own, and so has the router."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.dense = MLP(H, config.dense_size, activation=config.activation)
        self.experts = Experts(config)
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


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    There may be norms behind attention and MLP, too, or only there. Gemma 4 adds `TokenGate`, and scales what leaves.
    """

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()

        def norm(*places: str) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config.rms_norm_eps) if config.norms in places else None

        self.input_norm = norm("before", "both")
        if layer in config.recurrent:
            self.attention = DeltaNet(config)
        else:
            self.attention = Attention(config, layer)
        self.attention_norm = norm("after", "both")  # of what attention adds
        self.post_norm = norm("before", "both")  # of what the MLP reads
        if config.num_local_experts and layer >= config.dense_layers:
            self.mlp = Beside(config) if config.mlp_beside else Experts(config)
        else:
            how = config.mlp_bias, config.residual_multiplier, config.activation
            wide = config.wide_shared and config.source(layer) != layer
            size = config.dense_size if config.dense_layers else config.intermediate_size * (1 + wide)
            self.mlp = MLP(config.hidden_size, size, *how)
        self.mlp_norm = norm("after", "both")  # of what the MLP adds
        first = layer * config.token_inputs
        self.own_inputs, self.shared = slice(first, first + config.token_inputs), config.shared_columns(layer)
        self.token_gate = TokenGate(config) if config.token_inputs else None
        self.factor = nn.Parameter(torch.ones(1)) if config.layer_scale else None

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor | Memory) -> Tensor:
        """x [B, T, H] -> [B, T, H] through this layer's cache kv [2, B, Hkv, S, hd], or what a recurrent one keeps."""
        normed = normed_by(self.input_norm, x)
        if self.attention_norm is None:
            x = self.attention(normed, nodes, kv, x)
            return self.mlp(self.post_norm(x), x)
        x = x + self.attention_norm(self.attention(normed, nodes, kv))
        return self.behind_attention(x, nodes.token_inputs)

    def behind_attention(self, x: Tensor, token_inputs: Tensor | None) -> Tensor:
        """x [B, T, H] -> what leaves a layer with a norm behind its MLP. token_inputs [B, T, at least L size]: of all
        layers."""
        normed = normed_by(self.post_norm, x)
        x = x + self.mlp_norm(self.mlp(normed, x) if isinstance(self.mlp, Beside) else self.mlp(normed))
        if self.token_gate is not None:
            x = self.token_gate(x, token_inputs[..., self.own_inputs])
        return x if self.factor is None else x * self.factor

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, carried: Tensor | None = None) -> Tensor:
        """The same layer over a whole sequence, with gradients and without a cache. carried [B, T, config.carried]: what
        goes from layer to layer beside x. No gradients flow through it."""
        return self.feed_forward(self.attend(x, cos, sin, carried), carried)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, carried: Tensor | None) -> Tensor:
        """The first half of `forward_train`."""
        shared = None if carried is None else carried[..., self.shared]
        attended = self.attention.forward_train(normed_by(self.input_norm, x), cos, sin, shared)
        return x + self.attention.multiplier * normed_by(self.attention_norm, attended)

    def feed_forward(self, x: Tensor, carried: Tensor | None) -> Tensor:
        """The second half of `forward_train`."""
        return self.mlp(self.post_norm(x), x) if self.mlp_norm is None else self.behind_attention(x, carried)


class MtpLayer(nn.Module):
    """The layer for multi-token prediction that a checkpoint brings. `eagle_draft.MtpHead` drafts with it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm, self.feature_norm = RMSNorm(H, eps), RMSNorm(H, eps)
        self.fc = nn.Linear(2 * H, H, bias=False)  # of an embedding beside a feature
        self.layer = Block(config.plain_layer)
        self.norm = RMSNorm(H, eps)


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
        """positions int64 [...] -> cos, sin [..., hd / 2 of each rotation].

        A position past the table gets the table's last row. Only rows that never count have such positions.
        """
        flat = positions.clamp(max=self.length - 1)
        return self.cos[flat], self.sin[flat]


class Transformer(nn.Module):
    """The target: embedding, blocks, final norm, LM head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # How the weights are quantized, a text for reports such as "int4". None means float weights.
        self.quant: str | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_inputs = TokenInputs(config) if config.token_inputs else None
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MtpLayer(config) if config.mtp else None  # no part of a forward
        self.rotary = RotaryTable(config.ropes, config.max_positions)
        # the cache of each layer that has one, and its place there
        places = {i: (kind, layers.index(i)) for kind, layers in enumerate(config.kv_layers.values()) for i in layers}
        self.kv_places = {i: places.get(config.source(i)) for i in range(len(self.layers)) if i not in config.recurrent}

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

    def new_memory(self, batch_size: int, nodes: int = 1, depth: int = 0) -> Memory | None:
        """The empty memory of all recurrent layers, for trees of so many nodes, root included, and that depth. None for a
        model without such layers."""
        layers = len(self.config.recurrent)
        if not layers:
            return None
        return new_memory(self.config.delta, layers, batch_size, nodes, depth, self.dtype, self.device)

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
        walk = kernels.depth_first(ancestors) if self.config.recurrent and not chain else None
        return nodes._replace(segments=segments, longest=slots, chain=chain, walk=walk)

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
        x = self.embed(tokens)
        if self.token_inputs is not None:
            nodes = nodes._replace(token_inputs=self.token_inputs(tokens, x))
        return (layers or Transformer.run_layers)(self, x, nodes, kv_cache, taps, memory)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> what the first layer reads, [B, T, H]."""
        x = self.embed_tokens(tokens)
        return x if self.config.embedding_multiplier == 1 else x * self.config.embedding_multiplier

    def run_layers(
        self, x: Tensor, nodes: Nodes, kv_cache: Sequence[Tensor], taps: tuple[int, ...], memory: Memory | None = None,
        block: Callable | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """`forward` of the embeddings x [B, T, H]. block: runs a layer instead of its own `forward`."""
        tapped, memories = [], memory.layers() if memory else iter(())
        for i, layer in enumerate(self.layers):
            tapped += [x] * taps.count(i)
            kind, place = self.kv_places.get(i, (0, 0))
            own = next(memories) if isinstance(layer.attention, DeltaNet) else kv_cache[kind][place]
            x = block(layer, x, nodes, own) if block else layer(x, nodes, own)
        tapped += [x] * taps.count(len(self.layers))
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

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

    def carry(self, tokens: Tensor, x: Tensor) -> Tensor:
        """What goes from layer to layer beside x, the embeddings of tokens [B, T], as the first one takes it: [B, T,
        config.carried]."""
        carried = x.new_zeros(*tokens.shape, self.config.carried)
        if self.token_inputs is not None:
            own = self.token_inputs(tokens, x.detach())
            carried[..., : own.shape[-1]] = own.detach()
        return carried

    def forward_train(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] -> hidden_states and tapped states as in `forward`, with gradients and without a cache."""
        cos, sin = self.rotary(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.embed(tokens)
        carried = self.carry(tokens, x)
        tapped = []
        for i, block in enumerate(self.layers):
            tapped += [x] * taps.count(i)
            x = block.forward_train(x, cos, sin, carried)
        tapped += [x] * taps.count(len(self.layers))
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def weight_bytes(self, nodes: int = 1) -> float:
        """Bytes of weights that one forward of `nodes` rows reads, of the embedding table only the rows it looks up."""
        row = (self.config.hidden_size + self.config.token_inputs * len(self.layers)) * self.dtype.itemsize
        others = 0.0 if self.mtp is None else weight_bytes(self.mtp, nodes)
        return weight_bytes(self, nodes) - others + nodes * row

    def kv_bytes(self, context: int, element_size: int | None = None) -> float:
        """Bytes of keys and values that one forward reads at `context` cached tokens."""
        c = self.config
        element_size = element_size or self.dtype.itemsize
        layers = ((*c.heads_of(i), window) for i, window in enumerate(c.windows) if i not in c.recurrent)
        values = sum(2 * kv_heads * head_dim * min(context, window or context) for kv_heads, head_dim, window in layers)
        return float(values * element_size)


def new_memory(
    sizes: DeltaConfig, layers: int, batch_size: int, nodes: int, depth: int, dtype: torch.dtype, device: torch.device,
) -> Memory:  # fmt: skip
    """The empty memory of so many recurrent layers."""
    wide, K = torch.promote_types(dtype, torch.float32), sizes.kernel
    row = sizes.channels + 2 * sizes.value_heads
    state = zeros((batch_size, layers, sizes.value_heads, sizes.key_dim, sizes.value_dim), wide, device)
    path, fresh = (zeros((batch_size, layers, n, row), dtype, device) for n in (K + depth, max(nodes, K - 1)))
    counts = [torch.zeros(batch_size, dtype=d, device=device) for d in (torch.int64, torch.bool, torch.int64)]
    return Memory(state, path, fresh, *counts)


def nodes_at(where: tuple[Tensor, ...], start: Tensor, visible: Tensor, window: int = 0) -> Nodes:
    """Nodes for T rows, placed by `kernels.place_rows`, that can see the cache region from slot `start` [B] on.

    visible [B, T, R] bool. With a window the region rows must be the T queries themselves. The target keeps to that, and
    drafters have no window in their trees.
    """
    positions, slots, cos, sin, *_ = where
    visible_window = visible
    if window:
        visible_window = visible & (positions[:, None, :] > positions[:, :, None] - window)
    return Nodes(cos, sin, positions, slots, start, visible, visible_window)


def chain_ancestors(batch_size: int, length: int, device: torch.device | str) -> Tensor:
    """The causal mask of T known tokens: a lower triangle, bool [B, T, T]."""
    lower = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return lower.expand(batch_size, -1, -1)


def weight_bytes(module: nn.Module, nodes: int = 1) -> float:
    """Bytes of weights that a forward of `nodes` rows reads from `module`, of experts the expected share.

    Embedding tables do not count, except the one that is a Transformer's tied LM head.
    """
    tied_head = module.embed_tokens if isinstance(module, Transformer) and module.lm_head is None else None
    total = 0.0
    for child in module.modules():
        if isinstance(child, SelfCounting):
            total += child.weight_bytes_read(nodes)
        elif child is tied_head or not isinstance(child, nn.Embedding):
            total += sum(p.numel() * p.element_size() for p in child.parameters(recurse=False))
    return total
