"""weights/: every layout gives the same tensors, every damaged file gives one line, nothing else gets through."""

import json
import os
import pickle
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import BASE, FAMILIES, build_hf
from safetensors.torch import load_file, save_file
from tiny import load_config, load_model, one_line

from bench.arms import build_engine
from decoding.params import SamplingParams
from eagle_draft import EagleHead
from engine.load import load
from families.config import ModelConfig
from kernels import cpu
from layers.build import build_transformer
from quantize import quantize_head
from scripts import convert
from support.files import read_json
from support.reader import INDEX_LIMIT
from weights import checkpoint
from weights.block_heads import read_head
from weights.checkpoint import Checkpoint
from weights.files import cache_folder, read_entries
from weights.head_reader import read_eagle
from weights.heads import AUX, save_eagle, save_quantized
from weights.hf import config_to_hf, hf_views, save_hf
from weights.quantized import QuantSpec


def same_weights(a, b) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def edit_json(path: Path, **changes) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def edit_tensors(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture
def llama(tiny_checkpoint, tmp_path) -> Path:
    """A private copy of a tiny LLaMA directory."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "llama"))


# ---- what a directory is -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_once(tiny_checkpoint, tmp_path, monkeypatch):
    """Bug: every layer sniffs the directory again: config.json read four times, the kind guessed in six places."""
    read: list[str] = []

    def spy(path, *rest):
        read.append(path.name)
        return read_json(path, *rest)

    for module in ("checkpoint", "hf"):
        monkeypatch.setattr(f"weights.{module}.read_json", spy)
    folder = tiny_checkpoint("llama")
    found = Checkpoint.open(folder)
    model = found.load(dtype=torch.bfloat16, max_positions=9)
    assert (found.kind, found.quantization) == ("hf", None)
    assert found.raw == json.loads((folder / "config.json").read_text()) and model.config == found.config
    assert found.entries is found.entries
    assert (model.dtype, model.rotary.length) == (torch.bfloat16, 9)
    assert read.count("config.json") == 1
    write_meta(load_file(folder / "model.safetensors"), tmp_path / "m", 1, 0)
    found = Checkpoint.open(tmp_path / "m")
    assert (found.kind, found.quantization, found.raw) == ("meta", None, {})
    assert found.load().config == found.config and read.count("params.json") == 1
    (tmp_path / "out").mkdir()
    for place in (tmp_path, tmp_path / "m"):  # Meta's place for it, and the nearer one
        (place / "tokenizer.model").write_text(place.name)
        found.copy_texts(tmp_path / "out")
        assert (tmp_path / "out" / "tokenizer.model").read_text() == place.name


# ---- layouts of target models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_our_own_writer(tiny_checkpoint, tmp_path, family):
    """A model that save_hf wrote is read back with every tensor and setting.

    Catches: save_hf that loses a switch (bias, window, tie, head_dim, RoPE scaling) or swaps fused slices.
    """
    transformers = pytest.importorskip("transformers")
    model = load_model(tiny_checkpoint(family))
    save_hf(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config and same_weights(model, again)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = torch.arange(5, 25)[None]
    change = (hf(tokens).logits - build_hf(family)(tokens).logits).abs().max()
    # 1 + w is rounded, and the grouped kernel of Gemma 4's experts adds up in another order
    assert change < 1e-5 if model.config.norm_offset or family == "gemma4-moe" else change == 0


YARN = {"rope_type": "yarn", "factor": 2.0}
PATTERN = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}


@pytest.mark.parametrize("change", [
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 99}},
    {"rope_scaling": YARN | {"truncate": False, "attention_factor": 1.5, "beta_slow": 3}},
    {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    {"eos_token_id": [3, 4], "bos_token_id": None, "torch_dtype": "bfloat16"},
    {"eos_token_id": None, "head_dim": 20, "rms_norm_eps": 1e-5},
    {"model_type": "qwen3", "attention_bias": True, "use_sliding_window": True} | PATTERN,
])  # fmt: skip
def test_configs_survive_writing(change):
    """A switch that our own directories forget: the converted model would differ from its source."""
    config = ModelConfig.from_hf({**BASE, "model_type": "llama", **change})
    assert ModelConfig.from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_sharded_safetensors_and_bin_equal_the_single_file(tiny_checkpoint, tmp_path):
    """A shard that is skipped, or a .bin read only in part."""
    want = load_model(tiny_checkpoint("qwen2"))
    tensors = load_file(tiny_checkpoint("qwen2") / "model.safetensors")
    names, config = sorted(tensors), tiny_checkpoint("qwen2") / "config.json"
    for kind, count in {"safetensors": 3, "bin": 3, "old.bin": 3, "single.bin": 1}.items():
        folder = tmp_path / kind
        folder.mkdir()
        shutil.copy(config, folder)
        suffix, stem = ("safetensors", "model") if kind == "safetensors" else ("bin", "pytorch_model")
        weight_map = {}
        for i in range(count):
            part = {name: tensors[name] for name in names[i::count]}
            file = f"{stem}-{i + 1:05}-of-{count:05}.{suffix}" if count > 1 else f"{stem}.bin"
            if suffix == "safetensors":
                save_file(part, folder / file)
            else:
                torch.save(part, folder / file, _use_new_zipfile_serialization=kind != "old.bin")
            weight_map.update(dict.fromkeys(part, file))
        if count > 1:
            (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert same_weights(load_model(folder), want)


def test_tied_weights_may_be_stored_twice_but_not_differ(tiny_checkpoint, tmp_path):
    """Llama-3.2 1B/3B: a stored copy of the tied head must not fail the load, a different one must not be ignored."""
    folder = Path(shutil.copytree(tiny_checkpoint("llama-tied"), tmp_path / "tied"))
    want = load_model(folder)
    assert want.lm_head is None

    def store(tensors, scale=1.0):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale

    edit_tensors(folder, store)
    assert same_weights(load_model(folder), want)
    edit_tensors(folder, lambda tensors: store(tensors, 2.0))
    one_line(lambda: load_model(folder), "lm_head.weight", "tie_word_embeddings")
    edit_tensors(folder, store)
    edit_tensors(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert same_weights(load_model(folder), want)  # some files name the shared matrix after its other place
    edit_json(folder / "config.json", tie_word_embeddings=False)
    one_line(lambda: load_model(folder), "missing", "model.embed_tokens.weight")


NAMES = {  # what wrapped a model for training or for images, and a base model that was saved alone
    "compiled": lambda name: f"_orig_mod.{name}",
    "distributed": lambda name: f"module._orig_mod.{name}",
    "part": lambda name: f"language_model.{name}",
    "twice": lambda name: f"model.{name}",
    "layers compiled": lambda name: name.replace(".0.", ".0._orig_mod."),
    "base": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3_5"])
def test_names_with_other_prefixes_are_read(tiny_checkpoint, tmp_path, family, names):
    """Catches a model that is refused because something wrapped it when it was saved."""
    folder, want = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "m")), load_model(tiny_checkpoint(family))
    tensors = {NAMES[names](name): t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert same_weights(load_model(folder), want)
    save_file(tensors | {f"module.{name}": t.clone() for name, t in tensors.items()}, folder / "model.safetensors")
    one_line(lambda: load_model(folder), "is also in", "remove one")


def test_both_mixtral_layouts(tiny_checkpoint, tmp_path):
    """transformers 5's fused experts with gate and up swapped, or experts in another order."""
    model = load_model(tiny_checkpoint("mixtral"))
    for fused in (False, True):
        names = ["model.layers.0.mlp.experts.gate_up_proj"] * fused
        views = {name: view.clone() for name, view in hf_views(model, names).items()}
        folder = tmp_path / str(fused)
        folder.mkdir()
        shutil.copy(tiny_checkpoint("mixtral") / "config.json", folder)
        save_file(views, folder / "model.safetensors")
        assert same_weights(load_model(folder), model)
        assert any("experts.gate_up_proj" in name for name in views) == fused
    tensors = load_file(tmp_path / "True" / "model.safetensors")
    plain = load_file(tmp_path / "False" / "model.safetensors")
    at = "model.layers.1"
    for e in range(4):
        w1, w3 = (plain[f"{at}.block_sparse_moe.experts.{e}.{w}.weight"] for w in ("w1", "w3"))
        assert torch.equal(tensors[f"{at}.mlp.experts.gate_up_proj"][e], torch.cat((w1, w3)))


META = {f"attention.w{x}": (f"self_attn.{x}_proj", int(x == "o")) for x in "qkvo"}
META |= {"feed_forward.w1": ("mlp.gate_proj", 0), "feed_forward.w3": ("mlp.up_proj", 0)}
META |= {"feed_forward.w2": ("mlp.down_proj", 1), "attention_norm": ("input_layernorm", None)}
META["ffn_norm"] = ("post_attention_layernorm", None)


def write_meta(hf: dict, folder: Path, shards: int, embed_dim: int, **params) -> None:
    """Meta's files from Hugging Face tensors: interleaved rotary rows, model-parallel pieces, the freqs buffer."""
    whole = {
        "tok_embeddings.weight": (hf["model.embed_tokens.weight"], embed_dim),
        "norm.weight": (hf["model.norm.weight"], None),
        "output.weight": (hf["lm_head.weight"], 0),
        "rope.freqs": (torch.ones(8), None),
    }
    for i in range(BASE["num_hidden_layers"]):
        for meta, (name, dim) in META.items():
            tensor = hf[f"model.layers.{i}.{name}.weight"]
            if meta in ("attention.wq", "attention.wk"):  # [heads, 2 halves, 8, in] -> neighbouring pairs
                tensor = tensor.view(-1, 2, 8, 64).transpose(1, 2).reshape(tensor.shape)
            whole[f"layers.{i}.{meta}.weight"] = (tensor, dim)
    folder.mkdir()
    for s in range(shards):
        part = {n: (t if dim is None else t.chunk(shards, dim)[s].clone()) for n, (t, dim) in whole.items()}
        torch.save(part, folder / f"consolidated.{s:02}.pth")
    base = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-6, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps({**base, "multiple_of": 32, **params}))


