"""Model families: MXFP4 as transformers reads it, refusals that name the family, and a family added in a few lines."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import BASE, DELTA, FAMILIES, MINISTRAL3, WINDOWS, build_hf, rope
from safetensors.torch import load_file, save_file
from test_model import run, tokens_of
from tiny import load_model, one_line

from decoding.params import SamplingParams
from engine.load import load
from families.config import ModelConfig
from families.table import FAMILIES as SUPPORTED
from kernels import cpu
from weights.checkpoint import Checkpoint
from weights.hf import save_hf
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
    """Catches a swapped half of a byte, a scale of another group, and gate rows that stay between up rows. For the CPU
    kernels: experts that become floats, which take eight times the memory, and a table of other values."""
    folder, hf = gpt_oss
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.quantization is None and "became floats" in checkpoint.notes[0]
    model, mlp = checkpoint.load(dtype=torch.float32), hf.model.layers[1].mlp.experts
    theirs = mlp.gate_up_proj.mT
    assert torch.equal(model.layers[1].mlp.gate_up, torch.cat((theirs[:, 0::2], theirs[:, 1::2]), 1))
    assert torch.equal(model.layers[1].mlp.down, mlp.down_proj.mT)
    tokens = tokens_of(30)
    want = hf(tokens).logits
    assert (run(model, tokens, 16) - want).abs().max() < 1e-4
    if cpu.problem():
        return
    engine = load(folder, kernels="cpu", dtype="float32", ctx=64, activations="float")
    experts = engine.model.layers[0].mlp
    assert engine.model.quant == "int4 (mxfp4)" and not Checkpoint.open(folder, layout="tiles").notes
    held = experts.gate_up.packed.weight.nbytes + experts.down.packed.weight.nbytes
    assert held == 4 * 96 * 64 * 3 * 4.5 / 8  # 4 bits, and 16 for the scale of 32 values
    with engine.backend.active():
        assert (run(engine.model, tokens, 16) - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    "family", "gemma3 gemma2 gemma4 gemma4-moe glm4 glm4_moe gpt_oss granite hunyuan olmo2 qwen2_moe".split()
)
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


# ---- the text part of models that read images, too ---------------------------------------------------------------------

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = SMALL | {"image_size": 28, "patch_size": 14}
GEMMA_EYES = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
EYES = {"depth": 1, "num_heads": 2}
QWEN_EYES = EYES | {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}
DEEP_EYES = QWEN_EYES | {"deepstack_visual_indexes": [0]}
TEXT = BASE | {"head_dim": 32}
YARN = {"model_type": "ministral3", **rope("yarn", 1e4, factor=4.0, **MINISTRAL3)}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
INTERLEAVED = MROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
# name -> (transformers' class, text_config, vision_config, what else)
SEEING = {
    "gemma3": ("Gemma3", TEXT | WINDOWS | {"query_pre_attn_scalar": 32}, PATCHES, {"mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4", BASE | FAMILIES["gemma4"][1], GEMMA_EYES, {"audio_config": SMALL}),
    "gemma4_unified": ("Gemma4Unified", BASE | FAMILIES["gemma4_unified"][1], None, {}),
    "qwen3_5": ("Qwen3_5", BASE | DELTA, QWEN_EYES, {}),
    "mistral3": ("Mistral3", TEXT | {"model_type": "mistral", "sliding_window": None}, PATCHES, {}),
    "mistral3-untied": ("Mistral3", TEXT | YARN, PATCHES, {"tie_word_embeddings": False}),
    "qwen3_vl": ("Qwen3VL", TEXT | {"rope_parameters": INTERLEAVED}, DEEP_EYES, {}),
    "qwen3_vl-tied": ("Qwen3VL", TEXT, DEEP_EYES, {"tie_word_embeddings": True}),
    "qwen2_5_vl": ("Qwen2_5_VL", BASE | {"rope_parameters": MROPE}, QWEN_EYES, {}),
    "qwen2_vl": ("Qwen2VL", BASE | {"rope_parameters": MROPE}, {**EYES, "embed_dim": 32, "hidden_size": 64}, {}),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """seeing(name) -> (a model of transformers that reads images, the folder that it saved)."""

    @functools.cache
    def make(name: str):
        transformers = pytest.importorskip("transformers")
        cls, text, vision, more = SEEING[name]
        config = getattr(transformers, f"{cls}Config")(text_config=text, vision_config=vision, **more)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            hf = getattr(transformers, f"{cls}ForConditionalGeneration")(config).eval().requires_grad_(False)
            for parameter in hf.model.language_model.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        folder = tmp_path_factory.mktemp(name)
        hf.save_pretrained(folder)
        return hf, folder

    return make


@pytest.mark.parametrize("name", SEEING)
def test_the_text_model_beside_an_image_encoder_equals_transformers(seeing, tmp_path, name):
    """Catches a setting of another part, a tied head that is taken for a lost one, positions of images, and a text model
    that cannot be written as one of its own. The folder's image encoder is left out, and one note says so."""
    hf, folder = seeing(name)
    checkpoint, tokens = Checkpoint.open(folder), tokens_of(40)
    assert [note for note in checkpoint.notes if "images" in note] == checkpoint.notes and len(checkpoint.notes) == 1
    model = checkpoint.load(dtype=torch.float32)
    want = hf(tokens).logits
    assert want.std() > 0.3 and (run(model, tokens, 16) - want).abs().max() < 1e-4 * want.std()
    engine = load(folder, ctx=64, dtype="float32", kernels="reference")
    drafting = load(folder, ctx=64, dtype="float32", kernels="reference", drafter="ngram", tree="chain:3")
    params = SamplingParams(max_new_tokens=20, stop_ids=(127,))
    texts = [one.generate(tokens[0, :9].tolist(), params).run()[0].token_ids for one in (engine, drafting)]
    greedy = hf.generate(tokens[:, :9], max_new_tokens=20, do_sample=False, eos_token_id=127)[0, 9:].tolist()
    assert texts == [greedy, greedy]
    save_hf(model, tmp_path)
    assert not Checkpoint.open(tmp_path).notes
    transformers = pytest.importorskip("transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again(tokens).logits - want).abs().max() < 1e-4 * want.std()


# Where files have the text model, the LM head and an image encoder: transformers 4 and 5, and models without a head.
LAYOUTS = [
    ("language_model.model.", "language_model.lm_head.", "vision_tower.vision_model."),
    ("model.language_model.", "lm_head.", "model.visual."),
    ("model.", "lm_head.", "visual."),
    ("language_model.", "lm_head.", "vision_tower."),
    ("_orig_mod.model.language_model.", "_orig_mod.lm_head.", "_orig_mod.model.visual."),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flat", [False, True])
def test_every_layout_of_such_a_folder_is_read(seeing, tmp_path, layout, flat):
    """Catches names of one version of transformers alone, a layer of the encoder that is taken for one of the text, and
    settings that stand beside the encoder's, where early files have them."""
    hf, folder = seeing("qwen2_5_vl")
    text, head, eyes = layout
    tensors = {text + name: t for name, t in hf.model.language_model.state_dict().items()}
    tensors[f"{head}weight"] = hf.lm_head.weight
    tensors |= {f"{eyes}layers.0.norm.weight": torch.ones(3), f"{eyes}embed_tokens.weight": torch.ones(3)}
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    if flat:
        raw = raw.pop("text_config") | raw
        raw |= {"rope_parameters": None, "rope_theta": 1e4}
        raw["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 2, 2]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, want = load_model(tmp_path, dtype=torch.float32), load_model(folder, dtype=torch.float32)
    assert replace(found.config, dtype="") == replace(want.config, dtype="")
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), want.parameters(), strict=True))


