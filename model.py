"""The target model: one Transformer for LLaMA 1/2/3.x, Vicuna, CodeLlama, Mistral, Mixtral, Qwen2/2.5 and Qwen3.

It computes a *forward on nodes*: tokens, where they stand (depth below the root), and who may see whom. A prompt
chunk is a chain of nodes, plain decoding is one node, a draft tree is a draft tree; the model does not know which.
Positions and cache slots differ: siblings share a position, never a slot.

It does not know text, sampling, what trees mean, drafters, or files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import kernels

FAMILIES = {
    # model_type: (defaults of the family where config.json is silent)
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling. `kind` is one of ROPE_TYPES (transformers' `rope_type`)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Inverse frequencies [head_dim / 2] (float32) and the factor on cos/sin. Source: transformers' rope types."""
        inv = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        if self.kind == "linear":
            return inv / self.factor, 1.0
        if self.kind == "llama3":
            wavelength = 2 * math.pi / inv
            low, high = (
                self.original_max_positions / f for f in (self.low_freq_factor, self.high_freq_factor)
            )
            smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            blend = (1 - smooth) * inv / self.factor + smooth * inv
            scaled = torch.where(wavelength > low, inv / self.factor, blend)
            return torch.where(wavelength < high, inv, scaled), 1.0
        if self.kind == "yarn":
            return self._yarn(inv, head_dim)
        return inv, 1.0

    def _yarn(self, inv: Tensor, head_dim: int) -> tuple[Tensor, float]:
        def dimension(rotations: float) -> float:
            turns = self.original_max_positions / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0, 1)

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        attention = self.attention_factor
        if attention is None:
            both = self.mscale and self.mscale_all_dim
            attention = mscale(self.mscale) / mscale(self.mscale_all_dim) if both else mscale(1.0)
        return inv / self.factor * (1 - keep) + inv * keep, attention


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of a target model. Names are Hugging Face's; `windows[i]` is layer i's attention window, 0 = full."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_hidden_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"config.json: head_dim {self.head_dim} is odd; rotary embedding needs an even size."
            )

    @property
    def max_positions(self) -> int:
        """Longest usable context. `dynamic` RoPE is served up to its original length only: past it the base would
        change under keys that are already cached."""
        if self.rope.kind == "dynamic" and self.rope.original_max_positions:
            return min(self.max_position_embeddings, self.rope.original_max_positions)
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a Hugging Face config.json (transformers 4 and 5 spellings) strictly.

        Raises ValueError naming the key for anything missing, mistyped, out of range or not implemented.
        """
        read = ConfigReader(config, where)
        family = read.text("model_type", None, tuple(FAMILIES))
        defaults = FAMILIES[family]
        kinds = config.get("architectures") or ["ForCausalLM"]
        if not isinstance(kinds, list) or not any(str(kind).endswith("ForCausalLM") for kind in kinds):
            raise ValueError(f"{where}: architectures = {kinds!r} holds no *ForCausalLM model.")
        read.text("hidden_act", "silu", ("silu", "swish"))
        for key, neutral in (("partial_rotary_factor", 1.0), ("pretraining_tp", 1)):
            if config.get(key, neutral) not in (neutral, None):
                raise ValueError(f"{where}: {key} = {config[key]!r} is not implemented (only {neutral}).")
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        layers = read.integer("num_hidden_layers", high=1000)
        if defaults.get("head_dim") is None and hidden % heads and config.get("head_dim") is None:
            raise ValueError(
                f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}."
            )
        positions = read.integer("max_position_embeddings", 2048, high=2**24)
        experts = read.integer("num_local_experts", 8) if family == "mixtral" else 0
        per_token = read.integer("num_experts_per_tok", 2) if family == "mixtral" else 0
        if per_token > experts:
            raise ValueError(f"{where}: num_experts_per_tok {per_token} exceeds num_local_experts {experts}.")
        bias = read.boolean("attention_bias", False) if family in ("llama", "qwen3") else family == "qwen2"
        eos = config.get("eos_token_id")
        return cls(
            model_type=family,
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=read.integer(
                "num_key_value_heads", defaults.get("num_key_value_heads", heads)
            ),
            head_dim=read.integer("head_dim", defaults.get("head_dim", hidden // heads)),
            vocab_size=read.integer("vocab_size", high=10_000_000),
            max_position_embeddings=positions,
            rms_norm_eps=read.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6), 0.0, 1.0),
            rope=_read_rope(config, where, defaults.get("rope_theta", 10000.0), positions),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            qkv_bias=bias,
            o_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=read.boolean("mlp_bias", False) if family == "llama" else False,
            qk_norm=family == "qwen3",
            windows=_read_windows(config, read, family, layers),
            num_local_experts=experts,
            num_experts_per_tok=per_token,
            dtype=read.text("dtype" if "dtype" in config else "torch_dtype", "float32", tuple(DTYPES)),
            bos_token_id=config.get("bos_token_id") if isinstance(config.get("bos_token_id"), int) else None,
            eos_token_ids=tuple(e for e in (eos if isinstance(eos, list) else [eos]) if isinstance(e, int)),
        )


class ConfigReader:
    """Typed reads from a JSON object: a wrong type or range is a ValueError that names key and file."""

    def __init__(self, config: dict[str, Any], where: str):
        if not isinstance(config, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(config).__name__}.")
        self.config, self.where = config, where

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"{self.where}: required key {key!r} is missing.")
            return default
        return value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{self.where}: {key} = {value!r}, expected an integer in [{low}, {high}].")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{self.where}: {key} = {value!r}, expected a number in [{low}, {high}].")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} = {value!r}, expected true or false.")
        return value

    def text(self, key: str, default: str | None, allowed: tuple[str, ...]) -> str:
        value = self._value(key, default)
        if value not in allowed:
            raise ValueError(
                f"{self.where}: {key} = {value!r} is not supported; supported: {', '.join(allowed)}."
            )
        return value


def _read_rope(config: dict[str, Any], where: str, default_theta: float, max_positions: int) -> RopeConfig:
    """transformers 4 (`rope_theta` + `rope_scaling`) and 5 (`rope_parameters`) spellings."""
    flat = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(flat, dict):
        raise ValueError(f"{where}: rope_scaling / rope_parameters must be an object, found {flat!r}.")
    if any(isinstance(v, dict) for v in flat.values()):
        raise ValueError(f"{where}: rope_parameters per layer type are not implemented: {sorted(flat)}.")
    read = ConfigReader({**flat, "rope_type": flat.get("rope_type") or flat.get("type") or "default"}, where)
    kind = read.text("rope_type", "default", ROPE_TYPES)
    theta_from = flat if flat.get("rope_theta") is not None else config
    theta = ConfigReader(theta_from, where).number("rope_theta", default_theta, 1.01)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = flat.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind == "llama3" and original is None:
        raise ValueError(f"{where}: rope type llama3 needs original_max_position_embeddings.")
    original = {"original_max_position_embeddings": original}
    original = ConfigReader(original, where).integer(
        "original_max_position_embeddings", max_positions, high=2**24
    )
    llama3 = kind == "llama3"
    scaling = RopeConfig(
        theta=theta,
        kind=kind,
        factor=read.number("factor", None, 1.0, 1e6),
        low_freq_factor=read.number("low_freq_factor", None if llama3 else 1.0, 1e-6, 1e6),
        high_freq_factor=read.number("high_freq_factor", None if llama3 else 4.0, 1e-6, 1e6),
        original_max_positions=original,
        beta_fast=read.number("beta_fast", 32.0, 1e-6, 1e6),
        beta_slow=read.number("beta_slow", 1.0, 1e-6, 1e6),
        mscale=read.number("mscale", 0.0, 0.0, 1e6),
        mscale_all_dim=read.number("mscale_all_dim", 0.0, 0.0, 1e6),
        truncate=read.boolean("truncate", True),
    )
    if llama3 and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError(f"{where}: high_freq_factor must exceed low_freq_factor for rope type llama3.")
    if flat.get("attention_factor") is not None:
        return replace(scaling, attention_factor=read.number("attention_factor", None, 0.0, 1e6))
    return scaling


def _read_windows(config: dict[str, Any], read: ConfigReader, family: str, layers: int) -> tuple[int, ...]:
    """Attention window per layer: the flag counts, not the number (Qwen ships a window that is switched off)."""
    if config.get("sliding_window") is None or family == "llama":
        return (0,) * layers
    window = read.integer("sliding_window")
    if family in ("mistral", "mixtral"):
        return (window,) * layers
    if not read.boolean("use_sliding_window", False):
        return (0,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = read.integer("max_window_layers", 28, low=0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise ValueError(
            f"{read.where}: layer_types must name full_attention or sliding_attention for each layer."
        )
    return tuple(window if k == "sliding_attention" else 0 for k in kinds)


class Nodes(NamedTuple):
    """What one forward shares among its layers. Built once per forward by `Transformer.nodes`."""

    cos: Tensor  # [B, T, hd / 2] float32
    sin: Tensor
    positions: Tensor  # [B, T] int64
    slots: Tensor  # [B, T] int64, where the rows' keys and values go
    start: Tensor  # [B] int64, first slot of the region
    visible: Tensor  # [B, T, R] bool: row t may see region row r
    visible_window: Tensor  # the same under the sliding window (the same tensor if the model has none)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis (`kernels.rms_norm`)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, heads, hd] by half-rotation (dimension i pairs with i + hd/2); cos, sin [B, T, hd/2] float32."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def linear(layer: nn.Module, x: Tensor, residual: Tensor | None = None, gated: bool = False) -> Tensor:
    """layer(x), then SiLU(first half) * second half if gated, then + residual. Quantized linears do it in their kernel's
    epilogue; after nn.Linear (cuBLAS has no such epilogue) it is plain code, which Inductor makes one kernel of."""
    if isinstance(layer, nn.Linear):
        return kernels.epilogue(layer(x), None, residual, gated)
    return layer(x, residual, gated)


class Attention(nn.Module):
    """Grouped-query attention with fused QKV over a static cache. `in_size` differs from hidden_size in EAGLE-3."""

    def __init__(self, config: ModelConfig, window: int = 0, in_size: int | None = None):
        super().__init__()
        nq, nkv, hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim, self.window = nq, nkv, hd, window
        self.qkv = nn.Linear(in_size or config.hidden_size, (nq + 2 * nkv) * hd, bias=config.qkv_bias)
        self.o = nn.Linear(nq * hd, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, in] -> rotated q [B, Hq, T, hd], rotated k and plain v [B, Hkv, T, hd]."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [B, T, in]; kv [2, B, Hkv, S, hd] is written at nodes.slots, then read. Returns [B, T, H] (+ residual)."""
        B, T, _ = x.shape
        norms = () if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv(x).view(B, T, -1, self.head_dim)
        q = kernels.rope_write_kv(qkv, nodes.cos, nodes.sin, kv, nodes.slots, *norms)
        visible = nodes.visible_window if self.window else nodes.visible
        out = kernels.tree_attention(
            q, kv, nodes.start, visible, nodes.positions, self.window, 1 / math.sqrt(self.head_dim)
        )
        return linear(self.o, out.transpose(1, 2).reshape(B, T, -1), residual)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same attention over a whole sequence, with gradients and without a cache (causal, or `mask`)."""
        B, T, _ = x.shape
        q, k, v = self.project(x, cos, sin)
        if mask is None and self.window:
            i = torch.arange(T, device=x.device)
            mask = (i[:, None] >= i) & (i > i[:, None] - self.window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward with fused gate and up projections (gate rows first)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., H] -> [..., H] (+ residual)."""
        return linear(self.down, linear(self.gate_up, x, gated=True), residual)


