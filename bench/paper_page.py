"""The page with the EAGLE paper's tables and figures: its published numbers, and ours computed from the measured cells.

`Page` looks up cells and notes why one is missing. One function per table or figure turns them into rows. Nothing is
measured here, so the page can be written again at any time from the cell file alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.arms import SAME_TOKENS
from bench.measure import Settings
from bench.paper_cells import SHIFTED, TEMPERATURES, Cell, latest
from bench.summary import summarise
from bench.tables import number, table
from runtime.results import n_alpha
from support.files import read_json, read_json_lines, write_text
from tree import PAPER25, chain

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmarks" / "paper_eagle1.json"
ALPHAS = [f"{k}-alpha" for k in range(5)]
TASKS = ("humaneval", "gsm8k", "alpaca")  # the suites of Tables 1 and 8; the other tables are about MT-bench
DYNAMIC = "EAGLE-1/2, dynamic tree"
# What fills a bar of Figures 1 and 2, for the methods that are not draft LLMs.
BARS = {
    "EAGLE": {"method": "eagle1", "tree": "paper25"},
    "EAGLE-3": {"method": "eagle3", "tree": "paper25"},
    DYNAMIC: {"method": "eagle1"},
    "Medusa": {"method": "medusa"},
    "Lookahead": {"method": "lookahead"},
    "n-gram": {"method": "ngram"},
}
# The bars of draft LLMs: what the model is, and the loss it was trained with.
DRAFT_LLM = {"DistillSpec": ("distilled", "kl"), "Speculative sampling": ("undistilled", "ce")}


def numbers(cell: Cell) -> dict[str, Any]:
    """What the page shows of a cell: speedup (or `blocked`, why it has none), tau, n-alpha and tokens per second.

    The speedup is the median over prompts of the paired ratios of decode rates.
    """
    more = {"suite": cell["suite"], "temperature": cell["T"], "random_weights": False}
    lines = [r | more | {"arm": "arm", "baseline": False, "label": cell["label"]} for r in cell["runs"]]
    lines += [r | more | {"arm": "plain", "baseline": True, "label": SAME_TOKENS} for r in cell["plain"]]
    plain, row = summarise(lines, Settings(**cell["settings"]), resamples=40)
    # The length limit or a stop may have cut the last step of a run. `transformers` has no steps.
    whole = [n for r in cell["runs"] for n in (r["tokens_per_step"] or [])[:-1]]
    found = {"speedup": row["speedup"] and row["speedup"]["median"], "blocked": row["blocked"], "tau": row["tau"]}
    found |= {"rate": row["tokens_per_second"], "plain_rate": plain["tokens_per_second"]}
    return found | {"alpha": n_alpha(whole) if cell["tree"] == "chain:5" and cell["batch"] == 1 else None}


UNMEASURED = {  # the header of an empty cell file
    "checkpoint": "this checkpoint", "dtype": "", "weights_sha256": "", "suites": {}, "missing": {}, "experts": 0,
    "int4": "",
}  # fmt: skip
Numbers = dict[str, Any] | None  # what `numbers` returns, or None for a cell that was not run
Theirs = Mapping[str, Sequence[float]]  # the numbers of the paper's rows, by model
Ours = Callable[..., list[str]]  # the entries of one of our rows, from what to look up


def _speedup(value: Numbers) -> str:
    if value is None:
        return "not run"
    return f"{value['speedup']:.2f}x" if value["speedup"] else value["blocked"].split(":")[0]


def _tau(value: Numbers) -> str:
    return "not run" if value is None else number(value["tau"])


def _both(value: Numbers) -> list[str]:
    return [_speedup(value), _tau(value)]


def _alphas(value: Numbers) -> list[str]:
    return ["not run"] * 5 if value is None else [number(a) for a in (value["alpha"] + [None] * 5)[:5]]


def _entries(row: Sequence[float | None], kinds: str) -> list[str]:
    """Published numbers as table entries. kinds: one letter per number, x for a speedup, t for tau; repeated if short."""
    pairs = zip(row, itertools.cycle(kinds), strict=False)
    return ["" if v is None else f"{v:.2f}{'x' if kind == 'x' else ''}" for v, kind in pairs]


class Page:
    """Looks cells up and puts them beside the paper's numbers. What is missing becomes `not run`, with a reason below."""

    def __init__(self, lines: list[Cell], published: dict[str, Any]):
        self.published = published
        headers = [line for line in lines if line["type"] == "model"]
        self.header = headers[-1] if headers else UNMEASURED
        self.cells = latest(lines, self.header["weights_sha256"])
        self.values = {c["id"]: numbers(c) for c in self.cells if c["type"] == "cell"}
        self.name, self.dtype, self.suites = (self.header[key] for key in ("checkpoint", "dtype", "suites"))
        self.main = next(iter(self.suites), "no suite")  # the one in the place of MT-bench
        eagle = {c["method"] for c in self.cells if c["method"].startswith("eagle") and not c["ablation"]}
        self.methods = sorted(eagle) or ["eagle1"]
        self.best = self.methods[0]  # the head of the tables that have one row for us
        # The paper's tasks, and our own suites in the place of MT-bench.
        self.tasks = [*TASKS, *(s for s in self.suites if s not in (*TASKS, "mt_bench"))]
        self.reasons: dict[str, None] = {}

    def find(self, **wanted: Any) -> list[Cell]:
        """The cells with these facts, in the order of the file. By default: main suite, batch 1, the usual method."""
        usual = {"suite": self.main, "batch": 1, "verify": "match", "quant": self.dtype, "ablation": False}
        return [c for c in self.cells if all(c.get(k) == v for k, v in (usual | wanted).items())]

    def measured(self, **wanted: Any) -> list[Cell]:
        return [c for c in self.find(**wanted) if c["type"] == "cell"]

    def look_up(self, method: str, T: float, tree: str, why: str = "", **wanted: Any) -> Numbers:
        """The numbers of the latest such cell. None after noting why there is none (default: what its line says)."""
        found = self.find(method=method, T=T, tree=tree, **wanted)
        done = [c for c in found if c["type"] == "cell"]
        suite = wanted.get("suite", self.main)
        if found and not done:
            why = found[-1]["reason"]
        elif suite not in (*self.suites, self.main):
            why = f"{suite}: its question file was not given (--questions {suite}/question.jsonl)"
        return self.fastest(done[-1:], why or self.missing(method))

    def fastest(self, cells: Sequence[Cell], why: str) -> Numbers:
        """The numbers of the fastest of some measured cells. None after noting `why` if there are none."""
        if not cells:
            self.reasons[why] = None
        return max((self.values[c["id"]] for c in cells), key=lambda v: v["speedup"] or 0, default=None)

    def missing(self, method: str) -> str:
        """Why there are no cells of a method, as far as the last run knew."""
        kind = "eagle1" if method.startswith("eagle") else method
        return self.header["missing"].get(kind, "not measured yet (--run)")

    def by_card(self, T: float, tree: str, trained: Callable[[dict], bool], why: str) -> Numbers:
        """The latest cell of a head that was trained so, as its CARD.json says. Ablation heads come last."""
        cells = [c for late in (False, True) for c in self.measured(method=self.best, T=T, tree=tree, ablation=late)]
        return self.fastest([c for c in cells if trained(c["card"])][-1:], why)

    def with_alphas(self, **wanted: Any) -> list[str]:
        """speedup and tau with the tree of the paper, and n-alpha with a chain of 5."""
        tree, line = (self.look_up(tree=t, **wanted) for t in ("paper25", "chain:5"))
        return _both(tree) + _alphas(line)

    def compared(self, theirs: Theirs, kinds: str, ours: Ours, T: float = 0.0, **wanted: Any) -> list[list[str]]:
        """The paper's rows, then ours: one of every head, at T = 1 also one of the paper's verification.

        kinds: see `_entries`. ours: what to look up -> the entries of one row.
        """
        heads = {method: {"method": method} for method in self.methods}
        if T:
            heads[f"{self.best}, multi-round"] = {"method": self.best, "verify": "multi-round"}
        rows = [[model, *_entries(row, kinds)] for model, row in theirs.items()]
        return rows + [[f"**{self.name}, {who}**", *ours(T=T, **head, **wanted)] for who, head in heads.items()]

    def by_temperature(self, name: str, kinds: str, ours: Ours) -> list[list[str]]:
        """The rows of `compared` for a published table that has a part for each temperature."""
        parts = {f"{T:g}": self.compared(self.published[name][f"{T:g}"], kinds, ours, T) for T in TEMPERATURES}
        return [[T, *row] for T, rows in parts.items() for row in rows]

    def section(self, title: str, head: Sequence[str], rows: Sequence[list[str]], note: str = "") -> str:
        """Title, table, note, and why entries of the table were not run. Short rows end in blank entries."""
        body = table(head, [row + [""] * (len(head) - len(row)) for row in rows])
        text = f"## {title}\n\n{body}\n" + (f"\n{note}\n" if note else "")
        if self.reasons:
            text += f"\nnot run: {'; '.join(self.reasons)}\n"
        self.reasons = {}
        return text


