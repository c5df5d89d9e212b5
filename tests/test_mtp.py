"""The layer for multi-token prediction that a checkpoint brings, as a drafter of trees."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import build_hf
from engine_kit import check_random_requests
from safetensors.torch import load_file, save_file
from test_recurrent import HYBRID
from tiny import CTX, TREES, eagle_drafter, tiny_model

import quantize
from bench.random_models import SHAPES
from decoding.params import SamplingParams
from eagle_draft import MtpHead
from engine.engine import Engine, EngineConfig
from families.config import ModelConfig
from generate import load
from loading.drafting import DraftFiles, with_tree
from loading.memory import MemoryPlan, check_memory, plan_memory
from loading.options import LoadOptions
from model import weight_bytes
from support.errors import NotEnoughMemory
from weights.checkpoint import Checkpoint
from weights.heads import mtp_head
from weights.quantized import QuantSpec

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def add_mtp(folder: Path, hidden: int = 64) -> None:
    """Give a model directory an MTP layer: a layer with full attention like one of its own, but for some noise."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    at = next(name.partition("self_attn.q_proj")[0] for name in tensors if "self_attn.q_proj" in name)
    for name in [name for name in tensors if name.startswith(at)]:
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name.replace(at, "mtp.layers.0.")] = tensors[name] + 0.05 * noise
    tensors["mtp.fc.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.1 * torch.randn(hidden, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint, tmp_path_factory):
    """checkpoint(family) is a model directory with an MTP layer."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(f"{family}-mtp") / "model"
            shutil.copytree(tiny_checkpoint(family), made[family])
            add_mtp(made[family])
        return made[family]

    return make


@functools.cache
def trained() -> MtpHead:
    """A tiny target whose MTP layer has learned the target's own continuations of some prompts, in seconds."""
    target = tiny_model(torch.float32, mtp=True, **HYBRID)
    head = MtpHead(mtp_head(target.config).config, target)
    head.rotary.build("cpu", CTX)
    engine = Engine(target, config=EngineConfig(batch_size=16))
    texts = [prompt + engine_text for prompt, engine_text in zip(PROMPTS, decoded(engine, PROMPTS, 30), strict=True)]
    tokens = torch.tensor(texts)
    features = target.forward_train(tokens)[0]
    parameters = [p.requires_grad_() for p in target.mtp.parameters()]
    optimizer = torch.optim.Adam(parameters, 5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(250):
        feature, loss = features, 0.0
        for depth in range(1, 4):  # the layer reads true features, and its own outputs, as when it drafts
            out = head.forward_train(tokens[:, depth:-1], feature[:, : -1 - depth])
            logits = head.predict(out)
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, depth + 1 :].flatten())
            own = torch.rand(*out.shape[:2], 1, generator=generator) < 0.5
            feature = torch.where(own, out, features[:, depth:-1])
            feature = torch.nn.functional.pad(feature, (0, 0, 0, depth + 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    target.mtp.requires_grad_(False)
    return head


PROMPTS = [[(7 * i + 3 * j * j + i * j) % 97 for j in range(6)] for i in range(16)]


def decoded(engine: Engine, prompts: list[list[int]], tokens: int, temperature: float = 0.0) -> list[list[int]]:
    params = SamplingParams(temperature, seed=1, max_new_tokens=tokens)
    return [result.token_ids for result in engine.generate_batch(prompts, params).run()]


def test_a_layer_in_a_file_that_no_index_names(checkpoint, tmp_path):
    """As quantizers leave it. Catches a layer that config.json declares and that is not found, plain decoding of which
    nobody says why, where no file holds it, and other tensors of such a file that are read."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_5"), folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in layer}
    save_file(rest, folder / "model.safetensors")
    assert not Checkpoint.open(folder).has_mtp and "which no file holds" in Checkpoint.open(folder).notes[0]
    save_file(layer | {"other": torch.ones(2)}, folder / "mtp.safetensors")
    found, want = Checkpoint.open(folder), Checkpoint.open(checkpoint("qwen3_5")).with_mtp.load().state_dict()
    assert found.has_mtp and not found.notes
    ours = found.with_mtp.load().state_dict()
    assert ours.keys() == want.keys() and all(torch.equal(ours[name], want[name]) for name in want)
    assert not any(name.startswith("mtp.") for name in found.entries)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_equals_that_of_transformers(checkpoint, family):
    """Catches embedding and feature in the wrong order, a norm that is left out, and a layer with other settings."""
    layers = pytest.importorskip("transformers.modeling_layers")
    theirs, folder = build_hf(family).double(), checkpoint(family)
    decoder = theirs.get_decoder()
    at = next(i for i, layer in enumerate(decoder.layers) if hasattr(layer, "self_attn"))
    layer = layers.MtpLayer(theirs.config, type(decoder.layers[at]), type(decoder.norm), at)
    names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "post_norm"}
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("mtp."):
            first, _, rest = name.removeprefix("mtp.").partition(".")
            rest = rest.removeprefix("0.")
            state[f"mtp_block.{rest}" if first == "layers" else f"{names[first]}.{rest}"] = tensor
    if family != "qwen3_5":  # files have a matrix for each expert
        at = "mtp_block.mlp.experts."
        parts = ([state.pop(f"{at}{e}.{x}_proj.weight") for e in range(4)] for x in ("gate", "up", "down"))
        gate, up, down = map(torch.stack, parts)
        state |= {f"{at}gate_up_proj": torch.cat((gate, up), 1), f"{at}down_proj": down}
    layer.load_state_dict(state)
    layer = layer.double().eval()
    tokens = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(0))
    ours = load(folder, dtype="float64", kernels="reference", eagle="mtp", ctx=64)
    features = theirs.model(tokens).last_hidden_state
    rows = tokens.shape[1] - 1
    place = torch.arange(rows)[None]
    mask = torch.full((rows, rows), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turn = decoder.rotary_emb(features, place)
    with torch.no_grad():
        first = layer(decoder.embed_tokens(tokens[:, 1:]), features[:, :-1], turn, mask, place, None)
        got = ours.head.forward_train(tokens[:, 1:], features[:, :-1])
    assert torch.allclose(got, first, atol=1e-5)  # theirs norms in float32
    assert torch.allclose(ours.head.predict(got), theirs.lm_head(first), atol=1e-5)


def test_a_trained_layer_drafts_well_and_changes_no_token():
    """Catches features from the wrong place, positions that are off, a cache row beside its token, and drafts that are
    made of the layer's outputs before their norm: nothing but the number of accepted tokens shows them."""
    head = trained()
    plain = Engine(head.target, config=EngineConfig(batch_size=16))
    for name, floor in (("chain4", 3.3), ("paper25", 3.3), ("dynamic", 3.3)):
        drafter = eagle_drafter(head, TREES[name], 4)
        engine = Engine(head.target, None, drafter, EngineConfig(batch_size=4))
        params = SamplingParams(max_new_tokens=30, seed=1)
        results = engine.generate_batch(PROMPTS, params).run()
        assert [r.token_ids for r in results] == decoded(plain, PROMPTS, 30)
        assert sum(r.tau for r in results) / len(results) > floor


def test_random_requests_have_the_tokens_of_plain_decoding():
    """Catches drafts that change a token at any temperature, alone or in slots."""
    head = trained()
    for rows in (1, 4):
        engine = Engine(head.target, None, eagle_drafter(head, TREES["dynamic"], rows), EngineConfig(batch_size=rows))
        check_random_requests(engine, Engine(head.target), 1, 2 + rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_with_the_layer_drafts_with_it_by_default(checkpoint, tiny_checkpoint, family):
    """Catches a layer that is left unused, is read where nobody drafts with it, or is drafted with in secret, and one
    that the report's share of the bandwidth leaves out."""
    notes: list[str] = []
    engine = load(checkpoint(family), ctx=128, report=notes.append, slots=2)
    assert engine.head.config.kind == "MTP" and any("own MTP layer drafts" in note for note in notes)
    assert not engine.drafter.p_min and engine.fallback  # no kernel prunes its trees, so plain steps may replace them
    forwards, read = engine.drafter.D, weight_bytes(engine.model.mtp) + engine.model.lm_head_bytes()
    assert engine.drafter.bytes_per_step() == forwards * read
    off = load(checkpoint(family), ctx=128, eagle="none")
    assert off.head is None and off.model.mtp is None and off.plan.weights < engine.plan.weights
    assert load(checkpoint(family), ctx=128, drafter="ngram", tree="chain:4").model.mtp is None
    with pytest.raises(ValueError, match="has no MTP layer"):
        load(tiny_checkpoint(family), eagle="mtp")
    params = SamplingParams(0.7, seed=2, max_new_tokens=16)
    prompts = [[3, 17, 99, 45, 23, 60], [5, 6]]
    want = [r.token_ids for r in off.generate_batch(prompts, params).run()]
    assert [r.token_ids for r in engine.generate_batch(prompts, params).run()] == want
    trimmed = load(checkpoint(family), ctx=128, eagle="mtp", draft_vocab=60)
    assert trimmed.head.vocab_size == 60
    assert trimmed.generate(prompts[0], params).run()[0].token_ids == want[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_brings_its_layer(checkpoint, tmp_path, family):
    """Catches a layer that is taken for one of the model, has another order of rows, is read where nobody drafts with it,
    or counts among what became floats."""
    pytest.importorskip("gguf")
    from test_gguf import ARCHITECTURES, metadata_of, tensors_of, write

    source = Checkpoint.open(checkpoint(family)).with_mtp
    arch, metadata = ARCHITECTURES[source.config.model_type], metadata_of(source.config)
    path = write(tmp_path / "m.gguf", arch, metadata, tensors_of(source))
    engine, off = load(path, ctx=64), load(path, ctx=64, eagle="none")
    assert engine.head.config.kind == "MTP" and off.model.mtp is None
    want = source.load().mtp.state_dict()
    for name, value in Checkpoint.open(path).with_mtp.load().mtp.state_dict().items():
        assert torch.equal(value, want[name]), name
    prompt, params = [3, 17, 99, 45], SamplingParams(max_new_tokens=12)
    assert engine.generate(prompt, params).run()[0].token_ids == off.generate(prompt, params).run()[0].token_ids
    rounded = Checkpoint.open(write(path, arch, metadata, tensors_of(source), kinds={"eh_proj": "Q8_0"}))
    assert rounded.notes == [] and "1 Q8_0 tensor of m.gguf became floats" in rounded.with_mtp.notes[0]


@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_quantize_keeps_the_layer(checkpoint, tmp_path, mode):
    """Catches a quantized model that has lost the layer it drafts with, or holds it in 16 bits; and what must stay in 16
    bits in recurrent layers."""
    command = ["--checkpoint", str(checkpoint("qwen3_5")), "--out", str(tmp_path / "q"), "--mode", mode]
    (tmp_path / "text").write_text(" ".join(str(i % 100) for i in range(80)))
    assert quantize.main([*command, "--group-size", "32", "--eval-text", str(tmp_path / "text")]) == 0
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert {"mtp.fc.qweight", "mtp.layer.attention.qkv.qweight", "layers.0.attention.qkvz.qweight"} <= stored.keys()
    assert {"layers.0.attention.ba.weight", "layers.0.attention.conv", "mtp.norm.weight"} <= stored.keys()
    params = SamplingParams(max_new_tokens=16)
    for folder, options in ((tmp_path / "q", {}), (checkpoint("qwen3_5"), {"quant": "int8"})):
        drafting, plain = load(folder, ctx=64, **options), load(folder, ctx=64, eagle="none", **options)
        assert drafting.head.config.kind == "MTP" and drafting.model.quant
        prompt = [3, 17, 99, 45]
        assert drafting.generate(prompt, params).run()[0].token_ids == plain.generate(prompt, params).run()[0].token_ids


def test_the_plan_counts_what_recurrent_layers_keep(tiny_checkpoint):
    """Catches a plan without the memory of recurrent layers, or with keys and values for them, and such a model that
    drafts, with wrong results."""
    folder = str(tiny_checkpoint("qwen3_5"))
    with pytest.raises(ValueError, match="a model with recurrent layers, or heads of two sizes, cannot draft"):
        load(folder, draft_checkpoint=folder)
    engine = load(folder, ctx=128, slots=2)
    memory = engine.state.memory
    assert engine.plan.snapshots == 8 * (memory.memory.nbytes + memory.path.nbytes)
    assert engine.plan.recurrent == sum(t.nbytes for t in memory)
    assert engine.plan.kv == pytest.approx(engine.state.kv[0].nbytes, rel=0.02)


FREE = int(23.5 * 2**30)  # of a card with 24 GB
GEMMA4_31B = {
    "model_type": "gemma4_text", "hidden_size": 5376, "num_hidden_layers": 60, "intermediate_size": 21504,
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256,
    "global_head_dim": 512, "vocab_size": 262144, "max_position_embeddings": 262144, "sliding_window": 1024,
    "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-6,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "tie_word_embeddings": True,
    "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}},
}  # fmt: skip


def planned(config: ModelConfig, ctx: int, eagle: str, kv: str = "model") -> tuple[MemoryPlan, LoadOptions]:
    """The plan for a GPU of a model in int4."""
    config = replace(config, dtype="float16", max_position_embeddings=max(ctx, config.max_position_embeddings))
    checkpoint = Checkpoint(Path("model"), "hf", {}, config, spec=QuantSpec("int4"))
    options = LoadOptions("model", device="cuda", ctx=ctx, compile=True, eagle=eagle, quant="int4", slots=1, kv=kv)
    head = mtp_head(config) if eagle == "mtp" else None
    options = with_tree(options, "int4", head.config) if head else options
    return plan_memory(checkpoint, DraftFiles(head), options), options


def test_the_plan_says_which_long_contexts_fit_24_gb():
    """Catches a plan that counts keys and values for recurrent layers, or not their memory, and one that says that a text
    fits although the layers with a window keep all of it, as they do here."""
    plan, options = planned(SHAPES["qwen3.5-27b"], 100_000, "mtp")
    check_memory(plan, FREE, options)
    state, layers, kv_layers = 48 * 128 * 128 * 4, 48, 16
    assert layers * state < plan.recurrent < 1.5 * layers * state and plan.snapshots == 0
    assert plan.kv == pytest.approx((kv_layers + 1) * 2 * 4 * 256 * 2 * 100_000, rel=0.01)
    assert 0.5 * 27e9 < plan.weights < 17e9
    config = ModelConfig.from_hf(GEMMA4_31B, "config.json")
    plan, options = planned(config, 32_000, "none")
    assert plan.kv == pytest.approx((50 * 16 * 256 + 10 * 4 * 512) * 2 * 2 * 32_000, rel=0.01)
    with pytest.raises(NotEnoughMemory, match="plan 48.3 GB, free 25.2 GB. Try --ctx 6400"):
        check_memory(plan, FREE, options)
    with pytest.raises(NotEnoughMemory, match="Try --ctx 12608"):
        check_memory(*planned(config, 32_000, "none", "int8")[:1], FREE, options)
    check_memory(*planned(config, 12_608, "none", "int8")[:1], FREE, options)
