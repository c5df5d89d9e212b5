"""TODO."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model import DTYPES, ModelConfig, Transformer
from support.files import read_json
from weights.files import Entry, Progress, check_entries, read_entries, tensor_files
from weights.hf import build_model, copy_tensors, hf_views, materialise, read_config, token_ids
from weights.meta import read_meta
from weights.published import fill_published
from weights.quantized import QuantSpec, apply_spec_, fill_


def load_config(directory: str | Path) -> ModelConfig:
    """The geometry of the model in `directory` (Hugging Face, ours, or Meta). ValueError in one line if unusable.

    Stop ids are transformers': those of generation_config.json, or else config.json's.
    """
    directory = _existing(directory)
    config = read_meta(directory)[0] if is_meta(directory) else read_config(directory)
    return _with_stops(config, directory)


def _with_stops(config: ModelConfig, directory: Path) -> ModelConfig:
    """With the stop ids of generation_config.json, if it names any."""
    if not (file := directory / "generation_config.json").is_file():
        return config
    stops = token_ids(read_json(file), "eos_token_id", str(file), config.vocab_size, directory)
    return replace(config, eos_token_ids=stops or config.eos_token_ids)


def open_model(directory: str | Path) -> tuple[ModelConfig, dict[str, Entry]]:
    """Config and unread tensors (Hugging Face names) of an unquantized directory. ValueError in one line if unusable."""
    directory = _existing(directory)
    if is_meta(directory):
        config, entries = read_meta(directory)
        return _with_stops(config, directory), entries
    config = load_config(directory)
    if not (files := tensor_files(directory)):
        raise ValueError(f"{directory}: no model*.safetensors, no pytorch_model*.bin. All downloaded?")
    return config, read_entries(files)


def load_model(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    max_positions: int | None = None,
) -> Transformer:
    """Read a model directory straight onto `device`, one tensor at a time (never two copies of the model).

    Args:
        directory: Hugging Face layout (`.safetensors` or `.bin`, sharded or not), ours, Meta's, or a quantized one.
        device: where the weights go.
        dtype: of the weights; default: config.json's.
        progress: called with (bytes done, bytes in total, tensor name) after each tensor.
        max_positions: length of the rotary tables; default: all positions of the config.

    Returns:
        The model in eval mode, without gradients, rotary tables built.

    Raises:
        ValueError: one line that names the file and the tensor or key, and what to do.
    """
    directory = _existing(directory)
    raw = {} if is_meta(directory) else read_json(directory / "config.json")
    if raw.get("eaglet_quant") or raw.get("quantization_config"):
        return load_quantized(directory, raw, device, dtype, progress, max_positions)
    config, entries = open_model(directory)
    model = build_model(config)
    fused = any(name.endswith(".experts.gate_up_proj") for name in entries)
    duplicate = entries.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    shapes = {name: tuple(view.shape) for name, view in hf_views(model, fused).items()}
    check_entries(shapes, entries, str(directory))
    materialise(model, device, dtype or DTYPES[config.dtype], max_positions)
    copy_tensors(hf_views(model, fused), entries, progress)
    if duplicate is not None:
        stored, embedding = duplicate.read(), model.embed_tokens.weight
        if stored.shape != embedding.shape or not torch.equal(stored.to(embedding), embedding):
            why = "lm_head.weight differs from the embedding although tie_word_embeddings is true"
            raise ValueError(f"{directory}: {why}. Set it to false if the model has its own LM head.")
    return model


def _existing(directory: str | Path) -> Path:
    if not (directory := Path(directory)).is_dir():
        hint = "Pass a folder with config.json and weights (python -m scripts.download REPO fetches one)."
        raise ValueError(f"{directory} is not a directory. {hint}")
    return directory


def is_meta(directory: Path) -> bool:
    return (directory / "params.json").exists() and not (directory / "config.json").exists()


def load_quantized(
    directory: str | Path,
    raw: dict[str, Any],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    max_positions: int | None = None,
) -> Transformer:
    """Our quantized directory, or a published GPTQ, AWQ or compressed-tensors (W4A16) one, as a ready Transformer.

    raw: its config.json. dtype: of embedding, norms and biases (default: config.json's); stored codes and scales are
    kept exactly. One module at a time, so nothing is held twice. Strict: ValueError names file and tensor.
    """

    where = str(Path(directory) / "config.json")
    config = load_config(directory)
    entries = read_entries(tensor_files(Path(directory)))
    model, dtype, spec = build_model(config), dtype or DTYPES[config.dtype], None
    if raw.get("eaglet_quant"):
        spec = QuantSpec.read(raw["eaglet_quant"], where)
        apply_spec_(model, spec, entries)
        fill_(model, entries, str(directory), device, dtype, progress)
    else:
        fill_published(model, entries, raw["quantization_config"], where, device, dtype, progress)
    model.quant = spec.mode if spec else f"int4 ({raw['quantization_config']['quant_method']})"  # for reports
    model.rotary.build(device, min(max_positions or config.max_positions, config.max_positions))
    return model.eval().requires_grad_(False)