# ---- tables


def table1(page: Page) -> str:
    def ours(**wanted: Any) -> list[str]:
        return [text for task in page.tasks for text in _both(page.look_up(tree="paper25", suite=task, **wanted))]

    head = ["T", "model", *(f"{task} {x}" for task in page.tasks for x in ("speedup", "tau"))]
    return page.section("Table 1: speedup and tau by task", head, page.by_temperature("table1", "xt", ours))


def table2(page: Page) -> str:
    def ours(**wanted: Any) -> list[str]:
        return page.with_alphas(**wanted)[1:]

    note = (
        f"The paper's rows are on MT-bench, ours on {'MT-bench' if page.main == 'mt_bench' else page.main}. tau is that "
        "of the tree of 26 nodes, n-alpha that of a chain of 5. n-alpha leaves out the last step of every text, because "
        "the length limit may have cut it."
    )
    rows = page.by_temperature("table2", "t", ours)
    return page.section("Table 2: tau and n-alpha", ["T", "model", "tau", *ALPHAS], rows, note)


def table3(page: Page) -> str:
    rows = [[model, *_entries(row, "xtttttt")] for model, row in page.published["table3"].items()]
    ours = ["not run"] * 7
    if page.header["experts"]:
        ours = page.with_alphas(method=page.best, T=0.0)
    else:
        page.reasons[f"{page.name} has no experts; give a Mixtral checkpoint and its head"] = None
    rows.append([f"**{page.name}**", *ours])
    return page.section("Table 3: mixture of experts, T = 0", ["model", "speedup", "tau", *ALPHAS], rows)


