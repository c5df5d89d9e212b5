"""TODO."""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arms import SAME_TOKENS
from support.errors import UsageError
from support.machine import size_text


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a terminal: text to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    left = [all(not r[i][:1].isdigit() for r in rows) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        "-" * (w + 2) if is_left else "-" * (w + 1) + ":" for w, is_left in zip(widths, left, strict=True)
    )
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *map(line, rows)])


def result_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of arms: speed, speedup with its interval, tau, TTFT, and whether the tokens were the same."""
    synthetic = any(row["synthetic"] for row in rows)
    head = [
        "suite",
        "T",
        "arm",
        "prompts",
        "tok/s",
        "speedup",
        "95 % CI",
        "total",
        "tau",
        "by depth",
        "TTFT ms",
    ]
    head += (["given tau", "tok/s at it"] if synthetic else []) + ["tokens as plain", "label"]
    body = []
    for row in rows:
        gain, same = row["speedup"], row["same"]
        deviation = f" ± {row['tokens_per_second_sd']:.1f}" if row["tokens_per_second_sd"] is not None else ""
        depth = " ".join(f"{share:.2f}".lstrip("0") for share in row["accepted_by_depth"] or ())
        differs = bool(gain and same["differs"] and row["label"] == SAME_TOKENS)
        cells = [row["suite"], f"{row['temperature']:g}", row["arm"], str(row["prompts"])]
        cells.append(_number(row["tokens_per_second"], 1) + deviation)
        if gain:
            cells += [
                f"{gain['median']:.2f}x",
                f"{gain['low']:.2f} .. {gain['high']:.2f}",
                f"{gain['total']:.2f}x",
            ]
        else:
            cells += ["" if row["baseline"] else row["blocked"].split(":")[0], "", ""]
        tau = row["tau"]
        cells += [_number(tau), depth, f"{row['ttft_ms']:.1f}"]
        if synthetic:
            given = row["synthetic"]
            cells += [f"{given['given_tau']:g}", f"{given['tokens_per_second']:.1f}"] if given else ["-", "-"]
        tokens = ""
        if same:
            tokens = f"{same['same']} / {row['runs']}" + (f", {same['tie']} near-tie" if same["tie"] else "")
        cells += [tokens, "baseline" if row["baseline"] else row["label"] + (", DIFFERS" if differs else "")]
        body.append(cells)
    return table(head, body)


def cost_table(rows: Sequence[dict[str, Any]], facts: Sequence[dict[str, Any]], bandwidth: float) -> str:
    """Where a step's time goes: draft, the rest (verify, accept, commit, host), break-even, bandwidth, memory."""
    known = {f["arm"]: f for f in facts}
    body = []
    for row in rows:
        fact = known.get(row["arm"], {})
        if row["step_ms"] is None or row["steps"] is None or "nodes" not in fact:
            continue
        part = fact["draft_share"]
        if part is None:
            part = min(1.0, 1e3 * fact["draft_seconds"] / row["step_ms"])
        draft = part * row["step_ms"]
        share = row.get("bandwidth_share")
        body.append(
            [
                row["suite"],
                f"{row['temperature']:g}",
                row["arm"],
                str(fact["nodes"]),
                f"{row['step_ms']:.2f}",
                f"{draft:.2f}" if draft else "-",
                f"{row['step_ms'] - draft:.2f}",
                f"{part:.0%}" if draft else "-",
                "-" if row["baseline"] else _number(row["break_even_tau"]),
                _number(row["tau"]),
                "-" if share is None else f"{share:.0%}",
                size_text(fact["memory_bytes"]),
            ]
        )
    head = [
        "suite",
        "T",
        "arm",
        "nodes",
        "step ms",
        "draft ms",
        "rest ms",
        "draft share",
        "break-even tau",
        "tau",
    ]
    head += [f"of {bandwidth / 1e9:.0f} GB/s copy" if bandwidth else "of copy", "memory"]
    return table(head, body) if body else ""


