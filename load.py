"""From options to an engine: plan the memory, read the model and its drafter, put everything together.

from load import load
engine = load("demo", eagle="demo/eagle1")
for chunk in engine.generate(prompt_ids, SamplingParams(max_new_tokens=100)): ...
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

import kernels
from drafters.base import Drafter
from drafters.draft_model import DraftModelDrafter, check_vocabulary
from drafters.lookahead import LookaheadDrafter
from drafters.medusa import MedusaDrafter, load_medusa
from drafters.ngram import NGramDrafter, WithNGrams
from eagle_draft import EagleHead, eagle_drafter
from engine import Engine
from kernels import tuned
from model import Transformer
from model_config import DTYPES, ModelConfig
from options import BY_PRICE, DEMO, PRUNE, LoadKeywords, LoadOptions, check_names
from ranks import OtherRank, RankedEngine, RankLost, Ranks, end_with_the_leader, follow, heard, join, meet, same_model
from runtime.compiled import COMPILE_MODES
from runtime.links import NCCL, ONE_SHOT, Exchanges, SharedMemory, share_memory
from step import HISTORY, RING
from support import cache
from support.errors import NotEnoughMemory, bad_files, one_line
from support.machine import default_device, default_threads, describe_device, free_memory, release_threads, size_text
from support.memory import freed_memory_returns, shapes_only
from tokenizer import Tokenizer, load_tokenizer
from tree import DynamicTree, TreeTables, check_width, parse_tree, tree_tables
from weights.checkpoint import Checkpoint
from weights.checksums import check_sha256
from weights.files import Progress
from weights.heads import EagleFile, read_eagle
from weights.hf import build_model
from weights.hub import local_path
from weights.quantized import QuantSpec, adopt_, held_bytes, pack_, replace_module
from weights.rounding import quantize_
from weights.shards import Shard, exchanged, share_

SHARED_ROWS = 64  # nodes of a step for which GPUs share memory at least: a benchmark's arms have wider trees
LIVE_ROWS = 6  # fp32 rows per node that are alive at once while a captured step runs


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that the engine will hold, computed before anything is loaded."""

    weights: int
    head: int
    kv: int
    buffers: int
    graphs: int = 0  # an estimate of what a captured step keeps for its intermediate results

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = [f"{name} {size_text(count)}" for name, count in asdict(self).items() if count]
        return f"{size_text(self.total)}: " + "  ".join(parts)


def model_bytes(checkpoint: Checkpoint, options: LoadOptions) -> int:
    """Bytes that a model's weights take after loading and packing."""
    dtype = DTYPES[options.dtype]
    if checkpoint.quantization:
        return held_bytes(checkpoint.kept_entries, dtype, options.device, options.kernels)
    return float_bytes(checkpoint.config, options, checkpoint.empty(), checkpoint.shard)