def table4(page: Page) -> str:
    def rate(value: float | None) -> str:
        return "N/A" if value is None else f"{value:.1f}"

    def arm(value: Numbers) -> str:
        return f"{rate(value['rate'])} ({_speedup(value)})" if value else "not run"

    rows = [[name, *map(rate, row)] for name, row in page.published["table4"].items()]
    rounded = page.dtype.startswith("int4")  # such a checkpoint has no column for its unrounded weights
    quants = [page.dtype] if rounded else [page.dtype, "int4"]
    blank = ["N/A"] * (2 - len(quants))
    hf = page.look_up("hf", 0.0, "", "transformers was not measured")
    rows.append([f"**{page.name}: transformers{', bf16' if rounded else ''}**", arm(hf), "N/A"])
    line, tree = ([page.look_up(page.best, 0.0, t, quant=quant) for quant in quants] for t in ("chain:3", "paper25"))
    rows.append([f"**{page.name}: plain**", *blank, *(rate(v["plain_rate"]) if v else "not run" for v in line)])
    rows.append([f"**{page.name}: EAGLE, chain of 3**", *blank, *map(arm, line)])
    rows.append([f"**{page.name}: EAGLE, tree**", *blank, *map(arm, tree)])
    note = (
        "The paper's rows are LLaMA2-Chat 7B on an RTX 3090, and its EAGLE + gpt-fast code drafts a chain of 3. "
        "Brackets hold the paired ratio to plain decoding of the same precision. Cells were measured one after another, "
        "so on a busy machine the rates of different rows do not compare."
    )
    int4 = page.dtype if rounded else page.header["int4"]
    note += f" Our int4: {int4}." if int4 else ""
    head = ["tokens/s", "FP16" if rounded else f"FP16 (ours: {page.dtype or 'not run'})", "int4"]
    return page.section("Table 4: generation speed by precision, T = 0", head, rows, note)


def table5(page: Page) -> str:
    def ours(**wanted: Any) -> list[str]:
        line, tree = (page.look_up(tree=t, **wanted) for t in ("chain:5", "paper25"))
        gain = f" (+{tree['tau'] - line['tau']:.2f})" if line and tree else ""
        return [_tau(line), _tau(tree) + gain, _speedup(line), _speedup(tree)]

    rows = page.compared(page.published["table5"], "t", ours)
    head = ["model", "chain tau", "tree tau", "chain speedup", "tree speedup"]
    note = "Figure 7's bars (speedups) are not transcribed."
    return page.section("Table 5 and Figure 7: chain against tree, T = 0", head, rows, note)


