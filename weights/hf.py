"""Hugging Face directories and Meta's: configs in and out, and the names of the tensors.

`hf_views` is the one table of tensor names. Loading and saving both walk through it. Our modules fuse some matrices (q,
k and v, for example), so a Hugging Face tensor is a view of some rows of one of our parameters.
"""

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families.config import ACTIVATIONS, DELTA_KEYS, NUMBERS, ModelConfig, RopeConfig, text_part
from families.table import FAMILIES, OWN_WIDTH
from layers.attention import ShapedAttention
from layers.blocks import NormedBlock
from layers.build import build_transformer
from layers.experts import BiasedExperts, SharedExperts, SigmoidExperts
from layers.gemma4 import Beside, Gemma4Block, Gemma4Transformer, SharingAttention
from layers.recurrent import DeltaNet, RecurrentTransformer
from model import MLP, Attention, Experts, Transformer
from support.files import read_json
from support.machine import shapes_only
from support.reader import INDEX_LIMIT, ConfigReader, is_a, refusal
from weights.files import Entries, Entry, Spans, check_entries, check_finite, few_names, pickle_entries, write_directory
from weights.quantized import QuantLinear, TiedEmbedding, set_tensor

EMBEDDING = "model.embed_tokens.weight"
QKV = "q_proj", "k_proj", "v_proj"
FUSED_QKV, FUSED_GATE_UP = ("phi3",), ("glm4", "phi3")  # families whose files hold these in one tensor
# Where the experts of a layer are, and what the matrix that chooses them and an expert's gate, up and down are called.
GATE_UP_DOWN = "gate_proj", "up_proj", "down_proj"
LIKE_QWEN = "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"
EXPERT_NAMES = dict.fromkeys(LIKE_QWEN, ("mlp", "gate", GATE_UP_DOWN))
EXPERT_NAMES["mixtral"] = "block_sparse_moe", "gate", ("w1", "w3", "w2")
EXPERT_NAMES["gpt_oss"] = "mlp", "router", GATE_UP_DOWN  # an expert has its own in GGUF files alone
# Parts of a folder that read images and sounds.
OTHER_SENSES = """visual vision_tower vision_model multi_modal_projector audio_tower embed_vision embed_audio
    vision_embedder""".split()
# What may stand before the name of a part of the text model, where that lies inside another one.
PREFIXES = r"^((language_model|model)\.)*(?=(layers|embed_tokens|norm|\w*per_layer\w*|lm_head|mtp)\.)"
# Hugging Face's names of a block's norms: before and after attention, before and after the MLP.
NORM_NAMES = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
GLM4_NORMS = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
# Names that do not follow from the model_type.
CLASSES = {"gemma3_text": "Gemma3", "gemma4_text": "Gemma4", "gemma4_unified_text": "Gemma4Unified"}
CLASSES |= {"smollm3": "SmolLM3", "hunyuan_v1_dense": "HunYuanDenseV1"}


def read_config(raw: dict[str, Any], directory: Path) -> ModelConfig:
    """The geometry that a config.json describes. Token ids are checked more strictly here.

    Raises ValueError in one line for a key that is missing, mistyped, out of range or not implemented.
    """
    where = str(directory / "config.json")
    raw = text_part(raw, where)
    config = ModelConfig.from_hf(raw, where)
    bos, eos = (token_ids(raw, f"{x}_token_id", where, config.vocab_size, directory) for x in ("bos", "eos"))
    return replace(config, bos_token_id=bos[0] if bos else None, eos_token_ids=eos)


def token_ids(raw: Mapping[str, Any], key: str, where: str, vocab: int, directory: Path) -> tuple[int, ...]:
    """The ids under a key that holds one id, a list of ids, or null.

    An id past the vocabulary is left out if the tokenizer's files add it. Such a fine-tune never enlarged its embedding,
    so the model cannot predict this token. Raises ValueError for any other value that is no id.
    """
    value = raw.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    odd = [i for i in listed if not is_a(i, int) or i < 0]
    past = {i for i in listed if i >= vocab} if not odd else set()
    if odd := odd or (sorted(past - _added_ids(directory)) if past else []):
        problem = f"{key} holds {odd[0]!r:.80}, expected token ids in [0, {vocab - 1}] or null."
        raise refusal(where, problem, "Correct it or download it again.")
    return tuple(i for i in listed if i < vocab)


