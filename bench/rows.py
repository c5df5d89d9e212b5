"""TODO."""

from __future__ import annotations

import statistics
from typing import Any

from bench.arms import NO_STOP, EngineArm
from bench.measure import step_bytes
from sampling import SamplingParams
from support.errors import UsageError


def parse_row(text: str) -> tuple[str, int, int]:
    """pp512, tg128, tg128@d4096 -> (kind, tokens, depth)."""
    test, _, depth = text.replace(" ", "").partition("@d")
    kind, count = test[:2], test[2:]
    if (
        kind not in ("pp", "tg")
        or not count.isdecimal()
        or int(count) < 1
        or (depth and not depth.isdecimal())
    ):
        raise UsageError(f"--rows {text!r:.40}: expected pp512, tg128 or tg128@d4096.")
    return kind, int(count), int(depth or 0)


def row_context(text: str) -> int:
    kind, count, depth = parse_row(text)
    return depth + count + (1 if kind == "pp" else 2)


def bench_row(arm: EngineArm, text: str, ids: list[int], reps: int, bandwidth: float) -> dict[str, Any]:
    """One row in llama-bench's terms, tokens/s mean and standard deviation: pp = prompt processing of N tokens after a
    depth of cached ones (its share of the whole prompt's time), tg = N tokens generated one after another."""
    kind, count, depth = parse_row(text)
    rates, steps = [], []
    for _ in range(reps + 1):
        if kind == "tg":
            prompt = ids[: max(1, depth)]
            sample = arm.run(prompt, SamplingParams(max_new_tokens=count + 1, stop_ids=NO_STOP))
            rates.append(count / sample.decode_seconds)
            steps.append(sample.decode_seconds / len(sample.tokens_per_step or [0]))
        else:
            params = SamplingParams(max_new_tokens=1, stop_ids=NO_STOP)
            seconds = arm.run(ids[: depth + count], params).ttft_seconds
            seconds -= arm.run(ids[:depth], params).ttft_seconds if depth else 0.0
            rates.append(count / max(seconds, 1e-9))
    rates, steps = rates[1:], steps[1:]  # the first one warms up
    share = None
    if kind == "tg" and bandwidth:
        share = step_bytes(arm.engine, depth + count // 2) / statistics.median(steps) / bandwidth
    name = f"{kind}{count}" + (f" @ d{depth}" if depth else "")
    return {
        "type": "row",
        "arm": arm.name,
        "test": name,
        "tokens_per_second": statistics.mean(rates),
        "sd": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "all": rates,
        "bandwidth_share": share,
    }
