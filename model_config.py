"""The geometry of a model, and the strict reading of a Hugging Face config.json into it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from support.reader import ConfigReader

# Supported values of `model_type`, each with the family's defaults for keys that config.json leaves out.
FAMILIES: dict[str, dict[str, Any]] = {
    "granite": {},
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2e6},
}
# Families whose queries, keys and values always have a bias, or never. Of the others config.json says it.
QKV_BIAS = {"qwen2": True, "mistral": False, "mixtral": False, "phi3": False}
MLP_BIAS = ("granite", "llama", "seed_oss", "smollm3")  # families whose config.json may ask for one
# Families with experts: how many there are, and how many each token uses, where config.json leaves them out.
EXPERTS = {"mixtral": (8, 2), "qwen3_moe": (128, 8)}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary position embedding. `kind` is one of ROPE_TYPES (transformers' `rope_type`)."""

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
        """Inverse frequencies [head_dim / 2] in float32, and the factor for cos and sin, as transformers computes them.

        `dynamic` scaling gets the unscaled frequencies: `ModelConfig.max_positions` ends where its scaling would begin.
        """
        inv = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        if self.kind == "linear":
            return inv / self.factor, 1.0
        if self.kind == "llama3":
            return self._llama3(inv), 1.0
        if self.kind == "yarn":
            return self._yarn(inv, head_dim)
        return inv, 1.0

    def _llama3(self, inv: Tensor) -> Tensor:
        """Scales long wavelengths by `factor`, keeps short ones, and blends the two in between."""
        rotations = self.original_max_positions / (2 * math.pi / inv)
        keep = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * inv / self.factor + keep * inv

    def _yarn(self, inv: Tensor, head_dim: int) -> tuple[Tensor, float]:
        """Keeps the dimensions that rotate often, scales those that rotate rarely, with a linear ramp in between."""

        def dimension(rotations: float) -> float:
            turns = self.original_max_positions / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        keep = 1 - ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
        both = self.mscale and self.mscale_all_dim
        scale = mscale(self.mscale) / mscale(self.mscale_all_dim) if both else mscale(1.0)
        attention_factor = scale if self.attention_factor is None else self.attention_factor
        return inv / self.factor * (1 - keep) + inv * keep, attention_factor


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of a model. The names are Hugging Face's. `windows[i]` is the attention window of layer i, 0 if full."""

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
    unrotated: tuple[int, ...] = ()  # the layers without rotary positions
    attention_multiplier: float = 0.0  # of the products of queries and keys; 0: 1 / sqrt(head_dim)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a block adds to its input
    logits_multiplier: float = 1.0
    num_local_experts: int = 0  # each is intermediate_size wide
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True  # whether the weights of a token's experts are scaled to a sum of 1
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
            raise ValueError(f"config.json: head_dim is {self.head_dim}, but RoPE needs an even size.")

    @property
    def max_positions(self) -> int:
        """The longest usable context.

        `dynamic` RoPE is served up to its original length only, because a longer context would change the base of
        keys that are already cached.
        """
        if self.rope.kind == "dynamic" and self.rope.original_max_positions:
            return min(self.max_position_embeddings, self.rope.original_max_positions)
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a Hugging Face config.json, in the spelling of transformers 4 or 5.

        Raises ValueError that names the key for anything missing, mistyped, out of range or not implemented.
        """
        read = ConfigReader(config, where)
        family = read.text("model_type", None, tuple(FAMILIES))
        defaults = FAMILIES[family]
        _refuse_unknown_architecture(read)
        hidden = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        kv_heads = defaults.get("num_key_value_heads", heads)
        layers = read.integer("num_hidden_layers", high=1000)
        if defaults.get("head_dim") is None and hidden % heads and config.get("head_dim") is None:
            raise read.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
        positions = read.integer("max_position_embeddings", 2048, high=2**24)
        experts, per_token = EXPERTS.get(family, (0, 0))
        if experts:
            experts = read.integer("num_experts" if "num_experts" in config else "num_local_experts", experts)
            per_token = read.integer("num_experts_per_tok", per_token)
        if per_token > experts:
            raise read.error(f"num_experts_per_tok {per_token} exceeds num_local_experts {experts}.")
        bias = QKV_BIAS.get(family)
        bias = read.boolean("attention_bias", family == "seed_oss") if bias is None else bias
        multiplied = {}
        if family == "granite":
            names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
            multiplied = {name: read.number(name, 1.0, 1e-6, 1e6) for name in names}
            multiplied["logits_multiplier"] = 1 / read.number("logits_scaling", 1.0, 1e-6, 1e6)
        bos = config.get("bos_token_id")
        eos = config.get("eos_token_id")
        return cls(
            model_type=family,
            hidden_size=hidden,
            intermediate_size=read.integer("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads", kv_heads),
            head_dim=read.integer("head_dim", defaults.get("head_dim", hidden // heads)),
            vocab_size=read.integer("vocab_size", high=10_000_000),
            max_position_embeddings=positions,
            rms_norm_eps=read.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6), 0.0, 1.0),
            rope=_read_rope(read, defaults.get("rope_theta", 10000.0), positions),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            qkv_bias=bias,
            o_bias=read.boolean("attention_out_bias", False) if family == "seed_oss" else bias and family != "qwen2",
            mlp_bias=family in MLP_BIAS and read.boolean("mlp_bias", False),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            windows=_read_windows(read, family, layers),
            unrotated=_read_unrotated(read, layers) if family == "smollm3" else (),
            **multiplied,
            num_local_experts=experts,
            num_experts_per_tok=per_token,
            norm_topk_prob=read.boolean("norm_topk_prob", False) if family == "qwen3_moe" else True,
            dtype=read.text("dtype" if "dtype" in config else "torch_dtype", "float32", tuple(DTYPES)),
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)),
        )


def _refuse_unknown_architecture(read: ConfigReader) -> None:
    """ValueError for keys that would change the computation in a way that is not implemented."""
    architectures = read.config.get("architectures") or ["ForCausalLM"]
    if not isinstance(architectures, list) or not any(str(a).endswith("ForCausalLM") for a in architectures):
        raise read.error(f"architectures = {architectures!r:.80} holds no *ForCausalLM model.")
    read.text("hidden_act", "silu", ("silu", "swish"))
    read.number("pretraining_tp", 1, 1, 1)
    read.integer("decoder_sparse_step", 1, 1, 1)
    if read.config.get("mlp_only_layers"):
        raise read.error("mlp_only_layers names layers without experts, which are not implemented.")
    for place in (read.config, read.config.get("rope_parameters"), read.config.get("rope_scaling")):
        if isinstance(place, dict):
            ConfigReader(place, read.where).number("partial_rotary_factor", 1.0, 1.0, 1.0)


def _read_rope(outer: ConfigReader, default_theta: float, max_positions: int) -> RopeConfig:
    """RoPE settings in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""
    config = outer.config
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise outer.error(f"rope_scaling / rope_parameters must be an object, found {scaling!r}.")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise outer.error(f"rope_parameters per layer type are not implemented: {sorted(scaling)}.")
    original = "original_max_position_embeddings"
    merged = {"rope_type": scaling.get("type"), **{key: config.get(key) for key in ("rope_theta", original)}}
    merged |= {key: value for key, value in scaling.items() if value is not None}
    read = ConfigReader(merged, outer.where)
    kind = read.text("rope_type", "default", ROPE_TYPES)
    theta = read.number("rope_theta", default_theta, 1.01)
    if kind == "default":
        return RopeConfig(theta=theta)
    llama3 = kind == "llama3"
    positive = {"low_freq_factor": None if llama3 else 1.0, "high_freq_factor": None if llama3 else 4.0}
    positive |= {"beta_fast": 32.0, "beta_slow": 1.0}
    given_attention = merged.get("attention_factor") is not None
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        original_max_positions=read.integer(original, None if llama3 else max_positions, high=2**24),
        factor=read.number("factor", None, 1.0, 1e6),
        **{key: read.number(key, default, 1e-6, 1e6) for key, default in positive.items()},
        **{key: read.number(key, 0.0, 0.0, 1e6) for key in ("mscale", "mscale_all_dim")},
        truncate=read.boolean("truncate", True),
        attention_factor=read.number("attention_factor", None, 0.0, 1e6) if given_attention else None,
    )
    if llama3 and rope.high_freq_factor <= rope.low_freq_factor:
        raise read.error("high_freq_factor must exceed low_freq_factor for rope type llama3.")
    return rope


def _read_unrotated(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """The layers without rotary positions: those with a 0 in `no_rope_layers`, or else every fourth one."""
    marks = read.config.get("no_rope_layers")
    if marks is None:
        every = read.integer("no_rope_layer_interval", 4)
        marks = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(marks, list) or len(marks) != layers or any(mark not in (0, 1) for mark in marks):
        raise read.error("no_rope_layers must hold 1 (with rotary positions) or 0 for each layer.")
    return tuple(i for i, mark in enumerate(marks) if not mark)


def _read_windows(read: ConfigReader, family: str, layers: int) -> tuple[int, ...]:
    """Attention window per layer. Qwen ships a window size with a flag that switches the window off."""
    if read.config.get("sliding_window") is None or family in ("granite", "llama", "seed_oss"):
        return (0,) * layers
    window = read.integer("sliding_window")
    if family in ("mistral", "mixtral", "phi3"):
        return (window,) * layers
    if not read.boolean("use_sliding_window", False):
        return (0,) * layers
    kinds = read.config.get("layer_types")
    if kinds is None:
        first = read.integer("max_window_layers", 28, low=0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise read.error("layer_types must name full_attention or sliding_attention for each layer.")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
