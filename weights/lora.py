"""LoRA adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors.

An adapter adds s B A to the matrix W of some linears, where A is [r, in] and B [out, r]; s is alpha / r, or alpha divided
by the root of r.

Where W is stored and computed with in float32, or computed with in float64, the sum takes its place. Elsewhere it would
be rounded more coarsely than A and B are, or need more memory than W. So W stays, and y = W x + (s B) (A x). Where we
fuse linears, their A lie one below the other, and their B on the diagonal of a matrix.

Of several adapters, all A lie one below the other, too, and all B side by side. Each row of a forward has one adapter or
none: what the A of others give becomes zero. So a row gets the numbers that it would get from its adapter alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernels
from families.config import ModelConfig
from model import Transformer, linear
from support.errors import UsageError
from support.files import read_json
from support.reader import ConfigReader, is_a
from weights.files import Entry, check_finite, few_names, local_path, read_entries
from weights.hf import as_computed, build_model, hf_views, parameter_sources
from weights.quantized import replace_module

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MOST = 64  # the highest rank
ROWS = 4096  # the most rows of a forward whose adapters can be chosen
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OURS = re.compile(r"layers\.\d+\.(attention\.(qkv|o|qkvz|ba|out)|mlp\.(shared\.)?(gate_up|down))\.weight")
# Keys of adapter_config.json that are read, and those that say nothing about a finished adapter.
READ = "peft_type r lora_alpha use_rslora target_modules rank_pattern alpha_pattern init_lora_weights".split()
IDLE = """task_type auto_mapping peft_version base_model_name_or_path revision inference_mode exclude_modules lora_dropout
    layers_to_transform layers_pattern megatron_core qalora_group_size ensure_weight_tying""".split()
OFF = (None, False, "none", [], {})  # what any other key may hold
KEEPS_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # ways to start that leave the base model alone


@dataclass(frozen=True)
class Pair:
    """What an adapter adds to some rows of one of our linears."""

    a: Entry  # [r, in]
    b: Entry  # [rows, r], its rows in our order
    scale: float
    first: int  # its first row in our linear, in which several may be fused
    outputs: int  # of our linear

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter whose tensors were checked, but not read."""

    name: str
    parts: Mapping[str, list[Pair]]  # by our parameter's name

    def bytes(self, size: int) -> int:
        """Bytes that it takes beside the weights, with `size` bytes for a number."""
        return size * sum(pair.rank * (pair.outputs + pair.a.shape[1]) for pair in self._pairs())

    def __str__(self) -> str:
        ranks = [pair.rank for pair in self._pairs()]
        return f"{self.name}: {len(ranks)} linears, rank {max(ranks)}"

    def _pairs(self) -> list[Pair]:
        return [pair for pairs in self.parts.values() for pair in pairs]


class Choice:
    """Which of several adapters each row of a forward has: 0 is none, and i the i-th of `names`."""

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names)
        self.rows = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self._set: list[int] = []

    def set(self, adapters: list[int]) -> None:
        """From now on the first rows of a forward have these adapters. Where steps are captured, they read it anew."""
        if adapters != self._set:
            self.rows[: len(adapters)] = torch.tensor(adapters)
            self._set = adapters


