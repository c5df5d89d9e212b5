"""scripts.paper_tables: published numbers that agree with each other, cells that recount, nothing measured twice."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace

import pytest
import torch
from tiny import tiny_head, tiny_model

from bench import paper_cells, paper_page
from drafters.medusa import MedusaHeads
from load import load
from memory_plan import plan_memory
from scripts import paper_tables
from support.files import read_json_lines
from tree import PAPER25
from weights.heads import read_eagle, save_eagle
from weights.hf import save_hf

PUBLISHED = json.loads(paper_page.PUBLISHED.read_text(encoding="utf-8"))
FLAGS = "--kernels reference --dtype float64 --limit 2 --max-new-tokens 12 --reps 1 --batches 1 2".split()


# ---- published numbers ------------------------------------------------------------------------------------


def test_published_tables_agree_with_each_other():
    """A digit mistyped: the paper prints most of its numbers twice, so a slip shows as a disagreement."""
    models = PUBLISHED["models"]
    for m, row in enumerate(models):
        first = PUBLISHED["table1"]["0"][row]
        pairs = [PUBLISHED["table8"][task][row][:2] for task in paper_page.TASKS]
        assert [x for pair in pairs for x in pair] == first, row
        assert PUBLISHED["table2"]["0"][row][0] == PUBLISHED["table5"][row][1], row
        for name, low, high in (("Medusa", 1.47, 1.60), ("Lookahead", 1.70, 2.08)):  # ratios that the text states
            bar = PUBLISHED["figure1"][name][m]
            assert bar is None or low <= round(PUBLISHED["figure1"]["EAGLE"][m] / bar, 2) <= high
    for row in ("Vicuna 7B", "LLaMA2-Chat 70B"):
        assert PUBLISHED["table7"][row][0] == PUBLISHED["figure1"]["EAGLE"][models.index(row)]
    fixed = PUBLISHED["table6"]["Fixed dataset"]
    at = models.index("LLaMA2-Chat 7B")
    assert fixed == [PUBLISHED["figure1"]["EAGLE"][at], PUBLISHED["table2"]["0"]["LLaMA2-Chat 7B"][0]]


def test_published_tables_are_well_formed():
    """A row with a column missing, a percentage beside fractions, T = 1 faster than T = 0 by a swapped line."""
    for T in ("0", "1"):
        assert list(PUBLISHED["table1"][T]) == list(PUBLISHED["table2"][T]) == PUBLISHED["models"]
        for row in PUBLISHED["table1"][T].values():
            assert len(row) == 6 and all(1 < s < t for s, t in zip(row[::2], row[1::2], strict=True))
        for tau, *alpha in PUBLISHED["table2"][T].values():
            assert 3 < tau < 4 and len(alpha) == 5 and all(0.6 < a < 0.9 for a in alpha)
    for row in PUBLISHED["models"]:
        assert PUBLISHED["table1"]["1"][row][0] < PUBLISHED["table1"]["0"][row][0]
        assert PUBLISHED["table2"]["1"][row][0] < PUBLISHED["table2"]["0"][row][0]
    for name in ("figure1", "figure2"):
        assert all(len(bars) == 6 for bars in PUBLISHED[name].values())
    counts = [sum(d == k for d in PAPER25.depth) for k in range(1, PAPER25.D + 1)]
    assert PUBLISHED["figure9"]["tree"] == counts and "arXiv" in PUBLISHED["source"]


# ---- cells ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny checkpoint with an EAGLE-1 head, an ablation head, a draft LLM and Medusa heads in its folders."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("tiny")
    model = tiny_model(torch.float32)
    save_hf(model, directory)
    for name, card in (
        ("eagle1", {"inputs": "feature+shifted-token", "regenerated": 0}),
        ("token", {"inputs": "token"}),
    ):
        write_head(model, directory / name, seed=1)
        (directory / name / "CARD.json").write_text(json.dumps(card))
    write_head(model, directory / "eagle3", 1, version=3)
    save_hf(tiny_model(torch.float32, seed=3, layers=1), directory / "draft")
    save_medusa(MedusaHeads(model, 2).state_dict(), directory / "medusa")
    return directory


def write_head(model, path, seed, version=1):
    head = tiny_head(model, version, seed=seed)
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith("rotary") and n != "draft_ids"}
    save_eagle(head.config, tensors, path)


def run(directory, cells, page, *flags, ablation=True):
    given = ["--ablation", str(directory / "token")] if ablation else []
    where = ["--checkpoint", str(directory), "--cells", str(cells), "--page", str(page)]
    return paper_tables.main([*where, *given, *FLAGS, *flags])


@pytest.fixture(scope="module")
def measured(directory, tmp_path_factory):
    """(cell file, page text) of a real measurement with short draft lengths."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_cells, "LENGTHS", range(2, 4))
        assert run(directory, out / "cells.jsonl", out / "page.md") == 0
    return out / "cells.jsonl", (out / "page.md").read_text()