@pytest.mark.parametrize(("shards", "embed_dim"), [(1, 0), (2, 1), (2, 0)])
def test_meta_checkpoints(tiny_checkpoint, tmp_path, shards, embed_dim):
    """Interleaved rotary rows taken as half-rotation (fluent nonsense), or shards joined along the wrong dimension."""
    want = load_model(tiny_checkpoint("llama"))
    write_meta(load_file(tiny_checkpoint("llama") / "model.safetensors"), tmp_path / "m", shards, embed_dim)
    got = load_model(tmp_path / "m")
    assert same_weights(got, want)
    assert replace(got.config, max_position_embeddings=512, dtype=want.config.dtype) == want.config
    assert load_config(tmp_path / "m") == got.config
    assert (got.config.max_position_embeddings, got.config.eos_token_ids) == (4096, (2,))


def test_meta_errors_and_rope_switches(tiny_checkpoint, tmp_path):
    """A missing model-parallel shard joined silently, an unknown switch ignored, LLaMA-3.1's scaling forgotten."""
    hf = load_file(tiny_checkpoint("llama") / "model.safetensors")
    write_meta(hf, tmp_path / "a", 2, 1, use_scaled_rope=True, rope_theta=5e5, max_seq_len=300)
    config = load_config(tmp_path / "a")
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("llama3", 5e5, 32.0)
    assert config.max_position_embeddings == 300
    (tmp_path / "a" / "consolidated.00.pth").unlink()
    one_line(lambda: load_model(tmp_path / "a"), "consolidated.00.pth")
    write_meta(hf, tmp_path / "b", 1, 0, moe={"num_experts": 8})
    one_line(lambda: load_model(tmp_path / "b"), "moe")
    write_meta(hf, tmp_path / "c", 1, 0)
    torch.save({"x": torch.ones(1)}, tmp_path / "c" / "consolidated.00.pth")
    one_line(lambda: load_model(tmp_path / "c"), "tok_embeddings")
    for i, (part, shape) in enumerate({"wo": (64,), "wq": ()}.items()):  # they were an IndexError
        folder = tmp_path / f"d{i}"
        write_meta(hf, folder, 1, 0)
        file, name = folder / "consolidated.00.pth", f"layers.0.attention.{part}.weight"
        torch.save(torch.load(file) | {name: torch.ones(shape)}, file)
        one_line(lambda folder=folder: load_model(folder), "do not fit head_dim" if part == "wq" else "o_proj")


def test_tensors_are_read_one_by_one(tiny_checkpoint, monkeypatch):
    """Two copies of the model in memory while it loads; a progress bar that does not end at 100 %."""
    alive: list[weakref.ref] = []

    def watch(entry):
        def read():
            assert not any(ref() is not None for ref in alive), "the previous tensor is still held"
            tensor = entry.read()
            alive.append(weakref.ref(tensor))
            return tensor

        return entry._replace(read=read)

    monkeypatch.setattr(
        checkpoint, "read_entries", lambda files, share: {n: watch(e) for n, e in read_entries(files).items()}
    )
    seen = []
    model = Checkpoint.open(tiny_checkpoint("llama")).load(progress=lambda *report: seen.append(report))
    done = [report[0] for report in seen]
    stored = sum(p.numel() * 4 for p in model.parameters())
    assert done == sorted(done) and done[-1] == stored == seen[0][1] and len(alive) > len(seen) > 10


# ---- damaged and hostile target files --------------------------------------------------------------------------


def test_truncated_file_is_named(llama):
    """A cut download that loads as zeros or dies inside a library, also where a few bytes of the header are missing, and
    a header that claims more than is read."""
    file = llama / "model.safetensors"
    size, header = file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for keep in (size - 1000, *range(header - 1, header - 9, -1), 100, 8, 4, 0):
        os.truncate(file, keep)
        one_line(lambda: load_model(llama), "model.safetensors: cut short", "Download it again")
    file.write_bytes((INDEX_LIMIT + 1).to_bytes(8, "little"))
    os.truncate(file, INDEX_LIMIT + 100)  # a hole, which takes no space
    one_line(lambda: load_model(llama), "model.safetensors: cut short", "Download it again")


