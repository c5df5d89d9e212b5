"""Paired benchmark of decoding arms on the same weights, in one process: numbers that can be checked.

    python -m scripts.bench                                             # the demo model, every drafter found beside it
    python -m scripts.bench --checkpoint DIR --suite mt_bench.jsonl --template vicuna --temperature 0 1 --json out.jsonl
    python -m scripts.bench --arm "wide=eagle=eagle3;tree=dynamic:60,7,10" --arm "deep=eagle=eagle3;tree=chain:7"
    python -m scripts.bench --baseline hf --csv out.csv --plot out.png
    python -m scripts.bench --shape llama-3-8b --quant int4 --synthetic-tau 3.5
    python -m scripts.bench --rows pp512,tg128,tg128@d1024
    python -m scripts.bench --compare A.jsonl B.jsonl

An arm is NAME=OPTIONS: `key=value` pairs of `generate.LoadOptions` separated by `;`. The first arm is plain decoding, and
every ratio refers to it. Arms run interleaved, each run from empty caches; token ids are counted up to the first stop.
An arm that promises the `same tokens` and breaks the promise gets no speedup (exit code 1); arms with the `same
distribution` or of an `other engine` get a ratio with that label. benchmarks/README.md says what every field means.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.arms import (
    DYNAMIC,
    DYNAMIC_GPU,
    NO_STOP,
    SAME_TOKENS,
    Arm,
    EngineArm,
    HFArm,
    arm_options,
    build_engine,
    default_arms,
    parse_arm,
)
from bench.compare import compare
from bench.environment import environment, fingerprint, gpu_state
from bench.measure import TIE, Bench, Settings, arm_facts, step_bytes
from bench.random_models import SHAPES, random_engine
from bench.records import Lines, Progress
from bench.rows import bench_row, row_context
from bench.suites import Prompts, builtin_suite, prompts_of, random_suite, read_suite
from bench.summary import RESAMPLES, remarks, summarise
from bench.tables import check_outputs, report, write_csv, write_plot
from engine import Engine
from load import DEMO, load
from model import DTYPES
from sampling import SamplingParams
from support.errors import USAGE, UsageError
from support.machine import copy_bandwidth


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", default=str(DEMO), metavar="DIR", help="model directory (default: the embedded demo)")
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="an arm beside plain decoding (repeatable)",
    )
    add("--only", default="", metavar="A,B", help="of the default arms only these (plain is always in)")
    add(
        "--suite",
        action="append",
        default=[],
        metavar="FILE",
        help="questions in MT-bench layout (repeatable)",
    )
    add("--questions", type=int, default=0, metavar="N", help="the first N questions of every suite")
    add(
        "--format", default="auto", choices=("auto", "chat", "text"), help="auto: chat if there is a template"
    )
    add(
        "--template",
        metavar="NAME",
        help="vicuna, llama-2-chat, mixtral (as the paper used them), or the model's own",
    )
    add(
        "--system", metavar="TEXT", help='system message; "paper": the 508 characters of the EAGLE evaluation'
    )
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--max-new-tokens", type=int, default=64)
    add("--ignore-eos", action="store_true", help="decode to the length limit")
    add("--reps", type=int, default=3)
    add(
        "--max-seconds",
        type=float,
        default=80,
        help="no repetition starts that would end later, nor a question of the first one (0: no limit)",
    )
    add(
        "--warmup-runs",
        type=int,
        default=3,
        help="most warm-up runs per arm; ends when two agree within 1 %%",
    )
    add(
        "--baseline",
        choices=("hf",),
        help="add transformers generate (dynamic and static cache) on the same weights",
    )
    add("--hf-compile", action="store_true", help="with --baseline hf: also with a compiled forward")
    add("--compile", action="store_true", help="compile the step of every arm")
    add("--kernels", default="auto", choices=("auto", "triton", "reference"))
    add("--device", choices=("cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES))
    add("--ctx", type=int, help="context to allocate (default: what the suites need)")
    add("--tie-margin", type=float, help=f"logit margin of a near-tie (default: {TIE:g} in float32, else 0)")
    add("--allow-diff", action="store_true", help="print ratios of arms that differ, labelled")
    synthetic = parser.add_argument_group("engine alone")
    synthetic.add_argument(
        "--synthetic-tau", type=float, default=0.0, metavar="X", help="also: X / measured step time"
    )
    synthetic.add_argument(
        "--shape", choices=tuple(SHAPES), help="random weights of this shape; needs --synthetic-tau"
    )
    synthetic.add_argument("--quant", choices=("int8", "int4"), help="with --shape: quantized weights")
    synthetic.add_argument(
        "--rows", default="", metavar="pp512,tg128@d4096", help="llama-bench style rows of plain decoding"
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json", metavar="FILE", help="JSON lines: every run, then the summary; -: the summary on stdout"
    )
    out.add_argument("--csv", metavar="FILE", help="the summary's rows")
    out.add_argument(
        "--plot", metavar="PNG", help="speed, acceptance by depth, tau by position (needs matplotlib)"
    )
    out.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two --json files and exit")
    out.add_argument("-q", "--quiet", action="store_true", help="no progress line")
    out.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Exit codes as generate.py; 1: an arm that promises the same tokens gave others."""
    args = build_parser().parse_args(argv)
    try:
        if args.compare:
            print(compare(*args.compare))
            return 0
        return run(args)
    except (ValueError, ArithmeticError, OSError, torch.OutOfMemoryError) as error:
        if args.debug:
            raise
        print(f"error  {' '.join(str(error).split())}", file=sys.stderr)
        return getattr(error, "code", USAGE)


