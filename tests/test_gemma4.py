"""Engines of Gemma 4: the tests of all engines with layers of two kinds, and what such a model has of its own."""

import functools
import json
import shutil

import pytest
import test_engine
import torch
from conftest import BASE, FAMILIES, build_hf
from engine_kit import check_random_requests, on_model
from safetensors.torch import load_file, save_file
from test_engine import (  # noqa: F401 - they are run again, on the models below
    test_a_nan_on_the_accepted_path_is_an_error,
    test_a_rejected_nan_branch_changes_nothing,
    test_log_probabilities_of_a_prompt_are_those_of_its_steps,
    test_oracle_is_accepted_whole_and_hostile_not_at_all,
    test_same_tokens_in_a_batch,
    test_wide_plain_forward_is_plain,
)
from test_prompt_cache import (  # noqa: F401
    test_a_restored_row_is_bitwise_what_was_saved,
    test_texts_of_an_earlier_run_are_found_and_bad_files_are_not_used,
)
from tiny import TREES, geometry, heads, randomise, tiny_model

from decoding.params import SamplingMode, SamplingParams
from decoding.step import DecodeState, Observer, draft_input
from drafters.assistant import AssistantDrafter, AssistantHead
from engine.engine import Engine, EngineConfig
from families.config import RopeConfig
from generate import load
from quantize import quantize_head
from support.errors import UsageError
from tree import parse_tree
from weights.assistant import AssistantConfig
from weights.checkpoint import Checkpoint
from weights.quantized import QuantSpec
from weights.rounding import _hessians

# Layers 0 and 2 have a window, the last two share keys, and every layer has an embedding of its own. Layer 1 has its keys
# as values.
KINDS = {"windows": (7, 0, 7, 0), "full_heads": (1, 16), "shared_layers": 2, "keys_as_values": True, "value_norm": True}
KINDS |= {"qk_norm": True, "token_inputs": 4, "layer_scale": True, "norms": "both", "wide_shared": True, "layers": 4}
KINDS |= {"rope": RopeConfig(1e6, "proportional", partial=0.25), "window_rope": RopeConfig(1e3)}
MODEL = tiny_model(**KINDS)
HEADS = heads(MODEL)
gemma4 = on_model(MODEL, HEADS, KINDS)


def test_layers_of_two_kinds_have_two_caches_and_layers_that_share_keys_have_none():
    """Catches memory for keys that nobody writes, and heads of one size in a cache for heads of another."""
    shapes = [tuple(cache.shape) for cache in MODEL.new_cache(1, 40)]
    assert shapes == [(1, 2, 1, 2, 40, 8), (1, 2, 1, 1, 40, 16)]
    assert MODEL.kv_places == {0: (0, 0), 1: (1, 0), 2: (0, 0), 3: (1, 0)}
    read = 2 * (2 * 8 * 7 + 1 * 16 * 30)  # values at 30 tokens, of the two kinds, each by two layers
    assert MODEL.kv_bytes(30, 1) == 2 * read


@pytest.mark.parametrize("options", [{"kv_dtype": torch.int8}, {"batch_size": 3, "pool": 200}])
def test_random_requests_have_the_tokens_of_plain_decoding(options):
    """Catches one of two caches that is not moved, not restored, not committed, or not rounded, as the other one is."""
    rows = options.get("batch_size", 1)
    drafter = test_engine.eagle_drafter(HEADS["eagle3"], TREES["dynamic"], rows)
    engine = Engine(MODEL, None, drafter, EngineConfig(**options))
    alone = Engine(MODEL, config=EngineConfig(kv_dtype=options.get("kv_dtype")))
    check_random_requests(engine, alone, 3, 2 * rows)


# ---- the assistant ----------------------------------------------------------------------------------------------------


