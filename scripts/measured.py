"""The tables of README.md and docs/results.md, from the records in results/ and from nothing else.

    python -m scripts.measured                        # write every block of the two pages again

A block stands between `<!-- KIND FILE -->` and `<!-- /KIND -->`. KIND is `arms` (speed and tau of every arm),
`acceptance` or `paper` (as `scripts.bench --suite` prints them), or `headline`, which has no FILE.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bench.paper import acceptance_table, paper_tables
from bench.records import read_lines
from bench.report import arms_table, table
from support.errors import command_parser, run_command
from support.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
TABLES = {"arms": arms_table, "acceptance": acceptance_table, "paper": paper_tables}
# Two runs with the same EAGLE-3 head, hours apart: the gain depends on how fast plain decoding is at the time.
RUNS = ("smollm2.jsonl", "smollm2_earlier.jsonl")
TAU, ACCEPTANCE = "smollm2_mt_bench.jsonl", "smollm2_acceptance.jsonl"
BLOCK = re.compile(r"(<!-- (arms|acceptance|paper|headline) ?(\S*) -->\n).*?(<!-- /\2 -->)", re.S)


def headline(results: Path = RESULTS) -> str:
    """The few rows for the README about the real model. Speeds are the span of the runs in `RUNS`, by total time."""
    summaries = {name: read_lines(results / name)[1] for name in (*RUNS, TAU, ACCEPTANCE)}
    rows = {(name, r["arm"], r["temperature"]): r for name, summary in summaries.items() for r in summary["rows"]}

    def span(arm: str, names: tuple[str, ...], temperature: float = 0.0) -> str:
        gains = sorted(rows[name, arm, temperature]["speedup"]["total"] for name in names)
        return f"{gains[0]:.1f} to {gains[-1]:.1f}x" if len(gains) > 1 else f"{gains[0]:.2f}x"

    rates = [
        " to ".join(f"{rows[name, arm, 0.0]['tokens_per_second']:.0f}" for arm in ("plain", "eagle3")) for name in RUNS
    ]
    taus = [f"{rows[TAU, arm, 0.0]['tau']:.2f} with {arm}" for arm in ("eagle3", "eagle1")]
    shared = [row for row in summaries[ACCEPTANCE]["rows"] if row["label"] == "same tokens"]
    drafted = [row for row in shared if " top-k" not in row["arm"]]
    same = f"{sum(row['same']['same'] for row in drafted)} of {sum(row['runs'] for row in drafted)}"
    seconds = f"EAGLE-3, temperature 0, two runs hours apart (tokens/s: {' and '.join(rates)})"
    without = "the same without drafts from repeated text, the later run"
    lines = [
        (seconds, span("eagle3", RUNS), RUNS),
        (without, span("eagle3 without n-grams", RUNS[:1]), RUNS[:1]),
        ("EAGLE-3, temperature 1, the later run", span("eagle3", RUNS[:1], 1.0), RUNS[:1]),
        ("llama.cpp on the same file, without drafts", span("llama.cpp", RUNS[:1]), RUNS[:1]),
        ("tau on MT-bench, a tree of 26 nodes, temperature 0", ", ".join(taus), (TAU,)),
        ("EAGLE runs that gave the tokens of plain decoding", same, (ACCEPTANCE,)),
    ]
    links = [", ".join(f"[{Path(name).stem}](results/{name})" for name in names) for _, _, names in lines]
    body = [[what, result, link] for (what, result, _), link in zip(lines, links, strict=True)]
    machine = summaries[RUNS[0]]["environment"]
    device = f"SmolLM2-135M in 4 bits on {machine['device']}; speeds are relative to our own plain decoding."
    gpu = "" if machine["gpu"] else " No GPU has been measured yet."
    return f"{table(['what', 'result', 'record'], body)}\n\n{device}{gpu}"


def filled(page: str, results: Path = RESULTS) -> str:
    """The text of a page with every block written again. Raises OSError for a record that is not there."""

    def block(match: re.Match) -> str:
        begin, kind, file, end = match.groups()
        text = headline(results) if kind == "headline" else TABLES[kind](read_lines(results / file)[1])
        return f"{begin}{text}\n{end}"

    return BLOCK.sub(block, page)


def run(args: argparse.Namespace) -> None:
    """Write the blocks of the pages."""
    for page in args.pages:
        write_text(page, filled(page.read_text(encoding="utf-8")))


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.measured", __doc__)
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES, metavar="PAGE", help="default: the two pages")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