# ---- config.json -------------------------------------------------------------------------------------------------------

GEMMA4 = {"model_type": "gemma4_text", "head_dim": 16, "num_hidden_layers": 6}
ODD = {"partial_rotary_factor": 0.5, "hidden_act": "relu", "hidden_size": None}  # the family is named before these
ERRORS = [  # what differs from a config of LLaMA, and a word of the error
    ({"model_type": "gpt2"}, "model_type"), ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ({"architectures": 7}, "architectures"), ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"), ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_attention_heads": 3}, "hidden_size"), ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 17}, "head_dim"), ({"vocab_size": True}, "vocab_size"), ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"), ({"hidden_act": "gelu"}, "hidden_act"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype"), ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"pretraining_tp": 2}, "pretraining_tp"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "original_max_position_embeddings"),
    ({"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 9}}, "short_factor"),
    ({"model_type": "phi3", "partial_rotary_factor": 0.45}, "partial_rotary_factor"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"rope_scaling": [1]}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
    ({"rope_scaling": {"type": "linear"}}, "factor"), ({"rope_theta": 0.5}, "rope_theta"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "rope_theta"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**30}}, "original_max"),
    ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, "layer_types": 3}, "layer_types"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
    (ODD | {"model_type": "glm"}, "model_type = 'glm' is not supported"), (ODD | {"model_type": "llama4"}, "images"),
    (ODD | {"model_type": "falcon_h1"}, "its recurrent layers are of a kind that is not implemented"),
    (ODD | {"model_type": "deepseek_v3"}, "latent attention"),
    ({"model_type": "mistral3", "text_config": {**BASE, "model_type": "mistral4"}}, "model_type = 'mistral4'"),
    ({"model_type": "qwen3_vl_moe"}, "images"), ({"model_type": "gemma3", "text_config": 3}, "text_config"),
    ({"model_type": "qwen3_vl", "hidden_size": None}, "hidden_size"),
    ({"model_type": "glm4_moe", "moe_intermediate_size": 48, "n_group": 2}, "n_group"),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
    ({"model_type": "glm4_moe", "moe_intermediate_size": 48, "norm_topk_prob": False}, "norm_topk_prob"),
    ({"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn", "factor": 4, "llama_4_scaling_beta": 0.1}},
     "original_max_position_embeddings"),
]  # fmt: skip
ERRORS += [(GEMMA4 | changes, word) for changes, word in [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"), ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
    ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input"), ({"per_layer_config": 3}, "per_layer_config"),
    ({"per_layer_config": {"5": {"intermediate_size": 9}}}, "per_layer_config of layer 5"),
    ({"per_layer_config": {"2": {"head_dim": 64}}}, "per_layer_config of layer 2"),
    ({"enable_moe_block": True}, "num_experts"), ({"global_head_dim": 33}, "head_dim"),
]]  # fmt: skip