def section(page: str, title: str) -> str:
    return next(part for part in page.split("\n## ") if part.startswith(title))


def cells_of(path):
    return [line for line in read_json_lines(path) if line["type"] == "cell"]


def by_hand(cell):
    """Speedup, tau and n-alpha of a cell from its raw runs, by code of its own."""
    plain = {(r["question"], r["turn"], r["rep"]): r for r in cell["plain"]}

    def speed(r):
        return (r["new_tokens"] - 1) / r["decode_seconds"]

    prompts: dict = {}
    for r in cell["runs"]:
        ratio = speed(r) / speed(plain[r["question"], r["turn"], r["rep"]])
        prompts.setdefault((r["question"], r["turn"]), []).append(ratio)
    steps = [n for r in cell["runs"] for n in r["tokens_per_step"]]
    whole = [n for r in cell["runs"] for n in r["tokens_per_step"][:-1]]
    examined = [sum(n >= k for n in whole) for k in range(1, 7)]
    alpha = [examined[k + 1] / examined[k] for k in range(5) if examined[k]]
    middle = statistics.median(statistics.median(ratios) for ratios in prompts.values())
    return middle, sum(steps) / len(steps), alpha


def test_page_recounts_from_the_raw_runs(measured):
    """A table entry that the committed lines do not give: wrong cell, wrong temperature, another arm's tau."""
    path, page = measured
    for T in (0.0, 1.0):
        wanted = ("eagle1", T, 1, "float64", False)
        names = ("method", "T", "batch", "quant", "ablation")
        find = [c for c in cells_of(path) if tuple(c[n] for n in names) == wanted]
        tree, line = (next(c for c in find if (c["tree"], c["verify"]) == (t, "match")) for t in ("paper25", "chain:5"))
        speedup, tau, _ = by_hand(tree)
        alpha = by_hand(line)[2]
        row = next(r for r in section(page, "Table 2").splitlines() if f"| {T:g} | **" in r and "multi-round" not in r)
        values = [v.strip() for v in row.strip("|").split("|")][2:]
        assert values == ([f"{tau:.2f}"] + [f"{a:.2f}" for a in alpha] + ["-"] * 5)[:6]
        row = next(r for r in section(page, "Table 1").splitlines() if f"| {T:g} | **" in r and "multi-round" not in r)
        assert [v.strip() for v in row.strip("|").split("|")][-2:] == [f"{speedup:.2f}x", f"{tau:.2f}"]
        figure = section(page, f"Figure {1 + int(T)}")
        row = next(r for r in figure.splitlines() if r.startswith("| EAGLE "))
        assert [v.strip() for v in row.strip("|").split("|")][-2:] == [f"{speedup:.2f}x", f"{tau:.2f}"]
        three = next(c for c in cells_of(path) if (c["method"], c["T"], c["tree"]) == ("eagle3", T, "paper25"))
        row = next(r for r in figure.splitlines() if r.startswith("| EAGLE-3 "))
        assert [v.strip() for v in row.strip("|").split("|")][-2:] == [
            f"{by_hand(three)[0]:.2f}x",
            f"{by_hand(three)[1]:.2f}",
        ]
        drafts = [c for c in cells_of(path) if c["method"] == "draft" and c["T"] == T]
        best = max(by_hand(c)[0] for c in drafts)
        assert len(drafts) == 2 and f"{best:.2f}x" in next(
            r for r in figure.splitlines() if r.startswith("| Speculative")
        )
    two = next(c for c in cells_of(path) if c["batch"] == 2 and c["tree"] == "paper25")
    assert f"{by_hand(two)[0]:.2f}x" in next(r for r in section(page, "Table 7").splitlines() if r.startswith("| **"))
    ablation = next(c for c in cells_of(path) if c["ablation"] and c["T"] == 0 and c["tree"] == "paper25")
    assert f" {by_hand(ablation)[1]:.2f} " in next(
        r for r in section(page, "Figure 8").splitlines() if r.startswith("| token")
    )


