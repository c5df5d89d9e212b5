"""LoRA adapters: the logits of PEFT, on every kind of weight, in forwards of any width, with a draft head."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import build_hf
from safetensors.torch import load_file, save_file
from serving_kit import running
from test_checkpoint import edit_json, one_line
from test_model import run, tokens_of
from tiny import load_model

import kernels
from cli.report import in_parts
from decoding.params import SamplingParams
from engine.load import load
from kernels import cpu
from loading.options import DEMO, LoadOptions
from model import Block, Transformer, chain_ancestors
from support.errors import UsageError
from weights.checkpoint import Checkpoint
from weights.lora import LoraLinear, choice_of
from weights.quantized import pack_

needs_kernels = pytest.mark.skipif(bool(cpu.problem()), reason="the CPU kernels do not run here")
SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "use_dora": False, "init_lora_weights": True}


def adapter(folder: Path, family: str, targets: list[str], dtype=torch.float32, **changes) -> tuple[Path, dict]:
    """A random adapter of these linears in a folder, and what it adds to each weight, in float64."""
    settings = SETTINGS | {"target_modules": targets, "rank_pattern": {}, "alpha_pattern": {}} | changes
    tensors, added, generator = {}, {}, torch.Generator().manual_seed(len(targets))
    for name, weight in build_hf(family).state_dict().items():
        place = name.removesuffix(".weight")
        if place.rpartition(".")[2] not in targets:
            continue
        rank = next((r for key, r in settings["rank_pattern"].items() if place.endswith(key)), settings["r"])
        alpha = next((a for key, a in settings["alpha_pattern"].items() if place.endswith(key)), settings["lora_alpha"])
        sizes = (rank, weight.shape[1]), (len(weight), rank)
        a, b = ((torch.randn(*size, generator=generator) * 0.2).to(dtype) for size in sizes)
        tensors |= {f"base_model.model.{place}.lora_{x}.weight": t for x, t in (("A", a), ("B", b))}
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        added[name] = scale * b.double() @ a.double()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder, added


def brute_force(folder: Path, family: str, added: dict) -> Transformer:
    """The model with W + s B A, in float64."""
    hf = build_hf(family).double()
    hf.load_state_dict({name: w + added.get(name, 0) for name, w in hf.state_dict().items()})
    hf.save_pretrained(folder / "sum")
    return load_model(folder / "sum", dtype=torch.float64)


ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
O_ALPHA = {"alpha_pattern": {"o_proj": 3}}
CASES = [
    ("llama", ["q_proj", "v_proj"], {}),
    ("llama", ALL, {"use_rslora": True, "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7}} | O_ALPHA),
    ("phi3-partial", ["qkv_proj", "gate_up_proj"], {}),  # fused in the file; rows of queries and keys in another order
    ("ernie4_5", ["k_proj", "up_proj"], {}),  # neighbouring dimensions turn together
    ("qwen2_moe", ["o_proj", "v_proj"], {}),
]


@pytest.mark.parametrize(("family", "targets", "changes"), CASES)
def test_logits_are_those_of_the_sum_of_the_matrices(tiny_checkpoint, tmp_path, family, targets, changes):
    """Catches a wrong scale, a block of B in the wrong rows or columns, an order of rows that only weights get, and an
    adapter that is lost where layers are packed."""
    folder, added = adapter(tmp_path / "lora", family, targets, **changes)
    tokens = tokens_of(30, batch=2)
    want = run(brute_force(tmp_path, family, added), tokens, 30)
    checkpoint = Checkpoint.open(tiny_checkpoint(family)).adapted(folder)
    assert (run(load_model(tiny_checkpoint(family)), tokens, 30) - want).abs().max() > 0.1  # it changes something
    exact = checkpoint.load(dtype=torch.float64)
    assert not any(isinstance(m, LoraLinear) for m in exact.modules())
    assert (run(exact, tokens, 30) - want).abs().max() < 1e-11
    assert (run(checkpoint.load(dtype=torch.float32), tokens, 16) - want).abs().max() < 1e-4
    beside = replace(checkpoint, config=replace(checkpoint.config, dtype="bfloat16")).load(dtype=torch.float32)
    assert sum(isinstance(m, LoraLinear) for m in beside.modules()) == len(checkpoint.adapters[0].parts)
    assert (run(beside, tokens, 16) - want).abs().max() < 1e-4
    with kernels.KernelBackend("cpu" if not cpu.problem() else "reference", "cpu").active(), torch.inference_mode():
        pack_(beside, torch.float32)
        assert (run(beside, tokens, 16) - want).abs().max() < 1e-4


@pytest.fixture(scope="module")
def llama(tiny_checkpoint, tmp_path_factory):
    """(the folder of a model, and of an adapter of all its linears)."""
    folder = tmp_path_factory.mktemp("all")
    return tiny_checkpoint("llama"), adapter(folder, "llama", ALL, rank_pattern={"q_proj": 9})[0]


def test_logits_are_those_of_peft(tiny_checkpoint, tmp_path, llama):
    """Catches a reading of the settings that is not PEFT's own: patterns, rsLoRA, fused parts."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tokens = tokens_of(30)
    more = {"use_rslora": True, "alpha_pattern": {"layers.1.self_attn.o_proj": 3.0}, "task_type": "CAUSAL_LM"}
    odd = adapter(tmp_path / "odd", "llama", ALL, rank_pattern={"q_proj": 2, "up_proj": 11}, **more)[0]
    for folder in (llama[1], odd):
        want = peft.PeftModel.from_pretrained(build_hf("llama"), folder)(tokens).logits
        model = Checkpoint.open(llama[0]).adapted(folder).load(dtype=torch.float32)
        assert (run(model, tokens, 16) - want).abs().max() < 1e-4


