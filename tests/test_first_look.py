"""The first look at a GPU: it finds a kernel that is wrong or that depends on the width, and it is made once.

Tests named `test_interpreted_*` need TRITON_INTERPRET=1 before Triton is imported. tests/test_interpreter_steps.py runs
them.
"""

from dataclasses import replace

import pytest
import torch
from tiny import interpreted, needs_triton

import kernels
from bench.random_models import SHAPES, random_head, random_model
from decoding import step
from decoding.drafter import PlainDrafter
from engine import first_look
from engine.first_look import Findings, look
from engine.load import load
from engine.stepping import EngineConfig
from kernels import KernelBackend, attention, linear, projection
from loading.drafting import build_drafter
from loading.options import LoadOptions
from weights.quantized import pack_


def small(shape: str = "tiny", quant: str = "", head: str = "", **config):
    """(model, drafter, config of an engine) on the interpreter: two layers and few tokens."""
    backend = KernelBackend("triton", "cpu")
    shape = replace(SHAPES[shape], num_hidden_layers=1, vocab_size=300, max_position_embeddings=160)
    with torch.no_grad(), backend.active():
        model = random_model(shape, quant, torch.device("cpu"), torch.float16)
        pack_(model, torch.float16)
        drafter = PlainDrafter(model)
        if head:
            options = LoadOptions(
                eagle=head, tree="dynamic:5,2,2", kernels="triton", device="cpu", ctx=160, dtype="float16", slots=1
            )
            drafter = build_drafter(model, options, backend, random_head(model, head))
    return model, drafter, EngineConfig(1, 160, backend=backend, **config)


@pytest.fixture
def few(monkeypatch):
    """Forwards of few rows: the interpreter is slow. Among 20 rows products are those of a prompt."""
    monkeypatch.setattr(first_look, "ROWS", (1, 20))
    for module in (linear, projection):
        monkeypatch.setattr(module, "SPLIT_M", 16)
    monkeypatch.setattr(first_look, "CONTEXT", 40)


@interpreted
@pytest.mark.parametrize("shape,quant,head,config", [
    ("tiny", "int4", "3", {}), ("tiny-moe", "int8", "", {}), ("tiny", "", "1", {"kv_dtype": torch.int8}),
])  # fmt: skip
def test_interpreted_kernels_that_are_right_pass(few, shape, quant, head, config):
    """A comparison with the wrong arguments or too narrow a tolerance, which would take the kernels from everybody."""
    model, drafter, config = small(shape, quant, head, **config)
    assert look(model, drafter, config) == Findings()


def off_in_one_row(out, args):
    out[:, 0, :5] += 1
    return out


def off_among_others(out, args):
    return out * (1 + 2**-9) if out.shape[-2] == 20 else out


def keys_elsewhere(out, args):
    args[7][0] += 0.1
    return out


def refuses(out, args):
    raise kernels.triton.runtime.errors.OutOfResources(300000, 100000, "shared memory")


@interpreted
@pytest.mark.parametrize("owner,name,change,wrong,uneven", [
    (linear, "planes_linear", lambda out, args: out * 1.05, {"packed_linear": "planes_linear is "}, ""),
    (attention, "tree_attention", off_in_one_row, {"tree_attention": "tree_attention is "}, ""),
    (kernels, "rms_norm", off_among_others, {}, "a row has other bits at rms_norm among 20 rows than alone"),
    (step, "_write", lambda out, args: (out[0] + 1, *out[1:]),
     {"commit": "commit differs from its reference in 1 of 1 integers"}, ""),
    (projection, "planes_linear_rope", keys_elsewhere, {"packed_linear": "planes_linear_rope is "}, ""),
    (kernels, "rms_norm", refuses, {"rms_norm": "rms_norm cannot run here (OutOfResources: out of"}, ""),
])  # fmt: skip
def test_interpreted_kernels_that_are_wrong_are_named(few, monkeypatch, owner, name, change, wrong, uneven):
    """A kernel that is off everywhere or in one row, that writes another cache, counts otherwise, cannot run, or gives a
    row other bits among others: a look that passes whatever the kernels do."""
    model, drafter, config = small(quant="int4")
    operation = getattr(owner, name)
    own = operation.triton
    monkeypatch.setattr(operation, "triton", lambda *args: change(own(*args), args))
    found = look(model, drafter, config)
    assert list(found.wrong) == list(wrong) and found.uneven == uneven
    assert all(found.wrong[key].startswith(text) for key, text in wrong.items()), found