def _added_ids(directory: Path) -> set[int]:
    """Ids of the tokens that the tokenizer's files add. A file that is missing or strange adds none."""
    added: set[int] = set()
    readers = {
        "added_tokens.json": lambda file: file.values(),
        "tokenizer_config.json": lambda file: map(int, file["added_tokens_decoder"]),
        "tokenizer.json": lambda file: (token["id"] for token in file["added_tokens"]),
    }
    for name, ids in readers.items():
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            added |= set(ids(read_json(directory / name, INDEX_LIMIT)))
    return added


def build_model(config: ModelConfig) -> Transformer:
    """The model on the meta device: shapes without memory. Raises ValueError for sizes that overflow."""
    try:
        with shapes_only():
            return build_transformer(config).eval().requires_grad_(False)
    except (RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0][:160]
        raise ValueError(f"config.json: sizes are too large for a tensor ({reason}).") from error


def unpacked(model: Transformer) -> Transformer:
    """The model with plain float weights: itself, or a copy where they lie in the layout of a kernel (`pack_`)."""
    if not any(isinstance(child, QuantLinear) for child in model.modules()):
        return model
    plain = build_model(model.config)
    for name, _ in list(plain.named_parameters()):
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        owner = model.lm_head if isinstance(owner, TiedEmbedding) else owner
        held = getattr(owner, leaf, None)
        owner = held if isinstance(held, QuantLinear) else owner
        packed = isinstance(owner, QuantLinear) and leaf != "bias"
        set_tensor(plain, name, owner.dequantize(model.dtype) if packed else model.get_parameter(name))
    plain.rotary = model.rotary
    return plain


def without_copy(
    model: Transformer, entries: Entries, where: str, dtype: torch.dtype | None = None
) -> dict[str, Entry]:
    """The entries without the LM head that the file of a tied model may hold, too.

    Raises ValueError in one line if it is another matrix than the embedding, in a dtype or else in the embedding's own.
    """
    entries = dict(entries)
    copy = entries.pop("lm_head.weight", None) if model.lm_head is None else None
    if copy is not None and EMBEDDING in entries:
        embedding = entries[EMBEDDING].read()
        embedding = embedding.to(dtype or embedding.dtype)
        if not torch.equal(copy.read().to(embedding), embedding):
            why = "lm_head.weight differs from the embedding although tie_word_embeddings is true"
            raise ValueError(f"{where}: {why}. Set it to false if the model has its own LM head.")
    return entries


def checked_sources(model: Transformer, entries: Entries, where: str) -> dict[str, list[str]]:
    """`parameter_sources`. Raises ValueError in one line unless the entries are exactly the tensors of the model."""
    views = hf_views(model, entries)
    check_entries({name: tuple(view.shape) for name, view in views.items()}, entries, where)
    return parameter_sources(model, views)