def write_csv(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """The summary rows as CSV, nested values flattened."""
    flat = []
    for row in rows:
        nested = ("speedup", "same", "synthetic")
        out = {k: v for k, v in row.items() if k not in (*nested, "tau_by_position", "accepted_by_depth")}
        for name in nested:
            out |= {f"{name}_{k}": v for k, v in (row[name] or {}).items() if not isinstance(v, list)}
        out["accepted_by_depth"] = " ".join(f"{v:.6f}" for v in row["accepted_by_depth"] or ())
        flat.append(out)
    names = list(dict.fromkeys(name for row in flat for name in row))
    part = Path(f"{path}.part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)
    os.replace(part, path)


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files; UserError without it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    return plt


def check_outputs(args: argparse.Namespace) -> None:
    """UserError for results that could not be written, before anything is measured."""
    for flag in ("json", "csv", "plot"):
        path = getattr(args, flag)
        if path and path != "-" and not Path(path).resolve().parent.is_dir():
            raise UsageError(f"--{flag} {path}: there is no folder {Path(path).parent}; make it first.")
    if args.plot:
        pyplot()


def write_plot(path: str | Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Speed by suite, acceptance by depth and tau by position, as one picture. Needs matplotlib."""
    plt = pyplot()
    rows = [r for r in rows if r["suite"] != "all"]
    groups = list(dict.fromkeys((r["suite"], r["temperature"]) for r in rows))
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    colours = [c for i, c in enumerate(plt.get_cmap("tab10").colors) if i != 7]  # grey is plain decoding's
    colour = {arm: "0.6" if i == 0 else colours[(i - 1) % 9] for i, arm in enumerate(arms)}
    figure, (speed, depth, position) = plt.subplots(1, 3, figsize=(17, 5.8), constrained_layout=True)
    thick = 0.84 / len(arms)
    for row in rows:
        arm, group = row["arm"], (row["suite"], row["temperature"])
        at = groups.index(group) + (arms.index(arm) - (len(arms) - 1) / 2) * thick
        style = ("-", "--", ":", "-.")[groups.index(group) % 4]
        if top := row["tokens_per_second"]:
            blocked = row["blocked"] is not None
            fill = {"color": "white", "hatch": "//"} if blocked else {"color": colour[arm]}
            error = row["tokens_per_second_sd"] or 0
            speed.bar(at, top, thick, yerr=error, edgecolor=colour[arm], **fill)
            why = row["blocked"].split(":")[0] if blocked else ""
            mark = f"{row['speedup']['median']:.2f}x" if row["speedup"] else why
            speed.text(at, top + error, f" {mark}", ha="center", va="bottom", rotation=90, size=8)
        if row["accepted_by_depth"]:
            shares = row["accepted_by_depth"]
            depth.plot(range(1, len(shares) + 1), shares, style, marker="o", ms=4, color=colour[arm])
        if row["tau_by_position"]:
            points = [(16 * k + 8, v) for k, v in enumerate(row["tau_by_position"]) if v is not None]
            position.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=colour[arm])
    speed.set_xticks(range(len(groups)), [f"{suite}\nT = {T:g}" for suite, T in groups])
    speed.set(ylabel="decode tokens/s", title="speed by suite (ratio to plain: median over prompts)")
    speed.set_ylim(0, 1.18 * max((r["tokens_per_second"] or 0) for r in rows) or 1)
    depth.set(xlabel="depth d", ylabel="share of steps that accepted d tokens", title="acceptance by depth")
    depth.set_ylim(0, 1)
    depth.xaxis.get_major_locator().set_params(integer=True)
    position.set(
        xlabel="position in the output (tokens)", ylabel="tau", title="tokens per forward by position"
    )
    lines = [plt.Line2D([], [], color="0.3", ls=("-", "--", ":", "-.")[i % 4]) for i in range(len(groups))]
    depth.legend(lines, [f"{suite}, T = {T:g}" for suite, T in groups], fontsize=8)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour[arm]) for arm in arms]
    labels = {r["arm"]: r["label"] for r in rows}
    names = [arm if labels[arm] == SAME_TOKENS else f"{arm} ({labels[arm]})" for arm in arms]
    figure.legend(patches, names, loc="outside lower center", ncols=min(len(arms), 8), fontsize=9)
    figure.suptitle(title, fontsize=9)
    part = Path(f"{path}.part")
    figure.savefig(part, format="png", dpi=110)
    plt.close(figure)
    os.replace(part, path)


def report(summary: dict[str, Any]) -> None:
    """The markdown page on stdout."""
    e, m, s, rows = summary["environment"], summary["model"], summary["settings"], summary["rows"]
    versions = "  ".join(f"{k} {v}" for k, v in e["versions"].items() if v)
    git = f"{e['git']['commit'] or 'no git'}{' (modified)' if e['git']['dirty'] else ''}"
    print(f"{m['checkpoint']}  {m['dtype']}  {m['quant']}  ctx {m['ctx']}   {git}   {versions}")
    busy = f"   load {e['load_average']:.1f} of {e['cpus']} cores" if e["load_average"] is not None else ""
    print(f"{e['device']}{busy}   copy {summary['copy_bandwidth'] / 1e9:.1f} GB/s")
    if gpu := e["gpu"]:
        now = summary["gpu_after"] or {}
        get = gpu.get
        print(
            f"power cap {get('power.limit', '?')} W   clocks {get('clocks.sm', '?')} of "
            f"{get('clocks.max.sm', '?')} MHz   {get('temperature.gpu', '?')} -> {now.get('temperature.gpu', '?')} C   "
            f"driver {get('driver_version', '?')}   other GPU processes {get('other_processes', '?')}   "
            f"utilization before {get('utilization.gpu', '?')} %"
        )
    if rows:
        done = max(r["runs"] // r["prompts"] for r in rows)
        print(
            f"paired and interleaved; empty caches in every run; ids counted up to the first stop; {done} of {s['reps']} "
            f"repetitions; at most {s['max_new_tokens']} new tokens; seed {s['seed']}; decode and TTFT apart\n"
        )
        print(result_table(rows))
        print(
            "\nspeedup: median of the per-prompt ratios of decode tokens/s; total: ratio of total tokens / total time."
        )
        if any(r["synthetic"] for r in rows):
            print(
                f"tok/s at it: given tau {s['synthetic_tau']:g} / measured step time; no acceptance was measured for it."
            )
        if cost := cost_table(rows, summary["arms"], summary["copy_bandwidth"]):
            print(f"\n{cost}")
    if summary["llama_bench"]:
        body = [
            [
                r["arm"],
                r["test"],
                f"{r['tokens_per_second']:.2f} ± {r['sd']:.2f}",
                "-" if r["bandwidth_share"] is None else f"{r['bandwidth_share']:.0%}",
            ]
            for r in summary["llama_bench"]
        ]
        print("\n" + table(["arm", "test", "t/s", "of copy bandwidth"], body))
    for note in summary["notes"]:
        print(f"note  {note}")
    print(f"\n{summary['seconds']:.0f} s")
