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
from dataclasses import dataclass, replace
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


# ---- EAGLE heads -----------------------------------------------------------------------------------------------

# Hugging Face name inside the head's decoder layer -> ours; several names to one are fused by rows, in this order
HEAD_NAMES = {
    "self_attn.q_proj": "attention.qkv",
    "self_attn.k_proj": "attention.qkv",
    "self_attn.v_proj": "attention.qkv",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "mlp.gate_up",
    "mlp.up_proj": "mlp.gate_up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "input_norm",
    "hidden_norm": "hidden_norm",
    "post_attention_layernorm": "post_norm",
}
# Norms that HASS-like EAGLE-1 heads add (eagle.md 4.5)
HASS = (
    "embed_layernorm",
    "hidden_layernorm",
    "lm_head_layernorm",
    "embedding_layernorm",
    "pre_lm_head_layernorm",
)
AUX = "eagle_aux_hidden_state_layer_ids"
HEAD_GEOMETRY = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
)
HEAD_OVERRIDES = (*HEAD_GEOMETRY, "max_position_embeddings", "norm_before_residual", "norm_output", AUX)
SIZES = {2048: "1B", 3072: "3B", 4096: "7B or 8B", 5120: "13B", 6656: "33B", 8192: "70B"}


@dataclass(frozen=True)
class EagleConfig:
    """Geometry of an EAGLE head. `layer.vocab_size` is the draft vocabulary; `taps` name the target layers whose *input*
    is read (the number of layers = the output of the last one, before the final norm), () for version 1."""

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
    target_vocab_size: int = 0  # needed to save a head with a draft vocabulary of its own


@dataclass(frozen=True)
class EagleFile:
    """A head as read: tensors under the state-dict names of `eagle_draft.EagleHead`, and what had to be assumed."""

    config: EagleConfig
    tensors: dict[str, Tensor]
    notes: list[str]


