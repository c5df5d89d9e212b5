"""Every weight file format in and out: Hugging Face directories, Meta `.pth`, our own directories, EAGLE heads.

Loading is strict: names, shapes and dtypes of all tensors are checked before memory is allocated, values while they are
copied. It does not know how anything decodes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model import DTYPES, ConfigReader, ModelConfig, RopeConfig, Transformer

Progress = Callable[[int, int, str], None]
JSON_LIMIT = 4 << 20  # bytes of a config.json
INDEX_LIMIT = 64 << 20  # bytes of a shard index or of a safetensors header
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Buffers that old exporters stored and that follow from the config: the one thing a checkpoint may hold unused.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope\.freqs")


class Entry(NamedTuple):
    """One tensor on disk: known shape and dtype (a str if torch has none for it), read on demand to the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    file: str
    read: Callable[[], Tensor]


# ---- files -----------------------------------------------------------------------------------------------------


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from `path`. ValueError in one line for a missing, oversized, malformed or non-object file."""

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    try:
        if (size := path.stat().st_size) > limit:
            raise ValueError(f"{path}: {size:,} bytes, at most {limit:,} are read. Is it the right file?")
        value = json.loads(path.read_bytes(), parse_constant=refuse)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON through a temporary name, so that a reader never sees half a file."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors (any device, views allowed) one by one: at most one is copied at a time. Temp name, then rename."""
    kinds = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    # Wide dtypes first keeps every tensor aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    at = 0
    for name in order:
        t = tensors[name]
        end = at + t.numel() * t.element_size()
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
            out.write(memoryview(flat.view(torch.uint8).numpy()))
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)


def read_entries(files: Iterable[Path]) -> dict[str, Entry]:
    """All tensors of `.safetensors` / `.bin` / `.pth` files, unread. A name found in two files is an error."""
    entries: dict[str, Entry] = {}
    for path in files:
        found = _safetensors_entries(path) if path.suffix == ".safetensors" else _pickle_entries(path)
        if both := entries.keys() & found.keys():
            name = min(both)
            raise ValueError(
                f"{path}: tensor {name!r} is also in {entries[name].file}. Remove the stale file."
            )
        entries.update(found)
    return entries


