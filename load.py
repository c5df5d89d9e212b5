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
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch

import kernels
from drafters.draft_model import check_vocabulary
from drafting import build_drafter, build_head, draft_vocabulary, round_head_
from engine import Engine, EngineConfig
from kernels import tuned
from memory_plan import MemoryPlan, check_memory, model_bytes, plan_memory, shared_bytes
from model_config import DTYPES
from options import DEMO, LoadKeywords, LoadOptions, check_names
from ranks import (
    OtherRank,
    RankedEngine,
    RankLost,
    Ranks,
    end_with_the_leader,
    follow,
    heard,
    join,
    link_ranks_,
    meet,
    same_model,
)  # fmt: skip
from runtime.links import SharedMemory
from support import cache
from support.errors import NotEnoughMemory, bad_files, one_line
from support.machine import default_device, default_threads, describe_device, free_memory, release_threads, size_text
from support.memory import freed_memory_returns
from tokenizer import load_tokenizer
from tree_choice import resolve
from weights.checkpoint import Checkpoint
from weights.checksums import check_sha256
from weights.files import Progress
from weights.heads import read_eagle
from weights.hub import local_path
from weights.quantized import pack_
from weights.shards import Shard


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


def _load(
    asked: LoadOptions, progress: Progress | None, say: Callable[[str], None], ranks: Ranks | None = None
) -> Engine:
    use_threads(asked, ranks.size if ranks else 1)
    with bad_files(), freed_memory_returns():
        if asked.sha256 and not (ranks and ranks.rank):  # one rank is enough, and it reads the whole file
            check_sha256(local_path(asked.checkpoint), asked.sha256)
        files = _Files(asked, Shard(ranks.rank, ranks.size) if ranks else None)
    options = resolve(asked, files.checkpoint, files.head)
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
    config = replace(EngineConfig.of(options, backend, head), plan=plan, generation=files.checkpoint.generation)
    if ranks:
        return RankedEngine(model, files.tokenizer, drafter, config, ranks)
    return Engine(model, files.tokenizer, drafter, config)


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
