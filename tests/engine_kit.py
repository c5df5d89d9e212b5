"""Has the tests of engines run again on another model."""

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import test_engine
import test_prompt_cache
from tiny import tiny_model

from decoding.params import SamplingParams
from engine.engine import Engine
from model import Transformer


def on_model(model: Transformer, heads: dict, changes: dict[str, Any]) -> Any:
    """A fixture for a file that imports tests of test_engine and test_prompt_cache: they run on this model, which
    `tiny_model(**changes)` made, and with these heads."""

    @functools.cache
    def plain(params: SamplingParams, row: int = 0) -> tuple[int, ...]:
        seed = {**vars(params), "seed": params.seed + row}
        return tuple(Engine(model).generate(test_engine.PROMPTS[row], SamplingParams(**seed)).run()[0].token_ids)

    @pytest.fixture(autouse=True, scope="module")
    def fixture() -> Iterator[None]:
        found = {"MODEL": model, "HEADS": heads, "plain": plain, "tiny_model": functools.partial(tiny_model, **changes)}
        found["fresh_steps"] = functools.cache(test_engine.fresh_steps.__wrapped__)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in found.items():
                patch.setattr(test_engine, name, value)
            patch.setattr(test_prompt_cache, "MODEL", model)
            patch.setattr(test_prompt_cache, "HEAD", heads["eagle3-full"])
            yield

    return fixture


def check_random_requests(engine: Engine, alone: Engine, rounds: int, count: int, drop: bool = False) -> None:
    """Requests that begin alike have in the slots of `engine` the tokens of `alone`. drop: in each round one is closed
    after its first tokens."""
    rng = random.Random(0)
    stems = [[rng.randrange(97) for _ in range(n)] for n in (40, 70)]
    for _ in range(rounds):
        asked = []
        for _ in range(count):
            prompt = rng.choice(stems)[: rng.randrange(2, 70)] + [rng.randrange(97) for _ in range(rng.randrange(4))]
            params = SamplingParams(rng.choice((0, 0.7, 1)), seed=rng.randrange(9), max_new_tokens=rng.randrange(1, 24))
            asked.append((prompt, params, engine.generate(prompt, params)))
        if drop:
            stream = asked.pop(rng.randrange(count))[2]
            next(iter(stream))
            stream.close()
        for prompt, params, stream in asked:
            assert stream.run()[0].token_ids == alone.generate(prompt, params).run()[0].token_ids
