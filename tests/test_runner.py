"""runner.py and the engine around it: steps ahead of the host, CUDA graphs (on a stand-in), break-even, accidents."""

from __future__ import annotations

import pytest
import torch
from test_engine import HEADS, MODEL, PROMPTS, letters, plain, scripted, settings, steps_of
from tiny import PROMPT, TREES, eagle_engine

from engine import Engine
from runner import RING, Runner


def make(kind: str, tree: str, lag: int, batch_size: int = 1) -> Engine:
    """A tiny engine that runs `lag` steps ahead of the host; '' decodes plainly."""
    engine = (
        eagle_engine(HEADS[kind], TREES[tree], batch_size) if kind else Engine(MODEL, batch_size=batch_size)
    )
    engine.lag, engine.tokenizer = lag, letters()
    return engine


def outcome(results):
    return [(r.token_ids, r.tokens_per_step, r.text, r.stop_reason) for r in results]


# ------------------------------------------------------------------ steps ahead of the host

KINDS = (("", ""), ("eagle1", "paper25"), ("eagle3", "dynamic"))


@pytest.mark.parametrize("index", (0, 2))
@pytest.mark.parametrize("kind, tree", KINDS)
def test_steps_ahead_change_nothing(kind, tree, index):
    """Steps that run ahead and are thrown away: counted in steps or tau, emitted after a stop string, or kept in a cache
    that the next turn reuses. Rows finish at different times, by strings, ids and length."""
    text = letters().decode(plain(settings(index)))
    for stops in ((), (text[9:12],), (text[4:6], text[15:19])):
        params = settings(index, stop=stops, stop_ids=(plain(settings(index), 1)[6],))
        expected = outcome(make(kind, tree, 0, 3).generate_batch(PROMPTS, params).run())
        for lag in (2, RING - 1):
            engine = make(kind, tree, lag, 3)
            first = engine.generate_batch(PROMPTS, params).run()
            assert outcome(first) == expected
            turns = [p + r.token_ids + [4, 8] for p, r in zip(PROMPTS, first, strict=True)]
            second = engine.generate_batch(turns, params).run()
            assert outcome(second) == outcome(make(kind, tree, 0, 3).generate_batch(turns, params).run())
            reused = [r.cached_tokens >= len(p) - 2 for r, p in zip(second, PROMPTS, strict=True)]
            assert all(reused)


def test_stop_string_inside_an_accepted_run_found_late():
    """A stop string in the middle of a long run, while two more runs are already accepted on the device: all of them
    must be unwound for the next turn. The oracle accepts everything."""
    long = settings(2, max_new_tokens=44)
    text = letters().decode(plain(long))
    for at in range(3, 20, 4):
        params = settings(2, stop=(text[at : at + 3],))
        want = None
        for lag in (0, 2):
            engine = scripted("chain4", settings(2))
            engine.lag, engine.tokenizer = lag, letters()
            first = engine.generate(PROMPT, params).run()
            again = steps_of(engine, PROMPT + first[0].token_ids[:2], settings(2, max_new_tokens=6))
            got = outcome(first), again[0]
            assert want in (None, got) and first[0].stop_reason == "stop"
            assert max(map(len, first[0].tokens_per_step), default=5) <= 5
            want = got


def test_a_late_stop_leaves_rows_that_the_cache_disowns():
    """The cache believed valid up to where the device went instead of to where the text ended; and that the steps above
    really run ahead (else those tests prove nothing)."""

    class Late(Engine):
        def _finish(self, row):
            super()._finish(row)
            self.reached = int(self.state.n[row])

    params = settings(2, stop=(letters().decode(plain(settings(2)))[9:12],))
    for lag in (0, 2):
        engine = Late(MODEL, letters(), lag=lag)
        held = len(PROMPT) + engine.generate(PROMPT, params).run()[0].new_tokens - 1
        assert engine.reached == held + lag
        assert len(engine._cached[0]) == held


def test_an_observer_sees_every_step_and_no_other():
    """A viewer that is shown tensors of later steps: with an observer nothing runs ahead."""
    engine, seen = make("eagle1", "paper25", 2), []
    engine.observer = lambda out: seen.append(out.emitted[0, : int(out.count[0])].tolist())
    result = engine.generate(PROMPT, settings(2)).run()[0]
    assert [t for step in seen for t in step][: len(result.token_ids) - 1] == result.token_ids[1:]
    assert len(seen) == result.steps


def test_the_ring_refuses_to_overwrite_unread_rows():
    """A lag longer than the ring: rows overwritten before the host saw them."""
    runner = Runner(torch.zeros(3, 1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    for i in range(3):
        runner.launch("", lambda i=i: runner.ring[i].fill_(i))
    with pytest.raises(RuntimeError, match="3 steps are unread"):
        runner.launch("", lambda: None)
    assert [runner.read()[0][0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=f"lag is {RING}; allowed: 0 to {RING - 1}"):
        Engine(MODEL, lag=RING)
