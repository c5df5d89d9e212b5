"""weights/block_heads.py and drafters/block.py: every published layout is read, and computes what its formulas say."""

import json
from dataclasses import replace

import pytest
import torch
from block_kit import H, block_outputs, corrected, draft_ids, layouts, random_tensors, tap_ids, target, write_layout
from safetensors.torch import load_file
from test_checkpoint import one_line, same_tensors
from tiny import CTX, V, tables

import tree as trees
from decoding.params import SamplingParams
from decoding.step import DecodeState, draft_input
from drafters.block import BlockDrafter
from loading.drafting import build_head
from weights.block_heads import BlockConfig, read_head, save_block

LAYOUTS = layouts()
MODEL = target()
ANCHOR, TEXT = 17, 7


def features_of(config: dict, count: int = TEXT, seed: int = 1) -> torch.Tensor:
    """Random features [count, taps, H] in the file's order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, len(tap_ids(config)), H, generator=generator, dtype=torch.float64)


def read_layout(tmp_path, name, how="one file"):
    config = LAYOUTS[name]
    tensors = random_tensors(config)
    return config, tensors, read_head(write_layout(tmp_path / "head", config, tensors, how), MODEL.config)


def after(head, features: torch.Tensor, taps: list[int], first: int, tree=None):
    """A drafter of this tree (default: the longest chain), and the state behind `features`, of which the first ones came
    as a prompt."""
    ordered = features[:, sorted(range(len(taps)), key=lambda i: taps[i])].flatten(1)
    built = tables(tree or trees.chain(head.config.depth))
    drafter = BlockDrafter(head, built, 1, CTX + built.N + 1)
    state = DecodeState(MODEL, drafter, 1, CTX)
    known = torch.zeros(1, first + 1, dtype=torch.int64), ordered[None, :first]
    drafter.prefill(0, *known, torch.tensor([0]), torch.tensor([first]))
    state.n[0], state.root[0], state.count[0] = len(features), ANCHOR, len(features) - first
    state.features[0, : len(features) - first] = ordered[first:]
    return drafter, state


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_formulas(tmp_path, name):
    """A head that is read or computed wrongly and changes no output: the slot, the mask, the window, the positions, the
    order of the tapped layers, a norm that is missing, a convolution across the anchor, or another RoPE base; draft ids
    that are offsets, or a successor table that is indexed by the target's ids."""
    config, tensors, file = read_layout(tmp_path, name)
    head = build_head(file, MODEL)
    assert (list(range(V)) if head.draft_ids is None else head.draft_ids.tolist()) == draft_ids(config)
    features = features_of(config)
    first = TEXT - min(3, head.config.depth)
    drafter, state = after(head, features, tap_ids(config), first)
    inputs = draft_input(state, SamplingParams().mode)
    hidden, slots = drafter._hidden(inputs), drafter._slots(inputs)
    out, z = block_outputs(config, tensors, features, ANCHOR, MODEL)
    torch.testing.assert_close(hidden[0], out, rtol=0, atol=1e-10)
    torch.testing.assert_close(head.narrow_logits(hidden)[0], z, rtol=0, atol=1e-10)
    if head.config.markov:
        path, state = [ANCHOR, 5, 60, 5, 33], None
        for d in range(min(len(path), head.config.depth)):
            tokens = torch.tensor([[path[d]]])
            factor, state = head.factors(tokens, slots.mixed[:, d], state)
            bias = factor[0, 0] @ head.successor.weight.T
            want = corrected(config, tensors, out, z, path[: d + 1])
            torch.testing.assert_close(z[d] + bias, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ("shards", "bin"))
@pytest.mark.parametrize("name", ("dflash2", "dspark, gated", "speculators"))
def test_files_of_all_kinds_are_read(tmp_path, name, how):
    """A head in shards or in a pickle that is read differently from the same head in one file."""
    _, _, one = read_layout(tmp_path / "a", name)
    _, _, other = read_layout(tmp_path / "b", name, how)
    assert one.config == other.config and same_tensors(one, other)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "speculators" not in name])
def test_a_head_is_written_as_it_is_published(tmp_path, name):
    """An export that another program, or this one, reads as another head."""
    config, tensors, file = read_layout(tmp_path, name)
    save_block(file.config, file.tensors, tmp_path / "again")
    again = read_head(tmp_path / "again", MODEL.config)
    assert again.config == replace(file.config, layer=again.config.layer)
    same = ("windows", "rope", "rms_norm_eps", "head_dim", "num_hidden_layers", "num_key_value_heads", "vocab_size")
    assert all(vars(again.config.layer)[key] == vars(file.config.layer)[key] for key in same)
    assert same_tensors(again, file)
    written = load_file(tmp_path / "again" / "model.safetensors")
    for key in written.keys() & tensors.keys() - {"fc.weight"}:
        assert torch.equal(written[key], tensors[key])
    assert {key for key in tensors if "confidence" not in key} == written.keys()