@pytest.mark.parametrize(("changes", "word"), ERRORS)
def test_config_errors_name_the_key(changes, word):
    """Catches a config value that is ignored, coerced, or ends in a traceback far away from its cause; a key that changes
    what is computed and is not implemented; and an error about a key where the family itself is refused."""
    one_line(lambda: ModelConfig.from_hf({**BASE, "model_type": "llama", **changes}), word)


def test_what_a_folder_of_gemma_3_leaves_out_is_what_transformers_assumes():
    """Catches defaults of another family: the published text_config of the 4B model has these five keys."""
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    ours = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    theirs = transformers.Gemma3Config(text_config=text).text_config
    same = "num_attention_heads num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps".split()
    assert [getattr(ours, key) for key in same] == [getattr(theirs, key) for key in same]
    assert ours.tie_word_embeddings and ours.attention_multiplier == theirs.query_pre_attn_scalar**-0.5
    assert [bool(w) for w in ours.windows] == [kind == "sliding_attention" for kind in theirs.layer_types]
    ropes = theirs.rope_parameters
    assert (ours.rope.theta, ours.rope.factor) == (ropes["full_attention"]["rope_theta"], 8.0)
    assert ours.window_rope.theta == ropes["sliding_attention"]["rope_theta"] and ours.eos_token_ids == (1, 106)


def test_what_a_config_of_gemma_4_leaves_out_is_what_transformers_assumes():
    """Catches defaults of another family: published config.json files leave out much."""
    transformers, raw = pytest.importorskip("transformers"), BASE | GEMMA4
    keys_as_values = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    for changes in ({}, keys_as_values, {"layer_types": ["sliding_attention"] * 6}):
        ours = ModelConfig.from_hf(raw | changes)
        theirs = transformers.Gemma4TextConfig(**{k: v for k, v in (raw | changes).items() if k != "model_type"})
        layers = theirs.per_layer_config
        assert [ours.heads_of(i) for i in range(6)] == [(c.num_key_value_heads, c.head_dim) for c in layers]
        assert [bool(w) for w in ours.windows] == [kind == "sliding_attention" for kind in theirs.layer_types]
        assert (ours.token_inputs, max(ours.windows), ours.logits_cap) == (256, theirs.sliding_window, 0)
        ropes = theirs.rope_parameters
        assert [r.theta for r, _ in ours.ropes] == [
            ropes[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")
        ]
        assert ours.rope.kind == "proportional" and ours.rope.partial == 0.25
    one = {"rope_type": "default", "rope_theta": 1e4}  # the same numbers mean other angles in heads of another size
    same = ModelConfig.from_hf(raw | {"rope_parameters": {"full_attention": one, "sliding_attention": one}})
    assert [head_dim for _, head_dim in same.ropes] == [512, 16]


def test_the_layer_for_multi_token_prediction_of_glm_is_left_out(tiny_checkpoint, tmp_path):
    """Catches a folder that is refused because GLM numbers its MTP layer as one more layer."""
    shutil.copytree(tiny_checkpoint("glm4_moe"), tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    last = {n.replace("layers.2", "layers.3"): t.clone() for n, t in tensors.items() if ".layers.2." in n}
    last |= {f"model.layers.3.{n}.weight": torch.ones(4) for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm")}
    save_file(tensors | last, tmp_path / "m/model.safetensors")
    found, want = load_model(tmp_path / "m"), load_model(tiny_checkpoint("glm4_moe"))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), want.parameters(), strict=True))
    save_file(tensors | {n: t for n, t in last.items() if "eh_proj" not in n}, tmp_path / "m/model.safetensors")
    one_line(lambda: load_model(tmp_path / "m"), "unexpected tensor 'model.layers.3")  # any other layer is one too many
