"""The report of a benchmark: tables on stdout."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.arms import SAME_TOKENS

# What the tables of lines of a summary show, by the name of these lines: of --steps the time of a step by arm, batch and
# context, of --clients what requests that run together get.
COLUMNS = {
    "steps": {
        "arm": "{arm}", "nodes": "{nodes}", "batch": "{batch}", "context": "{context}", "step ms": "{ms:.3f}",
        "p10 to p90": "{p10:.3f} to {p90:.3f}", "of copy bandwidth": "{share_of_copy:.0%}", "of plain": "{of_plain:.2f}x",
    },
    "clients": {
        "arm": "{arm}", "clients": "{clients}", "prompt": "{prompt_tokens}",
        "tok/s together": "{tokens_per_second:.1f}", "lowest to highest": "{low:.1f} to {high:.1f}",
        "of one, plain": "{of_one:.2f}x", "with prompts": "{with_prompts:.1f}",
        "first token ms": "{first_token_ms:.0f}", "of the last one": "{last_first_token_ms:.0f}",
    },
}  # fmt: skip


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a terminal: text to the left, numbers to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    sides = [">" if any(cell[:1].isdigit() for cell in column[1:]) else "<" for column in columns]
    rule = ["-" * (w + 1) + (":" if side == ">" else "-") for w, side in zip(widths, sides, strict=True)]
    line = "| " + " | ".join(f"{{:{side}{w}}}" for w, side in zip(widths, sides, strict=True)) + " |"
    return "\n".join([line.format(*head), f"|{'|'.join(rule)}|", *(line.format(*row) for row in rows)])


def gain_text(row: dict[str, Any]) -> str:
    """The median speedup, or in a word why there is none; nothing for the baseline."""
    return f"{row['speedup']['median']:.2f}x" if row["speedup"] else (row["blocked"] or "").split(":")[0]


def result_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of arms: speed, speedup with its interval, tau, TTFT, and whether the tokens were the same."""
    head = "suite|T|arm|prompts|tok/s|speedup|95 % CI|total|tau|by depth|TTFT ms|tokens as plain|label".split("|")
    body = []
    for row in rows:
        gain, same = row["speedup"], row["same"]
        deviation = f" ± {row['tokens_per_second_sd']:.1f}" if row["tokens_per_second_sd"] is not None else ""
        cells = [row["suite"], f"{row['temperature']:g}", row["arm"], str(row["prompts"])]
        cells += [number(row["tokens_per_second"], 1) + deviation, gain_text(row)]
        cells += [f"{gain['low']:.2f} .. {gain['high']:.2f}", f"{gain['total']:.2f}x"] if gain else ["", ""]
        depth = " ".join(f"{share:.2f}".lstrip("0") for share in row["accepted_by_depth"] or ())
        cells += [number(row["tau"]), depth, f"{row['ttft_ms']:.1f}"]
        ties = f", {same['tie']} near-tie" if same and same["tie"] else ""
        cells += [f"{same['same']} / {row['runs']}{ties}", row["label"]] if same else ["", "baseline"]
        body.append(cells)
    return table(head, body)


def arms_table(summary: dict[str, Any]) -> str:
    """For a page: what ran where, and one row per arm with its speed and tau at every temperature.

    The speed is tokens/s of plain decoding and the median speedup of the other arms, with its interval.
    """
    suites = dict.fromkeys(row["suite"] for row in summary["rows"])
    whole = "all" if "all" in suites else next(iter(suites), "")
    rows = [row for row in summary["rows"] if row["suite"] == whole]
    cells: dict[str, dict[float, list[str]]] = {}  # speed and tau by arm and temperature
    for row in rows:
        name = row["arm"] + ("" if row["label"] == SAME_TOKENS else f", {row['label']}")
        gain, rate = row["speedup"], row["tokens_per_second"]
        speed = gain_text(row) + (f" ({gain['low']:.2f} .. {gain['high']:.2f})" if gain else "")
        tau = number(row["tau"]) if row["tau"] and not row["baseline"] else ""
        cells.setdefault(name, {})[row["temperature"]] = [f"{rate:.0f} tok/s" if row["baseline"] else speed, tau]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    body = [[arm, *(cell for T in temperatures for cell in by_T.get(T, ["", ""]))] for arm, by_T in cells.items()]
    model, machine = summary["model"], summary["environment"]
    what = ", ".join(text for text in (model["checkpoint"], model["dtype"], model["quant"]) if text != "none")
    title = f"**{what}** on {machine['device']}, {machine['time_utc'][:10]}, {', '.join(suites)}:"
    return f"{title}\n\n{table(['arm', *(x for T in temperatures for x in (f'T = {T:g}', 'tau'))], body)}"


