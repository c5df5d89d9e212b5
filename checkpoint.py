"""Every weight file format in and out: Hugging Face directories, Meta `.pth`, our own directories, EAGLE heads.

Loading is strict: names, shapes and dtypes of all tensors are checked before memory is allocated, values while they
are copied. It does not know how anything decodes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model import DTYPES, ConfigReader, ModelConfig, RopeConfig, Transformer

Progress = Callable[[int, int, str], None]
# bytes of a config.json; of a shard index or a safetensors header
JSON_LIMIT, INDEX_LIMIT = 4 << 20, 64 << 20
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
KINDS = dict(zip("F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL".split(), FLOATS + INTEGERS, strict=True))
# Buffers that old exporters stored and that follow from the config: the one thing a checkpoint may hold unused.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope\.freqs")


class Entry(NamedTuple):
    """One tensor on disk: shape and dtype are known (a str if we have none for it), `read()` brings it to the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    file: str
    read: Callable[[], Tensor]


# ---- files ---------------------------------------------------------------------------------------------------


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from `path`. ValueError in one line for a missing, oversized, malformed or non-object file."""

    def refuse(token: str) -> NoReturn:
        raise json.JSONDecodeError(f"{token} is not JSON", token, 0)

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


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to, renamed to `path` at the end; a failure (a full disk, Ctrl-C) leaves neither."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON through a temporary name, so that a reader never sees half a file."""
    with _written_whole(path) as part:
        part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors (any device, views allowed) one by one, at most one copied at a time. Temp name, then rename."""
    kinds = {dtype: kind for kind, dtype in KINDS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    # wide dtypes first: every tensor then starts at a multiple of its element size
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, t in order:
        start, end = end, end + t.numel() * t.element_size()
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _written_whole(path) as part, open(part, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, t in order:
            flat = t.detach().cpu().contiguous().reshape(-1)
            out.write(memoryview(flat.view(torch.uint8).numpy()))
        out.flush()
        os.fsync(out.fileno())


def read_entries(files: Iterable[Path]) -> dict[str, Entry]:
    """All tensors of `.safetensors` / `.bin` / `.pth` files, unread. A name found in two files is an error."""
    entries: dict[str, Entry] = {}
    for path in files:
        found = _safetensors_entries(path) if path.suffix == ".safetensors" else _pickle_entries(path)
        for name in entries.keys() & found.keys():
            raise ValueError(f"{path}: {_names([name])} is also in {entries[name].file}; remove one.")
        entries |= found
    return entries


def _safetensors_entries(path: Path) -> dict[str, Entry]:
    try:
        header = _safetensors_header(path)
        handle = safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error}). Download it again.") from error
    found = {}
    for name, info in header.items():
        dtype = KINDS.get(info["dtype"], info["dtype"])
        found[name] = Entry(tuple(info["shape"]), dtype, path.name, lambda name=name: handle.get_tensor(name))
    return found


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The header alone, to name a truncated file and duplicated keys; the library checks everything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return value

    size = path.stat().st_size
    with open(path, "rb") as file:
        length = claimed = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= INDEX_LIMIT else b""
    if len(text) == length:
        try:
            header = json.loads(text, object_pairs_hook=unique)
            header.pop("__metadata__", None)
            claimed = 8 + length + max((info["data_offsets"][1] for info in header.values()), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__} {error}"
            raise ValueError(f"{path}: broken safetensors header ({reason}). Download it again.") from error
    if claimed > size or size < 8:
        sizes = f"header claims {claimed:,} bytes, file has {size:,}"
        raise ValueError(f"{path} is cut short: {sizes}. Download it again.")
    return header


def _pickle_entries(path: Path) -> dict[str, Entry]:
    if [int(n) for n in torch.__version__.split(".")[:2]] < [2, 10]:
        why = f"pickle files need torch 2.10 or newer (CVE-2026-24747), this is {torch.__version__}"
        raise ValueError(f"{path}: {why}. Convert it to safetensors elsewhere.")
    try:
        with open(path, "rb") as file:
            mapped = file.read(2) == b"PK"  # the format before torch 1.6 cannot be mapped
        with warnings.catch_warnings(action="ignore"):  # on old protocols, in two lines before our one
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # what an untrusted pickle raises is up to the pickle
        reason = _pickle_reason(error)
        advice = "Get the model as safetensors"
        raise ValueError(f"{path}: refused, not a plain tensor file ({reason}). {advice}.") from error
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    found: dict[str, Entry] = {}
    for name, t in value.items() if isinstance(value, dict) else [("", None)]:
        dense = isinstance(t, Tensor) and t.layout is torch.strided and t.device.type == "cpu"
        if not (dense and isinstance(name, str)):
            raise ValueError(f"{path}: refused, not a dictionary of names and dense tensors.")
        found[name] = Entry(tuple(t.shape), t.dtype, path.name, t.detach)
    return found


def _pickle_reason(error: Exception) -> str:
    """What is wrong with a pickle: the global it asks for, or torch's reason without the advice to load it unsafely."""
    text = " ".join(str(error).split())
    if found := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", text):
        return f"Unsupported global: {found[1][:120]!r}, code that loading would run"
    text = text.split("WeightsUnpickler error:")[-1].split("Check the documentation")[0].strip()
    text = "".join(c if c.isprintable() else "?" for c in text[:160]) or "damaged"
    return f"{type(error).__name__}: {text}"


