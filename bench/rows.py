"""Rows in the terms of llama-bench, so that its numbers and ours can stand side by side."""

from __future__ import annotations

import re
import statistics
from typing import Any

from bench.arms import NO_STOP, EngineArm
from bench.measure import step_bytes
from sampling import SamplingParams
from support.errors import UsageError


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


def bench_row(arm: EngineArm, text: str, ids: list[int], reps: int, bandwidth: float) -> dict[str, Any]:
    """Measure one row on the prompt `ids`: tokens/s with mean and standard deviation over `reps` runs.

    pp is the processing of N prompt tokens after a depth of cached ones (their share of the whole prompt's time), and tg
    the generation of N tokens one after another.
    """
    kind, count, depth = parse_row(text)
    params = SamplingParams(max_new_tokens=count + 1 if kind == "tg" else 1, stop_ids=NO_STOP)
    rates, steps = [], []
    for _ in range(reps + 1):
        if kind == "tg":
            sample = arm.run(ids[: max(1, depth)], params)
            seconds = sample.decode_seconds
            steps.append(seconds / len(sample.tokens_per_step))
        else:
            seconds = arm.run(ids[: depth + count], params).ttft_seconds
            if depth:
                seconds -= arm.run(ids[:depth], params).ttft_seconds
        rates.append(count / max(seconds, 1e-9))
    rates, steps = rates[1:], steps[1:]  # the first run warms up
    share = step_bytes(arm.engine, depth + count // 2) / statistics.median(steps) / bandwidth if steps else None
    return {
        "type": "row",
        "arm": arm.name,
        "test": f"{kind}{count}" + (f" @ d{depth}" if depth else ""),
        "tokens_per_second": statistics.mean(rates),
        "sd": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "all": rates,
        "bandwidth_share": share,
    }
