"""Two result files of scripts.bench side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.measure import Line
from bench.records import read_lines
from bench.summary import Row, pair_of, runs_of
from bench.tables import number, table

# What differs between any two runs on the same machine.
GPU = "temperature.gpu utilization.gpu clocks.sm memory.used".split()
PASSING = ("time_utc", "load_average", *(f"gpu.{name}" for name in GPU))


def differences(a: Any, b: Any, name: str = "") -> list[str]:
    """Leaves in which two nested dictionaries differ, as `name: a -> b`."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{name}.{k}" if name else k)]
    return [] if a == b else [f"{name}: {a} -> {b}"]


def compare(a: str | Path, b: str | Path) -> str:
    """Two result files side by side: what differs in the machines, the rates, and whether the work was the same."""
    (runs_a, summary_a), (runs_b, summary_b) = read_lines(a), read_lines(b)
    rows_a, rows_b = ({_place(row): row for row in summary["rows"]} for summary in (summary_a, summary_b))
    shared = [place for place in rows_a if place in rows_b]
    body = [_cells(rows_a[place], rows_b[place], runs_a, runs_b) for place in shared]
    missing = [f"{place} only in {a if place in rows_a else b}" for place in [*rows_a, *rows_b] if place not in shared]
    head = "suite|T|arm|A tok/s|B tok/s|B / A|A speedup|B speedup|A tau|B tau|same tokens".split("|")
    changed, indent = _changes(summary_a, summary_b), "\n" + " " * 10
    parts = [table(head, body) if body else "nothing in common"]
    parts.append(f"differs   {indent.join(changed)}" if changed else "same environment, settings, model and arms")
    if missing:
        parts.append(f"missing   {indent.join(missing)}")
    return "\n\n".join(parts)


def _place(row: Row) -> tuple:
    return row["suite"], row["temperature"], row["arm"]


def _changes(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What differs in the environments, settings, models, and options of the arms that both have."""
    found = differences(a["environment"], b["environment"])
    changed = [line for line in found if line.split(":")[0] not in PASSING]
    changed += differences(a["settings"], b["settings"], "settings")
    changed += differences(a["model"], b["model"], "model")
    arms = [{fact["arm"]: fact["options"] for fact in summary["arms"]} for summary in (a, b)]
    for name in (name for name in arms[0] if name in arms[1]):
        changed += differences(arms[0][name], arms[1][name], f"arm {name}")
    return changed


def _cells(row: Row, other: Row, runs_a: list[Line], runs_b: list[Line]) -> list[str]:
    """The cells of an arm that both files have, whose runs are among `runs_a` and `runs_b`.

    Rates of other prompts are not set against each other.
    """
    suite, T, arm = _place(row)
    mine = [[r for r in runs_of(runs, suite, T) if r["arm"] == arm] for runs in (runs_a, runs_b)]
    asked = [{r["prompt_sha256"] for r in runs} for runs in mine]
    ids = [{(*pair_of(r), r["prompt_sha256"]): r["ids_sha256"] for r in runs} for runs in mine]
    shared = ids[0].keys() & ids[1].keys()
    equal = sum(ids[0][k] == ids[1][k] for k in shared)
    rates = row["tokens_per_second"], other["tokens_per_second"]
    ratio = f"{rates[1] / rates[0]:.3f}x" if asked[0] == asked[1] and all(rates) else "other prompts"
    if asked[0] == asked[1] and equal < len(shared):
        ratio += " (other tokens)"
    cells = [suite, f"{T:g}", arm, *(number(rate, 1) for rate in rates), ratio]
    cells += [f"{number(r['speedup']['median'])}x" if r["speedup"] else "-" for r in (row, other)]
    return [*cells, number(row["tau"]), number(other["tau"]), f"{equal} / {len(shared)}"]