def tensor_files(directory: Path) -> list[Path]:
    """The weight files of a directory: those of the shard index, else `model*.safetensors`, else `.bin`, else none."""
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = directory / f"{stem}{suffix}.index.json"
        if index.exists():
            shards = read_json(index, INDEX_LIMIT).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ValueError(f"{index}: weight_map must name at least one tensor.")
            for name in shards.values():
                if not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name) and name.endswith(suffix)):
                    raise ValueError(f"{index}: shard name {name!r} is not a plain {suffix} file name.")
                if not (directory / name).is_file():
                    raise ValueError(f"{directory / name} is missing, the index names it. Download it again.")
            return [directory / name for name in sorted(set(shards.values()))]
        if files := sorted(directory.glob(f"{stem}*{suffix}")):
            return files
    return []


def check_entries(expected: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry], where: str) -> None:
    """ValueError in one line unless `entries` holds exactly the expected names with these shapes and a float dtype."""
    if missing := expected.keys() - entries.keys():
        hint = " (tie_word_embeddings not set?)" if "lm_head.weight" in missing else ""
        raise ValueError(f"{where}: missing {_names(missing)}{hint}. Is a shard missing? Download it again.")
    if extra := [name for name in entries.keys() - expected.keys() if not IGNORED.fullmatch(name)]:
        raise ValueError(f"{where}: unexpected {_names(extra)}; config.json does not describe such a model.")
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            found = f"{name} is {list(entry.shape)}, expected {list(shape)}"
            raise ValueError(f"{where}: {found}. Do {entry.file} and config.json belong together?")
        if entry.dtype not in FLOATS:
            raise ValueError(f"{where}: {name} has dtype {entry.dtype}, expected a float of 16 to 64 bits.")


def _names(names: Iterable[str]) -> str:
    """A few tensor names, safe to print on one line."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"tensor {', '.join(repr(name)[:120] for name in ordered[:3])}{more}"


def check_finite(tensor: Tensor, name: str, file: str) -> None:
    """ValueError if a float tensor holds NaN or inf. One pass, no temporary; syncs with the device."""
    if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{file}: {name} holds NaN or infinite values (as {kind}). Damaged file?")


# ---- target models -------------------------------------------------------------------------------------------


def load_config(directory: str | Path) -> ModelConfig:
    """The geometry of the model in `directory` (Hugging Face, ours, or Meta). ValueError in one line if unusable.

    Stop ids are transformers': those of generation_config.json, or else config.json's.
    """
    directory = _existing(directory)
    config = _read_meta(directory)[0] if _is_meta(directory) else _read_config(directory)
    return _with_stops(config, directory)


def _with_stops(config: ModelConfig, directory: Path) -> ModelConfig:
    """With the stop ids of generation_config.json, if it names any."""
    if not (file := directory / "generation_config.json").is_file():
        return config
    stops = _token_ids(read_json(file), "eos_token_id", str(file), config.vocab_size, directory)
    return replace(config, eos_token_ids=stops or config.eos_token_ids)


def _read_config(directory: Path) -> ModelConfig:
    """config.json as ModelConfig reads it, and strictly where that reads nothing: token ids, partial rotation."""
    where = str(directory / "config.json")
    raw = read_json(directory / "config.json")
    _refuse_partial_rotation(raw, where)
    config = ModelConfig.from_hf(raw, where)
    bos, eos = (_token_ids(raw, f"{x}_token_id", where, config.vocab_size, directory) for x in ("bos", "eos"))
    return replace(config, bos_token_id=bos[0] if bos else None, eos_token_ids=eos)


def _refuse_partial_rotation(raw: Mapping[str, Any], where: str) -> None:
    """ModelConfig looks for it at the top level only, transformers 5 writes it beside the base."""
    for key in ("rope_parameters", "rope_scaling"):
        nested = raw.get(key)
        share = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
        if share not in (None, 1.0) or isinstance(share, bool):
            raise ValueError(
                f"{where}: partial_rotary_factor = {share!r} in {key} is not implemented (only 1.0)."
            )


def _token_ids(raw: Mapping[str, Any], key: str, where: str, vocab: int, directory: Path) -> tuple[int, ...]:
    """One id or a list of ids, () for null. An id past the vocabulary that the tokenizer's files add (a fine-tune whose
    embedding was not enlarged) can never be predicted and is left out; any other value that is no id is refused."""
    value = raw.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    odd = next((i for i in listed if type(i) is not int or i < 0), None)
    past = [i for i in listed if odd is None and i >= vocab]
    if past and (unknown := set(past) - _added_ids(directory)):
        odd = min(unknown)
    if odd is not None:
        raise ValueError(
            f"{where}: {key} holds {odd!r:.80}, expected token ids in [0, {vocab - 1}] or null. Correct the file or "
            "download it again."
        )
    return tuple(i for i in listed if i < vocab)


def _added_ids(directory: Path) -> set[int]:
    """Ids of the added tokens of any of the tokenizer's files; files that are not understood add none here."""
    added: set[int] = set()
    for name in ("added_tokens.json", "tokenizer_config.json", "tokenizer.json"):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            found = read_json(directory / name, INDEX_LIMIT)
            if name == "added_tokens.json":
                added |= set(found.values())
            elif name == "tokenizer_config.json":
                added |= {int(i) for i in found["added_tokens_decoder"]}
            else:
                added |= {token["id"] for token in found["added_tokens"]}
    return added