@pytest.mark.parametrize(
    "path", sorted(paper_tables.CELLS.parent.glob("paper_tables_*.jsonl")), ids=lambda path: path.stem
)
def test_the_committed_page_is_what_its_cells_give(path, tmp_path):
    """A page edited by hand, or not written again after a measurement; a cell whose runs do not add up."""
    fresh = paper_page.render(path, tmp_path / "page.md")
    page = paper_tables.page_of(path)
    hint = f"run: python -m scripts.paper_tables --render --cells {path}"
    assert page.parent.name == "docs" and fresh == page.read_text(encoding="utf-8"), hint
    for cell in cells_of(path):
        if cell["method"] == "hf":
            continue
        speedup, tau, alpha = by_hand(cell)
        value = paper_page.numbers(cell)
        assert value["tau"] == pytest.approx(tau) and value["speedup"] in (None, pytest.approx(speedup))
        assert value["alpha"] is None or value["alpha"] == pytest.approx(alpha)
        assert all(r["new_tokens"] == 1 + sum(r["tokens_per_step"]) for r in cell["runs"])


def test_a_page_lies_beside_its_cells_or_in_docs(tmp_path):
    """Cells of a user's own model that replace a page of this repository."""
    assert paper_tables.page_of(tmp_path / "llama.jsonl") == tmp_path / "llama.md"
    assert paper_tables.page_of(paper_tables.CELLS) == paper_tables.DOCS / "paper_tables_demo.md"


def test_every_cell_says_where_it_comes_from(measured):
    """A number without its device, versions, command, or with the folders of the machine it was made on."""
    path, page = measured
    cells = cells_of(path)
    assert len({c["id"] for c in cells}) == len(cells) > 25
    for cell in cells:
        assert cell["environment"]["device"] and cell["environment"]["versions"]["torch"]
        assert cell["command"].startswith("python -m scripts.paper_tables --checkpoint tiny")
        assert {r["same"] for r in cell["runs"]} <= (
            {"same"} if cell["label"] == "same tokens" else {"same", "differs"}
        )
    text = path.read_text()
    assert str(path.parent) not in text and not re.search(r"/tmp/", text + page)


def test_the_cells_of_int4_and_of_transformers_run_on_packed_weights(tmp_path, monkeypatch):
    """Bug: both read the float weights of a model whose kernels keep them in another layout, and the run ended there."""
    pytest.importorskip("transformers", reason="one cell is transformers")
    planned = paper_cells.plan
    monkeypatch.setattr(
        paper_cells, "plan", lambda *words: [c for c in planned(*words) if c["quant"] == "int4" or c["method"] == "hf"]
    )
    path = tmp_path / "cells.jsonl"
    words = ["--limit", "1", "--max-new-tokens", "8", "--reps", "1", "--batches", "1", "--debug"]
    assert paper_tables.main([*words, "--cells", str(path), "--page", str(tmp_path / "page.md")]) == 0
    cells = cells_of(path)
    assert [(c["method"], c["quant"]) for c in cells] == [("eagle1", "int4"), ("eagle1", "int4"), ("hf", "float32")]
    assert all(run["same"] == "same" for cell in cells[:2] for run in cell["runs"])


def test_a_quantized_model_is_not_rounded_again():
    """Bug: cells of int4 that cannot run, or a column "float32" for a GGUF file that is int4 already."""
    head = paper_cells.Candidate("eagle3", "head", {"eagle": "head"})
    kinds = [
        {cell["quant"] for cell in paper_cells.plan([head], ["mt_bench"], *how)}
        for how in (("float32", "chain:3", [1]), ("int4 (Q4_1)", "chain:3", [1], False))
    ]
    assert kinds == [{"float32", "int4"}, {"int4 (Q4_1)"}]