def read_eagle(
    path: str | Path, target: ModelConfig, overrides: Mapping[str, str] | None = None
) -> EagleFile:
    """Read a published EAGLE-1/2/3 head: SafeAILab, SpecForge or speculators layout, ours, or a bare weight file.

    Generation, draft vocabulary and biases follow from the tensors, RoPE and eps from the head's own config, never from
    the target's (eagle.md 4.7).

    Args:
        path: a folder, or one `.safetensors` / `.bin` / `.pth` file (with or without a config.json beside it).
        target: the model the head shall draft for.
        overrides: config keys (HEAD_OVERRIDES) to replace, values as JSON text.

    Returns:
        EagleFile; tensors on the CPU in their stored dtype.

    Raises:
        ValueError: one line, if the head is damaged, does not fit the target, or needs something not implemented.
    """
    path = Path(path)
    raw, entries, notes = _open_head(path)
    given = _parse_overrides(overrides or {})
    nested = raw.get("transformer_layer_config", {}) if "speculators_model_type" in raw else raw
    extra = raw.get("eagle_config") or {}
    ours = raw.get("eaglet_eagle") or {}
    if not all(isinstance(part, dict) for part in (nested, extra, ours)):
        raise ValueError(f"{path}: transformer_layer_config / eagle_config must be JSON objects.")
    geometry = {**nested, **given}
    flags = ConfigReader({**raw, **extra, **ours, **given}, str(path))
    if "rope_theta" in given and isinstance(geometry.get("rope_parameters"), dict):
        geometry["rope_parameters"] = {**geometry["rope_parameters"], "rope_theta": given["rope_theta"]}

    version, taps = _head_version(path, entries, flags, target, notes)
    own_vocab = _draft_ids(path, entries, target)
    layer = _head_layer(path, entries, geometry, target, notes, bare=not raw)
    speculators = "speculators_model_type" in raw
    if version == 3 and not speculators and not ours and not flags.boolean("norm_output", True):
        raise ValueError(f"{path}: norm_output = false (an LM head without its norm) is not implemented.")
    has_embed = version == 3 and "embed_tokens.weight" in entries
    config = EagleConfig(
        version=version,
        layer=layer,
        target_hidden_size=target.hidden_size,
        taps=taps,
        fc_bias="fc.bias" in entries,
        norm_before_residual=version == 3 and flags.boolean("norm_before_residual", speculators),
        fc_norm="fc_norm.0.weight" in entries,
        norm_before_fc="input_norm.weight" in entries,
        norm_output=(speculators or bool(ours)) and flags.boolean("norm_output", False),
        # An embedding of the target's width is the target's own, unless the layout provides for a different one.
        has_embed=has_embed and (speculators or bool(ours) or layer.hidden_size != target.hidden_size),
        has_lm_head=version == 3 and "lm_head.weight" in entries,
        target_vocab_size=target.vocab_size,
    )
    for key, found in (("fc_norm", config.fc_norm), ("norm_before_fc", config.norm_before_fc)):
        if flags.config.get(key) is not None and flags.boolean(key, False) != found:
            raise ValueError(f"{path}: config.json has {key} = {not found}, the tensors say {found}.")
    check_entries(_head_shapes(config, entries, target), entries, str(path))

    tensors: dict[str, Tensor] = {} if own_vocab is None else {"draft_ids": own_vocab}
    parts: dict[str, list[Tensor]] = {}
    dropped = set() if config.has_embed else {"embed_tokens.weight"}
    dropped |= {"lm_head.weight"} if version == 1 else set()
    order = [f"layers.0.{name}" for name in HEAD_NAMES]
    for name in sorted(entries, key=lambda n: (order + [n.rpartition(".")[0]]).index(n.rpartition(".")[0])):
        if name in dropped or IGNORED.fullmatch(name):
            continue
        tensor = entries[name].read()
        check_finite(tensor, name, entries[name].file)
        stem, _, kind = name.removeprefix("layers.0.").rpartition(".")
        inside = f"layer.{HEAD_NAMES[stem]}.{kind}" if name.startswith("layers.0.") else name
        parts.setdefault(inside.replace("fc_norm.", "fc_norms."), []).append(tensor)
    tensors |= {name: torch.cat(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in parts.items()}
    return EagleFile(config, tensors, notes)


def save_eagle(config: EagleConfig, tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Write a head in the SafeAILab layout (`config.json`, `model.safetensors`), as other engines read it.

    `tensors` as in EagleFile. Raises ValueError if draft_ids are given but config.target_vocab_size is not.
    """
    directory, layer = Path(directory), config.layer
    directory.mkdir(parents=True, exist_ok=True)
    q, kv = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    prefix = "layers.0." if config.version == 1 else "midlayer."
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner, _, kind = name.removeprefix("layer.").rpartition(".")
        names = [hf for hf, own in HEAD_NAMES.items() if own == inner] if name.startswith("layer.") else []
        sizes = [q, kv, kv] if inner == "attention.qkv" else tensor.shape[0] // max(1, len(names))
        for hf, piece in zip(names, tensor.split(sizes), strict=bool(names)):
            out[f"{prefix}{hf}.{kind}"] = piece
        if not names and name != "draft_ids":
            out[name.replace("fc_norms.", "fc_norm.")] = tensor
    vocab = config.target_vocab_size or layer.vocab_size
    if (ids := tensors.get("draft_ids")) is not None:
        if not config.target_vocab_size:
            raise ValueError("save_eagle: a head with draft_ids needs config.target_vocab_size.")
        out["d2t"] = ids - torch.arange(ids.numel(), device=ids.device)
        out["t2d"] = torch.zeros(vocab, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    write_safetensors(directory / "model.safetensors", out)
    keys = config_to_hf(layer)
    keys |= {"vocab_size": vocab, "bias": config.fc_bias, "qkv_bias": layer.qkv_bias}
    if config.version == 3:
        keys |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": layer.vocab_size}
        keys |= {"norm_before_residual": config.norm_before_residual}
        # Our own key: entry convention and the meaning of norm_output are ambiguous in the published layouts.
        keys["eaglet_eagle"] = {AUX: list(config.taps), "norm_output": config.norm_output, "entry": True}
        keys["eagle_config"] = {AUX: list(config.taps)}
    if config.target_hidden_size != layer.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    write_json(directory / "config.json", keys)


def _open_head(path: Path) -> tuple[dict[str, Any], dict[str, Entry], list[str]]:
    """Config ({} if there is none), tensors under `layers.0.` names, notes."""
    notes: list[str] = []
    if path.is_dir():
        files = tensor_files(path) or sorted(path.glob("*.pth"))[:1]
        config = path / "config.json"
    elif path.is_file():
        files, config = [path], path.parent / "config.json"
        if path.suffix not in (".safetensors", ".bin", ".pth", ".pt"):
            raise ValueError(f"{path}: expected a .safetensors, .bin or .pth file, or a folder.")
    else:
        raise ValueError(f"{path}: no such head file or folder.")
    if not files:
        raise ValueError(
            f"{path}: no model*.safetensors, pytorch_model*.bin or *.pth. Is the download complete?"
        )
    raw = read_json(config) if config.exists() else {}
    head_like = {"speculators_model_type", "draft_vocab_size", "eagle_config", "eaglet_eagle"} & raw.keys()
    if raw and not path.is_dir() and not head_like and raw.get("num_hidden_layers") != 1:
        notes.append(f"{config} describes a whole model, not this head: ignored")
        raw = {}
    entries: dict[str, Entry] = {}
    for name, entry in read_entries(files).items():
        plain = re.sub(r"^(draft_model\.|model\.)", "", name)
        plain = re.sub(r"^(midlayer|transformer)\.", "layers.0.", plain)
        plain = re.sub(r"^fusion_fc\.", "fc.", plain)
        if plain in entries:
            raise ValueError(f"{path}: two tensors are called {plain!r} once prefixes are removed.")
        if plain.split(".")[0] in HASS:
            raise ValueError(f"{path}: {name!r}: the extra norms of HASS-like heads are not implemented.")
        if re.match(r"layers\.[1-9]", plain):
            raise ValueError(f"{path}: {name!r}: heads with more than one decoder layer are not implemented.")
        entries[plain] = entry
    return raw, entries, notes


def _parse_overrides(overrides: Mapping[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, text in overrides.items():
        if key not in HEAD_OVERRIDES:
            raise ValueError(f"--eagle-config {key}: unknown key; known: {', '.join(HEAD_OVERRIDES)}.")
        try:
            given[key] = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"--eagle-config {key}={text}: the value must be JSON (a number, true, [1,2])."
            ) from error
    return given


def _head_version(
    path: Path, entries: dict[str, Entry], flags: ConfigReader, target: ModelConfig, notes: list[str]
) -> tuple[int, tuple[int, ...]]:
    """(1 or 3, taps) from tensor shapes; refuses a head that was made for another target."""
    need = [
        "fc.weight",
        *(f"layers.0.self_attn.{x}_proj.weight" for x in "qk"),
        "layers.0.mlp.gate_proj.weight",
    ]
    if absent := [n for n in need if n not in entries or len(entries[n].shape) != 2]:
        raise ValueError(f"{path}: not an EAGLE head (no matrix {absent[0]!r}).")
    (hidden, wide), seen = entries["fc.weight"].shape, entries[need[1]].shape[1]
    size, layers = target.hidden_size, target.num_hidden_layers
    if seen == hidden and wide == 2 * hidden:
        version, many, made_for = 1, 2, hidden
    elif seen == 2 * hidden:
        ids = flags.config.get(AUX)
        ids = [2, layers // 2, layers - 3] if ids is None else ids
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise ValueError(f"{path}: {AUX} = {ids!r}, expected a list of layer numbers.")
        version, many, made_for = 3, len(ids), wide // len(ids)
    else:
        raise ValueError(
            f"{path}: fc.weight {[hidden, wide]} with a q_proj input of {seen} is neither EAGLE-1/2 (2 x {hidden} and "
            f"{hidden}) nor EAGLE-3 (3 x target hidden size and {2 * hidden})."
        )
    if wide != many * size:
        what = f" ({SIZES[made_for]}?)" if made_for in SIZES else ""
        raise ValueError(
            f"{path} does not fit this model: fc.weight is {[hidden, wide]}, expected {[size, many * size]} ({many} x "
            f"hidden_size {size}). The head looks made for hidden_size {made_for}{what}. Pass the matching --checkpoint."
        )
    if version == 1:
        return 1, ()
    if not flags.boolean("use_aux_hidden_state", True):
        raise ValueError(f"{path}: use_aux_hidden_state = false is not implemented.")
    if hidden != size and "embed_tokens.weight" not in entries:
        raise ValueError(
            f"{path}: hidden size {hidden} differs from the target's {size}, but embed_tokens is missing."
        )
    if ids[0] == 1 and not flags.config.get("entry"):
        notes.append(
            f"aux layers {ids} are read as layer outputs: the target's states entering {[i + 1 for i in ids]}"
        )
        ids = [i + 1 for i in ids]
    if not all(0 <= i <= layers for i in ids):
        raise ValueError(f"{path}: aux layers {ids} do not exist in a target of {layers} layers.")
    return 3, tuple(ids)


def _draft_ids(path: Path, entries: dict[str, Entry], target: ModelConfig) -> Tensor | None:
    """Takes d2t and t2d out of `entries`: absolute target ids [Vd], or None if the vocabularies are one (4.3)."""
    offsets, member = entries.pop("d2t", None), entries.pop("t2d", None)
    rows = entries["lm_head.weight"].shape[0] if entries.get("lm_head.weight", None) else target.vocab_size
    for name in ("embed_tokens.weight",):
        if name in entries and entries[name].shape[:1] != (target.vocab_size,):
            raise ValueError(
                f"{path} does not fit this model: {name} has {entries[name].shape[0]} rows, the target's vocabulary "
                f"{target.vocab_size}. Pass the matching --checkpoint."
            )
    if offsets is None:
        if rows != target.vocab_size:
            raise ValueError(
                f"{path}: the LM head has {rows} rows and the target's vocabulary {target.vocab_size}, but there is no d2t "
                "table: damaged, or made for another --checkpoint."
            )
        return None
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.shape != (rows,):
        raise ValueError(
            f"{path}: d2t is {offsets.dtype} {list(offsets.shape)}, expected int64 [{rows}] as lm_head."
        )
    ids = offsets.read().long() + torch.arange(rows)
    if rows > 1 and not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= target.vocab_size:
        raise ValueError(
            f"{path}: d2t does not give ascending token ids below {target.vocab_size}: another target?"
        )
    if member is not None:
        mask = member.read()
        if mask.shape != (target.vocab_size,) or not torch.equal(mask.nonzero().flatten(), ids):
            raise ValueError(
                f"{path}: t2d {list(mask.shape)} and d2t disagree, or are for another vocabulary."
            )
    return None if rows == target.vocab_size else ids


def _head_layer(
    path: Path,
    entries: dict[str, Entry],
    geometry: dict[str, Any],
    target: ModelConfig,
    notes: list[str],
    bare: bool,
) -> ModelConfig:
    """The head's decoder layer: sizes from tensors, heads, RoPE and eps from its own config (defaults: 4.7, 1.4)."""
    at = "layers.0.self_attn."
    read = ConfigReader(geometry, str(path))
    rows, kv_rows = (entries[f"{at}{x}_proj.weight"].shape[0] for x in "qk")
    known = geometry.get("num_attention_heads") is not None
    hd = read.integer(
        "head_dim", max(1, rows // read.integer("num_attention_heads")) if known else target.head_dim
    )
    lm_head, dtype = entries.get("lm_head.weight"), entries["fc.weight"].dtype
    default = target.max_position_embeddings if bare else read.integer("max_sequence_length", 2048)
    hf = {
        key: geometry.get(key)
        for key in (*HEAD_GEOMETRY, "rope_parameters", "hidden_act", "partial_rotary_factor")
    }
    hf |= {
        "model_type": "llama",
        "hidden_size": entries["fc.weight"].shape[0],
        "intermediate_size": entries["layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": 1,
        "num_attention_heads": read.integer("num_attention_heads", max(1, rows // hd)),
        "num_key_value_heads": read.integer("num_key_value_heads", max(1, kv_rows // hd)),
        "head_dim": hd,
        "vocab_size": lm_head.shape[0] if lm_head else target.vocab_size,
        "max_position_embeddings": read.integer("max_position_embeddings", default),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if bare:
        assumed = {"head_dim": hd, "rope_theta": 10000, "rms_norm_eps": 1e-6}
        said = ", ".join(f"{key} {value}" for key, value in assumed.items() if key not in geometry)
        notes.append(
            f"no config.json for {path.name}: assumed {said or 'nothing'} (--eagle-config key=value)"
        )
    layer = ModelConfig.from_hf(hf, str(path))
    biases = {name: f"{at}{name}_proj.bias" in entries for name in "qo"}
    return replace(layer, qkv_bias=biases["q"], o_bias=biases["o"], qk_norm=f"{at}q_norm.weight" in entries)


def _head_shapes(
    config: EagleConfig, entries: dict[str, Entry], target: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """File names (prefixes removed) and shapes that a head of this config must have."""
    c, H, wide = (
        config.layer,
        config.layer.hidden_size,
        config.layer.hidden_size * (2 if config.version == 3 else 1),
    )
    width = len(config.taps) * config.target_hidden_size if config.version == 3 else 2 * H
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    at, mlp = "layers.0.self_attn.", "layers.0.mlp."
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, width)}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{at}{name}_proj.weight"] = (rows, wide)
        if c.qkv_bias:
            shapes[f"{at}{name}_proj.bias"] = (rows,)
        if c.qk_norm and name != "v":
            shapes[f"{at}{name}_norm.weight"] = (c.head_dim,)
    shapes[f"{at}o_proj.weight"] = (H, q)
    shapes[f"{mlp}gate_proj.weight"] = shapes[f"{mlp}up_proj.weight"] = (c.intermediate_size, H)
    shapes[f"{mlp}down_proj.weight"] = (H, c.intermediate_size)
    shapes["layers.0.post_attention_layernorm.weight"] = (H,)
    optional = {"fc.bias": (H,), f"{at}o_proj.bias": (H,), "embed_tokens.weight": (target.vocab_size, H)}
    optional["lm_head.weight"] = (c.vocab_size, H)
    if config.version == 3:
        for name in ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"):
            shapes[name] = (H,)
        optional["input_norm.weight"] = (width,)
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.taps))}
    return shapes | {name: shape for name, shape in optional.items() if name in entries}
