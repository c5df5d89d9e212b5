"""Builds an engine from options: plans the memory, reads the model and the drafter, and combines them.

from generate import load
engine = load("demo", eagle="demo/eagle1")
for chunk in engine.generate(prompt_ids, SamplingParams(max_new_tokens=100)): ...
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import kernels
from decoding.drafter import PlainDrafter
from engine.engine import Engine, EngineConfig
from engine.first_look import first_look
from engine.prefill import CHUNKS, WIDE_CHUNKS
from engine.ranks import OtherRank, RankedEngine, RankLost, Ranks, end_with_the_leader, follow, meet
from families.config import DTYPES, ModelConfig
from kernels import tuned
from loading.drafting import DraftFiles, build_drafter, build_head, own_head, read_drafter, resolve
from loading.memory import MemoryPlan, check_memory, chunk_bytes, plan_memory
from loading.options import DEMO, LoadOptions, check_names, takes_options
from support import cache
from support.errors import UsageError, bad_files, one_line
from support.machine import default_threads, describe_device, free_memory, freed_memory_returns, release_threads
from support.startup import without_collector
from text.tokenizer import load_tokenizer
from weights.block_heads import BlockConfig
from weights.checkpoint import Checkpoint
from weights.files import Progress, check_sha256, local_path
from weights.quantized import pack_
from weights.shards import Shard

SLOTS = (8, 4, 2, 1)  # how many --slots 0 tries


@takes_options
def load(
    checkpoint: str | Path = DEMO,
    *,
    progress: Progress | None = None,
    report: Callable[[str], None] | None = None,
    **keywords: Any,
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
    options = {name: str(given) if isinstance(given, Path) else given for name, given in keywords.items()}
    options["checkpoint"] = str(checkpoint)
    asked = LoadOptions(**options)
    asked.validate()
    size = asked.tp or int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return _load(asked, progress, say)
    ranks = meet(size, asked.place, options | {"tp": size}, follower=__name__)
    return _load_part(asked, ranks, progress, say)


def follow_leader() -> None:
    """Entry point of a process that rank 0 started: load its part of the model, and follow rank 0."""
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_the_leader, daemon=True).start()
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in told.pop("options").items()}
    with contextlib.suppress(RankLost):
        _load_part(LoadOptions(**options), Ranks(**told), None, lambda line: None)


def _load_part(asked: LoadOptions, ranks: Ranks, progress: Progress | None, say: Callable[[str], None]) -> Engine:
    """The engine of rank 0. In any other rank this loads the rank's part, follows rank 0, and ends the process."""
    if ranks.rank:
        progress, say = None, lambda line: None
    try:
        engine = _load(asked, progress, say, ranks)
        model = engine.model
        check = float(model.norm.weight.double().sum())
        told = ranks.heard((repr(model.config), model.quant, check, repr(engine.options)))
        for rank in (rank for rank, theirs in enumerate(told) if theirs != told[0]):
            raise OtherRank(f"rank {rank} has another checkpoint, or other options, than rank 0. Give all the same.")
    except Exception as error:
        if not isinstance(error, OtherRank):
            ranks.heard(None, one_line(error))
        if ranks.rank:  # rank 0 says why
            raise SystemExit(1) from error
        raise
    if ranks.rank:
        follow(engine, ranks)
        raise SystemExit(0)
    say(f"ranks   {ranks.size} processes, which exchange with {ranks.by}")
    return engine


def _load(
    asked: LoadOptions, progress: Progress | None, say: Callable[[str], None], ranks: Ranks | None = None
) -> Engine:
    use_threads(asked, ranks.here if ranks else 1)
    with bad_files(), freed_memory_returns(), without_collector():
        if asked.sha256 and not (ranks and ranks.rank):  # one rank is enough, and it reads the whole file
            check_sha256(local_path(asked.checkpoint), asked.sha256)
        checkpoint = asked.open_checkpoint()
        if ranks:
            checkpoint = checkpoint.sharded(Shard(ranks.rank, ranks.size))
        given, (asked, checkpoint) = asked, own_head(asked, checkpoint)
        tokenizer = load_tokenizer(checkpoint.tokenizer_source, checkpoint.config.vocab_size)
        checkpoint.forget_texts()
        files = read_drafter(asked, checkpoint.config, tokenizer)
    if ranks and files.head and isinstance(files.head.config, BlockConfig):
        raise UsageError(f"--tp splits no {files.head.config.kind} head yet; leave out --tp, or take an EAGLE head.")
    if asked.eagle and not given.eagle:
        say("note    the model's own MTP layer drafts (--eagle none: it does not)")
    options = resolve(asked, checkpoint, files.head)
    if asked.compile and not options.compile:
        say("note    nothing to compile: the C++ kernels run (--kernels reference --compile compiles the reference)")
    if asked.kernels != "reference":
        for opened in filter(None, (checkpoint, files.model)):
            opened.check_floats(DTYPES[options.dtype])
    backend = open_backend(options, say)
    if not options.slots:
        options = replace(options, slots=fit_slots(checkpoint, files, options, ranks))
    if not options.pool:
        options = replace(options, pool=fit_pool(checkpoint, files, options, ranks))
    checkpoint, plan = check_plan(checkpoint, files, options, ranks, say)
    chunk, plan = fit_chunk(checkpoint.config, plan, options, ranks)
    for note in (*checkpoint.notes, *files.notes):
        say(f"note    {note}")
    with bad_files(), freed_memory_returns():
        model = checkpoint.load(torch.device(options.device), DTYPES[options.dtype], progress, options.ctx)
        head = build_head(files.head, model, options, tokenizer) if files.head else None
    with freed_memory_returns():
        with backend.active():  # linears are packed for one backend, and before anything is traced
            pack_(model, model.dtype)
        drafter = build_drafter(model, options, backend, head, files.model)
    if options.compile:
        folder, state = cache.use(describe_device(model.device))
        what = "one block is compiled per width"
        if options.device == "cuda" and options.compile_mode == "graph":
            what = "a step is captured for each number of rows and kind of sampling"
        say(f"compile {folder} ({state}); {what}, prompts and settings need nothing new")
    trained = head.config.layer if head else files.model.config if files.model else None
    if trained is not None and trained.max_position_embeddings < options.ctx and not options.window:
        limit, hint = trained.max_position_embeddings, " (--draft-window N: it sees the last N tokens)" if head else ""
        say(f"note    this drafter was trained to {limit:,} positions; past them expect fewer accepted tokens{hint}")
    release_threads()  # requests may run in another thread
    config = EngineConfig.of(options, backend, head)
    config = replace(config, plan=plan, generation=checkpoint.generation, chunk=chunk)
    if ranks:
        return RankedEngine(model, tokenizer, drafter, config, ranks)
    if backend.device_type == "cuda" and backend.mode != "reference":
        first_look(model, drafter or PlainDrafter(model), config, say, options.check)
    return Engine(model, tokenizer, drafter, config)


