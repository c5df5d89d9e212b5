"""Reading published EAGLE heads: the layouts of SafeAILab, SpecForge and speculators, and bare weight files.

What a head is follows from its own tensors and its own config. Nothing is inferred from a file name, and nothing is
taken from the target that could differ in the head. A head that is read wrongly changes no output and only lowers the
acceptance, so every doubt is an error or a note.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from families.config import ModelConfig
from support.files import read_json
from support.reader import ConfigReader, is_a, parse_json, refusal
from weights.files import Entry, Shapes, check_entries, local_path, read_entries, tensor_files
from weights.gguf_heads import Published, published
from weights.heads import (
    AUX,
    EagleConfig,
    EagleFile,
    Table,
    are_token_ids,
    default_taps,
    fitted,
    head_tensors,
    misfit_error,
    read_quantized,
    same_but_padding,
    whole_shape,
)
from weights.hf import read_parameter

ATTENTION = "layers.0.self_attn."
# What the head's decoder layer takes from the head's config.
HEAD_KEYS = "num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling".split()
SIZES = {2048: "1B", 3072: "3B", 4096: "7B or 8B", 5120: "13B", 6656: "33B", 8192: "70B"}


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
        raise misfit_error(self.path, what)

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
            others = f" Pass the file: {found[0]}" if (found := sorted(path.glob("*.gguf"))) else ""
            self.fail(f"no head here: expected model.safetensors, pytorch_model.bin or a .pth file.{others}")
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
        if not are_token_ids(ids, vocab):
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

    def _open(self) -> None:
        """Name the tensors, and read the head's config if it has one."""
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
        self.bare = not raw
        _, _, own = self.read_settings(raw, "eagle_config", "eaglet_eagle")
        self.ours = bool(own)  # the flags of our own files have exactly our meaning

    def read(self) -> EagleFile:
        """The whole head. Raises ValueError as `read_eagle` does."""
        self._open()
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

        SpecForge meant the norm before the LM head until September 2026. Its files cannot be told from those of others.
        """
        normed = self.flags.boolean("norm_output", False)
        if normed and not (self.speculators or self.ours or "norm_output" in self.given):
            advice = "if SpecForge trained the head before September 2026, give --eagle-config norm_output=false"
            self.notes.append(f"norm_output = true: the normed output is fed back ({advice})")
        return normed

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
            if ids and hidden == size and width % size == 0:
                self.fail(f"{sizes}. It reads {width // size} layers; name them by --eagle-config {AUX}=[...]")
            self.misfit(f"{sizes}. The head looks made for hidden_size {looks}")
        if ids is None:
            return ()
        if hidden != size and "embed_tokens.weight" not in self.entries:
            self.fail(f"hidden size {hidden} differs from the target's {size}, but embed_tokens is missing.")
        if not self.flags.boolean("use_aux_hidden_state", True):
            self.fail("use_aux_hidden_state = false is not implemented.")
        if not (self.speculators or self.ours or AUX in self.given):  # those name the layers that the states enter
            outputs = [i + 1 for i in ids]
            if ids[0] == 1:
                self.notes.append(f"aux layers {ids} are read as layer outputs: states entering layers {outputs}")
                ids = outputs
            elif ids != list(default_taps(layers)):
                advice = f"if they are outputs of layers, give --eagle-config {AUX}={json.dumps(outputs)}"
                self.notes.append(f"aux layers {ids} are read as the layers that the states enter ({advice})")
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
