"""What was measured on which device, from the JSON files of benchmarks/results and from nothing else.

    python -m scripts.measured                          # the table
    python -m scripts.measured --readme README.md       # write it between the README's markers

One row per file, by its kind: scripts.bench, scripts.paper_tables, scripts.acceptance, scripts.bench_kernels, `make gpu`,
scripts.tune_tree. A file of another kind is listed with its device, or as having none.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.paper_page import Page, latest
from support.files import replace_block

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
CPU = ("cpu", "epyc", "xeon", "ryzen", "intel", "amd", "arm", "threads")


def read(path: Path) -> list[Any]:
    """The JSON values of a .json or .jsonl file; ValueError names a file that is neither."""
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            return [json.loads(text)]
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); remove it or write it again.") from error


def find(value: Any, name: str) -> Any:
    """The first value called `name` in nested dictionaries, else None."""
    if not isinstance(value, dict):
        return None
    if value.get(name) not in (None, ""):
        return value[name]
    return next((v for v in (find(inner, name) for inner in value.values()) if v is not None), None)


def _bench(summary: dict[str, Any]) -> str:
    """The arms of one temperature after the other: median speedup with its interval, or why there is none, and tau."""
    parts, suites = [], [r["suite"] for r in summary["rows"]]
    whole = "all" if "all" in suites else next(iter(suites), "")
    for T in dict.fromkeys(r["temperature"] for r in summary["rows"]):
        rows = [r for r in summary["rows"] if r["temperature"] == T and r["suite"] == whole]
        base = next(r for r in rows if r["baseline"])
        arms = []
        for r in (r for r in rows if not r["baseline"]):
            gain = r["speedup"]
            text = (
                f"{gain['median']:.2f}x ({gain['low']:.2f}-{gain['high']:.2f})"
                if gain
                else r["blocked"].split(":")[0]
            )
            tau = f", tau {r['tau']:.2f}" if r["tau"] else ""
            label = "" if r["label"] == "same tokens" else f", {r['label']}"
            arms.append(f"{r['arm']} {text}{tau}{label}")
        parts.append(f"T = {T:g}: plain {base['tokens_per_second']:.0f} tok/s; " + "; ".join(arms))
    rows = [f"{r['test']} {r['tokens_per_second']:.0f} tok/s" for r in summary["llama_bench"]]
    model = f"{summary['model']['checkpoint']} {summary['model']['dtype']} {summary['model']['quant']}"
    return "<br>".join([f"speed of {model}", *parts, *rows])


def describe(lines: list[Any]) -> tuple[str, str]:
    """(device, what the file says) of one file's values."""
    first, last = (lines[0], lines[-1]) if lines else ({}, {})
    device = str(
        find(first, "device")
        or find(last, "device")
        or find(first, "gpu")
        or find(last, "gpu")
        or "not stated"
    )
    kinds = {line.get("type") for line in lines if isinstance(line, dict)}
    if "summary" in kinds:
        return device, _bench(next(line for line in reversed(lines) if line.get("type") == "summary"))
    if "cell" in kinds:
        header = next(line for line in reversed(lines) if line["type"] == "model")
        cells = [c for c in latest(lines, header["weights_sha256"]) if c["type"] == "cell"]
        values = Page(lines, {}).values
        taus = [v["tau"] for v in values.values() if v["tau"]]
        where = find(cells[-1]["environment"], "device") if cells else device
        return where, (f"{len(cells)} cells of the paper's tables for {header['checkpoint']}, tau up to {max(taus):.2f} "
                       "(docs/paper_tables.md)" if taus else "no cell yet")  # fmt: skip
    if isinstance(first, dict) and "rows" in first and first["rows"] and "rule" in first["rows"][0]:
        best = max(first["rows"], key=lambda r: r["tau"])
        same = sum(r["same"] for r in first["rows"] if r["rule"] == "shared noise")
        total = sum(r["prompts"] for r in first["rows"] if r["rule"] == "shared noise")
        text = f"acceptance: tau up to {best['tau']:.2f} ({best['head']}, {best['tree']}, T = {best['temperature']:g})"
        return device, f"{text}; same tokens as plain decoding in {same} of {total} runs with shared noise"
    if isinstance(first, dict) and "receipts" in first:
        return (
            device,
            f"{len(first['receipts'])} receipts of quantize.py, tau of {len(first['acceptance'])} combinations",
        )
    if isinstance(first, dict) and "verdict" in first:
        how = "compiled" if first["compile"] else "eager"
        return device, f"tree tuned for {first['model']} with {first['head']}, {how}: {first['verdict']}"
    if isinstance(first, dict) and "parts" in first:
        failed = [p["part"] for p in first["parts"] if p.get("exit")]
        return device, f"`make gpu`: {len(first['parts'])} parts, failed: {', '.join(failed) or 'none'}"
    return (
        device,
        f"{len(lines)} line(s) of {'kernel timings' if 'kernel' in str(first) else 'other numbers'}",
    )


def table(results: Path = RESULTS) -> str:
    """Markdown: one row per file of `results`, then a line that says whether any GPU is among the devices."""
    files = (
        sorted(p for p in results.glob("*.json*") if p.suffix in (".json", ".jsonl"))
        if results.is_dir()
        else []
    )
    if not files:
        return "Nothing has been measured and committed yet."
    rows = []
    for path in files:
        device, text = describe(read(path))
        rows.append([device, text, f"`benchmarks/results/{path.name}`"])
    gpus = [r[0] for r in rows if not any(word in r[0].lower() for word in CPU) and r[0] != "not stated"]
    note = "" if gpus else "\n\nNo file here comes from a GPU: speed and memory there are unmeasured."
    lines = [["device", "measured", "raw data"], ["---"] * 3, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + note


def quantization(path: Path = RESULTS / "demo_quantize.json") -> str:
    """Markdown: the receipts of a file, and tau by format of target and head."""
    report = read(path)[0]
    lines = [
        "| weights | perplexity | mean KL, nats | same top token | size |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in report["receipts"]:
        change = r["perplexity_after"] / r["perplexity_before"] - 1
        lines.append(
            f"| {r['spec']['mode']} {r['spec']['algorithm']} | {r['perplexity_after']:.3f} ({change:+.2%}) | "
            f"{r['mean_kl']:.4f} | {r['top1_agreement']:.2%} | {r['bytes_after'] / r['bytes_before']:.0%} |"
        )
    cells = {(a["target"], a["head"], a["temperature"]): a["tau"] for a in report["acceptance"]}
    lines += [
        "",
        "| target | EAGLE-3 head | tau, T = 0 | tau, T = 1 |",
        "|---|---|---:|---:|",
    ]
    for target, head in dict.fromkeys(key[:2] for key in cells):
        taus = " | ".join(f"{cells[target, head, T]:.2f}" for T in (0.0, 1.0))
        lines.append(f"| {target} | {head} | {taus} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR")
    parser.add_argument(
        "--readme", metavar="FILE", help="write the table between its <!-- measured --> markers"
    )
    args = parser.parse_args(argv)
    try:
        text = table(Path(args.results))
        if args.readme:
            replace_block(Path(args.readme), "measured", text)
            if (receipts := Path(args.results) / "demo_quantize.json").exists():
                replace_block(Path(args.readme), "quantization", quantization(receipts))
        else:
            print(text)
    except (ValueError, OSError) as error:
        print(f"error  {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
