"""TODO."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arms import PATHS, SAME_TOKENS
from bench.measure import Settings
from bench.summary import summarise
from bench.tables import table as tables_table
from runtime.results import n_alpha
from support.errors import UsageError
from tree import PAPER25, chain

ROOT = Path(__file__).resolve().parent.parent


PUBLISHED = ROOT / "benchmarks" / "paper_eagle1.json"


ALPHAS = [f"{k}-alpha" for k in range(5)]


TASKS = ("humaneval", "gsm8k", "alpaca")  # the suites of Tables 1 and 8; MT-bench is the others'


SHIFTED = "feature+shifted-token"  # what an EAGLE head sees (Figure 8 has heads that see less)


LENGTHS = range(2, 11)  # draft lengths of the draft LLM, as the paper searched them


SLOT = ("method", "drafter", "tree", "verify", "suite", "T", "quant", "batch", "ablation")  # a cell's place


KEPT = (
    "question",
    "turn",
    "rep",
    "seed",
    "prompt_sha256",
    "prompt_tokens",
    "new_tokens",
    "ids_sha256",
    "ttft_seconds",
    "decode_seconds",
    "tokens_per_step",
    "same",
    "fork",
    "margin",
)


def fingerprint(path: str | Path) -> str:
    """A short hash of a drafter's weight files: their sizes, first and last megabyte."""
    digest, path = hashlib.sha256(), Path(path)
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt"))
    )
    for file in files:
        with open(file, "rb") as stream:
            digest.update(f"{file.stat().st_size}".encode() + stream.read(1 << 20))
            stream.seek(max(0, file.stat().st_size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def cell_id(spec: dict[str, Any], identity: dict[str, Any]) -> str:
    """The same for the same weights, drafter weights, prompts and settings; another when any of them changed."""
    options = {k: v for k, v in spec["options"].items() if k not in PATHS}
    files = {k: fingerprint(v) for k, v in spec["options"].items() if k in PATHS}
    kept = {k: spec[k] for k in SLOT}
    text = json.dumps([kept, options, files, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_cells(path: str | Path) -> list[dict[str, Any]]:
    """Lines of a cell file (empty when there is none yet); a torn last line does not count."""
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1] if line.strip()]
    except ValueError as error:
        raise UsageError(f"{path}: not a file of scripts.paper_tables ({error}).") from error


def latest(lines: Sequence[dict[str, Any]], weights: str) -> list[dict[str, Any]]:
    """Of the cells of these weights the last one for each place on the page: a retrained head replaces its cells. A
    failed attempt does not replace a measured cell of the same drafter and settings."""
    slots: dict[tuple, dict[str, Any]] = {}
    for line in lines:
        if line["type"] in ("cell", "not_run") and line["weights_sha256"] == weights:
            slot = tuple(line[k] for k in SLOT)
            if line["type"] == "cell" or slots.get(slot, {}).get("id") != line["id"]:
                slots.pop(slot, None)  # to the end
                slots[slot] = line
    return list(slots.values())


def numbers(cell: dict[str, Any]) -> dict[str, Any]:
    """speedup (median of per-prompt ratios of decode rates; or why there is none), tau, n-alpha, tokens/s of a cell."""
    more = {"suite": cell["suite"], "temperature": cell["T"], "random_weights": False}
    lines = [r | more | {"arm": "arm", "baseline": False, "label": cell["label"]} for r in cell["runs"]]
    lines += [r | more | {"arm": "plain", "baseline": True, "label": SAME_TOKENS} for r in cell["plain"]]
    plain, row = summarise(lines, Settings(**cell["settings"]), resamples=40)
    # the length limit or a stop may have cut the last step of a run; `transformers` has no steps
    whole = [n for r in cell["runs"] for n in (r["tokens_per_step"] or [])[:-1]]
    return {
        "speedup": row["speedup"]["median"] if row["speedup"] else None,
        "blocked": row["blocked"],
        "tau": row["tau"],
        "rate": row["tokens_per_second"],
        "plain_rate": plain["tokens_per_second"],
        "alpha": n_alpha(whole) if cell["tree"] == "chain:5" and cell["batch"] == 1 else None,
    }


class Page:
    """Looks cells up and writes them as table entries; what is not there becomes `not run` with a reason below."""

    def __init__(self, lines: list[dict[str, Any]], published: dict[str, Any]):
        self.published = published
        self.header = next((x for x in reversed(lines) if x["type"] == "model"), None)
        self.cells = latest(lines, self.header["weights_sha256"]) if self.header else []
        self.values = {c["id"]: numbers(c) for c in self.cells if c["type"] == "cell"}
        self.name = self.header["checkpoint"] if self.header else "this checkpoint"
        self.suites = list(self.header["suites"]) if self.header else []
        self.dtype = self.header["dtype"] if self.header else ""
        self.reasons: dict[str, None] = {}
        self.methods = dict.fromkeys(
            c["method"] for c in self.cells if c["method"].startswith("eagle") and not c["ablation"]
        )
        self.best = next(iter(sorted(self.methods)), "eagle1")

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        wanted = {"batch": 1, "verify": "match", "quant": self.dtype, "ablation": False} | wanted
        if self.suites:
            wanted.setdefault("suite", self.suites[0])
        return [c for c in self.cells if all(c.get(k) == v for k, v in wanted.items())]

    def get(self, why: str, **wanted: Any) -> dict[str, Any] | None:
        """The numbers of the latest such cell; None after noting why there are none."""
        found = self.find(**wanted)
        for cell in reversed(found):
            if cell["type"] == "cell":
                return self.values[cell["id"]]
        self.reasons[found[-1]["reason"] if found else why] = None
        return None

    def speedup(self, value: dict[str, Any] | None) -> str:
        if value is None:
            return "not run"
        return f"{value['speedup']:.2f}x" if value["speedup"] else value["blocked"].split(":")[0]

    def tau(self, value: dict[str, Any] | None) -> str:
        return "not run" if value is None else "-" if value["tau"] is None else f"{value['tau']:.2f}"

    def alphas(self, value: dict[str, Any] | None) -> list[str]:
        if value is None:
            return ["not run"] * 5
        return ([f"{a:.2f}" for a in value["alpha"]] + ["-"] * 5)[:5]

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
        """A section: title, table, note, and the reasons for its cells that were not run."""
        text = f"## {title}\n\n{tables_table(head, rows)}\n"
        text += f"\n{note}\n" if note else ""
        if self.reasons:
            text += "\nnot run: " + "; ".join(self.reasons) + "\n"
        self.reasons = {}
        return text

    def missing(self, method: str) -> str:
        return (self.header or {}).get("missing", {}).get(method, "not measured yet (--run)")

    def no_suite(self, suite: str) -> str:
        return f"{suite}: its question file was not given (--suite {suite}/question.jsonl)"

    def rows_here(self, T: float) -> list[tuple[str, dict[str, Any]]]:
        """(label, what to look up) of our own rows: every head, and at T = 1 also the paper's verification."""
        rows = [(f"{self.name}, {m}", {"method": m, "T": T}) for m in sorted(self.methods) or ["eagle1"]]
        if T:
            rows.append(
                (
                    f"{self.name}, {self.best}, multi-round",
                    {"method": self.best, "T": T, "verify": "multi-round"},
                )
            )
        return rows

    # -- tables

    def table1(self) -> str:
        extra = [s for s in self.suites if s not in (*TASKS, "mt_bench")]
        columns = [*TASKS, *extra]
        head = ["T", "model"] + [f"{s} {x}" for s in columns for x in ("speedup", "tau")]
        rows = []
        for T in (0.0, 1.0):
            for model, row in self.published["table1"][f"{T:g}"].items():
                rows.append([f"{T:g}", model] + _pairs(row) + ["", ""] * len(extra))
            for label, wanted in self.rows_here(T):
                values = [
                    self.get(
                        self.no_suite(s) if s not in self.suites else self.missing("eagle1"),
                        tree="paper25",
                        suite=s,
                        **wanted,
                    )
                    for s in columns
                ]
                rows.append(
                    [f"{T:g}", f"**{label}**"] + [x for v in values for x in (self.speedup(v), self.tau(v))]
                )
        return self.table("Table 1: speedup and tau by task", head, rows)

    def table2(self) -> str:
        rows = []
        for T in (0.0, 1.0):
            for model, row in self.published["table2"][f"{T:g}"].items():
                rows.append([f"{T:g}", model, *(f"{v:.2f}" for v in row)])
            for label, wanted in self.rows_here(T):
                tree, line = (
                    self.get(self.missing("eagle1"), tree=t, **wanted) for t in ("paper25", "chain:5")
                )
                rows.append([f"{T:g}", f"**{label}**", self.tau(tree), *self.alphas(line)])
        note = (
            f"The paper's rows: MT-bench; ours: {self.main()}. tau with the tree of 26 nodes, n-alpha with a "
        )
        note += "chain of 5, the last step of every text left out (the length limit may have cut it)."
        return self.table("Table 2: tau and n-alpha", ["T", "model", "tau", *ALPHAS], rows, note)

    def main(self) -> str:
        return "MT-bench" if self.suites[:1] == ["mt_bench"] else (self.suites or ["no suite"])[0]

    def table3(self) -> str:
        rows = [
            [model, f"{row[0]:.2f}x", *(f"{v:.2f}" for v in row[1:])]
            for model, row in self.published["table3"].items()
        ]
        if self.header and self.header["experts"]:
            tree, line = (
                self.get(self.missing("eagle1"), method=self.best, T=0.0, tree=t)
                for t in ("paper25", "chain:5")
            )
            rows.append([f"**{self.name}**", self.speedup(tree), self.tau(tree), *self.alphas(line)])
        else:
            self.reasons[f"{self.name} has no experts; give a Mixtral checkpoint and its head"] = None
            rows.append([f"**{self.name}**", *["not run"] * 7])
        return self.table("Table 3: mixture of experts, T = 0", ["model", "speedup", "tau", *ALPHAS], rows)

    def table4(self) -> str:
        def rate(value: float | None) -> str:
            return "not run" if value is None else f"{value:.1f}"

        rows = [
            [name, *("N/A" if v is None else f"{v:.1f}" for v in row)]
            for name, row in self.published["table4"].items()
        ]

        def arm(value: dict[str, Any] | None) -> str:
            return rate(value and value["rate"]) + (f" ({self.speedup(value)})" if value else "")

        hf = self.get("transformers was not measured", method="hf", T=0.0)
        rows.append([f"**{self.name}: transformers**", arm(hf), "N/A"])
        for tree, what in (("chain:3", "EAGLE, chain of 3"), ("paper25", "EAGLE, tree")):
            both = [
                self.get(self.missing("eagle1"), method=self.best, T=0.0, tree=tree, quant=q)
                for q in (self.dtype, "int4")
            ]
            if tree == "chain:3":
                rows.append([f"**{self.name}: plain**", *(rate(v and v["plain_rate"]) for v in both)])
            rows.append([f"**{self.name}: {what}**", *map(arm, both)])
        head = ["tokens/s", f"FP16 (ours: {self.dtype or 'not run'})", "int4"]
        int4 = f" Our int4: {self.header['int4']}." if self.header else ""
        return self.table(
            "Table 4: generation speed by precision, T = 0",
            head,
            rows,
            "The paper's rows: LLaMA2-Chat 7B on an RTX 3090, whose EAGLE + gpt-fast code drafts a chain of 3. In "
            "brackets: the paired ratio to plain decoding of the same precision; cells were measured one after another, "
            "so on a busy machine rates of different rows do not compare." + int4,
        )

    def table5(self) -> str:
        rows = [[m, f"{c:.2f}", f"{t:.2f}", "", ""] for m, (c, t) in self.published["table5"].items()]
        for method in sorted(self.methods) or ["eagle1"]:
            line, tree = (
                self.get(self.missing("eagle1"), method=method, T=0.0, tree=t) for t in ("chain:5", "paper25")
            )
            gain = f" (+{tree['tau'] - line['tau']:.2f})" if line and tree else ""
            rows.append(
                [
                    f"**{self.name}, {method}**",
                    self.tau(line),
                    self.tau(tree) + gain,
                    self.speedup(line),
                    self.speedup(tree),
                ]
            )
        head = ["model", "chain tau", "tree tau", "chain speedup", "tree speedup"]
        return self.table(
            "Table 5 and Figure 7: chain against tree, T = 0",
            head,
            rows,
            "Figure 7's bars (speedups) are not transcribed.",
        )

    def table6(self) -> str:
        rows = [
            [f"LLaMA2-Chat 7B: {name}", f"{s:.2f}x", f"{t:.2f}"]
            for name, (s, t) in self.published["table6"].items()
        ]
        fixed = [
            c
            for c in self.find(T=0.0, tree="paper25", method=self.best)
            + self.find(T=0.0, tree="paper25", method=self.best, ablation=True)
            if c["card"].get("inputs", SHIFTED) == SHIFTED
        ]
        for own, label in ((False, "fixed data"), (True, "data generated by the target")):
            cells = [c for c in fixed if bool(c["card"].get("regenerated")) == own and c["type"] == "cell"]
            value = self.values[cells[-1]["id"]] if cells else None
            if not cells:
                self.reasons[
                    f"no head trained on {label} was given "
                    f"(scripts.train_eagle{' --regenerate N' if own else ''}, then --ablation HEAD)"
                ] = None
            rows.append([f"**{self.name}: {label}**", self.speedup(value), self.tau(value)])
        return self.table("Table 6: training data, T = 0", ["training data", "speedup", "tau"], rows)

    def table7(self) -> str:
        sizes = sorted({1, 2, 3, 4} | {c["batch"] for c in self.cells if c["method"] == self.best})
        extra = [b for b in sizes if b > 4]
        rows = [
            [m, *(f"{v:.2f}x" for v in row[:4]), *[""] * len(extra), f"{row[4]:.2f}x"]
            for m, row in self.published["table7"].items()
        ]
        values = {
            b: self.get(self.missing("eagle1"), method=self.best, T=0.0, tree="paper25", batch=b)
            for b in sizes
        }
        longest = self.get(
            "the chain at the largest batch", method=self.best, T=0.0, tree="chain:5", batch=sizes[-1]
        )
        done = [v for v in [*values.values(), longest] if v]
        ratio = max(v["rate"] for v in done) / max(v["plain_rate"] for v in done) if done else None
        throughput = (
            f"{ratio:.2f}x"
            if ratio and not any(v["blocked"] for v in done)
            else "not run"
            if not done
            else "DIFFERS"
        )
        rows.append([f"**{self.name}**", *(self.speedup(v) for v in values.values()), throughput])
        head = ["batch size", *map(str, sizes), "throughput"]
        note = (
            f"throughput: best total tokens/s over these batch sizes (and a chain of 5 at {sizes[-1]}), over plain "
            "decoding's best; each from its own cell. "
            "The paper's largest batches fill the GPU (Vicuna 7B on an RTX 3090: 7, plain 8); "
            "`--batches` and `--largest-batch CAP` set ours."
        )
        return self.table("Table 7: batch size and throughput, T = 0", head, rows, note)

    def table8(self) -> str:
        rows = []
        for suite in [*TASKS, *(s for s in self.suites if s not in (*TASKS, "mt_bench"))]:
            for model, row in self.published["table8"].get(suite, {}).items():
                rows.append([suite, model, f"{row[0]:.2f}x", *(f"{v:.2f}" for v in row[1:])])
            for label, wanted in self.rows_here(0.0):
                why = self.no_suite(suite) if suite not in self.suites else self.missing("eagle1")
                tree, line = (self.get(why, tree=t, suite=suite, **wanted) for t in ("paper25", "chain:5"))
                rows.append([suite, f"**{label}**", self.speedup(tree), self.tau(tree), *self.alphas(line)])
        return self.table(
            "Table 8: n-alpha by task, T = 0", ["task", "model", "speedup", "tau", *ALPHAS], rows
        )

    def figure(self, number: int, T: float) -> str:
        models = self.published["models"]
        names = {
            "EAGLE": ["eagle1", "eagle2", "eagle3"],
            "Medusa": ["medusa"],
            "Lookahead": ["lookahead"],
            "n-gram": ["ngram"],
        }
        data = self.published[f"figure{number}"]
        rows = []
        for name in [*data, *(n for n in names if n not in data)]:
            bars = ["" if v is None else f"{v:.2f}x" for v in data.get(name, [None] * len(models))]
            rows.append([name, *bars, *self.method(name, names, T)])
        rows.insert(
            1, ["EAGLE-3", *[""] * len(models), *self._bar(self._best("eagle3", T, "paper25"), "eagle3")]
        )
        rows.insert(2, ["EAGLE-1/2, dynamic tree", *[""] * len(models), *self._dynamic(T)])
        note = ""
        for distilled in (True, False):
            if lengths := self.lengths(T, distilled):
                what = "Distilled" if distilled else "Undistilled"
                note += f"{what} draft LLM, best of chains of 2 to 10: {lengths}. "
        note += (
            "Blank: the paper has no such bar. All of ours give plain decoding's tokens at any temperature."
        )
        what = "greedy (T = 0)" if T == 0 else "sampling (T = 1)"
        return self.table(
            f"Figure {number}: methods, {what}", ["method", *models, f"**{self.name}**", "tau"], rows, note
        )

    def _bar(self, value: dict[str, Any] | None, method: str) -> list[str]:
        if value is None:
            self.reasons[self.missing(method) if method != "eagle3" else "no EAGLE-3 head"] = None
        return [self.speedup(value), self.tau(value)]

    def _best(self, method: str, T: float, tree: str | None = None) -> dict[str, Any] | None:
        wanted = {"method": method, "T": T} | ({"tree": tree} if tree else {})
        done = [self.values[c["id"]] for c in self.find(**wanted) if c["type"] == "cell"]
        return max(done, key=lambda v: v["speedup"] or 0, default=None)

    def _dynamic(self, T: float) -> list[str]:
        found = [
            c
            for c in self.find(method="eagle1", T=T)
            if c["tree"].startswith("dynamic") and c["type"] == "cell"
        ]
        return self._bar(self.values[found[-1]["id"]] if found else None, "eagle1")

    def method(self, name: str, names: dict[str, list[str]], T: float) -> list[str]:
        """[speedup, tau] of ours for a bar of the figure."""
        if name == "Vanilla":
            return ["1.00x", "1.00"]
        if name in ("DistillSpec", "Speculative sampling"):
            distilled = name == "DistillSpec"
            done = [self.values[c["id"]] for c in self.draft_llm(T, distilled)]
            if not done:
                what = "distilled" if distilled else "undistilled"
                self.reasons[
                    f"{name}: no {what} draft LLM (scripts.train_draft --loss {'kl' if distilled else 'ce'}, "
                    "then --draft-checkpoint)"
                ] = None
                return ["not run", "not run"]
            return self._bar(max(done, key=lambda v: v["speedup"] or 0), "draft")
        tree = "paper25" if name == "EAGLE" else None
        return self._bar(self._best(names[name][0], T, tree), names[name][0])

    def draft_llm(self, T: float, distilled: bool) -> list[dict[str, Any]]:
        """The cells of a draft LLM: DistillSpec's if its card says that it learnt the target's law."""
        cells = [c for c in self.find(method="draft", T=T) if c["type"] == "cell"]
        return [c for c in cells if (c["card"].get("loss") == "kl") == distilled]

    def lengths(self, T: float, distilled: bool) -> str:
        """The search over draft lengths, as text."""
        found = {c["tree"]: self.values[c["id"]] for c in self.draft_llm(T, distilled)}
        return ", ".join(
            f"{n}: {self.speedup(found[f'chain:{n}'])}" for n in LENGTHS if f"chain:{n}" in found
        )

    def figure8(self) -> str:
        rows = []
        for inputs, value in self.published["figure8"].items():
            row = [inputs, "not transcribed" if value is None else f"{value:.1f}x"]
            for T in (0.0, 1.0):
                both = []
                for tree in ("paper25", "chain:5"):
                    cells = [
                        c
                        for flag in (False, True)
                        for c in self.find(method=self.best, T=T, tree=tree, ablation=flag)
                        if c["type"] == "cell" and c["card"].get("inputs") == inputs
                        if not c["card"].get("regenerated")
                    ]
                    both.append(self.values[cells[-1]["id"]] if cells else None)
                    if not cells:
                        self.reasons[
                            f"no head with inputs {inputs} (scripts.train_eagle --inputs {inputs}, then --ablation HEAD)"
                        ] = None
                row += [self.speedup(both[0]), self.tau(both[0]), *self.alphas(both[1])[:2]]
            rows.append(row)
        head = ["inputs of the head", "paper, T = 0"] + [
            f"T = {T}: {x}" for T in (0, 1) for x in ("speedup", "tau", "0-alpha", "1-alpha")
        ]
        return self.table(
            "Figure 8: input ablation",
            head,
            rows,
            "The paper's three speedups are those its text gives (section 1, Figure 4).",
        )

    def figure9(self) -> str:
        def by_depth(tree) -> str:
            return " / ".join(str(sum(d == k for d in tree.depth)) for k in range(1, tree.D + 1))

        theirs = self.published["figure9"]
        rows = [
            [name, " / ".join(map(str, theirs[name])), by_depth(tree), str(tree.N), str(tree.D)]
            for name, tree in (("tree", PAPER25), ("chain", chain(5)))
        ]
        return self.table(
            "Figure 9: the draft's structure",
            ["draft", "paper: nodes by depth", "ours (`paper25`, `chain:5`)", "nodes with the root", "depth"],
            rows,
        )

    def text(self) -> str:
        """The whole page."""
        parts = [f"# The paper's tables, measured on {self.name}", self.preface()]
        parts += [
            self.table1(),
            self.table2(),
            self.table3(),
            self.table4(),
            self.table5(),
            self.table6(),
            self.table7(),
            self.table8(),
        ]
        parts += [self.figure(1, 0.0), self.figure(2, 1.0), self.figure8(), self.figure9()]
        return "\n\n".join(p.strip("\n") for p in parts) + "\n"

    def preface(self) -> str:
        done = [c for c in self.cells if c["type"] == "cell"]
        lines = [
            "Written by `python -m scripts.paper_tables --render`; do not edit. Bold is ours, the rest the paper's: "
            f"{self.published['source']}",
            "",
        ]
        lines += [f"- {text}" for text in self.published["caveats"]]
        lines.append(
            "- `DIFFERS`: not the tokens of plain decoding, so no speedup is printed. `not run`: the reason is below."
        )
        if not done:
            return "\n".join([*lines, "", "No cell has been measured yet."])
        machines, sizes, commits, commands, loads = {}, {}, {}, {}, []
        for c in done:
            e, t = c["environment"], c["settings"]
            loads += [e["load_average"] / e["cpus"]] if e["load_average"] is not None and e["cpus"] else []
            versions = [f"{k} {v}" for k, v in e["versions"].items() if v]
            machines[", ".join([e["device"], *versions])] = None
            sizes[f"{t['max_new_tokens']} new tokens, {t['reps']} repetition(s)"] = None
            commits[f"{e['git']['commit']}{' (modified)' if e['git']['dirty'] else ''}"] = None
            commands[f"`{c['command']}`"] = None
        prompts = ", ".join(f"{suite}: {count} prompts" for suite, count in self.header["suites"].items())
        seconds = sum(c["seconds"] for c in done)
        lines += ["", f"{len(done)} cells, {seconds:.0f} s; {prompts}; {' and '.join(sizes)}", ""]
        if loads:
            machines[f"cores busy at the start {min(loads):.0%} to {max(loads):.0%}"] = None
        lines += [f"- {name}: {', '.join(values)}" for name, values in
                  (("device", machines), ("commit", commits), ("commands", commands))]  # fmt: skip
        return "\n".join(lines)


def _pairs(row: Sequence[float]) -> list[str]:
    return [f"{v:.2f}x" if i % 2 == 0 else f"{v:.2f}" for i, v in enumerate(row)]


def render(cells: str | Path, page: str | Path, published: str | Path = PUBLISHED) -> str:
    """Write the page from the cell file; returns its text."""
    text = Page(read_cells(cells), json.loads(Path(published).read_text(encoding="utf-8"))).text()
    page = Path(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    part = page.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, page)
    return text
