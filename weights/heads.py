"""EAGLE heads: their geometry, their tensors under the published names, writing them, and our own quantized files."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from families.config import ModelConfig, RopeConfig
from support.errors import UsageError
from support.files import read_json
from support.reader import check, refusal
from weights.files import Shapes, local_path, read_entries, tensor_files, write_directory
from weights.hf import config_to_hf
from weights.quantized import LOOKED_UP, TENSORS, QuantLinear, QuantSpec, empty_tensors, read_spec, spec_to_json
from weights.stored import check_stored, read_stored

AUX = "eagle_aux_hidden_state_layer_ids"
Config = TypeVar("Config")
# Our tensor name -> the published tensors whose rows it is made of, with their shapes.
Table = dict[str, dict[str, tuple[int, ...]]]
PADDING = 1024  # rows that a vocabulary may have more or less than the target's


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
        raise misfit_error(where, f"it drafts token {int(ids[-1])}, this model has {vocab} tokens")
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
        raise misfit_error(directory, f"made for hidden_size and vocab_size {sizes}, this model has {wanted}")
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
        if not are_token_ids(ids, config.target_vocab_size):
            raise refusal(directory, "draft_ids are not ascending token ids of the target: damaged?")
    return fitted(HeadFile(config, tensors, []), target, directory)


def are_token_ids(ids: Tensor, vocab: int) -> bool:
    """Whether ids [Vd] are a draft vocabulary: one token id or more, ascending, below vocab."""
    return len(ids) > 0 and bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocab)


def _read_described(given: Any, where: str, kind: type[Config]) -> Config:
    """The config that `asdict` wrote. Raises ValueError in one line for a wrong type, or a layer that cannot be."""
    check(given, _json_shape(kind), where, "the head")

    def fields(values: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

    layer = {"rope": {}} | fields(given["layer"])
    if unknown := sorted(name for name, value in layer.items() if isinstance(value, dict) and name != "rope"):
        raise refusal(where, f"layer.{unknown[0]} is given; allowed: null, because layers of heads are plain.")
    layer = ModelConfig(**layer | {"rope": RopeConfig(**fields(layer["rope"]))})
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


def misfit_error(path: Path, what: str) -> ValueError:
    """The error to raise for a head that was made for another model."""
    return ValueError(f"{path} does not fit this model: {what}. Pass the matching --checkpoint.")
