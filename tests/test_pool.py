"""engine/pool.py and `--pool`: one cache for all rows, whose room requests wait for, and in which rows move."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from tiny import PROMPT, TREES, V, eagle_drafter, tiny_head, tiny_model

import kernels
from decoding.params import SamplingParams
from engine import prefill
from engine.engine import Engine, EngineConfig
from engine.load import load
from engine.pool import Pool
from engine.prefill import chunk_width
from engine.prompt_cache import PromptCache
from engine.request import Request
from loading.options import DEMO

MODEL = tiny_model()
HEADS = {"plain": None, "eagle3": tiny_head(MODEL, 3)}
COUNT, ROOM = 12, 70  # requests, and tokens that the longest one may have


def engine(kind: str, rows: int, pool: int | None = None) -> Engine:
    head = HEADS[kind]
    drafter = eagle_drafter(head, TREES["medusa"], rows) if head else None
    return Engine(MODEL, None, drafter, EngineConfig(batch_size=rows, ctx=ROOM, pool=pool))


@functools.cache
def asked() -> list[tuple[list[int], SamplingParams]]:
    """Requests of all lengths, some of which begin like an earlier one."""
    draw = random.Random(7)
    made: list[tuple[list[int], SamplingParams]] = []
    for i in range(COUNT):
        prompt = [draw.randrange(1, V) for _ in range(draw.choice((1, 9, 34)))]
        if i % 3 == 2:
            prompt = made[i - 2][0] + PROMPT
        params = SamplingParams(temperature=i % 2, seed=i, max_new_tokens=draw.choice((1, 4, 9, 16)))
        made.append((prompt[: ROOM - 16], params))
    return made


@functools.cache
def alone(kind: str) -> list[list[int]]:
    """What each request gives where no other one was before."""
    one, found = engine(kind, 1), []
    for prompt, params in asked():
        one.forget()
        found.append(one.generate(prompt, params).run()[0].token_ids)
    return found


def test_a_prompt_that_runs_alone_is_read_in_wide_parts(monkeypatch):
    """Parts that are filled up by more than an eighth, wide ones while another row waits for its steps, tokens that
    depend on the parts, and a part that is wider than what the memory was planned for."""
    assert [chunk_width(left, 2048) for left in (1, 32, 200, 257, 450, 1000, 1100, 1800, 2048, 5000)] == [
        32, 32, 256, 256, 512, 1024, 1024, 2048, 2048, 2048]  # fmt: skip
    assert [chunk_width(left, 512) for left in (450, 900, 5000)] == [512, 512, 512] and chunk_width(5000, 256) == 256
    monkeypatch.setattr(prefill, "CHUNKS", (4, 8))
    monkeypatch.setattr(prefill, "WIDE_CHUNKS", (16, 32))
    prompt, params = [3 + i % 50 for i in range(55)], SamplingParams(temperature=1, seed=4, max_new_tokens=9)
    found = []
    for widest in (8, 32):
        drafter = eagle_drafter(HEADS["eagle3"], TREES["medusa"], 2)
        one = Engine(MODEL, None, drafter, EngineConfig(2, ROOM, chunk=widest))
        widths, real = [], one.prefill.forward
        one.prefill.forward = lambda *args, widths=widths, real=real: widths.append(args[4].shape[1] - 1) or real(*args)
        found.append(one.generate(prompt, params).run()[0].token_ids)
        one.forget()
        first = one.generate(PROMPT, replace(params, max_new_tokens=40))
        next(first)
        read = len(widths)
        found.append(one.generate(prompt, params).run()[0].token_ids)
        first.run()
        assert widths[0] == widest and max(widths[read:]) == 8
    assert found[0] == found[1] == found[2] == found[3]


def check_spans(found: Engine) -> None:
    """Every span lies in the cache, no two share a place, and the device knows them."""
    state = found.state
    spans = sorted(span for span in state.spans if span != state.nowhere)
    for (first, size), (after, _) in zip(spans, [*spans[1:], (state.places, 0)], strict=True):
        assert size > 0 and first + size <= after
    assert state.segments.tolist() == [[first, size - 1] for first, size in state.spans]


def waits_for_room(found: Engine) -> bool:
    """Whether a row is free for the first request that waits, but not enough places are."""
    batch, more = found.batch, found.drafter.N + 1
    if not batch.waiting or None not in batch.rows:
        return False
    sizes = [len(r.prompt) + r.params.max_new_tokens + more for r in (*batch.rows, batch.waiting[0]) if r]
    return sum(sizes) > found.state.places


def run(found: Engine, stops: dict[int, int]) -> tuple[list[Request], int]:
    """All requests at once, of which some are cancelled after so many parts. Also how often one waited for room alone."""
    requests = [found.requests([prompt], [params])[0] for prompt, params in asked()]
    for request in requests:
        found.batch.submit(request)
    batch, waited, parts = found.batch, 0, 0
    while batch.busy:
        assert parts < 3000, "requests wait for ever"
        for number, after in stops.items():
            if parts == after:
                requests[number].stopping = True
        batch.iterate()
        check_spans(found)
        waited += waits_for_room(found)
        parts += 1
    return requests, waited


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rows, pool", [(1, ROOM), (3, ROOM), (8, ROOM + 30), (8, None)])
def test_a_request_gets_what_it_gets_alone_from_a_pool_of_any_size(kind, rows, pool):
    """Rows that write into each other's places, a span that moves without its keys, requests that wait for ever or pass
    each other, and places that a cancelled request keeps."""
    found = engine(kind, rows, pool)
    requests, waited = run(found, {4: 9, 7: 20, 11: 2})
    for i, request in enumerate(requests):
        expected, got = alone(kind)[i], request.result.token_ids
        assert got == (expected if i not in (4, 7, 11) else expected[: len(got)]), i
    began = [request.began for request in requests if request.began]
    assert began == sorted(began) and len(began) >= COUNT - 3
    assert (waited > 0) == (pool is not None and rows > 1)
    assert any(request.result.cached_tokens for request in requests)


def test_kept_texts_go_where_a_request_needs_their_room_and_the_oldest_first():
    """A text that is kept although a request waits for its places, the newest one dropped before the oldest, and one that
    is lost although the cache of earlier prompts has room for it."""
    found = engine("eagle3", 3, ROOM + 30)
    found.keep_prompts(PromptCache(8))
    texts = [[i + 1] * 36 + [9] for i in range(3)]
    short = SamplingParams(max_new_tokens=3)

    def cached(prompt: list[int], params: SamplingParams = short) -> int:
        result = found.generate(prompt, params).run()[0]
        check_spans(found)
        expected = engine("eagle3", 1).generate(prompt, params).run()[0]
        assert result.token_ids == expected.token_ids
        return result.cached_tokens

    assert [cached(text) for text in texts] == [0, 0, 0]
    held = [row.ids[0] for row in found.batch.texts if row.ids]
    assert sorted(held) == [1, 2, 3]  # short texts are all kept
    assert cached([50] * 40, SamplingParams(max_new_tokens=30)) == 0  # needs the places of two of them
    assert sorted(row.ids[0] for row in found.batch.texts if row.ids) == [3, 50]
    assert found.prompt_cache.hits == 0 and cached([*texts[2], 4]) > 30 and found.prompt_cache.hits == 0
    assert cached([*texts[0], 4]) > 30 and found.prompt_cache.hits == 1  # it was copied before it went


def test_a_beginning_that_a_running_request_has_is_copied_into_another_span():
    """A system prompt that is computed again, or whose copy misses what was moved meanwhile."""
    found = engine("eagle3", 3, 2 * ROOM)
    prompt = [(7 * i) % V for i in range(40)]
    first, second = (found.requests([[*prompt, i]], [SamplingParams(max_new_tokens=12, seed=i)])[0] for i in (1, 2))
    found.batch.submit(first)
    for _ in range(4):
        found.batch.iterate()
    assert first.length > 40 and not first.ended
    found.batch.submit(second)
    while found.batch.busy:
        found.batch.iterate()
        check_spans(found)
    assert second.result.cached_tokens >= 38
    for request in (first, second):
        one = engine("eagle3", 1).generate(request.prompt, request.params).run()[0]
        assert request.result.token_ids == one.token_ids


def test_after_a_failure_no_span_is_taken_for_another_one(monkeypatch):
    """Rows whose places are not those that the steps use, after a failure or Ctrl-C in the middle of a change."""
    found = engine("eagle3", 3, ROOM)
    for request in (found.requests([[i] * 9], [SamplingParams(max_new_tokens=5)])[0] for i in (1, 2)):
        found.batch.submit(request)
    found.batch.iterate()
    with monkeypatch.context() as broken:
        broken.setattr(found, "launch", None)
        found.state.spans.reverse()  # what an interrupted exchange of two rows may leave
        found.batch.iterate()
    assert not any(found.batch.rows)
    requests, _ = run(found, {})
    assert [request.result.token_ids for request in requests] == alone("eagle3")


def test_spans_move_only_where_no_gap_is_wide_enough():
    """Keys that move for every request, a gap that is missed, keys that are lost, or a span over another one."""
    draw = random.Random(3)
    state = engine("plain", 4, 2 * ROOM).state
    pool, held = Pool(state), dict.fromkeys(range(4), 0)
    for row in range(4):
        pool.cut(row, 0)
    moved = 0
    for _ in range(200):
        row, size = draw.randrange(4), draw.randrange(3, 50)
        if pool.room([row]) < size:
            pool.cut(row, draw.randrange(2) * min(held[row], 5))
            held[row] = min(held[row], state.spans[row][1] if state.spans[row] != state.nowhere else 0)
            continue
        before = list(state.spans)
        others = [span for b, span in enumerate(before) if b != row and span != state.nowhere]
        used = torch.zeros(state.places, dtype=torch.bool)
        for first, length in others:
            used[first : first + length] = True
        wide = any(not used[at : at + size].any() for at in range(state.places - size + 1))
        pool.extend(row, size)
        state.write_spans()
        changed = any(state.spans[b] != before[b] for b in range(4) if b != row)
        assert changed <= (not wide)
        moved += changed
        for b, (first, length) in enumerate(state.spans):
            keys = state.kv[0][0, 0, 0, 0, first : first + min(held[b], length), 0]
            assert torch.equal(keys, torch.full_like(keys, b + 1))
        first, held[row] = state.spans[row][0], size
        state.kv[0][..., first : first + size, :] = row + 1
    assert moved > 10


def test_a_pool_has_room_for_one_context_and_not_more_than_all():
    """A pool that some request could wait for forever, or that allocates what nobody can use."""
    for pool in (ROOM - 1, 3 * ROOM + 1):
        with pytest.raises(ValueError, match=rf"pool is {pool} tokens; allowed: {ROOM} .* to {3 * ROOM}"):
            engine("plain", 3, pool)
    sizes = [engine("plain", 3, pool).state.kv[0].shape[4] for pool in (ROOM, 3 * ROOM)]
    # a tree of one node, a trash row; one place for rows without any
    assert sizes == [ROOM + 3 * 2 + 1, 3 * (ROOM + 2)]


@pytest.mark.skipif(bool(kernels.cpu_problem()), reason="the CPU kernels do not run here")
def test_the_layers_in_cpp_use_a_shared_cache():
    """All layers in one call that read or write the places of another row, which no test of one operation sees."""
    prompts = [[5 + i] * (3 + 11 * i) for i in range(4)]
    settings = [SamplingParams(max_new_tokens=12, temperature=i % 2, seed=i) for i in range(4)]
    one = load(DEMO, device="cpu", ctx=96)
    several = one.sibling(None, replace(one.config, batch_size=3, pool=110))
    alone = [one.generate(*request).run()[0].token_ids for request in zip(prompts, settings, strict=True)]
    together = [result.token_ids for result in several.generate_batch(prompts, settings).run()]
    check_spans(several)
    assert together == alone and all(len(ids) == 12 for ids in alone)
