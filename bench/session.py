"""One measurement from the warm-up to the summary line: what `scripts.bench` runs and writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.environment import gpu_state
from bench.measure import Bench, arm_facts
from bench.rows import bench_row, row_context
from bench.summary import RESAMPLES, add_bandwidth_share, remarks, summarise


@dataclass
class Outcome:
    """What was measured; after Ctrl-C, as far as it came."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    warm_up: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)  # of the arms
    rows: list[dict[str, Any]] = field(default_factory=list)  # in the terms of llama-bench
    interrupted: bool = False
    seconds: float = 0.0


def measure(bench: Bench, rows: Sequence[str], compare: bool, bandwidth: float) -> Outcome:
    """Measure the arms in turn (if `compare`), then the rows on the first arm. Ctrl-C ends it early.

    Every run goes to `bench.emit` at once. `bandwidth` is that of a copy, in bytes per second.
    """
    out, started = Outcome(), time.perf_counter()
    try:
        if compare:
            out.warm_up = bench.warm_up()
            out.facts = arm_facts(bench.arms)
            for line in bench.measure():
                out.runs.append(line)
        if rows:
            text = [token for question in bench.questions for token in bench.prompts.first(question)]
            longest = max(map(row_context, rows))
            ids = (text * (1 + longest // len(text)))[:longest]
        for row in rows:
            bench.progress(0.0, row)
            out.rows.append(bench_row(bench.arms[0], row, ids, bench.settings.reps, bandwidth))
            bench.emit(out.rows[-1])
    except KeyboardInterrupt:
        out.interrupted = True
    out.seconds = time.perf_counter() - started
    return out


def summary_line(bench: Bench, out: Outcome, model: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """The last line of the JSON: everything that the report prints. `model` says what was measured."""
    settings = bench.settings
    rows = summarise(out.runs, settings) if any(r["baseline"] for r in out.runs) else []
    add_bandwidth_share(rows, bench.arms, bandwidth)
    return {
        "type": "summary",
        "model": model,
        "settings": vars(settings) | {"temperatures": list(settings.temperatures)},
        "environment": bench.environment,
        "gpu_after": gpu_state(bench.arms[0].engine.model.device),
        "copy_bandwidth": bandwidth,
        "bootstrap": {"seed": settings.seed, "resamples": RESAMPLES},
        "warm_up": out.warm_up,
        "arms": out.facts,
        "rows": rows,
        "llama_bench": out.rows,
        "notes": remarks(rows, out.runs, out.facts) + _notes(bench, out),
        "interrupted": out.interrupted,
        "seconds": out.seconds,
    }


def _notes(bench: Bench, out: Outcome) -> list[str]:
    """What was left out, cut short or unsteady."""
    notes = [f"skipped (too long for ctx {bench.ctx}): {skipped}" for skipped in bench.skipped]
    if bench.cut:
        notes.append(bench.cut)
    unsteady = [f"{w['arm']} (T = {w['temperature']:g})" for w in out.warm_up if not w["agreed"]]
    if unsteady:
        who = ", ".join(unsteady) if len(unsteady) < len(out.warm_up) else "every arm (a busy machine?)"
        notes.append(f"no two warm-up runs in a row within 1 %: {who}")
    if out.interrupted:
        notes.append("interrupted: the numbers are of the runs that were done")
    return notes
