"""Draft heads written as GGUF files for llama.cpp: EAGLE-3 ("eagle3"), and DFlash, DFlash2 and DSpark ("dflash")."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from families.config import ModelConfig
from support.errors import UsageError
from weights.block_heads import BlockConfig, BlockFile, block_tensors
from weights.gguf import GGUFFile
from weights.gguf_heads import DFLASH, DFLASH_BLOCK, EAGLE, EAGLE_BLOCK, halves
from weights.heads import EagleConfig, EagleFile, head_tensors, published_parts


def write_head(path: Path, file: EagleFile | BlockFile, tokens: Path, dtype: torch.dtype = torch.float16) -> str:
    """Write a head as llama.cpp reads it, with matrices in `dtype`; of a rounded one the values that it stands for.

    tokens: the target. Of a GGUF file the tokenizer is copied, and otherwise stand-ins tell how many tokens there are:
    llama.cpp takes the tokenizer of the target that runs. Returns what a user has to know, or "". Raises UsageError for
    what its files cannot tell.
    """
    config, layer = file.config, file.config.layer
    if isinstance(config, EagleConfig):
        architecture, keys, table = "eagle3", _eagle_keys(config), (EAGLE, EAGLE_BLOCK, head_tensors(config))
    else:
        architecture, keys, table = "dflash", _dflash_keys(config), (DFLASH, DFLASH_BLOCK, block_tensors(config))
    top, block, own = table
    tensors = _named(published_parts(own, file.floats()), top, block)
    if architecture == "eagle3":  # llama.cpp rotates neighbouring rows of Q and K
        for part, heads in (("attn_q", layer.num_attention_heads), ("attn_k", layer.num_key_value_heads)):
            rows = tensors[f"blk.0.{part}.weight"]
            tensors[f"blk.0.{part}.weight"] = rows[halves(len(rows), heads).argsort()]
    if (ids := file.tensors.get("draft_ids")) is not None:
        tensors["d2t"] = ids.long()
    key, count = "tokenizer.ggml.", config.target_vocab_size
    given = GGUFFile.open(tokens).metadata if tokens.suffix == ".gguf" else {}
    texts = {name: value for name, value in given.items() if name.startswith(key)}
    if not texts:
        keys["vocab_size"] = count
        texts = {f"{key}model": "none"}
        if architecture == "dflash":  # it needs a token for the mask, and so tokens
            texts = {f"{key}model": "llama", f"{key}tokens": [f"<{i}>" for i in range(count)]}
    if architecture == "dflash":
        texts[f"{key}mask_token_id"] = config.mask_id
    _write(path, architecture, layer, keys, tensors, texts, dtype)
    if architecture == "eagle3" and (window := layer.windows[0]):
        return f"the head sees {window} tokens; in llama.cpp it sees the whole text, and drafts worse behind a long one"
    return ""


def _eagle_keys(config: EagleConfig) -> dict[str, Any]:
    """What "eagle3" has besides the geometry."""
    c = config.layer
    problems = {
        "EAGLE-1": config.version != 3,
        f"{len(config.taps)} tapped layers, which must be 3": len(config.taps) != 3,
        "EAGLE 3.1": config.fc_norm or config.norm_output,
        "biases, or norms of queries and keys": config.fc_bias or c.qkv_bias or c.o_bias or c.qk_norm,
    }
    _refuse(problems)
    keys = {"target_layers": list(config.taps), "target_hidden_size": config.target_hidden_size}
    return keys | {"norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc}


def _dflash_keys(config: BlockConfig) -> dict[str, Any]:
    """What "dflash" has besides the geometry."""
    c, two = config.layer, config.markov == "selector"
    windows = {window for window in c.windows if window}
    problems = {
        f"a Markov head of the kind {config.markov}": config.markov in ("gated", "rnn"),
        "convolutions without a selector, or the reverse": two != bool(config.conv_taps),
        "windows of several sizes": len(windows) > 1,
        "a hidden size other than the target's": c.hidden_size != config.target_hidden_size,
        "a vocabulary of its own with a selector": two and config.has_lm_head,
    }
    _refuse(problems)
    keys: dict[str, Any] = {"target_layers": list(config.taps), "block_size": config.slots}
    if config.causal == config.causal_window:  # otherwise it depends on the layer
        keys["attention.causal"] = config.causal
    if windows:
        keys["attention.sliding_window"] = windows.pop()
        keys["attention.sliding_window_pattern"] = [bool(window) for window in c.windows]
    if config.embedding_scale != 1:
        keys["embedding_scale"] = float(config.embedding_scale)
    if two:
        keys |= {"selector_rank": config.rank, "selector_top_k": config.shortlist}
        keys |= {"conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group}
        keys |= {"logit_scale": float(config.logits_scale), "final_logit_softcapping": float(config.logits_cap)}
    elif config.markov or config.slot0:
        keys |= {"sample_from_anchor": config.slot0, "has_confidence_head": False}
    return keys


def _refuse(problems: Mapping[str, bool]) -> None:
    """Raise UsageError for the first of these that is there."""
    for what, there in problems.items():
        if there:
            raise UsageError(f"llama.cpp's files cannot tell a head with {what}.")


def _write(
    path: Path, architecture: str, layer: ModelConfig, keys: Mapping[str, Any], tensors: Mapping[str, Tensor],
    tokenizer: Mapping[str, Any], dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write a file, with matrices in `dtype`.

    Args:
        layer: the geometry of its layers.
        keys: what the architecture has besides, without its name.
        tensors: by their names in the file. Rows of Q and K are in llama.cpp's order already.
        tokenizer: keys of the target's GGUF file that say what its tokens are.

    Raises UsageError if the package gguf is missing, or for a rotation that llama.cpp's files cannot tell.
    """
    try:
        import gguf
    except ImportError as error:
        raise UsageError("writing a GGUF file needs the package gguf: pip install gguf") from error
    rope, tensors = layer.rope, dict(tensors)
    if rope.kind not in ("default", "linear", "yarn", "llama3") or rope.partial != 1:
        raise UsageError(f"llama.cpp's files have no rotation of the kind {rope.kind} for a head.")
    found = {
        "context_length": layer.max_position_embeddings,
        "embedding_length": layer.hidden_size,
        "block_count": layer.num_hidden_layers,
        "feed_forward_length": layer.intermediate_size,
        "attention.head_count": layer.num_attention_heads,
        "attention.head_count_kv": layer.num_key_value_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "attention.layer_norm_rms_epsilon": float(layer.rms_norm_eps),
        "rope.dimension_count": layer.head_dim,
        "rope.freq_base": float(rope.theta),
    }
    if rope.kind == "llama3":  # as divisors of the frequencies
        plain = replace(rope, kind="default").frequencies(layer.head_dim)[0]
        tensors["rope_freqs.weight"] = plain / rope.frequencies(layer.head_dim)[0]
    elif rope.kind != "default":
        found |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
        found |= {"rope.scaling.original_context_length": rope.original_max_positions} if rope.kind == "yarn" else {}
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    named = {f"{architecture}.{key}": value for key, value in (found | dict(keys)).items()}
    for key, value in (named | dict(tokenizer)).items():
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        wide = tensor.dim() == 1 or not name.endswith(".weight")  # as llama.cpp's own converter has it
        values = tensor if not tensor.is_floating_point() else tensor.float() if wide else tensor.to(dtype)
        if values.dtype == torch.bfloat16:
            writer.add_tensor(name, values.view(torch.uint16).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(tensors: Mapping[str, Tensor], top: dict[str, str], block: dict[str, str]) -> dict[str, Tensor]:
    """Published tensors under the names of a GGUF file; of several names the first one."""
    names = {theirs: ours for table in (block, top) for ours, theirs in reversed(table.items())}
    found = {}
    for name, tensor in tensors.items():
        layer, rest = re.fullmatch(r"(?:layers\.(\d+)\.)?(.*)", name).groups()
        base, dot, ending = (rest, ".", "weight") if rest.endswith("_codebook") else rest.rpartition(".")
        base, ending = (rest, "") if ending not in ("weight", "bias") else (base, dot + ending)
        found[f"blk.{layer}." * bool(layer) + names[base] + ending] = tensor
    return found
