"""What the measurements of `make gpu` say: the table of step times, and the goals for an H100 beside their figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from bench.kernel_timing import PEERS

Line = dict[str, Any]
Check = tuple[str, float | None, str, float]  # what, value, '>=' or '<=', bound

COLUMNS = (
    "device", "target", "weights", "head, tree", "nodes", "context", "step ms (p10 to p90)", "of copy", "over plain",
    "draft share", "tok/s at given tau",
)  # fmt: skip


def table(lines: Iterable[Line]) -> str:
    """Markdown of the cells that have a figure, '' if none has. Of a cell measured twice the later line counts."""
    latest = {(line["environment"]["device"], line["key"]): line for line in _measured(lines)}
    order = ("shape", "quant", "context", "nodes")
    found = sorted(latest.values(), key=lambda line: (line["environment"]["device"], *(line[key] for key in order)))
    rows = [COLUMNS, ["---"] * 4 + ["---:"] * 7, *map(_cells, found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) if found else ""


def _measured(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.get("type") == "step_time" and "step_ms" in line]


def _cells(line: Line) -> list[str]:
    """The columns of one cell."""
    ms, split, synthetic = line["step_ms"], line["split_ms"], line["synthetic"]
    head, rate = "plain", "-"
    if line["head"]:
        head = f"EAGLE-{line['head']} {line['head_quant'] or line['dtype']}, {line['tree']}"
    if line.get("sampling"):
        head += f", {line['sampling']}"
    if synthetic["source"] != "assumed":
        rate = f"{synthetic['tokens_per_second']:.0f} ({synthetic['source']}, {synthetic['given_tau']:g})"
    return [
        line["environment"]["device"], line["shape"], line["quant"] or line["dtype"], head,
        str(line["nodes"]), str(line["context"]), f"{ms['median']:.3f} ({ms['p10']:.3f} to {ms['p90']:.3f})",
        f"{line['share_of_copy']:.0%}", f"{line['break_even_tau']:.2f}x" if line["break_even_tau"] else "-",
        f"{split['draft'] / ms['median']:.0%}" if split else "-", rate,
    ]  # fmt: skip


def readme_block(lines: Iterable[Line]) -> str:
    """The text of a README's block 'gpu': the machines and the table. Small shapes do not count."""
    cells = [line for line in _measured(lines) if not line["shape"].startswith("tiny")]
    if not cells:
        return "(unmeasured: no GPU result is committed; `make gpu` writes one to benchmarks/results)"
    machines = []
    for env in {line["environment"]["device"]: line["environment"] for line in cells}.values():
        gpu, known = env["gpu"] or {}, env["versions"]
        machines.append(
            f"{env['device']} at {gpu.get('power.limit', '?')} W, driver {gpu.get('driver_version', '?')}, "
            f"torch {known['torch']}, triton {known['triton']}, commit {env['git']['commit']}"
        )
    return (
        f"{'; '.join(machines)}. Random weights of real shapes: step times are measured, tok/s is the given tau over "
        f"the step time, not a measured rate.\n\n{table(cells)}"
    )