def test_tensors_that_do_not_belong(llama):
    """strict=False: a missing tensor left at random, an unused one dropped, a wrong shape broadcast."""
    name = "model.layers.1.mlp.up_proj.weight"
    good, want = load_file(llama / "model.safetensors")[name], load_model(llama)
    # what old exporters stored, the one listed exception
    edit_tensors(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert same_weights(load_model(llama), want)
    edit_tensors(llama, lambda t: t.pop(name))
    one_line(lambda: load_model(llama), "missing", name)
    narrow, byte, small = good[:, :32].contiguous(), good.to(torch.int8), good.to(torch.float8_e4m3fn)
    for wrong, words in ((narrow, ("[96, 32]", "[96, 64]")), (byte, ("int8",)), (small, ("F8_E4M3",))):
        edit_tensors(llama, lambda t, wrong=wrong: t.update({name: wrong}))
        one_line(lambda: load_model(llama), name, *words)
    turned = "model.layers.0.self_attn.q_proj.weight"
    rows = load_file(llama / "model.safetensors")[turned]
    edit_tensors(llama, lambda t: t.update({name: good, turned: torch.ones(())}))  # it was an IndexError
    one_line(lambda: load_model(llama), turned, "[]")
    edit_tensors(llama, lambda t: t.update({turned: rows}))
    edit_tensors(llama, lambda t: t.update({name: good, "model.layers.7.extra\n.weight": good.clone()}))
    one_line(lambda: load_model(llama), "unexpected", "model.layers.7.extra")
    edit_tensors(llama, lambda t: [t.pop(n) for n in list(t) if "layers.2" in n])
    assert "more" in one_line(lambda: load_model(llama), "missing", "model.layers.2")


def test_values_that_no_weight_has(llama):
    """safetensors does not look at values: one NaN weight makes every reply token 0, a damaged exponent is finite and
    huge, and a bf16 model cast to fp16 overflows silently."""
    name = "model.layers.2.self_attn.k_proj.weight"

    def put(value):
        edit_tensors(llama, lambda tensors: tensors[name][3, 4].fill_(value))

    put(1e6)
    load_model(llama, dtype=torch.bfloat16)
    one_line(lambda: load_model(llama, dtype=torch.float16), name, "float16")
    for value in (float("nan"), float("inf"), float("-inf"), 1e30):
        put(value)
        one_line(lambda: load_model(llama), name, "NaN or infinite", "2^20")


def test_broken_indexes_and_duplicated_tensors(llama):
    """An index that makes us open, and complain about the content of, files elsewhere, one without a map, a shard that is
    missing, a tensor whose value depends on the order of files."""
    index = llama / "model.safetensors.index.json"
    outside = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", ".safetensors")
    names = dict.fromkeys(outside, "not a plain .safetensors file name") | {3: "expected a text"}
    names["model-00002-of-00002.safetensors"] = "model-00002-of-00002.safetensors is missing"
    for name, words in names.items():
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        one_line(lambda: load_model(llama), words)
    index.write_text(json.dumps({"weight_map": ["x"]}))
    one_line(lambda: load_model(llama), "weight_map")
    index.unlink()
    save_file({"model.norm.weight": torch.zeros(64)}, llama / "model-00002-of-00002.safetensors")
    one_line(lambda: load_model(llama), "model.norm.weight", "also in")


class Hostile:
    def __reduce__(self):
        return (os.mkdir, ("pwned",))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_hostile_pickles_do_not_run(llama, name, monkeypatch, tmp_path):
    """A checkpoint that executes code when it is opened, or is refused without naming that code, behind two lines of
    warnings, with advice to load it unsafely."""
    monkeypatch.chdir(tmp_path)
    (llama / "model.safetensors").unlink()
    if name.endswith(".pth"):
        (llama / "config.json").unlink()
        (llama / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 3, "n_heads": 4}))
    for zipped in (True, False):
        torch.save({"model.norm.weight": Hostile()}, llama / name, _use_new_zipfile_serialization=zipped)
        one_line(lambda: load_model(llama), name, "refused", "Unsupported global: 'posix.mkdir'", "safetensors")
    assert not (tmp_path / "pwned").exists()
    torch.save(torch.nn.Linear(1, 1), llama / name)
    text = one_line(lambda: load_model(llama), "'torch.nn.modules.linear.Linear'")
    assert "weights_only" not in text and "add_safe_globals" not in text
    (llama / name).write_bytes(pickle.dumps({"a": Hostile()}, protocol=4))
    one_line(lambda: load_model(llama), name, "UnpicklingError: Unsupported operand 149")
    for content in (b"", b"not a pickle", b"\x80\x04N.", os.urandom(500)):
        (llama / name).write_bytes(content)
        one_line(lambda: load_model(llama), name)
    torch.save([torch.ones(1)], llama / name)
    one_line(lambda: load_model(llama), name, "dictionary")


def test_pickled_parameters_and_strange_tensors(llama, monkeypatch):
    """A .bin of nn.Parameters that drags autograd into the model; tensors without values (meta) or sparse ones. Before
    torch 2.10 weights_only=True is not safe (CVE-2026-24747)."""
    want = load_model(llama)
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    torch.save({name: torch.nn.Parameter(t) for name, t in tensors.items()}, llama / "pytorch_model.bin")
    model = load_model(llama)
    assert same_weights(model, want) and not any(p.requires_grad or p.grad_fn for p in model.parameters())
    for strange in (torch.empty(64, device="meta"), torch.ones(64).to_sparse()):
        torch.save({**tensors, "model.norm.weight": strange}, llama / "pytorch_model.bin")
        one_line(lambda: load_model(llama), "refused")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    one_line(lambda: load_model(llama), "2.10", "2.9.1")


def test_config_file_errors(llama, tmp_path):
    """Tracebacks, or gigabytes read, for a config.json that is not one. Sizes of terabytes must fail on the shapes in the
    file, not in the allocator."""
    one_line(lambda: load_model(tmp_path / "nowhere"), "nowhere is not a directory")
    config = llama / "config.json"
    original = config.read_text()
    for change in ({"hidden_size": 2**31, "head_dim": 16}, {"vocab_size": 10_000_000}, {"intermediate_size": 2**31}):
        edit_json(config, **change)
        one_line(lambda: load_model(llama))
        config.write_text(original)
    for text in ("", "{", "[1]", "7", '{"hidden_size": NaN}', "[" * 100_000, '{"a": "\\ud800"', "\xff"):
        config.write_bytes(text.encode("latin-1"))
        one_line(lambda: load_model(llama), "config.json")
        one_line(lambda: load_config(llama), "config.json")
    config.write_bytes(b"{" + b" " * (5 << 20) + b"}")
    one_line(lambda: load_model(llama), "config.json", "bytes")
    config.unlink()
    one_line(lambda: load_model(llama), "config.json")
    shutil.copy(tmp_path / "llama" / "model.safetensors", tmp_path)
    (llama / "model.safetensors").unlink()
    (llama / "config.json").write_text(json.dumps({**BASE, "model_type": "llama"}))
    one_line(lambda: load_model(llama), "no model*.safetensors")


LONG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("added", [LONG, {"type": "yarn", **{key: LONG[key] for key in list(LONG)[1:]}}])
def test_yarn_that_a_user_adds_makes_the_context_longer(added):
    """Model pages say: add `rope_scaling` to config.json. Catches a stretch that is ignored beside transformers 5's
    `rope_parameters`, their theta lost, a context that stays as short as before, and a stretch of a length that is
    already stretched."""
    base = {**BASE, "model_type": "llama"}
    theirs = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    for config in (base | {"rope_theta": 1e6}, base | theirs):
        got = ModelConfig.from_hf(config | {"rope_scaling": added})
        assert (got.rope.kind, got.rope.theta, got.rope.factor, got.max_positions) == ("yarn", 1e6, 4.0, 2048)
        assert ModelConfig.from_hf(config).rope.kind == "default"
    full = {"rope_type": "default", "rope_theta": 1e6}
    two = {"rope_parameters": {"full_attention": full, "sliding_attention": full | {"rope_theta": 1e4}}}
    gemma = base | two | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    got = ModelConfig.from_hf(gemma | {"rope_scaling": added})
    assert (got.rope.kind, got.rope.theta, got.window_rope.kind, got.window_rope.theta) == ("yarn", 1e6, "default", 1e4)
    assert ModelConfig.from_hf(base | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}).max_positions == 512
    long = ModelConfig.from_hf(base | {"max_position_embeddings": 4096, "rope_scaling": added})
    assert long.max_positions == 4096