def _safetensors_entries(path: Path) -> dict[str, Entry]:
    try:
        header = _safetensors_header(path)
        handle = safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error}). Download it again.") from error

    def reader(name: str) -> Callable[[], Tensor]:
        return lambda: handle.get_tensor(name)

    return {
        name: Entry(
            tuple(info["shape"]),
            SAFETENSORS_DTYPES.get(info["dtype"], info["dtype"]),
            path.name,
            reader(name),
        )
        for name, info in header.items()
        if name != "__metadata__"
    }


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The header alone, to name a truncated file and duplicated keys; all else is left to the library's checks."""
    broken = f"{path}: not a readable safetensors file"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(pairs)) != len(pairs):
            raise ValueError("duplicated key")
        return value

    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, INDEX_LIMIT):
            raise ValueError(
                f"{broken}: header claims {length:,} bytes, file has {size:,}. Download it again."
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=unique)
        spans = [info["data_offsets"][1] for name, info in header.items() if name != "__metadata__"]
        claimed = 8 + length + max(spans, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{broken} (header: {type(error).__name__} {error}). Download it again.") from error
    if claimed > size:
        raise ValueError(
            f"{path} is cut short: header claims {claimed:,} bytes, file has {size:,}. Download it again."
        )
    return header


def _pickle_entries(path: Path) -> dict[str, Entry]:
    if tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < (2, 10):
        raise ValueError(
            f"{path}: pickle files need torch 2.10 or newer (older ones can be made to run code, CVE-2026-24747); this "
            f"is torch {torch.__version__}. Convert it to safetensors elsewhere."
        )
    try:
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            value = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except Exception as error:  # a hostile pickle may raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise ValueError(f"{path}: refused or unreadable as a plain tensor file ({first}).") from error
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) and v.layout is torch.strided for k, v in value.items()
    ):
        raise ValueError(f"{path}: expected a dictionary of names and dense tensors.")

    def reader(tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    return {name: Entry(tuple(t.shape), t.dtype, path.name, reader(t)) for name, t in value.items()}


def tensor_files(directory: Path) -> list[Path]:
    """The weight files of a directory: the shard index if there is one, else `model*.safetensors`, else `.bin`."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = directory / f"{stem}.{suffix}.index.json"
        if index.exists():
            shards = read_json(index, INDEX_LIMIT).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ValueError(f"{index}: weight_map must name at least one tensor.")
            for name in shards.values():
                plain = (
                    isinstance(name, str)
                    and re.fullmatch(r"[\w][\w.-]*", name)
                    and name.endswith("." + suffix)
                )
                if not plain:
                    raise ValueError(f"{index}: shard name {name!r} is not a plain .{suffix} file name.")
            files = [directory / name for name in sorted(set(shards.values()))]
            for file in files:
                if not file.is_file():
                    raise ValueError(f"{file} is missing, but {index.name} names it. Download it again.")
            return files
        if files := sorted(directory.glob(f"{stem}*.{suffix}")):
            return files
    return []


def check_entries(expected: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry], where: str) -> None:
    """ValueError in one line unless `entries` holds exactly the expected names with these shapes and a float dtype."""
    if missing := expected.keys() - entries.keys():
        hint = " (does config.json lack tie_word_embeddings?)" if "lm_head.weight" in missing else ""
        raise ValueError(f"{where}: missing {_names(missing)}{hint}. Is a shard missing? Download it again.")
    if extra := {n for n in entries.keys() - expected.keys() if not IGNORED.fullmatch(n)}:
        raise ValueError(f"{where}: unexpected {_names(extra)}; config.json does not describe this model.")
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            raise ValueError(
                f"{entry.file}: {name} is {list(entry.shape)}, expected {list(shape)} by config.json. "
                "Do the weights and config.json belong together?"
            )
        if entry.dtype not in FLOATS:
            raise ValueError(
                f"{entry.file}: {name} has dtype {entry.dtype}, expected a float of 16 to 64 bits."
            )


def _names(names: Iterable[str]) -> str:
    """A few tensor names, safe to print on one line."""
    first, *rest = sorted(names)
    shown = [repr(name)[:120] for name in [first, *rest[:2]]]
    return f"tensor {', '.join(shown)}" + (f" and {len(rest) - 2} more" if len(rest) > 2 else "")


def check_finite(tensor: Tensor, name: str, file: str) -> None:
    """ValueError if a float tensor holds NaN or inf. One pass, no temporary; syncs with the device."""
    if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise ValueError(
            f"{file}: {name} holds NaN or infinite values in {str(tensor.dtype).removeprefix('torch.')}. Damaged "
            "file, or values too large for this --dtype."
        )


# ---- target models ---------------------------------------------------------------------------------------------


def load_config(directory: str | Path) -> ModelConfig:
    """The geometry of the model in `directory` (Hugging Face, ours, or Meta). ValueError in one line if unusable."""
    directory = _existing(directory)
    if (directory / "config.json").exists() or not (directory / "params.json").exists():
        return ModelConfig.from_hf(read_json(directory / "config.json"), str(directory / "config.json"))
    return _read_meta(directory)[0]


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
    meta = not (directory / "config.json").exists() and (directory / "params.json").exists()
    if not meta:
        raw = read_json(directory / "config.json")
        if raw.get("eaglet_quant") or raw.get("quantization_config"):
            import quantize

            return quantize.load_quantized(directory, raw, device, dtype, progress, max_positions)
    config, entries = _read_meta(directory) if meta else (load_config(directory), _read_directory(directory))
    model = build_model(config)
    views = hf_views(model, fused_experts=any(n.endswith(".experts.gate_up_proj") for n in entries))
    duplicate = entries.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    check_entries({name: tuple(v.shape) for name, v in views.items()}, entries, str(directory))
    materialise(model, device, dtype or DTYPES[config.dtype], max_positions)
    views = hf_views(model, fused_experts=any(n.endswith(".experts.gate_up_proj") for n in entries))
    copy_tensors(views, entries, progress)
    if duplicate is not None:
        embedding = views["model.embed_tokens.weight"]
        stored = duplicate.read()
        if stored.shape != embedding.shape or not torch.equal(stored.to(embedding), embedding):
            raise ValueError(
                f"{duplicate.file}: lm_head.weight differs from the embedding, but config.json has "
                "tie_word_embeddings = true. Set it to false if the model has its own LM head."
            )
    return model


def build_model(config: ModelConfig) -> Transformer:
    """The model on the meta device: shapes without memory. ValueError where sizes overflow."""
    try:
        with torch.device("meta"):
            return Transformer(config).eval().requires_grad_(False)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(
            f"config.json: sizes are too large for a tensor ({str(error).splitlines()[0]})."
        ) from error


def materialise(
    model: Transformer, device: torch.device | str, dtype: torch.dtype, max_positions: int | None = None
) -> None:
    """Give a meta model uninitialised memory on `device` and build its rotary tables."""
    model.to(dtype=dtype).to_empty(device=device)
    model.rotary.build(device, min(max_positions or model.config.max_positions, model.config.max_positions))


def copy_tensors(
    views: Mapping[str, Tensor], entries: Mapping[str, Entry], progress: Progress | None = None
) -> None:
    """Copy checked entries into views of the model's parameters, casting; ValueError where a value is not finite."""
    total = sum(math.prod(entries[name].shape) * entries[name].dtype.itemsize for name in views)
    done = 0
    for name, view in sorted(views.items(), key=lambda item: entries[item[0]].file):
        entry = entries[name]
        view.copy_(entry.read())
        check_finite(view, name, entry.file)
        done += math.prod(entry.shape) * entry.dtype.itemsize
        if progress is not None:
            progress(done, total, name)


def hf_views(model: Transformer, fused_experts: bool = False) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the slice of our (fused) parameter that holds it. Used to load and to save.

    fused_experts: Mixtral's transformers-5 names (one tensor for all experts) instead of the usual ones.
    """
    c = model.config
    qkv = [c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
    views: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed_tokens.weight}

    def linear(
        at: str, names: tuple[str, ...], module: torch.nn.Linear, sizes: list[int] | None = None
    ) -> None:
        for kind, parameter in module.named_parameters():
            parts = parameter.split(sizes) if sizes else (parameter,)
            views.update({f"{at}.{name}.{kind}": part for name, part in zip(names, parts, strict=True)})

    for i, block in enumerate(model.layers):
        at = f"model.layers.{i}"
        views[f"{at}.input_layernorm.weight"] = block.input_norm.weight
        linear(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj"), block.attention.qkv, qkv)
        linear(f"{at}.self_attn", ("o_proj",), block.attention.o)
        if c.qk_norm:
            views[f"{at}.self_attn.q_norm.weight"] = block.attention.q_norm.weight
            views[f"{at}.self_attn.k_norm.weight"] = block.attention.k_norm.weight
        views[f"{at}.post_attention_layernorm.weight"] = block.post_norm.weight
        if not c.num_local_experts:
            linear(f"{at}.mlp", ("gate_proj", "up_proj"), block.mlp.gate_up, [c.intermediate_size] * 2)
            linear(f"{at}.mlp", ("down_proj",), block.mlp.down)
        elif fused_experts:
            views[f"{at}.mlp.gate.weight"] = block.mlp.router.weight
            views[f"{at}.mlp.experts.gate_up_proj"] = block.mlp.gate_up
            views[f"{at}.mlp.experts.down_proj"] = block.mlp.down
        else:
            views[f"{at}.block_sparse_moe.gate.weight"] = block.mlp.router.weight
            for e in range(c.num_local_experts):
                expert = f"{at}.block_sparse_moe.experts.{e}"
                views[f"{expert}.w1.weight"], views[f"{expert}.w3.weight"] = block.mlp.gate_up[e].chunk(2)
                views[f"{expert}.w2.weight"] = block.mlp.down[e]
    views["model.norm.weight"] = model.norm.weight
    if model.lm_head is not None:
        views["lm_head.weight"] = model.lm_head.weight
    return views


def save_hf(model: Transformer, directory: str | Path) -> None:
    """Write `config.json` and `model.safetensors` with Hugging Face names; transformers and `load_model` read them.

    Weights keep the model's dtype. Each file gets a temporary name first; needs memory for one tensor only.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", hf_views(model))
    name = next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
    write_json(directory / "config.json", config_to_hf(replace(model.config, dtype=name)))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A ModelConfig as config.json keys that transformers 4 and 5 and `ModelConfig.from_hf` understand."""
    family = {
        "llama": "Llama",
        "mistral": "Mistral",
        "mixtral": "Mixtral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
    }
    plain = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    plain += ("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    plain += ("tie_word_embeddings", "bos_token_id")
    out: dict[str, Any] = {key: getattr(config, key) for key in plain}
    eos = config.eos_token_ids
    out |= {
        "architectures": [f"{family[config.model_type]}ForCausalLM"],
        "hidden_act": "silu",
        "torch_dtype": config.dtype,
        "eos_token_id": (list(eos) if len(eos) > 1 else eos[0]) if eos else None,
        **_rope_to_hf(config.rope),
    }
    if config.model_type in ("llama", "qwen3"):
        out["attention_bias"] = config.qkv_bias
    if config.model_type == "llama":
        out["mlp_bias"] = config.mlp_bias
    if config.model_type == "mixtral":
        out |= {
            "num_local_experts": config.num_local_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
        }
    if config.model_type != "llama":
        out["sliding_window"] = max(config.windows) or None
    if config.model_type.startswith("qwen"):
        out["use_sliding_window"] = any(config.windows)
        out["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows]
        full = [i for i, w in enumerate(config.windows) if not w]
        out["max_window_layers"] = max(full) + 1 if full else 0
    return out


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {key: getattr(rope, key) for key in ("mscale", "mscale_all_dim") if getattr(rope, key)}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _existing(directory: str | Path) -> Path:
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory. Pass a folder with config.json and weights (python -m scripts.download REPO)."
        )
    return directory


def _read_directory(directory: Path) -> dict[str, Entry]:
    files = tensor_files(directory)
    if not files:
        raise ValueError(
            f"{directory}: no model*.safetensors or pytorch_model*.bin. Is the download complete?"
        )
    return read_entries(files)


# ---- Meta's consolidated.*.pth ---------------------------------------------------------------------------------

# Meta name -> (Hugging Face name, dimension that model-parallel shards split, None if every shard holds it whole)
META_TOP = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", 1),
    "norm.weight": ("model.norm.weight", None),
    "output.weight": ("lm_head.weight", 0),
}
META_LAYER = {
    "attention.wq.weight": ("self_attn.q_proj.weight", 0),
    "attention.wk.weight": ("self_attn.k_proj.weight", 0),
    "attention.wv.weight": ("self_attn.v_proj.weight", 0),
    "attention.wo.weight": ("self_attn.o_proj.weight", 1),
    "feed_forward.w1.weight": ("mlp.gate_proj.weight", 0),
    "feed_forward.w3.weight": ("mlp.up_proj.weight", 0),
    "feed_forward.w2.weight": ("mlp.down_proj.weight", 1),
    "attention_norm.weight": ("input_layernorm.weight", None),
    "ffn_norm.weight": ("post_attention_layernorm.weight", None),
}
META_KEYS = (
    "dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta head_dim"
)
META_KEYS += " hidden_dim sliding_window use_scaled_rope rope_scaling_factor max_seq_len max_batch_size"


def _read_meta(directory: Path) -> tuple[ModelConfig, dict[str, Entry]]:
    """params.json and consolidated.*.pth as a config and entries under Hugging Face names, shards joined.

    Meta rotates neighbouring pairs of dimensions; rows of q and k are reordered to the half-rotation layout.
    """
    where = str(directory / "params.json")
    params = read_json(directory / "params.json")
    if unknown := sorted(params.keys() - set(META_KEYS.split())):
        raise ValueError(f"{where}: {unknown[0]!r} is not implemented.")
    files = sorted(directory.glob("consolidated.*.pth"))
    if not files or [f.name for f in files] != [f"consolidated.{i:02}.pth" for i in range(len(files))]:
        raise ValueError(
            f"{directory}: expected consolidated.00.pth, 01, ... without gaps, found {len(files)} files."
        )
    shards = [_pickle_entries(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if odd := shard.keys() ^ shards[0].keys():
            raise ValueError(f"{file}: {_names(odd)} is not in every shard. Download it again.")
    read = ConfigReader(params, where)
    dim, heads = read.integer("dim"), read.integer("n_heads")
    embedding, w1 = (shards[0].get(n) for n in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"))
    if embedding is None or w1 is None or len(embedding.shape) != 2 or len(w1.shape) != 2:
        raise ValueError(
            f"{files[0]}: no tok_embeddings / feed_forward.w1: not a LLaMA checkpoint of Meta's format."
        )
    by_rows = embedding.shape[1] == dim  # LLaMA 3 splits the embedding by vocabulary, 1 and 2 by dimension
    vocab = embedding.shape[0] * (len(shards) if by_rows else 1)
    llama3 = vocab == 128256
    hf: dict[str, Any] = {
        "model_type": "mistral" if params.get("sliding_window") else "llama",
        "hidden_size": dim,
        "intermediate_size": w1.shape[0] * len(shards),
        "num_hidden_layers": read.integer("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("n_kv_heads", heads),
        "head_dim": params.get("head_dim"),
        "vocab_size": vocab,
        "rms_norm_eps": read.number("norm_eps", 1e-5),
        "rope_theta": read.number("rope_theta", 10000.0, 1.0),
        # params.json does not tell how long the model was trained for: add max_seq_len to it for LLaMA 1 or CodeLlama
        "max_position_embeddings": read.integer("max_seq_len", 8192 if llama3 else 4096),
        "sliding_window": params.get("sliding_window"),
        "tie_word_embeddings": "output.weight" not in shards[0],
        "torch_dtype": str(w1.dtype).removeprefix("torch."),
        "bos_token_id": 128000 if llama3 else 1,
        "eos_token_id": [128001, 128008, 128009] if llama3 else 2,
    }
    if read.boolean("use_scaled_rope", False):
        # 3.2 (1B and 3B, the only ones below 4096) scales by 32, 3.1 and 3.3 by 8
        factor = read.number("rope_scaling_factor", 8.0 if dim >= 4096 else 32.0, 1.0)
        hf["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        hf["rope_scaling"]["original_max_position_embeddings"] = 8192
        hf["max_position_embeddings"] = read.integer("max_seq_len", 131072)
    config = ModelConfig.from_hf(hf, where)
    entries: dict[str, Entry] = {}
    for name in shards[0]:
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        target, split = (META_LAYER.get(layer[2]) if layer else META_TOP.get(name)) or (name, None)
        if name == "tok_embeddings.weight" and by_rows:
            split = 0
        target = f"model.layers.{layer[1]}.{target}" if layer and layer[2] in META_LAYER else target
        pieces = [shard[name] for shard in shards] if split is not None else [shards[0][name]]
        rotated = config.head_dim if name.endswith(("wq.weight", "wk.weight")) else 0
        entries[target] = _joined(pieces, split or 0, rotated)
    return config, entries


def _joined(pieces: list[Entry], split: int, head_dim: int) -> Entry:
    """One entry from model-parallel pieces; with head_dim the rows go from Meta's to the half-rotation order."""
    first = pieces[0]
    shape = list(first.shape)
    if len(shape) > split:
        shape[split] = sum(piece.shape[split] for piece in pieces if len(piece.shape) > split)
    if head_dim and shape[0] % head_dim:
        raise ValueError(
            f"{first.file}: q/k projection has {shape[0]} rows, not a multiple of head_dim {head_dim}."
        )

    def read() -> Tensor:
        whole = torch.cat([piece.read() for piece in pieces], split) if len(pieces) > 1 else first.read()
        if head_dim:
            whole = whole.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return whole

    return Entry(tuple(shape), first.dtype, first.file, read)
