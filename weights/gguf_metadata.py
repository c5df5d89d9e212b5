"""A GGUF file's metadata, rewritten as the config.json that a Hugging Face directory has."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from families.config import DELTA_KEYS
from support.reader import is_a
from weights.gguf_tokenizer import stop_ids

# llama.cpp's names of architectures, and Hugging Face's. "olmo2" with a window is "olmo3".
SAME = "ernie4_5 exaone4 gemma2 glm4 granite llama mistral olmo2 olmoe phi3 qwen2 qwen3 seed_oss smollm3".split()
ARCHITECTURES = dict(zip(SAME, SAME, strict=True))
ARCHITECTURES |= {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
HYBRID = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}  # with recurrent layers
ARCHITECTURES |= HYBRID | {"gemma4": "gemma4_text"}
# Of draft heads, which `weights.gguf_heads` reads.
HEADS = "eagle3 dflash dflash-draft gemma4-assistant gemma4_assistant gemma4_mtp".split()
# Those that order value heads by their place among those of a key head, and not by key heads.
BY_PLACE = ("qwen35", "qwen35moe")
PARTIAL = ("glm4", "phi3", *HYBRID)  # architectures that may rotate a part of each head
# Architectures that llama.cpp rotates in neighbouring pairs, though Hugging Face does not.
REORDERED = ("granite", "llama", "smollm3")
# Architectures whose largest model scales attention by the width of all heads: its number of layers.
LARGEST = {"gemma2": 46, "gemma3": 62}
MOST_LAYERS = 1000  # more than any model has

Get = Callable[..., Any]  # of a key without the architecture's name, and a default


def getter(metadata: Mapping[str, Any], where: str) -> Get:
    """What gives the values of an architecture's keys. One value for each layer must be the same for all, but for zeros
    of recurrent ones."""
    family = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{family}.{key}", default)
        if isinstance(value, list):
            values = {one for one in value if one or family not in HYBRID}
            if len(values) != 1:
                raise ValueError(f"{where}: {family}.{key} differs between layers, which is not implemented.")
            return values.pop()
        return value

    return get


def geometry(get: Get, rotations: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """The sizes of layers, and how they rotate, as a Hugging Face config.json names them."""
    heads, width = get("attention.head_count"), get("embedding_length")
    if not (is_a(heads, int) and heads > 0 and is_a(width, int)):
        raise ValueError(f"{where}: attention.head_count or embedding_length is missing or no integer.")
    head_dim = get("attention.key_length", width // heads)
    return {
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get, rotations, head_dim, where),
    }


def hf_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], rotations: Mapping[str, Tensor], where: str
) -> dict[str, Any]:
    """The geometry of a model as a Hugging Face config.json.

    Args:
        tensors: `weights.gguf.GGUFTensor` by name; only shapes and types are read.
        rotations: divisors of the RoPE frequencies, as far as the file has them: "rope_freqs", in which Llama 3's scaling
            is stored, or LongRoPE's "rope_factors_short" and "rope_factors_long".

    Raises:
        ValueError: one line, for an architecture or a setting that is not implemented.
    """
    family = metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        advice = f"; {', '.join(ARCHITECTURES)} are"
        if family in HEADS:
            advice = ": it is a draft head. Give it with --eagle, and its model with --checkpoint"
        raise ValueError(f"{where}: architecture {family!r:.60} is not supported{advice}.")

    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{where}: tensor token_embd.weight is missing or no matrix. Is this a whole model?")
    kinds_of_layers = {}
    if family == "gemma4":
        metadata, kinds_of_layers = gemma4(metadata, tensors, rotations, where)
        rotations = {}
    get = getter(metadata, where)
    config = geometry(get, rotations, where)
    head_dim = config["head_dim"]
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim and not (family in PARTIAL and is_a(rotated, int)):
        raise ValueError(f"{where}: a rotation of only a part of each head is not implemented.")
    config |= {
        "model_type": "mixtral" if get("expert_count", 0) and family == "llama" else ARCHITECTURES[family],
        "vocab_size": embedding.shape[-1],
        "sliding_window": get("attention.sliding_window", 4096 if family == "gemma2" else None),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": {"F32": "float32", "F16": "float16"}.get(_commonest_type(tensors), "bfloat16"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": stop_ids(metadata) or None,
    }
    config |= _of_family(get, tensors, config, family, where)
    if family in PARTIAL:
        config["partial_rotary_factor"] = rotated / head_dim
    kinds = metadata.get(f"{family}.attention.sliding_window_pattern")
    if isinstance(kinds, list):
        config["layer_types"] = ["sliding_attention" if kind else "full_attention" for kind in kinds]
    elif kinds is not None:
        config["sliding_window_pattern"] = kinds
    bias, out_bias, mlp_bias = (f"blk.0.{name}.bias" in tensors for name in ("attn_q", "attn_output", "ffn_up"))
    config |= {"attention_bias": bias, "qkv_bias": bias, "use_bias": bias}
    config |= {"attention_out_bias": out_bias, "mlp_bias": mlp_bias} | kinds_of_layers
    # What a file leaves out has the value that the family has by default.
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def _of_family(
    get: Get, tensors: Mapping[str, Any], config: Mapping[str, Any], family: str, where: str
) -> dict[str, Any]:
    """What config.json says of experts, and what only some families have. config: the geometry as far as it is read."""
    found: dict[str, Any] = {}
    if get("expert_count", 0):
        parts = "exps", "up_exps", "shexp"
        widths = [getattr(tensors.get(f"blk.0.ffn_gate_{x}.weight"), "shape", (0, 0))[1] for x in parts]
        width = widths[0] or widths[1] // 2  # "up_exps": gate and up are one tensor
        found |= {"num_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count")}
        found |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": widths[2]}
        found["intermediate_size"] = width or config["intermediate_size"]
        found["norm_topk_prob"] = family in ("qwen3moe", "qwen3next")
    if family == "gpt-oss" and config["rope_scaling"]:  # as its publisher computes, which no file says
        found["rope_scaling"] = config["rope_scaling"] | {"truncate": False}
    if family in HYBRID:
        found |= _recurrent(get, tensors, f"{where}: {family}")
    if family == "granite":
        scales = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
        scales |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
        found |= {name: get(key) for name, key in scales.items()}
    if family == "olmo2" and config["sliding_window"]:
        found["model_type"] = "olmo3"
    if family in LARGEST:
        largest = config["num_hidden_layers"] == LARGEST[family]
        scale = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
        found |= {f"{at}_logit_softcapping": get(f"{at}_logit_softcapping") for at in ("attn", "final")}
        found |= {"query_pre_attn_scalar": scale, "rope_local_base_freq": get("rope.freq_base_swa")}
        found["hidden_act"] = "gelu_pytorch_tanh"
    return found


def gemma4(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], rotations: Mapping[str, Tensor], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gemma 4's metadata as if all layers had a window, and what its config.json says beside that.

    Layers without a window have heads, and a rotation, of their own. The last layers may read the keys and values of the
    last two that have some, and be twice as wide.
    """
    family = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{family}.{key}", default)

    layers, sliding = get("block_count"), get("attention.sliding_window_pattern")
    known = isinstance(sliding, list) and len(sliding) == layers and set(sliding) == {0, 1}
    if not known or sliding[-1]:
        problem = f"{family}.attention.sliding_window_pattern must say of each layer whether it has a window"
        raise ValueError(f"{where}: {problem}. Some must have one, and not the last.")
    heads, widths = (
        value if isinstance(value, list) else [value] * layers
        for value in (get("attention.head_count_kv"), get("feed_forward_length"))
    )
    shared, wide = get("attention.shared_kv_layers", 0), widths[-1] != widths[0]
    own = layers - shared
    if widths != [widths[0]] * own + [widths[0] * (1 + wide)] * shared and widths != [widths[0]] * layers:
        raise ValueError(f"{where}: {family}.feed_forward_length: only layers that share keys may differ, by twice.")
    if shared and sliding[:own][-2:] != [1, 0]:
        raise ValueError(f"{where}: {family}.attention.shared_kv_layers {shared} begins behind no pair of layers.")
    sizes = {}
    for kind in ("", "_swa"):
        size = sizes[kind] = get(f"attention.key_length{kind}")
        if any(get(f"{key}{kind}", size) != size for key in ("attention.value_length", "rope.dimension_count")):
            raise ValueError(f"{where}: {family}: keys, values and rotations of a layer must have the same size.")
    full = {"rope_type": "proportional", "rope_theta": get("rope.freq_base", 10000.0)}
    full["partial_rotary_factor"] = _turned_share(rotations.get("rope_freqs", torch.empty(0)), sizes[""], where)
    one = {"attention.head_count_kv": heads[sliding.index(1)], "feed_forward_length": widths[0]}
    one |= dict.fromkeys(("attention.key_length", "rope.dimension_count"), sizes["_swa"])
    each = {
        str(i): {"num_key_value_heads": count, "head_dim": sizes["_swa" if window else ""]}
        for i, (count, window) in enumerate(zip(heads, sliding, strict=True))
    }
    config = {
        "intermediate_size": widths[0],
        "per_layer_config": each,
        "attention_k_eq_v": f"blk.{sliding.index(0)}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": tensors["token_embd.weight"].shape[-1],
        "final_logit_softcapping": get("final_logit_softcapping", 30.0),  # as llama.cpp computes without it
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)},
        },
    }
    if experts := get("expert_count", 0):
        config |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": get("expert_used_count")}
        config["moe_intermediate_size"] = get("expert_feed_forward_length")
    return {**metadata, **{f"{family}.{key}": value for key, value in one.items()}}, config


