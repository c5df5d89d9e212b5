"""The documents: commands whose flags exist, examples that run, pictures and tables that come from what they claim."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import generate
import tree as trees
from bench import acceptance
from report.viewer import Step
from scripts import measured, serve, tree_picture
from serving.metrics import ABOUT

ROOT = Path(__file__).resolve().parent.parent
ACCEPTANCE = (  # page, block, file
    ("docs/results.md", "acceptance", "demo_acceptance.json"),
    ("docs/smollm2.md", "acceptance", "smollm2_acceptance.json"),
    ("docs/smollm2.md", "formats", "smollm2_head_formats.json"),
    ("docs/smollm2.md", "float32", "smollm2_float32_acceptance.json"),
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]


def commands(page: Path) -> list[list[str]]:
    """Every `python ...` command of a page, in code blocks and in backquotes, as words."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(python [^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    found = []
    for line in lines:
        for part in re.split(r"\s&&\s", line.split(" #")[0]):
            part = part.strip().replace("[", "").replace("]", "")
            if part.startswith("python ") and " -c " not in part:
                found.append(shlex.split(part)[1:])
    return found


def help_of(module: str) -> str:
    """What the command prints for --help, run in this process."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = argv
    assert not end.value.code
    return out.getvalue()


def test_every_flag_in_the_documents_exists():
    """Every flag of a command in the pages is in the --help of that command."""
    pytest.importorskip("triton", reason="scripts.kernel_report needs triton")
    asked: dict[str, set[str]] = {}
    for page in PAGES:
        if page.name.startswith("paper_tables"):  # it names the commands of the past that its figures come from
            continue
        for words in commands(page):
            module = words[1] if words[0] == "-m" else words[0].removesuffix(".py")
            if module in ("pytest", "pip"):
                continue
            flags = {w.split("=")[0] for w in words if w.startswith("-") and w not in ("-m", "-")}
            asked.setdefault(module, set()).update(flags)
    assert {"generate", "quantize", "scripts.bench", "scripts.serve", "scripts.train_eagle"} <= set(asked)
    for module, flags in asked.items():
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_of(module)))
        assert flags <= known, f"{module}: {sorted(flags - known)} in the documents, not in its --help"


def test_files_that_the_pages_name_exist():
    """Every relative link of a page leads to a file, and every script that a page names exists."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
        for script in re.findall(r"`(?:python -m )?scripts[./](\w+)", text):
            assert (ROOT / "scripts" / f"{script}.py").exists(), f"{page.name}: scripts.{script}"


