"""What was measured on which device, from the JSON files of benchmarks/results and from nothing else.

    python -m scripts.measured                                        # print the tables
    python -m scripts.measured --readme README.md docs/results.md     # write every block whose markers a page has

There are three blocks. `measured` has a table with one row per arm for each file of scripts.bench, and one row for each
other file. `headline` has at most six rows of these. `quantization` has the receipts of quantize.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.paper_cells import latest
from bench.paper_page import Page
from support.files import replace_block

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
HEADLINE = (  # file, arm, temperature, what the README calls it
    ("demo.jsonl", "eagle3 paper25", 0.0, "speed with EAGLE-3 relative to plain decoding, temperature 0"),
    ("demo.jsonl", "eagle3 paper25", 1.0, "the same at temperature 1"),
    ("demo_compiled.jsonl", "hf", 0.0, "speed of `transformers` relative to our plain decoding"),
    ("llama_100m_compiled.jsonl", "hf", 0.0, "the same with 100 M random weights"),
)
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


def _speed(row: dict[str, Any]) -> str:
    """The rate of plain decoding; of another arm the median speedup with its interval, or why it has none."""
    if row["baseline"]:
        return f"{row['tokens_per_second']:.0f} tok/s"
    if gain := row["speedup"]:
        return f"{gain['median']:.2f}x ({gain['low']:.2f}-{gain['high']:.2f})"
    return row["blocked"].split(":")[0]


def summary_of(lines: list[Any]) -> dict[str, Any] | None:
    """The last summary line of a file of scripts.bench; None for another kind of file."""
    return next((line for line in reversed(lines) if isinstance(line, dict) and line.get("type") == "summary"), None)


def _bench(summary: dict[str, Any], name: str) -> str:
    """One benchmark: a line that says what ran where, and a table with one row per arm."""
    suites = [r["suite"] for r in summary["rows"]]
    whole = "all" if "all" in suites else next(iter(suites), "")
    arms: dict[str, dict[float, dict[str, Any]]] = {}
    for row in (r for r in summary["rows"] if r["suite"] == whole):
        label = "" if row["label"] == "same tokens" else f", {row['label']}"
        arms.setdefault(row["arm"] + label, {})[row["temperature"]] = row
    temperatures = list(dict.fromkeys(r["temperature"] for r in summary["rows"]))
    titles = ["arm", *(title for T in temperatures for title in (f"T = {T:g}", "tau"))]
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    for arm, rows in arms.items():
        line = [arm]
        for T in temperatures:
            row = rows.get(T)
            drafted = row and row["tau"] and not row["baseline"]
            line += [_speed(row) if row else "", f"{row['tau']:.2f}" if drafted else ""]
        lines.append(line)
    model = summary["model"]
    what = [model["checkpoint"], model["dtype"]]
    what += [model["quant"]] if model["quant"] != "none" else []
    what += ["compiled"] if any(arm.get("compiled") for arm in summary.get("arms", ())) else []
    title = f"**{', '.join(what)}** on {find(summary, 'device')} (`benchmarks/results/{name}`)"
    rates = [f"{r['test']} {r['tokens_per_second']:.0f} tok/s" for r in summary["llama_bench"]]
    return "\n".join([title, "", markdown(lines), *(["", ", ".join(rates)] if rates else [])])


def markdown(lines: list[list[str]]) -> str:
    """A table; the second line holds the alignment."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def same_tokens(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Of a report of scripts.acceptance: (runs with shared noise that gave plain decoding's tokens, all such runs)."""
    shared = [r for r in rows if r["rule"] == "shared noise"]
    return sum(r["same"] for r in shared), sum(r["prompts"] for r in shared)


def device_of(lines: list[Any]) -> str:
    """The device that a file names, or 'not stated'."""
    ends = (lines[0], lines[-1]) if lines else ()
    return str(next((found for key in ("device", "gpu") for end in ends if (found := find(end, key))), "not stated"))


def describe(lines: list[Any]) -> tuple[str, str]:
    """(device, what the file says) of the values of a file that is not of scripts.bench."""
    first = lines[0] if lines else {}
    device = device_of(lines)
    kinds = {line.get("type") for line in lines if isinstance(line, dict)}
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
        same, total = same_tokens(first["rows"])
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
    return (device, f"{len(lines)} line(s) of {'kernel timings' if 'kernel' in str(first) else 'other numbers'}")


def files(results: Path) -> list[Path]:
    """The result files of a folder, which need not exist."""
    return sorted(p for p in results.glob("*.json*") if p.suffix in (".json", ".jsonl"))