def table6(page: Page) -> str:
    rows = [[f"LLaMA2-Chat 7B: {name}", *_entries(row, "xt")] for name, row in page.published["table6"].items()]
    for label, flag in (("fixed data", ""), ("data generated by the target", " --regenerate N")):
        why = f"no head trained on {label} was given (scripts.train_eagle{flag}, then --ablation HEAD)"

        def trained(card: dict, generated: bool = bool(flag)) -> bool:
            return card.get("inputs") in (SHIFTED, None) and bool(card.get("regenerated")) == generated

        rows.append([f"**{page.name}: {label}**", *_both(page.by_card(0.0, "paper25", trained, why))])
    return page.section("Table 6: training data, T = 0", ["training data", "speedup", "tau"], rows)


def table7(page: Page) -> str:
    sizes = sorted({1, 2, 3, 4} | {c["batch"] for c in page.cells if c["method"] == page.best})
    blank = [""] * (len(sizes) - 4)
    rows = []
    for name, row in page.published["table7"].items():
        *speedups, throughput = _entries(row, "x")
        rows.append([name, *speedups, *blank, throughput])
    values = [page.look_up(page.best, 0.0, "paper25", batch=b) for b in sizes]
    longest = page.look_up(page.best, 0.0, "chain:5", "the chain at the largest batch", batch=sizes[-1])
    done = [v for v in [*values, longest] if v]
    throughput = "not run"
    if done:
        ratio = max(v["rate"] for v in done) / max(v["plain_rate"] for v in done)
        throughput = "DIFFERS" if any(v["blocked"] for v in done) else f"{ratio:.2f}x"
    rows.append([f"**{page.name}**", *map(_speedup, values), throughput])
    note = (
        f"Throughput is the best total tokens/s over these batch sizes (and a chain of 5 at {sizes[-1]}), divided by "
        "plain decoding's best. Each number comes from its own cell. The paper's largest batches fill the GPU "
        "(Vicuna 7B on an RTX 3090: 7, plain 8). `--batches` and `--largest-batch CAP` set ours."
    )
    head = ["batch size", *map(str, sizes), "throughput"]
    return page.section("Table 7: batch size and throughput, T = 0", head, rows, note)


def table8(page: Page) -> str:
    rows = []
    for task in page.tasks:
        theirs = page.published["table8"].get(task, {})
        rows += [[task, *row] for row in page.compared(theirs, "xtttttt", page.with_alphas, suite=task)]
    head = ["task", "model", "speedup", "tau", *ALPHAS]
    return page.section("Table 8: n-alpha by task, T = 0", head, rows)


# ---- figures


def figure(page: Page, which: int, T: float) -> str:
    """Figure 1 or 2: every method at one temperature."""
    models, data = page.published["models"], page.published[f"figure{which}"]
    names = dict.fromkeys(["EAGLE", "EAGLE-3", DYNAMIC, *data, *BARS])
    rows: list[list[str]] = []
    note = ""
    for name in names:
        rows.append([name, *_entries(data.get(name, [None] * len(models)), "x")])
        if name == "Vanilla":
            rows[-1] += ["1.00x", "1.00"]
            continue
        cells, why = _bar(page, name, T)
        rows[-1] += _both(page.fastest(cells, why))
        if name in DRAFT_LLM and cells:
            found = {int(c["tree"].removeprefix("chain:")): _speedup(page.values[c["id"]]) for c in cells}
            lengths = ", ".join(f"{n}: {found[n]}" for n in sorted(found))
            note += f"{DRAFT_LLM[name][0].capitalize()} draft LLM, best of chains of 2 to 10: {lengths}. "
    note += "A blank means that the paper has no such bar. All of ours give plain decoding's tokens at any temperature."
    title = f"Figure {which}: methods, {'sampling' if T else 'greedy'} (T = {T:g})"
    return page.section(title, ["method", *models, f"**{page.name}**", "tau"], rows, note)


def _bar(page: Page, name: str, T: float) -> tuple[list[Cell], str]:
    """The cells that may fill the bar of a method, and why there would be none.

    A draft LLM is DistillSpec's if its card says that it learnt the target's distribution.
    """
    if name in DRAFT_LLM:
        kind, loss = DRAFT_LLM[name]
        cells = [c for c in page.measured(method="draft", T=T) if (c["card"].get("loss") == "kl") == (loss == "kl")]
        return cells, f"{name}: no {kind} draft LLM (scripts.train_draft --loss {loss}, then --draft-checkpoint)"
    cells = page.measured(T=T, **BARS[name])
    if name == DYNAMIC:
        cells = [c for c in cells if c["tree"].startswith("dynamic")][-1:]
    return cells, "no EAGLE-3 head" if name == "EAGLE-3" else page.missing(BARS[name]["method"])