def test_cells_that_were_not_run_say_why(measured, tmp_path):
    """A hole in the page that looks like a number, or a reason that is lost: int4 cannot group 32 inputs by 128."""
    pytest.importorskip("transformers", reason="one cell is transformers")
    path, page = measured
    int4 = [line for line in read_json_lines(path) if line["type"] == "not_run"]
    assert len(int4) == 2 and "group size 128" in section(page, "Table 4")
    assert "no experts" in section(page, "Table 3") and "humaneval: its question file" in section(page, "Table 8")
    assert "no head with inputs feature " in section(page, "Figure 8")
    assert "no head trained on data generated by the target" in section(page, "Table 6")
    empty = paper_page.render(tmp_path / "nothing.jsonl", tmp_path / "page.md")
    assert empty.count("not run") > 60 and "No cell has been measured yet" in empty
    ours = [row for row in empty.splitlines() if row.startswith("| **") or "| **this" in row]
    assert ours and not any(re.search(r"\d\.\d\dx", row.split("**")[-1]) for row in ours)


def test_heads_are_compared_with_those_of_the_same_text(measured, tmp_path):
    """Bug: heads trained on the target's own chats filled the row of fixed data, and Figure 8 mixed two sets of text."""
    lines = [json.loads(line) for line in measured[0].read_text().splitlines()]
    cell = next(c for c in lines if c.get("ablation") and c["T"] == 0 and c["tree"] == "paper25")
    texts = (("own", 9, "token", 2), ("own", 9, paper_page.SHIFTED, 3), ("fixed", 0, paper_page.SHIFTED, 4))
    more = []
    for data, regenerated, inputs, tokens in (*texts, ("fixed", 5, paper_page.SHIFTED, 5)):
        runs = [r | {"tokens_per_step": [tokens] * 4, "new_tokens": 1 + 4 * tokens} for r in cell["runs"]]
        card = {"data": data, "regenerated": regenerated, "inputs": inputs}
        name = f"{data} {regenerated} {inputs}"
        more.append(cell | {"checksum": None, "id": name, "drafter": name, "card": card, "runs": runs})
    lines = [line for line in lines if not line.get("ablation")] + more
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = paper_page.render(tmp_path / "cells.jsonl", tmp_path / "page.md")
    rows = [row.split("|") for title in ("Table 6", "Figure 8") for row in section(page, title).splitlines()]
    found = {row[1].strip(): [cell.strip() for cell in row[2:]] for row in rows if len(row) > 3}
    taus = {name.split(": ")[-1].strip("*"): row[1] for name, row in found.items()}
    assert (taus["fixed data"], taus["data generated by the target"]) == ("4.00", "5.00")
    assert found["token"][2] == "2.00" and found[paper_page.SHIFTED][2] == "3.00"


def test_a_distilled_and_a_plain_draft_llm_have_a_bar_each(measured, tmp_path):
    """DistillSpec's bar filled by a draft LLM that never saw the target, or one of the two overwriting the other."""
    lines = [json.loads(line) for line in measured[0].read_text().splitlines()]
    more = []
    for c in lines:
        if c.get("method") == "draft":
            runs = [r | {"decode_seconds": r["decode_seconds"] / 2} for r in c["runs"]]
            more.append(
                c | {"checksum": None, "id": c["id"] + "x", "drafter": "d", "card": {"loss": "kl"}, "runs": runs}
            )
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines + more))
    page = paper_page.render(tmp_path / "cells.jsonl", tmp_path / "page.md")
    bars = {}
    for name in ("DistillSpec", "Speculative"):
        row = next(r for r in section(page, "Figure 1").splitlines() if r.startswith(f"| {name}"))
        bars[name] = float(row.strip("| ").split("|")[-2].strip().rstrip("x"))
    assert bars["DistillSpec"] == pytest.approx(2 * bars["Speculative"], abs=0.03)
    assert "Distilled draft LLM, best of" in page and "Undistilled draft LLM, best of" in page


def test_quick_fills_in_what_was_not_said(monkeypatch):
    """--quick that silently overrides --reps or --max-new-tokens, or a default that it forgets."""
    seen = []
    monkeypatch.setattr(paper_tables, "measure", lambda args, say: seen.append(args))
    monkeypatch.setattr(paper_tables, "render", lambda *args: "")
    for flags in ([], ["--quick"], ["--quick", "--reps", "2", "--max-new-tokens", "9", "--limit", "5"]):
        assert paper_tables.main(flags) == 0
    assert [(a.limit, a.max_new_tokens, a.reps) for a in seen] == [(0, 64, 3), (3, 48, 1), (5, 9, 2)]


