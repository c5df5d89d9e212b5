"""The documents: commands whose flags exist, examples that run, pictures and tables that come from what they claim."""

import contextlib
import functools
import io
import math
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from test_layering import ORDER, SOURCES, graph_of, room

import generate
from engine.runner import Pacer
from scripts import measured, serve
from serving.metrics import ABOUT
from support.files import read_json_lines

ROOT = Path(__file__).resolve().parent.parent
OPTION = r"(?<![\w-])--?[a-z][\w-]*"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md"]


def commands(page: Path) -> list[list[str]]:
    """Every `python ...` and torchrun command of a page, in code blocks and in backquotes, as words."""
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
            elif part.startswith("torchrun ") and " -m -- " in part:
                found.append(["-m", *shlex.split(part.split(" -m -- ")[1])])
    return found


@functools.cache
def options_of(module: str) -> set[str]:
    """The options that the --help of a command lists, run in this process."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = argv
    assert not end.value.code
    return set(re.findall(OPTION, out.getvalue()))


def test_every_flag_in_the_documents_exists():
    """Every flag of a command in the pages is in the --help of that command."""
    asked: dict[str, set[str]] = {}
    for page in PAGES:
        for words in commands(page):
            module = words[1] if words[0] == "-m" else words[0].removesuffix(".py")
            if module in ("pytest", "pip"):  # whose flags are those of another program
                continue
            flags = {w.split("=")[0] for w in words if w.startswith("-") and w not in ("-m", "-")}
            asked.setdefault(module, set()).update(flags)
    assert {"generate", "quantize", "scripts.bench", "scripts.train_eagle"} <= set(asked)
    for module, flags in asked.items():
        assert flags <= options_of(module), f"{module}: {sorted(flags - options_of(module))} in the documents"


def test_every_option_is_on_a_page():
    """Catches an option that only its author knows."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {"--help", *re.findall(OPTION, text)}
    scripts = (f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("[a-z]*.py"))
    for module in ("generate", "quantize", *scripts):
        unnamed = {option for option in options_of(module) if option.startswith("--")} - named
        assert not unnamed, f"{module}: no page names {sorted(unnamed)}"


def test_files_that_the_pages_name_exist():
    """Every relative link of a page leads to a file, and every script that a page names exists."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
        for script in re.findall(r"`(?:python -m )?scripts[./](\w+)", text):
            assert (ROOT / "scripts" / f"{script}.py").exists(), f"{page.name}: scripts.{script}"


def test_the_examples_run_and_keep_the_promise(capsys, monkeypatch):
    """The drafter in docs/extending.md gives the tokens of plain decoding, and some of its drafts are accepted. The
    README's Python prints the text of its result, and accepts drafted tokens."""
    monkeypatch.chdir(ROOT)
    torch.set_num_threads(1)
    monkeypatch.setattr(Pacer, "LOSS", math.inf)  # drafting goes on where it does not pay on this machine

    def run(page: str) -> tuple[dict, str]:
        """The names that the Python of a page defines, and what it prints."""
        names: dict = {}
        for code in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M):
            exec(compile(code, "a page", "exec"), names)
        return names, capsys.readouterr().out

    names, said = run((ROOT / "docs" / "extending.md").read_text(encoding="utf-8").split("## A model family")[0])
    assert names["b"].tau > 1 and said.startswith("tau ")  # the block asserts the tokens itself
    greedy = names["SamplingParams"](max_new_tokens=24)
    a, b = (names[name].generate(names["prompt"], greedy).run()[0] for name in ("plain", "fast"))
    assert a.token_ids == b.token_ids and b.tau > 1
    names, said = run((ROOT / "README.md").read_text(encoding="utf-8"))
    assert names["stream"].result.text in said and names["stream"].result.tau > 1.5


def test_tables_are_the_committed_records():
    """Every block of docs/results.md is what its record gives, and the records are all on some page."""
    text = measured.PAGE.read_text(encoding="utf-8")
    assert measured.filled(text) == text, "run python -m scripts.measured"
    others = (ROOT / "README.md", ROOT / "docs" / "replicas.md")  # the latter by its own test
    shown = text + "".join(page.read_text(encoding="utf-8") for page in others)
    assert not [path.name for path in measured.RESULTS.glob("*.jsonl") if path.name not in shown]


def test_tables_beside_other_engines_are_their_records():
    """A figure of an engine beside others that its record does not have."""
    text = measured.PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- peers (\S*) -->\n(.*?)\n<!-- /peers -->", text, re.S)
    assert blocks
    for file, block in blocks:
        lines = read_json_lines(measured.RESULTS / file)
        for row in block.splitlines()[2:]:
            name, what, *shown = (cell.strip() for cell in row.strip("|").split("|"))
            (rates,) = [line["decode"] for line in lines if (line.get("file"), line.get("arm")) == (name, what)]
            assert shown == [str(rate) for rate in rates]


def test_a_page_explains_the_report(capsys, monkeypatch):
    """The sample report of docs/report.md has the lines of a real report, in order, and a table row for each."""

    def labels(text: str) -> list[str]:
        return [line[:8].strip() for line in text.splitlines() if line[:8].strip()]

    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    sample = re.search(r"^(model .*?)^```", page, re.S | re.M)[1]
    assert generate.main(["--eagle", "demo/eagle3", "--tree", "chain:1", "--device", "cpu"]) == 0
    assert labels(sample) == labels(capsys.readouterr().err)
    assert re.findall(r"^\| `([\w ]+)` \|", page, re.M) == labels(sample)


def test_the_servers_page_has_every_metric_and_default():
    """docs/server.md names every metric, and the defaults in its tables are those of the command line."""
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    assert not [name for name in ABOUT if f"`{name}`" not in page]
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\w+) \|", page, re.M)
    args = vars(serve.build_parser().parse_args([]))
    assert len(rows) == 9
    for name, default in rows:
        assert {"none": "None", "off": "False"}.get(default, default) == str(args[name.replace("-", "_")]), name


def test_the_six_files_to_read_first_are_enough():
    """A reading order that names a file that is gone, or whose files need others, but for kernels and helpers; a table of
    files that lacks a room of test_layering.py, or has another order."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d\. `([\w/]+)\.py`: ", page.split("## All files")[0], re.M)
    assert len(files) == 6
    assert sorted(path.stem for path in ROOT.glob("*.py")) == "eagle_draft generate model quantize tree".split()
    names = {file.replace("/", ".") for file in files}
    known = graph_of(SOURCES)
    for name in names:
        others = {room(other) for other in known[name] - names - {"decoding", "decoding.params"}}
        assert others <= {"kernels", "support", "families"}
    assert re.findall(r"^\| `(\w+)(?:/|\.py)` \| ", page, re.M) == [*ORDER, "tests"]