class LoraLinear(nn.Module):
    """A linear of any kind and what is added to it, in the place of a `QuantLinear`."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, choice: Choice | None = None, ranks: Sequence[int] = ()):
        """ranks: how many rows of A each adapter of `choice` has."""
        super().__init__()
        self.base = base
        self.down, self.up = (nn.Linear(*t.shape[::-1], bias=False, device="meta") for t in (a, b))
        self.down.weight, self.up.weight = (nn.Parameter(t, requires_grad=False) for t in (a, b))
        self.choice = choice
        owner = torch.arange(1, len(ranks) + 1).repeat_interleave(torch.tensor(ranks, dtype=torch.int64))
        self.register_buffer("owner", owner.to(a.device), persistent=False)  # [r]: the adapter of each row of A

    def forward(self, x: Tensor, residual: Tensor | None = None, gated: int = 0) -> Tensor:
        """As `QuantLinear.forward`."""
        low = self.down(x)
        if self.choice is not None:
            own = self.choice.rows[: len(x), None] == self.owner
            low = torch.where(own.view(len(x), *[1] * (x.dim() - 2), -1), low, 0)
        return kernels.epilogue(linear(self.up, low, self.base(x)), None, residual, gated)

    def heads(self, x: Tensor, head_dim: int, *turn: Any) -> tuple[Tensor, Tensor | None]:
        """As `QuantLinear.heads`."""
        return kernels.rope_write_kv(self(x).unflatten(-1, (-1, head_dim)), *turn)


def choice_of(model: nn.Module) -> Choice | None:
    """What chooses among the adapters of a model, None where it has one or none."""
    return next((m.choice for m in model.modules() if isinstance(m, LoraLinear)), None)


def split_name(text: str) -> tuple[str, str]:
    """The name, "" for none, and the folder of NAME=DIR or DIR."""
    name, _, place = text.partition("=")
    named = bool(place) and "/" not in name and not local_path(text).is_dir()
    return (name, place) if named else ("", text)


def read_adapters(folders: Sequence[str], config: ModelConfig) -> tuple[Adapter, ...]:
    """The adapters in these folders, each of which may be NAME=DIR (`read_adapter`). Raises UsageError for a name that
    two of them have."""
    adapters: dict[str, Adapter] = {}
    for text in folders:
        name, place = split_name(text)
        adapter = read_adapter(place, config)
        adapter = replace(adapter, name=name or adapter.name)
        if adapter.name in adapters:
            raise UsageError(f"two adapters are called {adapter.name!r:.80}; name them: --lora NAME=DIR.")
        adapters[adapter.name] = adapter
    return tuple(adapters.values())


def read_adapter(folder: str | Path, config: ModelConfig) -> Adapter:
    """The adapter in a folder, for a model of this geometry.

    Raises ValueError in one line for settings that are not implemented, and for tensors that do not fit the model.
    """
    path = local_path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory. --lora takes a folder with {CONFIG} and {TENSORS}.")
    settings = _settings(path / CONFIG)
    entries, where = read_entries([path / TENSORS]), str(path / TENSORS)
    found = {name: NAME.fullmatch(name) for name in entries}
    if odd := [name for name, match in found.items() if not match]:
        raise ValueError(f"{where}: {few_names(odd)} is no matrix of a LoRA, or not implemented.")
    places = {match[1]: [f"base_model.model.{match[1]}.lora_{x}.weight" for x in "AB"] for match in found.values()}
    if missing := [name for names in places.values() for name in names if name not in entries]:
        raise ValueError(f"{where}: {few_names(missing)} is missing.")
    named = settings.config["target_modules"]
    if isinstance(named, list) and (lost := [n for n in named if not any(f".{p}".endswith(f".{n}") for p in places)]):
        raise settings.error(f"target_modules names {', '.join(map(str, lost))}, of which {TENSORS} holds nothing.")
    model = build_model(config)
    views = hf_views(model)
    b_entries = as_computed({f"{place}.weight": entries[names[1]] for place, names in places.items()}, config)
    parts: dict[str, list[Pair]] = {}
    for ours, names in parameter_sources(model, views).items():
        first, outputs = 0, sum(len(views[name]) for name in names)
        for name in names if OURS.fullmatch(ours) else ():
            place, (rows, k) = name.removesuffix(".weight"), views[name].shape
            if (b := b_entries.pop(name, None)) is not None:
                a, (rank, scale) = entries[places[place][0]], _rank_and_scale(settings, place)
                if tuple(a.shape) != (rank, k) or tuple(b.shape) != (rows, rank):
                    shapes = f"{list(a.shape)} and {list(b.shape)}, expected {[rank, k]} and {[rows, rank]}"
                    raise ValueError(f"{where}: {place} has {shapes}: not an adapter for this model.")
                parts.setdefault(ours, []).append(Pair(a, b, scale, first, outputs))
            first += rows
    if b_entries or not parts:
        which = next((name.removesuffix(".weight") for name in b_entries), "nothing")
        raise ValueError(f"{where} changes {which:.120}; only linears of a model's attention and MLP can be changed.")
    return Adapter(path.resolve().name, parts)


def _settings(file: Path) -> ConfigReader:
    """What adapter_config.json says. Raises ValueError that names a key which is not implemented."""
    read = ConfigReader(read_json(file), str(file))
    read.text("peft_type", None, ("LORA",))
    for key, value in read.config.items():
        if key not in (*READ, *IDLE) and value not in OFF:
            raise read.error(f"{key} = {value!r:.60} is not implemented. Merge the adapter into its model with PEFT.")
    if read.config.get("init_lora_weights", True) not in KEEPS_THE_BASE:
        started = f"init_lora_weights = {read.config['init_lora_weights']!r:.40} has changed the base model, too"
        raise read.error(f"{started}. Convert the adapter with PEFT's path_initial_model_for_weight_conversion.")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = read.config.get(key) or {}
        if not isinstance(pattern, dict) or not all(is_a(value, float) for value in pattern.values()):
            raise read.error(f"{key} must be an object of numbers.")
        if odd := [name for name in pattern if not re.fullmatch(r"[\w.]+", name)]:
            raise read.error(f"{key} has the key {odd[0]!r:.60}; only names are implemented.")
    if not isinstance(read.config.get("target_modules"), str | list):
        raise read.error("target_modules must be a list of names, or a text.")
    return read


def _rank_and_scale(settings: ConfigReader, place: str) -> tuple[int, float]:
    """The rank of a linear's adapter, and the factor of what it adds: by the first key of a pattern with which the name
    of the linear ends, or else by the settings."""
    own = dict(settings.config)
    for key, pattern in {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}.items():
        found = [value for name, value in (own.get(pattern) or {}).items() if f".{place}".endswith(f".{name}")]
        own[key] = found[0] if found else own.get(key)
    read = ConfigReader(own, settings.where)
    rank = read.integer("r", high=MOST)
    return rank, read.number("lora_alpha", 8.0) / (rank**0.5 if read.boolean("use_rslora", False) else rank)


def _stacked(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """A [r, in] and s B [out, r] of one of our linears, in float64."""
    b, at = torch.zeros(pairs[0].outputs, sum(pair.rank for pair in pairs), dtype=torch.float64), 0
    for pair in pairs:
        own = pair.scale * pair.b.read().double()
        b[pair.first : pair.first + len(own), at : at + pair.rank] = own
        at += pair.rank
    return torch.cat([pair.a.read().double() for pair in pairs]), b


def add_(model: Transformer, adapters: Sequence[Adapter], merge: bool) -> None:
    """Add adapters to a model that is not packed yet. merge: a single one into its matrices, which then are floats.

    Raises ValueError in one line for values that are not finite.
    """
    choice = Choice([adapter.name for adapter in adapters], model.device) if len(adapters) > 1 else None
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.parts):
        place = name.removesuffix(".weight")
        base = model.get_submodule(place)
        of_each = [adapter.parts.get(name, []) for adapter in adapters]
        file = next(pairs[0].a.file for pairs in of_each if pairs)
        stacks = [_stacked(pairs) for pairs in of_each if pairs]
        a, b = torch.cat([a for a, _ in stacks]), torch.cat([b for _, b in stacks], 1)
        if merge:
            base.weight.copy_(base.weight.double() + (b @ a).to(model.device))
            check_finite(base.weight, place, file)
            continue
        a, b = (t.to(model.device, model.dtype) for t in (a, b))
        for tensor in (a, b):
            check_finite(tensor, place, file)
        ranks = [sum(pair.rank for pair in pairs) for pairs in of_each] if choice else ()
        replace_module(model, place, LoraLinear(base, a, b, choice, ranks))