@needs_kernels
@pytest.mark.parametrize("quant", [None, "int8"])
def test_rows_have_the_same_bits_at_every_width(llama, quant):
    """Catches a product with A or B whose bits depend on the number of rows: drafts would then change the text."""
    checkpoint = Checkpoint.open(llama[0], layout="tiles")
    half = replace(checkpoint, config=replace(checkpoint.config, dtype="float16"))
    checkpoint = checkpoint.rounded(quant) if quant else half
    model, tokens = checkpoint.adapted(llama[1]).load(dtype=torch.float32), tokens_of(48)
    with kernels.KernelBackend("cpu", "cpu").active() as active, torch.inference_mode():
        pack_(model, torch.float32)
        assert isinstance(model.layers[0].attention.qkv, LoraLinear)
        alone = run(model, tokens, 1)
        assert all(torch.equal(run(model, tokens, width), alone) for width in (3, 16, 48))
    assert not active.declined


@needs_kernels
def test_a_head_of_the_base_model_drafts_and_the_plan_counts_the_adapter(llama, capsys):
    """Catches a head that is refused or changes the text, an adapter that only some engines load, one that no report
    names, and memory that no plan counts."""
    lines: list[str] = []
    options = {"lora": llama[1], "quant": "int8", "ctx": 128, "kernels": "cpu"}
    plain = load(llama[0], report=lines.append, **options)
    drafted = load(llama[0], drafter="ngram", **options)
    assert any("LoRA" in line and "21 linears, rank 9" in line for line in lines)
    assert in_parts(plain) == {"an adapter beside the weights": [0, 1, 2]}
    prompt, params = [5, 6, 7, 5, 6], SamplingParams(max_new_tokens=40)
    base = load(llama[0], **(options | {"lora": None}))
    texts = [e.generate(prompt, params).run()[0].token_ids for e in (plain, drafted, base)]
    assert texts[0] == texts[1] != texts[2]
    pairs = [m for m in plain.model.modules() if isinstance(m, LoraLinear)]
    held = sum(linear.packed.weight.nbytes for pair in pairs for linear in (pair.down, pair.up))
    assert plain.plan.lora == pytest.approx(held, rel=0.2) and base.plan.lora == 0
    assert plain.plan.weights == base.plan.weights


@needs_kernels
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_several_adapters_run_together(llama, tmp_path, drafter):
    """Requests of two adapters and of the base model, in one batch and one after the other, have the texts that they have
    where their adapter is alone. Catches a row with the adapter of another one, also after rows have changed places, a
    prompt whose keys come from another adapter, and products whose bits depend on the other adapters."""
    some, _ = adapter(tmp_path / "some", "llama", ["q_proj", "up_proj"], r=5)
    options = {"quant": "int8", "ctx": 128, "kernels": "cpu"} | ({"drafter": drafter} if drafter else {})
    prompt, params = [5, 6, 7, 5, 6] * 8, SamplingParams(max_new_tokens=24, temperature=0.7, seed=3)
    alone = {}
    for name, folder in (("", None), ("all", llama[1]), ("some", some)):
        alone[name] = load(llama[0], lora=folder, **options).generate(prompt, params).run()[0].token_ids
    assert len(set(map(tuple, alone.values()))) == 3
    engine = load(llama[0], lora=(f"all={llama[1]}", str(some)), slots=3, **options)
    assert engine.adapters == ("all", "some") and load(llama[0], lora=some, **options).adapters == ()
    for order in (["", "some", "all", "some", "", "all"], ["all", "all", "some", ""]):
        streams = [(name, engine.generate(prompt, params, name)) for name in order]
        for _, stream in streams:
            stream.start()
        for name, stream in streams:
            assert stream.run()[0].token_ids == alone[name], name
    again = engine.generate(prompt, params, "some").run()[0]
    assert again.token_ids == alone["some"] and again.cached_tokens > 0
    one_line(lambda: engine.generate(prompt, params, "c"), "adapter is 'c'; allowed: all")
    one_line(lambda: load(llama[0], lora=(str(some), str(some)), **options), "two adapters are called", kind=UsageError)


