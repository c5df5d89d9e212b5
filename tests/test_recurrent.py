"""Engines of models with recurrent layers: the tests of all engines, and what their memory does besides."""

import random

import pytest
import test_engine
import torch
from engine_kit import check_random_requests, on_model
from test_engine import (  # noqa: F401 - they are run again, on the model below
    test_a_nan_on_the_accepted_path_is_an_error,
    test_a_rejected_nan_branch_changes_nothing,
    test_log_probabilities_of_a_prompt_are_those_of_its_steps,
    test_oracle_is_accepted_whole_and_hostile_not_at_all,
    test_same_tokens_in_a_batch,
    test_stop_strings_across_tokens_and_steps,
    test_the_engine_survives,
    test_wide_plain_forward_is_plain,
)
from test_model import random_tree
from test_prompt_cache import (  # noqa: F401
    test_a_restored_row_is_bitwise_what_was_saved,
    test_texts_of_an_earlier_run_are_found_and_bad_files_are_not_used,
    test_two_chats_that_take_turns_run_only_what_is_new,
)
from tiny import PROMPT, TREES, eagle_drafter, eagle_engine, heads, tiny_model

import kernels
from decoding import snapshots
from decoding.params import SamplingParams
from engine import prefill
from engine.engine import Engine, EngineConfig
from engine.fused import fused_parts
from engine.prompt_cache import PromptCache
from families.config import DeltaConfig
from kernels.memory import commit_memory, commit_text
from model import chain_ancestors
from weights.quantized import pack_

HYBRID = {"recurrent": (0, 1), "delta": DeltaConfig(2, 4, 8, 8, 4), "qk_norm": True, "output_gate": True, "layers": 3}
MODEL = tiny_model(**HYBRID)
HEADS = heads(MODEL)
recurrent = on_model(MODEL, HEADS, HYBRID)


@pytest.fixture(autouse=True)
def near(monkeypatch):
    """Snapshots of short texts, too."""
    monkeypatch.setattr(snapshots, "APART", 2)


def row_by_row(x: torch.Tensor, weight: torch.Tensor, _bias: None = None) -> torch.Tensor:
    """F.linear with the same bits for a row among any others, which torch's own products do not have."""
    return torch.cat([row @ weight.T for row in x.flatten(0, -2).split(1)]).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("mode", ["reference", "row by row", "cpu"])
def test_nodes_of_trees_have_the_bits_of_separate_sequences(mode, monkeypatch):
    """Catches a node whose layers see a sibling, or whose bits depend on the number of rows: 120 random trees. Plain code
    has the same bits where all layers are recurrent and products are made row by row."""
    if mode == "cpu" and kernels.cpu_problem():
        pytest.skip("the CPU kernels do not run here")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "delta": DeltaConfig(2, 4, 16, 16, 4)}
    if mode == "row by row":
        monkeypatch.setattr(torch.nn.functional, "linear", row_by_row)
        sizes["recurrent"] = (0, 1, 2)
    model = tiny_model(torch.float32 if mode == "cpu" else torch.float64, **(HYBRID | sizes))
    with kernels.KernelBackend("cpu" if mode == "cpu" else "reference", "cpu").active(), torch.inference_mode():
        pack_(model, model.dtype)
        layers = fused_parts().layers if mode == "cpu" else None
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            size = 2 + seed % 10
            parent, ancestors = random_tree(size, seed)
            text, tree = (torch.randint(0, 97, (1, n), generator=generator) for n in (7, size))
            cache, memory = model.new_cache(1, 40), model.new_memory(1, size, size)
            own = memory._replace(keep=torch.tensor([7]))
            chain = torch.arange(7)[None], chain_ancestors(1, 7, "cpu")
            model(text, model.nodes(torch.zeros(1).long(), *chain, 40, chain=True), cache, (), layers, own)
            commit_text(own, 3)
            depth = ancestors.sum(-1)[None] - 1
            nodes = model.nodes(torch.tensor([7]), depth, ancestors[None], 40)
            kept = [t.clone() for t in (*cache, *memory)]
            together = model(tree, nodes, cache, (), layers, memory)[0]
            leaf = int(torch.randint(size, (), generator=generator))
            for t, value in zip((*cache, *memory), kept, strict=True):
                t.copy_(value)
            for at, node in enumerate(ancestors[leaf].nonzero().flatten().tolist()):
                one = torch.zeros(1, 1).long(), torch.ones(1, 1, 1, dtype=torch.bool)
                nodes = model.nodes(torch.tensor([7 + at]), *one, 40)
                alone = model(tree[:, node : node + 1], nodes, cache, (), layers, memory)[0]
                commit_memory(memory, one[0], torch.ones(1).long(), 3)
                if mode != "reference":
                    assert torch.equal(alone[0, 0], together[0, node])
                else:  # torch's own products have other bits in other widths
                    assert torch.allclose(alone[0, 0], together[0, node], atol=1e-12)