BAD = {
    "an unknown setting": ("dflash", {"pivot": 3}, "pivot = 3 is not understood"),
    "an unknown nested one": ("dflash", {"dflash_config": {"mask_token_id": 1, "swa": True}}, "dflash_config.swa"),
    "Domino": ("dflash", {"dflash_config": {"mask_token_id": 1, "shift_label": True}}, "shift_label = True"),
    "another kind": ("dflash", {"architectures": ["LlamaForCausalLM"]}, "more than one decoder layer"),
    "another Markov head": ("dspark, vanilla", {"markov_head_type": "fir"}, "markov_head_type = 'fir'"),
    "another target": ("dflash", {"num_target_layers": 36}, "made for 36 layers, this model has 6"),
    "another width": ("dflash", {"hidden_size": 64}, "made for hidden_size 64, this model has 32"),
    "another vocabulary": ("dflash", {"vocab_size": 101}, "made for a vocabulary of 101"),
    "the last layer": ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2, 5]}}, "[0, 2, 5]"),
    "another kind's scale": ("dflash", {"output_multiplier": 0.5}, "output_multiplier"),
    "a bias": ("dflash", {"attention_bias": True}, "attention_bias = true"),
    "no mask": ("dflash", {"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "'mask_token_id' is missing"),
    "a window that is off": (
        "dflash", {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "which of them"
    ),
    "scaled RoPE of an unknown kind": ("dflash", {"rope_scaling": {"rope_type": "su", "factor": 2}}, "rope_type = 'su'"),
    "a kind that is no text": ("speculators", {"speculators_model_type": ["dspark"]}, "speculators_model_type is ['dsp"),
    "a missing tensor": ("dspark, rnn", {"markov_head.joint_proj.bias": None}, "markov_head.joint_proj.bias"),
    "Domino's tensors": ("dspark, rnn", {"prefix_gru.weight_hh_l0": torch.zeros(3, 1)}, "Domino heads"),
    "one too many": ("dspark, rnn", {"gate.weight": torch.zeros(3, 1)}, "gate.weight"),
    "another shape": (
        "dspark, rnn", {"layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}, "layers.1.mlp.up_proj.weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_understood_is_refused_by_name(tmp_path, what):
    """A setting that is overlooked, or a damaged file that is read in part: the head would draft something else, and
    nothing would show it."""
    name, change, words = BAD[what]
    settings = {key: value for key, value in change.items() if "." not in key}
    tensors = random_tensors(LAYOUTS[name]) | {key: value for key, value in change.items() if "." in key}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    folder = write_layout(tmp_path / "head", LAYOUTS[name] | settings, tensors)
    one_line(lambda: read_head(folder, MODEL.config), words)


def test_settings_that_are_off_and_frozen_copies_are_no_reason_to_refuse(tmp_path):
    """A head that cannot be read because its file has more than is needed: nulls, or the target's embedding and head."""
    config = LAYOUTS["dspark, vanilla"] | {"pivot": None, "residual": False}
    tensors = random_tensors(config) | {"embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.randn(V, H)}
    file = read_head(write_layout(tmp_path / "head", config, tensors), MODEL.config)
    assert not {"lm_head.weight", "embed_tokens.weight"} & file.tensors.keys()


def test_a_folder_says_itself_what_kind_it_is(tmp_path):
    """--eagle that takes a block head for an EAGLE head, or the other way round, by the name of its folder."""
    config = LAYOUTS["dflash"]
    folder = write_layout(tmp_path / "eagle3", config, random_tensors(config))
    for path in (folder, folder / "model.safetensors"):
        assert isinstance(read_head(path, MODEL.config).config, BlockConfig)
    (folder / "config.json").write_text(json.dumps({"model_type": ["llama"]}))
    one_line(lambda: read_head(folder, MODEL.config), "one decoder layer")


def test_values_can_be_set_on_the_command_line(tmp_path):
    """--eagle-config that is ignored for a block head, or that takes any key."""
    config = LAYOUTS["dspark, vanilla"]
    folder = write_layout(tmp_path / "head", config, random_tensors(config))
    file = read_head(folder, MODEL.config, {"rope_theta": "123.0", "shortlist": "20"})
    assert file.config.layer.rope.theta == 123 and file.config.shortlist == 20
    one_line(lambda: read_head(folder, MODEL.config, {"block": "3"}), "unknown key of a block head")
