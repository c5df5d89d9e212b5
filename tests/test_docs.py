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

import tree as trees
from report.viewer import Step
from scripts import measured, tree_picture

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


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
    """A recipe with a flag that was renamed: the reader's first command fails."""
    pytest.importorskip("triton", reason="scripts.kernel_report needs triton")
    asked: dict[str, set[str]] = {}
    for page in PAGES:
        for words in commands(page):
            module = words[1] if words[0] == "-m" else words[0].removesuffix(".py")
            if module in ("pytest", "pip"):
                continue
            flags = {w.split("=")[0] for w in words if w.startswith("-") and w not in ("-m", "-")}
            asked.setdefault(module, set()).update(flags)
    assert {"generate", "quantize", "scripts.bench", "scripts.paper_tables", "scripts.train_eagle"} <= set(
        asked
    )
    for module, flags in asked.items():
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_of(module)))
        assert flags <= known, f"{module}: {sorted(flags - known)} in the documents, not in its --help"


def test_files_that_the_readme_names_exist():
    """A link to a page, script or picture that is not there."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
        for script in re.findall(r"`(?:python -m )?scripts[./](\w+)", text):
            assert (ROOT / "scripts" / f"{script}.py").exists(), f"{page.name}: scripts.{script}"


def test_the_worked_example_runs_and_keeps_the_promise(capsys):
    """The drafter in docs/extending.md rotting, getting long, or drafting nothing that is accepted."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    define, use = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert len(define.splitlines()) < 40
    torch.set_num_threads(1)
    names: dict = {}
    exec(compile(define, "docs/extending.md", "exec"), names)
    exec(compile(use.replace('"demo"', repr(str(ROOT / "demo"))), "docs/extending.md", "exec"), names)
    assert names["b"].tau > 1 and capsys.readouterr().out.startswith(
        "tau "
    )  # the block asserts the tokens itself
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
    assert len(text) < 20_000 and re.search(
        r"one step of demo with eagle\d, \S+: \d+ nodes in one forward", text
    )


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
    summary = {
        "type": "summary",
        "environment": {"device": "AMD EPYC, 1 threads"},
        "rows": [row, fast, bad, other],
    }
    summary |= {"llama_bench": [], "model": {"checkpoint": "demo", "dtype": "float32", "quant": "none"}}
    (tmp_path / "demo.jsonl").write_text(json.dumps({"type": "run"}) + "\n" + json.dumps(summary) + "\n")
    text = measured.table(tmp_path)
    assert "AMD EPYC" in text and "plain 123 tok/s; fast 1.75x (1.50-2.00), tau 3.21; bad DIFFERS 2/8" in text
    assert "mr 1.75x (1.50-2.00), tau 3.21, same distribution" in text
    rows = [r | {"suite": suite} for suite in ("s", "t", "all") for r in (row, fast)]
    (tmp_path / "demo.jsonl").write_text(json.dumps(summary | {"rows": rows}) + "\n")
    assert measured.table(tmp_path).count("fast 1.75x") == 1  # all suites together, once
    assert "No file here comes from a GPU" in text
    tuned = {"verdict": "the tuned tree won: 1.1 x", "compile": True, "model": "demo", "head": "eagle1"}
    (tmp_path / "t.json").write_text(json.dumps(tuned | {"environment": {"device": "AMD EPYC, 1 threads"}}))
    assert "tree tuned for demo with eagle1, compiled: the tuned tree won: 1.1 x" in measured.table(tmp_path)
    (tmp_path / "x.json").write_text(
        json.dumps({"environment": {"device": "NVIDIA GeForce RTX 3090"}, "parts": []})
    )
    text = measured.table(tmp_path)
    assert "No file here" not in text and "RTX 3090" in text and "`make gpu`" in text
    (tmp_path / "y.json").write_text("{")
    with pytest.raises(ValueError, match="y.json"):
        measured.table(tmp_path)
    assert "Nothing has been measured" in measured.table(tmp_path / "none")
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- measured -->\nold\n<!-- /measured -->\nb\n")
    assert measured.main(["--results", str(tmp_path / "none"), "--readme", str(readme)]) == 0
    assert "old" not in readme.read_text() and readme.read_text().endswith("<!-- /measured -->\nb\n")


def test_readme_table_is_the_committed_files():
    """A row of the README edited by hand, or not written again after its file changed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    inside = text.split("<!-- measured -->\n")[1].split("\n<!-- /measured -->")[0]
    rows = {line for line in inside.splitlines() if "benchmarks/results/" in line}
    assert rows <= set(measured.table().splitlines()), "run: python -m scripts.measured --readme README.md"
