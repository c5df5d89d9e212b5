"""The report: lines on stderr about what was loaded, how fast it ran and what it accepted, and the same as JSON."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kernels
from decoding.params import SamplingMode, SamplingParams
from engine.engine import Engine
from engine.fused import layers_in_parts
from engine.load import load
from engine.ranks import RankedEngine
from engine.results import GenerationResult
from support import progress
from support.cache import tally
from support.machine import describe_device, peak_memory, read_bandwidth, size_text, versions

# options that the JSON holds as they are
OPTIONS = ("checkpoint", "dtype", "lora", "eagle", "draft_checkpoint", "medusa", "ngram_nodes", "compile")
BAR = 32  # characters of the bar that shows the speed
# settings that are reported where they differ from the default
REPORTED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")


class Request(NamedTuple):
    """A prompt as the engine takes it, and what the report says of it."""

    prompt_ids: list[int]
    params: SamplingParams
    suggested: list[str]  # names of the settings that come from the model's generation_config.json
    template: str | None = None  # the chat template that made the prompt; None for a text that is continued
    note: str = ""  # what became of the prompt, for the prompt's line


def result_json(engine: Engine, results: list[GenerationResult], request: Request) -> dict[str, Any]:
    """The object that `--json` prints. Row 0 is at the top level, and "batch" holds all rows if there are several."""
    options = engine.options
    drafting = {"drafter": options.drafter_kind, "tree": options.tree, "verify": options.verify}
    reused, fresh = tally(torch._dynamo.utils.counters) if engine.compiled else (0, 0)  # asking imports the compiler
    compiled = {"compile_mode": options.compile_mode, "compile_seconds": engine.compile_seconds}
    compiled |= {"graphs_reused": reused, "graphs_compiled": fresh}
    rows = [result.to_dict() for result in results]
    return {
        **rows[0],
        **{name: getattr(options, name) for name in OPTIONS},
        **(drafting if options.drafter_kind else dict.fromkeys(drafting)),
        **(compiled if options.compile else dict.fromkeys(compiled)),
        "template": request.template,
        "settings": asdict(request.params),
        "settings_of_model": request.suggested,
        "quant": engine.model.quant or "none",
        "device": describe_device(engine.model.device),
        "kernels": engine.backend.describe(),
        "layers_in_parts": in_parts(engine),
        **ranks_json(engine),
        "break_even_tau": engine.break_even_tau or None,
        "peak_memory_bytes": peak_memory(engine.model.device),
        "versions": versions(),
        **({"batch": rows} if len(rows) > 1 else {}),
    }


def ranks_json(engine: Engine) -> dict[str, Any]:
    """How many processes share the model, the memory that each of them planned, and what they exchange with."""
    ranks = engine.ranks if isinstance(engine, RankedEngine) else None
    return {
        "ranks": ranks.size if ranks else 1,
        "plan_bytes_per_rank": asdict(engine.plan) | {"total": engine.plan.total} if engine.plan else None,
        "exchanges": ranks.by if ranks else None,
    }


class Report:
    """Writes the lines to stderr, or gives them to `say`. `quiet` drops them all."""

    def __init__(self, quiet: bool, say: Callable[[str], None] = progress.say):
        self.quiet = quiet
        self.say = say
        self.loading = progress.Progress(quiet or say is not progress.say)
        self.bandwidth = 0.0  # bytes per second
        self.alone = 0.0  # of `kernels.seconds_alone`, what was reported already

    def measure(self, device: torch.device) -> None:
        """Measure the bandwidth that reports compare with, unless it is known or nothing is reported.

        Do this on a CPU before the model is loaded: the copies would be the peak of a small model's memory.
        """
        if not self.quiet and not self.bandwidth:
            self.bandwidth = read_bandwidth(device)

    def line(self, text: str = "") -> None:
        if not self.quiet:
            self.say(text)

    def progress(self, done: int, total: int, name: str) -> None:
        """Show how much of the weights is loaded, for files worth the wait."""
        if total > 50e6:
            self.loading.of(done, total, f"loading {size_text(done)} of {size_text(total)}")

    def load(self, options: dict[str, Any], template: str | None = None) -> Engine:
        """Load a model with these options of `load` and the chat template of this name, and report it."""
        started = time.perf_counter()
        engine = load(progress=self.progress, report=self.line, **options)
        if template and engine.tokenizer is not None:
            engine.tokenizer.use_template(template)
        self.head(engine, time.perf_counter() - started)
        return engine

    def head(self, engine: Engine, seconds: float) -> None:
        """What was loaded, and what it runs on."""
        options = engine.options
        quant = engine.model.quant
        name = Path(options.checkpoint).name or options.checkpoint
        name += "".join(f" + {Path(folder).name}" for folder in options.adapters)
        what = f"{quant}  {options.dtype}" if quant else options.dtype
        template = engine.tokenizer.chat_template_source or "" if engine.tokenizer else "no tokenizer"
        # most models bring a template of their own: only another one is worth a place on the line
        extra = f"   template: {template}" if template.startswith(("built-in", "named", "no ")) else ""
        weights, B = size_text(engine.plan.weights), engine.batch_size
        slots = f"   {B} slots, whose pool holds {engine.pool_tokens:,} tokens" if B > 1 else ""
        self.line(f"model   {name}   {what}   {weights}{_drafter(engine)}   ctx {engine.ctx}{slots}{extra}")
        device = describe_device(engine.model.device)
        whose = f" of each of {engine.ranks.size} ranks" if isinstance(engine, RankedEngine) else ""
        self.line(f"device  {device}     plan{whose} {engine.plan}   loaded in {seconds:.1f} s")
        if parts := in_parts(engine):
            named = ", ".join(f"{_ranges(numbers)} ({what})" for what, numbers in parts.items())
            self.line(f"layers  in several calls of the C++ kernels, not in one: {named}")

    def tail(self, engine: Engine, results: list[GenerationResult], request: Request) -> None:
        """How a request went."""
        if self.quiet:
            return
        device = engine.model.device
        peak = peak_memory(device)
        self.measure(device)
        lines = ["", *(text for result in results for text in _rates(result, request.note))]
        lines += [*_acceptance(engine, results[0], request.params.mode), *_speed(engine, results[0], self.bandwidth)]
        whose = " of the process, torch included" if device.type == "cpu" else ""
        lines.append(f"memory   peak {size_text(peak)}{whose} (plan {size_text(engine.plan.total)})")
        config = engine.model.config
        lines.append(f"kernels  {engine.backend.report(bool(config.num_local_experts), config.delta is not None)}")
        if engine.backend.mode == "cpu" and (alone := kernels.seconds_alone()) > self.alone:
            what = f"one of {torch.get_num_threads()} worked alone for {alone - self.alone:.1f} s, which was faster"
            lines.append(f"threads  {what}: other programs keep the processors busy")
            self.alone = alone
        took = f"in {engine.compile_seconds:.1f} s, before decoding"
        if engine.compiled:
            reused, fresh = tally(torch._dynamo.utils.counters)
            why = " (a shape, option or source that this folder had not seen)" if fresh else ""
            lines.append(f"compiled {took}: {reused} graphs reused, {fresh} compiled{why}")
        elif engine.config.compile:
            lines.append(f"captured {took}: {len(engine.runner.graphs)} CUDA graphs")
        reasons = ", ".join(result.stop_reason for result in results)
        lines.append(f"stop     {reasons}        {'  '.join(_settings(engine, request))}")
        self.line("\n".join(lines))


def in_parts(engine: Engine) -> dict[str, list[int]]:
    """The layers that the C++ kernels do not run in one call, by the reason. Empty where other kernels run."""
    if engine.backend.mode != "cpu" or engine.config.compile:
        return {}
    return layers_in_parts(engine.model.layers)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as a text: 0-2, 5."""
    # Numbers of one run are as far from their places as each other.
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _drafter(engine: Engine) -> str:
    """The drafter's part of the first line."""
    head, drafter, kind = engine.head, engine.drafter, engine.options.drafter_kind
    size = f"  {size_text(engine.plan.head)}" if engine.plan.head else ""
    if head:
        trimmed = f" vocabulary {head.vocab_size:,}" if head.draft_ids is not None else ""
        pruned = ", pruned" if drafter.p_min else ""
        seen = f"  window {engine.options.draft_window}" if engine.options.window else ""
        return f"   head {head.config.kind}{size}{trimmed}  tree {engine.options.tree}{pruned}{seen}"
    return f"   drafter {kind}{size}  N {drafter.N}  D {drafter.D}" if kind else ""


