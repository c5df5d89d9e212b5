"""scripts.tune_tree: what the race counts, and that nothing is written that did not win."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import eagle_engine, tiny_head, tiny_model

import drafting
import generate
import load
import options
import tree as trees
from bench import race
from bench.arms import Sample
from drafters.tree_drafter import TreeDrafter
from eagle_draft import UnshiftedDrafter
from sampling import SamplingParams
from scripts import tune_tree
from support import errors
from support.progress import Progress
from tree import DynamicTree
from weights.checkpoint import Checkpoint
from weights.heads import read_eagle, save_eagle
from weights.hf import save_hf
from weights.quantized import QuantSpec

PROMPTS = [[1, 5, 9, 22, 7, 3], [4, 4, 8, 2, 60], [9, 30, 31, 32], [7, 7, 7, 50, 51]]
GREEDY = SamplingParams(max_new_tokens=21)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny target and two heads on disk."""
    directory = tmp_path_factory.mktemp("tune")
    model = tiny_model(torch.float32)
    save_hf(model, directory)
    for seed in (1, 2):
        head = tiny_head(model, seed=seed)
        save_eagle(head.config, head.state_dict(), directory / f"eagle{seed}")
    return directory


def fake_arms(monkeypatch, rates, ids_of=lambda name, prompt: range(21), order=None):
    """Arms that decode 21 tokens in 10 steps at the given rates, of which one second repetition is slow."""
    runs = dict.fromkeys(rates, 0)

    class Arm(SimpleNamespace):
        def run(self, prompt, params):
            if params.max_new_tokens == 21:
                runs[self.name] += 1
                if order is not None:
                    order.append(self.name)
            slow = 3 if runs[self.name] == 2 else 1
            return Sample(list(ids_of(self.name, prompt)), 0.1, slow * 20 / rates[self.name], [2] * 10)

    monkeypatch.setattr(race, "EngineArm", lambda name, label, given, engine: Arm(name=name))
    return dict.fromkeys(rates)


def test_the_race_counts_all_tokens_over_median_times(monkeypatch):
    """The rate is all tokens over the sum of the median times, tau is tokens per step, and the order of the arms rotates;
    a slow repetition does not count."""
    order = []
    engines = fake_arms(monkeypatch, {"a": 10.0, "b": 5.0}, order=order)
    rows, left_out = race.race(engines, PROMPTS, [GREEDY], 3, Progress(True))
    assert left_out == 0 and rows["a"]["tokens_per_second"] == pytest.approx(10) and rows["a"]["tau"] == 2
    assert rows["b"]["per_prompt"] == pytest.approx([5.0] * 4)
    assert order[:6] == ["a", "b", "b", "a", "a", "b"]


def test_prompts_whose_tokens_differ_are_left_out(monkeypatch):
    """A prompt on which one tree forked counts for no tree, and forks on most prompts are an error."""

    def forked(*prompts):
        return lambda name, prompt: range(5, 26) if name == "b" and prompt in prompts else range(21)

    engines = fake_arms(monkeypatch, {"a": 10.0, "b": 5.0}, forked(PROMPTS[0]))
    rows, left_out = race.race(engines, PROMPTS, [GREEDY], 1, Progress(True))
    assert left_out == 1 and len(rows["a"]["per_prompt"]) == len(rows["b"]["per_prompt"]) == 3
    engines = fake_arms(monkeypatch, {"a": 10.0, "b": 5.0}, forked(*PROMPTS[:3]))
    with pytest.raises(ValueError, match="this is a bug"):
        race.race(engines, PROMPTS, [GREEDY], 1, Progress(True))


def run_main(checkpoint, monkeypatch, tmp_path, *flags: str) -> int:
    monkeypatch.setattr(race, "find_prompts", lambda args, base: [list(p) for p in PROMPTS])
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path / "cache"))
    common = "--device cpu --ctx 128 --max-new-tokens 12 --reps 1 -q --trees chain:1 dynamic:6,2,3".split()
    return tune_tree.main(["--checkpoint", str(checkpoint), *common, *flags])


def fake_race(monkeypatch, **rates: float) -> None:
    """Replaces the race by these rates; every other tree has 100."""

    def result(engines, *rest):
        all_rates = dict.fromkeys(engines, 100.0) | {race.PLAIN: 60.0} | rates
        rows = {name: {"tokens_per_second": r, "tau": 2.0, "per_prompt": [r] * 4} for name, r in all_rates.items()}
        return rows, 0

    monkeypatch.setattr(race, "race", result)


def test_nothing_is_written_where_the_default_or_plain_decoding_wins(checkpoint, monkeypatch, tmp_path, capsys):
    """The exit code is 1 and the cache stays empty. --out asks for the file all the
    same, which then holds the fastest of the named trees."""
    fake_race(monkeypatch, **{race.DEFAULT: 120.0})
    assert run_main(checkpoint, monkeypatch, tmp_path) == 1
    assert "nothing was written" in capsys.readouterr().out
    fake_race(monkeypatch, **{race.PLAIN: 240.0})
    assert run_main(checkpoint, monkeypatch, tmp_path) == 1
    assert "does not pay" in capsys.readouterr().out and not (tmp_path / "cache" / "trees").exists()
    out = tmp_path / "tree.json"
    assert run_main(checkpoint, monkeypatch, tmp_path, "--out", str(out)) == 1
    assert json.loads(out.read_text())["winner"] == race.PLAIN and trees.parse_tree(str(out)) == trees.chain(1)
    fake_race(monkeypatch, **{race.DEFAULT: 120.0, "dynamic:6,2,3": 110.0})
    assert run_main(checkpoint, monkeypatch, tmp_path, "--out", str(out)) == 1
    assert trees.parse_tree(str(out)) == DynamicTree(6, 2, 3)


