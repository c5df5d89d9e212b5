"""Training of draft LLMs and Medusa heads, on a tiny target whose next token follows from the last one."""

import contextlib
import copy
import itertools
import json

import numpy as np
import pytest
from test_drafters import table_model
from tiny import V

from scripts import train_draft, train_medusa
from training import loop
from training.data import TokenData
from training.distillation import DraftModelTraining, MedusaTraining
from training.drafters import train
from weights.hf import save_hf

KINDS = {
    "draft": (DraftModelTraining, train_draft, ["--hidden", "32", "--heads", "2"]),
    "medusa": (MedusaTraining, train_medusa, ["--medusa-heads", "5", "--own-lm-head"]),
}


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


def options(kind, files, out, *more, steps=120):
    return common_options(files, out, "--steps", steps, *KINDS[kind][2], *more)


def trained(kind, files, out, *more, steps=120):
    training, command, _ = KINDS[kind]
    return train(training, command.parse(options(kind, files, out, *more, steps=steps)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ("kl", "ce"))
def test_training_from_scratch_drafts_well(kind, loss, files, tmp_path):
    """After some steps tau is well above 1, where drafts by chance would stay."""
    card = trained(kind, files, tmp_path / "out", "--loss", loss)
    assert card["tau_greedy"] > 4 and card["tau_t1"] > 4
    assert np.mean(card["loss_curve"][-5:]) < 0.5 * card["loss_curve"][0]
    assert json.loads((tmp_path / "out" / "CARD.json").read_text())["tau_greedy"] == card["tau_greedy"]


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind, files, tmp_path):
    """A resumed run ends in the weights of one that was not interrupted, and other settings are refused."""
    whole = trained(kind, files, tmp_path / "a", steps=6)
    with stopped_after(3):
        trained(kind, files, tmp_path / "b", steps=6)
    with pytest.raises(ValueError, match="--loss"):
        trained(kind, files, tmp_path / "b", "--loss", "ce", steps=6)
    assert trained(kind, files, tmp_path / "b", steps=6)["loss_curve"] == whole["loss_curve"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_at_out_is_not_replaced_unasked(kind, files, tmp_path, capsys):
    """A folder that is no drafter and a better drafter stay, unless --force is given. What others put there stays."""
    main = KINDS[kind][1].main
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").mkdir()
    (out / "thesis.txt").write_text("years of work")
    assert main(options(kind, files, out, steps=1)) == 2
    assert "cannot be compared" in capsys.readouterr().err
    assert main(options(kind, files, out, "--force", steps=60)) == 0
    good, names = (out / "CARD.json").read_bytes(), {path.name for path in out.iterdir()}
    worse = ["--work", tmp_path / "other", "--lr", "0.001"]
    assert main(options(kind, files, out, *worse, steps=1)) == 1
    said = capsys.readouterr().err
    assert "is better" in said and "kept it" in said and (out / "CARD.json").read_bytes() == good
    assert main(options(kind, files, out, *worse, "--force", steps=1)) == 0
    assert (out / "CARD.json").read_bytes() != good and (out / "thesis.txt").read_text() == "years of work"
    assert {path.name for path in out.iterdir()} == names >= {"notes", "thesis.txt", "CARD.json"}
