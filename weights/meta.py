"""Meta's own checkpoints: params.json and consolidated.*.pth, as a config and entries under Hugging Face names.

Large models are split into model-parallel shards, and each shard holds a part of nearly every tensor. Meta orders the
rows of q and k for rotating neighbouring pairs of dimensions. Both are put right while the tensors are read.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from model_config import ModelConfig
from support.files import read_json
from support.reader import ConfigReader
from weights.files import Entry, Spans, few_names, pickle_entries

# Meta name = Hugging Face name : dimension that the shards split ("-" where every shard holds the whole tensor)
META_TOP = {"tok_embeddings": "model.embed_tokens:1", "norm": "model.norm:-", "output": "lm_head:0"}
META_LAYER = """attention.wq=self_attn.q_proj:0 attention.wk=self_attn.k_proj:0 attention.wv=self_attn.v_proj:0
    attention.wo=self_attn.o_proj:1 feed_forward.w1=mlp.gate_proj:0 feed_forward.w3=mlp.up_proj:0
    feed_forward.w2=mlp.down_proj:1 attention_norm=input_layernorm:- ffn_norm=post_attention_layernorm:-"""
META_LAYER = dict(pair.split("=") for pair in META_LAYER.split())
META_KEYS = """dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta head_dim
    hidden_dim sliding_window use_scaled_rope rope_scaling_factor max_seq_len max_batch_size"""


def is_meta(directory: Path) -> bool:
    """Whether a directory is in Meta's format. A config.json beside params.json takes precedence."""
    return (directory / "params.json").exists() and not (directory / "config.json").exists()


def read_meta_config(directory: Path) -> ModelConfig:
    """The geometry that params.json and the shapes of the tensors describe.

    Raises ValueError in one line for keys that are not implemented, damaged files and missing shards.
    """
    where = str(directory / "params.json")
    params = read_json(directory / "params.json")
    for key in params.keys() - set(META_KEYS.split()):
        raise ValueError(f"{where}: {key!r:.80} is not implemented.")
    shards = _shards(directory, None)
    w1 = shards[0]["layers.0.feed_forward.w1.weight"]
    read = ConfigReader(params, where)
    dim, heads = read.integer("dim"), read.integer("n_heads")
    rows = shards[0]["tok_embeddings.weight"].shape[0]
    vocab = rows * (len(shards) if _splits_vocabulary(shards, dim) else 1)
    llama3, scaled = vocab == 128256, read.boolean("use_scaled_rope", False)
    # LLaMA 3.2 (1B and 3B, the only ones below 4096) scales by 32. LLaMA 3.1 and 3.3 scale by 8.
    factor = read.number("rope_scaling_factor", 8.0 if dim >= 4096 else 32.0, 1.0)
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    longest = 131072 if scaled else 8192 if llama3 else 4096
    hf = {
        "model_type": "mistral" if params.get("sliding_window") else "llama",
        "hidden_size": dim,
        "intermediate_size": w1.shape[0] * len(shards),
        "num_hidden_layers": read.integer("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("n_kv_heads", heads),
        "head_dim": params.get("head_dim"),
        "vocab_size": vocab,
        "rms_norm_eps": read.number("norm_eps", 1e-5),
        "rope_theta": read.number("rope_theta", 10000.0, 1.0),
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192} if scaled else None,
        # params.json does not tell the trained context length. Add max_seq_len to it for LLaMA 1 or CodeLlama.
        "max_position_embeddings": read.integer("max_seq_len", longest),
        "sliding_window": params.get("sliding_window"),
        "tie_word_embeddings": "output.weight" not in shards[0],
        "torch_dtype": str(w1.dtype).removeprefix("torch."),
        "bos_token_id": 128000 if llama3 else 1,
        "eos_token_id": [128001, 128008, 128009] if llama3 else 2,
    }
    return ModelConfig.from_hf(hf, where)


def read_meta_entries(directory: Path, config: ModelConfig, share: tuple[int, int] = (0, 1)) -> dict[str, Entry]:
    """The tensors of all shards, joined, under Hugging Face names. A name without a counterpart keeps its own.

    share: see `pickle_entries`.
    """
    shards = _shards(directory, share)
    by_rows = _splits_vocabulary(shards, config.hidden_size)
    entries = {}
    for name in shards[0]:
        _, layer, inner, kind = re.fullmatch(r"(layers\.(\d+)\.)?(.*?)(\.weight)?", name, re.DOTALL).groups()
        target, _, split = (META_LAYER if layer else META_TOP).get(inner, "").partition(":")
        if not target or not kind:
            target, split = name, "-"  # the strict check of all names will refuse it
        else:
            target = f"model.layers.{layer}.{target}.weight" if layer else f"{target}.weight"
        if inner == "tok_embeddings" and by_rows:
            split = "0"
        rotated = config.head_dim if inner in ("attention.wq", "attention.wk") else 0
        pieces = [shard[name] for shard in (shards[:1] if split == "-" else shards)]
        entries[target] = _joined(pieces, 0 if split == "-" else int(split), rotated)
    return entries


def _shards(directory: Path, share: tuple[int, int] | None) -> list[dict[str, Entry]]:
    """The tensors of each consolidated.*.pth file, unread. All shards hold the same names. share: see pickle_entries."""
    files = sorted(directory.glob("consolidated.*.pth"))
    if not files or [f.name for f in files] != [f"consolidated.{i:02}.pth" for i in range(len(files))]:
        raise ValueError(f"{directory}: of consolidated.00.pth, 01, ... some are missing. Download it again.")
    shards = [pickle_entries(file, share) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if odd := shard.keys() ^ shards[0].keys():
            raise ValueError(f"{file}: {few_names(odd)} is not in every shard. Download it again.")
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in shards[0] or len(shards[0][name].shape) != 2:
            raise ValueError(f"{files[0]}: the matrix {name!r} is missing, so this is not a LLaMA of Meta's.")
    return shards


def _splits_vocabulary(shards: list[dict[str, Entry]], dim: int) -> bool:
    """Whether the shards split the embedding by vocabulary (LLaMA 3), and not by dimension (LLaMA 1 and 2)."""
    return shards[0]["tok_embeddings.weight"].shape[1] == dim


def _joined(pieces: list[Entry], split: int, head_dim: int) -> Entry:
    """One entry from the pieces of all shards. For q and k (head_dim > 0) the rows are put in half-rotation order."""
    shape = list(pieces[0].shape)
    if len(shape) > split:
        shape[split] *= len(pieces)
    if head_dim and shape[0] % head_dim:
        raise ValueError(f"{pieces[0].file}: {shape[0]} rows of q or k do not fit head_dim {head_dim}.")
    if any(piece.shape != pieces[0].shape for piece in pieces):
        raise ValueError(f"{pieces[0].file}: shards of one tensor differ in shape. Download them again.")

    def part(spans: Spans) -> Tensor:
        if spans.axis == split:
            parts, size = [], pieces[0].shape[split]
            for first, end in spans.pieces:
                for i, piece in enumerate(pieces):
                    start, stop = max(first - i * size, 0), min(end - i * size, size)
                    parts += [piece.read().narrow(split, start, stop - start)] if start < stop else []
        else:
            parts = [spans(piece.read()) for piece in pieces]
        rows = torch.cat(parts, split) if len(parts) > 1 else parts[0]
        return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) if head_dim else rows

    everything = Spans(split, ((0, shape[split]),))
    return Entry(tuple(shape), pieces[0].dtype, pieces[0].file, lambda: part(everything), part)