def float_bytes(
    config: ModelConfig, options: LoadOptions, model: Transformer | None = None, shard: Shard | None = None
) -> int:
    """Bytes of the weights of a model that is not quantized. model: the part of it that `shard` names, without memory."""
    dtype, tied = DTYPES[options.dtype], config.tie_word_embeddings
    stored = dict((model or build_model(config)).to(DTYPES[config.dtype]).state_dict())
    if tied and shard and not shard.embedding:
        tied = False
        rows = stored["embed_tokens.weight"][: config.vocab_size // shard.ranks]
        if options.device == "cpu" and dtype == torch.float32:  # the LM head's part gets a layout of its own
            stored["lm_head.weight"] = rows
    return held_bytes(stored, dtype, options.device, options.kernels, tied)


def plan_memory(
    config: ModelConfig,
    options: LoadOptions,
    head: EagleFile | None = None,
    weights: int = 0,
    draft: ModelConfig | None = None,
    draft_weights: int = 0,
    quantized: bool = False,
) -> MemoryPlan:
    """What `load` will allocate.

    Args:
        head: the EAGLE head, as read.
        weights: bytes of the target's weights (`model_bytes`); 0: those of a model that is not quantized.
        draft, draft_weights: config of a draft LLM, and bytes of its weights in the same way.
        quantized: whether the target is.
    """
    options = options.with_defaults(config)
    dtype = DTYPES[options.dtype]
    element = dtype.itemsize
    B, ctx = options.batch_size, options.ctx
    N, D = options.tree_shape()
    slots = ctx + N + 1

    def cache_bytes(geometry: ModelConfig, layers: int, slots: int, int8: bool = False) -> int:
        row = geometry.head_dim + kernels.KV_SCALE if int8 else geometry.head_dim * element
        return B * slots * 2 * geometry.num_key_value_heads * row * layers

    kv = cache_bytes(config, config.num_hidden_layers, slots, options.kv == "int8")
    rotary = 4 * ctx * config.head_dim
    buffers = B * slots * 8 + (B * 5 + 8) * config.vocab_size + rotary + RING * B * 2 * (D + 2) * 8
    drafter = 0
    if head is not None:
        kv += cache_bytes(head.config.layer, 1, slots + 128)
        rounded = options.kernels == "cpu" and quantized
        drafter = held_bytes(head.tensors, dtype, options.device, options.kernels, rounded=rounded)
        # a trimmed vocabulary copies rows of the target's LM head and holds their ids, which a head's own file has
        own = len(head.tensors.get("draft_ids", ())) if head.config.version == 1 else 0
        row = config.hidden_size + 4 if rounded else config.hidden_size * element
        drafter += options.draft_vocab * (row + 8) or own * row
        kept = D + 1 + (0 if options.eagle_always else HISTORY + 1)
        buffers += B * kept * max(1, len(head.config.taps)) * config.hidden_size * element
        buffers += 4 * ctx * head.config.layer.head_dim
    if draft is not None:
        kv += cache_bytes(draft, draft.num_hidden_layers, slots + 128)
        drafter = draft_weights or float_bytes(draft, options)
    if options.medusa:
        path = Path(options.medusa)
        drafter = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*")))
    if options.drafter == "lookahead":
        buffers += B * config.vocab_size * (N - 1) // 2 * 4
    captured = options.compile and options.device == "cuda" and COMPILE_MODES[options.compile_mode].captured
    widest = max(config.hidden_size, config.intermediate_size, config.vocab_size)
    graphs = LIVE_ROWS * 4 * B * N * widest if captured else 0
    return MemoryPlan(weights or float_bytes(config, options), drafter, kv, buffers, graphs)


def check_memory(plan: MemoryPlan, free: int, options: LoadOptions) -> None:
    """Raise NotEnoughMemory with the smallest change that would fit, before anything is allocated."""
    if plan.total <= free:
        return
    per_token = plan.kv / options.ctx
    fits = int(options.ctx - (plan.total - free) / per_token) if per_token else 0
    hint = "Use a quantized model (--quant int4, quantize.py) or a larger device."
    if options.kv != "int8" and plan.total - free < 0.4 * plan.kv:
        hint = "Try --kv int8."
    elif fits >= 256:
        hint = f"Try --ctx {fits // 64 * 64}."
    elif options.batch_size > 1:
        per_sequence = (plan.kv + plan.buffers + plan.graphs) / options.batch_size
        most = int((free - plan.weights - plan.head) / per_sequence)
        hint = f"Try --batch-size {most}." if most > 0 else hint
    raise NotEnoughMemory(f"not enough memory: plan {size_text(plan.total)}, free {size_text(free)}. {hint}")


def load(
    checkpoint: str | Path = DEMO,
    *,
    progress: Progress | None = None,
    report: Callable[[str], None] | None = None,
    **keywords: Unpack[LoadKeywords],
) -> Engine:
    """Build an Engine from a model directory and, with `eagle=`, a draft head.

    Args:
        checkpoint: the model directory.
        progress: called with (done, total, tensor name) while weights stream in.
        report: called with notes, one line each, such as what was assumed about a bare head.
        keywords: the options, which LoadOptions describes. On a CPU the number of threads holds for the whole process
            (`use_threads`).

    Raises:
        TypeError: in one line, for a name that is no option.
        ValueError: in one line. The kinds in support.errors tell a wrong option from a bad file.
    """
    say = report or (lambda line: None)
    check_names(keywords)
    asked = LoadOptions(checkpoint=str(checkpoint), **keywords)
    asked.check()
    size = asked.tp or int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return _load(asked, progress, say)
    options = keywords | {"checkpoint": str(checkpoint), "tp": size}
    ranks = meet(size, asked.device or default_device(), options, follower=__name__)
    return _load_part(asked, ranks, progress, say)


def follow_leader() -> None:
    """What a process does that rank 0 started: load its part, and follow."""
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_the_leader, daemon=True).start()
    options = told.pop("options")
    for name, value in options.items():
        options[name] = tuple(value) if isinstance(value, list) else value
    with contextlib.suppress(RankLost):
        _load_part(LoadOptions(**options), join(**told), None, lambda line: None)


