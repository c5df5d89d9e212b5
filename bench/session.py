"""One measurement from the warm-up to the summary line: what `scripts.bench` runs and writes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from bench.environment import gpu_state
from bench.measure import Bench, Line, arm_facts
from bench.rows import bench_row, row_context
from bench.summary import RESAMPLES, add_bandwidth_share, remarks, summarise


def measure(
    bench: Bench, tests: Sequence[str], compare: bool, model: Line, bandwidth: float, emit: Callable[[Line], None]
) -> Line:
    """Measure the arms in turn (if `compare`), then the rows of llama-bench called `tests` on the first arm.

    Returns the last line of the JSON, with everything that the report prints. Every run goes to `emit` at once. Ctrl-C
    ends it early. `model` says what is measured. `bandwidth` is that of a copy, in bytes per second.
    """
    started = time.perf_counter()
    settings = bench.settings
    runs: list[Line] = []
    done: Line = {"warm_up": [], "arms": [], "llama_bench": [], "interrupted": False}
    try:
        if compare:
            done["warm_up"] = bench.warm_up()
            done["arms"] = arm_facts(bench.arms)
            for line in bench.measure():
                runs.append(line)
                emit(line)
        text = itertools.cycle(token for question in bench.questions for token in bench.prompts.first(question))
        ids = list(itertools.islice(text, max(map(row_context, tests), default=0)))
        for test in tests:
            bench.progress(0.0, test)
            done["llama_bench"].append(bench_row(bench.arms[0], test, ids, settings.reps, bandwidth))
            emit(done["llama_bench"][-1])
    except KeyboardInterrupt:
        done["interrupted"] = True
    rows = summarise(runs, settings) if any(r["baseline"] for r in runs) else []
    add_bandwidth_share(rows, bench.arms, bandwidth)
    return {
        "type": "summary",
        "model": model,
        "settings": vars(settings) | {"temperatures": list(settings.temperatures)},
        "environment": bench.environment,
        "gpu_after": gpu_state(bench.arms[0].engine.model.device),
        "copy_bandwidth": bandwidth,
        "bootstrap": {"seed": settings.seed, "resamples": RESAMPLES},
        **done,
        "rows": rows,
        "notes": remarks(rows, runs, done["arms"]) + _notes(bench, done),
        "seconds": time.perf_counter() - started,
    }


def _notes(bench: Bench, done: Line) -> list[str]:
    """What was left out, cut short or unsteady."""
    notes = [f"skipped (too long for ctx {bench.ctx}): {skipped}" for skipped in dict.fromkeys(bench.skipped)]
    notes += [bench.cut] if bench.cut else []
    unsteady = [f"{w['arm']} (T = {w['temperature']:g})" for w in done["warm_up"] if not w["agreed"]]
    if unsteady:
        notes.append(f"no two warm-up runs in a row within 1 %: {', '.join(unsteady)}")
    if done["interrupted"]:
        notes.append("interrupted: the numbers are of the runs that were done")
    return notes
