"""Medusa heads: reading and writing their published file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from model_config import ModelConfig
from weights.files import check_entries, check_finite, read_entries, write_safetensors

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MEDUSA_TENSOR = re.compile(r"([0-9]|[1-9][0-9])\.(0\.linear\.weight|0\.linear\.bias|1\.weight)")


def read_medusa(path: str | Path, target: ModelConfig) -> dict[str, Tensor]:
    """Read Medusa heads from a file called as in MEDUSA_FILES, or from the folder that holds one.

    The tensors are `{i}.0.linear.weight` [H, H], `{i}.0.linear.bias` [H] and `{i}.1.weight` [V, H]. The last kind is
    there for all heads or for none. Without it the heads share the target's LM head. Raises ValueError in one line for
    anything else. Heads of several blocks are not supported.
    """
    path = Path(path)
    H, V = target.hidden_size, target.vocab_size
    if path.is_dir():
        found = [path / name for name in MEDUSA_FILES if (path / name).is_file()]
        if len(found) != 1:
            raise ValueError(f"{path}: expected one of {', '.join(MEDUSA_FILES)}, found {len(found)}.")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected {' or '.join(MEDUSA_FILES)}.")
    entries = read_entries([path])
    if not entries or any(MEDUSA_TENSOR.fullmatch(name) is None for name in entries):
        known = "'0.0.linear.weight', ..., '0.1.weight'"
        raise ValueError(f"{path}: not Medusa heads of one block each ({known}).")
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(1 + max(int(name.split(".")[0]) for name in entries)):
        shapes |= {f"{i}.0.linear.weight": (H, H), f"{i}.0.linear.bias": (H,)}
        if any(name.endswith(".1.weight") for name in entries):
            shapes[f"{i}.1.weight"] = (V, H)
    check_entries(shapes, entries, str(path))
    tensors = {name: entry.read() for name, entry in entries.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, name, str(path))
    return tensors


def save_medusa(tensors: Mapping[str, Tensor], directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `medusa_lm_head.safetensors` with the published names, in `dtype`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    cast = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
    write_safetensors(directory / MEDUSA_FILES[0], cast)
