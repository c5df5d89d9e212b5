"""TODO."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from bench.arms import OTHER_ENGINE, SAME_TOKENS
from bench.measure import Settings

RESAMPLES = 2000


def rate(line: dict[str, Any]) -> float | None:
    """Decode tokens/s of a run: ids after the first over the time after the first; None if there was only one."""
    seconds = line["decode_seconds"]
    return (line["new_tokens"] - 1) / seconds if line["new_tokens"] > 1 and seconds > 0 else None


def total_rate(lines: Sequence[dict[str, Any]], whole: bool = False) -> float | None:
    """Total tokens / total time: of decoding, or (whole) of the requests with their prompts."""
    if whole:
        tokens = sum(r["new_tokens"] for r in lines)
        seconds = sum(r["ttft_seconds"] + r["decode_seconds"] for r in lines)
    else:
        tokens = sum(r["new_tokens"] - 1 for r in lines)
        seconds = sum(r["decode_seconds"] for r in lines)
    return tokens / seconds if tokens and seconds else None


def bootstrap(ratios: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % interval of the median: the 2.5 and 97.5 percentiles of medians of `random.Random(seed).choices`."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[math.ceil(0.975 * resamples) - 1]


def acceptance(steps: Sequence[int]) -> tuple[float, list[float]]:
    """tau and, for d = 1, 2, ..., the share of steps that emitted more than d tokens; tau = 1 + their sum."""
    if not steps:
        return 0.0, []
    return sum(steps) / len(steps), [sum(n > d for n in steps) / len(steps) for d in range(1, max(steps))]


def tau_by_position(lines: Sequence[dict[str, Any]], width: int = 16) -> list[float | None]:
    """Mean tokens per step of the steps that begin at output positions [k width, (k+1) width)."""
    buckets: dict[int, list[int]] = {}
    for line in lines:
        at = 1
        for count in line["tokens_per_step"] or ():
            buckets.setdefault(at // width, []).append(count)
            at += count
    return [
        statistics.mean(buckets[k]) if k in buckets else None for k in range(max(buckets, default=-1) + 1)
    ]


def summarise(
    runs: Sequence[dict[str, Any]], settings: Settings, resamples: int = RESAMPLES
) -> list[dict[str, Any]]:
    """One row per (suite, temperature, arm), from the run lines alone; suite "all" when there are several."""
    suites = list(dict.fromkeys(r["suite"] for r in runs))
    arms = list(dict.fromkeys(r["arm"] for r in sorted(runs, key=lambda r: not r["baseline"])))
    rows = []
    for suite in [*suites, *(["all"] if len(suites) > 1 else [])]:
        of_suite = [r for r in runs if suite in ("all", r["suite"])]
        for T in dict.fromkeys(r["temperature"] for r in of_suite):
            here = [r for r in of_suite if r["temperature"] == T]
            base = {_pair(r): r for r in here if r["baseline"]}
            for arm in arms:
                if lines := [r for r in here if r["arm"] == arm]:
                    rows.append(_row(lines, base, suite, T, settings, resamples))
    return rows


def _pair(line: dict[str, Any]) -> tuple:
    return line["suite"], line["question"], line["turn"], line["rep"], line["temperature"]


def _row(lines, base: dict[tuple, dict], suite: str, T: float, s: Settings, resamples: int) -> dict[str, Any]:
    label, baseline = lines[0]["label"], lines[0]["baseline"]
    known = all(r["tokens_per_step"] is not None for r in lines)
    steps = [n for r in lines for n in r["tokens_per_step"]] if known else []
    tau, by_depth = acceptance(steps)
    seconds = sum(r["decode_seconds"] for r in lines)
    forwards = len(steps) if known else sum(r["new_tokens"] - 1 for r in lines)
    reps = sorted({r["rep"] for r in lines})
    per_rep = [v for v in (total_rate([r for r in lines if r["rep"] == rep]) for rep in reps) if v]
    plain = list(base.values())
    plain_steps = sum(len(r["tokens_per_step"]) for r in plain)
    plain_step = sum(r["decode_seconds"] for r in plain) / plain_steps if plain_steps else None
    step = seconds / forwards if forwards else None
    row: dict[str, Any] = {
        "suite": suite,
        "temperature": T,
        "arm": lines[0]["arm"],
        "label": label,
        "baseline": baseline,
        "prompts": len({_pair(r)[:3] for r in lines}),
        "runs": len(lines),
        "prompt_tokens": statistics.mean(r["prompt_tokens"] for r in lines),
        "new_tokens": sum(r["new_tokens"] for r in lines),
        "tokens_per_second": total_rate(lines),
        "tokens_per_second_sd": statistics.stdev(per_rep) if len(per_rep) > 1 else None,
        "request_tokens_per_second": total_rate(lines, whole=True),
        "ttft_ms": 1e3 * statistics.median(r["ttft_seconds"] for r in lines),
        "steps": forwards if known else None,
        "tau": tau if known else None,
        "accepted_by_depth": by_depth if known else None,
        "tau_by_position": tau_by_position(lines) if known else None,
        "step_ms": 1e3 * step if step else None,
        "break_even_tau": step / plain_step if step and plain_step and known else None,
        "same": None
        if baseline
        else {k: sum(r["same"] == k for r in lines) for k in ("same", "tie", "differs")},
        "speedup": None,
        "blocked": None,
        "synthetic": None,
    }
    if s.synthetic_tau and step and plain_step and known:
        given = 1.0 if baseline else s.synthetic_tau
        row["synthetic"] = {
            "given_tau": given,
            "tokens_per_second": given / step,
            "speedup": given / step * plain_step,
        }
    if baseline:
        return row
    pairs = [(r, base[_pair(r)]) for r in lines if _pair(r) in base]
    ratios: dict[tuple, list[float]] = {}
    for ours, theirs in pairs:
        a, b = rate(ours), rate(theirs)
        if a and b:
            ratios.setdefault(_pair(ours)[:3], []).append(a / b)
    per_prompt = [statistics.median(values) for values in ratios.values()]
    if lines[0]["random_weights"] and lines[0].get("depth") != 0 and label != OTHER_ENGINE:
        row["blocked"] = "random weights: acceptance means nothing"
    elif label == SAME_TOKENS and row["same"]["differs"] and not s.allow_diff:
        row["blocked"] = f"DIFFERS {row['same']['differs']}/{len(lines)}"
    elif lines[0].get("depth") and tau == 1:
        cost = f"{1 / row['break_even_tau']:.2f}x" if row["break_even_tau"] else "unknown"
        row["blocked"] = (
            f"ACCEPTED NOTHING: the drafter is broken or lost here; plain decoding's speed times {cost}"
        )
    elif not per_prompt:
        row["blocked"] = "no run decoded more than one token"
    else:
        mine, theirs = [p[0] for p in pairs], [p[1] for p in pairs]
        low, high = bootstrap(per_prompt, s.seed, resamples)
        row["speedup"] = {
            "median": statistics.median(per_prompt),
            "low": low,
            "high": high,
            "per_prompt": per_prompt,
            "total": total_rate(mine) / total_rate(theirs),
            "request": total_rate(mine, True) / total_rate(theirs, True),
            "ttft": statistics.median(m["ttft_seconds"] / t["ttft_seconds"] for m, t in pairs),
        }
    return row


def remarks(
    rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], facts: Sequence[dict]
) -> list[str]:
    """What a reader should not overlook: broken promises, drafters that accept nothing or cost time, unsteady steps."""
    depth = {f["arm"]: f.get("depth", 0) for f in facts}
    notes, slow = [], []
    for row in rows:
        where = f"{row['arm']} on {row['suite']}, T = {row['temperature']:g}"
        if row["label"] == SAME_TOKENS and row["same"] and row["same"]["differs"]:
            notes.append(
                f"{where}: {row['same']['differs']} of {row['runs']} runs DIFFER from plain decoding"
            )
        if row["same"] and row["same"]["tie"]:
            notes.append(f"{where}: {row['same']['tie']} of {row['runs']} runs fork at a near-tie (rounding)")
        if runs and runs[0]["random_weights"]:
            continue
        if depth.get(row["arm"]) and row["steps"] and not row["accepted_by_depth"]:
            notes.append(f"{where}: accepted nothing (tau 1.00): a broken drafter, or one of another model")
        elif depth.get(row["arm"]) and row["break_even_tau"] and row["tau"] < row["break_even_tau"]:
            slow.append(f"{where} (tau {row['tau']:.2f} < {row['break_even_tau']:.2f})")
    if slow:
        notes.append(f"tau below break-even, speculation costs time: {'; '.join(slow)}")
    seen: dict[tuple, list] = {}
    for r in runs:
        key = (r["arm"], r["prompt_sha256"], r["temperature"], r["seed"])
        if seen.setdefault(key, r["tokens_per_step"]) != r["tokens_per_step"]:
            notes.append(
                f"{r['arm']}: a repeated request took other steps (is state carried between requests?)"
            )
            break
    return list(dict.fromkeys(notes))
