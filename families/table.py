"""The supported model families: what a `model_type` means, and why others are refused."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What a `model_type` means: how its config.json is read, and the facts that always hold.

    A key that only some families have is read where `defaults` names it.
    """

    defaults: dict[str, Any] = field(default_factory=dict)  # for keys that config.json leaves out
    facts: dict[str, Any] = field(default_factory=dict)  # fields of ModelConfig
    # The keys that ask for biases of queries, keys and values, of the attention's output, and of the MLP. "": none.
    biases: tuple[str, str, str] = ("attention_bias", "attention_bias", "")
    # Which layers have a window: "none", "all", "switch" (Qwen's flag), or "pattern": `layer_types`, or else all but
    # every n-th layer, where n is `sliding_window_pattern`.
    windows: str = "none"
    window_rope: bool = False  # whether layers with a window have a rotation of their own
    full_unrotated: bool = False  # whether the layers without a window have no rotation, where others have one
    width: str = "intermediate_size"  # the key of the width of the MLP, or of an expert
    rope_names: dict[str, str] = field(default_factory=dict)  # names of ROPE_TYPES that early configs have
    activation_names: tuple[str, ...] = ()  # of the activation, beside those in ACTIVATIONS


# The keys of biases, as `Family.biases` has them.
NO_BIAS = ("", "", "")
QKV_BIAS = ("attention_bias", "", "")
ALL_BIASES = ("attention_bias", "attention_bias", "mlp_bias")
OWN_WIDTH = "moe_intermediate_size"  # of experts, where the MLP of layers without experts has another width
GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}
GEMMA |= {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
GEMMA_FACTS = {"norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh"}
GEMMA4 = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 512}
GEMMA4 |= {"final_logit_softcapping": 0.0, "sliding_window_pattern": 6, "global_head_dim": 512}
GEMMA4["rope_parameters"] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA4_FACTS = {"norms": "both", "activation": "gelu_tanh", "qk_norm": True, "value_norm": True, "layer_scale": True}
GEMMA4_FACTS |= {"attention_multiplier": 1.0}
OLMO_FACTS = {"norms": "after", "qk_norm": True, "wide_qk_norm": True}
# Models of which most layers are recurrent: by default all but every fourth one.
QWEN_NEXT = {"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
QWEN_NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
QWEN_NEXT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
QWEN_NEXT_FACTS = {"norm_offset": 1.0, "qk_norm": True, "output_gate": True}
MROPE = {"mrope": "default"}  # an image has three kinds of positions, which are the same number for a text
MINISTRAL3_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
MINISTRAL3_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
GRANITE = dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
# Supported values of `model_type`.
FAMILIES: dict[str, Family] = {
    "ernie4_5": Family(
        {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
        | {"tie_word_embeddings": True},
        {"neighbours": True},
        ("use_bias", "use_bias", "use_bias"),
    ),
    "exaone4": Family(
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        {"norms": "after", "qk_norm": True},
        NO_BIAS,
        windows="pattern",
        full_unrotated=True,
    ),
    "gemma": Family(
        {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "final_logit_softcapping": 0.0},
        {"norm_offset": 1.0, "activation": "gelu_tanh"},
        activation_names=("gelu",),
    ),
    "gemma2": Family(
        GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        GEMMA_FACTS,
        windows="pattern",
    ),
    "gemma3_text": Family(
        GEMMA
        | {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
        GEMMA_FACTS | {"qk_norm": True},
        windows="pattern",
        window_rope=True,
    ),
    "gemma4_text": Family(
        GEMMA4 | {"hidden_size_per_layer_input": 256}, GEMMA4_FACTS, windows="pattern", window_rope=True
    ),
    "gemma4_unified_text": Family(GEMMA4 | {"sliding_window": 1024}, GEMMA4_FACTS, windows="pattern", window_rope=True),
    "glm4": Family(
        {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
        | {"attention_bias": True},
        {"norms": "both", "neighbours": True},
        QKV_BIAS,
    ),
    "glm4_moe": Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False}
        | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
        {"sigmoid_router": True},
        QKV_BIAS,
        width=OWN_WIDTH,
    ),
    "gpt_oss": Family(
        {"num_key_value_heads": 8, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5}
        | {"rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128, "sliding_window_pattern": 2}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        {"activation": "swiglu_clamped", "expert_bias": True, "sinks": True},
        windows="pattern",
    ),
    "granite": Family(GRANITE, biases=ALL_BIASES),
    "hunyuan_v1_dense": Family({"rms_norm_eps": 1e-5, "alpha": 0.0}, {"qk_norm": True, "late_qk_norm": True}),
    "llama": Family(biases=ALL_BIASES, rope_names=MROPE),  # draft heads of models that see have it, too
    "ministral": Family(
        # by default every layer has the window, and there are at most 1000
        {"num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": 1001},
        biases=NO_BIAS,
        windows="pattern",
    ),
    "ministral3": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "llama_4_scaling_beta": 0.0}
        | {"rope_parameters": MINISTRAL3_ROPE},
        biases=NO_BIAS,
        windows="all",
    ),
    "mistral": Family({"num_key_value_heads": 8}, biases=NO_BIAS, windows="all"),
    "mixtral": Family(
        {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_experts": 8},
        biases=NO_BIAS,
        windows="all",
    ),
    "olmo2": Family({"rms_norm_eps": 1e-5}, OLMO_FACTS),
    "olmo3": Family(
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
        OLMO_FACTS,
        windows="pattern",
        window_rope=True,
    ),
    "olmoe": Family(
        {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        {"qk_norm": True, "wide_qk_norm": True},
    ),
    "phi3": Family(
        {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        biases=NO_BIAS,
        windows="all",
        rope_names=dict.fromkeys(("su", "yarn"), "longrope"),
    ),
    "qwen2": Family({"num_key_value_heads": 32}, {"qkv_bias": True}, NO_BIAS, windows="switch", rope_names=MROPE),
    "qwen2_moe": Family(
        {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False}
        | {"qkv_bias": True, "shared_expert_intermediate_size": 5632},
        biases=("qkv_bias", "", ""),
        windows="switch",
        width=OWN_WIDTH,
    ),
    "qwen3": Family(
        {"num_key_value_heads": 32, "head_dim": 128}, {"qk_norm": True}, windows="switch", rope_names=MROPE
    ),
    "qwen3_5_moe_text": Family(
        QWEN_NEXT | {"num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512},
        QWEN_NEXT_FACTS,
        width=OWN_WIDTH,
    ),
    "qwen3_5_text": Family(QWEN_NEXT | {"num_key_value_heads": 4}, QWEN_NEXT_FACTS),
    "qwen3_next": Family(
        QWEN_NEXT
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 512},
        QWEN_NEXT_FACTS,
        width=OWN_WIDTH,
    ),
    "qwen3_moe": Family(
        {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False},
        {"qk_norm": True},
        windows="switch",
        width=OWN_WIDTH,
    ),
    "seed_oss": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "smollm3": Family(
        {"num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4}, biases=ALL_BIASES, windows="switch"
    ),
}
# Why some families are refused.
RECURRENT = "its recurrent layers are of a kind that is not implemented"
REFUSED = dict.fromkeys(
    """bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h
    recurrent_gemma rwkv xlstm zamba zamba2""".split(),
    RECURRENT,
)
REFUSED |= dict.fromkeys("deepseek_v2 deepseek_v3 kimi_k2 minicpm3".split(), "its latent attention is not implemented")
REFUSED |= dict.fromkeys(
    "gemma3n glm4v glm4v_moe llama4 qwen3_vl_moe".split(), "it reads images, too, and its text model is not implemented"
)
# Models that also see, of which the text part is read: the `model_type` that this part is computed as unless it has
# another one, and what its config leaves out.
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (f"{name}_text", {}) for name in ("gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")
}
QWEN2_VL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
WITH_IMAGES |= {"mistral3": ("mistral", {}), "qwen3_vl": ("qwen3", {"rope_theta": 5e5})}
WITH_IMAGES |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("qwen2", QWEN2_VL))
