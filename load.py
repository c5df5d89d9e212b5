"""TODO."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import kernels
from drafters.draft_model import DraftModelDrafter, check_vocabulary
from drafters.lookahead import LookaheadDrafter
from drafters.medusa import MedusaDrafter, load_medusa
from drafters.ngram import NGramDrafter, WithNGrams
from eagle_draft import EagleHead, eagle_drafter
from engine import COMPILE_MODES, Engine
from model import DTYPES, ModelConfig, Transformer
from runtime.runner import RING
from step import HISTORY
from support.cache import folder as cache_folder
from support.cache import use
from support.errors import BadFileError, NotEnoughMemory, UsageError, UserError
from support.files import read_json
from support.machine import describe_device, free_memory, size_text
from tokenizer import load_tokenizer
from tree import DynamicTree, named_tree, tree_tables
from weights.checkpoint import load_config, load_model
from weights.files import Entry, read_entries, tensor_files
from weights.heads import EagleFile, read_eagle
from weights.hf import build_model
from weights.quantized import adopt_, held_bytes, pack_
from weights.tuned import read_tuned

DEMO = Path(__file__).resolve().parent / "demo"


DRAFTERS = ("eagle", "ngram", "lookahead", "draft", "medusa")


VERIFY = ("match", "multi-round", "multi-round-replacement")


@dataclass(frozen=True)
class LoadOptions:
    """What `load` builds. Everything about one request is in SamplingParams instead."""

    checkpoint: str = str(DEMO)
    eagle: str | None = None
    eagle_config: tuple[str, ...] = ()  # key=value, for a head without a config.json
    tree: str | tuple[str, ...] = "paper25"  # a tuple: one static tree per sequence of the batch
    draft_vocab: int = 0  # EAGLE-1/2: draft only the K most frequent tokens ...
    draft_vocab_text: str | None = None  # ... of this text file; default: the K first ids (merge rank)
    drafter: str = ""  # one of DRAFTERS; '' = what eagle, draft_checkpoint or medusa asks for, else none
    draft_checkpoint: str | None = None  # a draft LLM
    medusa: str | None = None  # Medusa heads
    ngram_nodes: int = 0  # n-gram nodes added to the tree
    draft_noise: bool = True  # the draft sees the target's noise
    verify: str = "match"  # match | multi-round | multi-round-replacement
    batch_size: int = 1
    ctx: int | None = None
    device: str | None = None
    dtype: str | None = None
    compile: bool = False
    compile_mode: str = "graph"  # one of engine.COMPILE_MODES
    eagle_always: bool = False  # never decode plainly, even while speculation does not pay
    kernels: str = "auto"
    kv: str = "model"  # model | int8: the target's cache; a drafter's stays in the model's dtype


def check_options(options: LoadOptions) -> None:
    """UserError naming the option that is wrong or would be ignored; before anything is read."""
    allowed = {
        "drafter": ("", *DRAFTERS),
        "verify": VERIFY,
        "device": (None, "cuda", "cpu"),
        "dtype": (None, *DTYPES),
        "compile_mode": tuple(COMPILE_MODES),
        "kernels": ("auto", "triton", "reference"),
        "kv": ("model", "int8"),
    }
    for name, values in allowed.items():
        if (value := getattr(options, name)) not in values:
            names = ", ".join(v for v in values if v)
            raise UsageError(f"--{name.replace('_', '-')} is {value!r:.40}; allowed: {names}.")
    for name, least in (("batch_size", 1), ("ctx", 2), ("ngram_nodes", 0), ("draft_vocab", 0)):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"--{name.replace('_', '-')} is {value!r:.40}; allowed: {least} or more.")
    kind = drafter_kind(options)
    ignored = {
        "--eagle-config": options.eagle_config and kind != "eagle",
        "--draft-vocab": options.draft_vocab and kind != "eagle",
        "--verify": options.verify != "match" and not kind,
        "--draft-noise off": not options.draft_noise and not kind,
    }
    for flag in (flag for flag, wrong in ignored.items() if wrong):
        raise UsageError(f"{flag} is about a draft head, and none was given (--eagle HEAD).")
    if options.draft_vocab_text and not options.draft_vocab:
        raise UsageError("--draft-vocab-text needs --draft-vocab K, the number of tokens to keep.")


def drafter_kind(options: LoadOptions) -> str:
    """Which drafter the options ask for: one of DRAFTERS, or '' for plain decoding. UserError where they disagree."""
    flags = {"eagle": "--eagle HEAD", "draft": "--draft-checkpoint DIR", "medusa": "--medusa FILE"}
    given = [
        k for k, v in zip(flags, (options.eagle, options.draft_checkpoint, options.medusa), strict=True) if v
    ]
    kind = options.drafter or (given[0] if given else "")
    if extra := [k for k in given if k != kind]:
        raise UsageError(f"{flags[extra[0]]} does not go with the drafter {kind}; give one of them.")
    if kind in flags and not given:
        raise UsageError(f"--drafter {kind} needs {flags[kind]}.")
    if kind not in ("eagle", "draft", "") and options.verify != "match":
        raise UsageError(f"--verify {options.verify} needs a draft distribution; {kind} has none.")
    if options.ngram_nodes and kind in ("", "ngram"):
        raise UsageError("--ngram-nodes adds to another drafter's tree; n-grams alone: --drafter ngram.")
    return kind


def tree_shape(options: LoadOptions) -> tuple[int, int]:
    """(N, D) of what the options' drafter proposes; (1, 0) for plain decoding."""
    kind = drafter_kind(options)
    tree = named_tree(options.tree if isinstance(options.tree, str) else options.tree[0])
    N, D = LookaheadDrafter.shape() if kind == "lookahead" else (tree.N, tree.D) if kind else (1, 0)
    return WithNGrams.shape(N, D, options.ngram_nodes) if options.ngram_nodes else (N, D)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes the engine will hold, computed before anything is loaded."""

    weights: int
    head: int
    kv: int
    buffers: int
    graphs: int = 0  # an estimate: what a captured step keeps for its intermediate results

    @property
    def total(self) -> int:
        return self.weights + self.head + self.kv + self.buffers + self.graphs

    def __str__(self) -> str:
        parts = {"weights": self.weights, "head": self.head, "kv": self.kv, "buffers": self.buffers}
        parts["graphs"] = self.graphs
        return f"{size_text(self.total)}: " + "  ".join(f"{k} {size_text(v)}" for k, v in parts.items() if v)


def plan_memory(
    config: ModelConfig, options: LoadOptions, head=None, stored_weights: Any = 0, draft=None
) -> MemoryPlan:
    """What `load` will allocate. head: EagleFile or None; stored_weights: a quantized model's stored tensors by name, or
    the bytes that its weights take; draft: the draft LLM's ModelConfig or None."""
    dtype = DTYPES[options.dtype or config.dtype]
    element, B, ctx = dtype.itemsize, options.batch_size, options.ctx or config.max_positions
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu")).type

    def held(geometry: ModelConfig, stored: Any) -> int:
        if isinstance(stored, int) and stored:
            return stored
        if stored:
            return held_bytes(stored, dtype, device, options.kernels)
        return sum(p.numel() for p in build_model(geometry).parameters()) * element

    weights = held(config, stored_weights)
    rotary = 4 * ctx * config.head_dim
    N, D = tree_shape(options)
    slots = ctx + N + 1
    per_head = config.head_dim + kernels.KV_SCALE if options.kv == "int8" else config.head_dim * element
    row = 2 * config.num_key_value_heads * per_head
    buffers = B * slots * 8 + (B * 5 + 8) * config.vocab_size + rotary + RING * B * 2 * (D + 2) * 8
    wide = max(config.hidden_size, config.intermediate_size, config.vocab_size)
    captured = options.compile and COMPILE_MODES[options.compile_mode][2]
    # six fp32 rows per node are alive at once
    graphs = 6 * 4 * B * N * wide if captured and device == "cuda" else 0
    head_bytes = draft_kv = 0
    if head is not None:
        layer = head.config.layer
        draft_row = 2 * layer.num_key_value_heads * layer.head_dim * element
        draft_kv = B * (slots + 128) * draft_row
        head_bytes = held_bytes(head.tensors, dtype, device, options.kernels)
        # rows of the target's LM head, ids
        head_bytes += options.draft_vocab * (config.hidden_size * element + 8)
        kept = D + 1 + (0 if options.eagle_always else HISTORY + 1)
        buffers += B * kept * max(1, len(head.config.taps)) * config.hidden_size * element
        buffers += 4 * ctx * layer.head_dim
    if draft is not None:
        small = _quantized_tensors(Path(options.draft_checkpoint)) if options.draft_checkpoint else 0
        head_bytes = held(draft, small)
        draft_row = 2 * draft.num_key_value_heads * draft.head_dim * draft.num_hidden_layers * element
        draft_kv = B * (slots + 128) * draft_row
    if options.medusa:
        files = [Path(options.medusa)] if Path(options.medusa).is_file() else Path(options.medusa).glob("*")
        head_bytes = sum(file.stat().st_size for file in files)
    if options.drafter == "lookahead":
        buffers += B * config.vocab_size * (N - 1) // 2 * 4
    kv = B * slots * row * config.num_hidden_layers + draft_kv
    return MemoryPlan(weights, head_bytes, kv, buffers, graphs)


