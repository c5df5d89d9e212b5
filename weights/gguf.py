"""GGUF files (llama.cpp's format): metadata and tensors in, under the names of a Hugging Face directory.

Matrices in Q4_0 and Q4_1 are taken over exactly as our int4 with groups of 32, and for the CPU kernels those in Q8_0 as
int8. For these and for the Triton kernels every other matrix keeps its types, mixed ones too (`weights.gguf_types`). What
is left becomes floats.
Everything that a file claims is checked before memory is allocated for it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from families.config import ModelConfig
from kernels import PackedWeight
from kernels.cpu import CODES, TILE, put_codes, tile_scales
from kernels.formats import Blocks, Part
from model import Transformer
from support.errors import UsageError
from support.machine import size_text
from support.reader import is_a, one_line_errors
from weights.files import Destination, Entries, Entry, Spans, check_finite
from weights.gguf_metadata import ARCHITECTURES, BY_PLACE, HYBRID, REORDERED, hf_config
from weights.gguf_tokenizer import KEY, TOKEN_LISTS, tokenizer_files
from weights.gguf_types import (
    BY_NAME,
    FITS,
    FLOAT_TYPES,
    FORMATS,
    INTEGER_TYPES,
    PLAIN_TYPES,
    TYPES,
    kept_slot,
    pack_kept,
    read_blocks,
    source_of,
    values_of,
)
from weights.hf import (
    EMBEDDING,
    EXPERT_NAMES,
    FUSED_GATE_UP,
    GATE_UP_DOWN,
    build_model,
    checked_sources,
    hf_views,
    norm_names,
    parameter_sources,
    row_order,
    shared_keys,
)
from weights.quantized import PER_LAYER, Stored, TiedEmbedding, pack_nibbles, untie_
from weights.shards import Shard
from weights.stored import fill_parameters

NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))  # kinds of values, as `struct` calls them
TEXT, ARRAY = 8, 9  # the other kinds
LENGTH = struct.Struct("<Q")  # of a text
BLOCK = 32  # values of a row that share a scale in Q4_0, Q4_1 and Q8_0
# More than any real model has. Every element becomes a Python object, so a false count could fill the memory.
MOST_ELEMENTS, MOST_TENSORS = 2_000_000, 100_000
SMALL = 64 << 20  # bytes of floats that a quantized file may become at least; else a twentieth of its size
TOP = """token_embd=model.embed_tokens output_norm=model.norm output=lm_head
    per_layer_token_embd=model.embed_tokens_per_layer per_layer_proj_norm=model.per_layer_projection_norm
    per_layer_model_proj=model.per_layer_model_projection"""
TOP = dict(pair.split("=") for pair in TOP.split())
LAYER = """attn_q=self_attn.q_proj attn_k=self_attn.k_proj attn_v=self_attn.v_proj attn_output=self_attn.o_proj
    attn_q_norm=self_attn.q_norm attn_k_norm=self_attn.k_norm attn_qkv=self_attn.qkv_proj
    ffn_gate_inp_shexp=mlp.shared_expert_gate ffn_gate_shexp=mlp.shared_expert.gate_proj
    ffn_up_shexp=mlp.shared_expert.up_proj ffn_down_shexp=mlp.shared_expert.down_proj ffn_gate=mlp.gate_proj
    ffn_up=mlp.up_proj ffn_down=mlp.down_proj attn_sinks.weight=self_attn.sinks"""
LAYER = dict(pair.split("=") for pair in LAYER.split())
# Of models with recurrent layers, and of the layer for multi-token prediction (MTP), which comes last.
RECURRENT = """attn_qkv=in_proj_qkv attn_gate=in_proj_z ssm_in=in_proj_qkvz ssm_ba=in_proj_ba ssm_beta=in_proj_b
    ssm_alpha=in_proj_a ssm_a=A_log ssm_dt.bias=dt_bias ssm_dt=dt_bias ssm_conv1d=conv1d ssm_norm=norm ssm_out=out_proj"""
RECURRENT = {ours: f"linear_attn.{theirs}" for ours, theirs in (pair.split("=") for pair in RECURRENT.split())}
GEMMA4 = """inp_gate=per_layer_input_gate proj=per_layer_projection post_norm=post_per_layer_input_norm
    layer_output_scale.weight=layer_scalar ffn_gate_inp=router.proj ffn_gate_inp.scale=router.scale
    ffn_down_exps.scale=router.per_expert_scale pre_ffw_norm_2=pre_feedforward_layernorm_2
    post_ffw_norm_1=post_feedforward_layernorm_1 post_ffw_norm_2=post_feedforward_layernorm_2"""
GEMMA4 = dict(pair.split("=") for pair in GEMMA4.split())
NEXTN = """eh_proj=fc enorm=pre_fc_norm_embedding hnorm=pre_fc_norm_hidden shared_head_norm=norm embed_tokens=embed_tokens
    shared_head_head=lm_head"""
NEXTN = dict(pair.split("=") for pair in NEXTN.split())
OTHER_PARTS = ("v.", "a.", "mm.", "mtp.")  # of images and sounds, and an MTP layer, as Ollama's files have them
OUT = ".linear_attn.out_proj.weight"  # its columns belong to value heads
ROTATIONS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")  # before and after attention and the MLP


class GGUFTensor(NamedTuple):
    """One tensor in a mapped file."""

    name: str
    kind: str  # a name of TYPES
    shape: tuple[int, ...]  # the columns come first
    data: np.ndarray  # [..., bytes of a row] uint8, or [..., columns] unsigned integers of a float's width


class _Parser:
    """A mapped file, read from its beginning. What it claims is compared with its size before memory is allocated."""

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file. Pass a folder with config.json, or a .gguf file.")
            self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 4  # the next byte
        self.elements = 0  # of all arrays
        if (version := self.numbers("I")[0]) not in (2, 3):
            raise ValueError(f"its version is {version}; 2 and 3, for machines of this byte order, are supported")
        tensors, keys = self.numbers("Q", 2)
        if max(tensors, keys) > MOST_TENSORS:
            raise ValueError(f"it claims {tensors:,} tensors and {keys:,} keys, more than {MOST_TENSORS:,}")
        self.metadata = {self.text(): self.value(self.numbers("I")[0]) for _ in range(keys)}
        self.tensors = self._data([self._place() for _ in range(tensors)])

    def numbers(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        """The next numbers of a kind of `struct`."""
        start, self.at = self.at, self.at + count * struct.calcsize(f"<{kind}")
        if self.at > len(self.mapped):
            raise ValueError(f"it ends before byte {self.at:,}")
        return struct.unpack_from(f"<{count}{kind}", self.mapped, start)

    def text(self) -> str:
        """The next text."""
        return self._texts(1)[0]

    def value(self, kind: int) -> Any:
        """The next value of the metadata. kind: its number in the format."""
        if kind == TEXT:
            return self.text()
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind])[0]
        item, count = self.numbers("IQ")
        if kind != ARRAY or item not in (TEXT, *NUMBERS):
            raise ValueError(f"its metadata holds a value of the unknown kind {item if kind == ARRAY else kind}")
        self.elements += count
        if self.elements > MOST_ELEMENTS:
            raise ValueError(f"its metadata claims {self.elements:,} elements, more than {MOST_ELEMENTS:,}")
        return self._texts(count) if item == TEXT else list(self.numbers(NUMBERS[item], count))

    def _texts(self, count: int) -> list[str]:
        """The next texts. There may be hundreds of thousands, so this takes as few steps as possible."""
        data, at, end, length, texts = self.mapped, self.at, len(self.mapped), LENGTH.unpack_from, []
        for _ in range(count):
            first = at + 8
            if first > end or (at := first + length(data, at)[0]) > end:
                raise ValueError(f"it ends before byte {max(first, at):,}")
            texts.append(data[first:at].decode())
        self.at = at
        return texts

    def _place(self) -> tuple[int, str, str, tuple[int, ...], int]:
        """The next tensor's first byte after the header, name, type, shape, and bytes of a row."""
        name, dimensions = self.text(), self.numbers("I")[0]
        shape, (number, offset) = self.numbers("Q", dimensions), self.numbers("IQ")
        if number not in TYPES:
            known = ", ".join(BY_NAME)
            raise ValueError(f"tensor {name!r:.80} has the type number {number}; the supported types are {known}")
        kind, values, size, *_ = TYPES[number]
        if not 1 <= dimensions <= 3 or 0 in shape or shape[0] % values:
            raise ValueError(f"tensor {name!r:.80} cannot have the shape {list(shape)!s:.60} in {kind}")
        return offset, name, kind, shape, shape[0] // values * size

    def _data(self, places: list[tuple[int, str, str, tuple[int, ...], int]]) -> list[GGUFTensor]:
        """The tensors at these places, which may neither overlap nor pass the end of the file."""
        alignment = self.metadata.get("general.alignment", 32)
        if not is_a(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r:.40}")
        first, end, before, tensors = -(-self.at // alignment) * alignment, 0, "", []
        for offset, name, kind, shape, row in sorted(places):
            if offset < end:
                raise ValueError(f"the tensors {before!r:.80} and {name!r:.80} overlap")
            before, end = name, offset + math.prod(shape[1:]) * row
            if first + end > len(self.mapped):
                raise ValueError(f"it has {len(self.mapped):,} bytes, and {name!r:.80} ends at byte {first + end:,}")
            width = row // shape[0] if kind in PLAIN_TYPES else 1
            data = np.frombuffer(self.mapped, f"<u{width}", (end - offset) // width, first + offset)
            tensors.append(GGUFTensor(name, kind, shape, data.reshape(*shape[:0:-1], -1)))
        return tensors


def errors_of(path: Path) -> contextlib.AbstractContextManager[None]:
    """What a damaged or hostile file causes, which may be any exception, becomes a ValueError that names the file."""
    return one_line_errors(f"{path} is damaged or not supported", "Download it again.", str(path))


def _shards(path: Path, count: int) -> list[Path]:
    """All files of a model that was split by llama.cpp's gguf-split. Raises ValueError for one that is missing."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if count > 1 and (match is None or int(match[2]) != count):
        raise ValueError(f"{path} is one of {count} files. Keep their names, which end in -00001-of-{count:05}.gguf.")
    if match is None:
        return [path]
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{match[2]}.gguf") for i in range(1, int(match[2]) + 1)]
    if missing := [p.name for p in paths if not p.is_file()]:
        raise ValueError(f"{path}: {missing[0]} is missing beside it. Download all {len(paths)} files.")
    return paths


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF file, or all parts of a split one: its metadata, and its tensors as they are mapped from disk."""

    path: Path
    metadata: dict[str, Any]
    tensors: Mapping[str, GGUFTensor]  # by name
    mapped: list[mmap.mmap]  # the files
    layout: str = ""  # in which every type stays as it is: "tiles" of the CPU kernels, "panels" of Triton's, or none
    shard: Shard | None = None  # the part that this process holds
    mtp: bool = False  # whether the layer for multi-token prediction is read, if there is one

    @classmethod
    def open(cls, path: Path, layout: str = "") -> GGUFFile:
        """Parse a file and the other parts of a split one. Raises ValueError in one line if it cannot be used."""
        with errors_of(path):
            parts = [_Parser(path)]
            if (count := parts[0].metadata.get("split.count")) is not None:
                parts = [_Parser(part) for part in _shards(path, count)]
            tensors: dict[str, GGUFTensor] = {}
            for tensor in (tensor for part in parts for tensor in part.tensors):
                if tensor.name in tensors:
                    raise ValueError(f"tensor {tensor.name!r:.80} is there twice")
                tensors[tensor.name] = tensor
        return cls(path, parts[0].metadata, tensors, [part.mapped for part in parts], layout)

    @cached_property
    def tokenizer_files(self) -> dict[str, Any]:
        """The tokenizer as files of a Hugging Face directory, by name. Empty if the file holds no tokenizer.

        A tokenizer.json is the object that its text stands for.
        """
        with errors_of(self.path):
            files = tokenizer_files(self.metadata, str(self.path))
        for key in TOKEN_LISTS:  # tens of thousands of Python objects, which nobody reads from now on
            self.metadata.pop(key, None)
        return files

    def config(self) -> dict[str, Any]:
        """The model's geometry as a Hugging Face config.json.

        Raises ValueError in one line for an architecture or a setting that is not implemented.
        """
        with errors_of(self.path):
            config = hf_config(self.metadata, self.tensors, self.rotations, str(self.path))
            if integers := [name for name, tensor in self.tensors.items() if tensor.kind in INTEGER_TYPES]:
                raise ValueError(f"tensor {integers[0]!r:.80} holds integers, which no model does")
            return config

    @property
    def rotations(self) -> dict[str, Tensor]:
        """The divisors of RoPE frequencies that the file has, by the names in ROTATIONS."""
        found = {name: self.tensors.get(f"{name}.weight") for name in ROTATIONS}
        return {name: values_of(tensor.kind, tensor.data) for name, tensor in found.items() if tensor}

    @cached_property
    def _turning(self) -> ModelConfig:
        """The geometry of the whole model, with the order of the rows of Q and K here (`row_order`)."""
        config = ModelConfig.from_hf(self.config(), str(self.path))
        neighbours = config.neighbours or self.metadata["general.architecture"] in REORDERED
        return replace(config, neighbours=neighbours)

    @cached_property
    def sources(self) -> dict[str, tuple[GGUFTensor, int | None]]:
        """Hugging Face tensor name -> the tensor here, and the expert in it if it holds all experts of a layer."""
        family = ARCHITECTURES[self.metadata["general.architecture"]]
        names = LAYER | dict(zip(NORMS, norm_names(family), strict=True))
        place, router, matrices = EXPERT_NAMES.get(family, EXPERT_NAMES["mixtral"])
        names["ffn_gate_inp"] = f"{place}.{router}"
        if family in ("gpt_oss", "seed_oss", *HYBRID.values()):
            names["post_attention_norm"] = "post_attention_layernorm"  # what other files call ffn_norm
        if family in FUSED_GATE_UP:
            names["ffn_up"] = "mlp.gate_up_proj"
        if family == "gemma4_text":
            names |= GEMMA4
            place, matrices = "", GATE_UP_DOWN
        roles = zip(("gate", "up", "down", "gate_up"), (*matrices, "gate_up_proj"), strict=True)
        names |= {role: f"{place}.experts.{{}}.{matrix}".lstrip(".") for role, matrix in roles}
        names |= RECURRENT if family in HYBRID.values() else {}
        layers = self._turning.num_hidden_layers if family in HYBRID.values() else math.inf
        unread = tuple(shared_keys(self._turning))
        return {
            hf: (tensor, expert)
            for name, tensor in self.tensors.items()
            if not name.startswith(OTHER_PARTS)
            for hf, expert in _hf_names(name, tensor.shape[-1], names, layers)
            if (self.mtp or not hf.startswith("mtp.")) and not hf.startswith(unread)
        }

    @property
    def entries(self) -> dict[str, Entry]:
        """All tensors as floats, under their Hugging Face names. What is quantized is dequantized when it is read."""
        entries = {}
        for name, (tensor, expert) in self.sources.items():
            shape = tensor.shape[::-1][0 if expert is None else 1 :]
            shape = (1, *shape) if name.endswith("shared_expert_gate.weight") and len(shape) == 1 else shape
            shape = (shape[0], 1, shape[1]) if name.endswith("conv1d.weight") and len(shape) == 2 else shape
            dtype = FLOAT_TYPES.get(tensor.kind, torch.float32)
            read = partial(self._read, tensor, expert, name)
            entries[name] = Entry(shape, dtype, self.path.name, read, read)
        return entries

    def forget(self) -> None:
        """Let the system drop the pages that were read. They are read again where they are needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self.mapped:
                mapped.madvise(mmap.MADV_DONTNEED)

    def _rows(self, tensor: GGUFTensor, expert: int | None, name: str = "", spans: Spans | None = None) -> np.ndarray:
        """The stored rows of a tensor, or of a part of it, in our order. name: Hugging Face's.

        llama.cpp may rotate neighbouring rows of Q and K, or a part of each head, where we rotate row i with row i +
        head_dim / 2. A part of them has whole heads, and a part of the columns must have whole blocks.
        """
        rows, width = tensor.data if expert is None else tensor.data[expert], tensor.shape[0]
        if spans:
            size, values = (rows.shape[1], width) if spans.axis else (1, 1)
            pieces = [slice(first * size // values, end * size // values) for first, end in spans.pieces]
            parts = [rows[:, piece] if spans.axis else rows[piece] for piece in pieces]
            rows = np.concatenate(parts, spans.axis) if len(parts) > 1 else parts[0]
        order = row_order(name, len(rows), self._turning)
        if order is None and ".linear_attn." in name and not name.endswith((".norm.weight", OUT)):
            order = self._value_heads(len(rows), name.endswith(("_proj_qkv.weight", "_proj_z.weight", "conv1d.weight")))
        return rows if order is None else rows[order.numpy()]

    def _value_heads(self, size: int, wide: bool = True) -> Tensor | None:
        """The places of the rows or columns of a tensor in our order, where those of value heads, at its end, are ordered
        by place among those of a key head, and not by key heads. Else None. wide: whether a head has several."""
        d = self._turning.delta
        if self.metadata["general.architecture"] not in BY_PLACE or d.value_heads == d.key_heads:
            return None
        each = d.value_dim if wide else 1
        first = size - d.value_heads * each
        heads = torch.arange(first, size).view(-1, d.key_heads, each).transpose(0, 1)
        return torch.cat((torch.arange(first), heads.flatten()))

    def _inputs(self, names: list[str]) -> Tensor | None:
        """The input that each column of a matrix multiplies, where that is another one than ours."""
        order = self._value_heads(self.sources[names[0]][0].shape[0]) if names[0].endswith(OUT) else None
        return None if order is None else order.argsort().int()

    def _read(
        self, tensor: GGUFTensor, expert: int | None = None, name: str = "", spans: Spans | None = None
    ) -> Tensor:
        block = BY_NAME[tensor.kind].values
        if spans and spans.axis and any(i % block for piece in spans.pieces for i in piece):
            return spans(self._read(tensor, expert, name))  # blocks of 256 columns that belong to two processes
        rows = self._rows(tensor, expert, name, spans)
        values = values_of(tensor.kind, rows)
        values = (-values).log() if name.endswith(".A_log") else values
        values = values * self._turning.hidden_size**-0.5 if name.endswith(".router.scale") else values
        order = self._value_heads(values.shape[1]) if name.endswith(OUT) else None
        return values if order is None else values[:, order]

    def _kinds(self, names: list[str]) -> list[str]:
        """The types of these tensors. Empty for vectors, and if one is missing, which loading reports."""
        tensors = [self.sources[name][0] for name in names if name in self.sources]
        known = len(tensors) == len(names) and all(len(tensor.shape) > 1 for tensor in tensors)
        return [tensor.kind for tensor in tensors] if known else []

    def in_int4(self, names: list[str]) -> bool:
        """Whether a matrix becomes our int4 or int8.

        Experts with minima (Q4_1) do not, because the experts' kernel has none. Neither does an embedding of its own,
        because its rows are looked up.
        """
        kinds = set(self._kinds(names))
        if any(".experts." in name for name in names):
            return kinds == {"Q4_0"} and self.layout != "tiles"
        tied = self.layout == "tiles" and self.tied_blocks
        if not kinds or names[0].endswith(PER_LAYER) or names == [EMBEDDING] and not tied:
            return False
        return kinds <= {"Q4_0", "Q4_1"} or (self.layout == "tiles" and kinds == {"Q8_0"})

    def in_blocks(self, names: list[str]) -> bool:
        """Whether a matrix keeps the types of its tensors: in whole tiles or panels, and experts alike."""
        kinds = self._kinds(names)
        if not self.layout or not kinds or not FORMATS.keys() >= set(kinds) or self.in_int4(names):
            return False
        each = len({name.rpartition(".experts.")[2].partition(".")[2] for name in names})  # tensors of an expert
        if any(".experts." in name for name in names) and kinds != kinds[:each] * (len(kinds) // each):
            return False
        if self.shard and names == [EMBEDDING]:
            return False
        try:
            shapes, forms = [self._place(name)[0] for name in names], [FORMATS[kind] for kind in kinds]
            return FITS[self.layout](shapes[:each], forms[:each])
        except UsageError:  # a block of columns belongs to two processes
            return False

    def _place(self, name: str) -> tuple[tuple[int, int], Spans | None]:
        """The shape of this process's part of a matrix, and which part it is; None for all of it."""
        tensor, _ = self.sources[name]
        shape = tensor.shape[1], tensor.shape[0]
        block = BY_NAME[tensor.kind].values
        spans = self.shard.matrix(name, shape, block, self._turning, str(self.path)) if self.shard else None
        return (spans.shape(shape) if spans else shape), spans

    @property
    def tied_blocks(self) -> bool:
        """Whether a tied embedding reads its rows off the codes of the LM head."""
        return bool(self.layout) and not self.shard and "output.weight" not in self.tensors

    @cached_property
    def packed(self) -> dict[str, list[str]]:
        """Our parameters that stay quantized -> the Hugging Face tensors that each one is made of.

        A tied embedding is called as the LM head, whose codes it reads.
        """
        model = build_model(replace(self._turning, mtp=self.mtp))
        sources = parameter_sources(model, hf_views(model, self.sources))
        if model.lm_head is None and self.tied_blocks:
            sources["lm_head.weight"] = sources.pop("embed_tokens.weight")
        elif model.lm_head is None:
            del sources["embed_tokens.weight"]
        packed = {ours: names for ours, names in sources.items() if self.in_int4(names) or self.in_blocks(names)}
        # Experts have two matrices, which are packed both or not at all.
        blocks = collections.Counter(ours.rpartition(".")[0] for ours in packed)
        return {
            ours: names
            for ours, names in packed.items()
            if ".experts." not in names[0] or blocks[ours.rpartition(".")[0]] == 2
        }

    def kept(self, entries: Entries) -> dict[str, Entry | Tensor]:
        """What loading keeps, without values: the parameters in `packed` in our layout, the others as given."""
        kept: dict[str, Entry | Tensor] = dict(entries)
        for ours, names in self.packed.items():
            for name in names:
                (N, K), kind = kept.pop(name).shape, self.sources[name][0].kind
                if self.in_blocks(names):
                    layout = {"blocks": kept_slot(kind, N, K, self.layout)}
                else:
                    layout = self._empty(names, N, K, "meta")
                if (inputs := self._inputs(names)) is not None:
                    layout["perm"] = inputs
                base = (ours if ours == "lm_head.weight" else name).removesuffix("weight")
                kept |= {base + leaf: tensor for leaf, tensor in layout.items()}
        return kept

    @property
    def quantization(self) -> str | None:
        """What reports call the quantization of the parameters in `packed`, None if there are none."""
        kinds = {self.sources[name][0].kind for names in self.packed.values() for name in names}
        return " ".join(f"int{FORMATS[kind].low + FORMATS[kind].high} ({kind})" for kind in sorted(kinds)) or None

    @property
    def become_floats(self) -> list[GGUFTensor]:
        """The quantized tensors that do not stay quantized."""
        used = {self.sources[name][0].name for names in self.packed.values() for name in names}
        read = {tensor.name: tensor for tensor, _ in self.sources.values()}
        return [tensor for name, tensor in read.items() if name not in used and tensor.kind in FORMATS]

    def check_floats(self, dtype: torch.dtype) -> None:
        """Raise UsageError if the tensors that do not stay quantized would take much memory in `dtype`."""
        size = dtype.itemsize * sum(math.prod(tensor.shape) for tensor in self.become_floats)
        if size > max(SMALL, sum(tensor.data.nbytes for tensor in self.tensors.values()) // 20):
            note = self.float_note(f"would become {size_text(size)} of floats")
            raise UsageError(f"{note} Take a file of another type; or --kernels reference accepts the floats.")

    def float_note(self, what: str = "became floats") -> str:
        """A line on quantized tensors that do not stay quantized, or ''. what: the line says of them."""
        left = self.become_floats
        if not left:
            return ""
        kinds = [tensor.kind for tensor in left]
        counts = {kind: kinds.count(kind) for kind in FORMATS if kind in kinds}
        text = ", ".join(f"{count} {kind} tensor{'s' * (count > 1)}" for kind, count in counts.items())
        size = size_text(4 * sum(math.prod(tensor.shape) for tensor in left))
        why = "only matrices in Q4_0, Q4_1 stay quantized"
        if not counts.keys().isdisjoint(("Q4_0", "Q4_1")):
            why += ", but no embedding, and no fused matrices (q, k and v; gate and up; experts) whose types differ"
        if self.layout:
            why = "no embedding of several processes stays quantized, and no matrix that does not divide into whole "
            why += "tiles" if self.layout == "tiles" else "panels of 32 rows"
        return f"{text} of {self.path.name} {what} ({size} in float32): {why}."

    @property
    def notes(self) -> list[str]:
        """What a user should know about how the file is read, one line each; a line may be empty."""
        name, notes = self.path.name, [self.float_note()]
        if left := [tensor for tensor in self.tensors if tensor.startswith(OTHER_PARTS)]:
            notes.append(f"{name}: its text model is read, and {len(left)} tensors of other parts are left out.")
        if self.metadata.get(f"{KEY}model") == "gpt2" and f"{KEY}pre" not in self.metadata:
            how = "does not say how its tokenizer splits texts (tokenizer.ggml.pre), so ids may be wrong"
            notes.append(f"{name} {how}. Take a file that was converted later, or the model's folder.")
        return notes

    def _empty(self, names: list[str], n: int, k: int, device: str) -> dict[str, Tensor]:
        """Memory for n rows of a weight that becomes our int4 or int8 (`weights.quantized`)."""
        kinds, empty = self._kinds(names), partial(torch.empty, device=device)
        codes = empty(n, k, dtype=torch.int8) if "Q8_0" in kinds else empty(n, k // 2, dtype=torch.uint8)
        factors = ["scales", "mins"] if "Q4_1" in kinds else ["scales"]
        return {"qweight": codes} | {leaf: empty(k // BLOCK, n, dtype=torch.float16) for leaf in factors}

    def weight(self, names: list[str], experts: int, device: torch.device | str) -> PackedWeight | Stored:
        """The quantized weight whose rows are these tensors, with a leading axis for experts.

        It keeps their types, or is our int4 or int8, in the tiles of the CPU kernels if these hold it.
        """
        inputs = self._inputs(names)
        inputs = None if inputs is None else inputs.to(device)
        if not self.in_blocks(names):
            held = self._stored(names, experts)
            if isinstance(held, PackedWeight):
                return replace(held, perm=inputs)
            return held if inputs is None else held | {"perm": inputs}
        each = len(names) // max(experts, 1)
        groups = (self._parts(names[first : first + each]) for first in range(0, len(names), each))
        return replace(pack_kept(groups, experts > 0, self.layout, device), perm=inputs)

    def _stored(self, names: list[str], experts: int) -> PackedWeight | Stored:
        """A weight whose rows are these tensors in Q4_0, Q4_1 or Q8_0, exactly: in the tiles of the CPU kernels if these
        hold it, or else in the layout of `weights.quantized`."""
        n, k = self._size(names)
        tiled = self.layout == "tiles" and all(self._place(name)[0][0] % TILE == 0 for name in names)
        stored = self._empty(names, n, k, "cpu")
        codes, row = stored["qweight"], 0
        bits = 8 if codes.dtype == torch.int8 else 4
        for name in names:
            source = source_of(self.sources[name][0].kind)
            for piece in self._pieces(name, stored=tiled):
                rows = slice(row, row := row + len(piece.codes))
                if tiled:
                    tiles = codes[rows].view(torch.uint8).view(-1, TILE * codes.shape[1])
                    put_codes(piece.codes, source, tiles, bits)
                else:
                    codes[rows] = (piece.codes ^ 128).view(torch.int8) if bits == 8 else pack_nibbles(piece.codes)
                stored["scales"][:, rows] = piece.scales.mT
                if "mins" in stored:  # what code 0 stands for, also in parts of Q4_0
                    stored["mins"][:, rows] = (-8 * piece.scales if piece.mins is None else piece.mins).mT
        if tiled:
            tables = {leaf: tile_scales(stored[leaf]) for leaf in stored if leaf != "qweight"}
            weight = codes.view(torch.uint8).view(n // TILE, k // BLOCK, BLOCK * bits)
            return PackedWeight("tiles", bits, BLOCK, n, k, weight, **tables)
        if not experts:
            return stored
        axes = {"qweight": 0, "scales": 1, "mins": 1}  # of the outputs
        return {k: t.unflatten(axes[k], (experts, -1)).movedim(axes[k], 0).contiguous() for k, t in stored.items()}

    def _parts(self, names: list[str]) -> list[Part]:
        """A weight whose rows are these tensors, exactly in their types. Neighbours of one type are one part."""
        parts = []
        for kind, group in itertools.groupby(names, lambda name: self.sources[name][0].kind):
            members = list(group)
            tiles = self.layout == "tiles"
            pieces = itertools.chain.from_iterable(self._pieces(name, stored=tiles) for name in members)
            parts.append(Part(FORMATS[kind], *self._size(members), pieces, source_of(kind) if tiles else CODES))
        return parts

    def _pieces(self, name: str, stored: bool) -> Iterator[Blocks]:
        """The codes of a matrix, or its stored rows in their place, and its factors: some thousand rows at a time."""
        tensor, expert = self.sources[name]
        rows = self._rows(tensor, expert, name, self._place(name)[1])
        for first in range(0, len(rows), 4096):
            piece = read_blocks(tensor.kind, rows[first : first + 4096], stored)
            if piece.scales.dtype != torch.float16:
                raise ValueError(f"{self.path}: {tensor.name} has scales outside fp16. Use --kernels reference.")
            for part in (piece.scales, piece.mins):
                if part is not None:
                    check_finite(part, tensor.name, self.path.name)
            yield piece
            self.forget()

    def _size(self, names: list[str]) -> tuple[int, int]:
        """The rows and columns of a weight whose rows are these tensors."""
        shapes = [self._place(name)[0] for name in names]
        return sum(rows for rows, _ in shapes), shapes[0][1]


def _hf_names(name: str, experts: int, names: Mapping[str, str], layers: float) -> Iterator[tuple[str, int | None]]:
    """The Hugging Face names of a GGUF tensor, each with the index of its expert. An unknown name stays as it is.

    names: of the tensors of a layer. layers: how many there are before those for multi-token prediction.
    """
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.\d+\.nextn\.(\w+)", stem):
        yield (f"mtp.{NEXTN[match[1]]}.{kind}" if match[1] in NEXTN else name), None
        return
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?", name if name.endswith((".ssm_a", ".ssm_dt")) else stem)
    if match is None:
        if stem not in ROTATIONS:  # a part of the config
            yield (f"{TOP[stem]}.{kind}" if stem in TOP else name), None
        return
    at = f"model.layers.{match[1]}" if int(match[1]) < layers else f"mtp.layers.{int(match[1]) - layers}"
    whole = name.removeprefix(f"blk.{match[1]}.")  # the names of some tensors have other ends
    role = re.fullmatch("ffn_(gate_up|gate|up|down)(_exps)?", match[2])
    if role and (role[2] or match[3]) and whole not in names:  # all experts in one tensor, or each in its own
        for e in range(experts) if role[2] else [int(match[3])]:
            yield f"{at}.{names[role[1]].format(e)}.{kind}", e if role[2] else None
    else:
        known = names.get(whole) or (names.get(match[2]) and f"{names[match[2]]}.{kind}")
        yield (f"{at}.{known}" if known else name), None


def fill_gguf(
    model: Transformer, file: GGUFFile, entries: Entries, packed: Mapping[str, list[str]], to: Destination
) -> None:
    """Fill a meta model: quantized modules for the parameters in `packed`, floats of `to.dtype` for the others.

    entries: all tensors of this process's part as floats.
    Raises ValueError in one line for tensors that are missing, left over, of another shape, or not finite.
    """
    where = str(file.path)
    sources = checked_sources(model, entries, where)
    tied = "lm_head.weight" in packed and model.lm_head is None
    if tied:
        sources["lm_head.weight"] = sources.pop("embed_tokens.weight")
        untie_(model)

    def weight(ours: str, names: list[str], slot: Tensor) -> PackedWeight | Stored | None:
        file.forget()
        experts = model.config.num_local_experts if slot.dim() == 3 else 0
        return file.weight(names, experts, to.device) if ours in packed else None

    fill_parameters(model, sources, entries, weight, where, to)
    file.forget()
    if tied:
        model.embed_tokens = TiedEmbedding(model.lm_head, to.dtype)
