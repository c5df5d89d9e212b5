"""weights/small_floats.py, and published formats of every kind through the command line: files that the tests write by
the rules that the formats' own libraries follow, read as the same values."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantize import AUTO_ROUND, GEMMA4, GQA_BIAS, MIXTRAL, RECURRENT, UNTIED, published, tiny, tokens
from tiny import held, needs_kernels

import generate
import kernels
import quantize
from generate import load
from loading.options import DEMO
from weights import hf
from weights.checkpoint import Checkpoint
from weights.quantized import FloatLinear, QuantLinear
from weights.shards import Shard

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
FP4 = [sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
SKIPPED = ("embed", "lm_head", "gate.weight", "in_proj_a", "in_proj_b", "conv1d", "0.self_attn.o_proj")
GENERIC = {"quant_method": "compressed-tensors", "format": "float-quantized"}
Written = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by what follows the name of a matrix, its values
Writer = Callable[[torch.Tensor], Written]
CONFIGS = {"llama": UNTIED, "recurrent": RECURRENT, "experts": MIXTRAL, "gemma4": GEMMA4, "bias": GQA_BIAS}


def fp8(rows: int, columns: int, leaf: str = "weight_scale_inv", static: bool = False) -> Writer:
    """A matrix in FP8 with a scale for so many rows and columns, 0 for all of them."""

    def write(w: torch.Tensor) -> Written:
        N, K = w.shape
        r, c = rows or N, columns or K
        scales = torch.empty(-(-N // r), -(-K // c))
        codes, values = torch.empty(N, K, dtype=torch.float8_e4m3fn), torch.empty(N, K, dtype=torch.float64)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                at = slice(i * r, i * r + r), slice(j * c, j * c + c)
                scales[i, j] = w[at].abs().max() / 448
                codes[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
                values[at] = codes[at].double() * scales[i, j].double()
        scales = scales.reshape(()) if rows == columns == 0 else scales
        return {"weight": codes, leaf: scales} | ({"input_scale": torch.ones(1)} if static else {}), values

    return write


def four_bits(table: tuple[float, ...], block: int = 64, double: bool = False) -> Writer:
    """A matrix in 4 bits as bitsandbytes writes it."""

    def write(w: torch.Tensor) -> Written:
        levels, kind = torch.tensor(table), "nf4" if table is NF4 else "fp4"
        flat = torch.nn.functional.pad(w.flatten(), (0, -w.numel() % block)).view(-1, block)
        largest = flat.abs().amax(1)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
        stored = {"weight.quant_map": levels}
        if double:
            inner = torch.tanh(torch.linspace(-3, 3, 256))
            offset = float(largest.mean())
            each = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
            large = each.abs().amax(1)
            codes = (each / large[:, None]).flatten()[: len(largest), None].sub(inner).abs().argmin(1)
            stored |= {"weight.nested_absmax": large, "weight.nested_quant_map": inner}
            stored["weight.absmax"] = codes.to(torch.uint8)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            largest = inner[codes] * large.repeat_interleave(256)[: len(codes)] + torch.tensor(offset)
        else:
            stored["weight.absmax"] = largest
        near = ((flat / flat.abs().amax(1)[:, None])[..., None] - levels).abs().argmin(-1)
        values = (levels[near].double() * largest[:, None].double()).flatten()[: w.numel()].view(w.shape)
        pairs = near.flatten()[: w.numel()].view(-1, 2).to(torch.uint8)
        stored["weight"] = (pairs[:, 0] << 4 | pairs[:, 1])[:, None]
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()]).byte()
        return stored, values

    return write


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LIKE = {"quant_method": "compressed-tensors"}


def small_groups(kind: str) -> Writer:
    """A matrix in NVFP4 as compressed-tensors ("nvfp4") or modelopt writes it, or in MXFP4 ("mxfp4")."""

    def write(w: torch.Tensor) -> Written:
        each = 32 if kind == "mxfp4" else 16
        groups = w.float().unflatten(1, (-1, each))
        largest = groups.abs().amax(-1) / 6
        factor = largest.max() / 448
        if kind == "mxfp4":
            stored = (largest.log2().ceil().clamp(min=-14) + 127).to(torch.uint8)
            scales = torch.ldexp(torch.ones(stored.shape), stored.int() - 127).double()
        else:
            stored = (largest / factor).to(torch.float8_e4m3fn)
            scales = stored.double() * (1 / (1 / factor) if kind == "nvfp4" else factor).double()
        near = (groups.abs()[..., None] / scales.float()[..., None, None].clamp(min=1e-30) - E2M1).abs().argmin(-1)
        values = (E2M1[near].double() * groups.sign() * scales[..., None]).flatten(1)
        pairs = (near + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        packed = pairs[:, 0::2] | pairs[:, 1::2] << 4
        if kind == "modelopt":
            return {
                "weight": packed,
                "weight_scale": stored,
                "weight_scale_2": factor,
                "input_scale": torch.ones(()),
            }, values
        more = (
            {} if kind == "mxfp4" else {"weight_global_scale": (1 / factor)[None], "input_global_scale": torch.ones(1)}
        )
        return {"weight_packed": packed, "weight_scale": stored} | more, values

    return write


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]}
BLOCK_SCHEME = {"config_groups": {"a": {"weights": {"strategy": "block", "block_structure": [48, 80]}}}}
SMALL = {
    "fp8": (fp8(128, 128), BLOCKS | {"weight_block_size": [128, 128]}),
    "fp8-odd-blocks": (fp8(48, 80), BLOCKS | {"weight_block_size": [48, 80]}),
    "fp8-whole": (fp8(0, 0, static=True), BLOCKS | {"activation_scheme": "static", "weight_block_size": None}),
    "fbgemm": (fp8(1, 0, "weight_scale"), {"quant_method": "fbgemm_fp8"}),
    "modelopt": (fp8(0, 0, "weight_scale", True), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "ct-rows": (fp8(1, 0, "weight_scale"), GENERIC),
    "ct-whole": (fp8(0, 0, "weight_scale", True), GENERIC),
    "ct-blocks": (fp8(48, 80, "weight_scale"), GENERIC | BLOCK_SCHEME),
    "nf4": (four_bits(NF4), BNB),
    "nf4-double": (four_bits(NF4, 64, True), BNB),
    "nf4-wide": (four_bits(NF4, 256, True), BNB),
    "nf4-over-rows": (four_bits(NF4, 4096), BNB),
    "fp4": (four_bits(FP4), BNB),
    "nvfp4": (small_groups("nvfp4"), LIKE | {"format": "nvfp4-pack-quantized"}),
    "nvfp4-modelopt": (small_groups("modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4": (small_groups("mxfp4"), LIKE | {"config_groups": {"a": {"format": "mxfp4-pack-quantized"}}}),
}


def small(path: Path, kind: str, config=UNTIED, **section) -> dict[str, torch.Tensor]:
    """Write a tiny model in one of SMALL, and the same values as floats beside it, at `path`-floats. Returns these."""
    write, found = SMALL[kind]
    tensors, floats = {}, {}
    for name, view in hf.as_stored(hf.hf_views(tiny(config)), config).items():
        floats[name] = view.half().float()
        if name.endswith(".weight") and view.dim() == 2 and not any(part in name for part in SKIPPED):
            stored, values = write(floats[name])
            floats[name] = values.float()
            tensors |= {f"{name.removesuffix('weight')}{leaf}": t.contiguous() for leaf, t in stored.items()}
        else:
            tensors[name] = floats[name].half()
    raw = hf.config_to_hf(replace(config, dtype="float16"))
    coded = raw | {"quantization_config": found | section}
    for folder, stored, config in ((path, tensors, coded), (at_floats(path), floats, raw)):
        folder.mkdir()
        save_file({name: t.contiguous().clone() for name, t in stored.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    return floats


def at_floats(path: Path) -> Path:
    return path.with_name(f"{path.name}-floats")


# What has other fused matrices or orders of rows than a Llama meets scales of every reach: of blocks, rows and the whole.
OTHERS = itertools.product(
    ("recurrent", "experts", "gemma4"), ("ct-blocks", "ct-rows", "fp8-whole", "nf4-double", "nf4-over-rows")
)


@pytest.mark.parametrize("family,kind", [("llama", kind) for kind in SMALL] + [*OTHERS])
def test_small_floats_are_read_as_their_values(tmp_path, family, kind):
    """Prevents scales of another row or block, swapped halves of a byte, another table, rows in another order, and a
    matrix that is left as its codes."""
    small(tmp_path / "m", kind, CONFIGS[family])
    found = Checkpoint.open(tmp_path / "m")
    assert found.quantization is None and "became floats" in found.notes[0]
    ours, theirs = found.load(dtype=torch.float32), Checkpoint.open(at_floats(tmp_path / "m")).load(dtype=torch.float32)
    theirs = dict(theirs.named_parameters())
    assert theirs.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():  # the values of NVFP4 are products of three numbers
        assert torch.equal(parameter, theirs[name]) or "nvfp4" in kind, name
        torch.testing.assert_close(parameter, theirs[name], rtol=3e-7, atol=0)


@needs_kernels
@pytest.mark.parametrize("family,kind", [
    ("llama", "nf4"), ("llama", "nf4-double"), ("recurrent", "nf4-double"), ("recurrent", "fp4"), ("experts", "nf4-wide"),
    ("experts", "nf4-double"), ("bias", "nf4-wide"), ("bias", "fp4"), ("llama", "nvfp4"), ("experts", "nvfp4-modelopt"),
    ("bias", "nvfp4"), ("bias", "mxfp4"),
])  # fmt: skip
def test_four_bits_stay_four_bits(tmp_path, family, kind):
    """Prevents 4-bit matrices that become floats where the kernels have a table, values further off than the note says,
    and a plan for other weights than those that are held."""
    small(tmp_path / "m", kind, CONFIGS[family])
    floats = Checkpoint.open(at_floats(tmp_path / "m")).load(dtype=torch.float32)
    engine = load(tmp_path / "m", kernels="cpu", dtype="float32", ctx=32, activations="float")
    found = Checkpoint.open(tmp_path / "m", layout="tiles")
    exact = "nvfp4" in kind or "mxfp4" in kind
    assert engine.model.quant == found.quantization == f"int4 ({'fp4' if exact else 'bitsandbytes'})"
    assert ("keep their bits. Act" if exact else "up to 0.4 % of the largest one in its block") in found.notes[0]
    four, block = 0, 256 if "wide" in kind else 64
    for name, layer in engine.model.named_modules():
        if isinstance(layer, FloatLinear) and layer.packed.bits == 4:
            values, own = layer.dequantize(), dict(floats.named_parameters())
            want = own[name if name in own else f"{name}.weight"]
            error, largest = (t.flatten().view(-1, block) for t in (values - want, want))
            assert (error.abs().amax(1) <= 0.0041 * largest.abs().amax(1) + 1e-7).all(), name
            assert not exact or torch.allclose(values, want, rtol=3e-7, atol=0), name
            more = layer.packed.weight.nbytes - want.numel() * 4.5 / 8  # of NVFP4, a scale for each row
            assert more == (4 * want.numel() / want.shape[-1] if "nvfp4" in kind else 0)
            want.copy_(values)
            four += 1
    assert four == (8 if family == "recurrent" else 7)  # SKIPPED has the o_proj of layer 0, which is recurrent in one
    x = tokens(1, 12)
    with engine.backend.active():
        got, want = (m.logits(m.forward_train(x)[0]) for m in (engine.model, floats))
    assert (got - want).abs().max() < 1e-4
    assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.05)


def test_panels_of_four_bits_hold_the_same_values(tmp_path):
    """Prevents another table or scale in the layout of Triton than in that of the CPU kernels, with experts too."""
    kinds = ("a", UNTIED, "nf4-double"), ("b", MIXTRAL, "nf4-double"), ("c", UNTIED, "nvfp4"), ("d", MIXTRAL, "nvfp4")
    for at, config, kind in kinds:
        small(tmp_path / at, kind, config)
        model = Checkpoint.open(tmp_path / at, layout="panels").load(dtype=torch.float16)
        floats = dict(Checkpoint.open(at_floats(tmp_path / at)).load(dtype=torch.float32).named_parameters())
        layers = {name: m for name, m in model.named_modules() if isinstance(m, FloatLinear)}
        assert len(layers) == 7
        for name, layer in layers.items():
            want = floats[name if name in floats else f"{name}.weight"]
            assert (layer.dequantize() - want).abs().max() < (1e-6 if "nvfp4" in kind else 0.005) * want.abs().max()


@needs_kernels
@pytest.mark.parametrize("layout", ("", "tiles", "panels"))
def test_files_mix_fp8_and_nvfp4(tmp_path, layout):
    """Mixed checkpoints, with an LM head in NVFP4 as well, or a quantization that only a file of modelopt tells of:
    refused, or scales of one format that are read as matrices of the other."""
    for kind, writers in (("nvfp4", ("nvfp4", "ct-rows")), ("nvfp4-modelopt", ("nvfp4-modelopt", "modelopt"))):
        folder, section = tmp_path / kind, SMALL[kind][1]
        small(folder, kind)
        tensors, floats = (load_file(path / "model.safetensors") for path in (folder, at_floats(folder)))
        for name, writer in (("lm_head", writers[0]), ("model.layers.1.mlp.down_proj", writers[1])):
            for key in [key for key in tensors if key.startswith(f"{name}.")]:
                del tensors[key]
            stored, values = SMALL[writer][0](floats[f"{name}.weight"])
            tensors |= {f"{name}.{leaf}": t.contiguous() for leaf, t in stored.items()}
            floats[f"{name}.weight"] = values.float()
        save_file(tensors, folder / "model.safetensors")
        save_file(floats, at_floats(folder) / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        if kind == "nvfp4":
            groups = {"a": {"format": "nvfp4-pack-quantized"}, "b": {"format": "float-quantized"}}
            raw["quantization_config"] = LIKE | {"format": "mixed-precision", "config_groups": groups}
        else:
            own = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": section, "b": {"quant_algo": "FP8"}}}
            (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": own}))
            del raw["quantization_config"]
        (folder / "config.json").write_text(json.dumps(raw))
        model = Checkpoint.open(folder, layout).load(dtype=torch.float32)
        assert (model.quant == "int4 (fp4)") == bool(layout) == isinstance(model.lm_head, FloatLinear)
        for name, want in Checkpoint.open(at_floats(folder)).load(dtype=torch.float32).named_parameters():
            module, own = model.get_submodule(name.removesuffix(".weight")), dict(model.named_parameters())
            got = module.dequantize() if isinstance(module, FloatLinear) else own[name]
            torch.testing.assert_close(got, want, rtol=3e-7, atol=0)


def test_small_floats_are_rounded_on_request(tmp_path):
    """Prevents FP8 that cannot be made smaller again, or is rounded from other values than it stands for."""
    small(tmp_path / "m", "fp8")
    ours, theirs = (Checkpoint.open(p).rounded("int8").load() for p in (tmp_path / "m", at_floats(tmp_path / "m")))
    for name, tensor in ours.state_dict().items():
        if name.endswith(("qweight", "scales")):
            assert torch.equal(tensor, theirs.state_dict()[name])
    text = tmp_path / "t.txt"
    text.write_text("one two three " * 900)
    argv = ["--checkpoint", tmp_path / "m", "--out", tmp_path / "q", "--mode", "int8", "--eval-text", text]
    assert quantize.main([*map(str, argv)]) == 0
    stored = Checkpoint.open(tmp_path / "q")
    assert stored.quantization == "int8" and "quantization_config" not in stored.raw


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    """Prevents values from scales or codes that belong to another matrix, and float8 of another kind."""
    name, file = "model.layers.0.mlp.down_proj.weight", tmp_path / "m" / "model.safetensors"
    cases = [
        ("fp8", {f"{name}_scale_inv": None}, {}, "the scale of .* is missing"),
        ("fp8", {f"{name}_scale_inv": torch.ones(3, 7)}, {}, r"float32 \[3, 7\], which does not fit FP8"),
        ("fp8", {f"{name}_scale_inv": torch.ones(1, 2, dtype=torch.uint8)}, {}, "torch.uint8"),
        ("fp8", {name: torch.zeros(128, 256).to(torch.float8_e5m2)}, {}, "unexpected tensor"),
        ("fp8", {f"{name}_scale_inv": torch.full((1, 2), math.nan)}, {}, "holds NaN"),
        ("fp8", {}, {"weight_block_size": "128"}, "weight_block_size"),
        ("fp8", {}, {"weight_block_size": [128, 128, 128]}, "which does not fit FP8"),
        ("fp8", {}, {"weight_block_size": [64, 128]}, "which does not fit FP8"),
        ("ct-rows", {}, {"transform_config": {"a": {}}}, "transform_config is not supported"),
        ("ct-rows", {}, {"format": "marlin-24"}, "format 'marlin-24'"),
        ("nvfp4", {f"{name}_scale": None}, {}, "fit no NVFP4 or MXFP4"),
        ("nvfp4", {f"{name}_global_scale": None}, {}, "fit no NVFP4 or MXFP4"),
        ("nvfp4", {f"{name}_global_scale": torch.zeros(1)}, {}, "not all positive numbers"),
        ("nvfp4", {f"{name}_scale": torch.full((128, 16), -1.0).to(torch.float8_e4m3fn)}, {}, "not all positive"),
        ("nvfp4", {f"{name}_scale": torch.ones(128, 8).to(torch.float8_e4m3fn)}, {}, "fit no NVFP4 or MXFP4"),
        ("nvfp4", {}, {"transform_config": {"a": {}}}, "transform_config is not supported"),
        ("nvfp4", {}, {"config_groups": {"a": {"format": "pack-quantized"}}}, "is not supported"),
        (
            "mxfp4",
            {f"{name}_scale": torch.full((128, 8), 200, dtype=torch.uint8)},
            {},
            "Use --kernels reference|above 2",
        ),
        ("nvfp4-modelopt", {f"{name}_scale_2": torch.ones(2)}, {}, "fit no NVFP4 or MXFP4"),
        ("nf4", {f"{name}.absmax": None}, {}, "do not fit its quant_state"),
        ("nf4", {f"{name}.absmax": torch.ones(4)}, {}, "do not fit its quant_state"),
        ("nf4", {f"{name}.quant_map": torch.ones(15)}, {}, "do not fit its quant_state"),
        ("nf4", {f"{name}.quant_map": torch.full((16,), math.nan)}, {}, "NaN"),
        ("nf4", {f"{name}.quant_map": torch.full((16,), 1e9)}, {}, "above 2"),
        ("nf4", {f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}, {}, "is no JSON"),
        ("nf4", {f"{name}.absmax": torch.full((512,), math.inf)}, {}, "NaN"),
        ("nf4-double", {f"{name}.nested_absmax": torch.ones(1)}, {}, "do not fit its quant_state"),
        ("nf4", {"model.layers.0.mlp.other.weight": torch.ones(3)}, {}, "unexpected"),
        ("nf4", {}, {"load_in_4bit": False}, "quant_method 'bitsandbytes'"),
    ]
    for kind, changes, section, message in cases:
        for folder in (tmp_path / "m", at_floats(tmp_path / "m")):
            shutil.rmtree(folder, ignore_errors=True)
        small(tmp_path / "m", kind, **section)
        changed = load_file(file) | changes
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
        for layout in ("", "panels"):
            with pytest.raises(ValueError, match=message) as error:
                Checkpoint.open(tmp_path / "m", layout).load()
            assert "\n" not in str(error.value)


def test_groups_of_int8_stay_int8_for_triton(monkeypatch):
    """Prevents 8-bit groups of another row or order in the panels, with and without experts, and scales in float32 that
    Triton's kernels read as fp16."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (2, 96, 256), generator=g, dtype=torch.int8)
    scales = torch.rand(2, 4, 96, generator=g).half()
    want = codes.double() * scales.double().mT.repeat_interleave(64, -1)
    for at in (slice(None), 0):
        packed = kernels.pack_int8(codes[at], scales[at], torch.float16, "planes")
        assert packed.layout == "planes" and packed.weight.nbytes < 1.2 * codes[at].nbytes
        assert torch.equal(kernels.dequantize(packed, torch.float32).double(), want[at])
    monkeypatch.setattr(kernels.packing, "use_triton", lambda operation, x, problem="": not problem)
    four = torch.randint(256, (96, 128), generator=g, dtype=torch.uint8)
    for pack, weight in ((kernels.pack_int8, (codes[0],)), (kernels.pack_int4, (four,))):
        more = {"group_size": 64} if pack is kernels.pack_int4 else {}
        for dtype, layout in ((torch.float16, "planes"), (torch.float32, "dense")):
            assert pack(*weight, scales[0].to(dtype), dtype=torch.float16, **more).layout == layout