def _rates(result: GenerationResult, note: str) -> Iterator[str]:
    """The prompt's and the generation's time and rate."""
    if result.prefill_seconds > 0:
        rate = (result.prompt_tokens - result.cached_tokens) / result.prefill_seconds
        ms = result.prefill_seconds * 1e3
        cached = f"  ({result.cached_tokens} cached)" if result.cached_tokens else ""
        yield f"prompt   {result.prompt_tokens:5d} tok  {ms:8.0f} ms  {rate:8.1f} tok/s{cached}{note and '   ' + note}"
    seconds = f"{result.decode_seconds:8.2f} s   {result.tokens_per_second:8.1f} tok/s"
    yield f"generate {result.new_tokens:5d} tok  {seconds}   {result.steps} steps"


def _acceptance(engine: Engine, result: GenerationResult, mode: SamplingMode) -> Iterator[str]:
    """What was accepted, and whether drafting pays."""
    drafts = engine.drafter.D > 0
    if drafts and result.steps:
        depth = " ".join(f"{share:.2f}"[1:] if share < 1 else "1.0" for share in result.accepted_by_depth)
        which = f" over {len(result.drafted)} of {result.steps} steps" if result.plain_steps else ""
        yield f"accepted tau {result.tau:.2f} tokens/step{which}   by depth {depth or '-'} (1 + sum = tau)"
        if engine.drafter.prunes(mode) and result.nodes_per_step:
            nodes = f"{result.drafted_nodes:.1f} of {engine.drafter.N - 1} nodes drafted a step"
            yield f"{'':9}{nodes}, those above {engine.drafter.p_min:.0%} acceptance; --prune 0 tells the tau of the head"
        if len(result.n_alpha) > 1:  # one would repeat the line above
            yield " " * 9 + "  ".join(f"{k}-alpha {alpha:.2f}" for k, alpha in enumerate(result.n_alpha))
    went = f"   {result.plain_tokens} tokens decoded plainly" if result.plain_tokens else ""
    if engine.break_even_tau:
        plain, speculative = (seconds * 1e3 for seconds in engine.step_seconds)
        times = f"(plain {plain:.1f} ms, speculative {speculative:.1f} ms)"
        yield f"drafting pays above break-even tau {engine.break_even_tau:.2f} {times}{went}"
    elif drafts and engine.drafter.multi_round:
        yield "drafting always on: with multi-round verification the tokens depend on the drafter"
    elif engine.step_seconds:
        ms = engine.step_seconds[0] * 1e3
        yield f"drafting pays while a step wins more tokens than it costs plain steps of {ms:.1f} ms{went}"