class Experts(nn.Module):
    """Mixtral's sparse feed-forward: softmax router in float32, top-k experts, weights renormalised (eagle.md 8.5)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, H, I = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down = nn.Parameter(torch.empty(E, H, I))
        self.per_token = config.num_experts_per_tok

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, H] -> expert weights [M, k] in x.dtype, expert ids [M, k]."""
        weight, index = self.router(x).softmax(-1, dtype=torch.float32).topk(self.per_token, -1)
        return (weight / weight.sum(-1, keepdim=True)).to(x.dtype), index

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.mixture(x)  # experts end in a weighted sum, so the residual is an addition of its own
        return out if residual is None else residual + out

    def mixture(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weight, index = self.route(x)
        if index.numel() < self.router.out_features:  # few rows: read only the experts they use
            gate, up = torch.einsum("mkih,mh->mki", self.gate_up[index], x).chunk(2, -1)
            rows = torch.einsum("mkhi,mki->mkh", self.down[index], F.silu(gate) * up)
            return (rows * weight[..., None]).sum(1).view(shape)
        out = torch.zeros_like(x)
        for e in range(self.router.out_features):  # many rows: every expert is read once
            share = (weight * (index == e)).sum(-1, keepdim=True)
            gate, up = F.linear(x, self.gate_up[e]).chunk(2, -1)
            # where() keeps an expert that overflows on rows it was not chosen for out of those rows
            out += torch.where(share > 0, F.linear(F.silu(gate) * up, self.down[e]) * share, 0)
        return out.view(shape)


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, window: int = 0):
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, window)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = not config.num_local_experts
        self.mlp = (
            MLP(config.hidden_size, config.intermediate_size, config.mlp_bias) if dense else Experts(config)
        )

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        x = self.attention(self.input_norm(x), nodes, kv, x)
        return self.mlp(self.post_norm(x), x)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention.forward_train(self.input_norm(x), cos, sin)
        return self.mlp(self.post_norm(x), x)


