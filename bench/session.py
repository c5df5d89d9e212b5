"""One measurement from the warm-up to the summary line: what `scripts.bench` runs and writes."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence

from bench.arms import NO_STOP, EngineArm
from bench.environment import gpu_state
from bench.measure import Bench, Line, arm_facts, step_bytes
from bench.summary import RESAMPLES, add_bandwidth_share, remarks, summarise
from sampling import SamplingParams
from support.errors import UsageError


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
        "settings": vars(settings),
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
    """Whose weights differ, and what was left out, cut short or unsteady."""
    kept = {fact["arm"]: fact["options"].get("weights") for fact in done["arms"]}
    notes = [f"{arm}: its weights are {what}" for arm, what in kept.items() if what]
    notes += [f"skipped (too long for ctx {bench.ctx}): {skipped}" for skipped in dict.fromkeys(bench.skipped)]
    notes += [bench.cut] if bench.cut else []
    unsteady = [f"{w['arm']} (T = {w['temperature']:g})" for w in done["warm_up"] if not w["agreed"]]
    if unsteady:
        notes.append(f"no two warm-up runs in a row within 1 %: {', '.join(unsteady)}")
    if done["interrupted"]:
        notes.append("interrupted: the numbers are of the runs that were done")
    return notes


# ---- rows in the terms of llama-bench, so that its numbers and ours can stand side by side --------------------


def parse_row(text: str) -> tuple[str, int, int]:
    """pp512, tg128 or tg128@d4096 as (kind, tokens, depth). Raises UsageError for anything else."""
    found = re.fullmatch(r"(pp|tg)0*([1-9]\d*)(?:@d(\d+))?", text.replace(" ", ""))
    if not found:
        raise UsageError(f"--rows {text!r:.40}: expected pp512, tg128 or tg128@d4096.")
    kind, count, depth = found.groups()
    return kind, int(count), int(depth or 0)


def row_context(text: str) -> int:
    """The context that a row needs."""
    kind, count, depth = parse_row(text)
    return depth + count + (1 if kind == "pp" else 2)


def bench_row(plain: EngineArm, text: str, ids: list[int], reps: int, bandwidth: float) -> Line:
    """Measure one row on the prompt `ids`: tokens/s with mean and standard deviation over `reps` runs.

    pp is the processing of N prompt tokens after a depth of cached ones (their share of the whole prompt's time), and tg
    the generation of N tokens one after another.
    """
    kind, count, depth = parse_row(text)
    params = SamplingParams(max_new_tokens=count + 1 if kind == "tg" else 1, stop_ids=NO_STOP)

    def seconds() -> float:
        if kind == "tg":
            return plain.run(ids[: max(1, depth)], params).decode_seconds
        whole = plain.run(ids[: depth + count], params).ttft_seconds
        return whole - plain.run(ids[:depth], params).ttft_seconds if depth else whole

    rates = [count / max(seconds(), 1e-9) for _ in range(reps + 1)][1:]  # the first run warms up
    share = None
    if kind == "tg":  # every step gives one token
        share = step_bytes(plain.engine, depth + count // 2) * statistics.median(rates) / bandwidth
    return {
        "type": "row",
        "arm": plain.name,
        "test": f"{kind}{count}" + (f" @ d{depth}" if depth else ""),
        "tokens_per_second": statistics.mean(rates),
        "sd": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "all": rates,
        "bandwidth_share": share,
    }