def _speed(engine: Engine, result: GenerationResult, bandwidth: float) -> Iterator[str]:
    """The bytes that the steps read, as a share of what reading memory reaches."""
    if not result.steps:
        return
    model = engine.model
    kv, ((_, head_dim), *_) = engine.state.kv[0], model.config.kv_layers
    context = result.prompt_tokens + result.new_tokens // 2
    cached = kv.shape[-1] * kv.element_size() / head_dim  # bytes per element of a key or value
    moved = result.steps * engine.batch_size * model.kv_bytes(context, cached)
    for drafter, steps in ((engine.drafter, len(result.drafted)), (engine.fallback, len(result.plain_steps))):
        if steps:
            weights = model.weight_bytes(drafter.N * engine.batch_size)
            moved += steps * (weights + drafter.bytes_per_step())
    share = moved / result.decode_seconds / bandwidth
    each = f"{result.decode_seconds / result.steps * 1e3:.2f} ms/step, {size_text(moved / result.steps)} read"
    bar = f"{'#' * round(BAR * min(share, 1.0)):.<{BAR}}"
    caches = " (caches hold the weights)" if share > 1 else ""
    yield f"speed    {bar} {share:.0%} of the {bandwidth / 1e9:.0f} GB/s measured for reading{caches}   {each}"


def _settings(engine: Engine, request: Request) -> list[str]:
    """Every setting that changed the text, and which of them the model asked for."""
    params, default = request.params, SamplingParams()
    settings = [f"seed {params.seed}", f"T {params.temperature:g}"]
    changed = [name for name in REPORTED if getattr(params, name) != getattr(default, name)]
    settings += [f"{name.replace('_', '-')} {getattr(params, name):g}" for name in changed]
    settings += [f"stop {text!r}" for text in params.stop]
    if params.stop_ids:
        settings.append(f"stop-ids {','.join(map(str, params.stop_ids))}")
    settings += [f"logit-bias {token}={bias:g}" for token, bias in params.logit_bias]
    if params.grammar:
        settings.append("grammar")
    if engine.options.kv == "int8":
        settings.append(f"kv {engine.options.kv}")
    if engine.drafter.D > 0:
        noise = "" if engine.options.draft_noise else "  draft-noise off"
        settings.append(f"verify {engine.options.verify}{noise}")
    if request.suggested:
        names = ", ".join("T" if name == "temperature" else name.replace("_", "-") for name in request.suggested)
        settings.append(f"({names}: the model's generation_config.json)")
    return settings