def _text_of(card: dict) -> tuple[str | None, bool]:
    """What a head was trained on: the name of the data, and whether the target wrote the text."""
    return card.get("data"), bool(card.get("regenerated"))


def figure8(page: Page) -> str:
    cards = [c["card"] for c in page.measured(method=page.best, ablation=True)]
    texts = [_text_of(card) for card in cards if card.get("inputs") not in (SHIFTED, None)]
    rows = []
    for inputs, theirs in page.published["figure8"].items():
        why = f"no head with inputs {inputs} (scripts.train_eagle --inputs {inputs}, then --ablation HEAD)"
        row = [inputs, "not transcribed" if theirs is None else f"{theirs:.1f}x"]

        def trained(card: dict, inputs: str = inputs) -> bool:  # on the same text as the heads with other inputs
            return card.get("inputs") == inputs and (not texts or _text_of(card) == texts[-1])

        for T in TEMPERATURES:
            tree, line = (page.by_card(T, t, trained, why) for t in ("paper25", "chain:5"))
            row += _both(tree) + _alphas(line)[:2]
        rows.append(row)
    columns = [f"T = {T:g}: {x}" for T in TEMPERATURES for x in ("speedup", "tau", "0-alpha", "1-alpha")]
    head = ["inputs of the head", "paper, T = 0", *columns]
    note = "The paper's three speedups are those its text gives (section 1, Figure 4)."
    return page.section("Figure 8: input ablation", head, rows, note)


def figure9(page: Page) -> str:
    rows = []
    for name, tree in (("tree", PAPER25), ("chain", chain(5))):
        counts = [page.published["figure9"][name], [tree.depth.count(d) for d in range(1, tree.D + 1)]]
        rows.append([name, *(" / ".join(map(str, c)) for c in counts), str(tree.N), str(tree.D)])
    ours = "ours (`paper25`, `chain:5`)"
    head = ["draft", "paper: nodes by depth", ours, "nodes with the root", "depth"]
    return page.section("Figure 9: the draft's structure", head, rows)


# ---- the page


def preface(page: Page) -> str:
    """Title, sources, caveats, and what was measured where."""
    differs = "`DIFFERS`: the tokens are not those of plain decoding, so no speedup is printed."
    caveats = [*page.published["caveats"], differs, "`not run`: the reason is below the table."]
    made_by = "`python -m scripts.paper_tables --render --cells FILE` writes this page; do not edit it."
    text = f"# The paper's tables, measured on {page.name}\n\n{made_by} Bold is ours, the rest is the paper's.\n\n"
    text += f"Source: {page.published['source']}\n\n" + "".join(f"- {caveat}\n" for caveat in caveats)
    done = [c for c in page.cells if c["type"] == "cell"]
    if not done:
        return f"{text}\nNo cell has been measured yet."
    environments = [c["environment"] for c in done]
    loads = [e["load_average"] / e["cpus"] for e in environments if e["load_average"] is not None and e["cpus"]]
    machines = [", ".join([e["device"], *(f"{k} {v}" for k, v in e["versions"].items() if v)]) for e in environments]
    machines += [f"cores busy at the start {min(loads):.0%} to {max(loads):.0%}"] if loads else []
    made_of = [c["settings"] for c in done]
    sizes = dict.fromkeys(f"{s['max_new_tokens']} new tokens, {s['reps']} repetition(s)" for s in made_of)
    prompts = ", ".join(f"{suite}: {count} prompts" for suite, count in page.header["suites"].items())
    seconds = sum(c["seconds"] for c in done)
    text += f"\n{len(done)} cells, {seconds:.0f} s; {prompts}; {' and '.join(sizes)}\n\n"
    commits = [f"{e['git']['commit']}{' (modified)' if e['git']['dirty'] else ''}" for e in environments]
    facts = {"device": machines, "commit": commits, "commands": [f"`{c['command']}`" for c in done]}
    return text + "".join(f"- {name}: {', '.join(dict.fromkeys(found))}\n" for name, found in facts.items())


def render(cells: str | Path, page: str | Path) -> str:
    """Write the page from the cell file; returns its text. Raises a one-line ValueError for a file that is none."""
    found = Page(read_json_lines(cells), read_json(PUBLISHED))
    tables = (preface, table1, table2, table3, table4, table5, table6, table7, table8)
    figures = (partial(figure, which=1, T=0.0), partial(figure, which=2, T=1.0), figure8, figure9)
    text = "\n\n".join(part(found).strip("\n") for part in (*tables, *figures)) + "\n"
    Path(page).parent.mkdir(parents=True, exist_ok=True)
    write_text(page, text)
    return text
