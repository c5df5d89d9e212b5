"""Published EAGLE heads in and out: the layouts of SafeAILab, SpecForge and speculators, and bare weight files.

What a head is follows from its own tensors and its own config. Nothing is inferred from a file name, and nothing is
taken from the target that could differ in the head. A head that is read wrongly changes no output and only lowers the
acceptance, so every doubt is an error or a note.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from families.config import ModelConfig, RopeConfig
from support.errors import UsageError
from support.files import read_json
from support.reader import ConfigReader, check, is_a, parse_json, refusal
from weights.files import Entry, Shapes, check_entries, local_path, read_entries, tensor_files, write_directory
from weights.gguf_heads import Published, published
from weights.hf import config_to_hf, read_parameter
from weights.quantized import LOOKED_UP, TENSORS, QuantLinear, QuantSpec, empty_tensors, read_spec, spec_to_json
from weights.stored import check_stored, read_stored

ATTENTION, AUX = "layers.0.self_attn.", "eagle_aux_hidden_state_layer_ids"
# What the head's decoder layer takes from the head's config.
HEAD_KEYS = "num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling".split()
Config = TypeVar("Config")
# Our tensor name -> the published tensors whose rows it is made of, with their shapes.
Table = dict[str, dict[str, tuple[int, ...]]]
PADDING = 1024  # rows that a vocabulary may have more or less than the target's
SIZES = {2048: "1B", 3072: "3B", 4096: "7B or 8B", 5120: "13B", 6656: "33B", 8192: "70B"}


@dataclass(frozen=True)
class EagleConfig:
    """Geometry of an EAGLE head. `layer.vocab_size` is the draft vocabulary.

    `taps` name the target layers whose *input* is read. The number of layers stands for the state after the last layer,
    before the final norm. Version 1 has no taps.
    """

    version: int
    layer: ModelConfig
    target_hidden_size: int
    taps: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    has_embed: bool = False
    has_lm_head: bool = False
    target_vocab_size: int = 0  # needed to save a head that has a draft vocabulary
    mtp: bool = False  # version 1: the target's own MTP layer, of which this says how it drafts
    unshifted: bool = False  # version 1: feature i goes with token i, not i + 1 (an ablation of the paper)
    key = "eaglet_head"  # of all this in the config.json of a quantized head

    @property
    def kind(self) -> str:
        """What it is called in reports."""
        return "MTP" if self.mtp else f"EAGLE-{self.version}" + ".1" * self.post_normed

    @property
    def post_normed(self) -> bool:
        """Whether it is of generation 3.1: norms in front of `fc`, and the output behind its norm is fed back."""
        return self.version == 3 and self.fc_norm and self.norm_output

    @property
    def in_cpp(self) -> bool:
        """Whether the C++ kernels can draft with such a head."""
        return not (self.mtp or self.unshifted or self.norm_before_fc)

    def layout(self, layers: int) -> str:
        """What `save_eagle` writes for a target of that many layers, and which programs read it correctly."""
        names = f"{self.kind}, SafeAILab tensor names; "
        if self.unshifted or self.norm_before_fc or self.fc_norm != self.norm_output:
            return names + "only eaglet reads this layout correctly"
        beyond = ["fc_norm and norm_output = true"] if self.post_normed else []
        beyond += ["norm_before_residual = true"] if self.norm_before_residual else []
        if self.version == 3 and self.taps != (2, layers // 2, layers - 3):
            beyond.append(f"aux layers {', '.join(map(str, self.taps))}")
        if beyond:
            said = f"{' and '.join(beyond)} in config.json"
            return f"{names}{said}: vLLM reads that, SafeAILab's own code does not"
        return f"{self.kind} (SafeAILab layout)"


class HeadFile(NamedTuple, Generic[Config]):
    """A head as read: tensors under the state-dict names of its module, and what had to be assumed."""

    config: Config
    tensors: dict[str, Tensor]
    notes: list[str]

    def floats(self) -> dict[str, Tensor]:
        """The tensors with every weight as float32, also those of a quantized head."""
        floats = {}
        for name, tensor in self.tensors.items():
            base, _, leaf = name.rpartition(".")
            if leaf == "qweight":
                stored = {kind: self.tensors.get(f"{base}.{kind}") for kind in TENSORS}
                floats[f"{base}.weight"] = QuantLinear(stored).dequantize()
            elif leaf not in TENSORS:
                floats[name] = tensor.float() if tensor.is_floating_point() else tensor
        return floats


EagleFile = HeadFile[EagleConfig]


def layers_like(
    target: ModelConfig, family: str, count: int, vocab_size: int, positions: int, **more: Any
) -> ModelConfig:
    """The layers of a new head in bfloat16: `count` plain layers of a family, of the target's sizes."""
    same = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps".split()
    more |= {name: vars(target)[name] for name in same} | {"rope": RopeConfig(theta=10000.0), "dtype": "bfloat16"}
    sizes = {"num_hidden_layers": count, "vocab_size": vocab_size, "max_position_embeddings": positions}
    return ModelConfig(family, **sizes, **more)


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads unless a config says otherwise: SafeAILab's, or the first ones of a tiny target."""
    return (2, layers // 2, layers - 3) if layers > 6 else tuple(range(min(layers, 2) + 1))


def layer_tensors(c: ModelConfig, columns: int, ours: str, theirs: str) -> Table:
    """The weights of a decoder layer, whose attention reads so many columns, at these places here and in files."""
    H, I, hd = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_attention_heads * hd, c.num_key_value_heads * hd
    parts = {
        "post_norm": {"post_attention_layernorm": (H,)},
        "attention.qkv": {f"self_attn.{x}_proj": (q if x == "q" else kv, columns) for x in "qkv"},
        "attention.o": {"self_attn.o_proj": (H, q)},
        "mlp.gate_up": {"mlp.gate_proj": (I, H), "mlp.up_proj": (I, H)},
        "mlp.down": {"mlp.down_proj": (H, I)},
    }
    if c.qk_norm:
        parts |= {f"attention.{x}_norm": {f"self_attn.{x}_norm": (hd,)} for x in "qk"}
    return {
        f"{ours}.{name}.weight": {f"{theirs}.{part}.weight": shape for part, shape in held.items()}
        for name, held in parts.items()
    }


def head_tensors(config: EagleConfig) -> Table:
    """The one table of a head's tensors, for reading and for writing. The published names are those of EAGLE-1."""
    c, third, taps = config.layer, config.version == 3, len(config.taps)
    H = c.hidden_size
    width = taps * config.target_hidden_size if third else 2 * H
    parts: dict[str, tuple[str, tuple[int, ...]]] = {"fc": ("fc", (H, width))}
    if config.has_embed:
        parts["embed_tokens"] = "embed_tokens", (config.target_vocab_size, H)
    if config.has_lm_head:
        parts["lm_head"] = "lm_head", (c.vocab_size, H)
    if third:
        parts |= {"layer.input_norm": ("layers.0.input_layernorm", (H,)), "norm": ("norm", (H,))}
        parts["layer.hidden_norm"] = "layers.0.hidden_norm", (H,)
    if config.fc_norm:
        parts |= {f"fc_norms.{i}": (f"fc_norm.{i}", (config.target_hidden_size,)) for i in range(taps)}
    if config.norm_before_fc:
        parts["input_norm"] = "input_norm", (width,)
    table = layer_tensors(c, 2 * H if third else H, "layer", "layers.0")
    table |= {f"{ours}.weight": {f"{name}.weight": shape} for ours, (name, shape) in parts.items()}
    biases = {"fc": config.fc_bias, "layer.attention.qkv": c.qkv_bias, "layer.attention.o": c.o_bias}
    for ours in (ours for ours, there in biases.items() if there):
        weights = table[f"{ours}.weight"].items()
        table[f"{ours}.bias"] = {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in weights}
    return table


def read_eagle(
    path: str | Path, target: ModelConfig, overrides: Mapping[str, str] | None = None, source: Published | None = None
) -> EagleFile:
    """Read an EAGLE-1/2/3 head: a published one in any layout, one of ours (quantized too), or a bare weight file.

    Generation, draft vocabulary and biases follow from the tensors. RoPE and eps come from the head's own config, never
    from the target's.

    Args:
        path: a folder, or one `.safetensors` / `.bin` / `.pth` file (with or without a config.json beside it),
            or `org/name` in the Hugging Face cache.
        target: the model that the head shall draft for.
        overrides: config keys (`_EagleReader.overrides`) to replace, with values as JSON text.
        source: `described(path)`, if it is read already.

    Returns:
        EagleFile with tensors on the CPU in their stored dtype.

    Raises:
        ValueError: one line, if the head is damaged, does not fit the target, or needs something not implemented.
    """
    path = local_path(path)
    source = source or described(path)
    if path.is_dir() and source[0].get("eaglet_quant"):
        return read_quantized(path, EagleConfig, head_tensors, target)
    return fitted(_EagleReader(path, source, target, overrides or {}).read(), target, path)


def folder_of(path: Path) -> Path:
    """The folder in which a head's file lies, or which is one."""
    return path if path.is_dir() else path.parent


def described(path: Path) -> Published:
    """The config.json of a head, {} if there is none. A GGUF file stands for one, and has its tensors beside it."""
    if path.suffix == ".gguf" and path.is_file():
        return published(path)
    file = folder_of(path) / "config.json"
    return (read_json(file) if file.is_file() else {}), {}


def same_but_padding(rows: int, vocab: int) -> bool:
    """Whether two vocabularies of so many rows can be the same one, rounded up to another size."""
    return abs(rows - vocab) <= min(PADDING, vocab // 32)


def fitted(file: HeadFile[Config], target: ModelConfig, where: Path) -> HeadFile[Config]:
    """A head for a target whose vocabulary may have another padding. It drafts tokens that both have.

    Rows that the head's tables lack are zeros: they belong to no token.
    """
    config, vocab = file.config, target.vocab_size
    made_for, ids = config.target_vocab_size, file.tensors.get("draft_ids")
    if made_for == vocab:
        return file
    if ids is not None and ids[-1] >= vocab:
        raise _misfit(where, f"it drafts token {int(ids[-1])}, this model has {vocab} tokens")
    tensors, size = dict(file.tensors), config.layer.vocab_size
    for name in {"embed_tokens.weight", "predecessor.weight"} & tensors.keys():
        tensors[name] = F.pad(tensors[name][:vocab], (0, 0, 0, max(0, vocab - made_for)))
    if ids is None:  # tables with a row for every token that it drafts are cut, or leave the others out
        drafted = [name for name in tensors if name.startswith(("lm_head.", "successor.")) and "perm" not in name]
        size = min(size, vocab) if drafted else vocab
        for name in drafted:  # scales have their rows last
            tensors[name] = tensors[name].narrow(tensors[name].shape.index(made_for), 0, size)
        if size < vocab:
            tensors["draft_ids"] = torch.arange(size)
    config = replace(config, layer=replace(config.layer, vocab_size=size), target_vocab_size=vocab)
    note = (
        f"made for {made_for:,} rows of a vocabulary and this model has {vocab:,}: taken as another padding of the same"
    )
    return file._replace(config=config, tensors=tensors, notes=[*file.notes, note])


MTP = "mtp"  # the name of the head that lies in the target's own checkpoint


def mtp_head(target: ModelConfig) -> EagleFile:
    """The head that the target's own MTP layer is. It has no tensors besides the target's."""
    layer = target.plain_layer
    size, vocab = target.hidden_size, target.vocab_size
    return EagleFile(EagleConfig(1, layer, size, norm_output=True, target_vocab_size=vocab, mtp=True), {}, [])


def read_card(path: str | Path) -> dict[str, Any]:
    """What CARD.json in a drafter's folder says of its making, {} if there is none."""
    file = local_path(path) / "CARD.json"
    return read_json(file) if file.is_file() else {}


def save_eagle(config: EagleConfig, tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Write a head under SafeAILab's tensor names (`config.json`, `model.safetensors`).

    SafeAILab's own code and other engines read EAGLE-1/2 and plain EAGLE-3 heads of this layout. Two more things are in
    config.json, which vLLM reads: norm_before_residual (SafeAILab's code always takes it for false) and the aux layers
    (SGLang reads them too, SafeAILab's code always takes 2, L // 2, L - 3). `EagleConfig.layout` says it for one head.

    `tensors` are those of an EagleFile. Raises ValueError if draft_ids are given without config.target_vocab_size.
    """
    layer = config.layer
    vocab = config.target_vocab_size or layer.vocab_size
    if "draft_ids" in tensors and not config.target_vocab_size:
        raise ValueError("save_eagle: a head with draft_ids needs config.target_vocab_size.")
    prefix = "layers.0." if config.version == 1 else "midlayer."
    parts = published_parts(head_tensors(config), tensors)
    out = {name.replace("layers.0.", prefix): part for name, part in parts.items()}
    if "draft_ids" in tensors:
        ids = tensors["draft_ids"].cpu()
        out["d2t"] = ids - torch.arange(ids.numel())
        out["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    keys = config_to_hf(layer) | {"vocab_size": vocab, "bias": config.fc_bias, "qkv_bias": layer.qkv_bias}
    if config.version == 3:
        taps = {AUX: list(config.taps)}
        keys |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": layer.vocab_size}
        keys |= {"norm_before_residual": config.norm_before_residual, "eagle_config": taps}
        keys |= {"fc_norm": True, "norm_output": True} if config.post_normed else {}
        # The published layouts are ambiguous about both of these. Here ids name the layers that the states enter, and
        # norm_output says what is fed back.
        keys["eaglet_eagle"] = taps | {"norm_output": config.norm_output}
    elif config.unshifted:
        keys["eaglet_eagle"] = {"unshifted": True}
    if config.target_hidden_size != layer.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    write_directory(directory, out, keys)


def whole_shape(parts: Shapes) -> tuple[int, ...]:
    """The shape of a tensor that is made of the rows of these."""
    return sum(rows for rows, *_ in parts.values()), *next(iter(parts.values()))[1:]


def published_parts(table: Table, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a head, but for its draft_ids, cut into the rows that have names of their own in published files."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name != "draft_ids":
            pieces = tensor.split([shape[0] for shape in table[name].values()])
            out |= dict(zip(table[name], pieces, strict=True))
    return out


def save_quantized(config: Any, tensors: Mapping[str, Tensor], spec: QuantSpec, directory: str | Path) -> None:
    """Write a quantized head in our own format. `tensors` have the names of the head's state dict.

    config: an EagleConfig or a BlockConfig, which stands under its `key` in config.json.
    """
    write_directory(directory, tensors, {"eaglet_quant": spec_to_json(spec), config.key: asdict(config)})


def read_quantized(
    directory: Path, kind: type[Config], tensors_of: Callable[[Config], Table], target: ModelConfig
) -> HeadFile[Config]:
    """Read what `save_quantized` wrote of a head whose config is of this kind, and has these tensors.

    `weights.quantized.adopt_` puts them into a head. Raises ValueError in one line for a head that is damaged or made for
    another target.
    """
    where = directory / "config.json"
    raw = read_json(where)
    spec = read_spec(raw.get("eaglet_quant"), str(where))
    config = _read_described(raw.get(kind.key), f"{where} ({kind.key})", kind)
    if isinstance(config, EagleConfig):
        taps = list(config.taps)
        ascending = taps == sorted(taps) and all(0 <= tap <= 1000 for tap in taps) and len(taps) <= 16
        fits = (config.version, bool(taps)) in ((1, False), (3, True)) and ascending
        if not fits or config.layer.num_hidden_layers != 1:
            problem = f"no head of version {config.version} with taps {taps!r:.40} and one layer is known."
            raise refusal(f"{where} ({kind.key})", problem)
    sizes, wanted = (config.target_hidden_size, config.target_vocab_size), (target.hidden_size, target.vocab_size)
    if sizes[0] != wanted[0] or not same_but_padding(sizes[1], wanted[1]):
        raise _misfit(directory, f"made for hidden_size and vocab_size {sizes}, this model has {wanted}")
    entries = read_entries(tensor_files(directory))
    expected: dict[str, Tensor] = {}
    for name, parts in tensors_of(config).items():
        shape = whole_shape(parts)
        base, _, leaf = name.rpartition(".")
        slots = {leaf: torch.empty(shape, device="meta")}
        if leaf == "weight" and len(shape) == 2 and name not in LOOKED_UP:
            try:
                bits = spec.bits(base, shape[1])
            except UsageError as error:
                raise refusal(where, str(error)) from error
            if bits < 16:
                slots = empty_tensors(shape, bits, spec.group_size)
        expected |= {f"{base}.{leaf}": slot for leaf, slot in slots.items()}
    drafted = config.layer.vocab_size if config.layer.vocab_size != config.target_vocab_size else None
    if drafted is None and not config.has_lm_head and "draft_ids" in entries:  # rows of the LM head that it drafts with
        drafted = (entries["draft_ids"].shape or (1,))[0]
    if drafted is not None:
        expected["draft_ids"] = torch.empty(drafted, dtype=torch.int64, device="meta")
    check_stored(expected, entries, str(directory))
    tensors = {name: read_stored(entries, name, str(directory)) for name in expected}
    if (ids := tensors.get("draft_ids")) is not None:
        if not _are_token_ids(ids, config.target_vocab_size):
            raise refusal(directory, "draft_ids are not ascending token ids of the target: damaged?")
    return fitted(HeadFile(config, tensors, []), target, directory)


def _are_token_ids(ids: Tensor, vocab: int) -> bool:
    """Whether ids [Vd] are a draft vocabulary: one token id or more, ascending, below vocab."""
    return len(ids) > 0 and bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocab)


def _read_described(given: Any, where: str, kind: type[Config]) -> Config:
    """The config that `asdict` wrote. Raises ValueError in one line for a wrong type, or a layer that cannot be."""
    check(given, _json_shape(kind), where, "the head")

    def fields(values: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

    layer = fields(given["layer"])
    layer = ModelConfig(**layer | {"rope": RopeConfig(**fields(layer.get("rope", {})))})
    if not 0 < layer.rope.partial <= 1:  # the family of a head's layer has no name for it
        raise refusal(where, f"rope.partial is {layer.rope.partial}; allowed: above 0, at most 1.")
    ModelConfig.from_hf(config_to_hf(layer), where)  # checks the ranges
    if len(layer.windows) != layer.num_hidden_layers or min(layer.windows) < 0:
        raise refusal(where, f"windows are {list(layer.windows)!r:.60}; expected one of each layer, 0 or more.")
    return kind(**given | {"layer": layer, "taps": tuple(given.get("taps", ()))})


def _json_shape(kind: type) -> dict[str, Any]:
    """The shape (`support.reader.check`) of a dataclass that `asdict` and JSON have passed. No other keys are allowed.

    A field with a default may be missing, because an earlier version wrote the file before the field was there.
    """
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def shape(hint: Any) -> Any:
        if is_dataclass(hint):
            return _json_shape(hint)
        if get_origin(hint) is tuple:
            return [get_args(hint)[0]]
        return tuple(shape(one) for one in get_args(hint)) or hint  # a union such as int | None, or a plain type

    hints = get_type_hints(kind).items()
    return {name + "?" * (name not in required): shape(hint) for name, hint in hints} | {"*": ()}


def _misfit(path: Path, what: str) -> ValueError:
    """The error to raise for a head that was made for another model."""
    return ValueError(f"{path} does not fit this model: {what}. Pass the matching --checkpoint.")


class HeadReader:
    """One head while it is being understood: its tensors under plain names, and the settings that the user gave."""

    kind: str  # what errors call it
    overrides: Sequence[str] = ()  # what --eagle-config may set
    prefixes: Mapping[str, str] = {}  # regular expressions for the begin of a name, and what takes their place

    def __init__(self, path: Path, source: Published, target: ModelConfig, overrides: Mapping[str, str]):
        """source: `described(path)`."""
        self.path = path
        self.raw, self.stored = source
        self.target = target
        self.notes: list[str] = []
        self.entries: dict[str, Entry] = {}
        self.given: dict[str, Any] = {}
        for key, text in overrides.items():
            if key not in self.overrides:
                known = ", ".join(self.overrides)
                raise ValueError(f"--eagle-config {key}: unknown key of {self.kind}; known: {known}.")
            try:
                self.given[key] = parse_json(text, f"--eagle-config {key}")
            except ValueError as error:
                raise ValueError(f"--eagle-config {key}={text:.60}: not a JSON value.") from error

    def fail(self, text: str) -> NoReturn:
        raise refusal(self.path, text)

    def misfit(self, what: str) -> NoReturn:
        raise _misfit(self.path, what)

    def take_padding(self, rows: int) -> None:
        """Read on as if the target had a vocabulary of so many rows, if that is only another padding of it."""
        if same_but_padding(rows, self.target.vocab_size):
            self.target = replace(self.target, vocab_size=rows)

    def name_entries(self) -> None:
        """Fill self.entries with what the file holds, or those of the folder."""
        path = self.path
        if not path.exists():
            self.fail("no such folder or file.")
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pth", ".pt", ".gguf"):
            self.fail("expected a .safetensors, .bin, .pth or .gguf file, or a folder.")
        files = [path] if path.is_file() else tensor_files(path) or sorted(path.glob("*.pth"))
        if not files:
            self.fail("no head here: expected model.safetensors, pytorch_model.bin or a .pth file.")
        for name, entry in (self.stored or read_entries(files)).items():
            for pattern, prefix in self.prefixes.items():
                name = re.sub(pattern, prefix, name)
            if name in self.entries:
                self.fail(f"two tensors are called {name!r:.80} once prefixes are removed.")
            self.entries[name] = entry

    def read_settings(self, raw: dict[str, Any], *keys: str) -> tuple[dict[str, Any], ...]:
        """Make readers of a config.json, whose settings of a decoder layer may lie in an object of their own: `geometry`
        of these, and `flags` of all others, which may lie under `keys`. What the user gave takes their place.

        Returns the objects: of the layer, and under each key.
        """
        self.speculators = not raw.keys().isdisjoint(("transformer_layer_config", "speculators_model_type"))
        layer = raw.get("transformer_layer_config") if self.speculators else raw
        parts = layer, *(raw.get(key) or {} for key in keys)
        if not all(isinstance(part, dict) for part in parts):
            self.fail(f"{', '.join(('transformer_layer_config', *keys))} must be JSON objects.")
        settings, nested = {**layer, **self.given}, layer.get("rope_parameters")
        if "rope_theta" in self.given and isinstance(nested, dict):
            settings["rope_parameters"] = {**nested, "rope_theta": self.given["rope_theta"]}
        self.geometry = ConfigReader(settings, str(self.path))
        inner = {key: value for part in parts[1:] for key, value in part.items() if value is not None}
        self.flags = ConfigReader({**raw, **inner, **self.given}, str(self.path))
        return parts

    def draft_ids(self, wide: bool) -> Tensor | None:
        """Absolute target ids [Vd] of a head's draft vocabulary, None if it is the target's.

        The tensors d2t and t2d, which name them, are taken out of the entries. wide: whether the head may have an LM
        head of its own.
        """
        entries = self.entries
        sized = ("t2d", "embed_tokens.weight", *(("lm_head.weight",) if "d2t" not in entries else ()))
        for rows in [entries[name].shape[0] for name in sized if name in entries and entries[name].shape][:1]:
            self.take_padding(rows)
        vocab = self.target.vocab_size

        def rows_of(name: str) -> int:
            shape = entries[name].shape if name in entries else (vocab, 1)
            return shape[0] if len(shape) == 2 else self.fail(f"{name} is no matrix.")

        offsets, member = entries.pop("d2t", None), entries.pop("t2d", None)
        misfit = f"but the target's vocabulary is {vocab}"
        rows = rows_of("lm_head.weight")
        if "lm_head.weight" not in entries and offsets is not None and len(offsets.shape) == 1:
            if wide and offsets.shape[0] != vocab:
                self.fail(f"the LM head (lm_head.weight) of its {offsets.shape[0]} draft tokens is missing.")
            rows = offsets.shape[0]  # it drafts with these rows of the target's LM head
        if (embedded := rows_of("embed_tokens.weight")) != vocab:
            self.fail(f"embed_tokens has {embedded} rows, {misfit}. Pass the matching --checkpoint.")
        if member is not None and member.shape != (vocab,):
            self.fail(f"t2d is {list(member.shape)}, {misfit}. Pass the matching --checkpoint.")
        if offsets is None:
            if rows != vocab:
                self.fail(f"the LM head has {rows} rows, {misfit}, and there is no d2t table.")
            return None
        if offsets.dtype not in (torch.int64, torch.int32) or offsets.shape != (rows,):
            self.fail(f"d2t is {offsets.dtype} {list(offsets.shape)}, expected int64 [{rows}].")
        ids = offsets.read().long() + torch.arange(rows)
        if not _are_token_ids(ids, vocab):
            self.fail(f"d2t holds no offsets to ascending token ids below {vocab}: damaged?")
        if member is not None and not torch.equal(member.read().nonzero().flatten(), ids):
            self.fail("t2d and d2t disagree: damaged.")
        return None if rows == vocab else ids

    def tensors(self, table: Table, unread: Shapes, draft_ids: Tensor | None) -> dict[str, Tensor]:
        """The tensors of a table, and the draft_ids. unread: the shapes of tensors that are there and are not read."""
        shapes = {name: shape for parts in table.values() for name, shape in parts.items()}
        where = str(self.path)
        check_entries(shapes | unread, self.entries, where)
        found = {} if draft_ids is None else {"draft_ids": draft_ids}
        own = {k: read_parameter(self.entries, parts, whole_shape(parts), where) for k, parts in table.items()}
        return found | own


class _EagleReader(HeadReader):
    """An EAGLE head: its config in parts, its tensors under `layers.0.` names."""

    kind = "an EAGLE head"
    overrides = (*HEAD_KEYS, "max_position_embeddings", "norm_before_residual", "norm_output", AUX)
    prefixes = {r"^(draft_model|model)\.": "", r"^(midlayer|transformer)\.": "layers.0.", r"^fusion_fc\.": "fc."}

    def __init__(self, path: Path, source: Published, target: ModelConfig, overrides: Mapping[str, str]):
        super().__init__(path, source, target, overrides)
        raw = self._open()
        self.bare = not raw
        _, _, own = self.read_settings(raw, "eagle_config", "eaglet_eagle")
        self.ours = bool(own)  # the flags of our own files have exactly our meaning

    def _open(self) -> dict[str, Any]:
        """Fill self.entries. Returns the head's config, or {} if it has none."""
        self.name_entries()
        path, folder, raw = self.path, folder_of(self.path), self.raw
        known = raw.keys() & {"speculators_model_type", "draft_vocab_size", "eagle_config", "eaglet_eagle"}
        if raw and not known and path.is_file() and raw.get("num_hidden_layers") != 1:
            self.notes.append(f"{folder / 'config.json'} describes a whole model, not this head: ignored")
            raw = {}
        kind = raw.get("speculators_model_type")
        parallel = raw.get("parallel_drafting") or "mask_hidden" in self.entries or kind == "peagle"
        if parallel or kind not in (None, "eagle", "eagle3"):
            what = "a P-EAGLE head (parallel drafting)" if parallel else f"a head of the kind {kind!r:.40}"
            self.fail(f"{what} is not implemented.")
        for name in self.entries:
            if re.match(r"layers\.[1-9]", name):
                if "fc.weight" not in self.entries:
                    self.fail("a whole model, and no EAGLE head. A small model drafts with --draft-checkpoint.")
                self.fail(f"{name!r:.80}: heads with more than one decoder layer are not implemented.")
            if re.match(r"(pre_)?(embed|embedding|hidden|lm_head)_layernorm\.", name):
                self.fail(f"{name!r:.80}: the extra norms of HASS-like heads are not implemented.")
        return raw

    def read(self) -> EagleFile:
        """The whole head. Raises ValueError as `read_eagle` does."""
        taps, flags = self._taps(), self.flags
        wide = bool(taps)
        draft_ids = self.draft_ids(wide)
        layer = self._layer(taps)
        own_embed = self.speculators or self.ours or layer.hidden_size != self.target.hidden_size
        config = EagleConfig(
            version=3 if wide else 1,
            layer=layer,
            target_hidden_size=self.target.hidden_size,
            taps=taps,
            fc_bias="fc.bias" in self.entries,
            norm_before_residual=wide and flags.boolean("norm_before_residual", self.speculators),
            fc_norm="fc_norm.0.weight" in self.entries,
            norm_before_fc="input_norm.weight" in self.entries,
            norm_output=wide and self._feeds_back_normed(),
            # An embedding of the target's width is a copy of the target's, unless the layout allows another one.
            has_embed=wide and own_embed and "embed_tokens.weight" in self.entries,
            has_lm_head=wide and "lm_head.weight" in self.entries,
            target_vocab_size=self.target.vocab_size,
            unshifted=not wide and self.ours and flags.boolean("unshifted", False),
        )
        for key, has in {"fc_norm": config.fc_norm, "norm_before_fc": config.norm_before_fc}.items():
            if flags.boolean(key, has) != has:
                self.fail(f"config.json and the tensors disagree about {key}.")
        # A copy of the target's embedding or LM head may be there. It must fit, and it is not read.
        rows = {"embed_tokens.weight": self.target.vocab_size, "lm_head.weight": layer.vocab_size}
        copies = {name: (n, layer.hidden_size) for name, n in rows.items() if name in self.entries}
        return EagleFile(config, self.tensors(head_tensors(config), copies, draft_ids), self.notes)

    def _feeds_back_normed(self) -> bool:
        """Whether the output behind its norm is fed back, which norm_output = true says (vLLM, SGLang, TorchSpec, NeMo).

        Until September 2026 SpecForge also wrote it for plain EAGLE-3 heads, where it means the norm before the LM head.
        So without another norm of EAGLE 3.1 it counts only if the layout is clear about it, or the user gave it.
        """
        if not self.flags.boolean("norm_output", False):
            return False
        more_norms = not self.entries.keys().isdisjoint(("fc_norm.0.weight", "input_norm.weight"))
        if self.speculators or self.ours or more_norms or "norm_output" in self.given:
            return True
        advice = "--eagle-config norm_output=true feeds back the normed output"
        self.notes.append(f"norm_output without fc_norm is read as the norm of the LM head's input ({advice})")
        return False

    def _shape(self, name: str) -> tuple[int, int]:
        entry = self.entries.get(name)
        if entry is None or len(entry.shape) != 2 or 0 in entry.shape:
            self.fail(f"not an EAGLE head: it has no matrix {name}.")
        return entry.shape

    def _taps(self) -> tuple[int, ...]:
        """The layers whose inputs EAGLE-3 reads, or () for EAGLE-1/2. The tensor shapes tell which of them it is.

        Refuses a head that was made for another target.
        """
        (hidden, width), seen = self._shape("fc.weight"), self._shape(f"{ATTENTION}q_proj.weight")[1]
        size, layers = self.target.hidden_size, self.target.num_hidden_layers
        ids, many = None, 2
        if seen == 2 * hidden:
            ids = self.flags.config.get(AUX)
            if ids in (None, []):
                ids = list(default_taps(layers))
                if not self.bare:
                    advice = f"--eagle-config {AUX}={json.dumps(ids)} sets them"
                    self.notes.append(f"config.json does not name the layers that it reads: assumed {ids} ({advice})")
            if not isinstance(ids, list) or not ids or not all(is_a(i, int) for i in ids):
                self.fail(f"{AUX} = {ids!r:.60}, expected a list of layer numbers.")
            many = len(ids)
        elif seen != hidden or width != 2 * hidden:
            self.fail(f"fc.weight {[hidden, width]} with q_proj inputs {seen} is neither EAGLE-1/2 nor EAGLE-3.")
        if width != many * size:
            made_for = width // many
            looks = f"{made_for} ({SIZES[made_for]}?)" if made_for in SIZES else str(made_for)
            expected = f"expected {[size, many * size]} ({many} x hidden_size {size})"
            sizes = f"fc.weight is {[hidden, width]}, {expected}"
            self.misfit(f"{sizes}. The head looks made for hidden_size {looks}")
        if ids is None:
            return ()
        if hidden != size and "embed_tokens.weight" not in self.entries:
            self.fail(f"hidden size {hidden} differs from the target's {size}, but embed_tokens is missing.")
        if not self.flags.boolean("use_aux_hidden_state", True):
            self.fail("use_aux_hidden_state = false is not implemented.")
        if ids[0] == 1 and not self.ours:
            outputs, ids = ids, [i + 1 for i in ids]
            self.notes.append(f"aux layers {outputs} are read as layer outputs: states entering layers {ids}")
        if ids != sorted(ids) or not 0 <= ids[0] <= ids[-1] <= layers:
            self.fail(f"the aux layers {ids} are not ascending layers of a target with {layers}.")
        return tuple(ids)

    def _layer(self, taps: tuple[int, ...]) -> ModelConfig:
        """The head's decoder layer: sizes from the tensors, the rest from its own config."""
        read, target = self.geometry, self.target
        rows, kv_rows = (self._shape(f"{ATTENTION}{x}_proj.weight")[0] for x in "qk")
        known = read.config.get("num_attention_heads") is not None
        head_dim = max(1, rows // read.integer("num_attention_heads")) if known else target.head_dim
        head_dim = read.integer("head_dim", head_dim)
        longest = target.max_position_embeddings if self.bare else read.integer("max_sequence_length", 2048)
        lm_head = self.entries.get("lm_head.weight")
        passed = (*HEAD_KEYS, "rope_parameters", "hidden_act", "partial_rotary_factor")
        hf = {key: read.config.get(key) for key in passed} | {
            "model_type": "llama",
            "hidden_size": self._shape("fc.weight")[0],
            "intermediate_size": self._shape("layers.0.mlp.gate_proj.weight")[0],
            "num_hidden_layers": 1,
            "num_attention_heads": read.integer("num_attention_heads", max(1, rows // head_dim)),
            "num_key_value_heads": read.integer("num_key_value_heads", max(1, kv_rows // head_dim)),
            "head_dim": head_dim,
            "vocab_size": lm_head.shape[0] if lm_head else target.vocab_size,
            "max_position_embeddings": read.integer("max_position_embeddings", longest),
            "torch_dtype": str(self.entries["fc.weight"].dtype).removeprefix("torch."),
        }
        if self.bare:
            self._note_assumptions(head_dim, taps)
        switches = {"qkv_bias": "q_proj.bias", "o_bias": "o_proj.bias", "qk_norm": "q_norm.weight"}
        held = {key: ATTENTION + name in self.entries for key, name in switches.items()}
        return replace(ModelConfig.from_hf(hf, str(self.path)), windows=(self._window(),), **held)

    def _window(self) -> int:
        """The window of the layer's attention, 0 if it sees the whole text."""
        read = self.geometry
        kinds = read.config.get("layer_types")
        if isinstance(kinds, list) and kinds[:1] == ["full_attention"] or read.config.get("sliding_window") is None:
            return 0
        return read.integer("sliding_window") if read.boolean("use_sliding_window", True) else 0

    def _note_assumptions(self, head_dim: int, taps: tuple[int, ...]) -> None:
        assumed = {"head_dim": head_dim, "rope_theta": 10000, "rms_norm_eps": 1e-6}
        if taps:  # both change what the head computes, and no tensor shows them
            assumed |= {"norm_before_residual": "false", AUX: json.dumps(taps)}
        text = ", ".join(f"{key} {value}" for key, value in assumed.items() if key not in self.flags.config)
        advice = "wrong values only lower acceptance; --eagle-config KEY=VALUE sets them"
        self.notes.append(f"{self.path.name} has no config.json: assumed {text or 'nothing'} ({advice})")
