"""The E-block: its first slot against EAGLE-3, masks against plain formulas, files, and acceptance that is certain."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
from test_block_draft import paths_of, same_tree
from tiny import CTX, DRAFT_VOCAB, PROMPT, V, eagle_drafter, held, tables, tiny_head, tiny_model

import generate
import tree as trees
from drafting import build_head
from eagle_block import EagleBlockDrafter, EagleBlockHead
from engine import Engine, EngineConfig
from kernels import KernelBackend, cpu_problem
from load import _load, load
from options import DEMO, LoadOptions
from quantize import quantize_head
from ranks import Ranks
from sampling import SamplingMode, SamplingParams
from step import DecodeState, draft_input
from support.errors import UsageError
from weights.checkpoint import Checkpoint
from weights.heads import FORMS, read_eagle, save_eagle, save_quantized_eagle
from weights.quantized import QuantSpec

MODEL = tiny_model()
SAMPLED = dict(temperature=1.0, seed=11)


def e_block(model=MODEL, form="own", vocab=DRAFT_VOCAB, **changes) -> EagleBlockHead:
    given = {"slots": 5, "rank": 6, "shortlist": 9, "norm_before_residual": True, "target_vocab_size": V} | changes
    return tiny_head(model, 3, vocab, cls=EagleBlockHead, form=form, **given)


def e_drafter(head: EagleBlockHead, tree=None, B: int = 1, cls=EagleBlockDrafter) -> EagleBlockDrafter:
    built = tables(tree or trees.DynamicTree(14, 4, 4), B)
    return cls(head, built, B, CTX + built.N + 1)


def after(drafter, text: list[int]) -> DecodeState:
    """An engine's state when it has read a text, whose last token is the root."""
    engine = Engine(MODEL, None, drafter, EngineConfig(batch_size=1))
    engine.prefill.logits(0, text[:-1], SamplingMode())
    state, n = engine.state, len(text) - 1
    state.tokens[0, : len(text)] = torch.tensor(text)
    state.n[0], state.root[0], state.count[0] = n, text[-1], 1
    _, taps = MODEL.forward_train(torch.tensor([text[:-1]]), drafter.taps)
    state.features[0, 0] = taps[0, -1]
    return state


@pytest.mark.parametrize("form", FORMS)
def test_the_first_slot_is_the_first_draft_of_eagle3(form):
    """Masks, corrections, or rows of another place that change what EAGLE-3 would draft first: not a bit may differ."""
    head = e_block(form=form)
    plain = tiny_head(MODEL, 3, DRAFT_VOCAB, norm_before_residual=True)
    state = head.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    text = (PROMPT * 2)[:31]
    block, eagle = e_drafter(head), eagle_drafter(plain, trees.chain(4))
    slots = block._slots(draft_input(after(block, text), SamplingMode()))
    output = eagle._extend(draft_input(after(eagle, text), SamplingMode()))
    assert torch.equal(slots.hidden[:, 0], plain.norm(output)[:, 0])
    torch.testing.assert_close(slots.logits[:, 0], plain.predict(output)[:, 0], rtol=0, atol=1e-12)
    assert not slots.mixed[:, 0].any() and slots.mixed[:, 1:].any()


@pytest.mark.parametrize("form", FORMS)
def test_masks_are_those_of_the_formulas(form):
    """A mask at another position, of the wrong source or layer, that sees later masks, misses the text or the row of the
    root, or is corrected twice, in decoding or in training."""
    head = e_block(form=form)
    text = (PROMPT * 2)[:20]
    drafter = e_drafter(head)
    hidden = drafter._hidden(draft_input(after(drafter, text), SamplingMode()))[0]
    tokens = torch.tensor([text])
    _, features = MODEL.forward_train(tokens, head.config.taps)
    feature = head.fuse(features[:, :-1])
    rows, masks = head.forward_block(tokens[:, 1:], feature, torch.tensor([[3, len(text) - 2]]))
    torch.testing.assert_close(torch.cat((rows[0, -1:], masks[0, 1])), hidden, rtol=0, atol=1e-12)

    # the same, one row after another: the rows of the text, then each mask behind those before it
    layer, n = head.mask_layer or head.layer, len(text) - 1
    memory = []
    output = head.forward_train(tokens[:, 1:], feature, 0, memory)
    keys, values = ([*part[0].unbind(1)] for part in memory[0])  # [heads, hd] of every row of the text
    source = layer.hidden_norm((feature if form == "once" else output)[0, -1])
    for j in range(head.config.slots - 1):
        H = source.shape[0]
        row = head.mask_feature.weight[j * H : (j + 1) * H] @ source + head.mask_feature.bias[j * H : (j + 1) * H]
        x = torch.cat((head.mask_embed[j], row))
        cos, sin = head.rotary(torch.tensor([[n + j]]))
        q, k, v = (t[0, :, 0] for t in layer.attention.project(x[None, None], cos, sin))
        keys.append(k.repeat_interleave(2, 0))
        values.append(v.repeat_interleave(2, 0))
        scores = torch.stack([(q * key).sum(-1) for key in keys]) / math.sqrt(layer.attention.head_dim)
        attended = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0)
        x = row + layer.attention.o(attended.flatten())
        want = head.norm(layer.mlp(layer.post_norm(x), x))
        torch.testing.assert_close(hidden[j + 1], want, rtol=0, atol=1e-12)


