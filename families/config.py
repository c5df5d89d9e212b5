"""The geometry of a model, and the strict reading of a Hugging Face config.json into it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from families.table import FAMILIES, OWN_WIDTH, REFUSED, WITH_IMAGES, Family
from support.reader import ConfigReader, check, is_a

SHARED_KEYS = "tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id".split()  # may stand beside text_config
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
# What `hidden_act` or `hidden_activation` may say, by the activation that it stands for.
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"), "swiglu_clamped": ("silu",)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary position embedding.

    `kind` is one of ROPE_TYPES (transformers' `rope_type`), or "none": positions change nothing.
    """

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
    partial: float = 1.0  # the share of each head that is rotated
    # queries at position p are multiplied by 1 + query_growth * log(1 + floor(p / original_max_positions))
    query_growth: float = 0.0
    short_factor: tuple[float, ...] = ()  # of longrope, for contexts up to the original length, and for longer ones
    long_factor: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head turn in pairs. With `proportional` all do, most of them by an angle of 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)

    def frequencies(self, head_dim: int, length: int = 0) -> tuple[Tensor, float]:
        """Inverse frequencies [head_dim / 2] in float32, and the factor for cos and sin, as transformers computes them.

        Dimensions that are not rotated have the frequency 0. length: of the context, which longrope depends on.
        `dynamic` scaling gets the unscaled frequencies: `ModelConfig.max_positions` ends where its scaling would begin.
        """
        rotated, scale = self.rotated(head_dim), 1.0
        turning = torch.arange(0, int(head_dim * self.partial), 2, dtype=torch.int64)
        inv = 1.0 / self.theta ** (turning.float() / rotated)
        if self.kind == "none":
            inv = torch.zeros_like(inv)
        elif self.kind in ("linear", "proportional"):
            inv = inv / self.factor
        elif self.kind == "llama3":
            inv = self._llama3(inv)
        elif self.kind == "yarn":
            inv, scale = self._yarn(inv, rotated)
        elif self.kind == "longrope":
            inv, scale = self._longrope(inv, length)
        return torch.cat((inv, torch.zeros(head_dim // 2 - len(inv)))), scale

    def _longrope(self, inv: Tensor, length: int) -> tuple[Tensor, float]:
        """Scales every dimension by a factor of its own."""
        factors = self.long_factor if length > self.original_max_positions else self.short_factor
        scale = self.attention_factor
        if scale is None:
            scale = math.sqrt(1 + max(math.log(self.factor), 0.0) / math.log(self.original_max_positions))
        return inv / torch.tensor(factors), scale

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


# Numbers that config.json has where `Family.defaults` names them: their field of ModelConfig, and how each of the two
# follows from the other.
NUMBERS: dict[str, tuple[str, Callable[[float], float], Callable[[float], float | None]]] = {
    **{f"{what}_multiplier": (f"{what}_multiplier", float, float) for what in ("attention", "embedding", "residual")},
    "logits_scaling": ("logits_multiplier", lambda x: 1 / x, lambda x: 1 / x),
    "query_pre_attn_scalar": ("attention_multiplier", lambda x: x**-0.5, lambda x: round(x**-2)),
    "routed_scaling_factor": ("experts_multiplier", float, float),
    "attn_logit_softcapping": ("attention_cap", float, lambda x: x or None),
    "final_logit_softcapping": ("logits_cap", float, lambda x: x or None),
}
# The fields of ModelConfig that say what only some layers of some models have.
OF_SOME_LAYERS = """recurrent windows delta mtp full_heads value_norm shared_layers keys_as_values token_inputs
    layer_scale window_rope unrotated""".split()
# The keys of the fields of DeltaConfig.
DELTA_KEYS = """linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
    linear_conv_kernel_dim""".split()


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of the recurrent layers (`kernels.delta`). Each key head serves value_heads / key_heads value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # the width of the convolution

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values


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
    wide_qk_norm: bool = False  # whether the norms of queries and keys are over all heads at once
    late_qk_norm: bool = False  # whether the norms of queries and keys are behind their rotation
    norms: str = "before"  # where attention and MLP have norms: "before" them, "after" them, or "both"
    norm_offset: float = 0.0  # what checkpoints leave out of the weights of norms
    activation: str = "silu"  # of the MLP's gate: one of ACTIVATIONS
    windows: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None  # of the layers with a window; None: as of the others
    neighbours: bool = False  # whether checkpoints rotate neighbouring dimensions, and not i with i + hd / 2
    unrotated: tuple[int, ...] = ()  # the layers without rotary positions
    attention_multiplier: float = 0.0  # of the products of queries and keys; 0: 1 / sqrt(head_dim)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a block adds to its input
    logits_multiplier: float = 1.0
    delta: DeltaConfig | None = None
    recurrent: tuple[int, ...] = ()  # the layers that are recurrent, in place of attention
    mtp: bool = False  # whether a layer that predicts one more token is read (MTP)
    # key heads and head_dim of the layers without a window, where those of the others differ
    full_heads: tuple[int, int] | None = None
    keys_as_values: bool = False  # whether the layers without a window have their keys, before the norm, as values
    value_norm: bool = False  # whether values are normed, without weights
    # so many layers, the last ones, read the keys and values of the last layer of their kind before them
    shared_layers: int = 0
    wide_shared: bool = False  # whether the MLPs of these layers are twice as wide
    token_inputs: int = 0  # size of the embedding of its own that each layer has of a token
    layer_scale: bool = False  # whether what leaves a layer is multiplied by a number
    dense_size: int = 0  # of an MLP beside the experts, with norms of its own; 0: there is none
    dense_layers: int = 0  # so many layers, the first ones, have this MLP alone, and the others have the experts alone
    output_gate: bool = False  # whether what attention gives is multiplied by a gate for each query
    sinks: bool = False  # whether each head has the score of one more key, without a value
    attention_cap: float = 0.0  # scores s become cap * tanh(s / cap); 0: they stay as they are
    logits_cap: float = 0.0
    num_local_experts: int = 0  # each is intermediate_size wide
    num_experts_per_tok: int = 0
    expert_bias: bool = False  # whether router and experts have biases
    shared_intermediate_size: int = 0  # of an expert that every token uses; 0: there is none
    shared_gate: bool = True  # whether what this expert gives is multiplied by a gate
    norm_topk_prob: bool = True  # whether the weights of a token's experts are scaled to a sum of 1
    sigmoid_router: bool = False  # whether the router has a sigmoid, and a correction that only chooses
    experts_multiplier: float = 1.0  # of what the routed experts give
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_hidden_layers)
        heads, sizes = self.num_attention_heads, (self.num_key_value_heads, self.head_dim)
        for kv_heads, head_dim in {sizes, self.full_heads or sizes}:
            if heads % kv_heads:
                why = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
                raise ValueError(f"config.json: {why}.")
            if head_dim % 2 or head_dim > 4096:  # tables of such a size would be built before the tensors are looked at
                raise ValueError(f"config.json: head_dim is {head_dim}; allowed: an even size up to 4096.")
        for rope, head_dim in self.ropes:
            rotated = int(head_dim * rope.partial)
            if rotated % 2 or not rotated:
                dimensions = f"{rotated} of a head's {head_dim} dimensions"
                raise ValueError(f"config.json: partial_rotary_factor rotates {dimensions}.")
            if rope.kind == "longrope" and {len(rope.short_factor), len(rope.long_factor)} != {rotated // 2}:
                raise ValueError(f"config.json: short_factor and long_factor need {rotated // 2} numbers each.")

    @property
    def mlp_beside(self) -> bool:
        """Whether an MLP lies beside the experts of each layer."""
        return self.dense_size > 0 and not self.dense_layers

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The different rotations of the layers, each with the size of a head."""
        others = self.window_rope, RopeConfig(kind="none") if self.unrotated else None
        full = self.full_heads[1] if self.full_heads else self.head_dim
        return (self.rope, full), *((rope, self.head_dim) for rope in others if rope is not None)

    def first_angle(self, layer: int) -> int:
        """The column of a layer's rotation, where the angles of all rotations stand side by side."""
        which = int(self.window_rope is not None and self.windows[layer] > 0)
        if layer in self.unrotated:
            which = len(self.ropes) - 1
        return sum(head_dim // 2 for _, head_dim in self.ropes[:which])

    def heads_of(self, layer: int) -> tuple[int, int]:
        """The number of key heads of a layer, and the size of a head."""
        full = self.full_heads if not self.windows[layer] else None
        return full or (self.num_key_value_heads, self.head_dim)

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or one that shares them. -1: one of another model."""
        own = self.num_hidden_layers - self.shared_layers
        if layer < own:
            return layer
        return max((i for i in range(own) if bool(self.windows[i]) == bool(self.windows[layer])), default=-1)

    @property
    def kv_layers(self) -> dict[tuple[int, int], list[int]]:
        """The layers with keys and values of their own, by `heads_of`. The layers of a kind have one cache."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for layer in range(self.num_hidden_layers - self.shared_layers):
            if layer not in self.recurrent:
                kinds.setdefault(self.heads_of(layer), []).append(layer)
        return kinds

    @property
    def kv_places(self) -> dict[int, tuple[int, int]]:
        """Of each layer with attention the cache that it reads, and the place there, in the order of `kv_layers`."""
        own = {i: (kind, layers.index(i)) for kind, layers in enumerate(self.kv_layers.values()) for i in layers}
        attending = (i for i in range(self.num_hidden_layers) if i not in self.recurrent)
        return {i: own[source] for i in attending if (source := self.source(i)) in own}

    def kv_values(self, context: int) -> int:
        """How many values of keys and values one forward reads at `context` cached tokens."""
        layers = ((*self.heads_of(i), window) for i, window in enumerate(self.windows) if i not in self.recurrent)
        return sum(2 * kv_heads * head_dim * min(context, window or context) for kv_heads, head_dim, window in layers)

    @property
    def carried(self) -> int:
        """How many values of a token later layers need beside the residual state, where a whole text is run without a
        cache: its `token_inputs`, and keys and values that are shared."""
        return max(self.shared_columns(i).stop for i in range(self.num_hidden_layers))

    def shared_columns(self, layer: int) -> slice:
        """Where the keys and values that a layer shares lie among `carried`. Empty where it shares none."""
        first = self.num_hidden_layers * self.token_inputs
        own = self.num_hidden_layers - self.shared_layers
        for source in sorted({self.source(i) for i in range(own, self.num_hidden_layers)}):
            size = 2 * math.prod(self.heads_of(source))
            if source == self.source(layer):
                return slice(first, first + size)
            first += size
        return slice(first, first)

    @property
    def plain_layer(self) -> ModelConfig:
        """The geometry of one layer of these sizes, without what only some layers of some models have."""
        by_default = {f.name: f.default for f in fields(self) if f.name in OF_SOME_LAYERS}
        return replace(self, num_hidden_layers=1, **by_default)

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
        config = text_part(config, where)
        read = ConfigReader(config, where)
        if reason := REFUSED.get(str(config.get("model_type"))):
            raise read.error(f"model_type {config['model_type']!r} is not supported, because {reason}.")
        name = read.text("model_type", None, tuple(FAMILIES))
        family = FAMILIES[name]
        read.defaults = family.defaults
        _refuse_unknown_architecture(read, family)
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        layers = read.integer("num_hidden_layers", high=1000)
        if "head_dim" not in read.defaults and hidden % heads and config.get("head_dim") is None:
            raise read.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
        positions = read.integer("max_position_embeddings", 2048, high=2**24)
        windows, recurrent = _read_windows(read, family, layers), _read_recurrent(read, layers)
        rope, window_rope = _read_ropes(read, family, positions)
        positions = max(positions, _stretched(config, rope))
        if "global_head_dim" in read.defaults:
            windows = (*windows[:-1], 0)  # the last layer sees everything, whatever layer_types says
        facts = _read_facts(read, family, hidden, windows)
        bos, eos = config.get("bos_token_id"), config.get("eos_token_id")
        named = ConfigReader({"torch_dtype": named_dtype(config)}, where)
        geometry = dict(
            model_type=name,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads", heads),
            head_dim=read.integer("head_dim", hidden // heads),
            vocab_size=read.integer("vocab_size", high=10_000_000),
            max_position_embeddings=positions,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6, 0.0, 1.0),
            rope=rope,
            window_rope=window_rope if any(windows) and (window_rope != rope or "full_heads" in facts) else None,
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            windows=windows,
            recurrent=recurrent,
            delta=_read_delta(read) if recurrent else None,
            dtype=named.text("torch_dtype", "float32", tuple(DTYPES)),
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)),
        )
        return cls(**(geometry | facts | family.facts))


def _read_facts(read: ConfigReader, family: Family, hidden: int, windows: tuple[int, ...]) -> dict[str, Any]:
    """What only some families have, and the width of MLPs or experts."""
    biases = zip(("qkv_bias", "o_bias", "mlp_bias"), family.biases, strict=True)
    facts: dict[str, Any] = {name: bool(key) and read.boolean(key, False) for name, key in biases}
    facts |= _read_numbers(read, hidden) | _read_experts(read) | {"intermediate_size": read.integer(family.width)}
    if "global_head_dim" in read.defaults:
        facts |= _read_kinds(read, windows)
        if facts.get("num_local_experts"):
            facts |= {"dense_size": facts["intermediate_size"], "intermediate_size": read.integer(OWN_WIDTH)}
    if "first_k_dense_replace" in read.defaults:
        dense = read.integer("first_k_dense_replace", None, 0, len(windows) - 1)
        facts |= {"dense_layers": dense, "dense_size": read.integer("intermediate_size") if dense else 0}
    if "use_qk_norm" in read.defaults:
        facts["qk_norm"] = read.boolean("use_qk_norm")
    if "no_rope_layer_interval" in read.defaults:
        facts["unrotated"] = _read_unrotated(read, len(windows))
    if family.full_unrotated and any(windows):
        facts["unrotated"] = tuple(i for i, window in enumerate(windows) if not window)
    return facts


def named_dtype(config: dict[str, Any]) -> Any:
    """The dtype that a config.json names, None if it leaves it to the tensors."""
    value = config.get("dtype", config.get("torch_dtype"))
    value = value.removeprefix("torch.") if isinstance(value, str) else value
    return None if value == "auto" else value


def text_part(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The part of a config.json that describes the text model, of a model that also sees. Others stay as they are."""
    outer = str(config.get("model_type"))
    if outer not in WITH_IMAGES:
        return config
    name, left_out = WITH_IMAGES[outer]
    text = config.get("text_config", config if "hidden_size" in config else None)  # Qwen published both forms
    if not isinstance(text, dict):
        raise ConfigReader(config, where).error("text_config must be an object.")
    if text.get("model_type") not in (None, outer, f"{outer}_text"):
        name = text["model_type"]
    shared = {key: config[key] for key in SHARED_KEYS if config.get(key) is not None}
    if text.get("tie_word_embeddings") is True:
        shared["tie_word_embeddings"] = True
    return left_out | text | shared | {"model_type": name, "architectures": ["ForCausalLM"]}


def _refuse_unknown_architecture(read: ConfigReader, family: Family) -> None:
    """ValueError for keys that would change the computation in a way that is not implemented."""
    architectures = read.config.get("architectures") or ["ForCausalLM"]
    if not isinstance(architectures, list) or not any(str(a).endswith("ForCausalLM") for a in architectures):
        raise read.error(f"architectures = {architectures!r:.80} holds no *ForCausalLM model.")
    activations = ACTIVATIONS[family.facts.get("activation", "silu")]
    for key in ("hidden_act", "hidden_activation"):
        read.text(key, activations[0], (*activations, *family.activation_names))
    for key in ("swiglu_alpha", "swiglu_limit"):
        if (value := read.defaults.get(key)) is not None:
            read.number(key, value, value, value)
    read.number("pretraining_tp", 1, 1, 1)
    for key in ("decoder_sparse_step", "n_group", "topk_group"):
        read.integer(key, 1, 1, 1)
    if read.config.get("use_bidirectional_attention") not in (None, False, "vision"):  # of images, which are not read
        raise read.error("use_bidirectional_attention is not implemented: such a model embeds texts.")
    if read.config.get("clip_qkv") is not None:
        raise read.error("clip_qkv is not implemented: it limits queries, keys and values.")
    if read.config.get("mlp_only_layers"):
        raise read.error("mlp_only_layers names layers without experts, which are not implemented.")
    for place in (read.config, read.config.get("rope_parameters"), read.config.get("rope_scaling")):
        if isinstance(place, dict) and "partial_rotary_factor" not in read.defaults:
            ConfigReader(place, read.where).number("partial_rotary_factor", 1.0, 1.0, 1.0)


def _read_numbers(read: ConfigReader, hidden: int) -> dict[str, float]:
    """The numbers that scale or cap what some families compute."""
    found: dict[str, float] = {}
    for key, (name, value_of, _) in NUMBERS.items():
        if key in read.defaults:
            low = 0.0 if name.endswith("cap") else 1e-6
            absent = not low and read.config.get(key, 0.0) is None
            found[name] = 0.0 if absent else value_of(read.number(key, None, low, 1e6))
    if "final_logit_softcapping" in read.defaults:
        found["embedding_multiplier"] = hidden**0.5
    return found


def _read_kinds(read: ConfigReader, windows: tuple[int, ...]) -> dict[str, Any]:
    """What layers with a window and without one have of their own (Gemma 4)."""
    found: dict[str, Any] = {"keys_as_values": read.boolean("attention_k_eq_v", False)}
    base = read.integer("num_key_value_heads")
    each, key = read.config.get("per_layer_config"), "num_global_key_value_heads"
    if each is None:
        full = {"head_dim": read.integer("global_head_dim")}
        full["num_key_value_heads"] = read.integer(key, base) if found["keys_as_values"] else base
        each = {str(i): full for i, window in enumerate(windows) if not window}
    own = {"num_key_value_heads": base, "head_dim": read.integer("head_dim")}
    if not isinstance(each, dict) or not all(isinstance(value, dict) for value in each.values()):
        raise read.error("per_layer_config must hold an object for each layer that differs.")
    sizes = [own | each.get(str(i), {}) for i in range(len(windows))]
    for i, one in enumerate(sizes):
        if one.keys() != own.keys() or one != (sizes[-1] if not windows[i] else own):
            raise read.error(f"per_layer_config of layer {i}: only heads of layers without a window may differ.")
    full = ConfigReader(sizes[-1], read.where)
    found["full_heads"] = full.integer("num_key_value_heads"), full.integer("head_dim")
    found["shared_layers"] = shared = read.integer("num_kv_shared_layers", 0, 0, len(windows) - 1)
    kinds = [not window for window in windows]
    if set(kinds[: len(kinds) - shared]) != set(kinds):
        raise read.error(f"num_kv_shared_layers is {shared}, but no layer before them has keys of each kind.")
    found["wide_shared"] = read.boolean("use_double_wide_mlp", False)
    if "hidden_size_per_layer_input" not in read.defaults:
        return found
    found["token_inputs"] = read.integer("hidden_size_per_layer_input", low=0)
    vocab = read.integer("vocab_size", high=10_000_000)
    if found["token_inputs"]:
        read.integer("vocab_size_per_layer_input", vocab, vocab, vocab)
    if read.boolean("enable_moe_block", False):
        found |= dict(num_local_experts=read.integer("num_experts"), num_experts_per_tok=read.integer("top_k_experts"))
    return found


def _read_experts(read: ConfigReader) -> dict[str, int | bool]:
    """How many experts there are, how many each token uses, and how they are weighed."""
    defaults = read.defaults
    if "num_experts" not in defaults:
        return {}
    key = next((key for key in ("num_experts", "n_routed_experts") if key in read.config), "num_local_experts")
    experts, per_token = read.integer(key, defaults["num_experts"], high=8192), read.integer("num_experts_per_tok")
    if per_token > experts:
        raise read.error(f"num_experts_per_tok {per_token} exceeds {key} {experts}.")
    normed = "norm_topk_prob" not in defaults or read.boolean("norm_topk_prob")
    found = {"num_local_experts": experts, "num_experts_per_tok": per_token, "norm_topk_prob": normed}
    if "shared_expert_intermediate_size" in defaults:
        found["shared_intermediate_size"] = read.integer("shared_expert_intermediate_size")
    if "n_shared_experts" in defaults:  # they are one expert of their widths together
        size = read.integer("n_shared_experts") * read.integer(OWN_WIDTH)
        found |= {"shared_intermediate_size": size, "shared_gate": False}
        if not normed:
            raise read.error("norm_topk_prob = false is not implemented for a router with a sigmoid.")
    return found


def _read_ropes(outer: ConfigReader, family: Family, max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of layers without a window, and that of layers with one where the family has two.

    transformers 4 spells them `rope_theta`, `rope_scaling` and `rope_local_base_freq`, and 5 `rope_parameters`. Who
    lengthens the context adds the former to a file that has the latter: it replaces what it names, where layers have no
    window.
    """
    config = outer.config
    given, added = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for scaling in (given, added):
        if not isinstance(scaling, dict):
            raise outer.error(f"rope_scaling / rope_parameters must be an object, found {scaling!r}.")
    added = {"rope_type": added.get("type")} | added
    added = {key: value for key, value in added.items() if value is not None}
    if isinstance(full := given.get("full_attention"), dict):
        added = {"full_attention": full | added}
    scaling = given | added or outer.defaults.get("rope_parameters", {})
    if not family.window_rope:
        return _read_rope(outer, family, scaling, max_positions), None
    local: dict[str, Any] = {"rope_type": "default"}
    if "rope_local_base_freq" in outer.defaults:
        local["rope_theta"] = outer.number("rope_local_base_freq", None, 1.01)
    if isinstance(scaling.get("full_attention"), dict):
        local |= check(scaling.get("sliding_attention") or {}, {}, outer.where, "sliding_attention")
        scaling = scaling["full_attention"]
    full = _read_rope(outer, family, scaling, max_positions)
    return full, _read_rope(outer, family, {"rope_theta": full.theta} | local, max_positions)


def _stretched(config: dict[str, Any], rope: RopeConfig) -> int:
    """The context that YaRN stretches to, 0 if there is none or config.json does not name the original length.

    Model pages tell users to add YaRN, and to leave `max_position_embeddings` at the original length.
    """
    places = config, config.get("rope_parameters"), config.get("rope_scaling")
    named = any(isinstance(place, dict) and place.get("original_max_position_embeddings") for place in places)
    return min(int(rope.factor * rope.original_max_positions), 2**24) if named and rope.kind == "yarn" else 0


def _read_rope(outer: ConfigReader, family: Family, scaling: dict[str, Any], max_positions: int) -> RopeConfig:
    """RoPE settings, of which those that `scaling` lacks stand in config.json itself."""
    config = outer.config
    if any(isinstance(value, dict) for value in scaling.values()):
        raise outer.error(f"rope_parameters per layer type are not implemented: {sorted(scaling)}.")
    original = "original_max_position_embeddings"
    keys = ("rope_theta", original, "partial_rotary_factor")
    merged = {"rope_type": scaling.get("type"), **{key: config.get(key) for key in keys}}
    merged |= {key: value for key, value in scaling.items() if value is not None}
    read = ConfigReader(merged, outer.where, outer.defaults)
    merged["rope_type"] = family.rope_names.get(str(merged["rope_type"]), merged["rope_type"])
    kind = read.text("rope_type", "default", ROPE_TYPES)
    theta = read.number("rope_theta", 10000.0, 1.01)
    partial = read.number("partial_rotary_factor", 1.0, 0.01, 1.0)
    if kind == "dynamic" and "alpha" in read.defaults and merged.get("alpha"):  # only the base is another one
        kind, size = "default", outer.integer("head_dim", low=4)
        theta *= read.number("alpha", None, 1.0, 1e6) ** (size / (size - 2))
    found: dict[str, Any] = {"theta": theta, "kind": kind, "partial": partial}
    if "llama_4_scaling_beta" in read.defaults and (growth := read.number("llama_4_scaling_beta", 0.0, 0.0, 1e3)):
        found |= {"query_growth": growth, "original_max_positions": read.integer(original, None, high=2**24)}
    if kind == "default":
        return RopeConfig(**found)
    if kind == "proportional":
        return RopeConfig(**found, factor=read.number("factor", 1.0, 1e-6, 1e6))
    if merged.get("attention_factor") is not None:
        found["attention_factor"] = read.number("attention_factor", None, 0.0, 1e6)
    if kind == "longrope":
        length = read.integer(original, None, 2, 2**24)
        found |= {"original_max_positions": length, "factor": read.number("factor", max_positions / length, 1e-6, 1e6)}
        return RopeConfig(**found, **{key: _read_factors(read, key) for key in ("short_factor", "long_factor")})
    llama3 = kind == "llama3"
    found["original_max_positions"] = read.integer(original, None if llama3 else max_positions, high=2**24)
    found["factor"] = read.number("factor", None, 1.0, 1e6)
    positive = {"low_freq_factor": None if llama3 else 1.0, "high_freq_factor": None if llama3 else 4.0}
    positive |= {"beta_fast": 32.0, "beta_slow": 1.0}
    found |= {key: read.number(key, default, 1e-6, 1e6) for key, default in positive.items()}
    found |= {key: read.number(key, 0.0, 0.0, 1e6) for key in ("mscale", "mscale_all_dim")}
    rope = RopeConfig(**found, truncate=read.boolean("truncate", True))
    if llama3 and rope.high_freq_factor <= rope.low_freq_factor:
        raise read.error("high_freq_factor must exceed low_freq_factor for rope type llama3.")
    return rope


def _read_factors(read: ConfigReader, key: str) -> tuple[float, ...]:
    """The factors of longrope, one for each frequency."""
    values = read.config.get(key)
    if not isinstance(values, list) or any(not is_a(v, float) or not 1e-3 <= v <= 1e6 for v in values):
        raise read.error(f"{key} must be a list of numbers in [0.001, 1000000].")
    return tuple(map(float, values))


def _read_unrotated(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """The layers without rotary positions: those with a 0 in `no_rope_layers`, or else every fourth one."""
    marks = read.config.get("no_rope_layers")
    if marks is None:
        every = read.integer("no_rope_layer_interval", 4)
        marks = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(marks, list) or len(marks) != layers or any(mark not in (0, 1) for mark in marks):
        raise read.error("no_rope_layers must hold 1 (with rotary positions) or 0 for each layer.")
    return tuple(i for i, mark in enumerate(marks) if not mark)


def _read_layer_types(read: ConfigReader, other: str, layers: int, interval: str = "") -> list[bool] | None:
    """Of each layer, whether `layer_types` calls it `other` and not full_attention. Without this key all but every n-th
    layer are so, where n is under the key `interval`; None without one."""
    kinds = read.config.get("layer_types")
    if kinds is None:
        return [(i + 1) % read.integer(interval) > 0 for i in range(layers)] if interval else None
    known = ("full_attention", other)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise read.error(f"layer_types must name full_attention or {other} for each layer.")
    return [kind == other for kind in kinds]


def _read_recurrent(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """The recurrent layers: those that `layer_types` names so, or else all but every n-th one."""
    if "full_attention_interval" not in read.defaults:
        return ()
    recurrent = _read_layer_types(read, "linear_attention", layers, "full_attention_interval")
    if all(recurrent):
        raise read.error("layer_types names no layer with full_attention, which is not implemented.")
    return tuple(i for i, here in enumerate(recurrent) if here)


def _read_delta(read: ConfigReader) -> DeltaConfig:
    """The sizes of the recurrent layers."""
    delta = DeltaConfig(*(read.integer(key, high=65536) for key in DELTA_KEYS))
    if delta.value_heads % delta.key_heads:
        raise read.error("linear_num_value_heads is not a multiple of linear_num_key_heads.")
    if not 2 <= delta.kernel <= 16:
        raise read.error(f"linear_conv_kernel_dim is {delta.kernel}; allowed: 2 to 16.")
    return delta


def _read_windows(read: ConfigReader, family: Family, layers: int) -> tuple[int, ...]:
    """Attention window per layer. Qwen ships a window size with a flag that switches the window off."""
    none = read.config.get("sliding_window", read.defaults.get("sliding_window")) is None
    if family.windows == "none" or none:
        return (0,) * layers
    if family.windows == "switch" and not read.boolean("use_sliding_window", False):
        return (0,) * layers
    window = read.integer("sliding_window")
    if family.windows == "all":
        return (window,) * layers
    interval = "sliding_window_pattern" if family.windows == "pattern" else ""
    slides = _read_layer_types(read, "sliding_attention", layers, interval)
    if slides is None:
        first = read.integer("max_window_layers", 28, low=0)
        slides = [i >= first for i in range(layers)]
    return tuple(window * slide for slide in slides)