def _turned_share(divisors: Tensor, size: int, where: str) -> float:
    """The share of a head that turns: a pair of dimensions that does not has a huge divisor."""
    turned = int((divisors == 1).sum())
    if len(divisors) != size // 2 or not turned or (divisors[turned:] < 1e29).any():
        raise ValueError(f"{where}: rope_freqs.weight must hold ones, and then 1e30, for a half of a wide head.")
    return 2 * turned / size


def _recurrent(get: Get, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of a config.json about recurrent layers, which are those that have such tensors, and the number of layers
    without the one for multi-token prediction (MTP)."""
    keys = "ssm.time_step_rank ssm.group_count ssm.state_size ssm.inner_size ssm.conv_kernel block_count".split()
    sizes = [get(key) for key in keys]
    if wrong := [key for key, size in zip(keys, sizes, strict=True) if not is_a(size, int) or not 0 < size < 2**31]:
        raise ValueError(f"{where}.{wrong[0]} is missing or no positive integer.")
    values, groups, key_dim, inner, kernel, layers = sizes
    if inner % values:
        raise ValueError(f"{where}.ssm.inner_size {inner} is not a multiple of ssm.time_step_rank {values}.")
    if (extra := get("nextn_predict_layers", 0)) not in (0, 1) or layers > MOST_LAYERS:
        raise ValueError(f"{where}.nextn_predict_layers {extra!r:.40} with block_count {layers} is not implemented.")
    kinds = ["linear_attention" if f"blk.{i}.ssm_a" in tensors else "full_attention" for i in range(layers - extra)]
    found = dict(zip(DELTA_KEYS, (groups, values, key_dim, inner // values, kernel), strict=True))
    return found | {"num_hidden_layers": layers - extra, "layer_types": kinds}


def _commonest_type(tensors: Mapping[str, Any]) -> str:
    """The type that holds most of the model's values."""
    sizes: collections.Counter[str] = collections.Counter()
    for tensor in tensors.values():
        sizes[tensor.kind] += math.prod(tensor.shape)
    return sizes.most_common(1)[0][0]


def _rope_scaling(get: Get, rotations: Mapping[str, Tensor], head_dim: int, where: str) -> dict[str, Any] | None:
    """The rope_scaling of a config.json. Llama 3's scaling is stored as the tensor rope_freqs.weight."""
    factor = get("rope.scaling.factor", get("rope.scale_linear"))  # the latter is the name of older files
    kind = get("rope.scaling.type", "linear" if factor else "none")
    if "rope_freqs" in rotations:
        return _llama3_scaling(rotations["rope_freqs"].double(), get("rope.freq_base", 10000.0), head_dim, where)
    if "rope_factors_long" in rotations:
        scaling = {f"{x}_factor": rotations[f"rope_factors_{x}"].tolist() for x in ("short", "long")}
        scaling |= {"rope_type": "longrope", "attention_factor": get("rope.scaling.attn_factor")}
        return scaling | {"original_max_position_embeddings": get("rope.scaling.original_context_length")}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        scaling |= {beta: get(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
        if (scale := get("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = scale * (0.1 * math.log(scaling["factor"]) + 1)
    elif kind != "linear":
        raise ValueError(f"{where}: RoPE scaling {kind!r:.40} is not supported; none, linear, yarn are.")
    return scaling


def _llama3_scaling(divisors: Tensor, theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Llama 3's parameters, recovered from the divisors of the frequencies.

    A divisor is 1 for short wavelengths and `factor` for long ones. Between them its inverse is a linear function of
    the rotations in the original context, and that line gives the two bounds. Only the ratio of the bounds and the
    original context are determined, so low_freq_factor is taken as 1, as in every published model.
    """
    frequencies = float(theta) ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factor = round(float(divisors.max()), 4)
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor) if factor > 1 else divisors
    between = (share > 1e-3) & (share < 1 - 1e-3)
    low_to_high = 0.0  # high - low, in units of low
    if len(divisors) == len(frequencies) and factor > 1 and between.sum() >= 2:
        x = frequencies[between] / (2 * torch.pi)
        slope, start = torch.linalg.lstsq(torch.stack((x, torch.ones_like(x)), 1), share[between]).solution.tolist()
        low_to_high = -1 / start if start < 0 else 0.0
        original = round(slope * low_to_high)
    line = ((original * frequencies / (2 * torch.pi) - 1) / low_to_high).clamp(0, 1) if low_to_high else None
    if line is None or (line - share).abs().max() > 1e-3:
        raise ValueError(f"{where}: rope_freqs.weight is not Llama 3's scaling; no other is implemented.")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling["high_freq_factor"] = round(1 + low_to_high, 4)
    return scaling | {"original_max_position_embeddings": original}