@pytest.mark.parametrize("kind", [None, "eagle3"])
def test_a_chat_goes_on_from_its_memory_or_from_a_snapshot(kind):
    """Catches an answer that is run again at every turn, a memory that goes on although the text behind it has changed,
    and a thought that a template takes out of the history, so that all of the chat would be run again."""

    def made() -> Engine:
        return eagle_engine(HEADS[kind], TREES["chain4"]) if kind else Engine(MODEL)

    params = SamplingParams(1.0, seed=5, max_new_tokens=20)
    engine = made()
    first = PROMPT + engine.generate(PROMPT, params).run()[0].token_ids
    turns = [first + [4, 8, 2], None, None]
    result = engine.generate(turns[0], params).run()[0]
    assert len(first) - 6 <= result.cached_tokens < len(first)
    turns[1] = turns[0] + [9, 9, 1]  # as if the answer had been taken out
    again = engine.generate(turns[1], params).run()[0]
    assert again.cached_tokens >= len(first) - 7
    turns[2] = PROMPT[:4] + [6, 6]
    fresh = engine.generate(turns[2], params).run()[0]
    assert fresh.cached_tokens == 0
    for text, found in zip(turns, (result, again, fresh), strict=True):
        assert made().generate(text, params).run()[0].token_ids == found.token_ids


@pytest.mark.parametrize("kind", [None, "eagle3"])
def test_texts_that_begin_alike_leave_the_memory_of_a_fresh_engine(kind):
    """A snapshot of another text, or one that is taken up with too few of the rows behind it, or left with another row:
    prompts whose beginnings are those of earlier ones, by turns in two rows. The tokens alone show little of that."""
    drafters = [eagle_drafter(HEADS[kind], TREES["chain4"], rows) if kind else None for rows in (2, 1)]
    engine, fresh = (
        Engine(MODEL, None, drafter, EngineConfig(batch_size=rows, lag=0))
        for rows, drafter in zip((2, 1), drafters, strict=True)
    )
    engine.keep_prompts(PromptCache(1))
    draw, texts, places, reused = random.Random(3), [[5]], set(), 0
    for turn in range(30):
        known = draw.choice(texts[-4:])
        begun = known[: draw.choice((len(known), draw.randint(1, len(known))))][:100]
        prompt, params = begun + draw.choices(range(90), k=draw.randint(3, 40)), SamplingParams(1.0, max_new_tokens=9)
        other = engine.generate([*prompt[: len(prompt) // 2], 91], params) if turn % 3 == 0 else None
        if other:
            next(other)
        result = engine.generate(prompt, params).run()[0]
        texts.append(prompt + result.token_ids)
        reused += result.cached_tokens
        row = next(
            b for b, text in enumerate(engine.batch.texts) if text.ids and text.ids == texts[-1][: len(text.ids)]
        )
        places |= {snapshot.end - snapshot.at for snapshot in engine.batch.texts[row].snapshots}
        fresh.forget()
        assert fresh.generate(prompt, params).run()[0].token_ids == result.token_ids
        ours, theirs = (on.state.memory for on in (engine, fresh))
        assert ours.pending[row] == theirs.pending[0]
        torch.testing.assert_close(ours.memory[row], theirs.memory[0], rtol=0, atol=1e-9)
        if other:
            other.run()
    assert reused > 500 and (kind or len(places) > 1)


def test_the_copy_of_a_memory_is_near_the_end_of_a_prompt_in_wide_parts(monkeypatch):
    """A prompt of one wide part, of whose memory no copy is left, so that a text that begins alike is run again."""
    monkeypatch.setattr(prefill, "CHUNKS", (4, 8))
    monkeypatch.setattr(prefill, "WIDE_CHUNKS", (16, 32))
    text, params = [3 + i % 50 for i in range(32)], SamplingParams(max_new_tokens=2)
    engine, fresh = (Engine(MODEL, config=EngineConfig(chunk=widest)) for widest in (32, 8))
    engine.generate(text, params).run()
    result = engine.generate(text[:31] + [1, 2, 3], params).run()[0]
    assert result.cached_tokens == 30
    assert fresh.generate(text[:31] + [1, 2, 3], params).run()[0].token_ids == result.token_ids


def test_a_stop_within_a_step_leaves_a_memory_to_go_on_from():
    """Catches a memory that has taken the tokens behind a stop. Steps that ran ahead of the host may take them: then the
    text is run again, and the tokens are right."""
    params = SamplingParams(seed=3, max_new_tokens=24)
    truth = PROMPT + list(test_engine.plain(params))
    for lag in (0, 2):
        for k in (3, 5, 6):
            engine = test_engine.scripted("chain4", params, lag=lag)
            stop = SamplingParams(seed=3, max_new_tokens=24, stop_ids=(truth[len(PROMPT) + k],))
            ended = engine.generate(PROMPT, stop).run()[0].token_ids
            text, short = PROMPT + ended + [7, 7], SamplingParams(seed=3, max_new_tokens=9)
            result = engine.generate(text, short).run()[0]
            assert result.token_ids == Engine(MODEL).generate(text, short).run()[0].token_ids
            assert result.cached_tokens >= len(PROMPT) - 1


def test_random_requests_in_slots_have_the_tokens_of_requests_alone():
    """Catches rows that take each other's memory when they change places, are cancelled, or go on from another's text,
    and a rounded cache that is cut for all layers where only some have one."""
    drafter = eagle_drafter(HEADS["eagle3"], TREES["dynamic"], 4)
    engine = Engine(MODEL, None, drafter, EngineConfig(batch_size=4, kv_dtype=torch.int8))
    alone = Engine(MODEL, config=EngineConfig(kv_dtype=torch.int8))
    assert alone.state.kv[0].shape[0] == 1
    check_random_requests(engine, alone, 2, 7, drop=True)
