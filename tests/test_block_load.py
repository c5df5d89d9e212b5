"""Block heads in the commands: loading, the report, the memory plan, rounding, and what is refused."""

import functools
import json

import pytest
import torch
from test_checkpoint import one_line
from tiny import held

import generate
import quantize
from bench.arms import default_arms
from bench.random_models import BLOCKS, block_config
from decoding.params import SamplingParams
from drafters.block import BlockDrafter, BlockHead
from engine.load import _load, load
from engine.ranks import Ranks
from loading.options import DEMO, LoadOptions
from scripts import convert
from support.errors import UsageError
from weights.block_heads import BlockConfig, read_head, save_block
from weights.checkpoint import Checkpoint
from weights.hf import build_model

TARGET = Checkpoint.open(DEMO).config
PROMPT = [5, 900, 17, 33, 900, 17]


@functools.cache
def weights(kind: str) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
    """A head with two layers and random weights for the demo model."""
    more = {name: value for name, value in BLOCKS[kind].items() if name != "rank"} | {"slots": 6}
    config = block_config(TARGET, kind, 2)
    config = BlockConfig(**vars(config) | more | {"rank": 32 if config.rank else 0})
    head = BlockHead(config, build_model(TARGET))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, t in head.state_dict().items():
        noise = torch.randn(t.shape, generator=generator)
        tensors[name] = noise * t.shape[-1] ** -0.5 if t.dim() > 1 else torch.ones(t.shape)
    return config, tensors


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """The folder of one head of every kind."""
    folder = tmp_path_factory.mktemp("heads")
    for kind in BLOCKS:
        save_block(*weights(kind), folder / kind)
    return folder


@functools.cache
def plain(**settings) -> list[int]:
    """What the model decodes without a drafter."""
    return load(DEMO).generate(PROMPT, SamplingParams(max_new_tokens=24, **settings)).run()[0].token_ids


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_head_loads_by_the_flag_of_all_heads(heads, kind):
    """--eagle HEAD that does not know the kind from the file, other tokens than without a head, a default tree that the
    head cannot draft, and a memory plan without the second copy of the keys' and values' rows."""
    for settings in ({}, {"temperature": 1.0, "seed": 4}):
        engine = load(DEMO, eagle=heads / kind)
        assert isinstance(engine.drafter, BlockDrafter)
        result = engine.generate(PROMPT, SamplingParams(max_new_tokens=24, **settings)).run()[0]
        assert result.token_ids == plain(**settings)
    size = held(engine.head) - held(engine.head.rotary) - engine.head.context_norms.nbytes
    assert engine.plan.head == pytest.approx(size, rel=0.01)
    buffers = [*engine.state.buffers(), engine.drafter.cache]
    kept = held(engine.model, engine.head) + sum(buffer.nbytes for buffer in buffers)
    assert engine.plan.total - engine.plan.snapshots == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("kind, options", (
    ("dflash", {"tree": "chain:4"}), ("dspark", {"tree": "dynamic:12,3,4", "prune": 5}), ("dspark", {"draft_vocab": 900}),
    ("dflash", {"verify": "multi-round"}), ("dspark", {"verify": "multi-round"}), ("dflash", {"ngram_nodes": 6}),
    ("dspark", {"kernels": "reference"}), ("dflash", {"draft_noise": False}), ("dspark", {"dtype": "float64"}),
))  # fmt: skip
def test_options_of_drafting_hold_for_block_heads(heads, kind, options):
    """An option that is ignored or that changes the text."""
    engine = load(DEMO, eagle=heads / kind, **options)
    result = engine.generate(PROMPT, SamplingParams(max_new_tokens=24)).run()[0]
    assert result.token_ids == plain()
    if "draft_vocab" in options:
        assert engine.head.vocab_size == 900 and engine.head.lm_head.out_features == 900
    if "prune" in options:
        assert engine.drafter.p_min == 0.05