@pytest.mark.parametrize("kind", ["fp8", "nf4-double"])
def test_a_rank_has_its_part_of_small_floats(tmp_path, kind):
    """Prevents a part of the codes with scales of another part, and a layout that holds all of a matrix in every rank."""
    small(tmp_path / "m", kind, replace(UNTIED, dtype="float16"))
    ours, theirs = (
        Checkpoint.open(path, "panels").sharded(Shard(1, 2)).load(dtype=torch.float32).state_dict()
        for path in (tmp_path / "m", at_floats(tmp_path / "m"))
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


FORMATS = {
    "gptq-8": ("gptq", {"bits": 8, "act_order": True}),
    "auto-awq": ("awq", AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    "mixed": ("gptq", AUTO_ROUND | {"others": (("layers.0.mlp.down", 8),), "extra_config": {"down": {"bits": 8}}}),
    "w8a16": ("ct", {"bits": 8}),
    "w8a8": ("int8", {"bits": 8, "group": -1}),
    "llm-int8": ("bnb", {"bits": 8, "group": -1}),
} | dict.fromkeys(("fp8", "nf4-double"))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_command_line_gives_the_tokens_of_the_dequantized_model(tmp_path, kind, capsys):
    """Prevents a format that the loader reads, and that the plan, a kernel or the loop takes in another way."""
    config = replace(Checkpoint.open(DEMO).config, num_hidden_layers=2, tie_word_embeddings=False)
    folder = tmp_path / "m"
    if how := FORMATS[kind]:
        matrices = published(folder, how[0], config, **how[1])
        shutil.copytree(folder, at_floats(folder))
        plain = {name: view.clone().half().float() for name, view in hf.hf_views(tiny(config)).items()}
        save_file(plain | {name: t.float() for name, t in matrices.items()}, at_floats(folder) / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        del raw["quantization_config"]
        (at_floats(folder) / "config.json").write_text(json.dumps(raw))
    else:
        small(folder, kind, config)
    found = []
    for path in (folder, at_floats(folder)):
        for name in ("tokenizer.model", "tokenizer_config.json"):
            shutil.copyfile(DEMO / name, path / name)
        flags = "--kernels reference --dtype float32 --max-new-tokens 12 --ctx 64 --device cpu --json".split()
        assert generate.main(["--checkpoint", str(path), "-p", "import os", *flags]) == 0
        found.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert found[0] == found[1] and len(found[0]) > 4


@needs_kernels
@pytest.mark.parametrize("kind", ["gptq-8", "w8a16", "w8a8", "llm-int8"])
def test_the_plan_counts_what_integers_take(tmp_path, kind):
    """Prevents a plan for codes of another width than those that are held, and 8 bits that become floats."""
    name, options = FORMATS[kind]
    published(tmp_path / "m", name, **options)
    engine = load(tmp_path / "m", kernels="cpu", dtype="float32", ctx=32)
    codes = [m for m in engine.model.modules() if type(m) is QuantLinear]
    assert [(m.bits, m.packed.layout) for m in codes] == [(8, "tiles")] * 8
    assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.05)