def test_corrections_of_training_and_of_drafting_are_the_same():
    """Tables of other tokens than the embedding and the LM head have, a factor without what the mask gives, or one that
    corrects the first slot."""
    head = e_block()
    hidden, tokens = torch.randn(1, 5, 32).double(), torch.tensor([[3, 50, 96, 0, 7]])
    want = head.narrow_logits(head.corrected(hidden, tokens))
    mixed = head.mixed(hidden)
    factor = torch.stack([head.factors(tokens[:, d, None], mixed[:, d], None)[0][0, 0] for d in range(5)])
    got = head.narrow_logits(hidden)[0] + factor @ head.successor.weight.T
    torch.testing.assert_close(got[1:], want[0, 1:], rtol=0, atol=1e-12)
    assert not factor[0].any()


@pytest.mark.parametrize("form", FORMS)
def test_files_say_what_a_head_is(tmp_path, form):
    """A tensor or setting that is lost on the way, in float and in int8, or settings that no head has."""
    head = e_block(form=form)
    tensors = {k: t for k, t in head.state_dict().items() if not k.startswith(("predecessor", "successor"))}
    save_eagle(head.config, tensors, tmp_path / "float")
    found = read_eagle(tmp_path / "float", MODEL.config)
    assert asdict(found.config) | {"layer": None} == asdict(head.config) | {"layer": None}
    assert found.config.kind == "E-block" and found.tensors.keys() == tensors.keys()
    again = build_head(found, MODEL)
    assert all(torch.equal(t, head.state_dict()[name]) for name, t in again.state_dict().items())
    spec = QuantSpec("int8", lm_head="int8")
    config, rounded, _ = quantize_head(tmp_path / "float", MODEL.config, spec)
    save_quantized_eagle(config, rounded, spec, tmp_path / "int8")
    stored = build_head(read_eagle(tmp_path / "int8", MODEL.config), MODEL)
    text = (PROMPT * 2)[:20]
    drafts = []
    for one in (head, stored):
        drafter = e_drafter(one)
        drafts.append(drafter._hidden(draft_input(after(drafter, text), SamplingMode())))
    torch.testing.assert_close(*drafts, rtol=0.2, atol=0.2)
    config = tmp_path / "float" / "config.json"
    config.write_text(config.read_text().replace('"slots": 5', '"slots": 1'))
    with pytest.raises(ValueError, match="no block of 1 slots"):
        read_eagle(tmp_path / "float", MODEL.config)


def test_every_matrix_sees_what_it_sees_in_decoding():
    """GPTQ that rounds a matrix for no input, or for the inputs of other positions."""
    head, text = e_block(), torch.tensor([(PROMPT * 3)[:40], (PROMPT * 3)[1:41]])
    seen = {}
    for name, module in head.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, given, out, name=name: seen.setdefault(name, []).append(given[0]))
    _, features = MODEL.forward_train(text, head.config.taps)
    head.draft_along(text, features, 8)
    assert seen.keys() == {name for name, module in head.named_modules() if isinstance(module, torch.nn.Linear)}
    drafter = e_drafter(head)
    hidden = drafter._hidden(draft_input(after(drafter, text[0, :18].tolist()), SamplingMode()))
    torch.testing.assert_close(seen["mix"][0][0, 1], hidden[0, 1:], rtol=0, atol=1e-12)  # behind row 16


class Oracle(EagleBlockDrafter):
    """Slot j gives the hidden state that the target itself will have at position n + j: `truth` [1, S, H]."""

    def _hidden(self, inputs):
        super()._hidden(inputs)
        places = inputs.n[:, None] + torch.arange(self.head.config.slots)
        return self.truth[:, places[0].clamp(max=self.truth.shape[1] - 1)]


