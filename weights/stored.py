"""Our own format for a quantized model: config.json with `eaglet_quant`, and one model.safetensors with our names.

The tensors are those of `weights.quantized`, under the names of the modules' state dict.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from model import Transformer
from support.errors import BadFileError, UsageError
from support.reader import ConfigReader
from weights.files import Destination, Entries, check_entries, check_finite
from weights.quantized import ALGORITHMS, HEADS, MODES, QuantSpec, apply_spec_, set_tensor

VERSION = 1


def spec_to_json(spec: QuantSpec) -> dict[str, Any]:
    """The `eaglet_quant` object of a config.json."""
    return {"version": VERSION, **asdict(spec)}


def read_spec(value: Any, where: str) -> QuantSpec:
    """The QuantSpec of an `eaglet_quant` object. Raises ValueError for another version or for unknown values."""
    version = value.get("version") if isinstance(value, dict) else None
    if type(version) is not int or version != VERSION:
        found = f"eaglet_quant version {version!r:.40}, this program reads version {VERSION}"
        raise ValueError(f"{where}: {found}. Quantize the original checkpoint again.")
    read = ConfigReader(value, f"{where} (eaglet_quant)")
    allowed = {"mode": MODES, "algorithm": ALGORITHMS, "lm_head": HEADS}
    texts = {key: read.text(key, None, values) for key, values in allowed.items()}
    group_size, act_order = read.integer("group_size"), read.boolean("act_order", False)
    try:
        return QuantSpec(group_size=group_size, act_order=act_order, **texts)
    except UsageError as error:
        raise BadFileError(f"{where}: {error}") from error


def read_stored(entries: Entries, name: str, where: str) -> Tensor:
    """One tensor of a quantized module. Raises ValueError in one line for values that it cannot have."""
    tensor = entries[name].read()
    if tensor.is_floating_point():
        check_finite(tensor, name, where)
    if name.endswith(".perm") and tensor.sort().values.tolist() != list(range(len(tensor))):
        raise ValueError(f"{where}: {name} is not a permutation of the inputs.")
    if name.endswith(".zeros") and (tensor > 15).any():
        raise ValueError(f"{where}: {name} holds zeros above 15. Damaged file?")
    return tensor


def fill_stored(model: Transformer, entries: Entries, spec: QuantSpec, where: str, to: Destination) -> None:
    """Make a meta model a quantized one and fill it from entries under its state-dict names, one tensor at a time.

    Embedding, norms and biases are cast. Codes and scales stay exactly as they are stored. Raises ValueError in one line
    for tensors that do not match.
    """
    expected = dict(apply_spec_(model, spec, entries).state_dict())
    exact = {name: slot.dtype for name, slot in expected.items() if not slot.is_floating_point()}
    check_entries({name: tuple(slot.shape) for name, slot in expected.items()}, entries, where, exact)
    done, total = 0, sum(slot.nbytes for slot in expected.values())
    for name, slot in expected.items():
        tensor = read_stored(entries, name, where)
        cast = to.dtype if slot.is_floating_point() and not name.endswith(".scales") else None
        set_tensor(model, name, tensor.to(to.device, cast, copy=True))  # a copy lets go of the mapped file
        done += slot.nbytes
        to.progress(done, total, name)