def settings_of(args: argparse.Namespace, dtype: str) -> Settings:
    """Settings from the flags; UserError for values that make no sense."""
    checks = {
        "--reps": args.reps,
        "--max-new-tokens": args.max_new_tokens - 1,
        "--warmup-runs": args.warmup_runs,
    }
    for name, value in checks.items():
        if value < 1:
            raise UsageError(f"{name} is too small; allowed: {'2' if 'new' in name else '1'} or more.")
    if args.shape and not args.synthetic_tau:
        raise UsageError("--shape has random weights; add --synthetic-tau X (tokens per step to assume).")
    if args.synthetic_tau and args.synthetic_tau < 1:
        raise UsageError("--synthetic-tau counts the target's own token; allowed: 1 or more.")
    tie = TIE if dtype in ("float32", "float64") else 0.0
    return Settings(
        temperatures=tuple(dict.fromkeys(args.temperature)),
        max_new_tokens=args.max_new_tokens,
        reps=args.reps,
        seed=args.seed,
        top_k=args.top_k,
        top_p=args.top_p,
        ignore_eos=args.ignore_eos,
        warmup_runs=args.warmup_runs,
        max_seconds=args.max_seconds,
        tie_margin=tie if args.tie_margin is None else args.tie_margin,
        allow_diff=args.allow_diff,
        synthetic_tau=args.synthetic_tau,
        random_weights=bool(args.shape),
    )


def arms_of(args: argparse.Namespace, base: Engine, ctx: int) -> list[Arm]:
    """Plain decoding, then the arms asked for or found, then transformers."""
    directory = None if args.shape else Path(args.checkpoint)
    if args.shape:
        big = DYNAMIC_GPU if base.model.device.type == "cuda" else DYNAMIC
        specs = [
            ("plain", {}),
            ("eagle1 paper25", {"eagle": "random:1"}),
            ("eagle3 dynamic", {"eagle": "random:3", "tree": big}),
        ]
    else:
        specs = default_arms(directory, base.model.config, base.model.device.type == "cuda")
    if args.arm:
        specs = [("plain", {}), *(parse_arm(text) for text in args.arm)]
    if args.only:
        wanted = {name.strip() for name in args.only.split(",")}
        if unknown := wanted - {name for name, _ in specs}:
            raise UsageError(f"--only {', '.join(unknown)}: arms are {', '.join(n for n, _ in specs)}.")
        specs = [spec for spec in specs if spec[0] in wanted | {"plain"}]
    names = [name for name, _ in specs]
    if len(set(names)) < len(names) or "plain" in names[1:]:
        raise UsageError(f"arm names must differ, and the first is always plain; got {', '.join(names)}.")
    arms: list[Arm] = []
    for name, given in specs:
        label, options = arm_options(name, given, directory)
        arms.append(EngineArm(name, label, options, build_engine(base, options, ctx)))
    if args.baseline:
        kinds = ["hf", "hf-static"] + (["hf-compiled"] if args.hf_compile else [])
        arms += [HFArm(kind, base.model, base.tokenizer) for kind in kinds]
    return arms


