"""Load a model (and a draft head) and decode: the Python API `load` and the command line that uses it.

    python generate.py                                              # the demo model continues a built-in prompt
    python generate.py --checkpoint DIR --eagle HEAD --compile -p "Why is the sky blue?"
    python generate.py --checkpoint DIR --chat

    from generate import load
    engine = load("demo", eagle="demo/eagle1")
    for chunk in engine.generate(prompt_ids, SamplingParams(max_new_tokens=100)): ...

The text goes to stdout, the report to stderr. Exit codes: 2 usage, 3 bad file, 4 memory, 5 internal, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import artefacts
import checkpoint
import kernels
import quantize
import tree as trees
from drafters import (
    DraftModelDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    NGramDrafter,
    WithNGrams,
    check_vocabulary,
    eagle_drafter,
    load_medusa,
    named_tree,
)
from eagle_draft import EagleHead
from engine import COMPILE_MODES, HISTORY, Engine, PlainDrafter
from model import DTYPES, ModelConfig, Transformer
from results import GenerationResult
from runner import RING
from sampling import SamplingParams
from tokenizer import load_tokenizer

DEMO = Path(__file__).resolve().parent / "demo"
DEMO_PROMPT = '''def read_file(filename):
    """Return the contents of a file."""
    with open(filename) as f:
'''
DRAFTERS = ("eagle", "ngram", "lookahead", "draft", "medusa")
VERIFY = ("match", "multi-round", "multi-round-replacement")
TIE_ULPS = 2  # forks with a smaller margin are rounding (DESIGN section 4)
USAGE, BAD_FILE, MEMORY, INTERNAL, INTERRUPTED = 2, 3, 4, 5, 130


class UserError(ValueError):
    """A one-line message for the user and the exit code that goes with it."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


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
            raise UserError(f"--{name.replace('_', '-')} is {value!r:.40}; allowed: {names}.", USAGE)
    for name, least in (("batch_size", 1), ("ctx", 2), ("ngram_nodes", 0), ("draft_vocab", 0)):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UserError(f"--{name.replace('_', '-')} is {value!r:.40}; allowed: {least} or more.", USAGE)
    kind = drafter_kind(options)
    ignored = {
        "--eagle-config": options.eagle_config and kind != "eagle",
        "--draft-vocab": options.draft_vocab and kind != "eagle",
        "--verify": options.verify != "match" and not kind,
        "--draft-noise off": not options.draft_noise and not kind,
    }
    for flag in (flag for flag, wrong in ignored.items() if wrong):
        raise UserError(f"{flag} is about a draft head, and none was given (--eagle HEAD).", USAGE)
    if options.draft_vocab_text and not options.draft_vocab:
        raise UserError("--draft-vocab-text needs --draft-vocab K, the number of tokens to keep.", USAGE)


def drafter_kind(options: LoadOptions) -> str:
    """Which drafter the options ask for: one of DRAFTERS, or '' for plain decoding. UserError where they disagree."""
    flags = {"eagle": "--eagle HEAD", "draft": "--draft-checkpoint DIR", "medusa": "--medusa FILE"}
    given = [
        k for k, v in zip(flags, (options.eagle, options.draft_checkpoint, options.medusa), strict=True) if v
    ]
    kind = options.drafter or (given[0] if given else "")
    if extra := [k for k in given if k != kind]:
        raise UserError(f"{flags[extra[0]]} does not go with the drafter {kind}; give one of them.", USAGE)
    if kind in flags and not given:
        raise UserError(f"--drafter {kind} needs {flags[kind]}.", USAGE)
    if kind not in ("eagle", "draft", "") and options.verify != "match":
        raise UserError(f"--verify {options.verify} needs a draft distribution; {kind} has none.", USAGE)
    if options.ngram_nodes and kind in ("", "ngram"):
        raise UserError(
            "--ngram-nodes adds to another drafter's tree; n-grams alone: --drafter ngram.", USAGE
        )
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
        return f"{size(self.total)}: " + "  ".join(f"{k} {size(v)}" for k, v in parts.items() if v)