def open_model(directory: str | Path) -> tuple[ModelConfig, dict[str, Entry]]:
    """Config and unread tensors (Hugging Face names) of an unquantized directory. ValueError in one line if unusable."""
    directory = _existing(directory)
    if _is_meta(directory):
        config, entries = _read_meta(directory)
        return _with_stops(config, directory), entries
    config = load_config(directory)
    if not (files := tensor_files(directory)):
        raise ValueError(f"{directory}: no model*.safetensors, no pytorch_model*.bin. All downloaded?")
    return config, read_entries(files)


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
    raw = {} if _is_meta(directory) else read_json(directory / "config.json")
    if raw.get("eaglet_quant") or raw.get("quantization_config"):
        import quantize  # heavy, and not needed otherwise

        return quantize.load_quantized(directory, raw, device, dtype, progress, max_positions)
    config, entries = open_model(directory)
    model = build_model(config)
    fused = any(name.endswith(".experts.gate_up_proj") for name in entries)
    duplicate = entries.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    shapes = {name: tuple(view.shape) for name, view in hf_views(model, fused).items()}
    check_entries(shapes, entries, str(directory))
    materialise(model, device, dtype or DTYPES[config.dtype], max_positions)
    copy_tensors(hf_views(model, fused), entries, progress)
    if duplicate is not None:
        stored, embedding = duplicate.read(), model.embed_tokens.weight
        if stored.shape != embedding.shape or not torch.equal(stored.to(embedding), embedding):
            why = "lm_head.weight differs from the embedding although tie_word_embeddings is true"
            raise ValueError(f"{directory}: {why}. Set it to false if the model has its own LM head.")
    return model


def build_model(config: ModelConfig) -> Transformer:
    """The model on the meta device: shapes without memory. ValueError where sizes overflow."""
    try:
        with torch.device("meta"):
            return Transformer(config).eval().requires_grad_(False)
    except (RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0][:160]
        raise ValueError(f"config.json: sizes are too large for a tensor ({reason}).") from error


def materialise(
    model: Transformer, device: torch.device | str, dtype: torch.dtype, max_positions: int | None = None
) -> None:
    """Give a meta model uninitialised memory on `device` and build its rotary tables."""
    model.to(dtype=dtype).to_empty(device=device)
    longest = model.config.max_positions
    model.rotary.build(device, min(max_positions or longest, longest))


def copy_tensors(
    views: Mapping[str, Tensor], entries: Mapping[str, Entry], progress: Progress | None = None
) -> None:
    """Copy checked entries into views of parameters, casting; ValueError where a value is not finite then."""
    sizes = {name: math.prod(entries[name].shape) * entries[name].dtype.itemsize for name in views}
    total, done = sum(sizes.values()), 0
    for name in sorted(views, key=lambda name: entries[name].file):
        views[name].copy_(entries[name].read())
        check_finite(views[name], name, entries[name].file)
        done += sizes[name]
        if progress is not None:
            progress(done, total, name)