def _load_part(asked: LoadOptions, ranks: Ranks, progress: Progress | None, say: Callable[[str], None]) -> Engine:
    """The engine of rank 0. In any other rank this loads the rank's part, follows rank 0, and ends the process."""
    if ranks.rank:
        progress, say = None, lambda line: None
    try:
        engine = _load(asked, progress, say, ranks)
        model = engine.model
        check = float(model.norm.weight.double().sum())
        same_model(ranks, (repr(model.config), model.quant, check, repr(engine.options)))
    except Exception as error:
        if not isinstance(error, OtherRank):
            heard(ranks, one_line(error))
        if ranks.rank:  # rank 0 says why
            raise SystemExit(1) from error
        raise
    if ranks.rank:
        follow(engine, ranks)
        raise SystemExit(0)
    say(f"ranks   {ranks.size} processes; {ranks.exchanges}")
    return engine


def shared_bytes(checkpoint: Checkpoint, options: LoadOptions) -> int:
    """Bytes that the exchanges of one step of a part need on each GPU: those of the largest. Wider prompts use NCCL."""
    rows = max(SHARED_ROWS, options.batch_size * options.tree_shape()[0])
    itemsize = DTYPES[options.dtype].itemsize
    return -(-max(exchanged(checkpoint.whole, checkpoint.shard, rows, itemsize)) // 256) * 256


def link_ranks_(
    model: Transformer, checkpoint: Checkpoint, options: LoadOptions, ranks: Ranks, offer: SharedMemory
) -> Exchanges:
    """Let a loaded part exchange in the fastest way that all ranks have. All call it, before a graph is captured."""
    sizes = exchanged(checkpoint.whole, checkpoint.shard, 1, DTYPES[options.dtype].itemsize)
    if options.device != "cuda":
        return Exchanges("gloo", len(sizes), None)
    memory, why = share_memory(ranks.size, shared_bytes(checkpoint, options), partial(heard, ranks, ""), offer)
    share_(model, memory)
    link = NCCL if memory is None else ONE_SHOT
    return Exchanges(link.name, len(sizes), round(link.cost(sizes) * 1e3, 2), why)


def _load(
    asked: LoadOptions, progress: Progress | None, say: Callable[[str], None], ranks: Ranks | None = None
) -> Engine:
    use_threads(asked, ranks.size if ranks else 1)
    with bad_files(), freed_memory_returns():
        if asked.sha256 and not (ranks and ranks.rank):  # one rank is enough, and it reads the whole file
            check_sha256(local_path(asked.checkpoint), asked.sha256)
        files = _Files(asked, Shard(ranks.rank, ranks.size) if ranks else None)
    options = asked.resolve(files.checkpoint, files.head)
    device = torch.device(options.device)
    backend = open_backend(options, say)
    plan = check_plan(files, options, ranks, say)
    for note in (*files.checkpoint.notes, *(files.head.notes if files.head else ())):
        say(f"note    {note}")
    with bad_files(), _memory_errors(plan), freed_memory_returns():
        model = files.checkpoint.load(device, DTYPES[options.dtype], progress, options.ctx)
        if ranks:
            ranks.exchanges = link_ranks_(model, files.checkpoint, options, ranks, SharedMemory())
        head = None
        if files.head:
            ids = draft_vocabulary(options, files.checkpoint.config, files.tokenizer)
            head = build_head(files.head, model, ids)
    if head is not None:
        round_head_(head, backend, model)
    with backend.active(), freed_memory_returns():  # linears are packed for one backend, and before anything is traced
        for module in (model, head) if head else (model,):
            pack_(module, model.dtype)
        drafter = build_drafter(model, head, options) if options.drafter_kind else None
    if options.compile:
        folder, found = cache.use(describe_device(device))
        say(f"compile {folder} ({found}); one block is compiled per width, prompts and settings compile nothing")
    trained = head.config.layer if head else files.draft.config if files.draft else None
    if trained is not None and trained.max_position_embeddings < options.ctx:
        limit = trained.max_position_embeddings
        say(f"note    this drafter was trained to {limit:,} positions; past them expect fewer accepted tokens.")
    release_threads()  # requests may run in another thread
    generation = files.checkpoint.generation
    return build_engine(model, files.tokenizer, drafter, options, backend, plan, head, generation, ranks)


def use_threads(options: LoadOptions, ranks: int = 1) -> None:
    """Give torch the CPU threads that the options name, if they name a CPU, or this process's share of them.

    torch has one number for the whole process, so models that are loaded already run with the new one, too.
    """
    if (options.device or default_device()) == "cpu":
        torch.set_num_threads(options.threads or max(1, default_threads() // ranks))


class _Files:
    """The files that the options name, as far as they are read before memory is planned."""

    def __init__(self, options: LoadOptions, shard: Shard | None = None):
        self.checkpoint = options.open_checkpoint()
        if shard:
            self.checkpoint = self.checkpoint.sharded(shard)
        config = self.checkpoint.config
        self.tokenizer = load_tokenizer(self.checkpoint.tokenizer_source, config.vocab_size)
        overrides = dict(item.split("=", 1) for item in options.eagle_config)
        self.head = read_eagle(options.eagle, config, overrides) if options.eagle else None
        self.draft: Checkpoint | None = None
        if options.draft_checkpoint:
            self.draft = options.open_draft()
            theirs = load_tokenizer(self.draft.tokenizer_source, self.draft.config.vocab_size)
            check_vocabulary(config, self.draft.config, (self.tokenizer, theirs))

    def plan(self, options: LoadOptions) -> MemoryPlan:
        weights = model_bytes(self.checkpoint, options)
        if self.draft is None:
            quantized = bool(self.checkpoint.quantization)
            plan = plan_memory(self.checkpoint.config, options, self.head, weights, quantized=quantized)
        else:
            draft_weights = model_bytes(self.draft, options)
            plan = plan_memory(self.checkpoint.config, options, self.head, weights, self.draft.config, draft_weights)
        shared = shared_bytes(self.checkpoint, options) if self.checkpoint.shard and options.device == "cuda" else 0
        return replace(plan, buffers=plan.buffers + shared)


def check_plan(files: _Files, options: LoadOptions, ranks: Ranks | None, say: Callable[[str], None]) -> MemoryPlan:
    """The memory plan. Where some rank could not hold its part, the embedding is split, too.

    Raises NotEnoughMemory where it still does not fit. All ranks call it, and all split the embedding or none.
    """
    device = torch.device(options.device)
    plan, free = files.plan(options), free_memory(device)
    if ranks:
        free = free if device.type == "cuda" else free // ranks.size  # processes on one CPU share its memory
        if any(heard(ranks, "", plan.total > free)):
            files.checkpoint = files.checkpoint.sharded(files.checkpoint.shard._replace(embedding=True))
            plan = files.plan(options)
            say("note    the embedding is split to save memory: one more exchange per forward and level of drafting.")
    check_memory(plan, free, options)
    return plan


@contextlib.contextmanager
def _memory_errors(plan: MemoryPlan) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        planned = size_text(plan.total)
        raise NotEnoughMemory(f"out of memory while loading ({planned} planned): {error}") from error


def open_backend(options: LoadOptions, report: Callable[[str], None]) -> kernels.KernelBackend:
    """The kernel backend that the options name, with the tilings that were tuned for this GPU."""
    if options.device != "cuda":
        if options.kernels == "auto" and not options.compile and (problem := kernels.cpu_problem()):
            report(f"note    no C++ kernels, because {problem}: slower, and quantized weights become float matrices")
        return kernels.KernelBackend(options.kernels, options.device, options.activations)
    tilings, note = tuned.read_tuned(torch.cuda.get_device_name())
    if note:
        report(f"note    {note}")
    overlap = options.overlap and kernels.can_overlap(torch.device(options.device))
    if options.overlap and not overlap:
        report("note    --overlap needs a GPU of compute capability 9.0 or later; it changes nothing here")
    return kernels.KernelBackend(options.kernels, options.device, configs=tilings, overlap=overlap)


def build_engine(
    model: Transformer,
    tokenizer: Tokenizer | None,
    drafter: Drafter | None,
    options: LoadOptions,
    backend: kernels.KernelBackend,
    plan: MemoryPlan | None = None,
    head: EagleHead | None = None,
    generation: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """An Engine that runs as the options say. plan, head and generation stay with it for reports and command lines.

    ranks: the processes that share the model, if there are several.
    """
    kind = partial(RankedEngine, ranks=ranks) if ranks else Engine
    return kind(
        model,
        tokenizer,
        drafter,
        options.batch_size,
        ctx=options.ctx,
        compile=options.compile,
        backend=backend,
        compile_mode=options.compile_mode,
        eagle_always=options.eagle_always,
        kv_dtype=torch.int8 if options.kv == "int8" else None,
        options=options,
        plan=plan,
        head=head,
        generation=generation,
    )


def draft_vocabulary(options: LoadOptions, config: ModelConfig, tokenizer: Tokenizer | None) -> Tensor | None:
    """Sorted ids of the K tokens that a trimmed head may draft (FR-Spec), or None without --draft-vocab.

    Tokens are ranked by how often a text has them. Tokens that the text does not hold, and all tokens without a text,
    follow in an order that the tokenizer alone gives: stop ids (a draft must be able to end), single characters (at most
    K / 4 here), longer pieces by merge rank (which follows frequency), then the characters left over, control tokens and
    fallback bytes. By id alone a sentencepiece model would lose `,` and `(`, because it numbers its characters last.
    Without a tokenizer the stop ids come first and then the first ids.
    """
    K, V = options.draft_vocab, config.vocab_size
    if not K:
        return None
    if not 1 <= K <= V:
        raise ValueError(f"--draft-vocab is {K}; allowed: 1 to {V}.")
    if tokenizer is None:
        if options.draft_vocab_text is not None:
            raise ValueError("--draft-vocab-text needs a tokenizer, and this checkpoint has none.")
        return torch.tensor(list(dict.fromkeys((*config.eos_token_ids, *range(V))))[:K]).sort().values
    order = _vocabulary_order(tokenizer, K, V)
    counts = torch.zeros(V, dtype=torch.int64)
    if options.draft_vocab_text is not None:
        try:
            text = Path(options.draft_vocab_text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--draft-vocab-text {options.draft_vocab_text}: {error}") from error
        counts = torch.bincount(torch.tensor(tokenizer.encode(text), dtype=torch.int64), minlength=V)
        counts[list(tokenizer.eos_ids)] = counts.max() + 1
    return order[counts[order].sort(descending=True, stable=True).indices[:K]].sort().values


def _vocabulary_order(tokenizer: Tokenizer, K: int, V: int) -> Tensor:
    """All ids in the order in which `draft_vocabulary` prefers them without a text."""
    texts = [tokenizer.decode([i], skip_special=False, continuation=True) for i in range(V)]
    # A fallback byte spells what a character spells too, or half of one (U+FFFD). The character is the one to draft.
    used = {text: i for i, text in enumerate(texts)}
    seen = [t.isprintable() and t != "\ufffd" or t in "\n\t" for t in texts]
    singles = [i for i, t in enumerate(texts) if len(t) == 1 and seen[i] and used[t] == i]
    merged = [i for i, t in enumerate(texts) if len(t) > 1 and i not in tokenizer.special_ids]
    order = [*tokenizer.eos_ids, *singles[: K // 4], *merged, *singles, *range(V)]
    return torch.tensor(list(dict.fromkeys(order)))


def build_head(file: EagleFile, model: Transformer, ids: Tensor | None = None) -> EagleHead:
    """An EagleHead on the model's device and in its dtype, its tensors loaded strictly.

    ids: sorted target ids of a trimmed draft vocabulary (EAGLE-1/2).
    """
    if ids is not None and file.config.version != 1:
        raise ValueError("--draft-vocab trims EAGLE-1/2 heads; an EAGLE-3 head brings its own draft vocabulary.")
    ids = file.tensors.get("draft_ids") if ids is None else ids
    with shapes_only():
        head = EagleHead(file.config, model, ids).eval().requires_grad_(False)
    head.to(dtype=model.dtype).to_empty(device=model.device)
    tensors = {name: t.to(model.device) for name, t in file.tensors.items()}
    if ids is not None:
        tensors["draft_ids"] = ids.to(model.device, torch.int64)
        head.draft_ids = head.draft_ids.to(torch.int64)
    # a quantized head stores codes and scales where a plain one stores a weight
    stored = {name.replace(".qweight", ".weight") for name in tensors}
    stored -= {name for name in stored if name.endswith((".scales", ".zeros", ".perm"))}
    wrong = stored ^ set(head.state_dict())
    if wrong:
        raise ValueError(f"the head's tensors do not match its config: {', '.join(sorted(wrong)[:3])}.")
    if stored == set(tensors):
        head.load_state_dict(tensors, strict=True)
    else:
        adopt_(head, tensors, model.device, model.dtype)
    head.rotary.build(model.device, model.rotary.length)
    head.trim()
    return head


def round_head_(head: EagleHead, backend: kernels.KernelBackend, model: Transformer) -> None:
    """Round the float linears of a quantized model's head to int8, if the C++ kernels can multiply with all of them.

    A drafter cannot change a token, so its rounding costs nothing but, rarely, a draft. Of a head that is quantized
    already it is the LM head, where that is a copy of the target's rows or was left in half precision.
    """
    linears = {name: child for name, child in head.named_modules() if isinstance(child, nn.Linear)}
    fits = backend.mode == "cpu" and bool(model.quant)
    if fits and all(kernels.cpu_fits(*linear.weight.shape, 0) for linear in linears.values()):
        for name, linear in linears.items():
            holder = nn.ModuleDict({"linear": linear})
            quantize_(holder, QuantSpec("int8"))
            replace_module(head, name, holder["linear"])


def build_drafter(model: Transformer, head: EagleHead | None, options: LoadOptions) -> Drafter:
    """The drafter that the options ask for. Call it with the kernel backend active.

    head is for an EAGLE drafter; a draft LLM and Medusa heads are read here. A batch may have one static tree per
    sequence. The tree of an n-gram drafter is as large and deep as --tree says.
    """
    B = options.batch_size
    kind = options.drafter_kind
    tree = _build_trees(options, model.device)
    rule = {"match": "", "multi-round": "without", "multi-round-replacement": "with"}[options.verify]
    how = (tree, B, options.ctx + options.tree_shape()[0] + 1, options.draft_noise, rule)
    drafter: Drafter
    if kind == "ngram":
        drafter = NGramDrafter(model, tree.N, tree.D)
    elif kind == "lookahead":
        drafter = LookaheadDrafter(model, B)
    elif kind == "medusa":
        with bad_files():
            heads = load_medusa(options.medusa, model)
        drafter = MedusaDrafter(heads, tree, options.draft_noise)
    elif kind == "draft":
        with bad_files():
            small = options.open_draft().load(model.device, model.dtype, None, options.ctx)
        pack_(small, small.dtype)
        check_width(tree, small.config.vocab_size)
        drafter = DraftModelDrafter(model, small, *how)
    else:
        unpriced = options.prune == BY_PRICE
        p_min = (PRUNE if unpriced else options.prune or 0) / 100
        ngram_nodes = options.ngram_nodes if p_min else 0
        drafter = eagle_drafter(head, *how, p_min=p_min, unpriced=unpriced, ngram_nodes=ngram_nodes)
    return WithNGrams(drafter, options.ngram_nodes) if options.ngram_nodes and not options.prune else drafter


def _build_trees(options: LoadOptions, device: torch.device) -> DynamicTree | TreeTables:
    """The dynamic tree, or the tables of one static tree per sequence."""
    trees = [parse_tree(name) for name in options.trees]
    if len(trees) not in (1, options.batch_size):
        raise ValueError(f"{len(trees)} trees for a batch of {options.batch_size}; give one tree, or one per sequence.")
    if not any(isinstance(tree, DynamicTree) for tree in trees):
        return tree_tables(trees * options.batch_size if len(trees) == 1 else trees, device)
    if len(set(trees)) > 1:
        raise ValueError("trees of a batch must all be static, or all the same dynamic tree.")
    return trees[0]