def table(results: Path = RESULTS) -> str:
    """Markdown: a table per file of scripts.bench, one row per other file, and whether any GPU is among the devices."""
    if not files(results):
        return "Nothing has been measured and committed yet."
    parts, others = [], [["what", "device", "file"], ["---"] * 3]
    for path in files(results):
        lines = read(path)
        if summary := summary_of(lines):
            parts.append(_bench(summary, path.name))
        else:
            device, text = describe(lines)
            others.append([text, device, f"`benchmarks/results/{path.name}`"])
    if len(others) > 2:
        parts.append(markdown(others))
    return "\n\n".join(parts) + no_gpu(results)


def no_gpu(results: Path) -> str:
    """What to say below a table if no file comes from a GPU, else nothing."""
    known = {device_of(read(path)) for path in files(results)} - {"not stated"}
    gpus = [d for d in known if not any(word in d.lower() for word in CPU)]
    return "" if gpus else "\n\nNo file here comes from a GPU: speed and memory there are unmeasured."


def headline(results: Path = RESULTS) -> str:
    """Markdown for the README: at most six rows about the demo; a row whose file is missing is left out."""
    rows = []

    def add(what: str, result: str, device: str, name: str) -> None:
        rows.append([what, result, device, f"[{name}](benchmarks/results/{name})"])

    for name, arm, T, what in HEADLINE:
        summary = summary_of(read(results / name)) if (results / name).exists() else None
        for row in summary["rows"] if summary else ():
            if (row["arm"], row["temperature"]) == (arm, T):
                tau = f", tau {row['tau']:.2f}" if row["tau"] else ""
                add(what, _speed(row) + tau, find(summary, "device"), name)
    if (path := results / "demo_acceptance.json").exists():
        report = read(path)[0]
        same, total = same_tokens(report["rows"])
        what = "EAGLE runs that gave the tokens of plain decoding"
        add(what, f"{same} of {total}", report["device"], path.name)
    if (path := results / "demo_quantize.json").exists():
        report = read(path)[0]
        for receipt in report["receipts"]:
            if (receipt["spec"]["mode"], receipt["spec"]["algorithm"]) == ("int4", "gptq"):
                size = receipt["bytes_after"] / receipt["bytes_before"]
                result = f"{receipt['top1_agreement']:.2%} same top token, {size:.0%} of the size"
                add("int4 weights (GPTQ) against bf16", result, report["device"], path.name)
    if not rows:
        return "Nothing has been measured and committed yet."
    return markdown([["what", "result", "device", "file"], ["---"] * 4, *rows]) + no_gpu(results)


def quantization(path: Path = RESULTS / "demo_quantize.json") -> str:
    """Markdown: the receipts of a file, and tau by format of target and head."""
    report = read(path)[0]
    lines = ["| weights | perplexity | mean KL, nats | same top token | size |", "|---|---:|---:|---:|---:|"]
    for r in report["receipts"]:
        change = r["perplexity_after"] / r["perplexity_before"] - 1
        lines.append(
            f"| {r['spec']['mode']} {r['spec']['algorithm']} | {r['perplexity_after']:.3f} ({change:+.2%}) | "
            f"{r['mean_kl']:.4f} | {r['top1_agreement']:.2%} | {r['bytes_after'] / r['bytes_before']:.0%} |"
        )
    cells = {(a["target"], a["head"], a["temperature"]): a["tau"] for a in report["acceptance"]}
    lines += ["", "| target | EAGLE-3 head | tau, T = 0 | tau, T = 1 |", "|---|---|---:|---:|"]
    for target, head in dict.fromkeys(key[:2] for key in cells):
        taus = " | ".join(f"{cells[target, head, T]:.2f}" for T in (0.0, 1.0))
        lines.append(f"| {target} | {head} | {taus} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR")
    parser.add_argument(
        "--readme", metavar="FILE", nargs="+", help="write the blocks between the markers that these pages have"
    )
    args = parser.parse_args(argv)
    results = Path(args.results)
    try:
        if not args.readme:
            print(f"{headline(results)}\n\n{table(results)}")
            return 0
        blocks = {"headline": headline(results), "measured": table(results)}
        if (receipts := results / "demo_quantize.json").exists():
            blocks["quantization"] = quantization(receipts)
        for page in map(Path, args.readme):
            old = page.read_text(encoding="utf-8")
            names = [name for name in blocks if f"<!-- {name} -->\n" in old]
            if not names:
                raise ValueError(f"{page}: none of the markers <!-- {' -->, <!-- '.join(blocks)} --> is in it.")
            for name in names:
                replace_block(page, name, blocks[name])
    except (ValueError, OSError) as error:
        print(f"error  {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
