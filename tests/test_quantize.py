import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_checkpoint import cached, one_line
from tiny import held, load_config, load_model, skip_without_kernels

import generate
import kernels
import quantize
from bench.arms import build_engine
from decoding.params import SamplingParams
from eagle_draft import EagleHead
from engine.load import load
from families.config import DeltaConfig, ModelConfig, RopeConfig
from kernels import cpu
from layers.build import build_transformer
from loading.drafting import rounds_head
from loading.options import DEMO, LoadOptions
from model import Transformer, weight_bytes
from scripts import convert
from support import texts
from support.errors import NotEnoughMemory, UsageError
from support.files import read_json, write_json
from weights import checkpoint, hf, quantizer, rounding
from weights.head_reader import read_eagle
from weights.heads import EagleConfig, save_eagle, save_quantized
from weights.quantized import QuantLinear, QuantSpec, adopt_, empty_tensors, held_bytes, pack_
from weights.rounding import CLIPS, Tally, quantize_gptq, quantize_rtn

CONFIG = ModelConfig(
    "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=192, max_position_embeddings=40, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip
UNTIED = replace(CONFIG, tie_word_embeddings=False)
MIXTRAL = replace(UNTIED, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
GQA_BIAS = replace(UNTIED, model_type="qwen2", qkv_bias=True)
RECURRENT = replace(
    UNTIED, model_type="qwen3_5_text", head_dim=64, rope=RopeConfig(partial=0.25), qk_norm=True, norm_offset=1.0,
    output_gate=True, recurrent=(0,), delta=DeltaConfig(2, 4, 16, 32, 4),
)  # fmt: skip
WIDE = replace(UNTIED, hidden_size=512, intermediate_size=512, num_attention_heads=16)  # two groups of 256 columns
GEMMA4 = replace(
    UNTIED, model_type="gemma4_text", norms="both", activation="gelu_tanh", qk_norm=True, value_norm=True,
    layer_scale=True, attention_multiplier=1.0, embedding_multiplier=UNTIED.hidden_size**0.5, full_heads=(1, 64),
    keys_as_values=True, windows=(8, 0), rope=RopeConfig(1e6, "proportional", partial=0.25), window_rope=RopeConfig(),
)  # fmt: skip


def tiny(config: ModelConfig, seed: int = 0) -> Transformer:
    """Random, with logits as calm as a trained model's, so that KL means something."""
    torch.manual_seed(seed)
    model = build_transformer(config).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.05 if "embed" in name or "lm_head" in name else p.shape[-1] ** -0.5)
    model.rotary.build("cpu")
    return model


def saved(path: Path, config: ModelConfig, seed: int = 0) -> Path:
    hf.save_hf(tiny(config, seed), path)
    return path


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    monkeypatch.setattr(rounding, "CLIPS", CLIPS[:6])
    monkeypatch.setattr(quantize, "CALIBRATION_WINDOWS", 16)
    monkeypatch.setattr(quantize, "EVALUATION_WINDOWS", 8)
    monkeypatch.setattr(quantize, "LM_HEAD_STRIDE", 1)  # these texts have few rows


def run(*argv) -> int:
    return quantize.main([str(a) for a in argv])


def tokens(count: int = 4, length: int = 33, seed: int = 1) -> torch.Tensor:
    return torch.randint(192, (count, length), generator=torch.Generator().manual_seed(seed))


def parameter_of(floats: dict, linear: str) -> torch.Tensor:
    """The float weight of a linear, or of one matrix kind of all experts."""
    return floats[linear] if linear in floats else floats[f"{linear}.weight"]


def rounded(source: Path, out: Path, spec: QuantSpec, calibration: torch.Tensor, **how) -> dict:
    """`quantize_checkpoint`, measured on `tokens()`."""
    return quantizer.quantize_checkpoint(source, out, spec, quantizer.Windows(calibration, tokens()), **how)


def stop(done: int, total: int, name: str) -> None:
    """A report of progress at which the user presses Ctrl-C."""
    raise KeyboardInterrupt


def texts_of(engine) -> list[list[int]]:
    """What an engine writes greedily, and what it samples."""
    params = [SamplingParams(temperature=temperature, seed=4, max_new_tokens=24) for temperature in (0.0, 1.0)]
    return [engine.generate([3, 1, 4, 1, 5], one).run()[0].token_ids for one in params]


@torch.no_grad()
def measure(before: Transformer, after: Transformer, tokens: torch.Tensor) -> dict[str, float]:
    """What a receipt says, computed with whole models."""
    tally = Tally()
    for row in tokens:
        tally.add(*(m.logits(m.forward_train(row[None, :-1])[0])[0] for m in (before, after)), row[1:])
    return tally.report()


def correlated(n: int, k: int, rows: int = 2048):
    """Weights and inputs with a few strong shared directions, as activations have them."""
    g = torch.Generator().manual_seed(5)
    mix = torch.randn(k, k, generator=g) / k**0.5 + torch.randn(k, 4, generator=g) @ torch.randn(4, k, generator=g) / 4
    x = torch.randn(rows, k, generator=g) @ mix
    return torch.randn(n, k, generator=g), x


# ---- numbers and storage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, group", [(8, 128), (4, 32), (4, 64), (4, 128)])
def test_stored_codes_mean_what_the_format_says(bits, group, monkeypatch):
    """Codes, scales and zeros that are decoded by hand, byte by byte, are the matrix that is loaded. Without clipping it
    is off by at most half a step: codes are rounded, not truncated, and chosen under the scale that is stored.

    Catches: swapped nibbles, transposed scales or an off-by-one zero.
    """
    weight = torch.randn(6, 256)
    stored = quantize_rtn(weight, bits, group)
    restored = QuantLinear(stored).dequantize()
    assert stored["scales"].dtype == (torch.float16 if bits == 4 else torch.float32)
    for n, k in [(0, 0), (1, 1), (5, 255), (3, 130), (2, 77)]:
        if bits == 4:
            byte = int(stored["qweight"][n, k // 2])
            value = ((byte >> 4 if k % 2 else byte & 15) - 8) * float(stored["scales"][k // group, n])
        else:
            value = int(stored["qweight"][n, k]) * float(stored["scales"][n])
        assert restored[n, k] == pytest.approx(value, rel=1e-6)
    again = QuantLinear(quantize_rtn(restored, bits, group)).dequantize()  # levels are found again
    assert rounding.relative_error(restored, again) < 0.01
    monkeypatch.setattr(rounding, "CLIPS", [1])
    stored = quantize_rtn(weight, bits, group)
    steps = stored["scales"].float().abs()
    steps = steps.T.repeat_interleave(group, 1) if bits == 4 else steps[:, None]
    error = (QuantLinear(stored).dequantize() - weight).abs()
    assert (error <= steps * 0.505).all()  # fp16 scales: the largest value may lie a hair past the last level


def test_clip_search_is_never_worse_than_no_clip(monkeypatch):
    """No group has a larger error than without clipping, also odd groups, and of normal weights it is 7 % smaller."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 64, generator=g)
    cases = [normal, normal**3, normal.exp(), normal * 1e-6, normal * 3e4, normal.sign(), torch.zeros(4, 64)]
    cases += [torch.cat((torch.full((4, 1), 100.0), normal[:4, :63]), 1)]
    for groups in cases:
        for bits in (4, 8):

            def loss(clips, groups=groups, bits=bits):
                monkeypatch.setattr(rounding, "CLIPS", clips)
                scales = rounding.fit_scales(groups, bits)
                return (rounding._round(groups, scales, bits) * scales.float()[:, None] - groups).square().sum(-1)

            assert (loss(CLIPS) <= loss([1])).all()
    errors = []
    for clips in (CLIPS, [1]):
        monkeypatch.setattr(rounding, "CLIPS", clips)
        errors.append(rounding.relative_error(normal, QuantLinear(quantize_rtn(normal, 4, 64)).dequantize()))
    assert errors[0] < 0.93 * errors[1]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits, group", [(4, 128), (4, 32), (8, 0)])
def test_gptq_beats_rtn_where_inputs_are_correlated(bits, group, act_order):
    """With correlated inputs GPTQ has a smaller error of the outputs than rounding has.

    Catches: a GPTQ whose error feedback has the wrong sign, order or factor: it would be worse than rounding.
    """
    weight, x = correlated(48, 256)
    held_out = x[1024:]
    hessian = x[:1024].T @ x[:1024]
    y = held_out @ weight.T

    def error(stored):
        return float((held_out @ QuantLinear(stored).dequantize().T - y).norm() / y.norm())

    rtn = error(quantize_rtn(weight, bits, group))
    gptq = error(quantize_gptq(weight, hessian, bits, group, act_order))
    assert gptq < 0.75 * rtn, (gptq, rtn)


def test_degenerate_weights_and_inputs():
    """Prevents 0 / 0 in an all-zero group, silently infinite fp16 scales, a crash on rank-deficient calibration (fewer
    tokens than inputs), NaN weights from NaN inputs, and GPTQ that changes columns that nothing correlates with (also: an
    expert no token was routed to)."""
    assert not QuantLinear(quantize_rtn(torch.zeros(4, 64), 4, 32)).dequantize().any()
    for bad in (1e6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="too large for fp16 scales"):
            quantize_rtn(torch.full((2, 32), bad), 4, 32)
    weight, x = correlated(8, 128, rows=5)
    stored = quantize_gptq(weight, x.T @ x, 4, 32)
    assert rounding.relative_error(weight, QuantLinear(stored).dequantize()) < 0.5
    with pytest.raises(ValueError, match="calibration"):
        quantize_gptq(weight, torch.full((128, 128), float("nan")), 4, 32)
    plain = quantize_rtn(weight, 4, 64)
    for hessian, act_order in itertools.product((torch.eye(128) * 3, torch.zeros(128, 128)), (False, True)):
        stored = quantize_gptq(weight, hessian, 4, 64, act_order)
        assert all(torch.equal(stored[k], plain[k]) for k in plain)


# ---- modules -----------------------------------------------------------------------------------------------


def random_stored(bits=4, n=48, k=128, group=32, zeros=False, perm=False, lead=()):
    g = torch.Generator().manual_seed(3)
    if bits == 8:
        codes = torch.randint(-128, 128, (*lead, n, k), generator=g).to(torch.int8)
        return {"qweight": codes, "scales": torch.rand(*lead, n, generator=g) / 500}
    stored = {
        "qweight": torch.randint(256, (*lead, n, k // 2), generator=g).to(torch.uint8),
        "scales": (torch.rand(*lead, k // group, n, generator=g) / 50 - 0.004).half(),
    }
    if zeros:
        stored["zeros"] = torch.randint(16, (*lead, k // group, n), generator=g).to(torch.uint8)
    return stored | ({"perm": torch.randperm(k, generator=g).int()} if perm else {})


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("options", [{}, {"zeros": True}, {"perm": True}, {"zeros": True, "perm": True}, {"bits": 8}])
def test_quant_linear_multiplies_by_its_matrix(options, dtype, tolerance):
    """Prevents a forward that disagrees with dequantize (permuted columns, zero points, bias, packing per dtype)."""
    stored = random_stored(**options)
    layer = QuantLinear(stored, torch.randn(48)).to(dtype)
    x = torch.randn(2, 3, 128).to(dtype)
    want = x.double() @ layer.dequantize(torch.float64).T + layer.bias.double()
    assert (layer(x).double() - want).abs().max() <= tolerance * want.abs().max()
    gate, up = want.chunk(2, -1)
    residual = torch.randn(2, 3, 24).to(dtype)
    fused = layer(x, residual=residual, gated=True).double()
    want = F.silu(gate) * up + residual.double()
    assert (fused - want).abs().max() <= 4 * tolerance * want.abs().max()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("options", [{}, {"zeros": True, "perm": True}, {"bits": 8}])
def test_rows_are_those_of_the_matrix(options, backend):
    """Prevents a trimmed vocabulary with the scales of other rows, also after the codes were packed."""
    skip_without_kernels(backend)
    layer, ids = QuantLinear(random_stored(**options)), torch.tensor([3, 0, 47, 3])
    want = layer.dequantize()[ids]
    assert torch.equal(layer.rows(ids), want)
    with kernels.KernelBackend(backend, "cpu").active():
        layer.repack(torch.float32)
        torch.testing.assert_close(layer.rows(ids), want, atol=1e-7, rtol=1e-6)


def test_changing_the_dtype_keeps_scales_and_repacks():
    """Prevents `model.to(bfloat16)` from rounding scales, and a stale packing from serving another dtype."""
    layer = QuantLinear(random_stored())
    scales, x = layer.scales.clone(), torch.randn(4, 128)
    first = layer(x)
    layer.to(torch.bfloat16)
    assert layer.scales.dtype == torch.float16 and torch.equal(layer.scales, scales) and layer.packed is None
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(layer(x), first)
    meta = QuantLinear(empty_tensors((48, 128), 4, 32)).to(torch.bfloat16)
    assert meta.scales.dtype == torch.float16


def test_bytes_read_count_codes_scales_and_touched_experts():
    """Prevents reports that count fp16 bytes for int4 weights, or all experts when a token reads two of four."""
    layer = QuantLinear(random_stored(zeros=True))
    assert layer.weight_bytes_read(1) == 48 * 64 + 48 * 4 * 2 + 48 * 4 == weight_bytes(layer)
    experts = tiny(MIXTRAL).layers[0].mlp
    router = experts.router.weight.numel() * 4
    full = weight_bytes(experts, 10**6) - router
    wrapper = nn.Module()
    wrapper.mlp = experts
    rounding.quantize_(wrapper, QuantSpec("int4", 128))
    assert weight_bytes(wrapper, 10**6) - router == pytest.approx(full * (0.5 + 2 / 128) / 4)
    assert weight_bytes(wrapper, 1) - router == pytest.approx((weight_bytes(wrapper, 10**6) - router) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", [CONFIG, MIXTRAL], ids=["tied", "experts"])
@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_packing_holds_what_is_planned(mode, config, dtype):
    """Prevents codes kept beside the dense matrix that replaced them, a plan that counts only one of the two, and a
    `dequantize` that needs codes that are gone."""
    model, x = tiny(config), tokens(1, 9)
    rounding.quantize_(model, QuantSpec(mode, 32))
    model.to(dtype)
    plan = held_bytes(model.state_dict(), dtype, "cpu")
    before = {name: c.dequantize() for name, c in model.named_modules() if isinstance(c, QuantLinear)}
    want = model.logits(model.forward_train(x)[0])
    pack_(model, dtype)
    assert held(model) - held(model.rotary) == pytest.approx(plan, rel=0.01)
    assert torch.equal(model.logits(model.forward_train(x)[0]), want)
    for name, matrix in before.items():
        layer = model.get_submodule(name)
        assert torch.equal(layer.dequantize(), matrix)
        assert (layer.qweight is None) == (dtype != torch.bfloat16)
    pack_(model, dtype)  # again: what is dense stays
    assert torch.equal(model.logits(model.forward_train(x)[0]), want)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["planes", "dense"])
def test_experts_are_packed_one_at_a_time(bits, layout, monkeypatch):
    """Prevents 8 GB of unpacked codes beside Mixtral's experts: packing holds one expert's, with the same result."""
    layer = QuantLinear(random_stored(bits, zeros=bits == 4, perm=bits == 4, lead=(5,)), per_token=2)
    pack = kernels.pack_int4 if bits == 4 else kernels.pack_int8
    more = [layer.zeros, 32, layer.perm] if bits == 4 else []
    whole, seen = pack(layer.qweight, layer.scales, *more, torch.float32, layout), []

    def spy(codes, *rest, **mins):
        seen.append(codes.shape[0])
        return pack(codes, *rest, **mins)

    monkeypatch.setattr(kernels, pack.__name__, spy)
    packed = layer._pack(torch.float32, layout)
    assert seen == [1] * 5
    for name, value in vars(whole).items():
        same = getattr(packed, name)
        assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same, name
    if layout == "planes":
        layer = QuantLinear(random_stored(bits, lead=(5,)), per_token=2)
        packed = layer._pack(torch.float32, layout)
        count = sum(t.nbytes for t in (packed.weight, packed.scales, packed.counters) if t is not None)
        assert held_bytes(layer.state_dict(), torch.float16, "cuda") == count


def test_packed_modules_trace_as_one_graph():
    """Prevents lazy packing inside a trace, a graph break per linear, or a compilation per layer."""
    model = tiny(CONFIG)
    rounding.quantize_(model, QuantSpec("int4", 32))
    pack_(model, torch.float32)
    x = torch.randn(1, 3, 128)
    compiled = torch.compile(lambda mlp, x: mlp(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(model.layers[0].mlp, x), model.layers[0].mlp(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(model.layers[1].mlp, x), model.layers[1].mlp(x))


def test_specs_are_validated():
    """Prevents silent acceptance of a mode, group or combination that no kernel has."""
    for bad in ({"mode": "int3"}, {"group_size": 48}, {"algorithm": "awq"}, {"lm_head": "fp8"}, {"act_order": True}):
        with pytest.raises(ValueError, match="allowed|add --algorithm"):
            QuantSpec(**bad)
    spec = QuantSpec("int4", 128, lm_head="fp16")
    assert [spec.bits(n, 128) for n in ("fc", "layers.0.mlp.router", "lm_head")] == [4, 16, 16]
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.down: .* 128 does not divide its 320 .*32 or 64"):
        spec.bits("layers.0.mlp.down", 320)
    with pytest.raises(UsageError, match="use --mode int8"):
        spec.bits("o", 100)


def test_plain_weights_on_a_cpu_lie_column_by_column():
    """A layout that changes what a weight says, or that leaves one row times a wide matrix at a third of its speed."""
    for config in (CONFIG, GQA_BIAS):
        model, tokens = tiny(config), torch.arange(8)[None]
        before = {name: p.clone() for name, p in model.named_parameters()}
        want = model.logits(model.forward_train(tokens)[0])
        pack_(model, torch.float32)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        torch.testing.assert_close(model.logits(model.forward_train(tokens)[0]), want)
        head = model.embed_tokens if model.lm_head is None else model.lm_head
        mlp = model.layers[0].mlp
        assert [w.weight.mT.is_contiguous() for w in (head, mlp.gate_up, mlp.down)] == [True, True, False]
        assert model.embed_tokens.weight.is_contiguous() == (model.lm_head is not None)


# ---- directories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, options", [
    (CONFIG, ["--mode", "int8"]),
    (CONFIG, ["--group-size", 32, "--lm-head", "int4"]),
    (CONFIG, ["--algorithm", "gptq", "--lm-head", "fp16"]),
    (GQA_BIAS, ["--algorithm", "gptq", "--act-order", "--group-size", 64]),
    (MIXTRAL, ["--algorithm", "gptq", "--group-size", 32]),
], ids=["int8", "int4-head4", "gptq-tied-fp16-head", "gptq-act-order-bias", "gptq-experts"])  # fmt: skip
def test_receipts_are_true(tmp_path, config, options, capsys):
    """Prevents a receipt that describes something else than the files: reload both models and measure again."""
    source = saved(tmp_path / "m", config)
    out = tmp_path / "q"
    assert run("--checkpoint", source, "--out", out, *options) == 0, capsys.readouterr().err
    receipt = json.loads((out / "receipt.json").read_text())
    text = texts.token_windows([], None, 192, quantize.EVALUATION_WINDOWS, 40)
    before, after = load_model(source), load_model(out, dtype=torch.float32)
    again = measure(before, after, text)
    for key in ("perplexity_before", "perplexity_after", "mean_kl"):
        assert receipt[key] == pytest.approx(again[key], rel=2e-3, abs=1e-6), key
    assert receipt["top1_agreement"] == pytest.approx(again["top1_agreement"], abs=0.005)
    assert 0 < receipt["mean_kl"] < 0.3
    assert (after.lm_head is None) == ("fp16" in options)  # a rounded tied head is a copy of the embedding
    assert after.embed_tokens.weight.is_floating_point()
    if not cpu.problem():  # what these kernels make of it
        with kernels.KernelBackend("cpu", "cpu").active():
            pack_(after, torch.float32)
            again = measure(before, after, text)
        for key in ("perplexity_after", "mean_kl"):
            assert receipt["rounded_activations"][key] == pytest.approx(again[key], rel=5e-3, abs=1e-6), key
    assert receipt["bytes_after"] <= (out / "model.safetensors").stat().st_size <= receipt["bytes_after"] + 20_000
    assert receipt["bytes_before"] > 2 * receipt["bytes_after"] and receipt["peak_memory_bytes"] > 0
    worst, floats = receipt["worst_layers"][0], dict(before.named_parameters())
    linears = {n: c for n, c in after.named_modules() if isinstance(c, QuantLinear) and n != "lm_head"}
    errors = {n: rounding.relative_error(parameter_of(floats, n), c.dequantize()) for n, c in linears.items()}
    assert max(errors.values()) == pytest.approx(worst["relative_error"], rel=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "q"]
    assert "perplexity" in capsys.readouterr().out


def test_gptq_beats_rtn_on_a_whole_model(tmp_path):
    """Prevents calibration that sees the wrong layer's inputs: then GPTQ would not beat rounding end to end."""
    source, model, kl = tmp_path / "m", tiny(UNTIED), {}
    model.embed_tokens.weight.data = torch.randn(192, 6) @ torch.randn(6, 128) * 0.05  # inputs of low rank
    hf.save_hf(model, source)
    for algorithm in ("rtn", "gptq"):
        spec = QuantSpec("int4", 128, algorithm)
        kl[algorithm] = rounded(source, tmp_path / algorithm, spec, tokens(16, 32, 7))["mean_kl"]
    assert kl["gptq"] < 0.7 * kl["rtn"], kl


def quantized(tmp_path, config=CONFIG, *options) -> Path:
    source, out = saved(tmp_path / "m", config), tmp_path / "q"
    assert run("--checkpoint", source, "--out", out, "--group-size", 32, *options) == 0
    return out


def test_loading_keeps_codes_and_scales_whatever_the_dtype(tmp_path):
    """Prevents the load dtype from rounding scales or embeddings from staying in the file's dtype."""
    out = quantized(tmp_path, UNTIED)
    stored, seen = load_file(out / "model.safetensors"), []
    opened = checkpoint.Checkpoint.open(out)
    model = opened.load(dtype=torch.bfloat16, progress=lambda done, total, name: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0 and len(seen) == len(stored)
    state = model.state_dict()
    assert state.keys() == stored.keys() and not any(p.requires_grad for p in model.parameters())
    for name, tensor in state.items():
        quant = name.endswith(("qweight", "scales"))
        assert tensor.dtype == (stored[name].dtype if quant else torch.bfloat16), name
        assert torch.equal(tensor, stored[name].to(tensor.dtype))
    assert model.rotary.length == 40 and stored["embed_tokens.weight"].dtype == torch.float16
    found = checkpoint.Checkpoint.open(out)
    assert (found.kind, found.quantization, model.quant) == ("eaglet", "int4", "int4")
    assert load_model(out).dtype == torch.float16


def test_broken_quantized_directories_give_one_line(tmp_path):
    """Prevents missing scales, a newer version or mangled tensors from loading as something wrong."""
    out = quantized(tmp_path)
    config, good = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    name = "layers.0.attention.qkv.scales"

    def fails(words, tensors=None, quant=None):
        save_file(tensors or good, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(config | {"eaglet_quant": config["eaglet_quant"] | (quant or {})}))
        one_line(lambda: load_model(out), words)

    fails("missing tensor 'layers.0.attention.qkv.scales'", {k: v for k, v in good.items() if k != name})
    fails("unexpected tensor 'extra'", good | {"extra": torch.zeros(1)})
    fails("qkv.scales is torch.float16 [2, 256], expected", good | {name: good[name][:2].contiguous()})
    down = "layers.0.mlp.down.qweight"
    fails("qweight is torch.int8", good | {down: good[down].view(torch.int8)})
    fails("qkv.scales holds NaN", good | {name: good[name] * float("nan")})
    fails("unexpected tensor", good | {"layers.0.mlp.down.perm": torch.zeros(256, dtype=torch.int32)})
    fails("version 2, this program reads version 1", quant={"version": 2})
    fails("mode = 'int5'; allowed: int8, int4", quant={"mode": "int5"})
    fails("group_size is 'x'", quant={"group_size": "x"})
    fails("group_size = 48", quant={"group_size": 48})
    fails("do not belong together", quant={"group_size": 64})


def test_unusable_requests_exit_with_one_line(tmp_path, capsys):
    """Prevents tracebacks, wrong exit codes or files left behind for broken requests."""
    out = quantized(tmp_path)
    source = tmp_path / "m"
    odd = saved(tmp_path / "odd", replace(CONFIG, intermediate_size=288))
    busy = tmp_path / "busy"
    busy.mkdir()
    (tmp_path / "short.txt").write_text("x")
    nan = saved(tmp_path / "nan", CONFIG)
    head = tiny_head(tmp_path / "head", replace(CONFIG, intermediate_size=288))  # of a model with other layers
    tensors, name = load_file(nan / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name] / 0}, nan / "model.safetensors")
    published(tmp_path / "awq", "awq")
    assert convert.main([str(out), str(tmp_path / "converted")]) == 3
    assert "is quantized (int4). Convert the original" in capsys.readouterr().err
    before = sorted(p.name for p in tmp_path.iterdir())
    cases = [
        (2, "already quantized (eaglet_quant", ["--checkpoint", out]),
        (2, "already quantized (quantization_config", ["--checkpoint", tmp_path / "awq"]),
        (
            2,
            "group size 128 does not divide its 288 inputs; use --group-size 32",
            ["--checkpoint", odd, "--group-size", "128"],
        ),
        (3, "is not a directory", ["--checkpoint", tmp_path / "none"]),
        (2, "not an earlier result", ["--checkpoint", source, "--out", busy]),
        (2, "add --algorithm gptq", ["--checkpoint", source, "--act-order"]),
        (2, "is text for GPTQ", ["--checkpoint", source, "--calibration", tmp_path / "short.txt"]),
        (2, "must be above 0", ["--checkpoint", source, "--refuse-kl", "nan"]),
        (3, "config.json", ["--checkpoint", busy]),
        (3, "cannot be read", ["--checkpoint", source, "--eval-text", tmp_path / "none.txt"]),
        (3, "refused: mean KL", ["--checkpoint", source, "--refuse-kl", "1e-9"]),
        (3, "Nothing was written", ["--checkpoint", source, "--refuse-kl", "1e-9", "--algorithm", "gptq"]),
        (3, "layers.1.mlp.down_proj.weight holds NaN", ["--checkpoint", nan]),
        (2, "layer.mlp.down: group size 128", ["--checkpoint", source, "--group-size", "128", "--eagle", head]),
        (3, "none", ["--checkpoint", source, "--algorithm", "gptq", "--eagle", tmp_path / "none"]),
    ]
    if not torch.cuda.is_available():
        cases.append((2, "--device cpu", ["--checkpoint", source, "--device", "cuda"]))
    for code, message, argv in cases:
        new = [] if "--out" in argv else ["--out", tmp_path / "new"]
        assert run(*argv, *new) == code, message
        err = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert len(err) == 1 and message in err[0] and "wait in" not in err[0], (message, err)
        assert sorted(p.name for p in tmp_path.iterdir()) == before, message
    with pytest.raises(SystemExit) as usage:
        run("--mode", "int3")
    assert usage.value.code == 2


@pytest.mark.parametrize("name, algorithm", [
    ("model", "rtn"), ("embedding", "gptq"), ("layer-0001", "gptq"), ("model", "gptq"), ("config", "gptq"),
])  # fmt: skip
def test_a_file_that_cannot_be_finished_leaves_nothing_half_written(tmp_path, monkeypatch, capsys, name, algorithm):
    """Prevents a truncated file that a later run would load, and leftovers that fill the disk further (full, or with a
    limit of sizes)."""
    source, real = saved(tmp_path / "m", CONFIG), os.replace

    def refuse(part, path):
        if Path(path).name.startswith(f"{name}."):
            assert Path(part).stat().st_size > 0
            raise OSError(28, "No space left on device")
        real(part, path)

    monkeypatch.setattr(os, "replace", refuse)
    assert run("--checkpoint", source, "--algorithm", algorithm) == 3
    err = capsys.readouterr().err
    assert "No space left on device" in err and len([x for x in err.splitlines() if x.startswith("error")]) == 1
    kept = algorithm == "gptq" and name != "embedding"  # before that one nothing is finished
    assert ("m-int4.partial: the same command" in err) == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m-int4.partial"][: 1 + kept]
    for part in (tmp_path / "m-int4.partial").glob("*.safetensors"):
        load_file(part)  # what GPTQ keeps for resuming is complete
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.tmp"))
    monkeypatch.setattr(os, "replace", real)
    assert run("--checkpoint", source, "--algorithm", algorithm) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m-int4"]


def test_interrupted_gptq_resumes_to_the_same_bytes(tmp_path):
    """Prevents a resumed run that calibrates later layers on other inputs, or reuses another job's layers, or a damaged
    one."""
    source, spec, calibration = saved(tmp_path / "m", UNTIED), QuantSpec("int4", 32, "gptq"), tokens(8, 32, 7)
    whole, out, partial = rounded(source, tmp_path / "whole", spec, calibration), tmp_path / "q", tmp_path / "q.partial"
    kept = []
    for _ in range(2):  # the second time the finished layer is not written anew
        with pytest.raises(KeyboardInterrupt):
            rounded(source, out, spec, calibration, progress=stop)
        kept.append({p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")})
    assert kept[0] == kept[1] and any(name.startswith("layer-0000.") for name in kept[0]) and not out.exists()
    resumed = rounded(source, out, spec, calibration)
    weights = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == weights and not partial.exists()
    for key in ("mean_kl", "perplexity_after", "worst_layers"):
        assert resumed[key] == whole[key]
    for damaged in (True, False):
        shutil.rmtree(out)
        with pytest.raises(KeyboardInterrupt):
            rounded(source, out, spec, calibration, progress=stop)
        if damaged:
            for file in partial.glob("*.safetensors"):
                content = bytearray(file.read_bytes())
                content[-100] ^= 1
                file.write_bytes(content)
            rounded(source, out, spec, calibration)
            assert (out / "model.safetensors").read_bytes() == weights
    other = rounded(source, out, replace(spec, mode="int8"), calibration)
    assert other["mean_kl"] < whole["mean_kl"] / 10  # not a mixture of both jobs


def test_earlier_results_are_kept_brought_back_or_replaced_whole(tmp_path, capsys):
    """Prevents OUT.PID.tmp that stays for ever, the old model that only OUT.PID.old holds, a mixture of old and new files
    when the same output is written twice, and hours of work replaced unasked."""
    out = quantized(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f"q.{gone.pid}.tmp").mkdir()
    (tmp_path / f"q.{os.getppid()}.tmp").mkdir()  # that one lives
    os.replace(out, tmp_path / f"q.{gone.pid}.old")
    argv = ["--checkpoint", tmp_path / "m", "--out", out, "--mode", "int8"]
    assert run(*argv) == 2 and "--force" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "q", f"q.{os.getppid()}.tmp"]
    (out / "stale.txt").write_text("old")
    assert run(*argv, "--force") == 0
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "receipt.json"]
    assert json.loads((out / "config.json").read_text())["eaglet_quant"]["mode"] == "int8"


def test_gptq_says_what_it_calibrates_on_and_renders_chats(tmp_path, monkeypatch, capsys):
    """Prevents a chat model that was calibrated on Python sources without a word, or on chats without its template."""
    seen = []

    class Chatting:
        chat_template_source = "template"

        def encode(self, text):
            seen.append(text)
            return [1] * 600

        def encode_chat(self, messages, add_generation_prompt):
            seen.append(messages)
            return [2] * 600

    source, chats = saved(tmp_path / "m", CONFIG), tmp_path / "chats.jsonl"
    monkeypatch.setattr(quantize, "load_tokenizer", lambda *_: Chatting())
    monkeypatch.setattr(quantize, "stdlib_texts", lambda held_out: ["x"])
    config = load_config(source)
    argv = ["--checkpoint", str(source), "--algorithm", "gptq"]
    quantize._texts(quantize.build_parser().parse_args(argv), source, config)
    note = capsys.readouterr().err
    assert "standard library" in note and "--calibration FILE.jsonl" in note
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chats.write_text(json.dumps({"messages": talk}) + "\n")
    argv += ["--calibration", str(chats)]
    calibration, _ = quantize._texts(quantize.build_parser().parse_args(argv), source, config)
    assert seen[-1] == talk and (calibration == 2).all() and capsys.readouterr().err == ""
    chats.write_text(chats.read_text() + '"text"\n')
    with pytest.raises(ValueError, match="1 lines are no conversations"):
        quantize._texts(quantize.build_parser().parse_args(argv), source, config)


def test_only_one_layer_is_in_memory(tmp_path):
    """Prevents host memory from growing with the model: finished blocks must have given their floats back."""
    import gc

    source, seen = saved(tmp_path / "m", replace(CONFIG, num_hidden_layers=4, windows=())), []
    gc.collect()

    def count(done, total, name):
        gc.collect()
        floats = [t for t in gc.get_objects() if type(t) is nn.Parameter and t.shape == (512, 128) and not t.is_meta]
        seen.append(len(floats))

    rounded(source, tmp_path / "q", QuantSpec("int4", 64), tokens(0, 32), progress=count)
    assert seen == [0] * 5


def test_a_source_that_changes_meanwhile_is_refused(tmp_path):
    """Prevents a result mixed from two models when the source is written again during a long run."""
    source = saved(tmp_path / "m", CONFIG)

    def replaced(done, total, name):
        saved(source, CONFIG, seed=1)

    with pytest.raises(ValueError, match="changed while they were read"):
        rounded(source, tmp_path / "q", QuantSpec("int8"), tokens(0, 32), progress=replaced)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


# ---- published formats -------------------------------------------------------------------------------------


def pack_words(values: torch.Tensor, dim: int, order=None, bits: int = 4) -> torch.Tensor:
    """Codes of so many bits -> int32 words along dim; code i of a word is value order[i]."""
    values = values.movedim(dim, -1).long()
    groups = values.unflatten(-1, (-1, 32 // bits))[..., list(order or range(32 // bits))]
    words = (groups << (bits * torch.arange(32 // bits))).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32).movedim(-1, dim).contiguous()


def published(
    path: Path, kind: str, config=UNTIED, group=32, symmetric=True, act_order=False, v2=False, seed=0, bits=4,
    others=(), **quant,
):  # fmt: skip
    """Write a checkpoint in a published layout from known integers; returns HF name -> exact fp64 matrix.

    others: pairs of a part of names and the bits of those matrices, where they differ. 16: not quantized.
    """
    model, g = tiny(config), torch.Generator().manual_seed(seed)
    matrices, tensors, orders = {}, {}, {}
    for name, view in hf.hf_views(model).items():
        base, leaf = name.rsplit(".", 1)
        own = next((some for part, some in others if part in name), bits)
        left = own == 16 or any(part in name for part in ("embed", "lm_head", "gate.weight", "in_proj_a", "in_proj_b"))
        if left or leaf != "weight" or view.dim() != 2:
            tensors[name] = view.clone().half()
            continue
        N, K = view.shape
        G = K if group == -1 else group
        levels = 2**own
        q = torch.randint(levels, (N, K), generator=g)
        scales = ((torch.rand(K // G, N, generator=g) / 60 + 0.003) * 16 / levels).half()
        highest = levels if v2 or kind != "gptq" else levels - 1
        zeros = torch.full((K // G, N), levels // 2) if symmetric else torch.randint(highest, (K // G, N), generator=g)
        if kind == "gptq" and not v2:
            zeros = zeros.clamp(min=1)  # the first format cannot say 0
        groups = torch.arange(K) // G
        if act_order:  # projections of the same input share their order
            key = (base.rsplit(".", 1)[0].split(".experts")[0], K)
            groups = orders.setdefault(key, groups[torch.randperm(K, generator=g)])
        matrices[name] = (q - zeros[groups].T).double() * scales.double()[groups].T
        if kind == "gptq":
            stored = {"qweight": pack_words(q.T, 0, bits=own)}
            stored["qzeros"] = pack_words(zeros if v2 else zeros - 1, 1, bits=own)
            stored |= {"scales": scales, "g_idx": groups.int()}
            if "down" in name:
                stored["bias"] = torch.zeros(N).half()
        elif kind == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            stored = {"qweight": pack_words(q.T, 1, order), "qzeros": pack_words(zeros, 1, order), "scales": scales}
        elif kind == "int8":  # of compressed-tensors, where a single scale belongs to the whole matrix
            matrices[name] = (q - 128).double() * scales.double().T
            stored = {"weight": (q - 128).to(torch.int8), "weight_scale": scales.T.float().contiguous()}
            if v2:
                stored["weight_scale"] = scales[0, :1].clone()
                matrices[name] = (q - 128).double() * scales[0, 0].double()
            if "q_proj" in name:
                stored |= {"input_scale": torch.ones(1), "k_scale": torch.ones(1)}
        elif kind == "bnb":
            stored = {"weight": (q - 128).to(torch.int8), "SCB": scales[0].float() * 127}
            stored["weight_format"] = torch.tensor(0, dtype=torch.uint8)
            matrices[name] = (q - 128).double() * (stored["SCB"] / 127).double()[:, None]
        else:
            stored = {"weight_packed": pack_words(q, 1, bits=own), "weight_scale": scales.T.contiguous()}
            stored["weight_shape"] = torch.tensor([N, K])
            if not symmetric:
                whole = (zeros.T - 8).to(torch.int8).contiguous()
                stored["weight_zero_point"] = pack_words(zeros.T, 0) if v2 else whole
            if act_order:
                stored["weight_g_idx"] = groups.int()
        tensors |= {f"{base}.{k}": v for k, v in stored.items()}
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    both = {"weights": scheme, "input_activations": scheme}
    ct = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    section = {
        "gptq": {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        "ct": ct | {"config_groups": {"group_0": {"weights": scheme}}},
        "int8": ct | {"format": "int-quantized", "config_groups": {"a": both}},
        "bnb": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
    }[kind]
    section |= ({"checkpoint_format": "gptq_v2"} if kind == "gptq" and v2 else {}) | quant
    raw = hf.config_to_hf(replace(config, dtype="float16"))
    hf.write_directory(path, tensors, raw | {"quantization_config": section})
    return matrices


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
PUBLISHED = [
    ("gptq", {"v2": True, "checkpoint_format": "gptq"}),  # some writers label the second format as the first
    ("gptq", {}), ("gptq", {"symmetric": False}), ("gptq", {"symmetric": False, "v2": True, "group": 64}),
    ("gptq", {"group": -1}), ("gptq", {"group": -1, "symmetric": False}), ("ct", {}), ("ct", {"group": -1}),
    ("gptq", {"group": 256, "symmetric": False, "config": WIDE}),
    ("gptq", {"act_order": True}), ("gptq", {"act_order": True, "symmetric": False, "group": 64, "config": GQA_BIAS}),
    ("gptq", {"config": MIXTRAL, "symmetric": False}), ("gptq", {"config": MIXTRAL, "act_order": True}),
    ("awq", {"symmetric": False}), ("awq", {"symmetric": False, "group": 128, "config": MIXTRAL}),
    ("awq", {"symmetric": True, "group": 64, "config": GQA_BIAS}), ("ct", {"bits": 8, "config": RECURRENT}),
    ("ct", {"symmetric": False}), ("ct", {"symmetric": False, "v2": True, "group": 64}),
    ("ct", {"act_order": True, "group": 128}), ("gptq", {"config": RECURRENT, "symmetric": False}),
    ("awq", {"config": RECURRENT, "symmetric": False}), ("ct", {"config": RECURRENT}),
    ("gptq", {"bits": 8}), ("gptq", {"bits": 8, "v2": True, "group": -1, "config": GQA_BIAS}),
    ("gptq", {"bits": 8, "act_order": True, "group": 128}), ("gptq", {"bits": 8, "config": MIXTRAL, "v2": True}),
    ("ct", {"bits": 8, "act_order": True}), ("ct", {"bits": 8, "group": -1, "config": MIXTRAL}),
    ("int8", {"bits": 8, "group": -1}), ("int8", {"bits": 8, "group": -1, "config": RECURRENT, "v2": True}),
    ("bnb", {"bits": 8, "group": -1}), ("bnb", {"bits": 8, "group": -1, "config": GEMMA4}),
    ("gptq", AUTO_ROUND), ("gptq", AUTO_ROUND | {"packing_format": "auto_round", "v2": True, "symmetric": False}),
    ("awq", AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "symmetric": False}),
    ("gptq", AUTO_ROUND | {"others": (("layers.0.mlp.down", 8),), "extra_config": {".*0.mlp.down_proj": {"bits": 8}}}),
    ("gptq", AUTO_ROUND | {"others": (("layers.1.self", 16),), "extra_config": {".*1.self_attn.*": {"bits": 16}}}),
    ("gptq", {"others": (("down_proj", 8),), "dynamic": {"+:.*down_proj": {"bits": 8}}}),
    ("gptq", {"config": GEMMA4}), ("awq", {"config": GEMMA4, "symmetric": False}), ("ct", {"config": GEMMA4}),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, options", PUBLISHED, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)) or "plain"
)
def test_published_checkpoints_load_to_the_exact_matrices(tmp_path, kind, options):
    """Prevents any slip in nibble order, the zero-minus-one convention, act-order or fusion of q/k/v and gate/up, and
    scales of another group where groups are wider than ours."""
    config = options.get("config", UNTIED)
    matrices = published(tmp_path / "m", kind, **options)
    model = load_model(tmp_path / "m")
    found = checkpoint.Checkpoint.open(tmp_path / "m")
    method = {"ct": "compressed-tensors", "int8": "compressed-tensors", "bnb": "bitsandbytes"}.get(kind, kind)
    name = f"int{options.get('bits', 4)} ({options.get('quant_method', method)})"
    assert (found.kind, found.quantization, model.quant) == ("published", name, name)
    assert [note for note in found.notes if "made for activations of 8 bits; only its weights" in note] == found.notes
    assert len(found.notes) == (kind == "int8")
    floats = tiny(config)
    for name, view in hf.hf_views(floats).items():
        order = hf.row_order(name, len(view), config) if "attn." in name else None
        stored = matrices[name] if name in matrices else view.half().float() + hf.norm_offset(name, config)
        view.copy_(stored if order is None else stored[order])
    restored = {n: c.dequantize(torch.float64) for n, c in model.named_modules() if isinstance(c, QuantLinear)}
    assert len(restored) == 8 - 2 * (options.get("others") == (("layers.1.self", 16),))
    for name, matrix in restored.items():
        want = parameter_of(dict(floats.named_parameters()), name)
        torch.testing.assert_close(matrix.float(), want.float(), rtol=0, atol=0)
    plain = any(c.zeros is None for c in model.modules() if isinstance(c, QuantLinear))
    assert plain == options.get("symmetric", True)  # symmetric ones must not carry zero points
    x = tokens(1, 9)
    wide = load_model(tmp_path / "m", dtype=torch.float32)
    got, want = (m.logits(m.forward_train(x)[0]) for m in (wide, floats))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_scales_that_fp16_cannot_hold_stay_exact(tmp_path):
    """Prevents bfloat16 scales of compressed-tensors from being rounded to fp16 subnormals."""
    published(tmp_path / "m", "ct")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    tensors[name] = tensors[name].bfloat16() * 1e-5
    save_file(tensors, file)
    linear = load_model(tmp_path / "m").layers[0].attention.o
    assert linear.scales.dtype == torch.float32
    assert torch.equal(linear.scales, tensors[name].T.float())


def test_unsupported_published_checkpoints_give_one_line(tmp_path):
    """Prevents silently wrong weights from layouts that look similar: other bits, act-orders that differ, leftovers."""
    file, base = tmp_path / "m" / "model.safetensors", "model.layers.0.self_attn."
    cases = [
        ("gptq", {"bits": 2}, {}, "2 bits is not supported"),
        ("gptq", {"bits": 8, "symmetric": False}, {}, "has 8 bits and zero points"),
        ("gptq", {"bits": 8, "others": (("down", 4),)}, {}, "does not fit a weight"),
        ("gptq", {"others": (("v_proj", 8),), "dynamic": {"+:v_proj": {"bits": 8}}}, {}, "or in bits: not supported"),
        ("gptq", {"others": (("v_proj", 16),), "dynamic": {"-:v_proj": {}}}, {}, "missing beside others with codes"),
        ("gptq", AUTO_ROUND | {"packing_format": "auto_round:mlx"}, {}, "format None, 4 bits is not supported"),
        ("gptq", AUTO_ROUND | {"rotation_config": {"a": 1}}, {}, "rotation_config is not supported"),
        ("int8", {"bits": 8, "group": -1}, {base + "o_proj.weight_scale": torch.ones(64, 1)}, "does not fit a weight"),
        ("awq", {"version": "gemv"}, {}, "is not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, {}, "format 'marlin'"),
        ("gptq", {"quant_method": "bitsandbytes"}, {}, "quant_method 'bitsandbytes'"),
        ("ct", {"format": "int-quantized"}, {}, "format 'int-quantized'"),
        ("gptq", {}, {base + "q_proj.g_idx": torch.arange(128).flip(0).int() // 32}, "differ in group size or act"),
        ("gptq", {}, {base + "o_proj.g_idx": torch.zeros(128).int()}, "uneven g_idx"),
        ("gptq", {"group": 16}, {}, "groups of 16 columns"),
        ("gptq", {}, {base + "k_proj.qzeros": None}, "k_proj.qzeros' is missing"),
        ("gptq", {}, {base + "k_proj.scales": torch.ones(4, 63).half()}, "does not fit a weight"),
        ("gptq", {}, {base + "o_proj.bias": torch.ones(128).half()}, "unexpected tensor"),
        ("gptq", {}, {"model.norm.weight": None}, "model.norm.weight' is missing"),
        ("gptq", {}, {"model.norm.weight": torch.ones(64).half()}, "does not fit config.json"),
        ("gptq", {}, {base + "o_proj.scales": torch.full((4, 128), float("inf")).half()}, "o_proj.scales holds NaN"),
        ("ct", {}, {base + "o_proj.weight_shape": torch.tensor([128, 96])}, "weight_shape is [128, 96], expected"),
    ]
    for kind, options, changes, words in cases:
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        published(tmp_path / "m", kind, **options)
        tensors = load_file(file) | changes
        save_file({k: v for k, v in tensors.items() if v is not None}, file)
        one_line(lambda: load_model(tmp_path / "m"), words)


# ---- rounding while a model loads --------------------------------------------------------------------------


@pytest.mark.parametrize("config, mode", [(CONFIG, "int4"), (MIXTRAL, "int4"), (GQA_BIAS, "int8")])
def test_rounding_at_load_gives_the_model_that_the_tool_writes(tmp_path, config, mode, monkeypatch):
    """Prevents codes, a tied head's copy, experts or half-precision norms other than those that quantize.py stores, and
    with them other tokens."""
    monkeypatch.setattr(rounding, "RTN_CHUNK", 128 * 40)  # matrices in several parts
    source, out = saved(tmp_path / "m", config), tmp_path / "q"
    assert run("--checkpoint", source, "--out", out, "--mode", mode) == 0
    opened, seen = checkpoint.Checkpoint.open(source).rounded(mode), []
    for dtype in (None, torch.float32):
        ours = opened.load(dtype=dtype, progress=lambda done, total, name: seen.append((done, total))).state_dict()
        theirs = load_model(out, dtype=dtype).state_dict()
        assert ours.keys() == theirs.keys() == opened.kept.keys() and seen[-1][0] == seen[-1][1] > 0
        assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)
    emitted = []
    for directory, quant in ((source, mode), (out, None)):
        engine = load(directory, quant=quant, device="cpu")
        assert engine.model.quant == (f"{mode} (rounded at load)" if quant else mode)
        emitted.append(texts_of(engine))
    assert emitted[0] == emitted[1] and emitted[0][0] != emitted[0][1]


EAGLE = {"eagle": str(DEMO / "eagle3"), "tree": "chain:3"}


@pytest.mark.parametrize("mode, options", [
    ("int8", {"dtype": "bfloat16"}), ("int4", {"dtype": "bfloat16"}), ("int8", {"kernels": "cpu"}),
    ("int4", {"kernels": "reference"}), ("int4", EAGLE), ("int8", EAGLE | {"head_quant": "none"}),
])  # fmt: skip
def test_the_plan_counts_what_rounding_at_load_leaves(mode, options):
    """Prevents a plan for the float weights of the file, and one for a float head that the CPU kernels get in int8."""
    skip_without_kernels(options.get("kernels", "auto"))
    engine = load(DEMO, quant=mode, device="cpu", ctx=256, **options)
    assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.05)
    if engine.head:
        bits = {module.bits for module in engine.head.modules() if type(module) is QuantLinear}
        assert bits == ({8} if engine.backend.mode == "cpu" and "head_quant" not in options else set())
        assert engine.plan.head == pytest.approx(held(engine.head) - held(engine.head.rotary), rel=0.05)


def test_a_head_is_rounded_on_a_gpu_too_and_the_plan_says_so():
    """Prevents a head of 16 bits beside int4 weights, whose drafts take a fifth of a step, and such a plan."""
    options = LoadOptions(device="cuda", kernels="auto", eagle="head").with_defaults(CONFIG)
    assert rounds_head(options, "int4 (Q4_1)") and not rounds_head(options, None)
    for changed in ({"head_quant": "none"}, {"kernels": "reference"}):
        assert not rounds_head(replace(options, **changed), "int4")
    weight = torch.randn(200, 320)
    rows = rounding.quantize_rtn(weight, 8, 0)
    packed = kernels.pack_int8(rows["qweight"], rows["scales"], torch.float16, "planes")
    count = sum(t.nbytes for t in (packed.weight, packed.scales, packed.counters))
    assert held_bytes({"fc.weight": weight.half()}, torch.float16, "cuda", rounded=True) == count


def test_rounding_at_load_holds_one_float_matrix(tmp_path, monkeypatch):
    """Prevents the float model in memory beside the rounded one."""
    round_one, seen = rounding.quantize_rtn, []

    def watched(weight, *how):
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(weight))
        return round_one(weight, *how)

    monkeypatch.setattr(rounding, "quantize_rtn", watched)
    model = checkpoint.Checkpoint.open(saved(tmp_path / "m", CONFIG)).rounded("int4").load()
    assert len(seen) == 4 * 2 + 1
    assert [name for name, p in model.named_parameters() if p.dim() > 1] == ["embed_tokens.weight"]


def test_weights_that_cannot_be_rounded_at_load_are_refused(tmp_path, capsys):
    """Prevents rounding rounded weights, and a traceback or a whole load before a group size turns out not to fit."""
    published(tmp_path / "awq", "awq")
    out, odd = quantized(tmp_path), saved(tmp_path / "odd", replace(CONFIG, intermediate_size=288))
    none = saved(tmp_path / "none", replace(CONFIG, intermediate_size=300))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    cases = [
        (2, "is quantized (quantization_config); leave it out", tmp_path / "awq", "int4"),
        (2, "is quantized (eaglet_quant); leave it out", out, "int8"),
        (
            2,
            "does not divide its 300 inputs; use --mode int8. Give that to quantize.py, or use --quant int8",
            none,
            "int4",
        ),
        (3, "lm_head.weight differs from the embedding", tmp_path / "m", "int8"),
    ]
    capsys.readouterr()
    for code, message, directory, mode in cases:
        assert generate.main(["--checkpoint", str(directory), "--quant", mode, "--prompt-ids", "1"]) == code, message
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert quantize.main(["--checkpoint", str(tmp_path / "m"), "--out", str(tmp_path / "no"), "--mode", "int8"]) == 3
    assert "lm_head.weight differs from the embedding" in capsys.readouterr().err
    assert load(odd, quant="int8").model.quant == "int8 (rounded at load)"


def test_groups_are_the_largest_that_fit(tmp_path, capsys):
    """SmolLM2 (576 inputs), which int4 without options refused, or a size that is chosen and that nobody is told of."""
    odd = saved(tmp_path / "odd", replace(CONFIG, intermediate_size=288))
    head = tiny_head(tmp_path / "head", replace(CONFIG, intermediate_size=192))
    flags = ["--checkpoint", str(odd), "--out", str(tmp_path / "int4"), "--eagle", str(head), "--lm-head", "int4"]
    assert quantize.main(flags) == 0
    said = capsys.readouterr().err
    assert "the model: int4 in groups of 32, since 128 columns" in said and "the head: int4 in groups of 64" in said
    specs = [read_json(tmp_path / "int4" / name / "config.json")["eaglet_quant"] for name in ("", "eagle")]
    assert [spec["group_size"] for spec in specs] == [32, 64]
    lines = []
    engine = load(odd, quant="int4", report=lines.append)
    assert any("--quant int4: groups of 32" in line for line in lines) and engine.model.quant.startswith("int4")
    whole = load(saved(tmp_path / "even", CONFIG), quant="int4", report=lines.append)
    assert (
        len([line for line in lines if "groups of" in line]) == 1 and whole.model.layers[0].mlp.down.group_size == 128
    )


# ---- texts and heads ---------------------------------------------------------------------------------------


def test_calibration_files(tmp_path):
    """Prevents .jsonl lines of the usual shapes from being skipped, or a broken file from passing as text."""
    lines = ['"plain"', '{"text": "a"}', '{"messages": [{"role": "user", "content": "b"}, {"content": "c"}]}', ""]
    lines += ['{"conversations": [{"from": "human", "value": "d"}]}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert texts.read_texts(tmp_path / "x.jsonl") == ["plain", "a", "b\n\nc", "d"]
    (tmp_path / "x.txt").write_text("one\ntwo")
    assert texts.read_texts(tmp_path / "x.txt") == ["one\ntwo"]
    for bad in ("{", "3", '{"other": 1}', '{"messages": [1]}'):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(ValueError, match="bad.jsonl, line 1"):
            texts.read_texts(tmp_path / "bad.jsonl")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        texts.read_texts(tmp_path / "bad.txt")


def test_token_windows_cover_the_text():
    """Prevents measuring only the first file, windows past the end, a crash on short texts, or calibrating or measuring
    on the wrong side of the demo model's training split."""
    for held_out in (True, False):
        assert any("class ArgumentParser" in text for text in texts.stdlib_texts(held_out)) == held_out

    class Letters:
        def encode(self, text):
            return [ord(c) for c in text]

    text = "".join(chr(i) for i in range(1000))
    windows = texts.token_windows([text], Letters(), 2000, 5, 100)
    assert windows.shape == (5, 100) and windows[0, 0] == 0 and windows[-1, -1] == 999
    assert texts.token_windows([text], Letters(), 2000, 50, 300).shape == (3, 300)
    with pytest.raises(ValueError, match="has 1000 tokens, at least 1001"):
        texts.token_windows([text], Letters(), 2000, 5, 1001)
    random = texts.token_windows([], None, 50, 3, 10)
    assert torch.equal(random, texts.token_windows([], None, 50, 3, 10)) and random.max() < 50


def tiny_head(path: Path, target: ModelConfig, version: int = 1) -> Path:
    """A random EAGLE head for `target`, as published ones are stored."""
    layer = replace(target, num_hidden_layers=1, windows=(0,), qkv_bias=False)
    third = {"taps": (0, 1, 2), "has_lm_head": True} if version == 3 else {"fc_bias": True}
    config = EagleConfig(version, layer, 128, target_vocab_size=192, **third)
    torch.manual_seed(9)
    head = EagleHead(config, tiny(target))
    save_eagle(config, head.state_dict(), path)
    return path


def float_head(path: Path, target: Transformer) -> EagleHead:
    """The head at `path` with every weight as float32, also those of a quantized head."""
    file = read_eagle(path, target.config)
    head = EagleHead(file.config, target).requires_grad_(False)
    head.load_state_dict(file.floats())
    head.rotary.build("cpu", target.rotary.length)
    return head


def algorithms(folder: Path) -> list[str]:
    """How the head in a folder was rounded, by its receipt and by its config.json."""
    files = folder / "receipt.json", folder / "eagle" / "config.json"
    receipt, config = (json.loads(file.read_text()) for file in files)
    return [receipt["head"]["algorithm"], config["eaglet_quant"]["algorithm"]]


@pytest.mark.parametrize("version, bits, algorithm", [(1, 4, "rtn"), (3, 4, "gptq"), (3, 8, "rtn")])
def test_heads_are_quantized_with_their_target(tmp_path, capsys, version, bits, algorithm):
    """Prevents a head that stays in half precision, loses fc.bias or its own LM head, or is rounded to nearest beside a
    GPTQ model, or a receipt without tau."""
    source, head = saved(tmp_path / "m", UNTIED), tiny_head(tmp_path / "head", UNTIED, version)
    argv = ["--checkpoint", source, "--out", tmp_path / "q", "--group-size", 32, "--eagle", head]
    argv += ["--algorithm", algorithm, *(["--eagle-mode", "int8"] if bits == 8 else [])]
    assert run(*argv, "--device", "cpu", "--debug") == 0, capsys.readouterr().err
    receipt = json.loads((tmp_path / "q" / "receipt.json").read_text())
    assert 1 <= receipt["tau_before"] and 1 <= receipt["tau_after"]
    assert receipt["head"]["bytes_after"] < receipt["head"]["bytes_before"] / (4 if bits == 4 else 3)
    assert "tau" in capsys.readouterr().out and algorithms(tmp_path / "q") == [algorithm] * 2
    plain, file = read_eagle(head, UNTIED), read_eagle(tmp_path / "q" / "eagle", UNTIED)
    assert file.config == plain.config
    heads = []
    for tensors in (plain.tensors, file.tensors):
        with torch.device("meta"):
            heads.append(EagleHead(plain.config, tiny(UNTIED)))
        adopt_(heads[-1], tensors, "cpu", torch.float32)
        assert not any(t.is_meta for t in heads[-1].state_dict().values())
    linears = {name: c.bits for name, c in heads[1].named_modules() if isinstance(c, QuantLinear)}
    names = ["fc", "layer.attention.qkv", "layer.attention.o", "layer.mlp.gate_up", "layer.mlp.down"]
    assert linears == dict.fromkeys(names, bits) | ({"lm_head": 8} if version == 3 else {})
    x = torch.randn(5, heads[0].fc.in_features)
    torch.testing.assert_close(heads[1].fc(x), heads[0].fc(x), atol=0.5, rtol=0.1)
    assert (heads[0].fc.bias is None) == (heads[1].fc.bias is None)
    with pytest.raises(ValueError, match=r"fc is \[128, \d+\], expected"):
        heads[0].fc = nn.Linear(64, 128)
        adopt_(heads[0], file.tensors, "cpu", torch.float32)
    (tmp_path / "q" / "eagle" / "config.json").write_text('{"eaglet_quant": {"version": 1}}')
    with pytest.raises(ValueError, match="eaglet_quant has no 'mode'"):
        read_eagle(tmp_path / "q" / "eagle", UNTIED)


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_alone_is_rounded_to_nearest_or_for_what_it_drafts(tmp_path, capsys, monkeypatch, version):
    """Prevents a head that needs a quantized copy of its target, other tensors than with the target, or a lost card; GPTQ
    of a head that rounds to nearest, calibrates on what the head never sees when it drafts, leaves out a linear, or fails
    or computes in 16 bits where the model is in bfloat16, as on a GPU."""
    source, path = saved(tmp_path / "m", UNTIED), tiny_head(tmp_path / "head", UNTIED, version)
    write_json(path / "CARD.json", {"steps": 7})
    text = tmp_path / "text.txt"
    text.write_text("words " * 400)  # the model has no tokenizer, so the ids are random all the same
    argv = ["--checkpoint", source, "--eagle", path, "--head-only", "--group-size", 32, "--lm-head", "int4"]
    assert run(*argv) == 2 and "--head-only needs" in capsys.readouterr().err
    assert run(*argv, "--out", path) == 2 and "exists" in capsys.readouterr().err
    assert run(*argv, "--out", tmp_path / "new" / "rtn") == 0 and "EAGLE head" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "m", "new", "text.txt"]
    (tmp_path / "new" / "rtn").rename(tmp_path / "rtn")
    _, tensors, receipt = quantize.quantize_head(path, UNTIED, QuantSpec("int4", 32, lm_head="int4"))
    found = read_eagle(tmp_path / "rtn", UNTIED).tensors
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
    card = json.loads((tmp_path / "rtn" / "CARD.json").read_text())
    assert card == {"steps": 7, "rounded": {"mode": "int4", **receipt}}
    assert run(*argv, "--calibration", text, "--out", tmp_path / "no") == 2
    assert "add --algorithm gptq" in capsys.readouterr().err
    assert run(*argv, "--algorithm", "gptq", "--calibration", text, "--out", tmp_path / "gptq") == 0
    assert json.loads((tmp_path / "gptq" / "CARD.json").read_text())["rounded"]["algorithm"] == "gptq"
    monkeypatch.setattr(quantize, "load", functools.partial(load, dtype="bfloat16"))
    assert run(*argv, "--algorithm", "gptq", "--calibration", text, "--out", tmp_path / "half") == 0
    wide, half = (read_eagle(tmp_path / name, UNTIED).floats() for name in ("gptq", "half"))
    assert all((half[name] - tensor).norm() <= 0.1 * tensor.norm() for name, tensor in wide.items())
    model, ids = load_model(source), tokens(8, 39, seed=3)
    heads = [float_head(tmp_path / name, model) for name in ("head", "rtn", "gptq")]
    hidden_states, taps = model.forward_train(ids, heads[0].config.taps)
    drafts = []
    for head in heads:
        feature, memory, drafts_of_head = head.fuse((hidden_states if taps is None else taps)[:, :-1]), [], []
        for step in range(3):
            feature = head.forward_train(F.pad(ids[:, 1 + step :], (0, step)), feature, step, memory)
            drafts_of_head.append(head.predict(feature))
        drafts.append(torch.stack(drafts_of_head))
    nearest, compensated = ((draft - drafts[0]).norm() / drafts[0].norm() for draft in drafts[1:])
    assert compensated < 0.95 * nearest
    found = read_eagle(tmp_path / "gptq", UNTIED).tensors
    matrices = [n for n, tensor in found.items() if tensor.dim() == 2 and tensor.is_floating_point()]
    assert all("scales" in n for n in matrices)
    for algorithm in ("rtn", "gptq"):
        again = [*argv[:3], tmp_path / "rtn", *argv[4:], "--algorithm", algorithm, "--out", tmp_path / "again"]
        assert run(*again) == 2 and "quantized already" in capsys.readouterr().err


def test_gptq_pairs_features_with_the_tokens_of_an_unshifted_head(tmp_path, monkeypatch):
    """Prevents such a head from being calibrated on pairs that it never sees when it drafts."""
    head, windows = tiny_head(tmp_path / "head", UNTIED, 1), tokens(2, 20)
    file = read_eagle(head, UNTIED)
    model = load_model(saved(tmp_path / "m", UNTIED))
    seen = []
    forward = EagleHead.forward_train

    def spy(self, tokens, feature, step, memory):
        seen.append(tokens)
        return forward(self, tokens, feature, step, memory)

    monkeypatch.setattr(EagleHead, "forward_train", spy)
    for unshifted in (False, True):
        save_eagle(replace(file.config, unshifted=unshifted), file.tensors, tmp_path / str(unshifted))
        spec = QuantSpec("int8", algorithm="gptq")
        quantize.quantize_head(tmp_path / str(unshifted), UNTIED, spec, model, windows)
        assert torch.equal(seen[0], windows[:, :-1] if unshifted else windows[:, 1:])
        seen.clear()


def test_a_quantized_head_keeps_its_trimmed_vocabulary(tmp_path, capsys):
    """Prevents an EAGLE-1 head that cannot be read once it is rounded, drafts other tokens, or an LM head in floats."""
    source, head = saved(tmp_path / "m", UNTIED), tiny_head(tmp_path / "head", UNTIED, 1)
    file = read_eagle(head, UNTIED)
    ids = torch.arange(0, 192, 3)
    save_eagle(replace(file.config, target_vocab_size=192), file.tensors | {"draft_ids": ids}, tmp_path / "trimmed")
    argv = ["--checkpoint", source, "--eagle", tmp_path / "trimmed", "--eagle-mode", "int8", "--head-only"]
    assert run(*argv, "--out", tmp_path / "q") == 0, capsys.readouterr().err
    assert torch.equal(read_eagle(tmp_path / "q", UNTIED).tensors["draft_ids"], ids)
    fixed = {"tree": "paper25", "eagle_always": True}  # drafts that no measurement prunes or leaves out
    heads = tmp_path / "trimmed", tmp_path / "q"
    engines = [load(source, eagle=str(path), quant="int8", ctx=32, **fixed) for path in heads]
    engines.append(build_engine(engines[0], {"eagle": str(tmp_path / "q"), **fixed}, 32))  # an arm of scripts.bench
    texts = [engine.generate([1, 2, 3], SamplingParams(max_new_tokens=20)).run()[0] for engine in engines]
    for text in texts[1:]:
        assert text.token_ids == texts[0].token_ids and text.accepted_by_depth == texts[0].accepted_by_depth
    for engine in engines:
        assert torch.equal(engine.head.draft_ids, ids)
        if engine.backend.mode == "cpu":
            assert engine.head.lm_head.packed.bits == 8
    whole = read_eagle(tmp_path / "q", UNTIED)
    for wrong in (torch.tensor([5, 4]), torch.tensor([4, 192]), torch.tensor([-1, 4]), ids[:0]):
        save_quantized(whole.config, whole.tensors | {"draft_ids": wrong}, QuantSpec("int8"), tmp_path / "wrong")
        with pytest.raises(ValueError, match="not ascending token ids"):
            read_eagle(tmp_path / "wrong", UNTIED)


@pytest.mark.parametrize("kind", ["plan", "allocator"])
def test_a_model_too_large_to_measure_is_still_quantized(tmp_path, capsys, monkeypatch, kind):
    """Prevents losing all the work because the unquantized model, whose size was the reason, does not fit in memory. Its
    head is then rounded to nearest."""
    allocator = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    errors = {"plan": NotEnoughMemory("not enough memory: plan 9 GB,\nfree 1 GB."), "allocator": allocator}
    source, head, devices, real = (saved(tmp_path / "m", UNTIED), tiny_head(tmp_path / "h", UNTIED), [], load)

    def limited(directory, **options):
        devices.append(options["device"])
        if Path(directory) == source or "eagle" not in options:  # GPTQ of a head takes the quantized model alone
            raise errors[kind]
        return real(directory, **options)

    monkeypatch.setattr(quantize, "load", limited)
    argv = ["--checkpoint", source, "--out", tmp_path / "q", "--group-size", 32, "--eagle", head, "--algorithm", "gptq"]
    assert run(*argv, "--device", "cpu") == 0 and devices == ["cpu"] * 3
    assert algorithms(tmp_path / "q") == ["rtn"] * 2
    receipt, out = json.loads((tmp_path / "q" / "receipt.json").read_text()), capsys.readouterr().out
    assert receipt["tau_before"] is None and receipt["tau_after"] >= 1 and "tau not measured -> " in out
    notes = [line for line in out.splitlines() if line.startswith("note")]
    assert "the head was rounded to nearest" in notes[0] and "tau_before was not measured" in notes[1]
    assert kind != "plan" or "free 1 GB" in notes[1]
    assert load_model(tmp_path / "q").quant == "int4"
    errors[kind] = ValueError("the head is damaged")
    assert run(*argv, "--out", tmp_path / "other", "--device", "cpu") == 3  # any other failure stays one
    assert "the head is damaged" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_running_out_of_memory_is_exit_code_4(tmp_path, capsys, monkeypatch):
    """Prevents an allocator's RuntimeError from being reported as an internal fault, or GPTQ's layers from being lost."""

    def full(*rest):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    source = saved(tmp_path / "m", CONFIG)
    monkeypatch.setattr(rounding, "_hessians", full)  # the embedding is finished by then
    assert run("--checkpoint", source, "--algorithm", "gptq") == 4
    assert "the same command goes on" in capsys.readouterr().err


def test_a_model_of_the_hugging_face_cache_is_quantized_into_the_working_folder(tmp_path, capsys, monkeypatch):
    """Prevents files of ours inside the cache, and org/name being refused where generate.py takes it."""
    cached(tmp_path / "hub", "org/name", saved(tmp_path / "m", CONFIG))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    before = sorted((tmp_path / "hub").rglob("*"))
    assert run("--checkpoint", "org/name", "--mode", "int8") == 0, capsys.readouterr().err
    assert checkpoint.Checkpoint.open("name-int8").quantization == "int8"
    assert sorted((tmp_path / "hub").rglob("*")) == before


@pytest.mark.parametrize("options", [["--mode", "int8"], ["--group-size", 32], ["--mode", "int4", "--lm-head", "int4"]])
def test_a_drafter_does_not_change_what_a_quantized_model_says(tmp_path, options):
    """Prevents quantized linears whose result for a row depends on how many rows there are (exact in float64)."""
    source, head = saved(tmp_path / "m", UNTIED), tiny_head(tmp_path / "head", UNTIED)
    assert run("--checkpoint", source, "--out", tmp_path / "q", *options) == 0
    emitted = []
    for eagle in (None, str(head)):
        engine = load(tmp_path / "q", eagle=eagle, device="cpu", dtype="float64")
        assert engine.model.quant == json.loads((tmp_path / "q" / "receipt.json").read_text())["spec"]["mode"]
        emitted.append(texts_of(engine))
    assert emitted[0] == emitted[1] and emitted[0][0] != emitted[0][1]
