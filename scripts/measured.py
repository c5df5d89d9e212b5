"""What was measured on which device, from the JSON files of benchmarks/results and from nothing else.

    python -m scripts.measured                                        # print the tables
    python -m scripts.measured --readme README.md docs/results.md     # write every block whose markers a page has

There are three blocks. `measured` has a table with one row per arm for each file of scripts.bench, and one row for each
other file. `headline` has at most six rows of these. `quantization` has the receipts of quantize.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.paper_cells import latest
from bench.paper_page import Page
from bench.tables import gain_text
from support.errors import command_parser, run_command
from support.files import read_json, read_json_lines, replace_block

Lines = list[dict[str, Any]]
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
HEADLINE = (  # file, arm, temperature, what the README calls it
    ("smollm2_int4_256_avx512.jsonl", "eagle3", 0.0, "speed with EAGLE-3 relative to plain decoding, temperature 0"),
    ("smollm2_int4_256_avx512.jsonl", "eagle3 without n-grams", 0.0, "the same without drafts from repeated text"),
    ("smollm2_int4_256_avx512.jsonl", "eagle3", 1.0, "with such drafts at temperature 1"),
    ("smollm2_int4_256_avx512.jsonl", "llama.cpp", 0.0, "speed of llama.cpp relative to our plain decoding"),
)
TAU, ACCEPTANCE = "smollm2_mt_bench.jsonl", "smollm2_acceptance.json"
NOTHING = "Nothing has been measured and committed yet."
CPU = ("cpu", "epyc", "xeon", "ryzen", "intel", "amd", "arm", "threads")


def contents(results: Path) -> dict[str, Lines]:
    """The JSON objects of every .json and .jsonl file in a folder, which need not exist. ValueError names a bad file."""
    found = {path.name: [read_json(path)] for path in results.glob("*.json")}
    found |= {path.name: read_json_lines(path) for path in results.glob("*.jsonl")}
    return dict(sorted(found.items()))


def find(value: Any, name: str) -> Any:
    """The first value called `name` in nested dictionaries, else None."""
    if not isinstance(value, dict):
        return None
    if value.get(name) not in (None, ""):
        return value[name]
    return next((v for v in (find(inner, name) for inner in value.values()) if v is not None), None)


def _speed(row: dict[str, Any]) -> str:
    """The rate of plain decoding; of another arm the median speedup with its interval, or why it has none."""
    if row["baseline"]:
        return f"{row['tokens_per_second']:.0f} tok/s"
    gain = row["speedup"]
    return gain_text(row) + (f" ({gain['low']:.2f}-{gain['high']:.2f})" if gain else "")


def summary_of(lines: Lines) -> dict[str, Any] | None:
    """The last summary line of a file of scripts.bench; None for another kind of file."""
    return next((line for line in reversed(lines) if line.get("type") == "summary"), None)


def _bench(summary: dict[str, Any], name: str) -> str:
    """One benchmark: a line that says what ran where, and a table with one row per arm."""
    suites = [r["suite"] for r in summary["rows"]]
    whole = "all" if "all" in suites else next(iter(suites), "")
    arms: dict[str, dict[float, tuple[str, str]]] = {}  # speed and tau by arm and temperature
    for row in (r for r in summary["rows"] if r["suite"] == whole):
        label = "" if row["label"] == "same tokens" else f", {row['label']}"
        tau = f"{row['tau']:.2f}" if row["tau"] and not row["baseline"] else ""
        arms.setdefault(row["arm"] + label, {})[row["temperature"]] = (_speed(row), tau)
    temperatures = list(dict.fromkeys(r["temperature"] for r in summary["rows"]))
    titles = ["arm", *(title for T in temperatures for title in (f"T = {T:g}", "tau"))]
    rows = [[arm, *(cell for T in temperatures for cell in found.get(T, ("", "")))] for arm, found in arms.items()]
    model = summary["model"]
    what = [model["checkpoint"], model["dtype"]]
    what += [model["quant"]] if model["quant"] != "none" else []
    what += ["compiled"] if any(arm.get("compiled") for arm in summary.get("arms", ())) else []
    title = f"**{', '.join(what)}** on {find(summary, 'device')} (`benchmarks/results/{name}`)"
    rates = [f"{r['test']} {r['tokens_per_second']:.0f} tok/s" for r in summary["llama_bench"]]
    return "\n\n".join([title, markdown(titles, rows, left=1)] + ([", ".join(rates)] if rates else []))


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> str:
    """A table with `left` columns of text and then columns of numbers; without `left` all are text."""
    rule = ["---"] * len(titles) if not left else ["---"] * left + ["---:"] * (len(titles) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rule, *rows))


def same_tokens(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Of a report of scripts.acceptance: (runs with shared noise that gave plain decoding's tokens, all such runs)."""
    shared = [r for r in rows if r["rule"] == "shared noise"]
    return sum(r["same"] for r in shared), sum(r["prompts"] for r in shared)


def device_of(lines: Lines) -> str:
    """The device that a file names, in its first line or else in its last ones, or 'not stated'."""
    order = [*lines[:1], *reversed(lines)]
    return str(next((found for key in ("device", "gpu") for line in order if (found := find(line, key))), "not stated"))