def check_memory(plan: MemoryPlan, free: int, options: LoadOptions, config: ModelConfig) -> None:
    """UserError(4) naming the smallest change that fits, before anything is allocated."""
    if plan.total <= free:
        return
    ctx = options.ctx or config.max_positions
    per_token = plan.kv / ctx
    fits = int(ctx - (plan.total - free) / per_token) if per_token else 0
    hint = "Use a quantized model (quantize.py) or a larger device."
    if options.kv != "int8" and plan.total - free < 0.4 * plan.kv:
        hint = "Try --kv int8."
    elif fits >= 256:
        hint = f"Try --ctx {fits // 64 * 64}."
    elif options.batch_size > 1:
        hint = f"Try --batch-size {options.batch_size // 2}."
    raise NotEnoughMemory(f"not enough memory: plan {size_text(plan.total)}, free {size_text(free)}. {hint}")


def load(
    checkpoint_dir: str | Path = DEMO,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> Engine:
    """Build an Engine from a model directory and, with `eagle=`, a draft head.

    Keyword options are the fields of LoadOptions. `progress(done, total, name)` is called while weights stream in;
    `report(line)` gets notes (what was assumed about a bare head, the memory plan). Raises ValueError in one line.
    """
    opts = LoadOptions(checkpoint=str(checkpoint_dir), **options)
    return _load(opts, progress, report or (lambda line: None))


def _load(opts: LoadOptions, progress, report: Callable[[str], None]) -> Engine:
    check_options(opts)
    device = torch.device(opts.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but this torch sees no CUDA device. Use --device cpu.")
    tuned, note = read_tuned(torch.cuda.get_device_name(device)) if device.type == "cuda" else ({}, "")
    backend = kernels.KernelBackend(opts.kernels, device.type, tuned)
    if note:
        report(f"note    {note}")
    try:
        directory = Path(opts.checkpoint)
        config = load_config(directory)
        tokenizer = load_tokenizer(directory, config.vocab_size)
        pairs = dict(item.split("=", 1) for item in opts.eagle_config)
        kind = drafter_kind(opts)
        head_file = read_eagle(opts.eagle, config, pairs) if opts.eagle else None
        draft = load_config(opts.draft_checkpoint) if opts.draft_checkpoint else None
        if draft is not None:
            others = load_tokenizer(opts.draft_checkpoint, draft.vocab_size)
            check_vocabulary(config, draft, (tokenizer, others))
    except UserError:
        raise
    except ValueError as error:
        raise BadFileError(str(error)) from error
    if opts.tree == "auto":
        opts = replace(opts, tree=find_tuned_tree(opts, config, head_file, device))
    if opts.dtype is None:  # half precision is slow on CPUs without native support for it
        opts = replace(opts, dtype="float32" if device.type == "cpu" else config.dtype)
    if opts.ctx is None:
        opts = replace(opts, ctx=min(config.max_positions, 8192))
    if opts.ctx > config.max_positions:
        raise UsageError(f"--ctx is {opts.ctx:,}; this model's limit is {config.max_positions:,}.")
    plan = plan_memory(config, opts, head_file, _quantized_tensors(directory), draft)
    check_memory(plan, free_memory(device), opts, config)
    for note in head_file.notes if head_file else ():
        report(f"note    {note}")
    try:
        dtype = DTYPES[opts.dtype]
        model = load_model(directory, device, dtype, progress, max_positions=opts.ctx)
        head = build_head(head_file, model, draft_vocabulary(opts, config, tokenizer)) if head_file else None
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise NotEnoughMemory(
            f"out of memory while loading ({size_text(plan.total)} planned): {error}"
        ) from error
    except ValueError as error:
        raise BadFileError(str(error)) from error
    with backend.active():  # linears are packed for one backend, and before anything is traced
        for module in (model, head) if head else (model,):
            pack_(module, model.dtype)
        drafter = build_drafter(model, head, opts) if kind else None
    if opts.compile:
        folder, found = use(describe_device(device))
        report(
            f"compile {folder} ({found}); one block is compiled per width, prompts and settings compile nothing"
        )
    how = {"compile": opts.compile, "compile_mode": opts.compile_mode, "eagle_always": opts.eagle_always}
    how["kv_dtype"] = torch.int8 if opts.kv == "int8" else None
    engine = Engine(model, tokenizer, drafter, opts.batch_size, ctx=opts.ctx, backend=backend, **how)
    engine.options, engine.plan, engine.head = opts, plan, head
    trained = head.config.layer if head else draft
    if trained is not None and trained.max_position_embeddings < opts.ctx:
        limit = trained.max_position_embeddings
        report(
            f"note    this drafter was trained to {limit:,} positions; past them expect fewer accepted tokens."
        )
    return engine


def tuned_tree_path(opts: LoadOptions, config: ModelConfig, head: EagleFile, device: torch.device) -> Path:
    """Where the tree tuned for this (device, model, head, quantization, dtype, compilation) lies, if it is there:
    `python -m scripts.tune_tree` writes it, `--tree auto` reads it. In $EAGLET_CACHE, or else in ~/.cache/eaglet."""
    file = Path(opts.checkpoint) / "config.json"
    raw = read_json(file) if file.exists() else {}
    quant = json.dumps([raw.get(key) for key in ("eaglet_quant", "quantization_config")], sort_keys=True)
    dtype = opts.dtype or ("float32" if device.type == "cpu" else config.dtype)
    vocabulary = (opts.draft_vocab, opts.draft_vocab_text)
    how = (dtype, opts.compile and opts.compile_mode, opts.kv)
    digest = hashlib.sha256(repr((config, head.config, quant, vocabulary, how)).encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.flatten()[:64].tolist()}".encode())
    machine = re.sub(r"[^A-Za-z0-9]+", "-", describe_device(device)).strip("-")
    return cache_folder() / "trees" / f"{machine}-{digest.hexdigest()[:16]}.json"


def find_tuned_tree(opts: LoadOptions, config: ModelConfig, head, device: torch.device) -> str:
    """The file that `--tree auto` stands for; UserError naming the command that makes it."""
    if head is None:
        raise UsageError("--tree auto looks up the tree tuned for a draft head; it needs --eagle HEAD.")
    path = tuned_tree_path(opts, config, head, device)
    if not path.exists():
        command = f"python -m scripts.tune_tree --checkpoint {opts.checkpoint} --eagle {opts.eagle}"
        command += f" --draft-vocab {opts.draft_vocab}" if opts.draft_vocab else ""
        command += f" --draft-vocab-text {opts.draft_vocab_text}" if opts.draft_vocab_text else ""
        command += f" --dtype {opts.dtype}" if opts.dtype else ""
        command += " --compile" if opts.compile else ""
        where = f"this model, head and device ({describe_device(device)})"
        raise UsageError(f"--tree auto: no tree was tuned for {where}. Run: {command}")
    return str(path)


def _quantized_tensors(directory: Path) -> dict[str, Entry]:
    """The stored tensors of a quantized model, unread, for `plan_memory` to count; {} for any other directory."""
    config = read_json(directory / "config.json") if (directory / "config.json").exists() else {}
    if config.get("eaglet_quant") or config.get("quantization_config"):
        return _read(read_entries, _read(tensor_files, directory))
    return {}


def draft_vocabulary(opts: LoadOptions, config: ModelConfig, tokenizer) -> torch.Tensor | None:
    """Sorted ids of the K tokens a trimmed head may draft (FR-Spec), or None: the most frequent of a text.

    Tokens that the text does not hold, and all without a text, follow in an order that the tokenizer alone gives: stop
    ids (a draft must be able to end), single characters (at most K / 4 here), longer pieces by merge rank, which follows
    frequency, then the characters left over, control tokens and fallback bytes. By id alone a sentencepiece model would
    lose `,` and `(`: it numbers its characters last. Without a tokenizer: stop ids, then the first ids."""
    K, V = opts.draft_vocab, config.vocab_size
    if not K:
        return None
    if not 1 <= K <= V:
        raise ValueError(f"--draft-vocab is {K}; allowed: 1 to {V}.")
    if tokenizer is None:
        if opts.draft_vocab_text is not None:
            raise ValueError("--draft-vocab-text needs a tokenizer, and this checkpoint has none.")
        return torch.tensor(list(dict.fromkeys((*config.eos_token_ids, *range(V))))[:K]).sort().values
    texts = [tokenizer.decode([i], skip_special=False, continuation=True) for i in range(V)]
    # a fallback byte spells what a character spells too (the character is used), or half of one (U+FFFD)
    used = {text: i for i, text in enumerate(texts)}
    seen = [t.isprintable() and t != "\ufffd" or t in "\n\t" for t in texts]
    singles = [i for i, t in enumerate(texts) if len(t) == 1 and seen[i] and used[t] == i]
    merged = [i for i, t in enumerate(texts) if len(t) > 1 and i not in tokenizer.special_ids]
    order = [*tokenizer.eos_ids, *singles[: K // 4], *merged, *singles, *range(V)]
    order = torch.tensor(list(dict.fromkeys(order)))
    counts = torch.zeros(V, dtype=torch.int64)
    if opts.draft_vocab_text is not None:
        try:
            text = Path(opts.draft_vocab_text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--draft-vocab-text {opts.draft_vocab_text}: {error}") from error
        counts = torch.bincount(torch.tensor(tokenizer.encode(text), dtype=torch.int64), minlength=V)
        counts[list(tokenizer.eos_ids)] = counts.max() + 1
    return order[counts[order].sort(descending=True, stable=True).indices[:K]].sort().values


def build_head(file: EagleFile, model: Transformer, ids: torch.Tensor | None = None) -> EagleHead:
    """An EagleHead on the model's device and dtype, its tensors loaded strictly. ids: a trimmed draft vocabulary."""
    if ids is not None and file.config.version != 1:
        raise ValueError(
            "--draft-vocab trims EAGLE-1/2 heads; an EAGLE-3 head brings its own draft vocabulary."
        )
    ids = file.tensors.get("draft_ids") if ids is None else ids
    with torch.device("meta"):
        head = EagleHead(file.config, model, ids).eval().requires_grad_(False)
    head.to(dtype=model.dtype).to_empty(device=model.device)
    tensors = {name: t.to(model.device) for name, t in file.tensors.items()}
    if ids is not None:
        tensors["draft_ids"] = ids.to(model.device, torch.int64)
        head.draft_ids = head.draft_ids.to(torch.int64)
    # a quantized head stores codes and scales where a plain one stores a weight
    stored = {
        name.removesuffix(".qweight") + ".weight" if name.endswith(".qweight") else name for name in tensors
    }
    stored -= {name for name in stored if name.endswith((".scales", ".zeros", ".perm"))}
    if wrong := stored ^ set(head.state_dict()):
        raise ValueError(f"the head's tensors do not match its config: {', '.join(sorted(wrong)[:3])}.")
    if stored == set(tensors):
        head.load_state_dict(tensors, strict=True)
    else:
        adopt_(head, tensors, model.device, model.dtype)
    head.rotary.build(model.device, model.rotary.length)
    head.trim()
    return head


def build_drafter(model: Transformer, head: EagleHead | None, opts: LoadOptions):
    """The drafter that the options ask for (a draft LLM and Medusa heads are read here); head: for an EAGLE drafter.
    Call it with the kernel backend active.

    A batch may have one static tree per sequence. The tree of n-gram drafters is as large and deep as --tree says."""
    kind, B = drafter_kind(opts), opts.batch_size
    rule = {"match": "", "multi-round": "without", "multi-round-replacement": "with"}[opts.verify]
    specs = [opts.tree] if isinstance(opts.tree, str) else list(opts.tree)
    parsed = [named_tree(spec) for spec in specs]
    if len(parsed) not in (1, B):
        raise ValueError(f"{len(parsed)} trees for a batch of {B}; give one tree, or one per sequence.")
    if any(isinstance(t, DynamicTree) for t in parsed):
        if len(set(parsed)) > 1:
            raise ValueError("trees of a batch must all be static, or all the same dynamic tree.")
        tree: Any = parsed[0]
    else:
        tree = tree_tables(parsed * B if len(parsed) == 1 else parsed, model.device)
    how = (tree, B, opts.ctx + tree_shape(opts)[0] + 1, opts.draft_noise, rule)
    if kind == "ngram":
        drafter: Any = NGramDrafter(model, tree.N, tree.D)
    elif kind == "lookahead":
        drafter = LookaheadDrafter(model, B)
    elif kind == "medusa":
        drafter = MedusaDrafter(_read(load_medusa, opts.medusa, model), tree, opts.draft_noise)
    elif kind == "draft":
        where = (model.device, model.dtype, None, opts.ctx)
        small = _read(load_model, opts.draft_checkpoint, *where)
        pack_(small, small.dtype)
        drafter = DraftModelDrafter(model, small, *how)
    else:
        drafter = eagle_drafter(head, *how)
    return WithNGrams(drafter, opts.ngram_nodes) if opts.ngram_nodes else drafter


def _read(reader: Callable, *arguments: Any) -> Any:
    try:
        return reader(*arguments)
    except ValueError as error:
        raise BadFileError(str(error)) from error
