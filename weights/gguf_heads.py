"""Draft heads in GGUF files, rewritten as the folders in which they are published: a config.json, and tensors.

llama.cpp's "eagle3" becomes EAGLE-3 of our own layout, whose flags are clear, "dflash" becomes DFlash, DFlash2 or DSpark
as speculators writes them, and "gemma4-assistant" what Google publishes. Names of earlier files, from before llama.cpp
had these architectures, are read too. All matrices are read as floats.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weights.files import Entry
from weights.gguf import LAYER, GGUFFile, GGUFTensor, errors_of
from weights.gguf_metadata import HEADS, geometry, getter, hf_config
from weights.gguf_tokenizer import token_texts
from weights.gguf_types import PLAIN_TYPES, values_of

Published = tuple[dict[str, Any], dict[str, Entry]]  # a config.json, and tensors by name
PARTS = "attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_gate ffn_up ffn_down".split()
BLOCK = {part: LAYER[part] for part in PARTS} | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
TOP = {"fc": "fc", "token_embd": "embed_tokens", "output": "lm_head", "output_norm": "norm", "d2t": "d2t"}
EAGLE = TOP | {"enc.output_norm": "input_norm"}
EAGLE_BLOCK = BLOCK | {"attn_norm_2": "hidden_norm", "hidden_norm": "hidden_norm"}
SELECTOR = "candidate_selector."
DFLASH = TOP | {
    "dflash_fc": "fc",
    **dict.fromkeys(("enc.output_norm", "hidden_norm", "dflash_hidden_norm"), "hidden_norm"),
    **{f"markov_w{i}": f"markov_head.markov_w{i}" for i in (1, 2)},
    "conf_proj": "confidence_head.proj",
    "selector_hidden": f"{SELECTOR}hidden_projection",
    **{f"selector_{book}": f"{SELECTOR}{book}_codebook" for book in ("predecessor", "successor")},
}
DFLASH_BLOCK = BLOCK | {"post_attention_norm": "post_attention_layernorm"}  # so a fork calls the norm before the MLP
DFLASH_BLOCK |= {"attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel"}
DFLASH_BLOCK |= {"attn_conv_proj": "attention_conv.kernel_projection", "ffn_conv_proj": "mlp_conv.kernel_projection"}

# An assistant's, whose matrices lie at the top under three spellings.
ASSISTANT = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "pre_projection": "nextn.pre_projection mtp.pre_projection mtp_pre_proj",
    "post_projection": "nextn.post_projection mtp.post_projection mtp_post_proj",
    "masked_embedding.centroids": "masked_embd_centroids mtp.centroids mtp_centroids",
    "masked_embedding.token_ordering": "masked_embd_ordering mtp.token_ordering mtp_token_ordering",
}
ASSISTANT = {spelling: name for name, spellings in ASSISTANT.items() for spelling in spellings.split()}
ASSISTANT_BLOCK = BLOCK | {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
ASSISTANT_BLOCK |= {"post_ffw_norm": "post_feedforward_layernorm", "layer_output_scale": "layer_scalar"}


def published(path: Path) -> Published:
    """The config.json and the tensors that the head in a GGUF file would be published with.

    Raises ValueError in one line for a damaged file, or one with anything that is not understood.
    """
    file = GGUFFile.open(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in HEADS:
        raise ValueError(f"{path}: architecture {architecture!r:.60} is no draft head; supported: {', '.join(HEADS)}")
    with errors_of(path):
        return READERS[architecture](file)


def _eagle3(file: GGUFFile) -> Published:
    config, keys = _config(file), file.metadata
    taps = keys.get("eagle3.target_layers", keys.get("eagle3.extract_layers"))  # the earlier name
    if taps is None:
        raise ValueError("eagle3.target_layers, the layers that it reads, is missing")
    flags = {name: keys.get(f"eagle3.{name}", False) for name in ("norm_before_residual", "norm_before_fc")}
    config["eaglet_eagle"] = flags | {"eagle_aux_hidden_state_layer_ids": taps, "norm_output": False}
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    # llama.cpp rotates neighbouring rows of Q and K, where published heads have halves of a head.
    orders = {part: halves(file.tensors[f"blk.0.{part}.weight"].shape[1], count) for part, count in heads.items()}
    if "d2t" in file.tensors:
        ids = values_of(file.tensors["d2t"].kind, file.tensors["d2t"].data).long().flatten()
        # Until May 2026 these were offsets, of which those of the first ids are the same.
        if "blk.0.hidden_norm.weight" in file.tensors and (ids.diff() <= 0).any():
            ids = ids + torch.arange(len(ids))
        orders |= dict.fromkeys(("d2t", "output"), ids.argsort())
    entries = _entries(file, EAGLE, EAGLE_BLOCK, orders)
    if "d2t" in entries:
        offsets = ids.sort().values - torch.arange(len(ids))
        entries["d2t"] = Entry(tuple(offsets.shape), offsets.dtype, file.path.name, lambda: offsets)
    return config, entries


def _dflash(file: GGUFFile) -> Published:
    layer, keys, tensors = _config(file), file.metadata, file.tensors
    fork = keys["general.architecture"] == "dflash-draft"
    prefix, attention = "dflash-draft.dflash." if fork else "dflash.", f"{keys['general.architecture']}.attention."

    def first(*names: str) -> Any:
        return next((keys[name] for name in names if name in keys), None)

    taps = first(f"{prefix}target_layers", f"{prefix}target_layer_ids")
    if fork and isinstance(taps, list):  # it names the layers whose outputs are read
        taps = [tap + 1 for tap in taps]
    kind = "dflash2" if "selector_hidden.weight" in tensors else "dspark" if "markov_w1.weight" in tensors else "dflash"
    config = {
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": taps,
        "block_size": first(f"{prefix}block_size"),
        "mask_token_id": first("tokenizer.ggml.mask_token_id", f"{prefix}mask_token_id"),
        "is_causal": first(f"{attention}causal"),
        "sample_from_anchor": first(f"{prefix}sample_from_anchor"),
    }
    if kind == "dspark":
        config |= {"markov_rank": tensors["markov_w1.weight"].shape[0], "markov_head_type": "vanilla"}
    if estimate := tensors.get("conf_proj.weight"):
        config["confidence_head_with_markov"] = estimate.shape[0] > layer["hidden_size"]
    same = "selector_rank selector_top_k conv_kernel_size conv_group_size final_logit_softcapping".split()
    names = dict(zip(same, same, strict=True))
    names |= {"input_embedding_scale": "embedding_scale", "output_multiplier": "logit_scale"}
    config["dflash_config"] = {ours: first(f"{prefix}{theirs}") for ours, theirs in names.items()}
    windows = first(f"{attention}sliding_window_pattern")
    if isinstance(windows, list):
        layer["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
        layer |= {"sliding_window": first(f"{attention}sliding_window"), "use_sliding_window": any(windows)}
    entries = _entries(file, DFLASH, DFLASH_BLOCK, {})
    if "d2t" in entries:
        ids = entries["d2t"].read().long()
        entries["d2t"] = entries["d2t"]._replace(dtype=ids.dtype, read=lambda: ids - torch.arange(len(ids)))
    return config, entries


def _assistant(file: GGUFFile) -> Published:
    name, tensors = file.metadata["general.architecture"], file.tensors
    # All its layers read the keys of another model, whatever the file says.
    keys = {key.replace(f"{name}.", "gemma4.", 1): value for key, value in file.metadata.items()}
    keys |= {"general.architecture": "gemma4", "gemma4.attention.shared_kv_layers": 0}

    def first(*names: str) -> Any:
        return next((keys[f"gemma4.{key}"] for key in names if f"gemma4.{key}" in keys), None)

    config = {
        "model_type": "gemma4_assistant",
        "text_config": hf_config(keys, tensors, file.rotations, str(file.path)) | {"attention_k_eq_v": False},
        "backbone_hidden_size": first("embedding_length_out", "n_embd_backbone", "backbone_embedding_length"),
    }
    entries = _entries(file, ASSISTANT, ASSISTANT_BLOCK, {}, "model.layers")
    if clusters := entries.get("masked_embedding.centroids.weight"):
        config |= {"use_ordered_embeddings": True, "num_centroids": clusters.shape[0]}
        config["centroid_intermediate_top_k"] = first("centroid_top_k") or 32
    return config, entries


READERS = dict(zip(HEADS, (_eagle3, _dflash, _dflash, _assistant, _assistant, _assistant), strict=True))


def _config(file: GGUFFile) -> dict[str, Any]:
    """The sizes of layers, and of the vocabulary if the file has its tokens."""
    where = str(file.path)
    get = getter(file.metadata, where)
    config = geometry(get, file.rotations, where)
    if get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise ValueError("a rotation of only a part of each head is not implemented")
    return config | ({"vocab_size": count} if (count := len(token_texts(file.metadata))) else {})


def _entries(
    file: GGUFFile, top: dict[str, str], block: dict[str, str], orders: dict[str, Tensor], layers: str = "layers"
) -> dict[str, Entry]:
    """All tensors under their published names. orders: of the rows of some of them, by their names here."""
    entries = {}
    for tensor in file.tensors.values():
        layer, name, ending = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*?)(\.weight|\.bias|)", tensor.name, re.DOTALL).groups()
        if name == "rope_freqs":
            continue
        if (names := block if layer else top).get(name) is None:
            raise ValueError(f"tensor {tensor.name!r:.80} is not understood")
        there = names[name] + ending * (not names[name].endswith(("_codebook", "_ordering", "_scalar")))
        there = f"{layers}.{layer}.{there}" if layer else there
        read = partial(_read, tensor, orders.get(name))
        entries[there] = Entry(tensor.shape[::-1], PLAIN_TYPES.get(tensor.kind, torch.float32), file.path.name, read)
    return entries


def _read(tensor: GGUFTensor, order: Tensor | None) -> Tensor:
    values = values_of(tensor.kind, tensor.data)
    return values if order is None else values[order]


def halves(rows: int, heads: int) -> Tensor:
    """Where rows lie whose neighbours are rotated together, in the order of the halves of each head."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