def test_a_dtype_that_no_config_names_is_that_of_the_tensors(llama):
    """Bug: bfloat16 weights that count as float32, twice their size on a GPU, because config.json names no dtype."""
    folder, text = llama, (llama / "config.json").read_text()
    halves = {name: t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    config = {key: value for key, value in json.loads(text).items() if key not in ("dtype", "torch_dtype")}
    for more in ({}, {"torch_dtype": None}, {"dtype": "auto"}, {"torch_dtype": "torch.bfloat16"}):
        (folder / "config.json").write_text(json.dumps(config | more))
        assert load_config(folder).dtype == "bfloat16"
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert load_config(folder).dtype == "float32"


def test_a_draft_model_drafts_past_its_own_context(llama, tmp_path):
    """Bug: a small model that was trained to fewer positions gives each later one the rotation of its last, and drafts
    noise. Here it is the target itself."""
    shutil.copytree(llama, small := tmp_path / "small")
    edit_json(small / "config.json", max_position_embeddings=64)
    made = dict(ctx=256, dtype="float64", kernels="reference", tree="chain:4", eagle_always=True)
    engine = load(llama, draft_checkpoint=str(small), **made)
    result = engine.generate([5, 9, 22, 7, 3] * 30, SamplingParams(max_new_tokens=50)).run()[0]
    assert result.tau > 4.5


def test_stop_ids_without_a_tokenizer(llama):
    """Bug: a model without tokenizer files never reads generation_config.json, not even one that is garbage. Its ids come
    first, then config.json's."""
    file = llama / "generation_config.json"
    file.unlink(missing_ok=True)
    edit_json(llama / "config.json", eos_token_id=[2, 13])
    assert load_config(llama).eos_token_ids == load_model(llama).config.eos_token_ids == (2, 13)
    for listed, want in (([5, 13], (5, 13, 2)), (7, (7, 2, 13)), (None, (2, 13)), ([], (2, 13))):
        file.write_text(json.dumps({"eos_token_id": listed}))
        assert load_config(llama).eos_token_ids == load_model(llama).config.eos_token_ids == want
    for text in ("{", "[2]", '{"eos_token_id": "x"}', '{"eos_token_id": 128}', '{"eos_token_id": [1, true]}'):
        file.write_text(text)
        one_line(lambda: load_config(llama), "generation_config.json")
    for text in ('"false"', "1", "[]"):  # a text is no switch for sampling
        file.write_text(f'{{"do_sample": {text}}}')
        one_line(lambda: load_config(llama), "generation_config.json", "do_sample", "expected true or false")


IDS = ["x", [2, "y"], 999999, 2.0, {"a": 2}, -4, True, [None], [1, None], [[1]], [True]]
ROTATED = [{"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"rope_type": "default", "partial_rotary_factor": "1"}]


@pytest.mark.parametrize(("key", "name", "values"), [
    ("eos_token_id", "eos_token_id", IDS), ("bos_token_id", "bos_token_id", IDS),
    ("rope_parameters", "partial_rotary_factor", ROTATED), ("rope_scaling", "partial_rotary_factor", ROTATED[1:]),
])  # fmt: skip
def test_values_that_were_once_ignored_are_refused(llama, key, name, values):
    """Bug: stop ids of a wrong kind dropped in silence (a model that never stops) or compared with a number (TypeError),
    a partly rotated model run as a wholly rotated one."""
    good = (llama / "config.json").read_text()
    for value in values:
        (llama / "config.json").write_text(good)
        edit_json(llama / "config.json", **{key: value})
        one_line(lambda: load_config(llama), "config.json", name)
        one_line(lambda: load_model(llama), "config.json", name)


def test_published_oddities_of_token_ids_are_accepted(llama):
    """Bug: strictness that refuses real models: null ids, pad -1, a token that was added without a row for it."""
    edit_json(llama / "config.json", eos_token_id=None, bos_token_id=None, pad_token_id=-1)
    config = load_config(llama)
    assert config.bos_token_id is None
    edit_json(llama / "config.json", eos_token_id=[2, 130], rope_parameters={"partial_rotary_factor": 1.0})
    one_line(lambda: load_config(llama), "eos_token_id holds 130")
    added = {"added_tokens.json": {"<end>": 130}, "tokenizer.json": {"added_tokens": [{"id": 130, "content": "<end>"}]}}
    added["tokenizer_config.json"] = {"added_tokens_decoder": {"130": {"content": "<end>"}}}
    (llama / "generation_config.json").unlink(missing_ok=True)
    for name, content in added.items():
        (llama / name).write_text(json.dumps(content))
        assert load_config(llama).eos_token_ids == (2,)
        (llama / name).unlink()


# ---- EAGLE heads -----------------------------------------------------------------------------------------------

TARGET = ModelConfig.from_hf({**BASE, "model_type": "llama", "num_hidden_layers": 8, "rope_theta": 5e5})
H, I, V, VD = 64, 96, 128, 40
GEOMETRY = {
    "hidden_size": H, "intermediate_size": I, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": V, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def layer_tensors(prefix: str, wide: int, hidden: int = H, heads: int = 4, kv_heads: int = 2, hd: int = 16) -> dict:
    q, kv = heads * hd, kv_heads * hd
    shapes = {f"self_attn.{x}_proj": (q if x == "q" else kv, wide) for x in "qkv"} | {"self_attn.o_proj": (hidden, q)}
    shapes |= {"mlp.gate_proj": (I, hidden), "mlp.up_proj": (I, hidden), "mlp.down_proj": (hidden, I)}
    shapes["post_attention_layernorm"] = (hidden,)
    return {f"{prefix}{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def eagle1(bias: bool = True, **geometry) -> dict:
    head = {"fc.weight": torch.randn(H, 2 * H), **layer_tensors("layers.0.", H, **geometry)}
    head["embed_tokens.weight"] = torch.randn(V, H)
    return head | ({"fc.bias": torch.randn(H)} if bias else {})


def eagle3(prefix: str = "midlayer.", vocab: int = VD, hidden: int = H, taps: int = 3, **geometry) -> dict:
    head = {"fc.weight": torch.randn(hidden, taps * H), **layer_tensors(prefix, 2 * hidden, hidden, **geometry)}
    for name in (f"{prefix}hidden_norm", f"{prefix}input_layernorm", "norm"):
        head[f"{name}.weight"] = torch.randn(hidden)
    head["lm_head.weight"] = torch.randn(vocab, hidden)
    if vocab != V:
        ids = torch.randperm(V)[:vocab].sort().values
        head["d2t"] = ids - torch.arange(vocab)
        head["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return head


def write_head(folder: Path, tensors: dict, config: dict | None, name: str = "pytorch_model.bin") -> Path:
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_layer(read, source: dict, prefix: str) -> None:
    parts = {"attention.qkv": [f"self_attn.{x}_proj" for x in "qkv"], "attention.o": ["self_attn.o_proj"]}
    parts |= {"mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"], "mlp.down": ["mlp.down_proj"]}
    for ours, names in (parts | {"post_norm": ["post_attention_layernorm"]}).items():
        want = torch.cat([source[f"{prefix}{name}.weight"] for name in names])
        assert torch.equal(read.tensors[f"layer.{ours}.weight"], want), ours


@pytest.mark.parametrize(
    ("file", "by_file"), [("pytorch_model.bin", False), ("model.safetensors", False), ("head.pth", True)]
)
def test_eagle1_as_published(tmp_path, file, by_file):
    """The official layout of Vicuna and LLaMA-2 heads; RoPE or eps inherited from the target (theta 5e5) by mistake."""
    source = eagle1()
    folder = write_head(tmp_path / "h", source, GEOMETRY, file)
    read = read_eagle(folder / file if by_file else folder, TARGET)
    config = read.config
    assert (config.version, config.taps, config.fc_bias) == (1, (), True)
    assert not config.has_embed and not config.has_lm_head
    assert (config.layer.rope.theta, config.layer.rms_norm_eps) == (10000.0, 1e-5)
    assert (config.layer.max_position_embeddings, config.layer.vocab_size) == (256, V)
    assert (config.layer.num_attention_heads, config.layer.num_key_value_heads) == (4, 2)
    check_layer(read, source, "layers.0.")
    assert torch.equal(read.tensors["fc.weight"], source["fc.weight"])
    assert torch.equal(read.tensors["fc.bias"], source["fc.bias"])
    assert len(read.tensors) == 7 and read.notes == []


def test_eagle1_llama3_and_qwen2_variants(tmp_path):
    """`bias` of the config read as attention bias, fc.bias decided by config instead of tensors, q/k/v biases lost."""
    config = {**GEOMETRY, "bias": True, "rope_theta": 500000.0, "qkv_bias": False}
    read = read_eagle(write_head(tmp_path / "a", eagle1(bias=False), config), TARGET)
    assert not read.config.fc_bias and not read.config.layer.qkv_bias and read.config.layer.rope.theta == 5e5
    source = eagle1()
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        source[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(rows)
    read = read_eagle(write_head(tmp_path / "b", source, GEOMETRY), TARGET)
    want = torch.cat([source[f"layers.0.self_attn.{name}_proj.bias"] for name in "qkv"])
    assert read.config.layer.qkv_bias and torch.equal(read.tensors["layer.attention.qkv.bias"], want)
    del source["layers.0.self_attn.k_proj.bias"]
    hass = eagle1() | {"layers.0.input_layernorm.weight": torch.randn(H)}  # without its norm it would draft noise
    one_line(lambda: read_eagle(write_head(tmp_path / "d", hass, GEOMETRY), TARGET), "input_layernorm")
    one_line(lambda: read_eagle(write_head(tmp_path / "c", source, GEOMETRY), TARGET), "missing", "k_proj.bias")


def test_geometry_is_the_heads_own(tmp_path):
    """Vicuna-33B (GQA head, MHA target) and Mixtral (dense MHA head, GQA MoE target with eps 1e-5 and theta 1e6). Of a
    narrower head fc reads the target's width, and the embedding must come from the head's file."""
    target = replace(TARGET, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    source = eagle1(heads=4, kv_heads=4)
    config = GEOMETRY | {"model_type": "mixtral", "num_key_value_heads": 4}
    config |= {"rms_norm_eps": 1e-6, "num_local_experts": 8}
    layer = read_eagle(write_head(tmp_path / "mixtral", source, config), target).config.layer
    assert (layer.num_key_value_heads, layer.num_local_experts, layer.rope.theta) == (4, 0, 10000.0)
    assert layer.rms_norm_eps == 1e-6
    config = {k: v for k, v in GEOMETRY.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    source = eagle1(heads=4, kv_heads=1)
    folder = write_head(tmp_path / "vicuna", source, {**config, "max_sequence_length": 2000})
    layer = read_eagle(folder, replace(TARGET, num_key_value_heads=4)).config.layer
    assert (layer.num_key_value_heads, layer.max_position_embeddings) == (1, 2000)
    source, config = eagle3(hidden=32, heads=2), GEOMETRY | {"hidden_size": 32, "num_attention_heads": 2}
    config["target_hidden_size"] = H
    one_line(lambda: read_eagle(write_head(tmp_path / "h", source, config), TARGET), "embed_tokens")
    source["embed_tokens.weight"] = torch.randn(V, 32)
    read = read_eagle(write_head(tmp_path / "h", source, config), TARGET).config
    assert read.has_embed and (read.layer.hidden_size, read.target_hidden_size, read.layer.head_dim) == (32, H, 16)


def test_eagle3_as_published(tmp_path):
    """The offset table read as absolute ids, norms swapped, taps off by one, or assumed to be three."""
    source = eagle3()
    read = read_eagle(write_head(tmp_path / "h", source, {**GEOMETRY, "draft_vocab_size": VD}), TARGET)
    config = read.config
    assert (config.version, config.taps) == (3, (2, 4, 5))
    assert not (config.fc_bias or config.has_embed or config.norm_before_residual or config.norm_output)
    assert config.has_lm_head and config.layer.vocab_size == VD and config.target_vocab_size == V
    check_layer(read, source, "midlayer.")
    assert torch.equal(read.tensors["layer.input_norm.weight"], source["midlayer.input_layernorm.weight"])
    assert torch.equal(read.tensors["layer.hidden_norm.weight"], source["midlayer.hidden_norm.weight"])
    assert torch.equal(read.tensors["draft_ids"], source["t2d"].nonzero().flatten())
    assert read.tensors["draft_ids"].dtype == torch.int64
    full = read_eagle(write_head(tmp_path / "full", eagle3(vocab=V), GEOMETRY), TARGET)
    assert "draft_ids" not in full.tensors and full.config.layer.vocab_size == V
    config = {**GEOMETRY, "eagle_config": {AUX: [2, 4, 6, 8]}}
    assert read_eagle(write_head(tmp_path / "four", eagle3(taps=4), config), TARGET).config.taps == (2, 4, 6, 8)
    shared = eagle3(vocab=V)
    del shared["lm_head.weight"]
    assert not read_eagle(write_head(tmp_path / "shared", shared, GEOMETRY), TARGET).config.has_lm_head


def test_specforge_layout(tmp_path):
    """Exports that carry the target's embedding, a head_dim of their own, aux layers as outputs and EAGLE-3.1 norms."""
    source = eagle3(heads=3, kv_heads=1, hd=32)
    source["embed_tokens.weight"] = torch.randn(V, H)
    source |= {f"fc_norm.{i}.weight": torch.randn(H) for i in range(3)}
    config = GEOMETRY | {"architectures": ["LlamaForCausalLMEagle3"], "num_attention_heads": 3}
    config |= {"num_key_value_heads": 1, "head_dim": 32, "rope_theta": 7e5, "norm_output": True, "draft_vocab_size": VD}
    config["eagle_config"] = {AUX: [1, 3, 7], "use_aux_hidden_state": True}
    read = read_eagle(write_head(tmp_path / "h", source, config, "model.safetensors"), TARGET)
    assert read.config.taps == (2, 4, 8) and "outputs" in read.notes[0]
    assert read.config.kind == "EAGLE-3.1" and read.config.norm_output and not read.config.has_embed
    assert (read.config.layer.head_dim, read.config.layer.rope.theta) == (32, 7e5)
    assert torch.equal(read.tensors["fc_norms.2.weight"], source["fc_norm.2.weight"])
    config["rope_scaling"] = config["rope_parameters"] = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096, "rope_theta": 6e5,
    }  # fmt: skip
    rope = read_eagle(write_head(tmp_path / "h", source, config, "model.safetensors"), TARGET).config.layer.rope
    assert (rope.kind, rope.original_max_positions, rope.theta) == ("llama3", 4096, 6e5)
    config["norm_output"] = False
    assert not read_eagle(write_head(tmp_path / "h", source, config), TARGET).config.norm_output
    # TorchSpec and NeMo mean the same without fc_norm. SpecForge once meant another thing.
    plain = {name: tensor for name, tensor in source.items() if "fc_norm" not in name}
    config["eagle_config"] = {AUX: [2, 4, 7]}
    folder = write_head(tmp_path / "i", plain, config | {"norm_output": True})
    read = read_eagle(folder, TARGET)
    assert read.config.norm_output and "norm_output=false" in read.notes[1]
    assert read.config.taps == (2, 4, 7) and f"{AUX}=[3, 5, 8]" in read.notes[0]
    read = read_eagle(folder, TARGET, {"norm_output": "false", AUX: "[1,2,3]"})
    assert not read.config.norm_output and read.config.taps == (1, 2, 3) and not read.notes
    one_line(lambda: read_eagle(folder, TARGET, {AUX: "[1, 2]"}), "reads 3 layers", f"config {AUX}=", "[64, 192]")


def speculators(**changes) -> dict:
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**GEOMETRY, "model_type": "llama", "rope_parameters": {"rope_theta": 4e5}},
        "draft_vocab_size": VD,
        "target_hidden_size": H,
        "eagle_aux_hidden_state_layer_ids": None,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": []},
    }
    return config | changes


def test_speculators_layout(tmp_path):
    """The nested config ignored, or stronger than --eagle-config; norm_before_residual false by default; the head's own
    embedding replaced by the target's."""
    source = eagle3("layers.0.")
    source |= {"embed_tokens.weight": torch.randn(V, H), "input_norm.weight": torch.randn(3 * H)}
    changes = {"norm_before_fc": True, "norm_output": True}
    read = read_eagle(write_head(tmp_path / "h", source, speculators(**changes), "model.safetensors"), TARGET)
    config = read.config
    assert config.norm_before_residual and config.norm_before_fc and config.norm_output and config.has_embed
    assert config.layer.rope.theta == 4e5 and config.taps == (2, 4, 5)
    given = {"rope_theta": "10000", "norm_before_residual": "false", AUX: "[2,3,4]"}
    other = read_eagle(tmp_path / "h", TARGET, given).config
    assert other.layer.rope.theta == 10000.0 and not other.norm_before_residual and other.taps == (2, 3, 4)
    check_layer(read, source, "layers.0.")
    assert torch.equal(read.tensors["embed_tokens.weight"], source["embed_tokens.weight"])
    changes[AUX] = [1, 3, 5]  # these name the layers that the states enter, whatever the first one is
    read = read_eagle(write_head(tmp_path / "i", source, speculators(**changes), "model.safetensors"), TARGET)
    assert read.config.taps == (1, 3, 5) and not read.notes
    assert torch.equal(read.tensors["input_norm.weight"], source["input_norm.weight"])
    source.pop("input_norm.weight")
    changes = {"norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 3, 8]}
    read = read_eagle(write_head(tmp_path / "i", source, speculators(**changes)), TARGET)
    assert not read.config.norm_before_residual and read.config.taps == (2, 3, 8)
    folder = write_head(tmp_path / "j", source, speculators(norm_before_fc=True))
    one_line(lambda: read_eagle(folder, TARGET), "norm_before_fc")
    source |= {f"layers.0.self_attn.{x}_norm.weight": torch.randn(16) for x in "qk"}
    read = read_eagle(write_head(tmp_path / "k", source, speculators()), TARGET)
    assert read.config.layer.qk_norm
    assert torch.equal(read.tensors["layer.attention.q_norm.weight"], source["layers.0.self_attn.q_norm.weight"])


@pytest.mark.parametrize("nested", (False, True))
def test_the_window_of_a_head_is_read_and_written(tmp_path, nested):
    """A head that was trained with a window, and that attends to the whole text here; a window of another layer, or one
    that a switch of Qwen's turns off."""
    source = eagle3("layers.0.")
    for number, (given, window) in enumerate((
        ({"sliding_window": 300}, 300), ({"sliding_window": None}, 0), ({}, 0),
        ({"sliding_window": 300, "layer_types": ["sliding_attention"]}, 300),
        ({"sliding_window": 300, "layer_types": ["full_attention"]}, 0),
        ({"sliding_window": 300, "use_sliding_window": False}, 0),
    )):  # fmt: skip
        config = speculators() if nested else {**GEOMETRY, "draft_vocab_size": VD}
        (config["transformer_layer_config"] if nested else config).update(given)
        read = read_eagle(write_head(tmp_path / f"h{number}", source, config), TARGET)
        assert read.config.layer.windows == (window,)
        save_eagle(read.config, read.tensors, tmp_path / f"s{number}")
        assert read_eagle(tmp_path / f"s{number}", TARGET).config.layer.windows == (window,)
    wrong = {**GEOMETRY, "draft_vocab_size": VD, "sliding_window": -4}
    one_line(lambda: read_eagle(write_head(tmp_path / "w", source, wrong), TARGET), "sliding_window")


def same_tensors(a, b) -> bool:
    """Whether two heads have the same tensors."""
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


PREFIXED = {  # what frameworks and old exports call the tensors of a head
    prefix: lambda name, prefix=prefix: f"{prefix}{name}"
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.model.", "_orig_mod.module.", "draft_model.")
} | {"old speculators": lambda name: name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.")}


@pytest.mark.parametrize("names", PREFIXED)
def test_heads_with_other_names_are_read(tmp_path, names):
    """Catches `no matrix fc.weight` for a head that was wrapped or exported by old programs, and a refusal of what its
    optimizer needs."""
    source = eagle3("layers.0.")
    want = read_eagle(write_head(tmp_path / "a", source, GEOMETRY), TARGET)
    renamed = {PREFIXED[names](name): t for name, t in source.items()}
    state = {"model_state_dict": renamed, "optimizer_state_dict": {"state": {0: {"step": 3}}}, "epoch": 2}
    for i, saved in enumerate((renamed, state, {"state_dict": renamed, "step": 1})):
        assert same_tensors(read_eagle(write_head(tmp_path / f"b{i}", saved, GEOMETRY), TARGET), want)
    one_line(lambda: read_eagle(write_head(tmp_path / "c", {"net": source}, GEOMETRY), TARGET), "under 'net'")
    source["model.fc.weight"] = source["fc.weight"]
    one_line(lambda: read_eagle(write_head(tmp_path / "d", source, GEOMETRY), TARGET), "fc.weight", "prefix")


def test_bare_head_file(tmp_path):
    """A head.pth without a config: refused, or silently given the target's RoPE base."""
    folder = write_head(tmp_path / "bare", eagle1(kv_heads=1), None, "head.pth")
    read = read_eagle(folder / "head.pth", TARGET)
    layer = read.config.layer
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 1, 16)
    assert (layer.rope.theta, layer.rms_norm_eps, layer.max_position_embeddings) == (10000.0, 1e-6, 512)
    assert len(read.notes) == 1 and "rope_theta 10000" in read.notes[0] and "head_dim 16" in read.notes[0]
    given = {"rope_theta": "500000", "rms_norm_eps": "1e-5", "head_dim": "32", "max_position_embeddings": "99"}
    folder = write_head(tmp_path / "wide", eagle1(heads=2, kv_heads=1, hd=32), None, "head.pth")
    read = read_eagle(folder / "head.pth", TARGET, given)
    layer = read.config.layer
    assert (layer.num_attention_heads, layer.head_dim, layer.rope.theta, layer.rms_norm_eps) == (2, 32, 5e5, 1e-5)
    assert layer.max_position_embeddings == 99 and "rope_theta" not in read.notes[0]
    shutil.copy(write_head(tmp_path / "x", {}, {**GEOMETRY, "num_hidden_layers": 8}) / "config.json", folder)
    read = read_eagle(folder / "head.pth", TARGET, given)  # the target's config lies beside it
    assert read.config.layer == layer and any("ignored" in note for note in read.notes)
    one_line(lambda: read_eagle(folder / "head.pth", TARGET, {"rope": "1"}), "rope", "known")
    one_line(lambda: read_eagle(folder / "head.pth", TARGET, {"rope_theta": "big"}), "rope_theta=big")
    one_line(lambda: read_eagle(folder / "head.pth", TARGET, {"rope_theta": '"big"'}), "rope_theta")


def test_heads_for_another_target_are_refused(tiny_checkpoint, tmp_path):
    """A head that fits by accident or dies in a matmul: shapes, vocabulary, tables and layers must match the target. An
    error about layers where a whole model is given for a head."""
    whole = tiny_checkpoint("llama")
    one_line(lambda: read_eagle(whole, TARGET), "a whole model", "--draft-checkpoint")
    one_line(lambda: load(whole, eagle=str(whole), ctx=64), "a whole model")
    big = replace(TARGET, hidden_size=80, head_dim=20)
    one = write_head(tmp_path / "one", eagle1(), GEOMETRY)
    three = write_head(tmp_path / "three", eagle3(), GEOMETRY)
    one_line(lambda: read_eagle(one, big), "does not fit", "[64, 128]", "[80, 160]", "hidden_size 64", "--checkpoint")
    one_line(lambda: read_eagle(three, big), "does not fit", "[64, 192]", "[80, 240]", "3 x hidden_size 80")
    one_line(lambda: read_eagle(one, replace(TARGET, vocab_size=200)), "128", "200")
    one_line(lambda: read_eagle(three, replace(TARGET, vocab_size=200)), "128", "200")
    short = replace(TARGET, num_hidden_layers=3, windows=())
    assert read_eagle(three, short).config.taps == (0, 1, 2)  # no layer is named, and SafeAILab's three are these
    llama2 = {**GEOMETRY, "hidden_size": 4096}
    one_line(lambda: read_eagle(write_head(tmp_path / "x", {"fc.weight": torch.ones(3)}, llama2), TARGET), "fc.weight")
    odd = eagle3()
    odd["fc.weight"] = torch.randn(H, H)
    one_line(lambda: read_eagle(write_head(tmp_path / "y", odd, GEOMETRY), TARGET), "[64, 64]", "[64, 192]")
    odd = eagle1()
    odd["layers.0.self_attn.q_proj.weight"] = torch.randn(64, 50)
    one_line(lambda: read_eagle(write_head(tmp_path / "z", odd, GEOMETRY), TARGET), "neither")


def test_layers_that_a_head_does_not_name_are_told(tmp_path):
    """Bug: a head whose config.json names no layers is read with others than it was trained with, and nobody is told. An
    empty list stands for the usual ones, and a head of a model that sees may rotate as that model."""
    named = GEOMETRY | {"draft_vocab_size": VD, "eagle_config": {AUX: [2, 4, 5]}}
    assert read_eagle(write_head(tmp_path / "h", eagle3(), named), TARGET).notes == []
    mrope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    for config in (GEOMETRY | {"draft_vocab_size": VD}, named | {"eagle_config": {AUX: []}} | mrope):
        read = read_eagle(write_head(tmp_path / "h", eagle3(), config), TARGET)
        assert read.config.taps == (2, 4, 5) and read.config.layer.rope.kind == "default"
        assert len(read.notes) == 1 and "assumed [2, 4, 5]" in read.notes[0] and AUX in read.notes[0]


@pytest.mark.parametrize(("more", "words"), [
    ({"parallel_drafting": True}, ("P-EAGLE",)), ({"speculators_model_type": "mtp"}, ("'mtp'",)),
    ({"speculators_model_type": "peagle", "transformer_layer_config": GEOMETRY}, ("P-EAGLE",)),
])  # fmt: skip
def test_heads_of_other_kinds_are_not_read_as_eagle(tmp_path, more, words):
    """Bug: a head of another kind, whose tensors have the shapes of EAGLE-3, drafts noise."""
    config = GEOMETRY | {"draft_vocab_size": VD} | more
    one_line(lambda: read_head(write_head(tmp_path / "h", eagle3(), config), TARGET), "not implemented", *words)
    tensors = eagle3() | {"mask_hidden": torch.ones(1, 1, 3 * H)}
    one_line(lambda: read_head(write_head(tmp_path / "h", tensors, GEOMETRY), TARGET), "P-EAGLE")


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop("d2t"), ("no d2t",)),
    (lambda t: t.update(d2t=t["d2t"] + torch.arange(VD)), ("d2t", "offsets")),  # absolute ids where offsets belong
    (lambda t: t.update(d2t=t["d2t"] + 100), ("d2t",)),
    (lambda t: t.update(d2t=t["d2t"].float()), ("d2t", "float32")),
    (lambda t: t.update(d2t=t["d2t"][:-1]), ("d2t", "[39]")),
    (lambda t: t.update(t2d=t["t2d"].roll(1)), ("t2d",)),
    (lambda t: t.update(t2d=t["t2d"][:-9]), ("t2d",)),
    (lambda t: t.update(t2d=torch.ones(V, dtype=torch.float32)), ("t2d",)),
    (lambda t: t.pop("norm.weight"), ("missing", "norm.weight")),
    (lambda t: t.update(extra=torch.ones(2)), ("unexpected", "extra")),
    (lambda t: t.update({"lm_head.weight": torch.randn(VD, 32)}), ("lm_head.weight", "[40, 32]")),
    (lambda t: t["midlayer.mlp.up_proj.weight"].fill_(float("nan")), ("up_proj", "NaN")),
    (lambda t: t.update({"midlayer.self_attn.k_proj.weight": torch.randn(48, 2 * H)}), ("k_proj", "[32, 128]")),
    (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.randn(2, 2)}), ("more than one decoder layer",)),
    (lambda t: t.update({"embed_layernorm.weight": torch.randn(H)}), ("embed_layernorm", "not implemented")),
    (lambda t: t.update({"fc_norm.0.weight": torch.randn(H)}), ("missing", "fc_norm.1")),
    (lambda t: t.update({"midlayer.mlp.up_proj.bias": torch.randn(I)}), ("unexpected", "up_proj.bias")),
    (lambda t: t.pop("lm_head.weight"), ("LM head", "40 draft tokens")),
    *[({AUX: ids}, ("layer",)) for ids in ("x", {}, [2.0, 3, 4], [True, 2, 3], [2, 3, 9], [-1, 2, 3], [4, 3, 2],
                                           [1, 4, 8], {"a": 1})],  # outside the target, unordered, of another type
])  # fmt: skip
def test_broken_heads(tmp_path, change, words):
    """A damaged or unusual head that loads anyway and only lowers acceptance, which no output check would show."""
    source, config = eagle3(), {**GEOMETRY, "draft_vocab_size": VD}
    if isinstance(change, dict):
        config |= change
    else:
        change(source)
    one_line(lambda: read_eagle(write_head(tmp_path / "h", source, config), TARGET), *words)


@pytest.mark.parametrize("kind", ["one", "three", "full", "speculators"])
def test_save_eagle_round_trip(tmp_path, kind):
    """Our export read back differently: lost switches, ids turned into offsets twice, taps shifted, or a t2d mask of a
    guessed length."""
    if kind == "one":
        source, config = eagle1(), GEOMETRY
    elif kind == "speculators":
        source, config = eagle3("layers.0."), speculators(norm_output=True, norm_before_fc=True)
        source |= {"embed_tokens.weight": torch.randn(V, H), "input_norm.weight": torch.randn(3 * H)}
    else:
        source, config = eagle3(vocab=V if kind == "full" else VD), GEOMETRY
    read = read_eagle(write_head(tmp_path / "a", source, config), TARGET)
    head = replace(read.config, taps=(1, 4, 8)) if read.config.taps else read.config
    save_eagle(head, read.tensors, tmp_path / "b")
    again = read_eagle(tmp_path / "b", TARGET)
    assert again.config == head and again.notes == [] and same_tensors(again, read)
    stored = load_file(tmp_path / "b" / "model.safetensors")
    prefix = "layers.0." if kind == "one" else "midlayer."
    theirs = "layers.0." if kind == "speculators" else prefix
    assert torch.equal(stored[f"{prefix}self_attn.k_proj.weight"], source[f"{theirs}self_attn.k_proj.weight"])
    if "d2t" in source:
        one_line(lambda: save_eagle(replace(head, target_vocab_size=0), read.tensors, tmp_path), "target_vocab_size")
        assert torch.equal(stored["d2t"], source["d2t"]) and torch.equal(stored["t2d"], source["t2d"])


@pytest.mark.parametrize("more", [-2, 2])
@pytest.mark.parametrize("kind", ["one", "three", "full", "speculators", "int8", "int4"])
def test_a_head_made_for_another_padding_of_the_vocabulary(tmp_path, kind, more):
    """A head of Qwen2.5-3B (151,936 rows) on one of 7B (152,064): refused, or tables of the wrong size."""
    source = eagle1() if kind == "one" else eagle3("layers.0.", VD if kind in ("three", "speculators") else V)
    if "d2t" in source:
        source |= {"d2t": torch.zeros(VD, dtype=torch.int64), "t2d": torch.arange(V) < VD}
    if kind in ("speculators", "int8", "int4"):
        source["embed_tokens.weight"] = torch.randn(V, H)
    folder = write_head(tmp_path / "h", source, speculators() if kind in ("speculators", "int8", "int4") else GEOMETRY)
    if kind in ("int8", "int4"):
        config, tensors, _ = quantize_head(folder, TARGET, spec := QuantSpec(kind, 32, lm_head=kind))
        save_quantized(config, tensors, spec, folder := tmp_path / "q")
    own, file = read_eagle(folder, TARGET), read_eagle(folder, replace(TARGET, vocab_size=V + more))
    assert "another padding" in file.notes[-1] and file.config.target_vocab_size == V + more
    known, held = min(V, V + more), dict(file.tensors)
    drafted = held.pop("draft_ids", None)
    if kind in ("full", "int8", "int4"):
        assert file.config.layer.vocab_size == known
        assert (drafted is None) if more < 0 else drafted.equal(torch.arange(V))
    for name, tensor in held.items():
        rows = V + more if name == "embed_tokens.weight" else file.config.layer.vocab_size
        whole, axis = own.tensors[name], 1 if kind == "int4" and name == "lm_head.scales" else 0
        assert tensor.shape[axis] == (rows if name.startswith(("embed", "lm_head")) else whole.shape[axis])
        same = min(tensor.shape[axis], whole.shape[axis])
        assert torch.equal(tensor.narrow(axis, 0, same), whole.narrow(axis, 0, same))
    with torch.device("meta"):
        head = EagleHead(file.config, build_transformer(replace(TARGET, vocab_size=V + more)), drafted)
    assert head.vocab_size == {"one": V + more, "three": VD, "speculators": VD}.get(kind, known)


# ---- org/name in the Hugging Face cache ----------------------------------------------------------------------------


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a working folder in which no model lies."""
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


def cached(cache: Path, name: str, source: Path) -> Path:
    """Put the files of `source` into a cache, as the hub's client does: a snapshot of links to blobs."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    for i, file in enumerate(p for p in source.iterdir() if p.is_file()):
        shutil.copy(file, folder / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    return snapshot


def test_org_name_is_the_snapshot_in_the_cache(hub, tiny_checkpoint, tmp_path):
    """A model that was downloaded already and must be downloaded again, or a folder here that the cache shadows. A
    traceback, or no way out, for one that is missing or half there; a commit that leads out of the cache."""
    source, get = tiny_checkpoint("llama"), "hf download org/name"
    one_line(lambda: Checkpoint.open("org/name"), "org/name is no path here", str(hub), get)
    snapshot = cached(hub, "org/na.me-7B_x", source)
    assert Checkpoint.open("org/na.me-7B_x").directory == snapshot
    assert same_weights(load_model("org/na.me-7B_x"), load_model(source))
    head = cached(hub, "org/head", write_head(tmp_path / "head", eagle1(), GEOMETRY))
    assert read_eagle("org/head", TARGET).config == read_eagle(head, TARGET).config
    shutil.copytree(tiny_checkpoint("llama-tied"), "org/na.me-7B_x")
    assert Checkpoint.open("org/na.me-7B_x").directory == Path("org/na.me-7B_x")
    main = hub / "models--org--name" / "refs" / "main"
    shutil.copytree(cached(hub, "org/name", source), hub / "models--org--name" / "abcdef12")
    for text in (b"../abcdef12", b"abcdef12abcdef12", b"..", b"", b"\xff" * 40, str(hub).encode()):
        main.write_bytes(text)
        one_line(lambda: Checkpoint.open("org/name"), "no snapshot of main", get)
    main.unlink()
    one_line(lambda: Checkpoint.open("org/name"), "no snapshot of main", get)


def test_the_cache_lies_where_the_hub_s_client_puts_it(hub, monkeypatch):
    """Another folder than the one that the user's other programs fill."""
    assert cache_folder() == hub
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/h/.cache/huggingface/hub")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/y")
    assert cache_folder() == Path("/h/y/hub")


@pytest.mark.parametrize(
    "name", ["../x/y", "../x", "x/..", "./org/name", "/x/y", "a/b/c", "org/name/", "o--r/g", "name"]
)
def test_other_names_are_paths_and_never_looked_up(name, hub):
    """A hostile name that escapes the cache, or a path with a spelling mistake that is searched on the hub."""
    (hub / "models--..--x").mkdir(parents=True)
    one_line(lambda: Checkpoint.open(name), "is not a directory")


# ---- scripts.convert -----------------------------------------------------------------------------------------


def test_convert_writes_our_format_from_every_source(tiny_checkpoint, tmp_path, capsys):
    """A converted model that differs from its source, or loses its tokenizer; a dtype that is ignored, or a file whose
    header names another one than its bytes."""
    want = load_model(tiny_checkpoint("llama"))
    write_meta(load_file(tiny_checkpoint("llama") / "model.safetensors"), tmp_path / "meta", 2, 1)
    hub = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "hub"))
    torch.save(load_file(hub / "model.safetensors"), hub / "pytorch_model.bin")
    (hub / "model.safetensors").unlink()
    for source in (tmp_path / "meta", hub):
        (source / "tokenizer.model").write_bytes(b"abc")
        (source / "private.txt").write_bytes(b"x")
        out = tmp_path / f"{source.name}-out"
        assert convert.main([str(source), str(out)]) == 0
        assert capsys.readouterr().out.strip() == str(out)
        assert same_weights(load_model(out), want)
        files = {f.name for f in out.iterdir()} - {"generation_config.json"}
        assert files == {"config.json", "model.safetensors", "tokenizer.model"}
    (tmp_path / "meta" / "tokenizer.model").rename(tmp_path / "tokenizer.model")  # Meta's place for it
    assert convert.main([str(tmp_path / "meta"), str(tmp_path / "up")]) == 0
    assert (tmp_path / "up" / "tokenizer.model").read_bytes() == b"abc"
    capsys.readouterr()
    assert convert.main([str(hub), str(out)]) == 2 and "already holds" in capsys.readouterr().err
    assert convert.main([str(tmp_path / "no"), str(tmp_path / "x")]) == 3
    assert capsys.readouterr().err.startswith("error  ")
    for name in ("bfloat16", "float16", "float64"):
        assert convert.main([str(hub), str(tmp_path / name), "--dtype", name]) == 0
        other, dtype = load_model(tmp_path / name), getattr(torch, name)
        assert other.dtype == dtype and same_weights(other, load_model(hub, dtype=dtype))
    with pytest.raises(SystemExit) as error:
        convert.main([str(tmp_path / "only-one")])
    assert error.value.code == 2


