"""Model families: MXFP4 as transformers reads it, refusals that name the family, and a family added in a few lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import BASE, FAMILIES, build_hf
from safetensors.torch import save_file
from test_model import run, tokens_of

from engine.load import load
from families.config import FAMILIES as SUPPORTED
from families.config import ModelConfig
from kernels import cpu
from weights.checkpoint import Checkpoint, load_model
from weights.quantized import QuantSpec
from weights.quantizer import Windows, quantize_checkpoint


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """(a directory with experts in MXFP4, the same model in transformers)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, hf = tmp_path_factory.mktemp("mxfp4"), build_hf("gpt_oss")
    tensors, generator = dict(hf.state_dict()), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, K, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (E, rows, K // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (E, rows, K // 32), generator=generator, dtype=torch.uint8)
        blocks[0, 0], scales[0, 0] = 0x80, 0  # zeros of both signs below the smallest scale
        hf.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = hf.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, hf


def test_mxfp4_is_read_as_transformers_reads_it(gpt_oss):
    """Catches a swapped half of a byte, a scale of another group, and gate rows that stay between up rows."""
    folder, hf = gpt_oss
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.quantization is None and "became floats" in checkpoint.notes[0]
    model, mlp = checkpoint.load(dtype=torch.float32), hf.model.layers[1].mlp.experts
    theirs = mlp.gate_up_proj.mT
    assert torch.equal(model.layers[1].mlp.gate_up, torch.cat((theirs[:, 0::2], theirs[:, 1::2]), 1))
    assert torch.equal(model.layers[1].mlp.down, mlp.down_proj.mT)
    tokens = tokens_of(30)
    assert (run(model, tokens, 16) - hf(tokens).logits).abs().max() < 1e-4


@pytest.mark.skipif(bool(cpu.problem()), reason="the CPU kernels do not run here")
def test_mxfp4_stays_at_4_bits_for_the_cpu_kernels(gpt_oss):
    """Catches experts that become floats, which take eight times the memory, and a table of other values."""
    folder, hf = gpt_oss
    engine = load(folder, kernels="cpu", dtype="float32", ctx=64, activations="float")
    experts = engine.model.layers[0].mlp
    assert engine.model.quant == "int4 (mxfp4)" and not Checkpoint.open(folder, layout="tiles").notes
    values = 4 * 96 * 64 * 3
    held = experts.gate_up.packed.weight.nbytes + experts.down.packed.weight.nbytes
    assert held == values * 4.5 / 8  # 4 bits, and 16 for the scale of 32 values
    tokens = tokens_of(30)
    with engine.backend.active():
        assert (run(engine.model, tokens, 16) - hf(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", "gemma3 gemma2 gemma4 gemma4-moe glm4 gpt_oss granite olmo2 qwen2_moe".split())
def test_a_family_is_quantized_as_it_computes(tiny_checkpoint, tmp_path, family):
    """Catches a receipt that measures another model, without the multiplier of embeddings or the cap of logits, and
    norms or rows that are turned a second time where the result is read."""
    model, tokens = load_model(tiny_checkpoint(family)), tokens_of(33, batch=4)
    windows = Windows(tokens_of(32, seed=1, batch=4), tokens)
    spec = QuantSpec("int8", algorithm="gptq")
    receipt = quantize_checkpoint(tiny_checkpoint(family), tmp_path / "q", spec, windows)
    found = [run(m, tokens[:, :-1], 32) for m in (model, load_model(tmp_path / "q", dtype=torch.float32))]
    for name, logits in zip(("before", "after"), found, strict=True):
        want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp()
        assert receipt[f"perplexity_{name}"] == pytest.approx(float(want), rel=1e-3)
    limit = 2 if family == "gemma4-moe" else 1  # rows that are sent to another expert
    assert receipt["mean_kl"] < 0.01 * limit
    assert (found[1] - found[0]).std() < 0.1 * limit * found[0].std()


@pytest.mark.parametrize(("name", "words"), [
    ("gemma", "model_type = 'gemma' is not supported"),
    ("glm", "model_type = 'glm' is not supported"),
    ("falcon_h1", "its recurrent layers are of a kind that is not implemented"),
    ("gemma3", "images"),
    ("deepseek_v3", "latent attention"),
])  # fmt: skip
def test_a_family_that_is_refused_is_named_first(name, words):
    """Catches an error about a RoPE key or an activation where the family itself is not implemented."""
    odd = {"partial_rotary_factor": 0.5, "hidden_act": "relu", "hidden_size": None}
    with pytest.raises(ValueError, match=words) as error:
        ModelConfig.from_hf({**BASE, **odd, "model_type": name})
    assert "\n" not in str(error.value)


def test_the_family_in_the_guide_runs(tmp_path, monkeypatch):
    """Catches a guide whose example is out of date: a family added as its lines say equals transformers."""
    guide = (Path(__file__).resolve().parent.parent / "docs/extending.md").read_text(encoding="utf-8")
    code = guide.split("## A model family")[1].split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 20
    for table in (SUPPORTED, FAMILIES):  # what the code adds is removed again
        monkeypatch.setitem(table, "helium", ())
    names: dict = {}
    exec(code, names)
    FAMILIES["helium"] = names["TEST"]
    hf = build_hf("helium")
    hf.save_pretrained(tmp_path)
    model = Checkpoint.open(tmp_path).load(dtype=torch.float32)
    tokens = tokens_of(30)
    assert (run(model, tokens, 16) - hf(tokens).logits).abs().max() < 1e-4
