"""GGUF files (llama.cpp's format): metadata and tensors in, under the names of a Hugging Face directory.

The `gguf` package dequantizes the tensors. Matrices in Q4_0 and Q4_1 are taken over exactly as our
int4 with groups of 32, and for the CPU kernels those in Q8_0 as int8. Everything that a file claims is checked before
memory is allocated for it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from model import Transformer
from model_config import ModelConfig
from support.errors import UserError
from support.reader import is_a
from weights.files import Destination, Entries, Entry, Spans, check_entries, check_finite
from weights.gguf_metadata import TOKEN_LISTS, hf_config, tokenizer_files
from weights.hf import hf_views, parameter_sources, read_parameter
from weights.quantized import TiedEmbedding, set_tensor
from weights.shards import Shard
from weights.stored import install

NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))  # kinds of values, as `struct` calls them
TEXT, ARRAY = 8, 9  # the other kinds
# The supported types by their numbers: name, values of a block, and its bytes.
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20)}
TYPES |= {6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)}
TYPES |= {12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)}
BLOCKS = {name: values for name, values, _ in TYPES.values()}
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 32  # values of a row that share a scale in Q4_0, Q4_1 and Q8_0
# More than any real model has. Every element becomes a Python object, so a false count could fill the memory.
MOST_ELEMENTS, MOST_TENSORS = 2_000_000, 100_000
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
EXPERT = {"gate": "w1", "down": "w2", "up": "w3"}


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

    def bytes(self, count: int) -> bytes:
        """The next bytes."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.mapped):
            raise ValueError(f"it ends before byte {self.at:,}")
        return self.mapped[start : self.at]

    def numbers(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        """The next numbers of a kind of `struct`."""
        return struct.unpack(f"<{count}{kind}", self.bytes(count * struct.calcsize(f"<{kind}")))

    def text(self) -> str:
        """The next text."""
        return self.bytes(self.numbers("Q")[0]).decode()

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
        return [self.text() for _ in range(count)] if item == TEXT else list(self.numbers(NUMBERS[item], count))

    def _place(self) -> tuple[int, str, str, tuple[int, ...], int]:
        """The next tensor's first byte after the header, name, type, shape, and bytes of a row."""
        name, dimensions = self.text(), self.numbers("I")[0]
        shape, (number, offset) = self.numbers("Q", dimensions), self.numbers("IQ")
        if number not in TYPES:
            known = ", ".join(BLOCKS)
            raise ValueError(f"tensor {name!r:.80} has the type number {number}; the supported types are {known}")
        kind, values, size = TYPES[number]
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
            width = 1 if BLOCKS[kind] > 1 else row // shape[0]
            data = np.frombuffer(self.mapped, f"<u{width}", (end - offset) // width, first + offset)
            tensors.append(GGUFTensor(name, kind, shape, data.reshape(*shape[:0:-1], -1)))
        return tensors


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """What a damaged or hostile file causes, which may be any exception, becomes a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or str(path) in str(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is damaged or not supported: {reason}. Download it again.") from error


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
    int8_groups: bool = False  # whether Q8_0 stays int8 with groups of 32, which only the CPU kernels read
    shard: Shard | None = None  # the part that this process holds, and the config of the whole model
    whole: ModelConfig | None = None

    @classmethod
    def open(cls, path: Path, int8_groups: bool = False) -> GGUFFile:
        """Parse a file and the other parts of a split one. Raises ValueError in one line if it cannot be used."""
        with _one_line_errors(path):
            parts = [_Parser(path)]
            if (count := parts[0].metadata.get("split.count")) is not None:
                parts = [_Parser(part) for part in _shards(path, count)]
            tensors: dict[str, GGUFTensor] = {}
            for tensor in (tensor for part in parts for tensor in part.tensors):
                if tensor.name in tensors:
                    raise ValueError(f"tensor {tensor.name!r:.80} is there twice")
                tensors[tensor.name] = tensor
        return cls(path, parts[0].metadata, tensors, [part.mapped for part in parts], int8_groups)

    @cached_property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer as files of a Hugging Face directory, by name. Empty if the file holds no tokenizer."""
        with _one_line_errors(self.path):
            files = tokenizer_files(self.metadata, str(self.path))
        for key in TOKEN_LISTS:  # tens of thousands of Python objects, which nobody reads from now on
            self.metadata.pop(key, None)
        return files

    def config(self) -> dict[str, Any]:
        """The model's geometry as a Hugging Face config.json.

        Raises ValueError in one line for an architecture or a setting that is not implemented.
        """
        with _one_line_errors(self.path):
            divisors = self.tensors.get("rope_freqs.weight")
            rotation = None if divisors is None else self._read(divisors)
            return hf_config(self.metadata, self.tensors, rotation, str(self.path))

    @cached_property
    def sources(self) -> dict[str, tuple[GGUFTensor, int | None]]:
        """Hugging Face tensor name -> the tensor here, and the expert in it if it holds all experts of a layer."""
        return {
            hf: (tensor, expert)
            for name, tensor in self.tensors.items()
            for hf, expert in _hf_names(name, tensor.shape[-1])
        }

    @property
    def entries(self) -> dict[str, Entry]:
        """All tensors as floats, under their Hugging Face names. What is quantized is dequantized when it is read."""
        entries = {}
        for name, (tensor, expert) in self.sources.items():
            shape = tensor.shape[::-1][0 if expert is None else 1 :]
            dtype = FLOAT_TYPES.get(tensor.kind, torch.float32)
            read = partial(self._read, tensor, expert)
            entries[name] = Entry(shape, dtype, self.path.name, read, read)
        return entries

    def forget(self) -> None:
        """Let the system drop the pages that were read. They are read again where they are needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self.mapped:
                mapped.madvise(mmap.MADV_DONTNEED)

    def _rows(self, tensor: GGUFTensor, expert: int | None, spans: Spans | None = None) -> np.ndarray:
        """The stored rows of a tensor, or of a part of it, in the order of Hugging Face.

        llama.cpp rotates neighbouring rows of Q and K, Hugging Face rotates row i with row i + head_dim / 2. A part of
        them has whole heads, and a part of the columns must have whole blocks.
        """
        rows = tensor.data if expert is None else tensor.data[expert]
        share, width = 1, tensor.shape[0]
        if spans and spans.axis:
            pieces = [slice(*(i * rows.shape[1] // width for i in piece)) for piece in spans.pieces]
            rows = np.concatenate([rows[:, piece] for piece in pieces], 1) if len(pieces) > 1 else rows[:, pieces[0]]
        elif spans:
            whole, pieces = len(rows), [slice(*piece) for piece in spans.pieces]
            rows = np.concatenate([rows[piece] for piece in pieces]) if len(pieces) > 1 else rows[pieces[0]]
            share = whole // len(rows)
        if self.metadata["general.architecture"] == "llama" and re.search(r"\.attn_[qk]\.", tensor.name):
            side = "head_count" if ".attn_q." in tensor.name else "head_count_kv"
            heads = self.metadata.get(f"llama.attention.{side}", self.metadata["llama.attention.head_count"])
            heads = (heads[0] if isinstance(heads, list) else heads) // share
            rows = rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        return rows

    def _read(self, tensor: GGUFTensor, expert: int | None = None, spans: Spans | None = None) -> Tensor:
        block = BLOCKS[tensor.kind]
        if spans and spans.axis and any(i % block for piece in spans.pieces for i in piece):
            return spans(self._read(tensor, expert))  # blocks of 256 columns that belong to two processes
        rows = np.array(self._rows(tensor, expert, spans))
        if tensor.kind in FLOAT_TYPES:
            return torch.from_numpy(rows).view(FLOAT_TYPES[tensor.kind])
        import gguf  # it takes a while

        with np.errstate(all="ignore"):  # what is not finite is refused afterwards
            return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind]))

    def packs(self, names: list[str]) -> bool:
        """Whether one of our matrices, made of these Hugging Face tensors, stays quantized.

        Experts with minima (Q4_1) do not, because the experts' kernel has no minima.
        """
        tensors = [self.sources[name][0] for name in names if name in self.sources]
        kinds = {tensor.kind for tensor in tensors}
        if len(tensors) < len(names) or any(len(tensor.shape) < 2 for tensor in tensors):
            return False  # an error, which loading reports
        if any(".experts." in name for name in names):
            return kinds == {"Q4_0"}
        return kinds <= {"Q4_0", "Q4_1"} or (self.int8_groups and kinds == {"Q8_0"})

    def packed_parameters(self, model: Transformer) -> dict[str, list[str]]:
        """Our parameters that stay quantized -> the Hugging Face tensors that each one is made of.

        An embedding of its own becomes floats, because its rows are looked up. A tied LM head can have its codes.
        """
        sources = parameter_sources(model, hf_views(model))
        embedding = sources.pop("embed_tokens.weight")
        if model.lm_head is None and self.int8_groups and not self.shard:
            sources["lm_head.weight"] = embedding
        return {ours: names for ours, names in sources.items() if self.packs(names)}

    def kept_entries(self, entries: Entries, packed: Mapping[str, list[str]]) -> dict[str, Entry]:
        """The tensors that loading keeps: the parameters in `packed` in our layout, the others as `entries` have them."""
        entries = dict(entries)
        for names in packed.values():
            for name in names:
                stored = self.stored_entries(name, self.has_minima(names))
                if name == "model.embed_tokens.weight":  # a tied LM head, which the embedding reads
                    stored = {f"lm_head.{key.rpartition('.')[2]}": entry for key, entry in stored.items()}
                del entries[name]
                entries |= stored
        return entries

    def quantization_name(self, packed: Mapping[str, list[str]]) -> str | None:
        """What reports call the quantization of a model with these packed parameters, None if there are none."""
        kinds = {self.sources[name][0].kind for names in packed.values() for name in names}
        bits = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8"}
        return " ".join(f"{bits[kind]} ({kind})" for kind in sorted(kinds)) or None

    def float_note(self, packed: Mapping[str, list[str]]) -> str:
        """A line on quantized tensors that do not stay quantized, or ''."""
        used = {self.sources[name][0].name for names in packed.values() for name in names}
        kinds = [tensor.kind for name, tensor in self.tensors.items() if name not in used]
        counts = {kind: kinds.count(kind) for kind in BLOCKS if kind in kinds and kind not in FLOAT_TYPES}
        if not counts:
            return ""
        text = ", ".join(f"{count} {kind} tensor{'s' * (count > 1)}" for kind, count in counts.items())
        exact = ["Q4_0", "Q4_1"] + ["Q8_0"] * self.int8_groups
        why = f"only matrices in {', '.join(exact)} stay quantized"
        if not counts.keys().isdisjoint(exact):
            why += ", but no embedding, and no fused matrices (q, k and v; gate and up; experts) whose types differ"
        return f"{text} of {self.path.name} became floats: {why}."

    def has_minima(self, names: list[str]) -> bool:
        """Whether a weight that is made of these Q4 tensors needs mins."""
        return any(self.sources[name][0].kind == "Q4_1" for name in names)

    def stored_entries(self, name: str, minima: bool) -> dict[str, Entry]:
        """The shapes of one quantized matrix in our layout (`stored`). `minima`: with mins also for Q4_0."""
        tensor = self.sources[name][0]
        K, N = tensor.shape[:2]
        int8 = tensor.kind == "Q8_0"
        layout = {"qweight": ((N, K), torch.int8) if int8 else ((N, K // 2), torch.uint8)}
        layout |= dict.fromkeys(["scales", "mins"][: 1 + minima], ((K // BLOCK, N), torch.float16))
        entries = {}
        for leaf, (shape, dtype) in layout.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            entries[name.removesuffix("weight") + leaf] = Entry(shape, dtype, self.path.name, empty.detach)
        return self.shard.entries(entries, self.whole, str(self.path)) if self.shard else entries

    def stored(self, name: str) -> dict[str, Tensor]:
        """A Q4_0, Q4_1 or Q8_0 matrix exactly in our layout (`weights.quantized`)."""
        tensor, expert = self.sources[name]
        shape, kind, spans = (tensor.shape[1], tensor.shape[0]), tensor.kind, None
        if self.shard:
            spans = self.shard.matrix(name, shape, BLOCK, self.whole, str(self.path))
        rows = self._rows(tensor, expert, spans)
        stored: dict[str, Tensor] = {}
        for first in range(0, len(rows), 4096):  # so that an LM head takes little more than its place
            for leaf, part in self._stored_rows(rows[first : first + 4096], kind, tensor.name).items():
                axis = 0 if leaf == "qweight" else 1  # of the outputs
                whole = stored.setdefault(leaf, part.new_empty(*part.shape[:axis], len(rows), *part.shape[axis + 1 :]))
                whole.narrow(axis, first, part.shape[axis]).copy_(part)
            self.forget()
        return stored

    def _stored_rows(self, rows: np.ndarray, kind: str, name: str) -> dict[str, Tensor]:
        """Some rows of a matrix. weight = code * scale + min; in Q4_0 the min is -8 * scale, and Q8_0 has none."""
        numbers = 2 if kind == "Q4_1" else 1  # fp16 values before the 32 codes of a block
        rows = np.array(rows)  # torch wants memory that may be written
        blocks = torch.from_numpy(rows.reshape(len(rows), -1, 2 * numbers + (32 if kind == "Q8_0" else 16)))
        scales, *mins = blocks[..., : 2 * numbers].contiguous().view(torch.float16).permute(2, 1, 0)
        codes = blocks[..., 2 * numbers :]
        for part in (scales, *mins):
            check_finite(part, name, self.path.name)
        if kind == "Q8_0":
            return {"qweight": codes.flatten(1).contiguous().view(torch.int8), "scales": scales.contiguous()}
        # Byte i of a block holds value i in its low half, and value i + 16 in its high half.
        codes = torch.cat((codes & 15, codes >> 4), -1).flatten(1)
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        mins = mins[0] if mins else -8 * scales
        return {"qweight": packed, "scales": scales.contiguous(), "mins": mins.contiguous()}


def _hf_names(name: str, experts: int) -> Iterator[tuple[str, int | None]]:
    """The Hugging Face names of a GGUF tensor, each with the index of its expert. An unknown name stays as it is."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?", stem)
    if match is None:
        if name != "rope_freqs.weight":  # a part of the config
            yield (f"{TOP[stem]}.{kind}" if stem in TOP else name), None
        return
    at = f"model.layers.{match[1]}"
    role = re.fullmatch("ffn_(gate|up|down)(_exps)?", match[2])
    if role and (role[2] or match[3]):  # all experts in one tensor, or each in its own
        for e in range(experts) if role[2] else [int(match[3])]:
            yield f"{at}.block_sparse_moe.experts.{e}.{EXPERT[role[1]]}.{kind}", e if role[2] else None
    else:
        yield (f"{at}.{LAYER[match[2]]}.{kind}" if match[2] in LAYER else name), None


def fill_gguf(
    model: Transformer, file: GGUFFile, entries: Entries, packed: Mapping[str, list[str]], to: Destination
) -> None:
    """Fill a meta model: quantized modules for the parameters in `packed`, floats of `to.dtype` for the others.

    entries: all tensors of this process's part as floats.
    Raises ValueError in one line for tensors that are missing, left over, of another shape, or not finite.
    """
    where = str(file.path)
    views = hf_views(model)
    check_entries({name: tuple(view.shape) for name, view in views.items()}, entries, where)
    sources, slots = parameter_sources(model, views), dict(model.named_parameters())
    tied = "lm_head.weight" in packed and model.lm_head is None and not file.shard
    if tied:
        sources["lm_head.weight"] = packed["lm_head.weight"]
        slots["lm_head.weight"] = slots["embed_tokens.weight"]
        model.lm_head = torch.nn.Linear(*reversed(slots["lm_head.weight"].shape), bias=False, device="meta")
        del sources["embed_tokens.weight"]
    for done, (ours, names) in enumerate(sources.items()):
        slot = slots[ours]
        if ours in packed:
            stored = _stored_weight(file, names, model.config.num_local_experts if slot.dim() == 3 else 0)
            install(model, ours, {k: v.to(to.device) for k, v in stored.items()}, slot, f"{where}: {ours}")
        else:
            tensor = read_parameter(entries, names, slot.shape, where)
            set_tensor(model, ours, tensor.to(to.device, to.dtype))
        file.forget()
        to.progress(done + 1, len(sources), ours)
    if tied:
        model.embed_tokens = TiedEmbedding(model.lm_head)


def _stored_weight(file: GGUFFile, names: list[str], experts: int) -> dict[str, Tensor]:
    """The stored tensors of one quantized weight whose rows are these tensors, with a leading axis for experts."""
    parts = [file.stored(name) for name in names]
    stored = {}
    for leaf in parts[0]:
        if leaf == "mins" and not file.has_minima(names):
            continue  # they follow from the scales
        rows = 0 if leaf == "qweight" else 1  # the axis of the outputs
        whole = torch.cat([part[leaf] for part in parts], rows) if len(parts) > 1 else parts[0][leaf]
        if experts:
            whole = whole.unflatten(rows, (experts, -1)).movedim(rows, 0)
        stored[leaf] = whole.contiguous()
    return stored
