"""The tables of the suites `paper` and `acceptance` of scripts.bench, computed from the summary line of a record.

The paper is EAGLE-1 (arXiv:2401.15077v3). Its published numbers stand beside ours. Its speedups refer to Hugging Face
decoding in fp16 and ours to our own plain decoding, so tau and n-alpha compare and speedups do not.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import Row
from bench.report import gain_text, number, table
from support.files import read_json

PUBLISHED = Path(__file__).resolve().parent.parent / "results" / "paper_eagle1.json"
ALPHAS = [f"{k}-alpha" for k in range(5)]
TASKS = ("humaneval", "gsm8k", "alpaca")  # the columns of the paper's Table 1
Table = tuple[str, list[str], list[list[str]]]  # title, columns and rows
RULES = ("shared noise", "multi-round", "top-k drafts")


class Rows:
    """The rows of a summary that draft, looked up by arm, suite and temperature."""

    def __init__(self, summary: dict[str, Any]):
        self.options = {fact["arm"]: fact["options"] for fact in summary["arms"] if fact["options"].get("eagle")}
        other_ways = {arm for arm, given in self.options.items() if "verify" in given or "draft_noise" in given}
        rows = [row for row in summary["rows"] if row["suite"] != "all" and not row["baseline"]]
        # at T = 0 every way to draft and verify accepts the same tokens
        rows = [row for row in rows if row["temperature"] or row["arm"] not in other_ways]
        self.at: dict[tuple[str, str, float], Row] = {(r["arm"], r["suite"], r["temperature"]): r for r in rows}
        suites = dict.fromkeys(row["suite"] for row in rows)
        self.suites = sorted(suites, key=lambda suite: suite != "mt_bench")  # the paper's main one comes first
        self.temperatures = sorted({row["temperature"] for row in rows})
        self.cards = {fact["arm"]: fact.get("card", {}) for fact in summary["arms"]}

    def heads(self, tree: str, verify: str | None = None) -> list[str]:
        """The arms that draft this tree with a head, verified like this (None: in any way)."""
        drafting = [(arm, given) for arm, given in self.options.items() if given.get("tree") == tree]
        return [arm for arm, given in drafting if verify in (None, given.get("verify", "match"))]


def paper_tables(summary: dict[str, Any]) -> str:
    """Markdown: speed and tau by data set, n-alpha of a chain beside the tree, and how the heads were trained."""
    rows, published = Rows(summary), read_json(PUBLISHED) if PUBLISHED.exists() else {}  # an installed package has none
    if not rows.suites:  # interrupted before the first answer
        return ""
    return _texts(_by_suite(rows, published), _chains(rows, published), _training(rows))


def training_table(summary: dict[str, Any]) -> str:
    """Markdown: the last of `paper_tables` alone."""
    return _texts(_training(Rows(summary)))


def _texts(*parts: Table) -> str:
    return "\n\n".join(f"{title}\n\n{table(head, body)}" for title, head, body in parts if body)


def _by_suite(rows: Rows, published: dict[str, Any]) -> Table:
    """Tables 1 and 2 and Figures 1 and 2: the tree of 26 nodes on every data set."""
    body = []
    for T in rows.temperatures:
        for i, (model, theirs) in enumerate(published.get("table1", {}).get(f"{T:g}", {}).items()):
            main = published[f"figure{1 if T == 0 else 2}"]["EAGLE"][i], published["table2"][f"{T:g}"][model][0]
            known = {"mt_bench": main} | {task: theirs[2 * k : 2 * k + 2] for k, task in enumerate(TASKS)}
            cells = [known.get(suite) for suite in rows.suites]
            if any(cells):
                body.append([f"{T:g}", model, *(f"{c[0]:.2f}x, {c[1]:.2f}" if c else "" for c in cells)])
        for arm in rows.heads("paper25"):
            found = [rows.at.get((arm, suite, T)) for suite in rows.suites]
            if all(found):
                body.append([f"{T:g}", f"**{arm}**", *(f"{gain_text(r)}, {number(r['tau'])}" for r in found)])
    title = "Speedup and tau by data set, with the paper's tree of 26 nodes (bold is ours):"
    return title, ["T", "model", *rows.suites], body


def _alphas(values: Sequence[float] | None) -> list[str]:
    return [number(value) for value in (*(values or ()), *[None] * 5)[:5]]


def _chains(rows: Rows, published: dict[str, Any]) -> Table:
    """Tables 2 and 5: tau of the tree and of a chain of 5, and n-alpha of that chain, on the main data set."""
    body = []
    for T in rows.temperatures:
        for model, (tree, *alphas) in published.get("table2", {}).get(f"{T:g}", {}).items():
            chain = published["table5"][model][0] if T == 0 else None
            body.append([f"{T:g}", model, number(chain), number(tree), *map(number, alphas)])
        for arm in rows.heads("chain:5"):
            line, tree = (rows.at.get((a, rows.suites[0], T)) for a in (arm, arm.replace("chain:5", "paper25")))
            # a head may be there for the table of the training alone
            if line and (len(rows.suites) == 1 or (arm, rows.suites[1], T) in rows.at):
                taus = [number(row["tau"] if row else None) for row in (line, tree)]
                name = arm.replace(" chain:5", "")
                body.append([f"{T:g}", f"**{name}**", *taus, *_alphas(line["n_alpha"])])
    title = f"tau of a chain of 5 and of the tree, and n-alpha of the chain, on {rows.suites[0]}:"
    return title, ["T", "model", "chain", "tree", *ALPHAS], body


def _training(rows: Rows) -> Table:
    """Table 6 and Figure 8: heads of different inputs or training texts, from the CARD.json beside each."""
    body = []
    for arm in rows.heads("paper25", "match"):
        card = rows.cards[arm]
        text = f"{card.get('data', '')}{', answered by the model' if card.get('regenerated') else ''}"
        cells = [arm.replace(" paper25", ""), card.get("inputs", ""), text, str(card.get("steps", ""))]
        for T in rows.temperatures:
            found = [rows.at.get((a, rows.suites[0], T)) for a in (arm.replace("paper25", "chain:5"), arm)]
            cells += [number(row["tau"] if row else None) for row in found]
        if card:
            body.append(cells)
    columns = [f"{tree}, T = {T:g}" for T in rows.temperatures for tree in ("chain", "tree")]
    title = f"tau by what the head sees and learnt from, on {rows.suites[0]}:"
    compared = len({(inputs, text) for _, inputs, text, *_ in body}) > 1
    return title, ["head", "inputs", "text", "steps", *columns], body if compared else []


def acceptance_table(summary: dict[str, Any]) -> str:
    """Markdown: tau of every head, temperature and tree by the way to draft and verify."""
    rows = Rows(summary)
    taus: dict[tuple[str, float, str], dict[str, Row]] = {}
    for (arm, _, T), row in rows.at.items():
        if options := rows.options.get(arm):
            noise = "shared noise" if options.get("draft_noise", True) else "top-k drafts"
            rule = "multi-round" if options.get("verify") else noise
            taus.setdefault((options["eagle"], T, options["tree"]), {})[rule] = row
    body = []
    for (head, T, tree), by_rule in sorted(taus.items(), key=lambda item: item[0][:2]):
        shared = by_rule.get("shared noise")
        same = f"{shared['same']['same']}/{shared['runs']}" if shared else "-"
        cells = [number(by_rule[rule]["tau"]) if rule in by_rule else "-" for rule in RULES]
        body.append([head, f"{T:g}", tree, *cells, same])
    return table(["head", "T", "tree", *RULES, "same tokens"], body) if body else ""


SUITE_TABLES = {"paper": paper_tables, "acceptance": acceptance_table}