def behind_table(summary: dict[str, Any]) -> str:
    """For a page: speed and tau of the arms behind texts of each kind and length (`bench.behind`)."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in summary["rows"]:
        kind, _, length = row["suite"].partition(" ")
        gain = f"{row['tokens_per_second']:.0f} tok/s" if row["baseline"] else f"{gain_text(row)}, {row['tau']:.2f}"
        if length:
            cells.setdefault((kind, row["arm"]), {})[f"{length}, T = {row['temperature']:g}"] = gain
    columns = list(dict.fromkeys(place for by_place in cells.values() for place in by_place))
    body = [[kind, arm, *(by.get(place, "") for place in columns)] for (kind, arm), by in sorted(cells.items())]
    return table(["behind", "arm", *columns], body)


def taus_table(summary: dict[str, Any]) -> str:
    """For a page: tau of every arm that drafts, behind all texts of a length together (`bench.behind`)."""
    found: dict[tuple[tuple[str, str], str], list[dict[str, Any]]] = defaultdict(list)
    for row in summary["rows"]:
        if (length := row["suite"].partition(" ")[2]) and not row["baseline"]:
            found[(row["arm"], f"{row['temperature']:g}"), length].append(row)
    lengths = list(dict.fromkeys(length for _, length in found))
    arms = sorted({arm for arm, _ in found})
    return table(["arm", "T", *lengths], [[*arm, *(number(_tau(found[arm, x])) for x in lengths)] for arm in arms])


def _tau(rows: Sequence[dict[str, Any]]) -> float:
    """Of all their runs. The first token of a run is the prompt's."""
    return sum(row["new_tokens"] - row["runs"] for row in rows) / sum(row["steps"] for row in rows)


def cost_table(rows: Sequence[dict[str, Any]], facts: Sequence[dict[str, Any]], bandwidth: float) -> str:
    """What a step costs: its time, the tau at which it breaks even, and its share of the memory's bandwidth."""
    known = {f["arm"]: f["nodes"] for f in facts if "nodes" in f}
    body = []
    for row in (r for r in rows if r["arm"] in known and r["step_ms"] and r["steps"]):
        cells = [row["suite"], f"{row['temperature']:g}", row["arm"], str(known[row["arm"]]), number(row["step_ms"])]
        cells += ["-" if row["baseline"] else number(row["break_even_tau"]), number(row["tau"])]
        body.append([*cells, f"{row['bandwidth_share']:.0%}"])
    head = "suite|T|arm|nodes|step ms|break-even tau|tau".split("|")
    return table([*head, f"of {bandwidth / 1e9:.0f} GB/s copy"], body) if body else ""


def kept_table(kind: str, summary: dict[str, Any]) -> str:
    """The table of the lines that a summary keeps; kind: one of COLUMNS."""
    columns, lines = COLUMNS[kind], summary[kind]
    return table(list(columns), [[cell.format_map(line) for cell in columns.values()] for line in lines])


def report(summary: dict[str, Any]) -> None:
    """Print the markdown page."""
    rows, settings, bandwidth = summary["rows"], summary["settings"], summary["copy_bandwidth"]
    print(_header(summary))
    if rows:
        done = max(r["runs"] // r["prompts"] for r in rows)
        print(
            f"paired and interleaved; empty caches in every run; ids counted up to the first stop; {done} of "
            f"{settings['reps']} repetitions; at most {settings['max_new_tokens']} new tokens; seed {settings['seed']}; "
            f"decode and TTFT apart\n\n{result_table(rows)}\n\n"
            "speedup: median of the per-prompt ratios of decode tokens/s; total: ratio of total tokens / total time."
        )
        if any(row["suite"].startswith("chat ") for row in rows):
            print(f"\n{behind_table(summary)}")
        if cost := cost_table(rows, summary["arms"], bandwidth):
            print(f"\n{cost}")
    for kind in (kind for kind in COLUMNS if summary[kind]):
        print(f"\n{kept_table(kind, summary)}")
    for note in summary["notes"]:
        print(f"note  {note}")
    print(f"\n{summary['seconds']:.0f} s")


def _header(summary: dict[str, Any]) -> str:
    """Model, versions, and the machine; on a GPU also its state before and after."""
    e, m = summary["environment"], summary["model"]
    versions = "  ".join(f"{k} {v}" for k, v in e["versions"].items() if v)
    git = f"{e['git']['commit'] or 'no git'}{' (modified)' if e['git']['dirty'] else ''}"
    busy = f"   load {e['load_average']:.1f} of {e['cpus']} cores" if e["load_average"] is not None else ""
    text = f"{m['checkpoint']}  {m['dtype']}  {m['quant']}  ctx {m['ctx']}   {git}   {versions}\n"
    text += f"{e['device']}{busy}   copy {summary['copy_bandwidth'] / 1e9:.1f} GB/s"
    if e["gpu"]:
        gpu = defaultdict(lambda: "?", e["gpu"])  # nvidia-smi may not have answered
        after = (summary["gpu_after"] or {}).get("temperature.gpu", "?")
        text += f"\npower cap {gpu['power.limit']} W   clocks {gpu['clocks.sm']} of {gpu['clocks.max.sm']} MHz   "
        text += f"{gpu['temperature.gpu']} -> {after} C   driver {gpu['driver_version']}   "
        text += f"other GPU processes {gpu['other_processes']}   utilization before {gpu['utilization.gpu']} %"
    return text