def read_parameter(
    entries: Entries, names: Iterable[str], shape: tuple[int, ...], where: str, device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """One of our parameters, into which the rows of Hugging Face tensors (`parameter_sources`) are copied one by one.

    dtype: instead of theirs. Raises ValueError in one line for a tensor that is missing, of another shape, or not finite
    in the new dtype.
    """
    if missing := [name for name in names if name not in entries]:
        raise ValueError(f"{where}: {few_names(missing)} is missing. Is a shard missing?")
    found = {name: entries[name] for name in names}
    sizes = [math.prod(entry.shape) for entry in found.values()]
    wide = any(entry.shape[1:] and entry.shape[-1] != shape[-1] for entry in found.values())
    if wide or sum(sizes) != math.prod(shape):
        name, entry = next(iter(found.items()))
        raise ValueError(f"{where}: {few_names([name])} {list(entry.shape)} does not fit config.json.")
    dtype = dtype or reduce(torch.promote_types, (entry.dtype for entry in found.values()))
    tensor = torch.empty(shape, dtype=dtype, device=device)
    for (name, entry), part in zip(found.items(), tensor.flatten().split(sizes), strict=True):
        part.copy_(entry.read().flatten())
        check_finite(part, name, entry.file)
    return tensor


def parameter_sources(model: Transformer, views: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Our parameter name -> the Hugging Face tensors whose rows it consists of, in order. `views` are the model's."""
    ours: dict[int, list[str]] = {}
    for hf, view in views.items():
        ours.setdefault(view.untyped_storage()._cdata, []).append(hf)  # in inference mode a view does not know its base
    return {name: ours[p.untyped_storage()._cdata] for name, p in model.named_parameters()}


class _Views(dict[str, Tensor]):
    """What `hf_views` returns, while it is collected."""

    def put(self, at: str, **parts: nn.Module | Tensor | None) -> None:
        """Add the tensors of parts that have these names at a place. None: the model lacks this part."""
        for name, part in parts.items():
            tensors = part.named_parameters(name) if isinstance(part, nn.Module) else [(name, part)]
            self.update({f"{at}.{full}": tensor for full, tensor in tensors if tensor is not None})

    def put_rows(self, at: str, names: Iterable[str], module: nn.Module, sizes: list[int]) -> None:
        """Add a module that has the rows of several Hugging Face modules, of so many rows each."""
        for kind, parameter in module.named_parameters():
            parts = zip(names, parameter.split(sizes), strict=True)
            self.update({f"{at}.{name}.{kind}": part for name, part in parts})

    def put_mlp(self, at: str, mlp: MLP, fused: bool = False) -> None:
        """Add a dense MLP. fused: whether files hold gate and up in one tensor."""
        if fused:
            self.put(at, gate_up_proj=mlp.gate_up)
        else:
            self.put_rows(at, GATE_UP_DOWN[:2], mlp.gate_up, [mlp.down.in_features] * 2)
        self.put(at, down_proj=mlp.down)


def hf_views(model: Transformer, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the view of our parameter that holds this tensor.

    names: what a file has. Experts get the names of transformers 5, where one tensor holds all of them, if it has these.
    Those of gpt-oss have others in GGUF files alone, as have some recurrent layers.
    """
    c = model.config
    fused_experts = any(name.endswith(".experts.gate_up_proj") for name in names)
    fused_experts |= c.expert_bias and not any(".experts.0." in name for name in names)
    views = _Views({EMBEDDING: model.embed_tokens.weight})
    blocks = [(f"model.layers.{i}", block) for i, block in enumerate(model.layers)]
    if isinstance(model, RecurrentTransformer) and (mtp := model.mtp) is not None:
        blocks.append(("mtp.layers.0", mtp.layer))
        views.put("mtp", pre_fc_norm_embedding=mtp.embed_norm, pre_fc_norm_hidden=mtp.feature_norm)
        views.put("mtp", fc=mtp.fc, norm=mtp.norm)
    if isinstance(model, Gemma4Transformer) and (own := model.token_inputs) is not None:
        views.put("model", embed_tokens_per_layer=own.embed_tokens, per_layer_projection_norm=own.norm)
        views.put("model", per_layer_model_projection=own.projection)
    for at, block in blocks:
        added = (block.attention_norm, block.mlp_norm) if isinstance(block, NormedBlock) else (None, None)
        norms = block.input_norm, added[0], block.post_norm, added[1]
        views.put(at, **dict(zip(norm_names(c.model_type), norms, strict=True)))
        if isinstance(block.attention, DeltaNet):
            _put_recurrent(views, f"{at}.linear_attn", block.attention, c, names)
        else:
            _put_attention(views, f"{at}.self_attn", block.attention, c)
        if isinstance(block, Gemma4Block):
            views.put(at, layer_scalar=block.factor)
            if (gate := block.token_gate) is not None:
                views.put(at, per_layer_input_gate=gate.gate, post_per_layer_input_norm=gate.norm)
                views.put(at, per_layer_projection=gate.projection)
        _put_behind_attention(views, at, block.mlp, c, fused_experts, names)
    views.put("model", norm=model.norm)
    return views if model.lm_head is None else views | {"lm_head.weight": model.lm_head.weight}


def _put_attention(views: _Views, at: str, own: Attention, config: ModelConfig) -> None:
    """`hf_views` of the attention of a layer."""
    if config.model_type in FUSED_QKV:
        views.put(at, qkv_proj=own.qkv)
    else:
        q, kv = own.heads * own.head_dim * (1 + config.output_gate), own.kv_heads * own.head_dim
        count = 3
        if isinstance(own, SharingAttention):
            count = 1 if own.shares else 2 if own.keys_as_values else 3
        views.put_rows(at, QKV[:count], own.qkv, [q, kv, kv][:count])
    names = ("query_layernorm", "key_layernorm") if config.late_qk_norm else ("q_norm", "k_norm")
    views.put(at, **dict(zip(names, (own.q_norm, own.k_norm), strict=True)), o_proj=own.o)
    if isinstance(own, ShapedAttention):
        views.put(at, sinks=own.sinks)


def _put_behind_attention(
    views: _Views, at: str, mlp: nn.Module, config: ModelConfig, fused_experts: bool, present: Collection[str]
) -> None:
    """`hf_views` of what a layer has behind its attention."""

    def of_one(place: str, names: Sequence[str]) -> Sequence[str]:  # the names of an expert's matrices
        merged = f"{place}.experts.0.gate_up_proj.weight" in present
        return ("gate_up_proj", names[-1]) if merged else names

    if isinstance(mlp, Beside):
        experts = mlp.experts
        views.put(f"{at}.router", proj=experts.router, scale=mlp.router_norm.weight, per_expert_scale=experts.factors)
        views.put(at, post_feedforward_layernorm_1=mlp.dense_out, post_feedforward_layernorm_2=mlp.experts_out)
        views.put(at, pre_feedforward_layernorm_2=mlp.experts_norm)
        each = f"{at}.experts.0.down_proj.weight" in present
        views.put(f"{at}.experts", **_expert_views(experts, of_one(at, GATE_UP_DOWN) if each else ()))
        mlp = mlp.dense
    if isinstance(mlp, MLP):
        views.put_mlp(f"{at}.mlp", mlp, config.model_type in FUSED_GATE_UP)
    if isinstance(mlp, Experts):
        place, router, names = EXPERT_NAMES[config.model_type]
        place = "mlp" if fused_experts else place
        views.put(f"{at}.{place}", **{router: mlp.router})
        if isinstance(mlp, SigmoidExperts):
            views.put(f"{at}.{place}", **{f"{router}.e_score_correction_bias": mlp.correction})
        if isinstance(mlp, SharedExperts) and mlp.shared is not None:
            views.put_mlp(f"{at}.mlp.{'shared_expert' if config.shared_gate else 'shared_experts'}", mlp.shared)
            views.put(f"{at}.mlp", shared_expert_gate=mlp.shared_gate)
        names = () if fused_experts else of_one(f"{at}.{place}", names)
        views.put(f"{at}.{place}.experts", **_expert_views(mlp, names))


def _put_recurrent(views: _Views, at: str, layer: DeltaNet, config: ModelConfig, names: Collection[str]) -> None:
    """`hf_views` of a recurrent layer."""
    sizes, joined = layer.sizes, config.model_type == "qwen3_next"
    if joined and f"{at}.in_proj_qkv.weight" not in names:
        views.put(at, in_proj_qkvz=layer.qkvz)
    else:
        views.put_rows(at, ("in_proj_qkv", "in_proj_z"), layer.qkvz, [sizes.channels, sizes.values])
    parts = ("in_proj_ba",) if joined else ("in_proj_b", "in_proj_a")
    views.put_rows(at, parts, layer.ba, [2 * sizes.value_heads // len(parts)] * len(parts))
    views.put(f"{at}.conv1d", weight=layer.conv)
    views.put(at, A_log=layer.A_log, dt_bias=layer.dt_bias, norm=layer.norm, out_proj=layer.out)


def _expert_views(experts: Experts, names: Sequence[str]) -> dict[str, Tensor | None]:
    """`hf_views` of the experts of a layer. names: of the matrices of one expert; none: each kind is in one tensor."""
    weights, biases = (experts.gate_up, experts.down), (None, None)
    if isinstance(experts, BiasedExperts):
        biases = experts.gate_up_bias, experts.down_bias
    if not names:
        kinds = "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
        return dict(zip(kinds, (*weights, *biases), strict=True))
    views = {}
    for kind, (gate_up, down) in {"weight": weights, "bias": biases}.items():
        for e in range(0 if down is None else len(down)):
            tensors = *gate_up[e].chunk(len(names) - 1), down[e]
            views |= {f"{e}.{name}.{kind}": t for name, t in zip(names, tensors, strict=True)}
    return views


def norm_names(model_type: str) -> tuple[str, ...]:
    """Hugging Face's names of a block's norms: before and after attention, before and after the MLP. "": none."""
    return GLM4_NORMS if model_type == "glm4" else NORM_NAMES[FAMILIES[model_type].facts.get("norms", "before")]


def row_order(name: str, rows: int, config: ModelConfig) -> Tensor | None:
    """The rows of a Hugging Face tensor in our order. None if that is their order.

    In a head of queries or keys, our dimensions i and i + hd / 2 turn together. Where queries have gates, files alternate
    them by heads, and ours begin with all gates. Qwen3-Next's recurrent layers alternate what they project by key heads.
    A tensor that has not the rows of such a layer stays as it is: it is refused where it is read.
    """
    if "attn." not in name:
        return None
    place, hd = name.split(".")[-2], config.head_dim
    rotated = config.rope.rotated(hd)
    if place in ("in_proj_qkvz", "in_proj_ba"):
        d = config.delta
        values = d.value_heads // d.key_heads
        sizes = [values] * 2 if place == "in_proj_ba" else [d.key_dim] * 2 + [values * d.value_dim] * 2
        if rows != d.key_heads * sum(sizes):
            return None
        parts = torch.arange(rows).view(d.key_heads, -1).split(sizes, 1)
        return torch.cat([part.flatten() for part in parts])
    head = torch.arange(hd)
    if rotated < hd or config.neighbours:
        pairs = torch.arange(rotated).view(-1, 2).T if config.neighbours else torch.arange(rotated).view(2, -1)
        head = torch.cat((pairs, torch.arange(rotated, hd).view(2, -1)), 1).flatten()
    elif not config.output_gate:
        return None
    if place in ("q_norm", "k_norm") and rows == hd:
        return head
    if place not in ("q_proj", "k_proj", "qkv_proj"):
        return None
    q, kv = config.num_attention_heads, config.num_key_value_heads
    turned = rows * (q + kv) // (q + 2 * kv) if place == "qkv_proj" else rows
    if turned % (2 * hd if place == "q_proj" and config.output_gate else hd):
        return None
    if place == "q_proj" and config.output_gate:
        queries, gates = torch.arange(rows).view(-1, 2, hd).unbind(1)
        return torch.cat((gates.flatten(), queries[:, head].flatten()))
    heads = torch.arange(turned).view(-1, hd)[:, head]
    return torch.cat((heads.flatten(), torch.arange(turned, rows)))


def norm_offset(name: str, config: ModelConfig) -> float:
    """What a file leaves out of the weights of this norm. The norm in a recurrent layer is whole."""
    whole = ".linear_attn." in name
    return config.norm_offset if re.search(r"norm(_\w+)?\.weight$", name) and not whole else 0.0


def plain_names(entries: Entries, config: ModelConfig, where: str) -> dict[str, Entry]:
    """The tensors of a Hugging Face directory but for those that read images and sounds, with the names that `hf_views`
    gives them. An embedding that is stored as the LM head alone gets its own name.

    Raises ValueError in one line where two tensors would have the same name.
    """
    named: dict[str, Entry] = {}
    for name, entry in entries.items():
        if not set(name.split(".")) & set(OTHER_SENSES):
            new = re.sub(PREFIXES, lambda found: "" if found[3] in ("lm_head", "mtp") else "model.", name)
            if new in named:
                raise ValueError(f"{where}: two tensors are called {new!r:.80} once prefixes are removed.")
            named[new] = entry
    if config.tie_word_embeddings and EMBEDDING not in named and "lm_head.weight" in named:
        named[EMBEDDING] = named.pop("lm_head.weight")
    return named


def text_entries(entries: Entries, config: ModelConfig) -> dict[str, Entry]:
    """The tensors that the text model reads: not those of an MTP layer that is not read, and of layers that share the
    keys and values of another one. A layer with an `eh_proj` is an MTP layer, which GLM numbers as the others."""
    others = {name.partition("eh_proj.")[0] for name in entries if ".eh_proj." in name}
    others |= set() if config.mtp else {"mtp."}
    others |= shared_keys(config)
    return {name: entry for name, entry in entries.items() if not name.startswith(tuple(others))}


def shared_keys(config: ModelConfig) -> set[str]:
    """How the names of tensors begin that layers with the keys and values of another one do not read."""
    layers = range(config.num_hidden_layers - config.shared_layers, config.num_hidden_layers)
    names = *QKV[1:], "k_norm", "v_norm"
    return {f"model.layers.{layer}.self_attn.{name}." for layer in layers for name in names}


def as_computed(entries: Entries, config: ModelConfig) -> dict[str, Entry]:
    """The tensors of a Hugging Face directory as the model computes with them: norms whole, where files lack a part, and
    rows in our order."""

    def of(name: str, entry: Entry) -> Entry:
        order = row_order(name, math.prod(entry.shape[:1]), config)  # a number, in a damaged file, counts as a row
        if offset := norm_offset(name, config):
            wide = torch.promote_types(entry.dtype, torch.float32)
            rows = slice(None) if order is None else order
            return entry._replace(dtype=wide, read=lambda: entry.read().to(wide)[rows] + offset)
        if name.endswith(".e_score_correction_bias"):  # only differences matter, and small numbers are rounded less
            return entry._replace(read=lambda: (whole := entry.read()) - whole.max())
        if name.endswith(".router.scale"):
            return entry._replace(read=lambda: entry.read() * config.hidden_size**-0.5)
        if config.expert_bias and ".mlp.experts." in name:
            change = partial(split_pairs, name=name)
            shape = tuple(change(torch.empty(entry.shape, device="meta")).shape)
            return entry._replace(shape=shape, read=lambda: change(entry.read()))
        if order is None or not name.endswith((".weight", ".bias")):  # the codes of a quantized matrix stay
            return entry
        return entry._replace(read=lambda: entry.read()[order])

    return {name: of(name, entry) for name, entry in entries.items()}


def split_pairs(t: Tensor, name: str, back: bool = False) -> Tensor:
    """gpt-oss's experts [E, in, out] as ours [E, out, in], gate rows before up rows, where files alternate them."""
    t = t if "bias" in name or back else t.mT
    if ".gate_up_proj" in name:
        t = t.unflatten(1, (2, -1) if back else (-1, 2)).transpose(1, 2).flatten(1, 2)
    return t.mT if back and "bias" not in name else t


def as_stored(views: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What a Hugging Face directory holds of these tensors: the inverse of `as_computed`."""
    stored = {}
    for name, view in views.items():
        view = view - offset if (offset := norm_offset(name, config)) else view
        view = view * config.hidden_size**0.5 if name.endswith(".router.scale") else view
        view = split_pairs(view, name, True) if config.expert_bias and ".mlp.experts." in name else view
        order = row_order(name, len(view), config)
        stored[name] = view if order is None else view[order.argsort()]
    return stored


def save_hf(model: Transformer, directory: str | Path) -> None:
    """Write a model directory with Hugging Face names, for transformers and for us. Weights keep their dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    config = config_to_hf(replace(model.config, dtype=dtype))
    write_directory(directory, as_stored(hf_views(model), model.config), config)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A ModelConfig as config.json keys that transformers 4 and 5 and `ModelConfig.from_hf` understand."""
    same = """model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id"""
    name, eos = config.model_type, config.eos_token_ids
    family = FAMILIES[name]
    out = {key: getattr(config, key) for key in same.split()}
    title = CLASSES.get(name) or "".join(map(str.capitalize, name.split("_")))
    out |= {"architectures": [f"{title}ForCausalLM"], "hidden_act": ACTIVATIONS[config.activation][0]}
    out |= {"torch_dtype": config.dtype, "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None}
    positions = config.max_position_embeddings
    out |= {"pad_token_id": None, "rope_theta": config.rope.theta}
    out["rope_scaling"] = _scaling_to_hf(config.rope, positions)
    if "partial_rotary_factor" in family.defaults:
        out["partial_rotary_factor"] = config.rope.partial
    if config.rope.kind == "longrope":
        out["original_max_position_embeddings"] = config.rope.original_max_positions
    if family.window_rope:
        ropes = {"full_attention": config.rope, "sliding_attention": config.window_rope or config.rope}
        full = {kind: {"rope_theta": r.theta, "rope_type": "default"} for kind, r in ropes.items()}
        out["rope_parameters"] = {kind: full[kind] | (_scaling_to_hf(r, positions) or {}) for kind, r in ropes.items()}
        if config.rope.kind == "proportional":  # earlier versions of transformers do not know it
            del out["rope_scaling"]
    out |= {"attention_bias": config.qkv_bias, "sliding_window": max(config.windows) or None}
    biases = config.qkv_bias, config.o_bias, config.mlp_bias
    out |= {key: bias for key, bias in zip(family.biases, biases, strict=True) if key}
    if "no_rope_layer_interval" in family.defaults:
        out["no_rope_layers"] = [int(i not in config.unrotated) for i in range(config.num_hidden_layers)]
    own = {key: number for key, number in NUMBERS.items() if key in family.defaults}
    out |= {key: key_of(getattr(config, field)) for key, (field, _, key_of) in own.items()}
    if "final_logit_softcapping" in family.defaults:
        out["hidden_activation"] = out["hidden_act"]
    if config.full_heads is not None:
        heads = dict(zip(("num_key_value_heads", "head_dim"), config.full_heads, strict=True))
        out["per_layer_config"] = {str(i): heads for i, window in enumerate(config.windows) if not window}
        out |= {"attention_k_eq_v": config.keys_as_values, "num_kv_shared_layers": config.shared_layers}
        out |= {"hidden_size_per_layer_input": config.token_inputs, "vocab_size_per_layer_input": config.vocab_size}
        out |= {"use_double_wide_mlp": config.wide_shared, "enable_moe_block": config.dense_size > 0}
    if config.dense_size:
        out |= {"top_k_experts": config.num_experts_per_tok, "num_experts": config.num_local_experts}
        out |= {OWN_WIDTH: config.intermediate_size, "intermediate_size": config.dense_size}
    if config.sigmoid_router:
        out |= {"first_k_dense_replace": config.dense_layers, "use_qk_norm": config.qk_norm}
        out |= {"n_shared_experts": config.shared_intermediate_size // config.intermediate_size}
    if config.num_local_experts:
        out |= {key: getattr(config, key) for key in ("num_local_experts", "num_experts_per_tok", "norm_topk_prob")}
    if family.width == OWN_WIDTH:
        out |= {"num_experts": config.num_local_experts, OWN_WIDTH: config.intermediate_size}
    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    if config.delta is not None:
        kinds = ["linear_attention" if i in config.recurrent else kind for i, kind in enumerate(kinds)]
        out |= dict(zip(DELTA_KEYS, astuple(config.delta), strict=True)) | {"layer_types": kinds}
    if config.shared_intermediate_size and config.shared_gate:
        out["shared_expert_intermediate_size"] = config.shared_intermediate_size
    if family.windows in ("switch", "pattern"):
        full = len(kinds) - kinds[::-1].index("full_attention") if "full_attention" in kinds else 0
        out |= {"use_sliding_window": any(config.windows), "layer_types": kinds, "max_window_layers": full}
    return out


def _scaling_to_hf(rope: RopeConfig, positions: int) -> dict[str, Any] | None:
    if rope.kind == "default" and not rope.query_growth:
        return None
    if rope.kind == "proportional":
        factor = {"factor": rope.factor} if rope.factor != 1 else {}
        return {"rope_type": rope.kind, "partial_rotary_factor": rope.partial} | factor
    keys = {"llama3": "low_freq_factor high_freq_factor", "longrope": "short_factor long_factor attention_factor"}
    keys["yarn"] = "beta_fast beta_slow truncate attention_factor mscale mscale_all_dim"
    scaling = {key: getattr(rope, key) for key in keys.get(rope.kind, "").split()}
    if rope.kind != "linear" and (rope.kind, rope.original_max_positions) != ("yarn", positions):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in scaling.items()}
    if rope.query_growth:
        scaling["llama_4_scaling_beta"] = rope.query_growth
    unset = (None, 0.0) if rope.kind in ("longrope", "yarn") else ()
    scaling = {key: value for key, value in scaling.items() if value is False or value not in unset}
    return {"rope_type": rope.kind, "factor": rope.factor, **scaling}


# ---- Meta's own checkpoints: params.json and consolidated.*.pth. Large models are split into model-parallel shards, and
# ---- each shard holds a part of nearly every tensor. Meta orders the rows of q and k for rotating neighbouring pairs of
# ---- dimensions. Both are put right while the tensors are read.

# Meta name = Hugging Face name : dimension that the shards split ("-" where every shard holds the whole tensor)
META_TOP = {"tok_embeddings": "model.embed_tokens:1", "norm": "model.norm:-", "output": "lm_head:0"}
META_LAYER = """attention.wq=self_attn.q_proj:0 attention.wk=self_attn.k_proj:0 attention.wv=self_attn.v_proj:0
    attention.wo=self_attn.o_proj:1 feed_forward.w1=mlp.gate_proj:0 feed_forward.w3=mlp.up_proj:0
    feed_forward.w2=mlp.down_proj:1 attention_norm=input_layernorm:- ffn_norm=post_attention_layernorm:-"""
META_LAYER = dict(pair.split("=") for pair in META_LAYER.split())
META_KEYS = """dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta head_dim
    hidden_dim sliding_window use_scaled_rope rope_scaling_factor max_seq_len max_batch_size"""


def read_meta_config(directory: Path) -> ModelConfig:
    """The geometry that params.json and the shapes of the tensors describe.

    Raises ValueError in one line for keys that are not implemented, damaged files and missing shards.
    """
    where = str(directory / "params.json")
    params = read_json(directory / "params.json")
    for key in params.keys() - set(META_KEYS.split()):
        raise ValueError(f"{where}: {key!r:.80} is not implemented.")
    shards = _shards(directory, None)
    w1 = shards[0]["layers.0.feed_forward.w1.weight"]
    read = ConfigReader(params, where)
    dim, heads = read.integer("dim"), read.integer("n_heads")
    rows = shards[0]["tok_embeddings.weight"].shape[0]
    vocab = rows * (len(shards) if _splits_vocabulary(shards, dim) else 1)
    llama3, scaled = vocab == 128256, read.boolean("use_scaled_rope", False)
    # LLaMA 3.2 (1B and 3B, the only ones below 4096) scales by 32. LLaMA 3.1 and 3.3 scale by 8.
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
        # params.json does not tell the trained context length. Add max_seq_len to it for LLaMA 1 or CodeLlama.
        "max_position_embeddings": read.integer("max_seq_len", longest),
        "sliding_window": params.get("sliding_window"),
        "tie_word_embeddings": "output.weight" not in shards[0],
        "torch_dtype": str(w1.dtype).removeprefix("torch."),
        "bos_token_id": 128000 if llama3 else 1,
        "eos_token_id": [128001, 128008, 128009] if llama3 else 2,
    }
    return ModelConfig.from_hf(hf, where)


def read_meta_entries(directory: Path, config: ModelConfig, share: tuple[int, int] = (0, 1)) -> dict[str, Entry]:
    """The tensors of all shards, joined, under Hugging Face names. A name without a counterpart keeps its own.

    share: see `pickle_entries`.
    """
    shards = _shards(directory, share)
    by_rows = _splits_vocabulary(shards, config.hidden_size)
    entries = {}
    for name in shards[0]:
        _, layer, inner, kind = re.fullmatch(r"(layers\.(\d+)\.)?(.*?)(\.weight)?", name, re.DOTALL).groups()
        target, _, split = (META_LAYER if layer else META_TOP).get(inner, "").partition(":")
        if not target or not kind:
            target, split = name, "-"  # the strict check of all names will refuse it
        else:
            target = f"model.layers.{layer}.{target}.weight" if layer else f"{target}.weight"
        if inner == "tok_embeddings" and by_rows:
            split = "0"
        rotated = config.head_dim if inner in ("attention.wq", "attention.wk") else 0
        pieces = [shard[name] for shard in (shards[:1] if split == "-" else shards)]
        entries[target] = _joined(pieces, 0 if split == "-" else int(split), rotated)
    return entries


def _shards(directory: Path, share: tuple[int, int] | None) -> list[dict[str, Entry]]:
    """The tensors of each consolidated.*.pth file, unread. All shards hold the same names. share: see pickle_entries."""
    files = sorted(directory.glob("consolidated.*.pth"))
    if not files or [f.name for f in files] != [f"consolidated.{i:02}.pth" for i in range(len(files))]:
        raise ValueError(f"{directory}: of consolidated.00.pth, 01, ... some are missing. Download it again.")
    shards = [pickle_entries(file, share) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if odd := shard.keys() ^ shards[0].keys():
            raise ValueError(f"{file}: {few_names(odd)} is not in every shard. Download it again.")
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in shards[0] or len(shards[0][name].shape) != 2:
            raise ValueError(f"{files[0]}: the matrix {name!r} is missing, so this is not a LLaMA of Meta's.")
    return shards


def _splits_vocabulary(shards: list[dict[str, Entry]], dim: int) -> bool:
    """Whether the shards split the embedding by vocabulary (LLaMA 3), and not by dimension (LLaMA 1 and 2)."""
    return shards[0]["tok_embeddings.weight"].shape[1] == dim


def _joined(pieces: list[Entry], split: int, head_dim: int) -> Entry:
    """One entry from the pieces of all shards. For q and k (head_dim > 0) the rows are put in half-rotation order."""
    one, shape = pieces[0], list(pieces[0].shape)
    if len(shape) > split:
        shape[split] *= len(pieces)
    if head_dim and (rows := math.prod(shape[:1])) % head_dim:
        raise ValueError(f"{one.file}: {rows} rows of q or k do not fit head_dim {head_dim}.")
    if any(piece.shape != one.shape for piece in pieces):
        raise ValueError(f"{one.file}: shards of one tensor differ in shape. Download them again.")

    def part(spans: Spans) -> Tensor:
        if spans.axis == split:
            ((first, end),), size = spans.pieces, one.shape[split]  # no matrix of Meta's is fused
            ends = [(max(first - i * size, 0), min(end - i * size, size)) for i in range(len(pieces))]
            parts = [p.read().narrow(split, a, b - a) for p, (a, b) in zip(pieces, ends, strict=True) if a < b]
        else:
            parts = [spans(piece.read()) for piece in pieces]
        rows = torch.cat(parts, split) if len(parts) > 1 else parts[0]
        return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) if head_dim else rows

    # The shape is looked at before anything is read, and may be wrong here.
    return Entry(tuple(shape), one.dtype, one.file, lambda: part(Spans(split, ((0, shape[split]),))), part)