def size(count: float) -> str:
    """Bytes for people, decimal units."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


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
            return quantize.held_bytes(stored, dtype, device, options.kernels)
        return sum(p.numel() for p in checkpoint.build_model(geometry).parameters()) * element

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
        head_bytes = quantize.held_bytes(head.tensors, dtype, device, options.kernels)
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


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # counts what the page cache would give back, for example a checkpoint just read
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    raise UserError(f"not enough memory: plan {size(plan.total)}, free {size(free)}. {hint}", MEMORY)


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
        raise UserError("--device cuda, but this torch sees no CUDA device. Use --device cpu.", USAGE)
    tuned, note = (
        quantize.read_tuned(torch.cuda.get_device_name(device)) if device.type == "cuda" else ({}, "")
    )
    backend = kernels.KernelBackend(opts.kernels, device.type, tuned)
    if note:
        report(f"note    {note}")
    try:
        directory = Path(opts.checkpoint)
        config = checkpoint.load_config(directory)
        tokenizer = load_tokenizer(directory, config.vocab_size)
        pairs = dict(item.split("=", 1) for item in opts.eagle_config)
        kind = drafter_kind(opts)
        head_file = checkpoint.read_eagle(opts.eagle, config, pairs) if opts.eagle else None
        draft = checkpoint.load_config(opts.draft_checkpoint) if opts.draft_checkpoint else None
        if draft is not None:
            others = load_tokenizer(opts.draft_checkpoint, draft.vocab_size)
            check_vocabulary(config, draft, (tokenizer, others))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error), BAD_FILE) from error
    if opts.tree == "auto":
        opts = replace(opts, tree=find_tuned_tree(opts, config, head_file, device))
    if opts.dtype is None:  # half precision is slow on CPUs without native support for it
        opts = replace(opts, dtype="float32" if device.type == "cpu" else config.dtype)
    if opts.ctx is None:
        opts = replace(opts, ctx=min(config.max_positions, 8192))
    if opts.ctx > config.max_positions:
        raise UserError(f"--ctx is {opts.ctx:,}; this model's limit is {config.max_positions:,}.", USAGE)
    plan = plan_memory(config, opts, head_file, _quantized_tensors(directory), draft)
    check_memory(plan, free_memory(device), opts, config)
    for note in head_file.notes if head_file else ():
        report(f"note    {note}")
    try:
        dtype = DTYPES[opts.dtype]
        model = checkpoint.load_model(directory, device, dtype, progress, max_positions=opts.ctx)
        head = build_head(head_file, model, draft_vocabulary(opts, config, tokenizer)) if head_file else None
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(
            f"out of memory while loading ({size(plan.total)} planned): {error}", MEMORY
        ) from error
    except ValueError as error:
        raise UserError(str(error), BAD_FILE) from error
    with backend.active():  # linears are packed for one backend, and before anything is traced
        for module in (model, head) if head else (model,):
            quantize.pack_(module, model.dtype)
        drafter = build_drafter(model, head, opts) if kind else None
    if opts.compile:
        folder, found = artefacts.use(describe_device(device))
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


def tuned_tree_path(
    opts: LoadOptions, config: ModelConfig, head: checkpoint.EagleFile, device: torch.device
) -> Path:
    """Where the tree tuned for this (device, model, head, quantization, dtype, compilation) lies, if it is there:
    `python -m scripts.tune_tree` writes it, `--tree auto` reads it. In $EAGLET_CACHE, or else in ~/.cache/eaglet."""
    file = Path(opts.checkpoint) / "config.json"
    raw = checkpoint.read_json(file) if file.exists() else {}
    quant = json.dumps([raw.get(key) for key in ("eaglet_quant", "quantization_config")], sort_keys=True)
    dtype = opts.dtype or ("float32" if device.type == "cpu" else config.dtype)
    vocabulary = (opts.draft_vocab, opts.draft_vocab_text)
    how = (dtype, opts.compile and opts.compile_mode, opts.kv)
    digest = hashlib.sha256(repr((config, head.config, quant, vocabulary, how)).encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.flatten()[:64].tolist()}".encode())
    machine = re.sub(r"[^A-Za-z0-9]+", "-", describe_device(device)).strip("-")
    return artefacts.cache() / "trees" / f"{machine}-{digest.hexdigest()[:16]}.json"


def find_tuned_tree(opts: LoadOptions, config: ModelConfig, head, device: torch.device) -> str:
    """The file that `--tree auto` stands for; UserError naming the command that makes it."""
    if head is None:
        raise UserError("--tree auto looks up the tree tuned for a draft head; it needs --eagle HEAD.", USAGE)
    path = tuned_tree_path(opts, config, head, device)
    if not path.exists():
        command = f"python -m scripts.tune_tree --checkpoint {opts.checkpoint} --eagle {opts.eagle}"
        command += f" --draft-vocab {opts.draft_vocab}" if opts.draft_vocab else ""
        command += f" --draft-vocab-text {opts.draft_vocab_text}" if opts.draft_vocab_text else ""
        command += f" --dtype {opts.dtype}" if opts.dtype else ""
        command += " --compile" if opts.compile else ""
        where = f"this model, head and device ({describe_device(device)})"
        raise UserError(f"--tree auto: no tree was tuned for {where}. Run: {command}", USAGE)
    return str(path)


def _quantized_tensors(directory: Path) -> dict[str, checkpoint.Entry]:
    """The stored tensors of a quantized model, unread, for `plan_memory` to count; {} for any other directory."""
    config = checkpoint.read_json(directory / "config.json") if (directory / "config.json").exists() else {}
    if config.get("eaglet_quant") or config.get("quantization_config"):
        return _read(checkpoint.read_entries, _read(checkpoint.tensor_files, directory))
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


def build_head(file: checkpoint.EagleFile, model: Transformer, ids: torch.Tensor | None = None) -> EagleHead:
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
        quantize.adopt_(head, tensors, model.device, model.dtype)
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
    if any(isinstance(t, trees.DynamicTree) for t in parsed):
        if len(set(parsed)) > 1:
            raise ValueError("trees of a batch must all be static, or all the same dynamic tree.")
        tree: Any = parsed[0]
    else:
        tree = trees.tree_tables(parsed * B if len(parsed) == 1 else parsed, model.device)
    how = (tree, B, opts.ctx + tree_shape(opts)[0] + 1, opts.draft_noise, rule)
    if kind == "ngram":
        drafter: Any = NGramDrafter(model, tree.N, tree.D)
    elif kind == "lookahead":
        drafter = LookaheadDrafter(model, B)
    elif kind == "medusa":
        drafter = MedusaDrafter(_read(load_medusa, opts.medusa, model), tree, opts.draft_noise)
    elif kind == "draft":
        where = (model.device, model.dtype, None, opts.ctx)
        small = _read(checkpoint.load_model, opts.draft_checkpoint, *where)
        quantize.pack_(small, small.dtype)
        drafter = DraftModelDrafter(model, small, *how)
    else:
        drafter = eagle_drafter(head, *how)
    return WithNGrams(drafter, opts.ngram_nodes) if opts.ngram_nodes else drafter


def _read(reader: Callable, *arguments: Any) -> Any:
    try:
        return reader(*arguments)
    except ValueError as error:
        raise UserError(str(error), BAD_FILE) from error


def prove(engine: Engine, prompts: list[list[int]], params: SamplingParams, results: list[GenerationResult]):
    """Replay without the drafter; returns (identical tokens, total tokens, None or (row, index, margin, margin in ulp)).

    On the GPU the replay keeps the width of the forward (one live node, the rest padding) and its kernels, so equality
    is bitwise; elsewhere forwards of other widths round differently, so a fork at a near-tie is possible and its margin
    says so.
    """
    width = engine.drafter.N if engine.model.device.type == "cuda" else 1
    drafter = PlainDrafter(engine.model, engine.batch_size, width)
    plain = Engine(
        engine.model,
        engine.tokenizer,
        drafter,
        engine.batch_size,
        engine.ctx,
        engine.compiled,
        engine.backend,
        compile_mode=engine.compile_mode,
        kv_dtype=engine.kv_dtype,
    )
    replayed = plain.generate_batch(prompts, params).run()
    same = total = 0
    fork = None
    for b, (ours, theirs) in enumerate(zip(results, replayed, strict=True)):
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=False))
        agree = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        same, total = same + agree, total + len(ours.token_ids)
        if agree < max(len(ours.token_ids), len(theirs.token_ids)) and fork is None:
            margin: tuple[float, float] = (float("inf"), float("inf"))
            if agree < len(pairs):
                text = prompts[b] + ours.token_ids[:agree]
                margin = plain.margin(b, text, len(prompts[b]), params, *pairs[agree])
            fork = (b, agree, *margin)
    return same, total, fork


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes per second (read + write) of a large copy: the ceiling that the report's shares refer to."""
    count = (1 << 28) if device.type == "cuda" else (1 << 24)
    source = torch.zeros(count, dtype=torch.float32, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - started))
    return best


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [line for line in _cpuinfo() if line.startswith("model name")]
    name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