def test_what_does_not_go_with_a_block_head_is_refused(heads):
    """A traceback, a drafter that is silently another one, or --tp that drafts with half of a head."""
    for options, said in (
        ({"tree": "chain:6"}, "this head drafts 5 tokens at once; use --tree chain:5"),
        ({"prune": 5, "ngram_nodes": 4}, "--prune and --ngram-nodes do not go together"),
    ):
        one_line(lambda options=options: load(DEMO, eagle=heads / "dflash", **options), said)
    ranks = Ranks.__new__(Ranks)
    ranks.rank, ranks.size, ranks.here = 0, 2, 2
    options = LoadOptions(str(DEMO), eagle=str(heads / "dspark"), tp=2)
    one_line(lambda: _load(options, None, print, ranks), "--tp splits no DSpark head yet", kind=UsageError)


def test_the_report_and_the_pages_name_the_kind(heads, capsys, tmp_path):
    """A report that calls every head EAGLE, and --prove, --show-tree or --json that fail with another head."""
    argv = ["--eagle", str(heads / "dflash2"), "-p", "def f(", "--max-new-tokens", "12"]
    assert generate.main([*argv, "--prove", "--show-tree", "--html", str(tmp_path / "steps.html")]) == 0
    said = capsys.readouterr()
    assert "head DFlash2" in said.err and "identical 12/12" in said.out + said.err
    assert "DFlash2" in (tmp_path / "steps.html").read_text()
    assert generate.main(["--eagle", str(heads / "dspark"), "-p", "f(", "--max-new-tokens", "6", "--json", "-q"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["drafter"] == "eagle" and value["tree"].startswith("dynamic:26,") and value["new_tokens"] == 6


@pytest.mark.parametrize("mode,algorithm,kind", [
    ("int8", "rtn", "dspark"), ("int4", "rtn", "dflash2"), ("int4", "gptq", "dspark"), ("int4", "gptq", "dflash2"),
])  # fmt: skip
def test_block_heads_are_rounded(heads, tmp_path, monkeypatch, mode, algorithm, kind):
    """A rounded head that cannot be read, that lost its tables, whose codes are planned in other sizes, or that drafts
    something else than the float head; GPTQ that does not feed a linear."""
    out = tmp_path / "head"
    argv = ["--checkpoint", str(DEMO), "--eagle", str(heads / kind), "--head-only", "--out", str(out), "--mode", mode]
    monkeypatch.setattr(quantize, "CALIBRATION_WINDOWS", 4)
    monkeypatch.setattr(quantize, "WINDOW", 96)
    assert quantize.main([*argv, "--group-size", "32", "--algorithm", algorithm]) == 0
    file, (config, tensors) = read_head(out, TARGET), weights(kind)
    assert isinstance(file.config, BlockConfig) and file.config.kind == config.kind
    floats = file.floats()
    limit = {"int8": 0.01, "int4": 0.2}[mode]
    for name, t in tensors.items():
        assert (floats[name].float() - t).norm() <= limit * t.norm(), name
    assert "predecessor.weight" in file.tensors and "fc.qweight" in file.tensors
    engine = load(DEMO, eagle=out)
    assert engine.generate(PROMPT, SamplingParams(max_new_tokens=16)).run()[0].token_ids == plain()[:16]
    size = held(engine.head) - held(engine.head.rotary) - engine.head.context_norms.nbytes
    assert engine.plan.head == pytest.approx(size, rel=0.05)
    assert quantize.main([*argv[:-3], str(tmp_path / "again"), "--mode", mode]) == 0
    again = ["--checkpoint", str(DEMO), "--eagle", str(out), "--head-only", "--out", str(tmp_path / "twice")]
    assert quantize.main(again) == 2


def test_a_head_is_converted_and_found_beside_its_model(heads, tmp_path, capsys):
    """scripts.convert that writes an EAGLE head of it, and a benchmark that does not find the head of a model."""
    assert convert.main(["--eagle", str(heads / "dspark"), "--target", str(DEMO), str(tmp_path / "eagle")]) == 0
    config, tensors = weights("dspark")
    again = read_head(tmp_path / "eagle", TARGET)
    assert all(torch.equal(again.tensors[name], t) for name, t in tensors.items())
    arms = default_arms(tmp_path, TARGET, False)
    assert [options for _, options in arms if options.get("eagle") == "eagle"] == [
        {"eagle": "eagle", "tree": "dynamic:26,5,8"}, {"eagle": "eagle", "tree": "chain:6"}
    ]  # fmt: skip