def describe(lines: Lines) -> str:
    """What a file says that is not of scripts.bench."""
    first = lines[0] if lines else {}
    if any(line.get("type") == "cell" for line in lines):
        header = next(line for line in reversed(lines) if line["type"] == "model")
        cells = [c for c in latest(lines, header["weights_sha256"]) if c["type"] == "cell"]
        best = max((v["tau"] for v in Page(lines, {}).values.values() if v["tau"]), default=0.0)
        text = f"{len(cells)} cells of the paper's tables for {header['checkpoint']}, tau up to {best:.2f}"
        return text if best else "no cell yet"
    if "rule" in (first.get("rows") or [{}])[0]:
        best = max(first["rows"], key=lambda r: r["tau"])
        same, total = same_tokens(first["rows"])
        text = f"acceptance: tau up to {best['tau']:.2f} ({best['head']}, {best['tree']}, T = {best['temperature']:g})"
        return f"{text}; same tokens as plain decoding in {same} of {total} runs with shared noise"
    if "receipts" in first:
        return f"{len(first['receipts'])} receipts of quantize.py, tau of {len(first['acceptance'])} combinations"
    if "verdict" in first:
        how = "compiled" if first["compile"] else "eager"
        return f"tree tuned for {first['model']} with {first['head']}, {how}: {first['verdict']}"
    if "parts" in first:
        failed = [p["part"] for p in first["parts"] if p.get("exit")]
        return f"`make gpu`: {len(first['parts'])} parts, failed: {', '.join(failed) or 'none'}"
    return f"{len(lines)} line(s) of {'kernel timings' if 'kernel' in str(first) else 'other numbers'}"


def table(results: Path = RESULTS) -> str:
    """Markdown: a table per file of scripts.bench, one row per other file, and whether any GPU is among the devices."""
    files = contents(results)
    summaries = {name: summary_of(lines) for name, lines in files.items()}
    parts = [_bench(summary, name) for name, summary in summaries.items() if summary]
    others = [
        [describe(lines), device_of(lines), f"`benchmarks/results/{name}`"]
        for name, lines in files.items()
        if not summaries[name]
    ]
    if others:
        parts.append(markdown(("what", "device", "file"), others))
    return "\n\n".join(parts) + no_gpu(files) if files else NOTHING


def no_gpu(files: dict[str, Lines]) -> str:
    """What to say below a table if no file comes from a GPU, else nothing."""
    known = {device_of(lines) for lines in files.values()} - {"not stated"}
    gpus = [d for d in known if not any(word in d.lower() for word in CPU)]
    return "" if gpus else "\n\nNo file here comes from a GPU: speed and memory there are unmeasured."


def headline(results: Path = RESULTS) -> str:
    """Markdown for the README: at most six rows about the real model; a row whose file is missing is left out."""
    files = contents(results)
    rows: list[tuple[str, str, str]] = []  # what it is, the result, the file
    for name, arm, T, what in HEADLINE:
        for row in (summary_of(files.get(name, [])) or {"rows": ()})["rows"]:
            if (row["arm"], row["temperature"]) == (arm, T):
                rows.append((what, _speed(row) + (f", tau {row['tau']:.2f}" if row["tau"] else ""), name))
    if summary := summary_of(files.get(TAU, [])):
        found = [r for r in summary["rows"] if r["temperature"] == 0 and not r["baseline"]]
        taus = ", ".join(f"{r['tau']:.2f} with {r['arm']}" for r in found)
        rows.append(("tau on MT-bench with a tree of 26 nodes, temperature 0", taus, TAU))
    for report in files.get(ACCEPTANCE, ()):
        same, total = same_tokens(report["rows"])
        rows.append(("EAGLE runs that gave the tokens of plain decoding", f"{same} of {total}", ACCEPTANCE))
    if not rows:
        return NOTHING
    lines = [[*facts, device_of(files[name]), f"[{name}](benchmarks/results/{name})"] for *facts, name in rows]
    return markdown(("what", "result", "device", "file"), lines) + no_gpu(files)


def quantization(path: Path = RESULTS / "demo_quantize.json") -> str:
    """Markdown: the receipts of a file, and tau by format of target and head."""
    report = read_json(path)
    rows = []
    for r in report["receipts"]:
        change = r["perplexity_after"] / r["perplexity_before"] - 1
        row = ["{mode} {algorithm}".format_map(r["spec"]), f"{r['perplexity_after']:.3f} ({change:+.2%})"]
        row += [f"{r['mean_kl']:.4f}", f"{r['top1_agreement']:.2%}", f"{r['bytes_after'] / r['bytes_before']:.0%}"]
        rows.append(row)
    receipts = markdown(("weights", "perplexity", "mean KL, nats", "same top token", "size"), rows, left=1)
    taus = {(a["target"], a["head"], a["temperature"]): f"{a['tau']:.2f}" for a in report["acceptance"]}
    drafted = [[*names, taus[*names, 0.0], taus[*names, 1.0]] for names in dict.fromkeys(key[:2] for key in taus)]
    return f"{receipts}\n\n{markdown(('target', 'EAGLE-3 head', 'tau, T = 0', 'tau, T = 1'), drafted, left=2)}"


def run(args: argparse.Namespace) -> None:
    """Print the tables, or write every block whose markers a page has."""
    blocks = {"headline": headline(args.results), "measured": table(args.results)}
    if (receipts := args.results / "demo_quantize.json").exists():
        blocks["quantization"] = quantization(receipts)
    for page in args.readme:
        names = [name for name in blocks if f"<!-- {name} -->\n" in page.read_text(encoding="utf-8")]
        if not names:
            raise ValueError(f"{page}: none of the markers <!-- {' -->, <!-- '.join(blocks)} --> is in it.")
        for name in names:
            replace_block(page, name, blocks[name])
    if not args.readme:
        print(f"{blocks['headline']}\n\n{blocks['measured']}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.measured", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    pages = "write the blocks between the markers that these pages have"
    parser.add_argument("--readme", type=Path, metavar="FILE", nargs="+", default=[], help=pages)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
