"""Heads that draft a block of tokens at once: DFlash, DFlash2, DSpark and JetSpec, as their makers publish them.

Read are the layouts of z-lab, DeepSpec, SpecForge (JetSpec) and speculators. What a head computes follows from its own
config, and every setting that is not understood is refused by its name, because a head that is read wrongly changes no
output and only lowers the acceptance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from families.config import ModelConfig
from support.reader import is_a
from weights.assistant import ASSISTANTS, AssistantReader
from weights.files import few_names, local_path, write_directory
from weights.head_reader import HeadReader, described, folder_of, read_eagle
from weights.heads import MTP, HeadFile, Table, fitted, layer_tensors, mtp_head, published_parts, read_quantized
from weights.hf import config_to_hf
from weights.quantized import rows_from

SLOT0 = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")  # of these, slot 0 drafts, too
DFLASH2 = ("DFlash2DraftModel", "DFlash2Speculator")
ARCHITECTURES = (*SLOT0, *DFLASH2, "DFlashDraftModel", "DFlashSpeculator")
SPECULATORS = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "dflash2": "DFlash2Speculator"}
MARKOV = ("vanilla", "gated", "rnn")
# Settings of a decoder layer, and those that say nothing about what a head computes.
GEOMETRY = """attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings
    num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta
    sliding_window use_sliding_window vocab_size""".split()
IDLE = """_attn_implementation _name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id
    initializer_range max_anchors max_window_layers model_type num_anchors pad_token_id speculators_config
    speculators_version tie_word_embeddings torch_dtype training_block_size transformers_version use_cache""".split()
TOP = """aux_hidden_state_layer_ids block_size confidence_head_with_markov dflash_config draft_vocab_size
    enable_confidence_head is_causal markov_head_type markov_rank mask_token_id num_target_layers sample_from_anchor
    sliding_window_non_causal speculators_model_type target_hidden_size target_layer_ids
    transformer_layer_config""".split()
NESTED = """block_size causal causal_head conv_group_size conv_kernel_size final_logit_softcapping
    input_embedding_scale mask_token_id num_target_layers output_multiplier selector_rank selector_top_k
    target_layer_ids""".split()


@dataclass(frozen=True)
class BlockConfig:
    """What a block head computes. `layer` has the geometry of all its layers, and the size of its vocabulary.

    `taps` name the target layers whose *input* is read, ascending.
    """

    layer: ModelConfig
    target_hidden_size: int
    taps: tuple[int, ...]
    slots: int  # rows of a block, the anchor's included
    mask_id: int
    slot0: bool = False  # whether the anchor's slot drafts the first token, else the slot after it does
    causal: bool = False  # what the slots see of each other where attention is full
    causal_window: bool = False  # and where it has a window
    markov: str = ""  # one of MARKOV, "selector" (DFlash2), or "": tokens do not depend on the ones before
    rank: int = 0  # of the factors that correct the logits
    shortlist: int = 16  # the tokens of a slot that are corrected
    conv_taps: int = 0  # of the convolutions over the slots (DFlash2), 0 without any
    conv_group: int = 1  # channels that share what the rows add to the kernel of a convolution
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0  # 0: none
    has_lm_head: bool = False
    target_vocab_size: int = 0
    key = "eaglet_block"  # of all this in the config.json of a quantized head

    @property
    def depth(self) -> int:
        """The most tokens that a block drafts."""
        return self.slots if self.slot0 else self.slots - 1

    @property
    def kind(self) -> str:
        """What it is called in reports."""
        if self.markov in MARKOV:
            return "DSpark"
        return "DFlash2" if self.conv_taps or self.markov else "JetSpec" if self.causal else "DFlash"


BlockFile = HeadFile[BlockConfig]


def block_tensors(config: BlockConfig) -> Table:
    """The one table of a head's tensors, for reading and for writing."""
    c, r, H = config.layer, config.rank, config.layer.hidden_size
    table = {"fc.weight": {"fc.weight": (H, len(config.taps) * config.target_hidden_size)}}
    table |= {f"{name}.weight": {f"{name}.weight": (H,)} for name in ("hidden_norm", "norm")}
    for i in range(c.num_hidden_layers):
        at = f"layers.{i}."
        table |= layer_tensors(c, H, f"layers.{i}", f"layers.{i}")
        table[f"{at}input_norm.weight"] = {f"{at}input_layernorm.weight": (H,)}
        for conv in ("attention_conv", "mlp_conv") if config.conv_taps else ():
            rows = 2 * config.conv_taps * (H // config.conv_group)
            table[f"{at}{conv}.base"] = {f"{at}{conv}.base_kernel": (2, config.conv_taps, H)}
            table[f"{at}{conv}.projection.weight"] = {f"{at}{conv}.kernel_projection.weight": (rows, H)}
    if config.has_lm_head:
        table["lm_head.weight"] = {"lm_head.weight": (c.vocab_size, H)}
    books = {"predecessor": (config.target_vocab_size, r), "successor": (c.vocab_size, r)}
    if config.markov == "selector":
        table |= {f"{ours}.weight": {f"candidate_selector.{ours}_codebook": shape} for ours, shape in books.items()}
        table["mix.weight"] = {"candidate_selector.hidden_projection.weight": (r, H)}
    elif config.markov:
        table |= {f"{x}.weight": {f"markov_head.markov_w{i}.weight": books[x]} for i, x in enumerate(books, 1)}
    mixing = {"gated": ("gate_proj", r, H + r), "rnn": ("joint_proj", 3 * r, 2 * r + H)}
    if config.markov in mixing:
        name, rows, columns = mixing[config.markov]
        table["mix.weight"] = {f"markov_head.{name}.weight": (rows, columns)}
        table["mix.bias"] = {f"markov_head.{name}.bias": (rows,)}
    return table


def context_rows(file: BlockFile) -> dict[str, Tensor]:
    """The parts of a head's tensors that are stored a second time, for the keys and values of the text."""
    layer = file.config.layer
    first = layer.num_attention_heads * layer.head_dim
    return rows_from({name: t for name, t in file.tensors.items() if ".attention.qkv." in name}, first)


def read_head(path: str | Path, target: ModelConfig, overrides: Mapping[str, str] | None = None) -> HeadFile:
    """Read a draft head of any kind, which its own files say: a published one, or one that quantize.py wrote.

    Args:
        path: a folder, or a file with a config.json beside it, or `org/name` in the Hugging Face cache, or `MTP`.
        target: the model that the head shall draft for.
        overrides: config keys (`HeadReader.overrides`) to replace, with values as JSON text.

    Raises:
        ValueError: one line, if the head is damaged, does not fit the target, or has a setting that is not understood.
    """
    if path == MTP:
        return mtp_head(target)
    path, given = local_path(path), overrides or {}
    source = described(path)
    raw, _ = source
    if BlockConfig.key in raw:
        return read_quantized(folder_of(path), BlockConfig, block_tensors, target)
    if str(raw.get("model_type")) in ASSISTANTS:
        return AssistantReader(path, source, target, given).read()
    if _architecture(raw):
        return fitted(_BlockReader(path, source, target, given).read(), target, path)
    return read_eagle(path, target, overrides, source)


def _architecture(raw: Mapping[str, Any]) -> str:
    """The first of ARCHITECTURES that a config.json names, or that its kind of speculators is; "" for no block head."""
    names, kind = raw.get("architectures"), raw.get("speculators_model_type")
    found = [name for name in names if name in ARCHITECTURES] if isinstance(names, list) else []
    found += [architecture for known, architecture in SPECULATORS.items() if known == kind]
    return found[0] if found else ""


def save_block(
    config: BlockConfig, tensors: Mapping[str, Tensor], directory: str | Path,
    confidence: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write a float head as z-lab (DFlash, DFlash2, JetSpec) or DeepSpec (all that draft in slot 0) publish theirs.

    `tensors` are those of a BlockFile. confidence: weight and bias of what estimates DSpark's acceptance, which other
    engines read. Raises ValueError for a head with a vocabulary of its own, which neither has.
    """
    if config.has_lm_head or "draft_ids" in tensors:
        raise ValueError("save_block: z-lab and DeepSpec have no heads with a vocabulary of their own.")
    out = published_parts(block_tensors(config), tensors)
    layer = config.layer
    windows = [w for w in layer.windows if w]
    keys = config_to_hf(replace(layer, windows=(0,) * layer.num_hidden_layers)) | {"model_type": "qwen3"}
    keys = {key: value for key, value in keys.items() if key in (*GEOMETRY, *IDLE)}
    keys["layer_types"] = ["sliding_attention" if w else "full_attention" for w in layer.windows]
    keys |= {"sliding_window": windows[0] if windows else None, "use_sliding_window": bool(windows)}
    drafted = {"mask_token_id": config.mask_id, "target_layer_ids": [tap - 1 for tap in config.taps]}
    if config.slot0:
        keys |= {"architectures": ["Qwen3DSparkModel"], "block_size": config.slots, **drafted}
        keys |= {"enable_confidence_head": bool(confidence), "confidence_head_with_markov": bool(config.rank)}
        out |= {f"confidence_head.proj.{name}": tensor for name, tensor in (confidence or {}).items()}
        keys |= {"markov_rank": config.rank, "markov_head_type": config.markov or "vanilla"}
    elif config.conv_taps or config.markov:
        selector = {"selector_rank": config.rank, "selector_top_k": config.shortlist}
        selector |= {"conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group}
        scales = {"output_multiplier": config.logits_scale, "final_logit_softcapping": config.logits_cap}
        scales |= {"input_embedding_scale": config.embedding_scale, "block_size": config.slots}
        keys |= {"architectures": ["DFlash2DraftModel"], "dflash_config": drafted | selector | scales}
    else:
        keys |= {"architectures": ["DFlashDraftModel"], "block_size": config.slots, "dflash_config": drafted}
    if not config.slot0 and config.causal == config.causal_window:  # otherwise it depends on the layer
        keys["is_causal"] = config.causal
    write_directory(directory, out, keys)


class _BlockReader(HeadReader):
    """A block head: its config in parts, its tensors without prefixes."""

    kind = "a block head"
    overrides = ("rope_theta", "rms_norm_eps", "is_causal", "shortlist")
    prefixes = {r"^(draft_model|model)\.": "", r"^logit_head\.": "markov_head."}
    prefixes |= {r"^confidence_proj\.": "confidence_head.proj."}

    def _open(self) -> None:
        """Name the tensors, and read the head's config."""
        self.name_entries()
        raw = self.raw
        layer, nested = self.read_settings(raw, "dflash_config")
        self._refuse(raw, (*TOP, *IDLE, *NESTED, *(() if self.speculators else GEOMETRY)), "")
        self._refuse(nested, NESTED, "dflash_config.")
        if self.speculators:
            self._refuse(layer, (*GEOMETRY, *IDLE), "transformer_layer_config.")
        if (kind := raw.get("speculators_model_type")) and not isinstance(kind, str):
            self.fail(f"speculators_model_type is {kind!r:.60}, expected a text.")
        self.architecture = _architecture(raw)
        if self.architecture.startswith(("Qwen3DSpark", "DFlashDraft")) and "block_size" in raw:
            self.flags.config["block_size"] = raw["block_size"]

    def _refuse(self, config: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        """Refuse settings that are not known and that are not switched off."""
        other = sorted(key for key, value in config.items() if key not in known and value not in (None, False))
        if other:
            self.fail(f"{where}{other[0]:.60} = {config[other[0]]!r:.60} is not understood, so this head is not read.")

    def read(self) -> BlockFile:
        """The whole head. Raises ValueError as `read_head` does."""
        self._open()
        self.take_padding(self.geometry.integer("vocab_size", self.target.vocab_size))
        target, flags = self.target, self.flags
        ids, order = self._taps()
        draft_ids = self.draft_ids("lm_head.weight" in self.entries)
        own_head = self.speculators and "lm_head.weight" in self.entries
        vocab = self.entries["lm_head.weight"].shape[0] if own_head else target.vocab_size
        layer = self._layer(vocab)
        markov, rank = self._markov()
        causal = self._causal()
        two = self.architecture in DFLASH2
        corrected = flags.integer("selector_top_k", 16) if two else 16
        scales = [flags.number(key, 1.0, 1e-6, 1e6) for key in ("input_embedding_scale", "output_multiplier")]
        cap = flags.number("final_logit_softcapping", 0.0)
        if not two and [*scales, cap] != [1, 1, 0]:
            self.fail("input_embedding_scale, output_multiplier and final_logit_softcapping are read for DFlash2 only.")
        config = BlockConfig(
            layer=layer,
            target_hidden_size=target.hidden_size,
            taps=ids,
            slots=flags.integer("block_size", 16, 2, 64),
            mask_id=flags.integer("mask_token_id", None, 0, target.vocab_size - 1),
            slot0=flags.boolean("sample_from_anchor", self.architecture in SLOT0),
            causal=bool(causal),
            causal_window=self.architecture not in SLOT0 if causal is None else causal,
            markov=markov,
            rank=rank,
            shortlist=flags.integer("shortlist", corrected, 1, layer.vocab_size),
            conv_taps=flags.integer("conv_kernel_size", 2, 1, 64) if two else 0,
            conv_group=flags.integer("conv_group_size", 16) if two else 1,
            embedding_scale=scales[0],
            logits_scale=scales[1],
            logits_cap=cap,
            has_lm_head=own_head,
            target_vocab_size=target.vocab_size,
        )
        if layer.hidden_size % config.conv_group:
            self.fail(f"conv_group_size {config.conv_group} does not divide hidden_size {layer.hidden_size}.")
        tensors = self.tensors(block_tensors(config), self._unread(config), draft_ids)
        if order != sorted(order):  # the target gives its states in the order of its layers
            columns = tensors["fc.weight"].unflatten(1, (len(order), -1))
            tensors["fc.weight"] = columns[:, torch.tensor(order)].flatten(1).contiguous()
        return BlockFile(config, tensors, self.notes)

    def _taps(self) -> tuple[tuple[int, ...], list[int]]:
        """The layers whose inputs the head reads, ascending, and which of the file's each of them is."""
        layers, flags = self.target.num_hidden_layers, self.flags
        made_for = flags.integer("num_target_layers", layers)
        if made_for != layers:
            self.misfit(f"made for {made_for} layers, this model has {layers}")
        n = self.geometry.integer("num_hidden_layers", high=100)
        ids = flags.config.get("aux_hidden_state_layer_ids" if self.speculators else "target_layer_ids")
        if ids is None and not self.speculators:
            ids = [layers // 2] if n == 1 else [round(1 + i * (layers - 4) / (n - 1)) for i in range(n)]
            self.notes.append(f"no target_layer_ids: assumed the outputs of layers {ids}")
        if not isinstance(ids, list) or not ids or not all(is_a(i, int) for i in ids):
            self.fail(f"the tapped layers are {ids!r:.60}, expected a list of layer numbers.")
        taps = [i if self.speculators else i + 1 for i in ids]
        if not all(0 <= tap < layers for tap in taps):
            self.fail(f"the tapped layers {ids} are not outputs of layers 0 to {layers - 2} (id -1: the embeddings).")
        order = sorted(range(len(taps)), key=lambda i: taps[i])
        return tuple(taps[i] for i in order), order

    def _causal(self) -> bool | None:
        """Whether the slots see only those before them; None where it depends on the layer."""
        if self.architecture == "Qwen3DSparkModel":
            return False
        for key in ("is_causal", "causal_head", "causal"):
            if self.flags.config.get(key) is not None:
                return self.flags.boolean(key)
        return False if self.flags.boolean("sliding_window_non_causal", False) else None

    def _markov(self) -> tuple[str, int]:
        """What corrects the logits, and its rank."""
        flags = self.flags
        if any(name.startswith("prefix_gru.") for name in self.entries):
            self.fail("Domino heads (prefix_gru) are not implemented.")
        if self.architecture in DFLASH2:
            return "selector", flags.integer("selector_rank", 256)
        rank = flags.integer("markov_rank", 0, low=0)
        return (flags.text("markov_head_type", "vanilla", MARKOV) if rank else ""), rank

    def _unread(self, config: BlockConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors that may be there and are not read: copies of the target's, and what estimates the
        acceptance, because trees are pruned by the draft's own probabilities."""
        H, vocab = config.layer.hidden_size, self.target.vocab_size
        inputs = H + config.rank * self.flags.boolean("confidence_head_with_markov", bool(config.rank))
        optional = {"embed_tokens.weight": (vocab, H), "lm_head.weight": (vocab, H)}
        optional |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
        if config.has_lm_head:
            del optional["lm_head.weight"]
        return {name: shape for name, shape in optional.items() if name in self.entries}

    def _layer(self, vocab: int) -> ModelConfig:
        """The geometry of the head's layers, all from its own config."""
        read, target = self.geometry, self.target
        if read.boolean("attention_bias", False):
            self.fail("attention_bias = true is not implemented.")
        if (hidden := read.integer("hidden_size")) != target.hidden_size:
            self.misfit(f"made for hidden_size {hidden}, this model has {target.hidden_size}")
        if (known := read.integer("vocab_size", target.vocab_size)) != target.vocab_size:
            self.misfit(f"made for a vocabulary of {known}, this model has {target.vocab_size}")
        layers = read.integer("num_hidden_layers", high=100)
        if "fc.weight" not in self.entries:
            self.fail(f"no {few_names(['fc.weight'])}: not a block head.")
        passed = {key: read.config.get(key) for key in GEOMETRY if key not in ("sliding_window", "layer_types")}
        hf = passed | {
            "model_type": "qwen3",
            "architectures": None,
            "vocab_size": vocab,
            "max_position_embeddings": read.integer("max_position_embeddings", target.max_position_embeddings),
            "torch_dtype": str(self.entries["fc.weight"].dtype).removeprefix("torch."),
        }
        full = ["full_attention"] * layers
        kinds = read.config.get("layer_types") or full
        if sliding := kinds != full:
            if not read.boolean("use_sliding_window", True):
                self.fail("layer_types names sliding layers, but use_sliding_window is false: which of them holds?")
            hf |= {"layer_types": kinds, "sliding_window": read.integer("sliding_window")}
        return ModelConfig.from_hf(hf | {"use_sliding_window": sliding}, str(self.path))