@functools.cache
def with_assistant(family: str, ordered: bool) -> tuple:
    """transformers' target and assistant, random. The window is wider than the text: transformers counts another one, to
    which rejected tokens belong."""
    transformers = pytest.importorskip("transformers")
    target = build_hf(family, sliding_window=64)
    text = {**FAMILIES[family][1], **BASE, "hidden_size": 32, "num_hidden_layers": 2, "sliding_window": 64}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2, "head_dim": 16}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
    name = "Gemma4UnifiedAssistant" if "unified" in family else "Gemma4Assistant"
    sizes = {"backbone_hidden_size": 64, "use_ordered_embeddings": ordered, "num_centroids": 16}
    config = getattr(transformers, f"{name}Config")(text_config=text, **sizes, centroid_intermediate_top_k=4)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        assistant = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter in assistant.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(BASE["vocab_size"]))
    return target, assistant


class Drafts(Observer):
    """The drafted trees of all steps, and what the steps emitted."""

    def __init__(self) -> None:
        self.seen: list = []

    def step(self, output, results) -> None:
        self.seen.append((output.draft, output.emitted[0, : int(output.count[0])].tolist()))


@pytest.mark.parametrize("family, ordered, tree", [
    ("gemma4", False, "chain:4"), ("gemma4", True, "dynamic:10,3,3"), ("gemma4-values", True, "chain:4"),
    ("gemma4-values", False, "dynamic:10,3,3"), ("gemma4_unified", True, "dynamic:10,3,3"),
])  # fmt: skip
def test_an_assistant_drafts_as_in_transformers(tmp_path, family, ordered, tree):
    """Catches a position, a state, a cache or a parent that is not the one it was trained with: fewer tokens would be
    accepted. A chain has transformers' tokens, and each node the probability that transformers gives its path."""
    target, assistant = with_assistant(family, ordered)
    target.float().save_pretrained(tmp_path / "target")
    assistant.float().save_pretrained(tmp_path / "assistant")
    made = dict(ctx=128, dtype="float64", kernels="reference", tree=tree, eagle_always=True)
    engine, drafts = load(tmp_path / "target", eagle=str(tmp_path / "assistant"), **made), Drafts()
    engine.add_observer(drafts)
    prompt = [3, 17, 99, 45, 23, 60, 7, 8, 9, 10, 11, 12]
    engine.generate(prompt, SamplingParams(max_new_tokens=20, stop_ids=(127,))).run()
    text = [*prompt, int(drafts.seen[0][0].tokens[0, 0])]
    target, assistant = target.double(), assistant.double()
    for draft, emitted in drafts.seen:
        assert draft.tokens[0, 0] == text[-1]
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        hidden, found, where = [states.hidden_states[-1][:, -1:]], [], torch.tensor([[len(text) - 1]])
        for node, parent in enumerate(draft.parent[0].tolist()):
            if node:
                assert not tree.startswith("chain") or draft.tokens[0, node] == found[parent].argmax()
                total = draft.scores[0, parent] + found[parent][draft.tokens[0, node]]
                assert draft.scores[0, node] == pytest.approx(float(total), abs=1e-4)
            beside = target.get_input_embeddings()(draft.tokens[:, node : node + 1])
            beside = torch.cat((beside, hidden[parent + 1 if node else 0]), -1)
            out = assistant(inputs_embeds=beside, position_ids=where, shared_kv_states=states.shared_kv_states)
            hidden.append(out.last_hidden_state)
            logits = out.logits[0, 0]
            if ordered:  # transformers gives one low value to the tokens of other clusters
                logits = logits.masked_fill(logits == logits.min(), float("-inf"))
            found.append(logits.log_softmax(-1))
        text = text + emitted
    assert len(drafts.seen) > 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """A target and its assistant."""
    made = tmp_path_factory.mktemp("gemma4")
    for name, model in zip(("target", "assistant"), with_assistant("gemma4", True), strict=True):
        model.float().save_pretrained(made / name)
    return str(made / "target"), str(made / "assistant")


@pytest.mark.parametrize("options", [{}, {"kv": "int8"}, {"quant": "int8", "tree": "dynamic:16,4,4"}])
def test_an_assistant_changes_no_token(folders, options):
    """Catches rows that read each other's keys, and a tree whose nodes write where the target reads."""
    target, assistant = folders
    made = dict(ctx=128, dtype="float32", slots=3, **options)
    if not options:
        by_default = load(target, eagle=assistant, ctx=64)
        assert by_default.fallback and not by_default.drafter.p_min
    engine = load(target, eagle=assistant, eagle_always=True, **made)
    plain_engine = load(target, **{name: value for name, value in made.items() if name != "tree"})
    check_random_requests(engine, plain_engine, 2, 5)
    assert engine.drafter.caches[0].numel() == 0
    assert engine.plan.kv == pytest.approx(sum(cache.nbytes for cache in engine.state.kv), rel=0.02)