def test_a_winning_tree_is_written_and_found_by_auto(checkpoint, monkeypatch, tmp_path, capsys):
    """--tree auto decodes with the tree that won, for this head alone, and without a file it names the command."""
    head = str(checkpoint / "eagle1")
    flags = ["--checkpoint", str(checkpoint), "--prompt-ids", "1,5,9", "--max-new-tokens", "4", "--ctx", "64"]
    flags += ["--device", "cpu"]
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path / "cache"))
    assert generate.main([*flags, "--eagle", head, "--tree", "auto"]) == errors.USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "python -m scripts.tune_tree --checkpoint" in error and head in error
    fake_race(monkeypatch, **{"dynamic:6,2,3": 120.0})
    assert run_main(checkpoint, monkeypatch, tmp_path) == 0
    page = capsys.readouterr().out
    assert "(--tree auto)" in page and "1.20 times as fast as the default" in page
    (file,) = (tmp_path / "cache" / "trees").iterdir()
    assert trees.parse_tree(str(file)) == DynamicTree(6, 2, 3)
    engine = load.load(checkpoint, eagle=head, tree="auto", ctx=64, device="cpu")
    assert (engine.drafter.N, engine.drafter.D) == (6, 3)
    assert generate.main([*flags, "--eagle", head, "--tree", "auto", "-q"]) == 0
    other = str(checkpoint / "eagle2")
    assert generate.main([*flags, "--eagle", other, "--tree", "auto"]) == errors.USAGE
    assert generate.main([*flags, "--tree", "auto"]) == errors.USAGE
    assert "needs --eagle" in capsys.readouterr().err


def test_a_real_race_runs_every_tree(checkpoint, monkeypatch, tmp_path, capsys):
    """With real engines and clocks every tree, the default and plain decoding have a row, and all tokens agree."""
    out = tmp_path / "tree.json"
    assert run_main(checkpoint, monkeypatch, tmp_path, "--out", str(out)) in (0, 1)  # a random head need not pay
    rows = json.loads(out.read_text())["rows"]
    assert set(rows) == {race.PLAIN, race.DEFAULT, "chain:1", "dynamic:6,2,3"}
    assert rows[race.PLAIN]["tau"] == 1 and all(row["tokens_per_second"] > 0 for row in rows.values())
    assert json.loads(out.read_text())["left_out"] == 0 and "tok/s" in capsys.readouterr().out


def test_the_key_tells_apart_what_changes_the_best_tree(checkpoint, monkeypatch, tmp_path):
    """Two devices, models, heads, quantizations or ways to run have different files."""
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    opened = Checkpoint.open(checkpoint)
    one, two = (read_eagle(checkpoint / f"eagle{i}", opened.config) for i in (1, 2))
    opts = options.LoadOptions(str(checkpoint), device="cpu")
    path = drafting.tuned_tree_path(opts, opened, one)
    assert path == drafting.tuned_tree_path(opts, opened, one)
    quantized = tmp_path / "int4"
    quantized.mkdir()
    raw = json.loads((checkpoint / "config.json").read_text()) | {"eaglet_quant": {"mode": "int4"}}
    (quantized / "config.json").write_text(json.dumps(raw))
    others = [
        drafting.tuned_tree_path(opts, opened, two),
        drafting.tuned_tree_path(opts, Checkpoint.open(quantized), one),
        drafting.tuned_tree_path(opts, replace(opened, spec=QuantSpec("int4")), one),
        drafting.tuned_tree_path(opts, replace(opened, config=replace(opened.config, rms_norm_eps=1e-3)), one),
        *(
            drafting.tuned_tree_path(replace(opts, **more), opened, one)
            for more in ({"dtype": "bfloat16"}, {"compile": True}, {"draft_vocab": 9}, {"kv": "int8"})
        ),
    ]
    monkeypatch.setattr("drafting.describe_device", lambda device: "NVIDIA GeForce RTX 3090")
    others.append(drafting.tuned_tree_path(opts, opened, one))
    assert "NVIDIA-GeForce-RTX-3090" in others[-1].name
    assert len({path, *others}) == 10


@pytest.mark.parametrize("flags, message", [(["--reps", "0"], "--reps is 0"), (["--eagle", "nowhere"], "nowhere")])
def test_bad_flags_are_one_line(flags, message, checkpoint, capsys):
    """A wrong number and a missing head are one line each, with the exit code of their kind."""
    assert tune_tree.main(["--checkpoint", str(checkpoint), "--device", "cpu", *flags]) in (2, 3)
    error = capsys.readouterr().err
    assert error.startswith("error  ") and error.count("\n") == 1 and message in error


def test_an_unshifted_head_races_with_its_own_drafter():
    """A head of the paper's Figure 8 is raced with the drafter that pairs its features with the right tokens."""
    model = tiny_model(torch.float32)
    for unshifted in (False, True):
        head = tiny_head(model, unshifted=unshifted)
        base = eagle_engine(head, trees.chain(2))
        opts = options.LoadOptions(eagle="x", ctx=64, device="cpu")
        base = base.sibling(None, replace(base.config, options=opts, head=head))
        drafter = race.tree_engine(base, "paper25").drafter
        assert isinstance(drafter, TreeDrafter) and isinstance(drafter, UnshiftedDrafter) == unshifted