@needs_kernels
def test_a_server_chooses_the_adapter_by_the_name_of_the_model(tmp_path):
    """Catches a list of models without the adapters, a name that chooses another text, an answer that names another
    model, and a name that is no model's and no longer gets the base model."""
    httpx, generator = pytest.importorskip("httpx"), torch.Generator().manual_seed(0)
    (tmp_path / "fable").mkdir()
    place, config = "base_model.model.model.layers.1.self_attn.q_proj", Checkpoint.open(DEMO).config
    sizes = {"A": (8, config.hidden_size), "B": (config.num_attention_heads * config.head_dim, 8)}
    tensors = {f"{place}.lora_{x}.weight": torch.randn(*size, generator=generator) for x, size in sizes.items()}
    save_file(tensors, tmp_path / "fable/adapter_model.safetensors")
    (tmp_path / "fable/adapter_config.json").write_text(json.dumps(SETTINGS | {"r": 8, "target_modules": ["q_proj"]}))
    engine = load(DEMO, lora=(f"a={tmp_path}/fable", f"b={tmp_path}/fable"), ctx=128, slots=2)
    with running(engine) as server:
        listed = [about["id"] for about in httpx.get(f"{server.address}/v1/models").json()["data"]]
        assert listed == ["demo", "a", "b"] and httpx.get(f"{server.address}/v1/models/b").json()["id"] == "b"
        body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
        address = f"{server.address}/v1"
        answers = {}
        for name in ("demo", "a", "b", "gpt-4"):
            answers[name] = httpx.post(f"{address}/completions", json=body | {"model": name}).json()
        texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}
        assert texts["a"] == texts["b"] != texts["demo"] == texts["gpt-4"]
        assert [answer["model"] for answer in answers.values()] == ["demo", "a", "b", "demo"]
        asked = [{"input": "a fox", "model": name} for name in ("demo", "a")]
        vectors = [httpx.post(f"{address}/embeddings", json=body).json()["data"][0] for body in asked]
        assert vectors[0]["embedding"] != vectors[1]["embedding"]


@pytest.mark.parametrize("folders", [lambda one: (one,), lambda one: (one, f"b={one}")], ids=["one", "two"])
def test_a_layer_with_an_adapter_is_one_graph(llama, folders):
    """Catches code that torch.compile leaves in the middle of a block, which no GPU could capture."""
    checkpoint = Checkpoint.open(llama[0])
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype="float16"))
    model, tokens = checkpoint.adapted(*folders(llama[1])).load(dtype=torch.float32), tokens_of(8)
    if choice := choice_of(model):
        choice.set([2])
    block = torch.compile(Block.forward, fullgraph=True, backend="eager")
    nodes = model.nodes(torch.zeros(1, dtype=torch.long), torch.arange(8)[None], chain_ancestors(1, 8, "cpu"), 16)
    cache = model.new_cache(1, 16)
    want = model(tokens, nodes, cache)[0]
    got = model.run_layers(model.embed(tokens), nodes, cache, (), None, block)[0]
    assert torch.equal(got, want)


@pytest.mark.parametrize(("changes", "words"), [
    ({"use_dora": True}, "use_dora = True is not implemented"),
    ({"bias": "lora_only"}, "bias = 'lora_only' is not implemented"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"lora_bias": True}, "lora_bias"),
    ({"some_new_config": {"beta": 1}}, "some_new_config"),
    ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
    ({"init_lora_weights": "pissa"}, "pissa"),
    ({"r": 65}, "r = 65 ... [1, 64]"),
    ({"r": 3}, "not an adapter for this model"),
    ({"rank_pattern": {"(a+)+": 4}}, "only names"),
    ({"target_modules": ["q_proj", "o_proj"]}, "names o_proj"),
    ({"lora_alpha": "8"}, "lora_alpha"),
    (("q_proj", "gate"), "changes model.layers.0.self_attn.gate"),
    (("layers.0.self_attn.q_proj", "embed_tokens"), "embed_tokens"),
    (("lora_A", "lora_magnitude_vector"), "lora_magnitude_vector"),
    (("layers.2.self_attn.q_proj.lora_A", "x"), "no matrix"),
    (("layers.2.self_attn.q_proj.lora_A", "layers.9.self_attn.q_proj.lora_A"), "is missing"),
])  # fmt: skip
def test_what_is_not_implemented_is_named(tiny_checkpoint, tmp_path, changes, words):
    """Catches a setting that is ignored, or a part of an adapter that is left out: the text would be that of another
    model. changes: settings, or a part of the tensors' names and what takes its place."""
    folder, _ = adapter(tmp_path / "lora", "llama", ["q_proj"])
    if isinstance(changes, tuple):
        file = folder / "adapter_model.safetensors"
        save_file({name.replace(*changes): tensor for name, tensor in load_file(file).items()}, file)
        changes = {"target_modules": ".*"}
    edit_json(folder / "adapter_config.json", **changes)
    options = LoadOptions(str(tiny_checkpoint("llama")), lora=str(folder))
    one_line(options.open_checkpoint, *words.split(" ... "))