def test_an_assistant_sees_the_window_of_the_target():
    """Catches a layer that reads keys from before its window, which the target would have forgotten."""
    text = {"head_dim": 8, "layers": 2, "windows": (7, 0), "full_heads": (1, 16), "qk_norm": True, "value_norm": True}
    layer = geometry(shared_layers=2, layer_scale=True, norms="both", tie_word_embeddings=False, **text)
    head = AssistantHead(AssistantConfig(1, layer, 32, target_vocab_size=97, places=((0, 0), (1, 0))), MODEL)
    head = head.to(torch.float64)
    randomise(head, 3)
    head.rotary.build("cpu", 160)
    drafter = AssistantDrafter(head, parse_tree("dynamic:16,4,4"), 1, 40)
    state = DecodeState(MODEL, drafter, 1, 24)
    state.n[:], state.count[:] = 20, 1
    for buffer in (*state.kv, state.features):
        buffer.normal_()
    drafts = [drafter.draft(draft_input(state, SamplingMode()))]
    state.kv[0][..., :14, :].normal_()  # position 20 sees those from 14 on
    drafts.append(drafter.draft(draft_input(state, SamplingMode())))
    state.kv[0][..., 14, :] += 1
    drafts.append(drafter.draft(draft_input(state, SamplingMode())))
    assert torch.equal(drafts[0].scores, drafts[1].scores) and not torch.equal(drafts[1].scores, drafts[2].scores)


NEEDED = ("model.embed_tokens.weight", "post_projection.weight", "masked_embedding.token_ordering")


@pytest.mark.parametrize(("change", "words"), [
    ({"backbone_hidden_size": 48}, "made for hidden_size and vocab_size"), ({"text_config": 3}, "text_config"),
    ({"num_centroids": 7}, "7 clusters do not divide"), *((name, "missing") for name in NEEDED),
])  # fmt: skip
def test_an_assistant_that_does_not_fit_is_refused_in_one_line(folders, tmp_path, change, words):
    """Catches a traceback, an assistant that drafts for a model it was not made for, and a file that was not downloaded
    whole. change: settings that are others, or the tensor that is lacking."""
    shutil.copytree(folders[1], tmp_path / "a")
    config, file = tmp_path / "a/config.json", tmp_path / "a/model.safetensors"
    if change in NEEDED:
        save_file({key: tensor for key, tensor in load_file(file).items() if key != change}, file)
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ValueError, match=words) as error:
        load(folders[0], eagle=str(tmp_path / "a"), ctx=64)
    assert "\n" not in str(error.value)


def test_an_assistant_is_not_quantized_and_has_no_window(folders):
    """Catches an assistant that is rounded and then read as it was published, and a window that nothing applies."""
    with pytest.raises(UsageError, match="stays as it is published"):
        quantize_head(folders[1], Checkpoint.open(folders[0]).config, QuantSpec("int8"))
    with pytest.raises(UsageError, match="keeps none; leave it out"):
        load(folders[0], eagle=folders[1], draft_window="64", ctx=64)


def test_gptq_sees_the_rows_that_each_expert_gets():
    """Catches calibration by rows that the router sends elsewhere: it reads other norms than the experts do."""
    block = tiny_model(torch.float32, **KINDS, num_local_experts=3, num_experts_per_tok=1, dense_size=16).layers[0].mlp
    x = torch.randn(5, 32)
    found = _hessians(block.experts, False, block.experts.gate_up, lambda: block(x, x))
    sent, read = block.experts.route(block.router_norm(x))[1], block.experts_norm(x).float()
    for e, total in enumerate(found):
        rows = read[(sent == e).any(-1)]
        assert torch.allclose(total, rows.T @ rows, atol=1e-5)
