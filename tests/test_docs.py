"""The documents: commands whose flags exist, examples that run, pictures and tables that come from what they claim."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from test_layering import ORDER

import generate
import tree as trees
from cli.steps import Step
from scripts import measured, serve, tree_picture
from serving.metrics import ABOUT
from support import real_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md"]


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
    assert {"generate", "quantize", "scripts.bench", "scripts.train_eagle"} <= set(asked)
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


def block(page: str, name: str) -> list[str]:
    """The lines between a page's markers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(f"<!-- {name} -->\n") == 1 and text.count(f"\n<!-- /{name} -->") == 1
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0].splitlines()


def test_tables_are_the_committed_records():
    """Every block of README.md and docs/results.md is what its record gives, and the records are all on a page."""
    texts = {page: page.read_text(encoding="utf-8") for page in measured.PAGES}
    for page, text in texts.items():
        assert measured.filled(text) == text, f"{page.name}: run python -m scripts.measured"
    shown = "".join(texts.values())
    assert "<!-- headline -->" in shown
    assert not [path.name for path in measured.RESULTS.glob("*.jsonl") if path.name not in shown]


def test_the_readme_is_short():
    """The front page growing back: its length, its rows of figures, a cell that is a page."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert len([line for line in block("README.md", "headline") if line.startswith("|")]) <= 2 + 6
    assert all(len(cell) <= 160 for line in lines if line.startswith("|") for cell in line.split("|"))


def rows_of_the_house(section: str) -> list[list[str]]:
    """The cells of a section's table in docs/house.md, without its head."""
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    lines = page.split(f"## {section}")[1].split("\n## ")[0].splitlines()
    return [line.strip("|").split("|") for line in lines if line.startswith("| ")][1:]


def test_the_house_names_every_room():
    """A new file or folder that a reader finds nowhere in docs/house.md, a room that has gone, or another order than the
    one that test_layering.py checks."""
    named = [re.findall(r"`(\w+/|\w+\.py)`", row[0]) for row in rows_of_the_house("All rooms")]
    there = {path.name for path in ROOT.glob("*.py")}
    there |= {f"{path.parent.name}/" for path in ROOT.glob("*/*.py")}
    missing, gone = there - {*sum(named, [])}, {*sum(named, [])} - there
    assert not missing and not gone, f"not on the page: {sorted(missing)}; not there: {sorted(gone)}"
    order = [re.sub(r"/|\.py", "", name) for row in named for name in row]
    assert order == [*ORDER, "tests"] and all(len(row) == 1 for row in named)
    assert all(len(row) == 2 and row[1].strip() for row in rows_of_the_house("All rooms"))


def test_the_house_names_every_file_of_the_larger_rooms():
    """A file of a folder that the page does not name, or one that has gone."""
    rows = rows_of_the_house("Inside the larger rooms")
    assert len(rows) >= 8
    for folder, files in rows:
        named = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", files)))
        there = {path.stem for path in (ROOT / folder.strip(" `/")).glob("*.py")} - {"__init__"}
        assert named == there, f"{folder}: {sorted(there ^ named)}"


def test_the_readme_explains_the_report(capsys, monkeypatch):
    """The sample report of the README having other lines than the real one, or lines that are not explained."""

    def plain(line: str) -> str:
        """A line without what depends on the machine and on whether drafting paid there."""
        line = re.sub(r"^device  .*(?=plan)|(?<=reference ).*", "", line)
        line = re.sub(r"   \d+ tokens decoded plainly| over \d+ of \d+ steps", "", line)
        if not line.startswith(("model", "stop")):  # the other lines hold times and rates
            line = re.sub(r"(?<=peak )[\d.]+ [MG]B", "#", line)
            line = re.sub(r"[#.]{32}|\.?\d[\d.,]*( \.?\d[\d.,]*)*", "#", line)
        return " ".join(line.split())

    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## The report, line by line")[1].split("\n## ")[0].replace("\\\n", " ")
    sample = re.search(r"^(model .*?)^```", section, re.S | re.M)[1]
    command = shlex.split(re.search(r"^python generate.py (.*)$", section, re.M)[1])
    file = real_model.find()
    real = [str(file) if word.endswith(".gguf") else word for word in command]
    assert generate.main([*(real if file else ["--eagle", "demo/eagle3", "--tree", "chain:1"]), "--device", "cpu"]) == 0
    report = capsys.readouterr().err

    def labels(text: str) -> list[str]:
        return [line[:8].strip() for line in text.splitlines() if line[:8].strip()]

    assert labels(sample) == labels(report)
    if file:  # the embedded model has other facts
        for ours, theirs in zip(sample.splitlines(), report.splitlines(), strict=True):
            assert plain(ours) == plain(theirs)
        for fact in ("36 tok", "100 tok", "weights 96.6 MB", "head EAGLE-3  11.0 MB"):
            assert fact in sample and fact in report
    assert re.findall(r"^\| `([\w ]+)` \|", section, re.M) == labels(sample)


def test_the_python_of_the_readme_runs(capsys, monkeypatch):
    """The first program that a reader copies failing."""
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["stream"].result.text in capsys.readouterr().out and names["stream"].result.tau > 1.5


def test_the_servers_page_has_every_limit_error_and_figure():
    """An option with another default than the page says, and an error or a metric that an operator cannot look up."""
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    errors = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "serving").glob("*.py")))
    codes = set(re.findall(r'"((?:invalid|missing|unsupported|context|wrong|unknown|method|request|queue|shutting|device'
                           r'|engine|internal|model_not)_[a-z_]+)"', errors))  # fmt: skip
    codes -= {"invalid_request_error", "requests_total", "requests_running", "requests_waiting"}
    assert len(codes) > 14 and not [code for code in codes if f"`{code}`" not in page]
    assert not [name for name in ABOUT if f"`{name}`" not in page]
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\w+) \|", page, re.M)
    args = vars(serve.build_parser().parse_args([]))
    assert len(rows) == 8
    for name, default in rows:
        assert {"none": "None", "off": "False"}.get(default, default) == str(args[name.replace("-", "_")]), name
