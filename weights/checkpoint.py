"""A model of any format: `Checkpoint.open` reads what it is, `Checkpoint.load` reads its weights.

To add a format, give it a kind, let `open` recognise it, and let `load` fill the model from its tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from families.config import DTYPES, ModelConfig, named_dtype, text_part
from families.table import WITH_IMAGES
from model import Transformer
from support.errors import UsageError
from support.files import read_json
from support.reader import check
from weights import hf, small_floats
from weights.files import Destination, Entry, Progress, local_path, read_entries, tensor_files
from weights.gguf import GGUFFile, fill_gguf
from weights.gguf_types import FLOAT_TYPES
from weights.lora import Adapter, add_, read_adapters
from weights.quantized import GROUPS, QuantSpec, apply_spec_, largest_groups, read_spec
from weights.rounding import fill_rounded, half_of
from weights.shards import Shard, connect_, narrow_
from weights.stored import Layout, fill_kept, fill_published, fill_stored, held_codes, packed_entries, published_layout

QUANTIZED = {"eaglet": "eaglet_quant", "published": "quantization_config"}  # kind -> its key in config.json
# What `copy_texts` takes along: the tokenizer, stop ids, the chat template, and the licence.
TEXTS = """tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt generation_config.json chat_template.jinja chat_template.json LICENSE LICENSE.txt USE_POLICY.md"""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model that was recognised. Its config was read once, and its tensors are read when they are needed."""

    directory: Path  # for GGUF the file
    # hf | meta | eaglet (our quantized format) | published (GPTQ, AWQ, compressed-tensors) | gguf | one of `small_floats`
    kind: str
    raw: dict[str, Any]  # config.json as it stands there, {} for Meta's format
    config: ModelConfig  # with the stop ids of generation_config.json, or else of config.json
    gguf: GGUFFile | None = None
    spec: QuantSpec | None = None  # what float weights are rounded to while they are read
    shard: Shard | None = None  # the part of the model that this process holds; `config` is then that of the part
    whole: ModelConfig | None = None  # the config of the whole model, where there is a shard
    # generation_config.json: how the model wants to be sampled
    generation: dict[str, Any] = field(default_factory=dict)
    layout: str = ""  # in which a GGUF file and experts in MXFP4 keep their bits: "tiles", "panels" or none
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def open(cls, directory: str | Path, layout: str = "") -> Checkpoint:
        """Read the config of a model directory, a GGUF file, or `org/name` in the Hugging Face cache (`local_path`).

        Raises ValueError in one line if it is unusable.

        layout: keep every type of a GGUF file, and MXFP4, as it is, in "tiles" for the CPU kernels or in "panels" for
            those of Triton (`weights.gguf`, `weights.small_floats`).
        """
        directory = local_path(directory)
        if directory.is_file():
            file = GGUFFile.open(directory, layout)
            raw = file.config()
            return cls(directory, "gguf", raw, hf.read_config(raw, directory), file)
        if not directory.is_dir():
            hint = "Pass a .gguf file, or a folder with config.json and weights (hf download fetches one)."
            raise ValueError(f"{directory} is not a directory. {hint}")
        described = (directory / "config.json").exists()
        if (directory / "params.json").exists() and not described:
            kind, raw, config = "meta", {}, hf.read_meta_config(directory)
        elif not described and (files := sorted(directory.glob("*.gguf"))):
            others = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise ValueError(f"{directory} has no config.json, but {files[0].name}{others}. Pass the file: {files[0]}")
        else:
            raw = small_floats.with_own_file(read_json(directory / "config.json"), directory)
            kind = next((kind for kind, key in QUANTIZED.items() if raw.get(key)), "hf")
            if kind == "published":
                kind = small_floats.kind_of(raw) or kind
            config = hf.read_config(raw, directory)
        generation = {}
        if (file := directory / "generation_config.json").is_file():
            generation = check(read_json(file), {"do_sample?": (bool, None)}, file, "the file")
            stops = hf.token_ids(generation, "eos_token_id", str(file), config.vocab_size, directory)
            config = replace(config, eos_token_ids=tuple(dict.fromkeys((*stops, *config.eos_token_ids))))
        found = cls(directory, kind, raw, config, generation=generation, layout=layout)
        if raw and named_dtype(text_part(raw, str(found.config_file))) is None and tensor_files(directory):
            entry = found._stored.get(hf.EMBEDDING)
            name = str(entry.dtype).removeprefix("torch.") if entry else ""
            found = replace(found, config=replace(config, dtype=name)) if name in DTYPES else found
        return found

    @property
    def has_mtp(self) -> bool:
        """Whether a layer that predicts one more token lies beside the model."""
        return self.config.delta is not None and any(name.startswith("mtp.") for name in self.with_mtp.entries)

    @property
    def _declares_mtp(self) -> bool:
        found = self.config.delta is not None and self.gguf is None
        return found and bool(text_part(self.raw, str(self.config_file)).get("mtp_num_hidden_layers"))

    @cached_property
    def with_mtp(self) -> Checkpoint:
        """The same checkpoint, with its MTP layer. It is always the same object, so its files are read once."""
        gguf = self.gguf and replace(self.gguf, mtp=True)
        return replace(self, config=replace(self.config, mtp=True), gguf=gguf)

    @property
    def config_file(self) -> Path:
        names = {"meta": "params.json", "gguf": ""}
        return self.directory / names.get(self.kind, "config.json")

    @property
    def quantization(self) -> str | None:
        """How the weights are quantized: 'int4', 'int8', 'int4 (gptq)', ..., or None for floats.

        Raises ValueError for a quantization that is not supported.
        """
        if self.spec:
            return f"{self.spec.mode} (rounded at load)"
        if self.gguf:
            return self.gguf.quantization
        if self.keeps_small:
            return f"int4 ({self.kind})"
        if self.kind not in QUANTIZED:
            return None
        if self.kind == "eaglet":
            return read_spec(self.raw["eaglet_quant"], str(self.config_file)).mode
        return f"int{self._published.bits[0]} ({self.raw['quantization_config']['quant_method']})"

    @property
    def keeps_small(self) -> bool:
        """Whether experts in MXFP4, or matrices of bitsandbytes, keep their 4 bits."""
        return self.kind in ("mxfp4", "fp4", "bitsandbytes") and bool(self.layout) and not self.shard

    @property
    def notes(self) -> list[str]:
        """What a user should know about how the weights are read, one line each."""
        name, notes = self.directory.name, self.gguf.notes if self.gguf else []
        if self.kind in small_floats.NOTES and not self.spec:
            notes.append(small_floats.NOTES[self.kind][self.keeps_small].format(name))
        if self.kind == "published" and (bits := self._published.activations) < 16:
            notes.append(f"{name} was made for activations of {bits} bits; only its weights are read that way.")
        if self.spec and (size := self.spec.group_size) < max(GROUPS):
            notes.append(f"--quant {self.spec.mode}: groups of {size}; {max(GROUPS)} does not divide all inputs")
        if self.raw.get("model_type") in WITH_IMAGES:
            notes.append(f"{name}: its text model is read, and what reads images and sounds is left out.")
        if self._declares_mtp and not self.has_mtp:
            what = "declares a layer for multi-token prediction (MTP), which no file holds, so it drafts nothing"
            notes.append(f"{name}: its config.json {what}.")
        return [note for note in (*notes, *(f"LoRA {adapter}" for adapter in self.adapters)) if note]

    @property
    def _published(self) -> Layout:
        return published_layout(self.raw["quantization_config"], str(self.config_file))

    @property
    def tokenizer_source(self) -> Path | Mapping[str, Any]:
        """What `tokenizer.load_tokenizer` reads: the directory, or files made from GGUF's metadata."""
        return self.gguf.tokenizer_files if self.gguf else self.directory

    def check_floats(self, dtype: torch.dtype) -> None:
        """Raise UsageError if what a GGUF file has quantized would take much memory as floats of this dtype."""
        if self.gguf:
            self.gguf.check_floats(dtype)

    def forget_texts(self) -> None:
        """Drop what only a tokenizer is made of: of a large vocabulary, tens of megabytes of Python objects."""
        if self.gguf:
            self.gguf.tokenizer_files.pop("tokenizer.json", None)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """All tensors, unread, under the names of the files (of Hugging Face for Meta's format and GGUF)."""
        if self.gguf:
            entries = self.gguf.entries
        elif self.kind == "meta":
            entries = hf.read_meta_entries(self.directory, self.config, self._share)
        else:
            entries = self._stored
            if self.kind in small_floats.NOTES:
                entries = small_floats.float_entries(entries, self.raw["quantization_config"], str(self.config_file))
            elif self.kind == "published":
                entries = packed_entries(entries)
            if self.kind != "eaglet":
                entries = hf.as_computed(entries, self.config)
        if not self.shard:
            return entries
        # Where it rounds a tied LM head, that is rounded from the embedding, as that of a model that is not tied.
        if self.spec and self.whole.tie_word_embeddings and hf.EMBEDDING in entries:
            entries["lm_head.weight"] = entries[hf.EMBEDDING]
        tied = self.config.tie_word_embeddings
        return self.shard.entries(entries, replace(self.whole, tie_word_embeddings=tied), str(self.directory))

    @property
    def _share(self) -> tuple[int, int]:
        return (self.shard.rank, self.shard.ranks) if self.shard else (0, 1)

    @cached_property
    def _stored(self) -> dict[str, Entry]:
        """The tensors of the text model in a directory, as they lie there."""
        files = tensor_files(self.directory)
        if not files:
            raise ValueError(f"{self.directory}: no model*.safetensors, no pytorch_model*.bin. All downloaded?")
        entries = read_entries(files, self._share)
        if self.config.mtp and self._declares_mtp and not any("mtp." in name for name in entries):
            # Some quantizers put this layer into a file that their index does not name.
            others = set(self.directory.glob("*.safetensors")) - set(files)
            others = sorted(file for file in others if not file.name.startswith(("consolidated", "adapter")))
            entries |= {name: entry for name, entry in read_entries(others).items() if "mtp." in name}
        if self.kind != "eaglet":
            entries = hf.plain_names(entries, self.config, str(self.directory))
        return hf.text_entries(entries, self.config)

    def empty(self) -> Transformer:
        """The model, or this process's part of it, on the meta device and with float weights."""
        model = hf.build_model(self.config)
        if self.shard:
            tied = self.config.tie_word_embeddings and "lm_head.qweight" not in self.entries
            narrow_(model, self.shard, not tied)
        return model

    @property
    def kept(self) -> Mapping[str, Entry | Tensor]:
        """What a loaded model holds, without values: `entries`, or quantized tensors in place of floats or GGUF's."""
        if self.spec:
            return apply_spec_(self.empty(), self.spec).state_dict()
        if self.keeps_small:
            return self.entries | small_floats.kept(self._stored, self.layout, str(self.config_file))
        if self.kind == "published":
            return held_codes(self.entries, self._published)
        return self.gguf.kept(self.entries) if self.gguf else self.entries

    def rounded(self, mode: str) -> Checkpoint:
        """The same checkpoint, to be rounded to 'int8' or 'int4' while it is read, as quantize.py rounds by default.

        Raises UsageError if it is quantized already, or if its sizes do not fit.
        """
        flag, spec = f"--quant {mode}", QuantSpec(mode)
        stored = {t.kind for t in self.gguf.tensors.values()} - FLOAT_TYPES.keys() if self.gguf else ()
        if kind := QUANTIZED.get(self.kind) or ", ".join(sorted(stored)):
            raise UsageError(f"{flag} rounds float weights, and {self.directory} is quantized ({kind}); leave it out.")
        try:
            spec = largest_groups(spec, hf.build_model(self.config))
        except UsageError as error:
            raise UsageError(f"{flag}: {error} Give that to quantize.py, or use --quant int8.") from error
        embedding = self.entries.get(hf.EMBEDDING)
        dtype = half_of(embedding.dtype if embedding else None)
        return replace(self, spec=spec, config=replace(self.config, dtype=str(dtype).removeprefix("torch.")))

    def adapted(self, *folders: str | Path) -> Checkpoint:
        """The same checkpoint with LoRA adapters. Raises ValueError in one line for one that does not fit."""
        return replace(self, adapters=read_adapters([str(folder) for folder in folders], self.config))

    def merges(self, dtype: torch.dtype) -> bool:
        """Whether a single adapter becomes part of the matrices: where they are computed with in float64, or stored and
        computed with in float32."""
        wide = dtype == torch.float64 or (dtype == torch.float32 and self.config.dtype == "float32")
        return self.quantization is None and wide and len(self.adapters) == 1

    def sharded(self, shard: Shard) -> Checkpoint:
        """The part of the same checkpoint that one of several processes holds. Raises UsageError if there is none."""
        if self.spec and self.spec.mode == "int8":
            advice = "quantize with quantize.py, or use --quant int4."
            raise UsageError(f"--quant int8 scales whole rows, and --tp splits them; {advice}")
        whole = self.whole or self.config
        gguf = self.gguf and replace(self.gguf, shard=shard)
        config = replace(whole, tie_word_embeddings=whole.tie_word_embeddings and not self.spec)
        return replace(self, gguf=gguf, shard=shard, whole=whole, config=shard.local(config))

    def load(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
        max_positions: int | None = None,
        floats: bool = False,
    ) -> Transformer:
        """Read the weights straight onto `device`, one tensor at a time, so that no tensor is held twice.

        What is rounded on the way is rounded there, one of our matrices at a time.

        Args:
            device: where the weights go.
            dtype: of the weights; default: config.json's. Stored codes and scales are kept exactly.
            progress: called with (done, total, tensor name) after each tensor.
            max_positions: length of the rotary tables; default: all positions of the config.
            floats: read a GGUF file's quantized matrices as floats too.

        Returns:
            The model in eval mode, without gradients, with its rotary tables built.

        Raises:
            ValueError: one line that names the file and the tensor or key, and what to do.
        """
        quantization, file, where = self.quantization, str(self.config_file), str(self.directory)
        model = self.empty()
        to = Destination(device, dtype or DTYPES[self.config.dtype], progress or (lambda *_: None))
        if self.spec:
            fill_rounded(model, self.entries, self.spec, where, to)
        elif self.kind == "eaglet":
            fill_stored(model, self.entries, read_spec(self.raw["eaglet_quant"], file), where, to)
        elif self.gguf:
            fill_gguf(model, self.gguf, self.entries, {} if floats else self.gguf.packed, to)
        elif self.kind == "published":
            fill_published(model, self.entries, self.raw["quantization_config"], file, to)
        else:
            keeps, entries = self.keeps_small and not floats, hf.without_copy(model, self.entries, where, to.dtype)
            small = small_floats.packing(model, self._stored, self.layout, where, device) if keeps else None
            fill_kept(model, entries, small or (lambda *_: None), where, to)
        if self.shard:
            connect_(model, self.shard)
        if self.adapters:
            add_(model, self.adapters, self.merges(to.dtype))
        model.quant = None if floats else quantization
        longest = self.config.max_positions
        model.rotary.build(device, min(max_positions or longest, longest))
        return model.eval().requires_grad_(False)

    def copy_texts(self, destination: Path) -> None:
        """Copy the tokenizer's files, the chat template and the licence to another directory."""
        for name, data in (self.gguf.tokenizer_files if self.gguf else {}).items():
            (destination / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        files = [self.directory / name for name in TEXTS.split()]
        if self.kind == "meta" and not (self.directory / "tokenizer.json").is_file():
            # Meta keeps tokenizer.model one folder up, beside several models. One in the folder itself replaces it.
            files.insert(0, self.directory.absolute().parent / "tokenizer.model")
        for file in files:
            if file.is_file():
                shutil.copyfile(file, destination / file.name)