@pytest.mark.parametrize("settings, shift", (({}, 0), (SAMPLED, 0), ({}, 1)))
def test_the_target_itself_is_always_accepted(settings, shift):
    """Slots at a wrong position or with the noise of another depth; a hostile block that is accepted."""
    params = SamplingParams(**settings, max_new_tokens=60)
    text = PROMPT + Engine(MODEL).generate(PROMPT, params).run()[0].token_ids
    head = e_block(vocab=None)
    head.lm_head.weight.copy_(MODEL.lm_head.weight.roll(shift, 0))
    head.successor.weight.zero_()
    drafter = e_drafter(head, trees.chain(5), cls=Oracle)
    drafter.truth = MODEL.forward_train(torch.tensor([text]))[0]
    result = Engine(MODEL, None, drafter).generate(PROMPT, params).run()[0]
    assert PROMPT + result.token_ids == text
    assert {len(step) for step in result.tokens_per_step[:-1]} == {1 if shift else 6}


@pytest.mark.skipif(bool(cpu_problem()), reason="no C++ kernels here")
def test_the_search_in_cpp_finds_the_same_tree():
    """Places that are taken for ids, or factors of another slot."""
    model = tiny_model(torch.float32)
    drafter = e_drafter(e_block(model), trees.DynamicTree(9, 4, 9))
    state = DecodeState(model, drafter, 1, CTX)
    state.n[0], state.root[0], state.count[0] = 20, 50, 2
    state.features.copy_(torch.randn(state.features.shape))
    drafter.cache.copy_(torch.randn(drafter.cache.shape))
    inputs = draft_input(state, SamplingMode())
    with KernelBackend("cpu", "cpu").active():
        slots = drafter._slots(inputs)
        assert drafter._searches_in_cpp(inputs, slots)
        got = drafter._searched(inputs, slots)
    plain = drafter._dynamic(inputs, drafter._rows(inputs, slots, 0, inputs.root[:, None], None), ())
    same_tree(paths_of(got), paths_of(plain), 1e-4)


# ---- in the commands ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_head(tmp_path_factory):
    """The demo's EAGLE-3 head with masks that have learned nothing, whose first slot drafts well."""
    folder = tmp_path_factory.mktemp("demo") / "e-block"
    file = read_eagle(DEMO / "eagle3", Checkpoint.open(DEMO).config)
    config = replace(file.config, slots=5, form="twice", rank=16)
    model = load(DEMO, kernels="reference", dtype="float32").model
    head = EagleBlockHead(config, model, file.tensors["draft_ids"])
    head.load_state_dict(file.floats(), strict=False)
    with torch.no_grad():
        head.init_masks(torch.Generator().manual_seed(0))
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in head.state_dict().items()}
    save_eagle(config, tensors, folder)
    return folder


@pytest.mark.parametrize("settings", ({}, {"temperature": 1.0, "seed": 4}))
def test_a_head_loads_by_the_flag_of_all_heads(demo_head, settings):
    """--eagle HEAD that drafts level by level, other tokens than without a head, drafts that are as good as none, and a
    memory plan without the tables."""
    params = SamplingParams(max_new_tokens=60, **settings)
    prompt = load(DEMO).tokenizer.encode("def main(argv):\n    parser = ")
    engine = load(DEMO, eagle=demo_head, eagle_always=True)
    assert isinstance(engine.drafter, EagleBlockDrafter) and engine.drafter.tree == trees.DynamicTree(26, 4, 8)
    result = engine.generate(prompt, params).run()[0]
    assert result.token_ids == load(DEMO).generate(prompt, params).run()[0].token_ids
    assert result.tau > (1.2 if settings else 1.4)  # masks that have learned nothing
    size = held(engine.head) - held(engine.head.rotary)
    assert engine.plan.head == pytest.approx(size, rel=0.01)


def test_several_processes_refuse_it_by_its_name(demo_head):
    """--tp that drafts with half of a head."""
    ranks = Ranks.__new__(Ranks)
    ranks.rank, ranks.size = 0, 2
    with pytest.raises(UsageError, match="--tp splits no E-block head yet"):
        _load(LoadOptions(str(DEMO), eagle=str(demo_head), tp=2), None, lambda line: None, ranks)


def test_the_report_names_it(demo_head, capsys):
    """A report that calls it EAGLE-3, and --prove or --show-tree that fail with it."""
    argv = ["--eagle", str(demo_head), "-p", "def f(", "--max-new-tokens", "12", "--prove", "--show-tree"]
    assert generate.main(argv) == 0
    said = capsys.readouterr()
    assert "E-block" in said.out + said.err and "identical" in said.out + said.err