def test_the_worked_example_runs_and_keeps_the_promise(capsys):
    """The drafter in docs/extending.md gives the tokens of plain decoding, and some of its drafts are accepted."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    define, use = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    torch.set_num_threads(1)
    names: dict = {}
    exec(compile(define, "docs/extending.md", "exec"), names)
    exec(compile(use.replace('"demo"', repr(str(ROOT / "demo"))), "docs/extending.md", "exec"), names)
    assert names["b"].tau > 1 and capsys.readouterr().out.startswith("tau ")  # the block asserts the tokens itself
    fast, plain = names["fast"], names["plain"]
    greedy = names["SamplingParams"](max_new_tokens=24)
    a, b = (engine.generate(names["prompt"], greedy).run()[0] for engine in (plain, fast))
    assert a.token_ids == b.token_ids and b.tau > 1


def test_the_picture_shows_the_step():
    """Nodes on top of each other, an accepted token drawn as rejected, the target's own token left out."""
    tree = trees.PAPER25
    path = [0, 1, 6]  # the root, its first child, that one's second child
    tokens = list(range(100, 100 + tree.N))
    valid = [i != 12 for i in range(tree.N)]
    emitted = [tokens[1], tokens[6], 999]
    step = Step(tokens, list(tree.parent), list(tree.depth), valid, [1.0] * tree.N, path, emitted)
    root = ElementTree.fromstring(tree_picture.draw(step, lambda t: f"<{t}>", "a & b"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = {}
    for group in root.iter(f"{space}g"):
        rect, label = group.find(f"{space}rect"), group.find(f"{space}text")
        boxes[label.text] = (float(rect.get("x")), float(rect.get("y")), rect.get("stroke"))
    assert len(boxes) == tree.N - 1 + 1 and "<112>" not in boxes
    places = sorted((x, y) for x, y, _ in boxes.values())
    for (x, y), (x2, y2) in zip(places, places[1:], strict=False):
        assert x != x2 or y2 - y >= tree_picture.ROW - 5
    colours = {name: boxes[name][2] for name in ("<100>", "<101>", "<106>", "<105>", "<999>")}
    expected = [tree_picture.ROOT, tree_picture.ACCEPTED, tree_picture.ACCEPTED, tree_picture.REJECTED]
    assert list(colours.values()) == [*expected, tree_picture.BONUS]
    assert boxes["<999>"][0] == boxes["<106>"][0] + tree_picture.COLUMN


def test_the_committed_picture_is_a_real_step():
    """A picture nobody can remake: it says model, head, tree and step, and is small."""
    text = (ROOT / "docs" / "tree.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert len(text) < 20_000 and re.search(r"one step of \S+ with \S*eagle\d, \S+: \d+ nodes in one forward", text)


def test_measured_table_says_what_the_files_say(tmp_path):
    """A README figure that no committed file has, a CPU file passed off as a GPU's, a broken promise left out."""
    row = {
        "suite": "s",
        "temperature": 0.0,
        "baseline": True,
        "arm": "plain",
        "tokens_per_second": 123.4,
        "tau": 1.0,
        "label": "same tokens",
    }
    fast = row | {"baseline": False, "arm": "fast", "tau": 3.21, "label": "same tokens", "blocked": None}
    fast["speedup"] = {"median": 1.75, "low": 1.5, "high": 2.0}
    bad = fast | {"arm": "bad", "speedup": None, "blocked": "DIFFERS 2/8"}
    other = fast | {"arm": "mr", "label": "same distribution"}
    summary = {"type": "summary", "environment": {"device": "AMD EPYC, 1 threads"}, "rows": [row, fast, bad, other]}
    summary |= {"llama_bench": [], "model": {"checkpoint": "demo", "dtype": "float32", "quant": "none"}}
    (tmp_path / "demo.jsonl").write_text(json.dumps({"type": "run"}) + "\n" + json.dumps(summary) + "\n")
    text = measured.table(tmp_path)
    assert "**demo, float32** on AMD EPYC, 1 threads (`benchmarks/results/demo.jsonl`)" in text
    assert "| arm | T = 0 | tau |" in text and "| plain | 123 tok/s |  |\n| fast | 1.75x (1.50-2.00) | 3.21 |" in text
    assert "| bad | DIFFERS 2/8 | 3.21 |\n| mr, same distribution | 1.75x (1.50-2.00) | 3.21 |" in text
    sampled = [r | {"temperature": 1.0} for r in (row, fast | {"tau": 2.5})]
    (tmp_path / "demo.jsonl").write_text(json.dumps(summary | {"rows": [row, fast, bad, *sampled]}) + "\n")
    text = measured.table(tmp_path)
    assert "| fast | 1.75x (1.50-2.00) | 3.21 | 1.75x (1.50-2.00) | 2.50 |" in text
    assert "| bad | DIFFERS 2/8 | 3.21 |  |  |" in text
    rows = [r | {"suite": suite} for suite in ("s", "t", "all") for r in (row, fast)]
    (tmp_path / "demo.jsonl").write_text(json.dumps(summary | {"rows": rows}) + "\n")
    assert measured.table(tmp_path).count("| fast | 1.75x") == 1  # all suites together, once
    assert "No file here comes from a GPU" in text
    tuned = {"verdict": "the tuned tree won: 1.1 x", "compile": True, "model": "demo", "head": "eagle1"}
    (tmp_path / "t.json").write_text(json.dumps(tuned | {"environment": {"device": "AMD EPYC, 1 threads"}}))
    assert "tree tuned for demo with eagle1, compiled: the tuned tree won: 1.1 x" in measured.table(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps({"environment": {"device": "NVIDIA GeForce RTX 3090"}, "parts": []}))
    text = measured.table(tmp_path)
    assert "No file here" not in text and "RTX 3090" in text and "`make gpu`" in text
    (tmp_path / "y.json").write_text("{")
    with pytest.raises(ValueError, match="y.json"):
        measured.table(tmp_path)
    assert "Nothing has been measured" in measured.table(tmp_path / "none")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- headline -->\nold\n<!-- /headline -->\nb\n<!-- measured -->\nold\n<!-- /measured -->\nc\n")
    assert measured.main(["--results", str(tmp_path / "none"), "--readme", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text and text.count("Nothing has been measured") == 2
    assert "<!-- /headline -->\nb\n" in text and text.endswith("<!-- /measured -->\nc\n")
    page.write_text("no markers\n")
    assert measured.main(["--results", str(tmp_path / "none"), "--readme", str(page)]) == 2


def test_headline_has_the_figures_of_its_files(tmp_path):
    """A README row that is not its file's figure: another arm's or temperature's, a broken promise left out."""
    assert measured.headline(tmp_path) == "Nothing has been measured and committed yet."
    rows = [
        {"arm": arm, "temperature": T, "baseline": False, "tau": 3.0 + T, "blocked": "DIFFERS 1/9: why"}
        | {"speedup": {"median": 1.5 + T, "low": 1.25, "high": 2.75} if arm != "eagle3" or T else None}
        for arm in ("eagle1", "eagle3")
        for T in (0.0, 1.0)
    ]
    summary = {"type": "summary", "environment": {"device": "AMD EPYC, 1 threads"}, "rows": rows}
    (tmp_path / "smollm2_int4_256_avx512.jsonl").write_text(json.dumps(summary) + "\n")
    text = measured.headline(tmp_path)
    where = "AMD EPYC, 1 threads | [smollm2_int4_256_avx512.jsonl](benchmarks/results/smollm2_int4_256_avx512.jsonl) |"
    assert f"temperature 0 | DIFFERS 1/9, tau 3.00 | {where}" in text
    assert f"temperature 1 | 2.50x (1.25-2.75), tau 4.00 | {where}" in text
    assert len(text.splitlines()) == 6 and "No file here comes from a GPU" in text
    (tmp_path / "gpu.json").write_text(json.dumps({"environment": {"device": "NVIDIA GeForce RTX 3090"}}))
    assert len(measured.headline(tmp_path).splitlines()) == 4


def block(page: str, name: str) -> list[str]:
    """The lines between a page's markers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(f"<!-- {name} -->\n") == 1 and text.count(f"\n<!-- /{name} -->") == 1
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0].splitlines()


def test_tables_are_the_committed_files():
    """A row edited by hand, or not written again after its file changed."""
    committed = {"README.md": {"headline": measured.headline()}}
    committed["docs/results.md"] = {"measured": measured.table(), "quantization": measured.quantization()}
    for page, blocks in committed.items():
        for name, text in blocks.items():
            rows = {line for line in block(page, name) if line.startswith(("|", "**"))}
            hint = "run: python -m scripts.measured --readme README.md docs/results.md"
            assert len(rows) > 2 and rows <= set(text.splitlines()), hint
    for page, name, file in ACCEPTANCE:
        report = json.loads((measured.RESULTS / file).read_text())
        hint = f"run: python -m scripts.acceptance --readme {page} --block {name} --json benchmarks/results/{file}"
        assert block(page, name) == acceptance.tables(report).splitlines(), hint


def test_the_readme_explains_the_report(capsys, monkeypatch):
    """The README's sample report has the lines of a real report, in the same order, and a table row explains each."""

    def labels(text: str) -> list[str]:
        return [line[:8].strip() for line in text.splitlines() if line[:8].strip()]

    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## The report, line by line")[1].split("\n## ")[0]
    sample = re.search(r"^(model .*?)^```", section, re.S | re.M)[1]
    assert generate.main(["--eagle", "demo/eagle3", "--tree", "chain:1", "--device", "cpu"]) == 0
    assert labels(sample) == labels(capsys.readouterr().err)
    assert re.findall(r"^\| `([\w ]+)` \|", section, re.M) == labels(sample)


def test_the_python_of_the_readme_runs(capsys, monkeypatch):
    """The README's Python example runs, prints the text of its result, and accepts drafted tokens."""
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["stream"].result.text in capsys.readouterr().out and names["stream"].result.tau > 1.5


def test_the_servers_page_has_every_metric_and_default():
    """docs/server.md names every metric, and the defaults in its tables are those of the command line."""
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    assert not [name for name in ABOUT if f"`{name}`" not in page]
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\w+) \|", page, re.M)
    args = vars(serve.build_parser().parse_args([]))
    assert len(rows) == 8
    for name, default in rows:
        assert {"none": "None", "off": "False"}.get(default, default) == str(args[name.replace("-", "_")]), name