class RotaryTable(nn.Module):
    """cos and sin for positions 0..length-1, gathered by position; float32 whatever the model's dtype."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int):
        super().__init__()
        self.rope, self.head_dim, self.length = rope, head_dim, length
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def build(self, device: torch.device | str, length: int | None = None) -> None:
        """Fill the tables on `device` (separate from __init__, which may run on the meta device)."""
        self.length = length or self.length
        with torch.device("cpu"):
            inv, scale = self.rope.frequencies(self.head_dim)
            angles = torch.arange(self.length).float()[:, None] * inv
            self.cos, self.sin = (t.to(device) for t in (angles.cos() * scale, angles.sin() * scale))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [...] -> cos, sin [..., hd / 2]; past the table: its last row (such rows never count)."""
        flat = positions.clamp(max=self.length - 1)
        return self.cos[flat], self.sin[flat]


class Transformer(nn.Module):
    """The target: embedding, blocks, final norm, LM head. Text, sampling and drafting are other files' business."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.max_positions)
        self.quant: str | None = None  # how the weights are quantized, for reports; who loads them says so
        self.run_block = Block.__call__  # the engine may put a compiled function with the same signature here

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def new_cache(self, batch_size: int, slots: int, dtype: torch.dtype | None = None) -> Tensor:
        """A zeroed KV cache [L, 2, B, Hkv, S, hd]; the last slot takes every write past the end. torch.int8: rows are
        quantized and hd + 4 bytes long (`kernels.quantize_rows`); ValueError if hd is no multiple of 4."""
        c = self.config
        if dtype == torch.int8 and c.head_dim % 4:
            raise ValueError(f"--kv int8 needs a head_dim divisible by 4, not {c.head_dim}; use --kv model.")
        row = c.head_dim + kernels.KV_SCALE * (dtype == torch.int8)
        shape = (c.num_hidden_layers, 2, batch_size, c.num_key_value_heads, slots, row)
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def nodes(self, n: Tensor, depth: Tensor, ancestors: Tensor, slots: int) -> Nodes:
        """Positions, slots and visibility of T nodes at n [B]: depth [B, T], ancestors [B, T, T] bool incl. self."""
        return make_nodes(self.rotary, n, n[:, None] + depth, n, ancestors, slots, max(self.config.windows))

    def forward(
        self, tokens: Tensor, nodes: Nodes, kv_cache: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Forward on nodes.

        Args:
            tokens: int64 [B, T].
            nodes: from `self.nodes`.
            kv_cache: [L, 2, B, Hkv, S, hd]; rows are written at nodes.slots.
            taps: layers whose *input* residual state to return (EAGLE-3), ascending; num_layers = after the last.

        Returns:
            hidden_states [B, T, H] after the final norm (what the LM head and EAGLE-1 read), and the tapped states
            [B, T, len(taps) * H] or None. No host sync, shapes depend on B, T and S only.
        """
        x, tapped = self.embed_tokens(tokens), []
        for i, block in enumerate(self.layers):
            tapped += [x] * taps.count(i)
            x = self.run_block(block, x, nodes, kv_cache[i])
        tapped += [x] * taps.count(len(self.layers))
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., H] -> logits [..., V] in float32 (float64 stays)."""
        if self.lm_head is None:
            out = F.linear(hidden_states, self.embed_tokens.weight)
        else:
            out = self.lm_head(hidden_states)
        return out if out.dtype == torch.float64 else out.float()

    def forward_train(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] -> hidden_states and tapped states as in `forward`, with gradients and without a cache."""
        cos, sin = self.rotary(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x, tapped = self.embed_tokens(tokens), []
        for i, block in enumerate(self.layers):
            tapped += [x] * taps.count(i)
            x = block.forward_train(x, cos, sin)
        tapped += [x] * taps.count(len(self.layers))
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def weight_bytes(self, nodes: int = 1) -> float:
        """Bytes of weights one forward of `nodes` rows reads (embedding rows, not the table; expected experts)."""
        return (
            weight_bytes(self, nodes)
            + nodes * self.config.hidden_size * self.embed_tokens.weight.element_size()
        )

    def kv_bytes(self, context: int, element_size: int | None = None) -> float:
        """Bytes of keys and values one forward reads at `context` cached tokens."""
        c = self.config
        row = (
            2 * c.num_key_value_heads * c.head_dim * (element_size or self.embed_tokens.weight.element_size())
        )
        return float(sum(min(context, w or context) for w in c.windows) * row)

    def flops(self, nodes: int, context: int) -> float:
        """Multiply-adds x 2 of one forward of `nodes` rows at `context` cached tokens."""
        c = self.config
        experts = c.num_experts_per_tok or 1
        per_layer = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
        per_layer += experts * 3 * c.hidden_size * c.intermediate_size + c.hidden_size * c.num_local_experts
        linear = 2 * nodes * (c.num_hidden_layers * per_layer + c.vocab_size * c.hidden_size)
        seen = sum(min(context + nodes, w or context + nodes) for w in c.windows)
        return float(linear + 4 * nodes * seen * c.num_attention_heads * c.head_dim)


def make_nodes(
    rotary: RotaryTable,
    start: Tensor,
    positions: Tensor,
    first_slot: Tensor,
    ancestors: Tensor,
    slots: int,
    window: int = 0,
) -> Nodes:
    """Nodes whose rows go to slots first_slot + 0..T-1 of a cache with `slots` rows and see the region from `start`.

    positions [B, T]; ancestors [B, T, R] bool. With a window the last T region rows are taken to be the queries
    themselves (true for the target; drafters have no window).
    """
    rows = torch.arange(positions.shape[1], device=positions.device)
    windowed = ancestors
    if window:
        windowed = ancestors & (positions[:, None, :] > positions[:, :, None] - window)
    cos, sin = rotary(positions)
    where = (first_slot[:, None] + rows).clamp(max=slots - 1)
    return Nodes(cos, sin, positions, where, start, ancestors, windowed)


def chain_ancestors(batch_size: int, length: int, device: torch.device | str) -> Tensor:
    """Who sees whom in a chain of known tokens: lower triangle, bool [B, T, T]."""
    lower = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return lower.expand(batch_size, -1, -1)


def weight_bytes(module: nn.Module, nodes: int = 1) -> float:
    """Bytes of weights a forward of `nodes` rows reads from `module`, without embedding tables, experts in expectation.

    A tied LM head counts (it is read); quantized modules report themselves through `weight_bytes_read(nodes)`.
    """
    total = 0.0
    for child in module.modules():
        if hasattr(child, "weight_bytes_read"):
            total += child.weight_bytes_read(nodes)
        elif isinstance(child, Experts):
            E, k = child.router.out_features, child.per_token
            touched = E * (1 - (1 - k / E) ** nodes) / E
            total += touched * sum(t.numel() * t.element_size() for t in (child.gate_up, child.down))
        elif isinstance(child, nn.Embedding):
            tied = isinstance(module, Transformer) and module.lm_head is None and child is module.embed_tokens
            total += child.weight.numel() * child.weight.element_size() if tied else 0
        else:
            total += sum(p.numel() * p.element_size() for p in child.parameters(recurse=False))
    return total