def result_json(engine: Engine, results: list[GenerationResult]) -> dict[str, Any]:
    """The object `--json` prints: row 0 at the top level, all rows under "batch" when there are several."""
    opts = engine.options
    shared = {
        "checkpoint": opts.checkpoint,
        "quant": getattr(engine.model, "quant", None) or "none",
        "dtype": opts.dtype,
        "device": describe_device(engine.model.device),
        "drafter": drafter_kind(opts) or None,
        "tree": opts.tree if drafter_kind(opts) else None,
        "eagle": opts.eagle,
        "draft_checkpoint": opts.draft_checkpoint,
        "medusa": opts.medusa,
        "ngram_nodes": opts.ngram_nodes,
        "verify": opts.verify if drafter_kind(opts) else None,
        "kernels": engine.backend.describe(),
        "compile": opts.compile,
        "compile_mode": opts.compile_mode if opts.compile else None,
        "break_even_tau": engine.break_even_tau or None,
        "compile_seconds": engine.compile_seconds if opts.compile else None,
        "graphs_reused": compiled_graphs()[0] if opts.compile else None,
        "graphs_compiled": compiled_graphs()[1] if opts.compile else None,
        "peak_memory_bytes": peak_memory(engine.model.device),
        "versions": versions(),
    }
    rows = [r.to_dict() for r in results]
    return rows[0] | shared | ({"batch": rows} if len(rows) > 1 else {})