def run(args: argparse.Namespace) -> int:
    """Measure what the flags ask for; prints the report."""
    check_outputs(args)
    common = {"device": args.device, "dtype": args.dtype}
    if args.shape:
        base = random_engine(
            args.shape, **common, quant=args.quant, compile=args.compile, kernels=args.kernels
        )
    else:
        ctx = {"ctx": args.ctx} if args.ctx else {}
        base = load(args.checkpoint, **common, compile=args.compile, kernels=args.kernels, **ctx)
    settings, prompts = settings_of(args, base.options.dtype), prompts_of(args, base.tokenizer)
    limit = args.ctx or min(base.model.rotary.length, base.model.config.max_positions)
    if args.shape or base.tokenizer is None:
        questions = random_suite(base.model.config.vocab_size, args.questions or 3, min(128, limit // 4))
    elif args.suite:
        questions = [q for path in args.suite for q in read_suite(path, args.questions)]
    else:
        questions = builtin_suite(args.questions)
    rows = [text.strip() for text in args.rows.split(",") if text.strip()]
    need = max(
        [prompts.longest(q, settings.max_new_tokens) for q in questions] + [row_context(r) for r in rows]
    )
    ctx = args.ctx or min(limit, (need + 63) // 64 * 64)
    questions = [q for q in questions if len(prompts.ids(q.turns[:1], [])) + settings.max_new_tokens <= ctx]
    if not questions:
        raise UsageError(f"no question fits {ctx} tokens with --max-new-tokens {settings.max_new_tokens}.")
    if rows and max(map(row_context, rows)) > ctx:
        raise UsageError(
            f"--rows {args.rows} needs {max(map(row_context, rows))} of {ctx} tokens of context."
        )
    return _measure(args, base, arms_of(args, base, ctx), questions, prompts, settings, rows, ctx)


def _measure(
    args, base: Engine, arms, questions, prompts: Prompts, settings: Settings, rows, ctx: int
) -> int:
    device, stops = base.model.device, tuple(base.stop_ids(SamplingParams()))
    before, bandwidth = environment(device), copy_bandwidth(device)
    progress, lines = Progress(args.quiet), Lines(args.json)
    model = {
        "checkpoint": args.shape or Path(args.checkpoint).resolve().name,
        "weights_sha256": fingerprint(base.model),
        "dtype": base.options.dtype,
        "quant": getattr(base.model, "quant", None) or "none",
        "ctx": ctx,
        "template": base.tokenizer.chat_template_source if base.tokenizer and prompts.chat else None,
    }
    bench = Bench(arms, questions, prompts, settings, stops or NO_STOP, ctx, lines.write, progress, before)
    runs: list[dict[str, Any]] = []
    extra: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    interrupted = False
    started = time.perf_counter()
    try:
        if not rows or args.arm or args.suite:
            warm = bench.warm_up()
            facts = arm_facts(arms)
            for line in bench.measure():
                runs.append(line)
        if rows:
            text = [t for q in questions for t in prompts.ids(q.turns[:1], [])]
            ids = (text * (1 + max(map(row_context, rows)) // len(text)))[: max(map(row_context, rows))]
            for row in rows:
                progress(0.0, row)
                extra.append(bench_row(arms[0], row, ids, settings.reps, bandwidth))
                lines.write(extra[-1])
    except KeyboardInterrupt:
        interrupted = True
    progress.done()
    summary_rows = summarise(runs, settings) if any(r["baseline"] for r in runs) else []
    for row in summary_rows:
        arm = next(a for a in arms if a.name == row["arm"])
        row["bandwidth_share"] = None
        if isinstance(arm, EngineArm) and row["step_ms"]:
            context = row["prompt_tokens"] + row["new_tokens"] / row["runs"] / 2
            row["bandwidth_share"] = step_bytes(arm.engine, int(context)) / row["step_ms"] * 1e3 / bandwidth
    after = gpu_state(device)
    notes = remarks(summary_rows, runs, facts) + [
        f"skipped (too long for ctx {ctx}): {s}" for s in bench.skipped
    ]
    notes += [bench.cut] if bench.cut else []
    unsteady = [f"{w['arm']} (T = {w['temperature']:g})" for w in warm if not w["agreed"]]
    if unsteady:
        who = ", ".join(unsteady) if len(unsteady) < len(warm) else "every arm (a busy machine?)"
        notes.append(f"no two warm-up runs in a row within 1 %: {who}")
    if interrupted:
        notes.append("interrupted: the numbers are of the runs that were done")
    summary = {
        "type": "summary",
        "model": model,
        "settings": vars(settings) | {"temperatures": list(settings.temperatures)},
        "environment": before,
        "gpu_after": after,
        "copy_bandwidth": bandwidth,
        "bootstrap": {"seed": settings.seed, "resamples": RESAMPLES},
        "warm_up": warm,
        "arms": facts,
        "rows": summary_rows,
        "llama_bench": extra,
        "notes": notes,
        "interrupted": interrupted,
        "seconds": time.perf_counter() - started,
    }
    lines.write(summary)
    lines.close()
    report(summary)
    if args.csv:
        write_csv(args.csv, summary_rows)
    if args.plot and summary_rows:
        write_plot(args.plot, summary_rows, f"{model['checkpoint']} {model['dtype']} on {before['device']}")
    if args.json == "-":
        print(json.dumps(summary))
    if interrupted:
        return 130
    broken = any(r["label"] == SAME_TOKENS and r["same"] and r["same"]["differs"] for r in summary_rows)
    return 1 if broken and not settings.allow_diff else 0


if __name__ == "__main__":
    raise SystemExit(main())
