"""The tables of docs/results.md, from the records in results/ and from nothing else.

    python -m scripts.measured                        # write every block of the page again

A block stands between `<!-- KIND FILE -->` and `<!-- /KIND -->`. KIND is `arms` (speed and tau of every arm), `behind`
(the same behind long texts), `taus` (tau there by length), `clients` (requests that run together), `steps` (the time of
a step), `acceptance` or `paper` (as `scripts.bench --suite` prints them), or `training` (the last table of `paper`,
alone). Blocks of other kinds are of programs that are gone, and tests/test_docs.py compares them with their records.
"""

import re
from functools import partial
from pathlib import Path

from bench.paper import SUITE_TABLES, training_table
from bench.records import read_lines
from bench.report import COLUMNS, arms_table, behind_table, kept_table, taus_table
from support.errors import command_parser, run_parsed
from support.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
TABLES = SUITE_TABLES | {kind: partial(kept_table, kind) for kind in COLUMNS}
TABLES |= {"arms": arms_table, "behind": behind_table, "taus": taus_table, "training": training_table}
BLOCK = re.compile(rf"(<!-- ({'|'.join(TABLES)}) (\S*) -->\n).*?(<!-- /\2 -->)", re.S)


def filled(page: str, results: Path = RESULTS) -> str:
    """The text of a page with every block written again. Raises OSError for a record that is not there."""

    def block(match: re.Match) -> str:
        begin, kind, file, end = match.groups()
        return f"{begin}{TABLES[kind](read_lines(results / file)[1])}\n{end}"

    return BLOCK.sub(block, page)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.measured", __doc__)
    return run_parsed(parser, lambda args: write_text(PAGE, filled(PAGE.read_text(encoding="utf-8"))), argv)


if __name__ == "__main__":
    raise SystemExit(main())
