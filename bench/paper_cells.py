"""TODO."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.arms import (
    NO_STOP,
    SAME_DISTRIBUTION,
    SAME_TOKENS,
    Arm,
    EngineArm,
    HFArm,
    _is,
    build_engine,
    shown,
    synchronize,
)
from bench.environment import environment
from bench.environment import fingerprint as environment_fingerprint
from bench.measure import TIE, Bench, Settings, first_fork
from bench.measure import digest as measure_digest
from bench.paper_page import KEPT, LENGTHS, SHIFTED, cell_id, latest, read_cells
from bench.suites import builtin_suite, prompts_of, random_suite, read_suite
from engine import Engine
from load import load, plan_memory
from model import DTYPES
from sampling import SamplingParams
from support.errors import UsageError
from support.machine import free_memory
from weights.checkpoint import load_config
from weights.files import read_entries
from weights.heads import read_eagle
from weights.medusa import MEDUSA_FILES
from weights.quantized import QuantSpec, pack_
from weights.rounding import quantize_


def read_card(path: Path) -> dict[str, Any]:
    """What CARD.json beside a drafter says of its making; empty without one."""
    file = path / "CARD.json"
    card = json.loads(file.read_text()) if file.is_file() else {}
    return {k: card[k] for k in ("inputs", "regenerated", "data", "loss", "parameters", "steps") if k in card}


def drafters(args: argparse.Namespace, config) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The drafters given or found in the checkpoint's folders, and for each kind that is missing the reason."""
    directory = Path(args.checkpoint)
    folders = sorted(p for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []
    found: list[dict[str, Any]] = []

    def add(method: str, key: str, path: Path, **more: Any) -> None:
        name = path.name if path.is_dir() else path.stem
        found.append(
            {"method": method, "name": name, "options": {key: str(path)}, "card": read_card(path)} | more
        )

    heads = [Path(p) for p in args.eagle] or [p for p in folders if _is(read_eagle, p, config)]
    ablation = [Path(p) for p in args.ablation]
    for path in [p for p in heads if p.resolve() not in {a.resolve() for a in ablation}] + ablation:
        version = read_eagle(str(path), config).config.version
        other = path in ablation or read_card(path).get("inputs", SHIFTED) != SHIFTED
        add(f"eagle{version}", "eagle", path, ablation=other)
    medusa = (
        [Path(args.medusa)]
        if args.medusa
        else [p for p in folders if any((p / f).is_file() for f in MEDUSA_FILES)]
    )
    for path in medusa:
        files = [path] if path.is_file() else [path / f for f in MEDUSA_FILES if (path / f).is_file()]
        count = len({name.split(".")[0] for name in read_entries(files[:1])})
        add("medusa", "medusa", path, tree="paper25" if count >= 5 else f"chain:{count}")
    known = {d["options"].get("eagle") or d["options"].get("medusa") for d in found}
    drafts = (
        [Path(p) for p in args.draft_checkpoint]
        if args.draft_checkpoint
        else [p for p in folders if str(p) not in known and _is(load_config, p)][:1]
    )
    for path in drafts:
        add("draft", "draft_checkpoint", path)
    missing = {
        "eagle1": "no EAGLE-1 head given (--eagle HEAD)",
        "medusa": "no Medusa heads given (--medusa)",
        "draft": "no draft LLM given (--draft-checkpoint)",
    }
    return found, {k: v for k, v in missing.items() if not any(d["method"] == k for d in found)}


def plan(
    args: argparse.Namespace, found: list[dict[str, Any]], suites: Sequence[str], dtype: str
) -> list[dict[str, Any]]:
    """Every cell that this checkpoint can have, as specs. suites: names, the main one (in MT-bench's part) first."""
    cells: list[dict[str, Any]] = []

    def add(
        drafter: dict[str, Any],
        tree: str,
        suite: str,
        T: float,
        quant: str = "",
        batch: int = 1,
        **options: Any,
    ):
        given = drafter["options"] | options | ({"tree": tree} if tree else {})
        cells.append(
            {
                "method": drafter["method"],
                "drafter": drafter["name"],
                "card": drafter.get("card", {}),
                "ablation": drafter.get("ablation", False),
                "tree": tree,
                "verify": options.get("verify", "match"),
                "suite": suite,
                "T": T,
                "quant": quant or dtype,
                "batch": batch,
                "options": given,
            }
        )

    main = suites[0]
    eagle = [d for d in found if d["method"].startswith("eagle")]
    first = next((d for d in eagle if d["method"] == "eagle1" and not d["ablation"]), None) or next(
        iter(eagle), None
    )
    for drafter in eagle:
        for suite in suites[:1] if drafter["ablation"] else suites:
            for T in (0.0, 1.0):
                for tree in ("paper25", "chain:5"):
                    add(drafter, tree, suite, T)
                    if T and drafter is first:
                        add(drafter, tree, suite, T, verify="multi-round")
                if suite == main and not drafter["ablation"]:
                    add(drafter, args.dynamic, suite, T)
    for drafter in found:
        for T in (0.0, 1.0):
            if drafter["method"] == "medusa":
                add(drafter, drafter["tree"], main, T)
            if drafter["method"] == "draft":
                for length in LENGTHS:
                    add(drafter, f"chain:{length}", main, T)
    for T in (0.0, 1.0):
        add({"method": "ngram", "name": "n-gram", "options": {"drafter": "ngram"}}, "chain:7", main, T)
        add({"method": "lookahead", "name": "lookahead", "options": {"drafter": "lookahead"}}, "", main, T)
    if first:
        for quant in ("", "int4"):
            add(first, "chain:3", main, 0.0, quant)
        add(first, "paper25", main, 0.0, "int4")
        for batch in args.batches:
            if batch > 1:
                add(first, "paper25", main, 0.0, batch=batch)
        add(first, "chain:5", main, 0.0, batch=max(args.batches))
    add({"method": "hf", "name": "transformers", "options": {}}, "", main, 0.0)
    return cells


class Bases:
    """The plain engine per weight precision, each loaded once; int4 comes from --int4 DIR or is rounded in memory."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.engines = args, {}

    def __call__(self, quant: str) -> Engine:
        args, int4 = self.args, quant == "int4"
        key = "int4" if int4 else ""
        if key not in self.engines:
            source = args.int4 if int4 and args.int4 else args.checkpoint
            base = load(
                source, device=args.device, dtype=args.dtype, compile=args.compile, kernels=args.kernels
            )
            if int4 and not args.int4:
                for block in base.model.layers:
                    quantize_(block, QuantSpec("int4"))
                base.model.quant = "int4"
                with base.backend.active():
                    pack_(base.model, DTYPES[base.options.dtype])
            self.engines[key] = base
        return self.engines[key]


def measure_single(
    base: Engine, spec, questions, prompts, settings: Settings, ctx: int
) -> list[dict[str, Any]]:
    """Plain decoding and the drafter in turn over the questions: the run lines of scripts.bench, less the environment."""
    plain = EngineArm("plain", SAME_TOKENS, {}, build_engine(base, {}, ctx))
    if spec["method"] == "hf":
        arm: Arm = HFArm("hf", base.model, base.tokenizer)
    else:
        promise = SAME_TOKENS if spec["verify"] == "match" else SAME_DISTRIBUTION
        arm = EngineArm("arm", promise, {}, build_engine(base, spec["options"], ctx))
    arm.name = "arm"
    stops = tuple(base.stop_ids(SamplingParams())) or NO_STOP
    job = Bench([plain, arm], questions, prompts, replace(settings, temperatures=(spec["T"],)), stops, ctx)
    for each in job.arms:  # warm-up
        each.run(prompts.ids(questions[0].turns[:1], []), settings.params(spec["T"], 0, stops))
    return list(job.measure())


def measure_batch(
    base: Engine, spec, questions, prompts, settings: Settings, ctx: int
) -> list[dict[str, Any]]:
    """The same for a batch: one run line per batch, with the tokens of all rows, timed from the last row's first one."""
    B, lines = spec["batch"], []
    engines = [build_engine(base, {"batch_size": B}, ctx)]
    engines.append(build_engine(base, spec["options"] | {"batch_size": B}, ctx))
    first = [prompts.ids(q.turns[:1], []) for q in questions]
    groups = [[first[(g + i) % len(first)] for i in range(B)] for g in range(0, len(first), B)]
    for rep in range(-1, settings.reps):  # -1 warms up
        params = replace(settings.params(spec["T"], max(rep, 0), NO_STOP), stop_ids=NO_STOP)
        for number, group in enumerate(groups if rep >= 0 else groups[:1]):
            outcome = {}
            for i in [(number + rep) % 2, (number + rep + 1) % 2]:
                engine = engines[i]
                others = [[(p[0] + 1) % base.model.config.vocab_size] for p in group]
                engine.generate_batch(others, replace(params, max_new_tokens=1)).run()  # empty caches
                synchronize(base.model.device)
                seen, began, clock = set(), time.perf_counter(), 0.0
                stream = engine.generate_batch(group, params)
                for chunk in stream:
                    if len(seen) < B:
                        seen.add(chunk.row)
                        clock = time.perf_counter()
                if any(r.cached_tokens for r in stream.results):
                    raise RuntimeError("a batch reused cached tokens of another run.")
                outcome[i] = stream.results, clock - began, time.perf_counter() - clock
            if rep < 0:
                continue
            same = "same"
            for row, (a, b) in enumerate(zip(outcome[0][0], outcome[1][0], strict=True)):
                fork = first_fork(a.token_ids, b.token_ids)
                if fork is not None:
                    text, ids = [*group[row], *a.token_ids[:fork]], (a.token_ids[fork], b.token_ids[fork])
                    near = (
                        engines[0].margin(row, text, len(group[row]), params, *ids)[0] < settings.tie_margin
                    )
                    same = "tie" if near and same != "differs" else "differs"
            for i, (results, ttft, seconds) in outcome.items():
                lines.append(_batch_line(i, number, rep, params, group, results, ttft, seconds, same))
    return lines


def _batch_line(
    i: int, number: int, rep: int, params, group, results, ttft: float, seconds: float, same: str
):
    steps = [len(ids) for r in results for ids in r.tokens_per_step]
    ids = [t for r in results for t in r.token_ids]
    return {
        "arm": "arm" if i else "plain",
        "label": SAME_TOKENS,
        "baseline": not i,
        "temperature": params.temperature,
        "question": f"batch {number}",
        "turn": 1,
        "rep": rep,
        "seed": params.seed,
        "prompt_sha256": measure_digest([t for p in group for t in p]),
        "prompt_tokens": sum(map(len, group)) / len(group),
        "new_tokens": 1 + sum(steps),
        "ids_sha256": measure_digest(ids),
        "ttft_seconds": ttft,
        "decode_seconds": seconds,
        "tokens_per_step": steps,
        "same": same if i else None,
        "random_weights": False,
    }


def largest_batch(base: Engine, drafter: dict[str, Any], ctx: int, cap: int) -> int:
    """The most sequences, up to `cap`, whose caches and buffers fit the free memory in both arms at once (they are timed
    in turn), a fifth left for activations. At least 1."""
    config, device = base.model.config, base.model.device
    options = replace(base.options, ctx=ctx, tree="paper25", **drafter["options"])
    head, free = read_eagle(options.eagle, config), free_memory(device) * 4 // 5

    def fits(batch: int) -> bool:
        arms = [replace(base.options, ctx=ctx), options]
        plans = [plan_memory(config, replace(o, batch_size=batch), head if o.eagle else None) for o in arms]
        return sum(p.head + p.kv + p.buffers for p in plans) <= free

    low, high = 1, cap
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def measure(args: argparse.Namespace, say=print) -> None:
    """Measure every cell that is planned and not in --cells yet; appends a line per cell, complete when written."""
    bases = Bases(args)
    base = bases("")
    settings = Settings(
        max_new_tokens=args.max_new_tokens,
        reps=args.reps,
        seed=args.seed,
        tie_margin=TIE if base.options.dtype in ("float32", "float64") else 0.0,
    )
    suites, prompts, ctx = find_questions(args, base, settings)
    found, missing = drafters(args, base.model.config)
    heads = [d for d in found if d["method"].startswith("eagle")]
    if args.largest_batch and heads:
        args.batches = sorted({*args.batches, largest_batch(base, heads[0], ctx, args.largest_batch)})
    specs = plan(args, found, list(suites), base.options.dtype)
    where = environment(base.model.device)
    weights = environment_fingerprint(base.model)
    known = {c["id"] for c in latest(read_cells(args.cells), weights) if c["type"] == "cell"}
    identity = {
        "model": weights,
        "device": where["device"],
        "dtype": base.options.dtype,
        "compile": args.compile,
        "tokens": settings.max_new_tokens,
        "reps": settings.reps,
        "seed": settings.seed,
    }
    name, started = Path(args.checkpoint).resolve().name, time.perf_counter()
    shape = base.model.config
    header = {
        "type": "model",
        "checkpoint": name,
        "dtype": base.options.dtype,
        "weights_sha256": identity["model"],
        "layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "experts": shape.num_local_experts,
        "suites": {k: len(v) for k, v in suites.items()},
        "missing": missing,
        "int4": "a quantized checkpoint"
        if args.int4
        else "blocks rounded to int4 in memory (RTN, groups of 128)",
    }
    if not args.plan:
        append(args.cells, header)
    for number, spec in enumerate(specs):
        questions = suites[spec["suite"]]
        asked = measure_digest([t for q in questions for turn in q.turns for t in prompts.ids((turn,), [])])
        key = cell_id(spec, identity | {"prompts": asked})
        what = f"{spec['drafter']} {spec['tree']} {spec['verify']}, {spec['suite']}, T = {spec['T']:g}, "
        what += f"{spec['quant']}, batch {spec['batch']}"
        if args.plan or key in known:
            say(f"{'have' if key in known else 'to do'}  {what}")
            continue
        if args.max_seconds and time.perf_counter() - started > args.max_seconds:
            say(
                f"stopped after {args.max_seconds:g} s with {len(specs) - number} cells unvisited; run it again to go on"
            )
            break
        say(f"{number + 1}/{len(specs)}  {what}")
        line = (
            {"type": "cell", "id": key, "checkpoint": name, "weights_sha256": weights}
            | spec
            | {"options": shown(spec["options"])}
        )
        began = time.perf_counter()
        try:
            run = measure_single if spec["batch"] == 1 else measure_batch
            runs = run(bases(spec["quant"]), spec, questions, prompts, settings, ctx)
        except (ValueError, torch.OutOfMemoryError) as error:
            say(f"      not run: {error}")
            append(args.cells, line | {"type": "not_run", "reason": " ".join(str(error).split())[:200]})
            continue
        line |= {
            "runs": [{k: r.get(k) for k in KEPT} for r in runs if not r["baseline"]],
            "plain": [{k: r.get(k) for k in KEPT} for r in runs if r["baseline"]],
            "label": next(r["label"] for r in runs if not r["baseline"]),
            "settings": asdict(settings),
            "seconds": time.perf_counter() - began,
            "command": args.command,
            "environment": where,
        }
        append(args.cells, line)
        known.add(key)


def find_questions(args: argparse.Namespace, base: Engine, settings: Settings):
    """({suite: questions that fit}, how they become prompts, the context they need); MT-bench or the first file leads."""
    args.format, limit = (
        getattr(args, "format", "auto"),
        min(base.model.rotary.length, base.model.config.max_positions),
    )
    prompts = prompts_of(args, base.tokenizer)
    if base.tokenizer is None:
        every = random_suite(base.model.config.vocab_size, args.questions or 3, min(32, limit // 4))
    elif args.suite:
        every = []
        for path in args.suite:
            built_in = path == "stdlib"
            every += builtin_suite(args.questions) if built_in else read_suite(path, args.questions)
    else:
        every = builtin_suite(args.questions)
    need = max(prompts.longest(q, settings.max_new_tokens) for q in every)
    ctx = min(limit, (need + 63) // 64 * 64)
    every = [q for q in every if len(prompts.ids(q.turns[:1], [])) + settings.max_new_tokens <= ctx]
    if not every:
        raise UsageError(f"no question fits {ctx} tokens with --max-new-tokens {settings.max_new_tokens}.")
    names = sorted(dict.fromkeys(q.suite for q in every), key=lambda name: name != "mt_bench")
    return {name: [q for q in every if q.suite == name] for name in names}, prompts, ctx


def append(path: str | Path, line: dict[str, Any]) -> None:
    """One line more, after a torn last line of an interrupted run has been cut off."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_bytes() if path.exists() else b""
    with open(path, "ab") as file:
        if old and not old.endswith(b"\n"):
            file.truncate(old.rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