def use_threads(options: LoadOptions, ranks: int = 1) -> None:
    """Set torch's CPU threads from the options, or to this process's share of them, if the device is a CPU.

    torch has one number for the whole process, so models that are loaded already run with the new one, too.
    """
    if options.place == "cpu":
        torch.set_num_threads(options.threads or max(1, default_threads() // ranks))


def check_plan(
    checkpoint: Checkpoint, files: DraftFiles, options: LoadOptions, ranks: Ranks | None, say: Callable[[str], None]
) -> tuple[Checkpoint, MemoryPlan]:
    """The memory plan, and the checkpoint. Where some rank could not hold its part, the embedding is split, too.

    Raises NotEnoughMemory where it still does not fit. All ranks call it, and all split the embedding or none.
    """
    plan, free = plan_memory(checkpoint, files, options), _free(options, ranks)
    if ranks and any(ranks.heard(plan.total > free)):
        checkpoint = checkpoint.sharded(checkpoint.shard._replace(embedding=True))
        plan = plan_memory(checkpoint, files, options)
        say("note    the embedding is split to save memory: one more exchange per forward and level of drafting.")
    check_memory(plan, free, options)
    return checkpoint, plan


def fit_slots(checkpoint: Checkpoint, files: DraftFiles, options: LoadOptions, ranks: Ranks | None) -> int:
    """The most of SLOTS that memory holds with a quarter of a context for each. All ranks call it, and all get the same
    number."""
    free = _free(options, ranks)
    quarter = {n: min(n * options.ctx, options.pool or options.ctx * max(4, n) // 4) for n in SLOTS}
    sizes = ((n, replace(options, slots=n, pool=quarter[n])) for n in SLOTS)
    fitting = (n for n, size in sizes if plan_memory(checkpoint, files, size).total <= free)
    most = next(fitting, SLOTS[-1])
    return min(ranks.heard(most)) if ranks else most


def fit_pool(checkpoint: Checkpoint, files: DraftFiles, options: LoadOptions, ranks: Ranks | None) -> int:
    """Tokens of a context for each slot. Where memory does not hold them, of one context and nine tenths of what is left
    then. All ranks call it, and all get the same number."""
    least, most = options.ctx, options.ctx * options.slots
    small, large = (plan_memory(checkpoint, files, replace(options, pool=n)).total for n in (least, most))
    free = _free(options, ranks)
    more = max(0, free - small) * 9 * (most - least) // (10 * max(1, large - small))
    fitting = most if large <= free else least + more
    return min(ranks.heard(fitting)) if ranks else fitting


def fit_chunk(
    config: ModelConfig, plan: MemoryPlan, options: LoadOptions, ranks: Ranks | None
) -> tuple[int, MemoryPlan]:
    """The most tokens of a prompt that one forward reads, and the plan with what they need. All ranks call it, and all
    get the same number. A CPU, and forwards that Inductor compiles, gain nothing by more than the usual ones."""
    if options.device != "cuda" or (options.compile and options.compile_mode == "reduce-overhead"):
        return CHUNKS[-1], plan
    room = _free(options, ranks) - plan.total
    most = next((w for w in reversed(WIDE_CHUNKS) if chunk_bytes(config, w) <= room), CHUNKS[-1])
    most = min(ranks.heard(most)) if ranks else most
    return most, replace(plan, prompts=chunk_bytes(config, most) if most > CHUNKS[-1] else 0)


def _free(options: LoadOptions, ranks: Ranks | None) -> int:
    """Bytes that this process may use."""
    device = torch.device(options.device)
    return free_memory(device) // (ranks.here if ranks and device.type == "cpu" else 1)


def open_backend(options: LoadOptions, report: Callable[[str], None]) -> kernels.KernelBackend:
    """The kernel backend that the options name, with the tilings that were tuned for this GPU."""
    if options.device != "cuda":
        if options.kernels == "auto" and (problem := kernels.cpu_problem()):
            report(f"note    no C++ kernels, because {problem}: slower, and quantized weights become float matrices")
        return kernels.KernelBackend(options.kernels, options.device, options.activations)
    tilings, note = tuned.read_tuned(torch.cuda.get_device_name())
    if note:
        report(f"note    {note}")
    return kernels.KernelBackend(options.kernels, options.device, configs=tilings)
