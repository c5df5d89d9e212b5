"""results.py: the measures of a result, from step lengths that a person can count."""

import pytest
from tiny import PROMPT, eagle_engine, tiny_head, tiny_model

import tree as trees
from decoding.params import SamplingParams
from engine.engine import Engine
from engine.results import GenerationResult


def result(lengths, **more) -> GenerationResult:
    return GenerationResult(4, 0.0, 0, tokens_per_step=[[7] * n for n in lengths], **more)


def test_n_alpha_counts_whole_speculative_steps_of_a_chain_alone():
    """Catches plain steps, and a last step that the length limit cut, that count as rejections, and depths that the
    chain does not have."""
    r = result([3, 1, 1, 2, 3, 1, 1], plain_steps=[2, 5], chain=2)
    # examined: 3, 1, 2, 3 -> three of four accepted at depth 1, two of those three at depth 2
    assert r.n_alpha == [pytest.approx(3 / 4), pytest.approx(2 / 3)]
    assert r.plain_tokens == 2 and r.tau == pytest.approx(10 / 5)
    assert r.accepted_by_depth == [pytest.approx(3 / 5), pytest.approx(2 / 5)]
    assert result([3, 2, 4], chain=0).n_alpha == []
    assert result([1, 1], chain=5).n_alpha == [0.0]
    assert result([2], chain=5).n_alpha == [] and result([], chain=5).n_alpha == []


@pytest.mark.parametrize("tree, chain", [(trees.chain(2), 2), (trees.PAPER25, 0), (trees.chain(7), 7)])
def test_the_engine_says_which_results_come_from_a_chain(tree, chain):
    """Catches n-alpha of a tree, where siblings make it another number, and a chain without n-alpha."""
    model = tiny_model()
    engine = eagle_engine(tiny_head(model), tree)
    found = engine.generate(PROMPT, SamplingParams(max_new_tokens=30)).run()[0]
    assert found.chain == chain and len(found.n_alpha) <= min(chain, 5)
    assert bool(found.n_alpha) == bool(chain) == bool(found.to_dict()["n_alpha"])
    assert Engine(model).generate(PROMPT, SamplingParams(max_new_tokens=5)).run()[0].chain == 0