def test_a_second_run_measures_nothing_again(measured, directory, tmp_path, monkeypatch):
    """Resuming that starts over; and a cell that was lost, torn off or made with another head, not measured anew."""
    pytest.importorskip("transformers", reason="one cell is transformers")
    path, _ = measured
    lines = path.read_text().splitlines(keepends=True)
    cells = tmp_path / "cells.jsonl"
    cells.write_text("".join(lines))
    monkeypatch.setattr(paper_cells, "LENGTHS", range(2, 4))
    asked, real = [], paper_cells.measure_single

    def counted(base, spec, *rest):
        if spec["quant"] != "int4":  # those fail before anything runs, and are tried again
            asked.append(spec["method"])
        return real(base, spec, *rest)

    monkeypatch.setattr(paper_cells, "measure_single", counted)
    assert run(directory, cells, tmp_path / "page.md") == 0 and asked == []
    medusa = next(i for i, text in enumerate(lines) if json.loads(text).get("method") == "medusa")
    rest = [text for text in lines if text != lines[medusa]]
    cells.write_text("".join(rest) + lines[medusa][:50])  # killed while writing
    assert run(directory, cells, tmp_path / "page.md") == 0 and asked == ["medusa"]
    assert len(cells_of(cells)) == len(cells_of(path))
    write_head(tiny_model(torch.float32), directory / "token", seed=9)
    assert run(directory, cells, tmp_path / "page.md") == 0 and asked == ["medusa"] + ["eagle1"] * 4
    kept = paper_cells.latest(read_json_lines(cells), cells_of(cells)[0]["weights_sha256"])
    assert sum(c["ablation"] for c in kept if c["type"] == "cell") == 4


def test_differing_tokens_are_never_a_speedup(measured, tmp_path):
    """A drafter that changes the text getting its ratio printed; a batch of them hidden in the throughput."""
    path, page = measured
    lines = read_json_lines(path)
    for line in lines:
        if line["type"] == "cell" and line["label"] == "same tokens" and line["method"] == "eagle1":
            line["runs"][0]["same"], line["checksum"] = "differs", None
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = paper_page.render(bad, tmp_path / "page.md")
    row = next(r for r in section(text, "Table 7").splitlines() if r.startswith("| **"))
    assert row.count("DIFFERS 1/") == 2 and row.rstrip("| ").endswith("DIFFERS")
    assert "DIFFERS 1/2" in section(text, "Table 1") and "DIFFERS" not in section(page, "Table 1")


def test_largest_batch_is_the_last_that_fits(directory, monkeypatch):
    """A batch that runs out of memory, one below the limit, or one that forgets that both arms hold caches."""
    base = load(str(directory), dtype="float64", device="cpu", kernels="reference")
    head = {"eagle": str(directory / "eagle1")}
    file = read_eagle(head["eagle"], base.model.config)
    plain, eagle = (
        plan_memory(base.model.config, replace(base.options, ctx=64, batch_size=5, **options), file_or_none)
        for options, file_or_none in (({}, None), (head, file))
    )
    need = sum(p.head + p.kv + p.buffers for p in (plain, eagle))
    for free, batch in ((need * 5 // 4 + 4, 5), (need * 5 // 4 - 4, 4), (0, 1), (10**12, 64)):
        monkeypatch.setattr(paper_cells, "free_memory", lambda device, free=free: free)
        assert paper_cells.largest_batch(base, head, 64, 64) == batch


def test_wrong_flags_are_one_line(directory, tmp_path, capsys):
    """A batch of 0, or a cell file of something else, ending in a traceback."""
    assert paper_tables.main(["--batches", "0"]) == 2 and "--batches" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text("not json\n")
    assert paper_tables.main(["--render", "--cells", str(bad), "--page", str(tmp_path / "p.md")]) == 3
    assert "bad.jsonl, line 1: not valid JSON" in capsys.readouterr().err


def test_a_cell_that_is_not_what_was_written_is_measured_again(measured, tmp_path):
    """A flipped bit in a number of the file, on the page and in every later run."""
    cells = cells_of(measured[0])
    weights = cells[0]["weights_sha256"]
    assert all("checksum" in cell for cell in cells) and paper_cells.latest(cells, weights) == cells
    changed = [cells[0] | {"seconds": cells[0]["seconds"] + 1}, *cells[1:]]
    assert paper_cells.latest(changed, weights) == cells[1:]