def goals(lines: Iterable[Line]) -> list[str]:
    """The goals for an H100 beside what was measured. A goal without its figures is called unmeasured."""
    real = [line for line in lines if "error" not in line and line.get("key", "").startswith("llama")]
    measured = [line for line in _measured(real) if line["shape"] == "llama-3-8b" and line["context"] == 128]
    cells = {(line["quant"], line["tree"], line["head_quant"]): line for line in measured if not line.get("sampling")}
    sampled = {line["sampling"]: line["step_ms"]["median"] for line in measured if line.get("sampling")}
    greedy = cells.get(("int4", "dynamic:60,7,10", "int4"))
    filtered = sampled.get("T=1 top-p 0.9")
    over_greedy = filtered / greedy["step_ms"]["median"] if filtered and greedy else None
    starts = {line["cache"]: line["total_s"] for line in real if line["type"] == "start"}
    graphs = [line["graphs"] for line in real if line["type"] == "launches"]
    plain = cells.get(("", "", ""))
    chain, wide = (cells.get(("", tree, "int8")) for tree in ("chain:7", "dynamic:60,7,10"))
    split = wide and wide["split_ms"]
    verify = split["verify"] / plain["step_ms"]["median"] if plain and split else None
    share = split["draft"] / wide["step_ms"]["median"] if split else None
    of_chain, of_wide = (cell and cell["synthetic"]["tokens_per_second"] for cell in (chain, wide))
    return judged([
        ("plain bf16 decoding, share of copy bandwidth", plain and plain["share_of_copy"], ">=", 0.85),
        ("verify of 60 nodes over the one-node step", verify, "<=", 1.10),
        ("draft's share of a 60-node step, int8 head", share, "<=", 0.20),
        ("host gap of a 60-node step, ms", wide and wide["host_gap_ms"], "<=", 0.05),
        ("tok/s at tau 3.91, 7-chain", of_chain, ">=", 455),
        ("tok/s at tau 6.13, 60 nodes", of_wide, ">=", 700),
        ("cold start, s", starts.get("cold"), "<=", 60),
        ("warm start, s", starts.get("warm"), "<=", 10),
        ("int4 step of 60 nodes with top-p over a greedy one", over_greedy, "<=", 1.15),
        ("CUDA graphs launched per step", max(graphs, default=None), "<=", 1),
    ])  # fmt: skip


def kernel_goals(lines: Iterable[Line], model: str = "llama-3-8b") -> list[str]:
    """The kernels' goals for an H100 over all layers of one model together.

    These are the share of the copy bandwidth, flatness from 1 row to 64, and the fastest peer at 16 and 32 rows.
    """
    lines = list(lines)
    total: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}  # (kernel, rows) -> layer -> (us, kB)
    copy = 0.0
    for line in lines:
        if line.get("model") == model and "us" in line and "not a GPU" not in line["device"]:
            found = total.setdefault((line["kernel"], line["m"]), {})
            found[line["layer"]] = (line["us"], line["gbs"] * line["us"])
            copy = line["copy_gbs"]
    layers = {layer for found in total.values() for layer in found}
    complete = {key: found.values() for key, found in total.items() if found.keys() == layers}
    whole = {key: [sum(figures) for figures in zip(*found, strict=True)] for key, found in complete.items()}

    def share(kernel: str, rows: int) -> float | None:
        time_us, size = whole.get((kernel, rows), (None, 0))
        return time_us and size / time_us / copy

    def over(kernel: str, rows: int, other: str, others: int) -> float | None:
        mine, theirs = whole.get((kernel, rows)), whole.get((other, others))
        return mine and theirs and mine[0] / theirs[0]

    checks: list[Check] = []
    for (kernel, bound), m in itertools.product((("int4", 0.65), ("int8", 0.85)), (1, 16)):
        checks.append((f"{kernel} at {m} rows, share of copy bandwidth", share(kernel, m), ">=", bound))
    for m, bound in ((16, 1.1), (64, 1.25)):
        checks.append((f"int4 at {m} rows over 1 row", over("int4", m, "int4", 1), "<=", bound))
    for rows in (16, 32):
        rivals = [name for name in PEERS if (name, rows) in whole]
        peer = min(rivals, key=lambda name: whole[name, rows][0], default="no peer")
        checks.append((f"int4 at {rows} rows over {peer}", over("int4", rows, peer, rows), "<=", 1.0))
    counted = {line["m"]: line for line in lines if "dram_read" in line}
    for rows in (1, 32):  # partial sums are written and read beside the weights
        moved = counted.get(rows) and (counted[rows]["dram_read"] + counted[rows]["dram_written"])
        share = moved and moved / counted[rows]["weight_bytes"]
        checks.append((f"DRAM bytes of the gate-up at {rows} rows over its weights", share, "<=", 1.15))
    return judged(checks)


def judged(checks: Iterable[Check]) -> list[str]:
    """One line per check."""
    found = []
    for text, value, relation, bound in checks:
        good = value is not None and (value >= bound if relation == ">=" else value <= bound)
        mark, figure = ("?   ", "unmeasured") if value is None else ("ok  " if good else "MISS", f"{value:.3f}")
        found.append(f"  {mark} {text}: {figure} (goal {relation} {bound:g})")
    return found
