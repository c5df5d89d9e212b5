"""TODO."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from engine import Engine
from load import drafter_kind
from runtime.results import GenerationResult
from sampling import SamplingParams
from support.cache import tally
from support.machine import copy_bandwidth, describe_device, peak_memory, size_text, versions


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
    return tally(torch._dynamo.utils.counters)


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
                f"loading {done / total:4.0%}  {size_text(done)} of {size_text(total)}",
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
            head = f"   head EAGLE-{engine.head.config.version}  {size_text(engine.plan.head)}{trimmed}  tree {opts.tree}"
        elif kind := drafter_kind(opts):
            weights = f"  {size_text(engine.plan.head)}" if engine.plan.head else ""
            head = f"   drafter {kind}{weights}  N {engine.drafter.N}  D {engine.drafter.D}"
        template = engine.tokenizer.chat_template_source if engine.tokenizer else "no tokenizer"
        name = Path(opts.checkpoint).name or opts.checkpoint
        what = f"{quant}  {opts.dtype}" if quant else opts.dtype
        extra = f"   template: {template}" if template else ""
        self.line(
            f"model   {name}   {what}   {size_text(engine.plan.weights)}{head}   ctx {engine.ctx}{extra}"
        )
        self.line(
            f"device  {describe_device(model.device)}     plan {engine.plan}   loaded in {seconds:.1f} s"
        )

    def tail(self, engine: Engine, results: list[GenerationResult], params: SamplingParams) -> None:
        if self.quiet:
            return
        model, r = engine.model, results[0]
        peak = peak_memory(model.device)  # before the copy below adds its buffers
        self.bandwidth = self.bandwidth or copy_bandwidth(model.device)
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
                f"{per_step:.2f} ms/step, {size_text(moved)} read"
            )
        whose = " of the process, torch included" if model.device.type == "cpu" else ""
        self.line(f"memory   peak {size_text(peak)}{whose} (plan {size_text(engine.plan.total)})")
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


def bar(share: float, width: int = 32) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "#" * full + "." * (width - full)