def hf_views(model: Transformer, fused_experts: bool = False) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the slice of our (fused) parameter that holds it. Used to load and to save.

    fused_experts: Mixtral's transformers-5 names (one tensor for all experts) instead of the usual ones.
    """
    c = model.config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    views: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed_tokens.weight}

    def put(at: str, names: str, module: torch.nn.Module, sizes: list[int] | None = None) -> None:
        for kind, parameter in module.named_parameters():
            parts = parameter.split(sizes) if sizes else [parameter]
            for name, part in zip(names.split(), parts, strict=True):
                views[f"{at}.{name}.{kind}"] = part

    for i, block in enumerate(model.layers):
        at = f"model.layers.{i}"
        put(at, "input_layernorm", block.input_norm)
        put(f"{at}.self_attn", "q_proj k_proj v_proj", block.attention.qkv, [q, kv, kv])
        put(f"{at}.self_attn", "o_proj", block.attention.o)
        if c.qk_norm:
            put(f"{at}.self_attn", "q_norm", block.attention.q_norm)
            put(f"{at}.self_attn", "k_norm", block.attention.k_norm)
        put(at, "post_attention_layernorm", block.post_norm)
        if not c.num_local_experts:
            put(f"{at}.mlp", "gate_proj up_proj", block.mlp.gate_up, [c.intermediate_size] * 2)
            put(f"{at}.mlp", "down_proj", block.mlp.down)
            continue
        put(f"{at}.mlp" if fused_experts else f"{at}.block_sparse_moe", "gate", block.mlp.router)
        if fused_experts:
            views[f"{at}.mlp.experts.gate_up_proj"] = block.mlp.gate_up
            views[f"{at}.mlp.experts.down_proj"] = block.mlp.down
            continue
        for e in range(c.num_local_experts):
            expert = f"{at}.block_sparse_moe.experts.{e}"
            views[f"{expert}.w1.weight"], views[f"{expert}.w3.weight"] = block.mlp.gate_up[e].chunk(2)
            views[f"{expert}.w2.weight"] = block.mlp.down[e]
    put("model", "norm", model.norm)
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
    dtype = str(model.dtype).removeprefix("torch.")
    write_json(directory / "config.json", config_to_hf(replace(model.config, dtype=dtype)))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A ModelConfig as config.json keys that transformers 4 and 5 and `ModelConfig.from_hf` understand."""
    same = """model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id"""
    family, eos = config.model_type, config.eos_token_ids
    out = {key: getattr(config, key) for key in same.split()}
    out |= {"architectures": [f"{family.capitalize()}ForCausalLM"], "hidden_act": "silu"}
    out |= {"torch_dtype": config.dtype, "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None}
    out |= {"rope_theta": config.rope.theta, "rope_scaling": _scaling_to_hf(config.rope)}
    if family in ("llama", "qwen3"):
        out["attention_bias"] = config.qkv_bias
    if family == "llama":
        out["mlp_bias"] = config.mlp_bias
    else:
        out["sliding_window"] = max(config.windows) or None
    if family == "mixtral":
        out |= {key: getattr(config, key) for key in ("num_local_experts", "num_experts_per_tok")}
    if family.startswith("qwen"):
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        full = len(kinds) - kinds[::-1].index("full_attention") if "full_attention" in kinds else 0
        out |= {"use_sliding_window": any(config.windows), "layer_types": kinds, "max_window_layers": full}
    return out


def _scaling_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    keys = {"llama3": "low_freq_factor high_freq_factor"}
    keys["yarn"] = "beta_fast beta_slow truncate attention_factor mscale mscale_all_dim"
    scaling = {key: getattr(rope, key) for key in keys.get(rope.kind, "").split()}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    unset = (None, 0.0) if rope.kind == "yarn" else ()
    scaling = {key: value for key, value in scaling.items() if value is False or value not in unset}
    return {"rope_type": rope.kind, "factor": rope.factor, **scaling}


def _existing(directory: str | Path) -> Path:
    if not (directory := Path(directory)).is_dir():
        hint = "Pass a folder with config.json and weights (python -m scripts.download REPO fetches one)."
        raise ValueError(f"{directory} is not a directory. {hint}")
    return directory


def _is_meta(directory: Path) -> bool:
    return (directory / "params.json").exists() and not (directory / "config.json").exists()


# ---- Meta's consolidated.*.pth -------------------------------------------------------------------------------

# Meta name = Hugging Face name : dimension that model-parallel shards split ("-": every shard holds all of it)
META_TOP = "tok_embeddings=model.embed_tokens:1 norm=model.norm:- output=lm_head:0"
META_LAYER = """attention.wq=self_attn.q_proj:0 attention.wk=self_attn.k_proj:0 attention.wv=self_attn.v_proj:0
    attention.wo=self_attn.o_proj:1 feed_forward.w1=mlp.gate_proj:0 feed_forward.w3=mlp.up_proj:0
    feed_forward.w2=mlp.down_proj:1 attention_norm=input_layernorm:- ffn_norm=post_attention_layernorm:-"""
META_KEYS = """dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta head_dim
    hidden_dim sliding_window use_scaled_rope rope_scaling_factor max_seq_len max_batch_size"""


def _read_meta(directory: Path) -> tuple[ModelConfig, dict[str, Entry]]:
    """params.json and consolidated.*.pth as a config and entries under Hugging Face names, shards joined."""
    where = str(directory / "params.json")
    params = read_json(directory / "params.json")
    for key in params.keys() - set(META_KEYS.split()):
        raise ValueError(f"{where}: {key!r} is not implemented.")
    files = sorted(directory.glob("consolidated.*.pth"))
    if not files or [f.name for f in files] != [f"consolidated.{i:02}.pth" for i in range(len(files))]:
        raise ValueError(f"{directory}: consolidated.00.pth, 01, ... are not without gaps.")
    shards = [_pickle_entries(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if odd := shard.keys() ^ shards[0].keys():
            raise ValueError(f"{file}: {_names(odd)} is not in every shard. Download it again.")
    embedding, w1 = (shards[0].get(f"{n}.weight") for n in ("tok_embeddings", "layers.0.feed_forward.w1"))
    if embedding is None or w1 is None or len(embedding.shape) != 2 or len(w1.shape) != 2:
        raise ValueError(f"{files[0]}: no tok_embeddings / feed_forward.w1: not a LLaMA of Meta's.")
    read = ConfigReader(params, where)
    dim, heads = read.integer("dim"), read.integer("n_heads")
    by_rows = embedding.shape[1] == dim  # LLaMA 3 splits the embedding by vocabulary, 1 and 2 by dimension
    vocab = embedding.shape[0] * (len(shards) if by_rows else 1)
    llama3, scaled = vocab == 128256, read.boolean("use_scaled_rope", False)
    # 3.2 (1B and 3B, the only ones below 4096) scales by 32, 3.1 and 3.3 by 8
    factor = read.number("rope_scaling_factor", 8.0 if dim >= 4096 else 32.0, 1.0)
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    longest = 131072 if scaled else 8192 if llama3 else 4096
    hf = {
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
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192} if scaled else None,
        # params.json does not tell how long the model was trained for: add max_seq_len to it for LLaMA 1 or CodeLlama
        "max_position_embeddings": read.integer("max_seq_len", longest),
        "sliding_window": params.get("sliding_window"),
        "tie_word_embeddings": "output.weight" not in shards[0],
        "torch_dtype": str(w1.dtype).removeprefix("torch."),
        "bos_token_id": 128000 if llama3 else 1,
        "eos_token_id": [128001, 128008, 128009] if llama3 else 2,
    }
    config = ModelConfig.from_hf(hf, where)
    entries = {}
    for name in shards[0]:
        _, layer, inner, kind = re.fullmatch(r"(layers\.(\d+)\.)?(.*?)(\.weight)?", name, re.DOTALL).groups()
        names = dict(pair.split("=") for pair in (META_LAYER if layer else META_TOP).split())
        target, _, split = names.get(inner, "").partition(":")
        if not target or not kind:
            target, split = name, "-"  # unknown: check_entries will say so
        else:
            target = f"model.layers.{layer}.{target}.weight" if layer else f"{target}.weight"
        if inner == "tok_embeddings" and by_rows:
            split = "0"
        rotated = config.head_dim if inner in ("attention.wq", "attention.wk") else 0
        pieces = [shard[name] for shard in (shards[:1] if split == "-" else shards)]
        entries[target] = _joined(pieces, 0 if split == "-" else int(split), rotated)
    return config, entries


def _joined(pieces: list[Entry], split: int, head_dim: int) -> Entry:
    """One entry from model-parallel pieces. head_dim > 0: q or k, whose rows Meta orders for rotating neighbouring
    pairs of dimensions; they are put in half-rotation order."""
    shape = list(pieces[0].shape)
    if len(shape) > split:
        shape[split] *= len(pieces)
    if head_dim and shape[0] % head_dim:
        raise ValueError(f"{pieces[0].file}: {shape[0]} rows of q or k do not fit head_dim {head_dim}.")
    if any(piece.shape != pieces[0].shape for piece in pieces):
        raise ValueError(f"{pieces[0].file}: shards of one tensor differ in shape. Download them again.")

    def read() -> Tensor:
        whole = torch.cat([piece.read() for piece in pieces], split) if len(pieces) > 1 else pieces[0].read()
        return whole.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) if head_dim else whole

    return Entry(tuple(shape), pieces[0].dtype, pieces[0].file, read)


# ---- EAGLE heads ---------------------------------------------------------------------------------------------

# Hugging Face name inside the head's decoder layer = ours; several to one are fused by rows, in this order
HEAD_NAMES = """self_attn.q_proj=attention.qkv self_attn.k_proj=attention.qkv self_attn.v_proj=attention.qkv
    self_attn.o_proj=attention.o self_attn.q_norm=attention.q_norm self_attn.k_norm=attention.k_norm
    mlp.gate_proj=mlp.gate_up mlp.up_proj=mlp.gate_up mlp.down_proj=mlp.down
    input_layernorm=input_norm hidden_norm=hidden_norm post_attention_layernorm=post_norm"""
PREFIXES = {r"^(draft_model|model)\.": "", r"^(midlayer|transformer)\.": "layers.0.", r"^fusion_fc\.": "fc."}
ATTENTION, AUX = "layers.0.self_attn.", "eagle_aux_hidden_state_layer_ids"
# what --eagle-config may set, and what the head's decoder layer takes from its own config
HEAD_KEYS = "num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling".split()
OVERRIDES = (*HEAD_KEYS, "max_position_embeddings", "norm_before_residual", "norm_output", AUX)
SIZES = {2048: "1B", 3072: "3B", 4096: "7B or 8B", 5120: "13B", 6656: "33B", 8192: "70B"}


@dataclass(frozen=True)
class EagleConfig:
    """Geometry of an EAGLE head. `layer.vocab_size` is the draft vocabulary; `taps` name the target layers whose
    *input* is read (the number of layers: after the last one, before the final norm), () for version 1."""

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
    unshifted: bool = False  # version 1: feature i goes with token i, not i + 1 (an ablation of the paper)

    def layout(self, layers: int) -> str:
        """What `save_eagle` writes for a target of that many layers, and who reads it as it is meant."""
        beyond = ["norm_before_residual = true"] if self.norm_before_residual else []
        if self.version == 3 and self.taps != (2, layers // 2, layers - 3):
            beyond.append(f"aux layers {', '.join(map(str, self.taps))}")
        names = f"EAGLE-{self.version}, SafeAILab tensor names; "
        if self.unshifted or self.norm_output or self.norm_before_fc or self.fc_norm:
            return names + "only eaglet reads it as it is meant"
        if beyond:
            return (
                names
                + " and ".join(beyond)
                + " in config.json: vLLM reads that, SafeAILab's own code does not"
            )
        return f"EAGLE-{self.version} (SafeAILab layout)"


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
        overrides: config keys (OVERRIDES) to replace, values as JSON text.

    Returns:
        EagleFile; tensors on the CPU in their stored dtype.

    Raises:
        ValueError: one line, if the head is damaged, does not fit the target, or needs something not implemented.
    """
    path = Path(path)
    if (path / "config.json").is_file() and read_json(path / "config.json").get("eaglet_quant"):
        import quantize

        file = quantize.read_head(path)
        made_for = file.config.target_hidden_size, file.config.target_vocab_size
        if made_for != (target.hidden_size, target.vocab_size):
            raise ValueError(
                f"{path} does not fit this model: made for hidden_size and vocab_size {made_for}, "
                f"this model has {(target.hidden_size, target.vocab_size)}. Pass the matching --checkpoint."
            )
        return file
    return _HeadReader(path, target, overrides or {}).read()


def save_eagle(config: EagleConfig, tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Write a head under SafeAILab's tensor names (`config.json`, `model.safetensors`).

    EAGLE-1/2 and plain EAGLE-3 heads are then what SafeAILab's own code and other engines read. More than that stands in
    config.json: norm_before_residual, which vLLM reads and SafeAILab's code takes for false; aux layers, which vLLM and
    SGLang read and SafeAILab's code takes for 2, L // 2, L - 3. `EagleConfig.layout` says it for one head.

    `tensors` as in EagleFile. Raises ValueError if draft_ids are given but config.target_vocab_size is not.
    """
    directory, layer = Path(directory), config.layer
    q, kv = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    prefix = "layers.0." if config.version == 1 else "midlayer."
    pairs = [pair.split("=") for pair in HEAD_NAMES.split()]
    vocab, out = config.target_vocab_size or layer.vocab_size, {}
    for name, tensor in tensors.items():
        inner, _, kind = name.removeprefix("layer.").rpartition(".")
        names = [hf for hf, ours in pairs if ours == inner] if name.startswith("layer.") else []
        if names:
            sizes = [q, kv, kv] if inner == "attention.qkv" else [tensor.shape[0] // len(names)] * len(names)
            pieces = zip(names, tensor.split(sizes), strict=True)
            out |= {f"{prefix}{hf}.{kind}": piece for hf, piece in pieces}
        elif name != "draft_ids":
            out[name.replace("fc_norms.", "fc_norm.")] = tensor
        elif not config.target_vocab_size:
            raise ValueError("save_eagle: a head with draft_ids needs config.target_vocab_size.")
        else:
            ids = tensor.cpu()
            out["d2t"] = ids - torch.arange(ids.numel())
            out["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", out)
    keys = config_to_hf(layer) | {"vocab_size": vocab, "bias": config.fc_bias, "qkv_bias": layer.qkv_bias}
    if config.version == 3:
        keys |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": layer.vocab_size}
        keys |= {
            "norm_before_residual": config.norm_before_residual,
            "eagle_config": {AUX: list(config.taps)},
        }
        # Layer ids by entry, norm_output = what is fed back: both are ambiguous in the published layouts.
        keys["eaglet_eagle"] = {AUX: list(config.taps), "norm_output": config.norm_output}
    elif config.unshifted:
        keys["eaglet_eagle"] = {"unshifted": True}
    if config.target_hidden_size != layer.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    write_json(directory / "config.json", keys)


class _HeadReader:
    """One head while it is being understood: its config in parts, its tensors under `layers.0.` names."""

    def __init__(self, path: Path, target: ModelConfig, overrides: Mapping[str, str]):
        self.path, self.target, self.notes = path, target, []
        raw = self._open()
        given = self._parse(overrides)
        self.bare, self.speculators = not raw, "speculators_model_type" in raw
        layer = raw.get("transformer_layer_config") if self.speculators else raw
        parts = [layer, raw.get("eagle_config") or {}, raw.get("eaglet_eagle") or {}]
        if not all(isinstance(part, dict) for part in parts):
            self.fail("transformer_layer_config and eagle_config must be JSON objects.")
        self.ours = bool(parts[2])  # flags mean what we say they mean
        self.geometry = ConfigReader({**layer, **given}, str(path))
        self.flags = ConfigReader({**raw, **parts[1], **parts[2], **given}, str(path))
        nested = layer.get("rope_parameters")
        if "rope_theta" in given and isinstance(nested, dict):
            self.geometry.config["rope_parameters"] = {**nested, "rope_theta": given["rope_theta"]}

    def fail(self, text: str) -> NoReturn:
        raise ValueError(f"{self.path}: {text}")

    def _open(self) -> dict[str, Any]:
        """Fills self.entries; returns the head's config, {} if it has none."""
        path, folder = self.path, self.path if self.path.is_dir() else self.path.parent
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pth", ".pt"):
            self.fail("expected a .safetensors, .bin or .pth file, or a folder.")
        files = [path] if path.is_file() else tensor_files(path) or sorted(path.glob("*.pth"))
        if not files:
            self.fail("no head here: expected model.safetensors, pytorch_model.bin or a .pth file.")
        raw = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        known = raw.keys() & {"speculators_model_type", "draft_vocab_size", "eagle_config", "eaglet_eagle"}
        if raw and not known and path.is_file() and raw.get("num_hidden_layers") != 1:
            self.notes.append(f"{folder / 'config.json'} describes a whole model, not this head: ignored")
            raw = {}
        self.entries: dict[str, Entry] = {}
        for name, entry in read_entries(files).items():
            plain = name
            for pattern, prefix in PREFIXES.items():
                plain = re.sub(pattern, prefix, plain)
            if plain in self.entries:
                self.fail(f"two tensors are called {plain!r} once prefixes are removed.")
            if re.match(r"layers\.[1-9]", plain):
                self.fail(f"{name!r}: heads with more than one decoder layer are not implemented.")
            if re.match(r"(pre_)?(embed|embedding|hidden|lm_head)_layernorm\.", plain):
                self.fail(f"{name!r}: the extra norms of HASS-like heads are not implemented.")
            self.entries[plain] = entry
        return raw

    def _parse(self, overrides: Mapping[str, str]) -> dict[str, Any]:
        given = {}
        for key, text in overrides.items():
            if key not in OVERRIDES:
                raise ValueError(f"--eagle-config {key}: unknown key; known: {', '.join(OVERRIDES)}.")
            try:
                given[key] = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"--eagle-config {key}={text}: not a JSON value.") from error
        return given

    def read(self) -> EagleFile:
        taps = self._taps()
        wide = bool(taps)
        draft_ids = self._draft_ids()
        layer, flags = self._layer(taps), self.flags
        own_embed = self.speculators or self.ours or layer.hidden_size != self.target.hidden_size
        if wide and not self.speculators and not self.ours and not flags.boolean("norm_output", True):
            self.fail("norm_output = false (an LM head without its norm) is not implemented.")
        config = EagleConfig(
            version=3 if wide else 1,
            layer=layer,
            target_hidden_size=self.target.hidden_size,
            taps=taps,
            fc_bias="fc.bias" in self.entries,
            norm_before_residual=wide and flags.boolean("norm_before_residual", self.speculators),
            fc_norm="fc_norm.0.weight" in self.entries,
            norm_before_fc="input_norm.weight" in self.entries,
            norm_output=(self.speculators or self.ours) and flags.boolean("norm_output", False),
            # an embedding of the target's width is a copy, unless the layout provides for a different one
            has_embed=wide and own_embed and "embed_tokens.weight" in self.entries,
            has_lm_head=wide and "lm_head.weight" in self.entries,
            target_vocab_size=self.target.vocab_size,
            unshifted=not wide and self.ours and flags.boolean("unshifted", False),
        )
        for key in ("fc_norm", "norm_before_fc"):
            if flags.config.get(key) is not None and flags.boolean(key, False) != getattr(config, key):
                self.fail(f"config.json and the tensors disagree about {key}.")
        check_entries(self._shapes(config), self.entries, str(self.path))
        tensors = {} if draft_ids is None else {"draft_ids": draft_ids}
        return EagleFile(config, tensors | self._tensors(config), self.notes)

    def _shape(self, name: str) -> tuple[int, int]:
        entry = self.entries.get(name)
        if entry is None or len(entry.shape) != 2 or 0 in entry.shape:
            self.fail(f"not an EAGLE head: it has no matrix {name}.")
        return entry.shape

    def _taps(self) -> tuple[int, ...]:
        """Entry-convention layers, () for EAGLE-1/2, from tensor shapes; refuses a head made for another target."""
        (hidden, width), seen = self._shape("fc.weight"), self._shape(f"{ATTENTION}q_proj.weight")[1]
        size, layers = self.target.hidden_size, self.target.num_hidden_layers
        ids, many = None, 2
        if seen == 2 * hidden:
            ids = self.flags.config.get(AUX)
            ids = [2, layers // 2, layers - 3] if ids is None else ids
            if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
                self.fail(f"{AUX} = {ids!r}, expected a list of layer numbers.")
            many = len(ids)
        elif seen != hidden or width != 2 * hidden:
            self.fail(
                f"fc.weight {[hidden, width]} with q_proj inputs {seen} is neither EAGLE-1/2 nor EAGLE-3."
            )
        if width != many * size:
            made_for = width // many
            looks = f"{made_for} ({SIZES[made_for]}?)" if made_for in SIZES else str(made_for)
            raise ValueError(
                f"{self.path} does not fit this model: fc.weight is {[hidden, width]}, expected {[size, many * size]} "
                f"({many} x hidden_size {size}). The head looks made for hidden_size {looks}. "
                "Pass the matching --checkpoint."
            )
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

    def _draft_ids(self) -> Tensor | None:
        """Takes d2t and t2d out of the entries: absolute target ids [Vd], None if the vocabularies are one (4.3)."""
        offsets, member = self.entries.pop("d2t", None), self.entries.pop("t2d", None)
        vocab, misfit = self.target.vocab_size, f"but the target's vocabulary is {self.target.vocab_size}"
        rows = self._shape("lm_head.weight")[0] if "lm_head.weight" in self.entries else vocab
        embedded = self._shape("embed_tokens.weight")[0] if "embed_tokens.weight" in self.entries else vocab
        if embedded != vocab:
            self.fail(f"embed_tokens has {embedded} rows, {misfit}. Pass the matching --checkpoint.")
        if member is not None and member.shape != (vocab,):
            self.fail(f"t2d is {list(member.shape)}, {misfit}. Pass the matching --checkpoint.")
        if offsets is None:
            if rows != vocab:
                self.fail(f"the LM head has {rows} rows, {misfit}, and there is no d2t table.")
            return None
        if offsets.dtype not in (torch.int64, torch.int32) or offsets.shape != (rows,):
            self.fail(f"d2t is {offsets.dtype} {list(offsets.shape)}, expected int64 [{rows}] like lm_head.")
        ids = offsets.read().long() + torch.arange(rows)
        if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= vocab:
            self.fail(f"d2t holds no offsets to ascending token ids below {vocab}: damaged?")
        if member is not None and not torch.equal(member.read().nonzero().flatten(), ids):
            self.fail("t2d and d2t disagree: damaged.")
        return None if rows == vocab else ids

    def _layer(self, taps: tuple[int, ...]) -> ModelConfig:
        """The head's decoder layer: sizes from tensors, heads, RoPE and eps from its own config (defaults: 1.4, 4.7)."""
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
            assumed = {"head_dim": head_dim, "rope_theta": 10000, "rms_norm_eps": 1e-6}
            if taps:  # both change what the head computes, and no tensor shows them
                assumed |= {"norm_before_residual": "false", AUX: json.dumps(taps)}
            text = ", ".join(
                f"{key} {value}" for key, value in assumed.items() if key not in self.flags.config
            )
            self.notes.append(
                f"{self.path.name} has no config.json: assumed {text or 'nothing'} (wrong values only lower acceptance; "
                "--eagle-config KEY=VALUE sets them)"
            )
        _refuse_partial_rotation(hf, str(self.path))
        switches = {"qkv_bias": "q_proj.bias", "o_bias": "o_proj.bias", "qk_norm": "q_norm.weight"}
        found = {key: ATTENTION + name in self.entries for key, name in switches.items()}
        return replace(ModelConfig.from_hf(hf, str(self.path)), **found)

    def _shapes(self, config: EagleConfig) -> dict[str, tuple[int, ...]]:
        """The names and shapes that a head of this config must have."""
        c, third = config.layer, config.version == 3
        H, I, q = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
        rows = {"q_proj": q, "k_proj": (kv := c.num_key_value_heads * c.head_dim), "v_proj": kv}
        width = len(config.taps) * config.target_hidden_size if third else 2 * H
        shapes: dict[str, tuple[int, ...]] = {"fc": (H, width), f"{ATTENTION}o_proj": (H, q)}
        shapes |= {ATTENTION + name: (size, 2 * H if third else H) for name, size in rows.items()}
        shapes |= {"layers.0.mlp.gate_proj": (I, H), "layers.0.mlp.up_proj": (I, H)}
        shapes |= {"layers.0.mlp.down_proj": (H, I), "layers.0.post_attention_layernorm": (H,)}
        if third:
            shapes |= {"layers.0.input_layernorm": (H,), "layers.0.hidden_norm": (H,), "norm": (H,)}
        if c.qk_norm:
            shapes |= {f"{ATTENTION}{x}_norm": (c.head_dim,) for x in "qk"}
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}": (config.target_hidden_size,) for i in range(len(config.taps))}
        if config.norm_before_fc:
            shapes["input_norm"] = (width,)
        either = {
            "embed_tokens": (self.target.vocab_size, H),
            "lm_head": (c.vocab_size, H),
        }  # kept or dropped
        shapes |= {name: shape for name, shape in either.items() if f"{name}.weight" in self.entries}
        biases = {ATTENTION + name: (size,) for name, size in rows.items() if c.qkv_bias}
        biases |= {
            name: (H,) for name, has in (("fc", config.fc_bias), (f"{ATTENTION}o_proj", c.o_bias)) if has
        }
        named = {f"{name}.weight": shape for name, shape in shapes.items()}
        return named | {f"{name}.bias": shape for name, shape in biases.items()}

    def _tensors(self, config: EagleConfig) -> dict[str, Tensor]:
        """The tensors under our names, fused. An EAGLE-1 head's embedding and LM head are copies of the target's."""
        parts: dict[str, list[Tensor]] = {}
        renamed = dict(pair.split("=") for pair in HEAD_NAMES.split())
        order = {f"layers.0.{name}": i for i, name in enumerate(renamed)}
        kept = {"embed_tokens.weight": config.has_embed, "lm_head.weight": config.has_lm_head}
        for name in sorted(self.entries, key=lambda n: order.get(n.rpartition(".")[0], -1)):
            if not kept.get(name, True) or IGNORED.fullmatch(name):
                continue
            stem, _, kind = name.rpartition(".")
            ours = name.replace("fc_norm.", "fc_norms.")
            if stem in order:
                ours = f"layer.{renamed[stem.removeprefix('layers.0.')]}.{kind}"
            parts.setdefault(ours, []).append(self.entries[name].read())
            check_finite(parts[ours][-1], name, self.entries[name].file)
        return {name: torch.cat(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in parts.items()}


# ---- Medusa heads ----------------------------------------------------------------------------------------------

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MEDUSA_TENSOR = re.compile(r"([0-9]|[1-9][0-9])\.(0\.linear\.weight|0\.linear\.bias|1\.weight)")


def read_medusa(path: str | Path, target: ModelConfig) -> dict[str, Tensor]:
    """Medusa heads from `medusa_lm_head.pt` (weights only), `.safetensors`, or the folder that holds one of them.

    Tensors `{i}.0.linear.weight` [H, H], `{i}.0.linear.bias` [H] and, for all heads or none (the target's LM head is
    shared then), `{i}.1.weight` [V, H]. Strict: one-line ValueError for anything else; heads of several blocks are not
    known."""
    path, H, V = Path(path), target.hidden_size, target.vocab_size
    if path.is_dir():
        found = [path / name for name in MEDUSA_FILES if (path / name).is_file()]
        if len(found) != 1:
            raise ValueError(f"{path}: expected one of {', '.join(MEDUSA_FILES)}, found {len(found)}.")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected {' or '.join(MEDUSA_FILES)}.")
    entries = read_entries([path])
    if not entries or any(MEDUSA_TENSOR.fullmatch(name) is None for name in entries):
        raise ValueError(
            f"{path}: not Medusa heads of one block each ('0.0.linear.weight', ..., '0.1.weight')."
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(1 + max(int(name.split(".")[0]) for name in entries)):
        shapes |= {f"{i}.0.linear.weight": (H, H), f"{i}.0.linear.bias": (H,)}
        if any(name.endswith(".1.weight") for name in entries):
            shapes[f"{i}.1.weight"] = (V, H)
    check_entries(shapes, entries, str(path))
    tensors = {name: entry.read() for name, entry in entries.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, name, str(path))
    return tensors


def save_medusa(
    tensors: Mapping[str, Tensor], directory: str | Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `medusa_lm_head.safetensors` with the published names."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(
        directory / MEDUSA_FILES[0], {name: t.detach().to(dtype) for name, t in tensors.items()}
    )
