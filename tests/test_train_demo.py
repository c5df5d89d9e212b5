"""Training of the demo model on a tiny model and corpus: by seed, interrupted, and in a directory of another run."""

import os
import signal
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts import train_demo

VOCAB = 400
TINY = replace(
    train_demo.CONFIG, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, vocab_size=VOCAB, windows=(),
)  # fmt: skip
STEPS = 6


STDLIB = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> bytes:
    """The tiny corpus' tokenizer, trained once."""
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_demo, "VOCAB_SIZE", VOCAB)
        train_demo.train_tokenizer([STDLIB / "bisect.py", STDLIB / "heapq.py"], path)
    return path.read_bytes()


@pytest.fixture
def run(tokenizer, tmp_path, monkeypatch):
    """run(name, *flags) -> exit code of a tiny training in tmp_path / name, exported to its `out`."""
    files = [STDLIB / "bisect.py"], [STDLIB / "heapq.py"]
    small = {"VOCAB_SIZE": VOCAB, "CONFIG": TINY, "LENGTHS": (32, 64), "stdlib_files": lambda: files}
    for name, value in small.items():
        monkeypatch.setattr(train_demo, name, value)
    before = signal.getsignal(signal.SIGINT)

    def train(name: str, *flags: str) -> int:
        work = tmp_path / name
        work.mkdir(exist_ok=True)
        if not (work / "tokenizer.model").exists():
            (work / "tokenizer.model").write_bytes(tokenizer)
        paths = ["--work", str(work), "--out", str(work / "out")]
        code = train_demo.main([*paths, "--steps", str(STEPS), "--batch-tokens", "64", *flags])
        assert signal.getsignal(signal.SIGINT) is before  # Ctrl-C means what it meant
        return code

    return train


def weights(folder: Path) -> bytes:
    return (folder / "out" / "model.safetensors").read_bytes()


def test_a_seed_names_a_model(run, tmp_path):
    """The same seed gives the same weights, another seed gives others."""
    assert run("a") == run("b") == run("c", "--seed", "1") == 0
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")
    assert f"{STEPS} steps of 64 tokens, seed 1," in (tmp_path / "c" / "out" / "CARD.md").read_text()


@pytest.mark.parametrize("step", [0, STEPS - 1])
def test_ctrl_c_saves_and_the_same_command_goes_on(run, tmp_path, monkeypatch, capsys, step):
    """Ctrl-C ends with 130 after a whole step, and the same command ends in the weights of an uninterrupted run."""
    assert run("whole") == 0
    real, drawn = train_demo.batch, []

    def batch(*args):
        drawn.append(args)
        if len(drawn) == step + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(train_demo, "batch", batch)
    capsys.readouterr()
    assert run("stopped") == 130 and not (tmp_path / "stopped" / "out").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if "interrupted" in line]
    assert len(lines) == 1 and f"after step {step + 1};" in lines[0] and "train_state.pt" in lines[0]
    assert torch.load(tmp_path / "stopped" / "train_state.pt", weights_only=True)["step"] == step + 1
    assert run("stopped") == 0 and len(drawn) == STEPS
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_second_ctrl_c_does_not_wait(run, monkeypatch, capsys):
    """The second Ctrl-C ends the command within the step, in one line."""

    def stuck(*args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second Ctrl-C did nothing")

    monkeypatch.setattr(train_demo, "batch", stuck)
    assert run("a") == 130
    assert len([line for line in capsys.readouterr().err.splitlines() if "interrupted" in line]) == 1


def test_another_runs_directory_gives_one_line(run, tmp_path, capsys):
    """A state, tokenizer or folder of another run is one line with exit code 3."""
    assert run("a") == 0
    state, tokens = tmp_path / "a" / "train_state.pt", tmp_path / "a" / "tokenizer.model"
    good, kept = state.read_bytes(), torch.load(state, weights_only=True)
    for name, content in (("older", {"settings": {}}), ("head", kept | {"run": {"--version": 1, "--seed": 0}})):
        torch.save(content, tmp_path / name)
    larger = (Path(train_demo.__file__).parents[1] / "demo" / "tokenizer.model").read_bytes()
    for flags, file, content, says in (
        (["--seed", "1"], state, good, "from another run (--seed 0, here 1)"),
        (["--batch-tokens", "128"], state, good, "from another run (--batch-tokens 64, here 128)"),
        ([], state, (tmp_path / "head").read_bytes(), "from another run (--steps None, here 6)"),
        ([], state, (tmp_path / "older").read_bytes(), "damaged, or not a training state"),
        ([], tokens, b"junk", "tokenizer.model: not a sentencepiece model"),
        ([], tokens, larger, "tokenizer.model has 4096 pieces"),
    ):
        file.write_bytes(content)
        capsys.readouterr()
        assert run("a", *flags) == 3
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(errors) == 1 and says in errors[0] and "--work" in errors[0]
    with pytest.raises(SystemExit) as usage:
        run("a", "--batch-tokens", "63")
    assert usage.value.code == 2 and "64 or more" in capsys.readouterr().err
