"""Has the tests of engines run again on another model."""

from __future__ import annotations

import functools
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

    @pytest.fixture(autouse=True)
    def fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        found = {"MODEL": model, "HEADS": heads, "plain": plain, "tiny_model": functools.partial(tiny_model, **changes)}
        for name, value in found.items():
            monkeypatch.setattr(test_engine, name, value)
        monkeypatch.setattr(test_prompt_cache, "MODEL", model)
        monkeypatch.setattr(test_prompt_cache, "HEAD", heads["eagle3-full"])
        test_engine.fresh_steps.cache_clear()
        yield
        test_engine.fresh_steps.cache_clear()

    return fixture