def test_convert_eagle(tiny_checkpoint, tmp_path, capsys):
    """A pickled bare head converted with a lost override."""
    head = write_head(tmp_path / "h", eagle1(), None, "head.pth") / "head.pth"
    target = tiny_checkpoint("llama")
    args = ["--eagle", str(head), "--target", str(target), str(tmp_path / "out"), "--eagle-config"]
    assert convert.main([*args, "rope_theta=5e5"]) == 0
    assert "assumed" in capsys.readouterr().err
    read = read_eagle(tmp_path / "out", load_config(target))
    assert read.config.layer.rope.theta == 5e5 and read.notes == []
    assert convert.main([*args[:4], str(tmp_path / "two"), "--eagle-config", "rope_theta"]) == 2


@pytest.mark.parametrize(
    "family",
    "ernie4_5 exaone4 gemma gemma2 gemma3 gemma4 gemma4-values gemma4-moe glm4 glm4_moe gpt_oss granite".split()
    + "hunyuan ministral3 olmo2 olmo3 olmoe phi3-partial qwen2_moe qwen3_moe seed_oss smollm3".split(),
)
@pytest.mark.parametrize("quant", [None, "int8"])
def test_a_family_decodes_with_every_kernel_and_draft(tiny_checkpoint, family, quant):
    """Catches a fact of a family that the eager code knows and a faster path forgets: a layer without rotary positions,
    a multiplier, experts of another width. Floats give the tokens of transformers, and drafts change no token."""
    kernel = "reference" if cpu.problem() else "cpu"
    engine = load(tiny_checkpoint(family), ctx=128, dtype="float32", device="cpu", kernels=kernel, quant=quant)
    drafters = [{"eagle": f"random:{version}", "tree": "dynamic:8,3,4"} for version in (1, 3)]
    if quant:  # a random head would be quantized by the same name
        drafters = [{"drafter": "ngram", "tree": tree} for tree in ("chain:4", "paper25")]
    engines = [engine, *(build_engine(engine, options, 128) for options in drafters)]
    for seed, temperature in enumerate((0.0, 1.0)):
        prompt = torch.randint(3, 120, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        params = SamplingParams(temperature, max_new_tokens=16, seed=seed, stop_ids=(2**31 - 1,))
        texts = [one.generate(prompt, params).run()[0].token_ids for one in engines]
        assert texts[0] == texts[1] == texts[2]
        if not quant and not temperature:
            rows = torch.tensor([prompt + texts[0][:-1]])
            assert build_hf(family)(rows).logits[0, 8:].argmax(-1).tolist() == texts[0]