def compiled_graphs() -> tuple[int, int]:
    """(reused, compiled) by this process so far."""
    return artefacts.tally(torch._dynamo.utils.counters)


class Report:
    """The lines on stderr. Colours only on a terminal, and never under NO_COLOR."""

    def __init__(self, quiet: bool):
        self.quiet = quiet
        self.live = sys.stderr.isatty() and not quiet
        self.bandwidth = 0.0

    def line(self, text: str = "") -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int, name: str) -> None:
        if self.live and total > 50e6:
            end = "\r" if done < total else "\r\033[K"
            print(
                f"loading {done / total:4.0%}  {size(done)} of {size(total)}",
                end=end,
                file=sys.stderr,
                flush=True,
            )

    def head(self, engine: Engine, seconds: float) -> None:
        opts, model = engine.options, engine.model
        quant = getattr(model, "quant", None)
        head = ""
        if engine.head:
            trimmed = f" vocabulary {engine.head.vocab_size:,}" if engine.head.draft_ids is not None else ""
            head = f"   head EAGLE-{engine.head.config.version}  {size(engine.plan.head)}{trimmed}  tree {opts.tree}"
        elif kind := drafter_kind(opts):
            weights = f"  {size(engine.plan.head)}" if engine.plan.head else ""
            head = f"   drafter {kind}{weights}  N {engine.drafter.N}  D {engine.drafter.D}"
        template = engine.tokenizer.chat_template_source if engine.tokenizer else "no tokenizer"
        name = Path(opts.checkpoint).name or opts.checkpoint
        what = f"{quant}  {opts.dtype}" if quant else opts.dtype
        extra = f"   template: {template}" if template else ""
        self.line(f"model   {name}   {what}   {size(engine.plan.weights)}{head}   ctx {engine.ctx}{extra}")
        self.line(
            f"device  {describe_device(model.device)}     plan {engine.plan}   loaded in {seconds:.1f} s"
        )

    def tail(self, engine: Engine, results: list[GenerationResult], params: SamplingParams) -> None:
        if self.quiet:
            return
        model, r = engine.model, results[0]
        peak = peak_memory(model.device)  # before the copy below adds its buffers
        self.bandwidth = self.bandwidth or measure_copy_bandwidth(model.device)
        cached = f"  ({r.cached_tokens} cached)" if r.cached_tokens else ""
        fresh = r.prompt_tokens - r.cached_tokens
        self.line()
        for r in results:
            if r.prefill_seconds > 0:
                rate = fresh / r.prefill_seconds
                ms = r.prefill_seconds * 1e3
                self.line(f"prompt   {r.prompt_tokens:5d} tok  {ms:8.0f} ms  {rate:8.1f} tok/s{cached}")
            seconds, rate = r.decode_seconds, r.tokens_per_second
            self.line(
                f"generate {r.new_tokens:5d} tok  {seconds:8.2f} s   {rate:8.1f} tok/s   {r.steps} steps"
            )
        r = results[0]
        if engine.drafter.D > 0 and r.steps:
            depth = " ".join(f"{share:.2f}"[1:] if share < 1 else "1.0" for share in r.accepted_by_depth)
            which = f" over {len(r.drafted)} of {r.steps} steps" if r.plain_steps else ""
            self.line(
                f"accepted tau {r.tau:.2f} tokens/step{which}   by depth {depth or '-'} (1 + sum = tau)"
            )
            if r.n_alpha:
                alphas = "  ".join(f"{k}-alpha {a:.2f}" for k, a in enumerate(r.n_alpha))
                self.line(f"         {alphas}")
        if engine.step_seconds:
            plain, speculative = (seconds * 1e3 for seconds in engine.step_seconds)
            went = f"   {r.plain_tokens} tokens decoded plainly" if r.plain_tokens else ""
            self.line(
                f"pays at  break-even tau {engine.break_even_tau:.2f} (plain {plain:.1f} ms, speculative "
                f"{speculative:.1f} ms){went}"
            )
        elif engine.drafter.D > 0 and engine.always_on != "asked for":
            self.line(f"pays at  not measured, speculation stays on: {engine.always_on}")
        if r.steps:
            context = r.prompt_tokens + r.new_tokens // 2
            kv = engine.state.kv
            cached = kv.shape[-1] * kv.element_size() / model.config.head_dim  # bytes per key or value
            kinds = {engine.drafter: len(r.drafted), engine.fallback: len(r.plain_steps)}
            moved = r.steps * engine.batch_size * model.kv_bytes(context, cached)
            for drafter, steps in kinds.items():
                if steps:
                    moved += steps * model.weight_bytes(drafter.N * engine.batch_size)
                    moved += steps * drafter.bytes_per_step(model) if drafter.D > 0 else 0
            moved /= r.steps
            share = moved * r.steps / r.decode_seconds / self.bandwidth
            per_step = r.decode_seconds / r.steps * 1e3
            self.line(
                f"speed    {bar(share)} {share:.0%} of the {self.bandwidth / 1e9:.0f} GB/s measured for a copy   "
                f"{per_step:.2f} ms/step, {size(moved)} read"
            )
        whose = " of the process, torch included" if model.device.type == "cpu" else ""
        self.line(f"memory   peak {size(peak)}{whose} (plan {size(engine.plan.total)})")
        self.line(f"kernels  {engine.backend.report()}")
        settings = [f"seed {params.seed}", f"T {params.temperature:g}"]
        defaults = SamplingParams()
        for name in (
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            if getattr(params, name) != getattr(defaults, name):
                settings.append(f"{name.replace('_', '-')} {getattr(params, name):g}")
        settings += [f"stop {text!r}" for text in params.stop]
        settings += [f"stop-ids {','.join(map(str, params.stop_ids))}"] * bool(params.stop_ids)
        settings += [f"kv {engine.options.kv}"] * (engine.options.kv != "model")
        if engine.drafter.D > 0:
            noise = "" if engine.options.draft_noise else "  draft-noise off"
            settings.append(f"verify {engine.options.verify}{noise}")
        if engine.compiled:
            reused, new = compiled_graphs()
            why = "" if not new else " (a shape, option or source that this folder had not seen)"
            took = f"in {engine.compile_seconds:.1f} s, before decoding"
            self.line(f"compiled {took}: {reused} graphs reused, {new} compiled{why}")
        self.line(f"stop     {', '.join(r.stop_reason for r in results)}        {'  '.join(settings)}")


def cache_command(what: str) -> int:
    """--cache show | clear: the compiled artefacts, never anything else."""
    found = artefacts.entries() if what == "show" else artefacts.clear()
    for entry in found:
        print(f"{entry.key}  {entry.files:,} files  {size(entry.bytes)}")
    total = f"{len(found)} entries, {size(sum(entry.bytes for entry in found))}"
    print(f"{artefacts.root()}: {total}{' deleted' if what == 'clear' else ''}")
    return 0


def bar(share: float, width: int = 32) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "#" * full + "." * (width - full)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", default=str(DEMO), metavar="DIR", help="model directory (default: the embedded demo)")
    add("-p", "--prompt", help="text to continue")
    add("--prompt-ids", metavar="5,17,9", help="token ids to continue; needs no tokenizer")
    add("--prompt-file", metavar="FILE", help="continue the text of a file")
    add("--chat", action="store_true", help="interactive chat; keeps history and the cache between turns")
    add("--system", help="system message of the chat")
    add(
        "--template",
        metavar="NAME",
        help="chat template: vicuna, llama-2-chat, mixtral, or one the model names",
    )
    add("--max-new-tokens", type=int, default=200)
    add("--temperature", type=float, default=0.0)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--presence-penalty", type=float, default=0.0)
    add("--frequency-penalty", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--stop", action="append", default=[], metavar="TEXT", help="stop string (repeatable)")
    add("--stop-ids", default="", metavar="2,13", help="stop ids instead of the model's own")
    add("--batch-size", type=int, default=1, help="continue the prompt B times, with seeds seed .. seed+B-1")
    add("--ctx", type=int, help="context to allocate (default: the model's, at most 8192)")
    add("--device", choices=("cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES), help="default: the checkpoint's; float32 on a CPU")
    add("--compile", action="store_true", help="compile the step (and on a GPU capture it as one CUDA graph)")
    add(
        "--compile-mode",
        default="graph",
        choices=tuple(COMPILE_MODES),
        help="graph: one block for all layers compiled, the step captured whole on a GPU; max-autotune: the same with "
        "measured tilings; capture: captured, not compiled; regions: compiled, not captured; for comparison the whole "
        "step in one piece: inductor, reduce-overhead",
    )
    add("--gauge", action="store_true", help="time the phases of a step: draft, verify, accept, host")
    add("--cache", choices=("show", "clear"), help="list or delete what --compile has kept, and leave")
    add("--kernels", default="auto", choices=("auto", "triton", "reference"))
    add("--kv", default="model", choices=("model", "int8"), help="int8: halve (fp32: quarter) the KV cache")
    spec = parser.add_argument_group("speculative decoding")
    add = spec.add_argument
    add("--eagle", metavar="HEAD", help="EAGLE-1/2/3 head: folder, .safetensors, .bin or .pth")
    add(
        "--eagle-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for a head without config.json",
    )
    add(
        "--drafter",
        default="",
        choices=DRAFTERS,
        help="default: what --eagle, --draft-checkpoint or --medusa names; n-grams need no file",
    )
    add("--draft-checkpoint", metavar="DIR", help="draft with a small LLM of the same vocabulary")
    add("--medusa", metavar="FILE", help="Medusa heads: medusa_lm_head.pt, .safetensors, or their folder")
    add(
        "--ngram-nodes",
        type=int,
        default=0,
        metavar="K",
        help="add K nodes found by n-gram lookup to the tree",
    )
    add(
        "--tree",
        default="paper25",
        help="auto (tuned by scripts.tune_tree) | paper25 | chain:K | dynamic:N,DEPTH,TOPK | FILE.json | "
        "medusa:vicuna_7b_stage2 | medusa:mc_sim_7b_63",
    )
    add(
        "--draft-vocab",
        type=int,
        default=0,
        metavar="K",
        help="EAGLE-1/2: draft only the K most frequent tokens",
    )
    add(
        "--draft-vocab-text",
        metavar="FILE",
        help="rank tokens by how often this text has them, not by the tokenizer alone",
    )
    add("--draft-noise", choices=("on", "off"), default="on", help="off: draft without the target's noise")
    add("--verify", default="match", choices=VERIFY)
    add(
        "--eagle-always",
        action="store_true",
        help="go on drafting where plain decoding would be faster (default: the request falls back and probes)",
    )
    add(
        "--prove",
        action="store_true",
        help="replay without the head and compare; exit 1 on a real difference",
    )
    add("--show-tree", action="store_true", help="colour accepted tokens by depth")
    add("--html", metavar="FILE", help="write a page that shows every step's tree")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text")
    out.add_argument("-q", "--quiet", action="store_true", help="no report")
    out.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def parse_ids(text: str, flag: str) -> tuple[int, ...]:
    """Comma-separated ids; UserError otherwise."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(
            f"{flag} {text!r:.60}: expected comma-separated integers, like 5,17,9.", USAGE
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows '?', and goes on
            stream.reconfigure(errors="replace")
    try:
        return _main(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (ValueError, ArithmeticError, torch.OutOfMemoryError, RuntimeError, OSError) as error:
        if args.debug:
            raise
        known = {ValueError: USAGE, ArithmeticError: INTERNAL, torch.OutOfMemoryError: MEMORY}
        code = getattr(error, "code", None) or known.get(type(error), INTERNAL)
        hint = "" if code != INTERNAL or isinstance(error, ArithmeticError) else " (--debug shows where)"
        print(f"error  {' '.join(str(error).split())}{hint}", file=sys.stderr)
        return code


def _main(args: argparse.Namespace) -> int:
    if args.cache:
        return cache_command(args.cache)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        stop_ids=parse_ids(args.stop_ids, "--stop-ids"),
        stop=tuple(args.stop),
    )
    if args.prove and args.verify != "match":
        raise UserError(
            "--prove compares tokens; --verify multi-round promises only the distribution.", USAGE
        )
    if args.prove and not (args.eagle or args.drafter or args.draft_checkpoint or args.medusa):
        raise UserError("--prove replays without the drafter; it needs one, like --eagle HEAD.", USAGE)
    given = [name for name in ("prompt", "prompt_ids", "prompt_file") if getattr(args, name) is not None]
    if len(given) > 1 or (args.chat and given):
        raise UserError("give one of --prompt, --prompt-ids, --prompt-file, --chat.", USAGE)
    once = {"--gauge": args.gauge, "--prove": args.prove, "--show-tree": args.show_tree, "--html": args.html}
    once |= {"--json": args.json, "--batch-size": args.batch_size > 1}
    if args.chat and (wrong := [flag for flag, given in once.items() if given]):
        raise UserError(f"{wrong[0]} is for one request; it does not go with --chat.", USAGE)
    if not args.chat and (args.template or args.system):
        raise UserError("--template and --system shape a chat; add --chat.", USAGE)
    if args.batch_size > 1 and (args.show_tree or args.html):
        raise UserError("--show-tree and --html show one sequence; use --batch-size 1.", USAGE)
    request = read_request(args)
    if any("=" not in item for item in args.eagle_config):
        raise UserError("--eagle-config takes KEY=VALUE, like rope_theta=500000.", USAGE)
    report = Report(args.quiet or args.json)
    started = time.perf_counter()
    engine = load(
        args.checkpoint,
        progress=report.progress,
        report=report.line,
        eagle=args.eagle,
        eagle_config=tuple(args.eagle_config),
        tree=args.tree,
        draft_vocab=args.draft_vocab,
        draft_vocab_text=args.draft_vocab_text,
        drafter=args.drafter,
        draft_checkpoint=args.draft_checkpoint,
        medusa=args.medusa,
        ngram_nodes=args.ngram_nodes,
        draft_noise=args.draft_noise == "on",
        verify=args.verify,
        batch_size=args.batch_size,
        ctx=args.ctx,
        device=args.device,
        dtype=args.dtype,
        compile=args.compile,
        compile_mode=args.compile_mode,
        eagle_always=args.eagle_always or args.prove or args.show_tree or bool(args.html) or args.gauge,
        kernels=args.kernels,
        kv=args.kv,
    )
    if args.template and engine.tokenizer:
        engine.tokenizer.use_template(args.template)
    report.head(engine, time.perf_counter() - started)
    if args.chat:
        return chat(engine, params, args, report)
    prompts = [prompt_ids(engine, request)] * args.batch_size
    return run_once(engine, prompts, params, args, report)


def read_request(args: argparse.Namespace) -> str | list[int]:
    """The text or ids to continue that the flags name, or the built-in text."""
    if args.prompt_ids is not None:
        return list(parse_ids(args.prompt_ids, "--prompt-ids"))
    if args.prompt_file is None:
        return DEMO_PROMPT if args.prompt is None else args.prompt
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt-file {args.prompt_file}: {error}", USAGE) from error


def prompt_ids(engine: Engine, text: str | list[int]) -> list[int]:
    """Ids of a request's prompt."""
    if isinstance(text, list):
        return text
    if engine.tokenizer is None:
        raise UserError(
            f"{engine.options.checkpoint} has no tokenizer files (tokenizer.json or tokenizer.model). Pass --prompt-ids.",
            BAD_FILE,
        )
    if len(text) > 16 * engine.ctx:  # tokenise no more than could ever fit
        raise UserError(
            f"the prompt has {len(text):,} characters, far more than ctx {engine.ctx:,} holds.", USAGE
        )
    return engine.tokenizer.encode(text)


def run_once(engine, prompts, params, args, report: Report) -> int:
    recorder = None
    if args.show_tree or args.html:
        from viewer import StepRecorder

        recorder = StepRecorder(engine)
        engine.observer = recorder
    gauge = None
    if args.gauge:
        from viewer import Gauge

        gauge = Gauge(engine)
    stream = engine.generate_batch(prompts, params)
    show = not args.json and engine.tokenizer is not None and not args.show_tree
    if show and args.prompt_ids is None:
        print(args.prompt if args.prompt is not None else "" if args.prompt_file else DEMO_PROMPT, end="")
    interrupted = False
    try:
        for chunk in stream:
            if show and args.batch_size == 1:
                print(chunk.text, end="", flush=True)
            elif not args.json and engine.tokenizer is None:
                print(*chunk.token_ids, sep=",", end=",", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    results = stream.results
    if args.json:
        slowest = max(results, key=lambda r: r.steps)
        measured = {"gauge_ms": gauge.split(slowest)} if gauge else {}
        print(json.dumps(result_json(engine, results) | measured))
    elif show and args.batch_size > 1:
        for b, result in enumerate(results):
            print(f"\n--- seed {params.seed + b} ---\n{result.text}", end="")
    if args.show_tree and recorder and not args.json:
        print(recorder.coloured(results[0]), end="")
    if not args.json:
        print(flush=True)
    report.tail(engine, results, params)
    if gauge:
        report.line(f"gauge    {gauge.line(max(results, key=lambda r: r.steps))}")
    if args.html and recorder:
        recorder.write_html(args.html, results[0])
        report.line(f"html     {args.html}")
    if interrupted:
        return INTERRUPTED
    return _prove(engine, prompts, params, results, report, args) if args.prove else 0


def _prove(engine, prompts, params, results, report: Report, args) -> int:
    same, total, fork = prove(engine, prompts, params, results)
    if fork is None:
        print(f"identical {same}/{total}", file=sys.stderr)
        return 0
    row, index, margin, ulps = fork
    tie = margin < 1e-4 or ulps <= TIE_ULPS
    verdict = "near-tie: rounding" if tie else "NOT a rounding tie: this is a bug"
    where = f"fork at token {index} of row {row}, {same}/{total} identical"
    print(
        f"{where}: logit margin {margin:.3g}, {ulps:.1f} ulp in {engine.options.dtype} ({verdict})",
        file=sys.stderr,
    )
    return 0 if tie else 1


def chat(engine, params, args, report: Report) -> int:
    """Read user turns from the terminal; /reset forgets, /exit or end of file leaves, Ctrl-C stops a reply."""
    if engine.tokenizer is None:
        raise UserError(f"{args.checkpoint} has no tokenizer files; --chat needs one.", BAD_FILE)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while True:
        try:
            text = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except UnicodeDecodeError as error:
            print(f"error  not UTF-8: {error}", file=sys.stderr, flush=True)
            continue
        if not text:
            continue
        if text == "/exit":
            return 0
        if text == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": text})
        try:
            stream, first = engine.generate(engine.tokenizer.encode_chat(messages), params), True
        except ValueError as error:  # the conversation has outgrown the context, or the template refuses it
            messages.pop()
            print(f"error  {error} (/reset starts over)", file=sys.stderr, flush=True)
            continue
        try:
            for chunk in stream:
                piece = chunk.text.lstrip() if first else chunk.text
                first = first and not piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
        print(flush=True)
        messages.append({"role": "assistant", "content": stream.result.text.strip()})
        report.tail(engine, stream.results, params)


if __name__ == "__main__":
    raise SystemExit(main())
