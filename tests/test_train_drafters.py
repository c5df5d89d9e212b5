"""Whole trainings of every kind of drafter, on a tiny target whose next token follows from the last one."""

import contextlib
import copy
import functools
import itertools
import json

import numpy as np
import pytest
import torch
from test_drafters import table_model
from tiny import V, load_config

from scripts import train_block, train_draft, train_eagle, train_medusa
from support.errors import UsageError
from training import blocks, loop
from training.data import TokenData
from training.distillation import DraftModelTraining, MedusaTraining
from training.drafters import train
from training.eagle import EagleTraining
from weights.block_heads import read_head
from weights.hf import save_hf

BLOCK = "--layers 1 --slots 5 --rank 32 --anchor-share 0.25 --taps 0 --side-lr 0.004".split()
KINDS = {
    "draft": (DraftModelTraining, train_draft, "--hidden 32 --heads 2 --lr 4".split()),
    "medusa": (MedusaTraining, train_medusa, "--medusa-heads 5 --own-lm-head --lr 4".split()),
    "eagle1": (EagleTraining, train_eagle, ["--version", "1"]),
    "eagle3": (EagleTraining, train_eagle, "--version 3 --taps 0,1 --ttt-steps 2 --noise-share 0.5".split()),
    **{kind: (blocks.BlockTraining, train_block, ["--kind", kind, *BLOCK]) for kind in blocks.KINDS},
}
FORMATS = {"dflash": "DFlash head", "jetspec": "JetSpec head", "dspark": "DSpark head", "dflash2": "DFlash2 head"}


@contextlib.contextmanager
def stopped_after(step: int):
    """Ctrl-C in this step of a training."""
    steps = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "deferred_interrupt", lambda: contextlib.nullcontext(lambda: next(steps) == step))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The table model on disk, and its own text: runs of 50 tokens from random starts."""
    folder, (model, follow) = tmp_path_factory.mktemp("train"), table_model()
    save_hf(copy.deepcopy(model).float(), folder / "target")
    runs = [np.random.default_rng(0).integers(0, V, 600)]
    for _ in range(49):
        runs.append(follow.numpy()[runs[-1]])
    TokenData.from_stream(np.stack(runs, 1).flatten()).save(folder / "data.npz")
    return folder


def common_options(files, out, *more):
    argv = ["--checkpoint", files / "target", "--data", files / "data.npz", "--out", out, "--work", f"{out}-work"]
    argv += ["--length", 64, "--eval-prompts", 2, "--eval-tokens", 32, "--prompt-length", 16, *more]
    return [str(word) for word in argv]


def saved(out):
    """The state of the training of the drafter at `out`."""
    return torch.load(f"{out}-work/train_state.pt", weights_only=True)


def options(kind, files, out, *more, steps=60):
    return common_options(files, out, "--steps", steps, *KINDS[kind][2], *more)


def trained(kind, files, out, *more, steps=60):
    training, command, _ = KINDS[kind]
    return train(training, command.parse(options(kind, files, out, *more, steps=steps)))


@pytest.mark.parametrize(
    "kind, more, steps, tau",
    [(kind, ["--loss", loss], 60, 4) for kind in ("draft", "medusa") for loss in ("kl", "ce")]
    + [(kind, [], 90, 2.5) for kind in blocks.KINDS],
)
def test_training_from_scratch_drafts_well(kind, more, steps, tau, files, tmp_path):
    """After some steps tau is well above 1, where drafts by chance would stay. The card says what was measured and
    written."""
    card = trained(kind, files, tmp_path / "out", *more, steps=steps)
    assert card["tau_greedy"] > tau and card["tau_t1"] > tau
    assert np.mean(card["loss_curve"][-5:]) < 0.5 * card["loss_curve"][0]
    assert json.loads((tmp_path / "out" / "CARD.json").read_text())["tau_greedy"] == card["tau_greedy"]
    if kind in FORMATS:
        read = read_head(tmp_path / "out", load_config(files / "target")).config
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert card["format"] == FORMATS[kind] == f"{read.kind} head"
        assert written.get("enable_confidence_head", False) == (kind == "dspark")


@pytest.mark.parametrize("kind", ("draft", "eagle1", "eagle3", "dspark"))
def test_resume_is_exact(kind, files, tmp_path):
    """A resumed run ends in the weights of one that was not interrupted, and other settings are refused.

    Catches state that the checkpoint lacks (momentum, schedule, data order), and noise or anchors that depend on more
    than the step.
    """
    whole = trained(kind, files, tmp_path / "a", steps=6)
    with stopped_after(3):
        trained(kind, files, tmp_path / "b", steps=6)
    assert saved(tmp_path / "b")["step"] == 3
    with pytest.raises(ValueError, match="--seed"):
        trained(kind, files, tmp_path / "b", "--seed", 1, steps=6)
    assert trained(kind, files, tmp_path / "b", steps=6)["loss_curve"] == whole["loss_curve"]
    a, b = (saved(tmp_path / name)["module"] for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("more, words", [(("--anchor-share", 0), "above 0"), (("--taps", "0,9"), "ascending")])
def test_options_that_do_not_fit_are_one_line(files, tmp_path, more, words):
    """Training that starts with a loss of nothing, or reads layers that are not there."""
    with pytest.raises(UsageError, match=words):
        trained("dflash", files, tmp_path / "c", *more)


def test_what_lies_at_out_is_not_replaced_unasked(files, tmp_path, capsys):
    """A folder that is no drafter and a better drafter stay, unless --force is given. What others put there stays."""
    out, asked = tmp_path / "out", functools.partial(options, "draft", files, tmp_path / "out")
    (out / "notes").mkdir(parents=True)
    (out / "thesis.txt").write_text("years of work")
    assert train_draft.main(asked(steps=1)) == 2
    assert "cannot be compared" in capsys.readouterr().err
    assert train_draft.main(asked("--force", steps=30)) == 0
    good, names = (out / "CARD.json").read_bytes(), {path.name for path in out.iterdir()}
    worse = ["--work", tmp_path / "other", "--lr", "0.001"]
    assert train_draft.main(asked(*worse, steps=1)) == 1
    said = capsys.readouterr().err
    assert "is better" in said and "kept it" in said and (out / "CARD.json").read_bytes() == good
    assert train_draft.main(asked(*worse, "--force", steps=1)) == 0
    assert (out / "CARD.json").read_bytes() != good and (out / "thesis.txt").read_text() == "years of work"
    assert {path.name for path in out.iterdir()} == names >= {"notes", "thesis.txt", "CARD.json"}
