"""TODO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.records import read_lines
from bench.summary import _pair
from bench.tables import _number, table


def differences(a: Any, b: Any, name: str = "") -> list[str]:
    """Leaves in which two nested dictionaries differ, as `name: a -> b`."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{name}.{k}" if name else k)]
    return [] if a == b else [f"{name}: {a} -> {b}"]


def compare(a: str | Path, b: str | Path) -> str:
    """Two result files side by side: what differs in the machines, the rates, and whether the work was the same."""
    (runs_a, sum_a), (runs_b, sum_b) = read_lines(a), read_lines(b)
    ignored = (
        "time_utc",
        "load_average",
        "gpu.temperature.gpu",
        "gpu.utilization.gpu",
        "gpu.clocks.sm",
        "gpu.memory.used",
    )
    changed = [
        d for d in differences(sum_a["environment"], sum_b["environment"]) if d.split(":")[0] not in ignored
    ]
    changed += differences(sum_a["settings"], sum_b["settings"], "settings")
    changed += differences(sum_a["model"], sum_b["model"], "model")
    arms = [{fact["arm"]: fact["options"] for fact in summary.get("arms", [])} for summary in (sum_a, sum_b)]
    for name in arms[0].keys() & arms[1].keys():
        changed += differences(arms[0][name], arms[1][name], f"arm {name}")
    rows_b = {(r["suite"], r["temperature"], r["arm"]): r for r in sum_b["rows"]}
    body, missing = [], []
    for row in sum_a["rows"]:
        key = row["suite"], row["temperature"], row["arm"]
        other = rows_b.pop(key, None)
        if other is None:
            missing.append(f"{key} only in {a}")
            continue
        same_work = _work(runs_a, key) == _work(runs_b, key)
        ids_a, ids_b = _ids(runs_a, key), _ids(runs_b, key)
        shared = ids_a.keys() & ids_b.keys()
        equal = sum(ids_a[k] == ids_b[k] for k in shared)
        gains = [_number(r["speedup"]["median"]) + "x" if r["speedup"] else "-" for r in (row, other)]
        speeds = row["tokens_per_second"], other["tokens_per_second"]
        ratio = f"{speeds[1] / speeds[0]:.3f}x" if same_work and all(speeds) else "other prompts"
        ratio += " (other tokens)" if same_work and equal < len(shared) else ""
        body.append(
            [
                row["suite"],
                f"{row['temperature']:g}",
                row["arm"],
                _number(speeds[0], 1),
                _number(speeds[1], 1),
                ratio,
            ]
            + [*gains, _number(row["tau"]), _number(other["tau"]), f"{equal} / {len(shared)}"]
        )
    missing += [f"{key} only in {b}" for key in rows_b]
    head = [
        "suite",
        "T",
        "arm",
        "A tok/s",
        "B tok/s",
        "B / A",
        "A speedup",
        "B speedup",
        "A tau",
        "B tau",
        "same tokens",
    ]
    parts = [table(head, body)] if body else ["nothing in common"]
    parts += (
        ["differs   " + "\n          ".join(changed)]
        if changed
        else ["same environment, settings, model and arms"]
    )
    parts += ["missing   " + "\n          ".join(missing)] if missing else []
    return "\n\n".join(parts)


def _work(runs, key: tuple) -> set[tuple]:
    return {
        (r["prompt_sha256"], r["temperature"])
        for r in runs
        if r["arm"] == key[2] and r["temperature"] == key[1] and key[0] in ("all", r["suite"])
    }


def _ids(runs, key: tuple) -> dict[tuple, str]:
    return {
        (*_pair(r), r["prompt_sha256"]): r["ids_sha256"]
        for r in runs
        if r["arm"] == key[2] and r["temperature"] == key[1] and key[0] in ("all", r["suite"])
    }