class Looks:
    """Takes the place of `look`, and says what it found."""

    def __init__(self, monkeypatch, **found):
        self.made, self.found = 0, Findings(**found)
        monkeypatch.setattr(first_look, "look", self)

    def __call__(self, *args) -> Findings:
        self.made += 1
        return self.found


def reported(config, again=False, model=None) -> list[str]:
    lines: list[str] = []
    model = model or plain_model()
    first_look.first_look(model, PlainDrafter(model), config, lines.append, again)
    return lines


def plain_model(**changes):
    return random_model(replace(SHAPES["tiny"], **changes), "", torch.device("cpu"), torch.float32)


def test_a_model_is_looked_at_once(empty_cache, monkeypatch):
    """A look at every start, none at a model of other shapes, none where the user asks for one, and an answer that a
    damaged file loses for good."""
    looks, config = Looks(monkeypatch), EngineConfig(backend=KernelBackend("reference", "cpu"))
    model = plain_model()
    first = reported(config, model=model)
    assert "new on this GPU" in first[0] and "a row has the same bits alone and among 288" in first[1]
    assert reported(config, model=model) == [] and looks.made == 1
    assert len(reported(config, again=True, model=model)) == 2 and looks.made == 2
    assert len(reported(config, model=plain_model(hidden_size=128))) == 2 and looks.made == 3
    assert len(reported(replace(config, batch_size=4), model=model)) == 2 and looks.made == 4
    assert reported(config, model=model) == [] and looks.made == 4
    first_look.answers_file(torch.device("cpu")).write_text("{")
    assert len(reported(config, model=model)) == 2 and reported(config, model=model) == [] and looks.made == 5


def test_a_wrong_kernel_is_left_to_its_reference(empty_cache, monkeypatch):
    """An answer that is kept and not used at the next start, one that is said once, and a failed look that is kept."""
    Looks(monkeypatch, wrong={"rms_norm": "rms_norm is 2 % off its reference"}, uneven="a row has other bits at x")
    model = plain_model()
    for start in range(2):
        backend = KernelBackend("auto", "cpu")
        lines = reported(EngineConfig(backend=backend), model=model)
        assert backend.table["rms_norm"] == (
            "reference", "the first look at this device: rms_norm is 2 % off its reference",
        )  # fmt: skip
        assert len(lines) == 3 - start and "its reference runs instead" in lines[-2] and "other bits" in lines[-1]
        assert "the first look" in backend.report()

    def broken(*args):
        raise RuntimeError("no such device")

    monkeypatch.setattr(first_look, "look", broken)
    other = plain_model(hidden_size=128)
    for _ in range(2):
        lines = reported(EngineConfig(backend=KernelBackend("auto", "cpu")), model=other)
        assert len(lines) == 2 and "no such device" in lines[1]


@needs_triton
def test_loading_on_a_gpu_looks_at_the_model(monkeypatch):
    """A load that never looks, or where no kernel of Triton runs, and `--check` that is lost or ignored."""
    asked = []
    monkeypatch.setattr("engine.load.first_look", lambda model, drafter, config, say, again: asked.append(again))
    load(device="cpu", ctx=64, kernels="reference")
    assert asked == []
    with pytest.raises(ValueError, match="--check is about the kernels of a GPU"):
        load(device="cpu", check=True)
    monkeypatch.setattr("engine.load.open_backend", lambda *_: KernelBackend("auto", "cuda"))
    monkeypatch.setattr(LoadOptions, "validate", lambda self: None)
    for check in (False, True):
        load(device="cpu", ctx=64, kernels="reference", check=check)
    assert asked == [False, True]
