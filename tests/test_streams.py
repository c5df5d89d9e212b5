"""engine/streams.py, engine/batch.py and prompts: many threads and tasks on one engine, and every kind of prompt."""

import asyncio
import functools
import gc
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import PROMPT, TREES, PieceTokenizer, V, eagle_engine, tiny_head, tiny_model

from decoding.params import SamplingParams
from decoding.step import Observer
from engine.engine import Engine
from support.machine import release_threads

MODEL = tiny_model()
HEAD = tiny_head(MODEL)
PROMPTS = [PROMPT[: 4 + i] + [i + 1] for i in range(10)]
PARAMS = [SamplingParams(temperature=i % 3 / 2, seed=i, max_new_tokens=12) for i in range(10)]


def engine(rows: int = 1) -> Engine:
    return eagle_engine(HEAD, TREES["chain4"], rows)


@functools.cache
def alone() -> list[list[int]]:
    """What each request gives on an engine of its own."""
    return [engine().generate(p, s).run()[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


async def read(stream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing happened in 20 s"
        time.sleep(0.002)


class Slow(Observer):
    """Makes a step take 5 ms."""

    def step(self, output, results):
        time.sleep(0.005)


# ------------------------------------------------------------------ threads


@pytest.mark.parametrize("rows", [1, 3])
def test_two_threads_and_ten_tasks_get_what_they_would_get_alone(rows):
    """Requests that step into each other's caches, wait for each other for ever, or draw another one's noise."""
    shared, expected, requests = engine(rows), alone(), list(zip(PROMPTS, PARAMS, strict=True))
    found: list[list[list[int]]] = []

    def one_by_one() -> None:
        streams = (shared.generate(*request) for request in requests)
        found.append([[token for chunk in stream for token in chunk.token_ids] for stream in streams])

    async def ten() -> list[list[int]]:
        return await asyncio.gather(*(read(shared.agenerate(*request)) for request in requests))

    threads = [in_thread(one_by_one) for _ in range(2)]
    assert asyncio.run(ten()) == expected
    for thread in threads:
        thread.join(60)
    assert found == [expected, expected]


@pytest.mark.parametrize("leave", ["close", "drop", "cycle", "raise"])
def test_a_stream_that_is_left_ends(leave):
    """An abandoned stream that holds a row although nobody can read it any more."""
    shared = engine()
    stream = shared.generate(PROMPT, SamplingParams(max_new_tokens=60))
    result = stream.result
    next(stream)
    if leave == "close":
        stream.close()
    elif leave == "cycle":  # only the garbage collector finds it
        ring: list = [stream]
        ring.append(ring)
        del ring
    elif leave == "raise":
        with pytest.raises(ZeroDivisionError):
            for _ in stream:
                del stream
                raise ZeroDivisionError
    if leave in ("drop", "cycle"):
        del stream
        gc.collect()
    assert shared.generate(PROMPTS[1], PARAMS[1]).run()[0].token_ids == alone()[1]
    assert result.stop_reason == "interrupted" and result.new_tokens < 20


def test_a_stream_can_be_closed_from_another_thread():
    """A server that cannot stop the answer, or the waiting, of a client that has left."""
    shared = engine()
    shared.add_observer(Slow())
    stream = shared.generate(PROMPT, SamplingParams(max_new_tokens=100))
    reader = in_thread(lambda: [time.sleep(0.001) for _ in stream])
    until(lambda: stream.result.new_tokens > 2)
    waiting = shared.generate(PROMPTS[1], PARAMS[1])
    waiter = in_thread(lambda: waiting.run())
    until(lambda: shared.batch.waiting)
    waiting.close()
    waiter.join(20)
    stream.close()
    reader.join(20)
    assert not waiter.is_alive() and not reader.is_alive()
    assert waiting.result.stop_reason == stream.result.stop_reason == "interrupted"
    assert shared.generate(PROMPTS[1], PARAMS[1]).run()[0].token_ids == alone()[1]


# ------------------------------------------------------------------ asyncio


def test_the_event_loop_stays_free_and_a_cancelled_task_closes_its_stream():
    """Steps that block a server's loop, and a client that left whose answer goes on."""
    shared, ticks = engine(), []
    shared.add_observer(Slow())

    async def tick() -> None:
        while True:
            ticks.append(threading.current_thread())
            await asyncio.sleep(0.001)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        stream = shared.agenerate(PROMPT, SamplingParams(max_new_tokens=100))
        waiting = shared.agenerate(PROMPTS[2], PARAMS[2])
        tasks = [asyncio.create_task(stream.run())]
        while stream.result.new_tokens < 3:
            await asyncio.sleep(0.001)
        tasks.append(asyncio.create_task(waiting.run()))
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        (result,) = await shared.agenerate(PROMPTS[1], PARAMS[1]).run()
        assert result.token_ids == alone()[1]
        assert stream.result.stop_reason == waiting.result.stop_reason == "interrupted"
        assert stream.result.new_tokens < 100 and waiting.result.new_tokens == 0
        ticking.cancel()

    asyncio.run(main())
    assert len(ticks) > 5


def test_a_stream_ends_with_the_task_that_read_it():
    """A failed task whose kept traceback holds the stream, so that others wait for its row; and a task that waits for its
    own first stream."""
    shared, kept = engine(), []
    shared.add_observer(Slow())

    async def fails() -> None:
        stream = shared.agenerate(PROMPT, SamplingParams(max_new_tokens=100))
        kept.append(stream)
        async for _ in stream:
            raise ZeroDivisionError

    async def main() -> None:
        assert isinstance((await asyncio.gather(fails(), return_exceptions=True))[0], ZeroDivisionError)
        first = shared.agenerate(PROMPTS[1], PARAMS[1])
        begun = (await anext(first)).token_ids
        assert await read(shared.agenerate(PROMPTS[2], PARAMS[2])) == alone()[2]
        assert begun + await read(first) == alone()[1] and kept[0].result.stop_reason == "interrupted"
        left = shared.agenerate(PROMPTS[1], SamplingParams(max_new_tokens=100))
        await anext(left)
        await left.aclose()
        assert left.result.stop_reason == "interrupted"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_blocking_request_in_an_event_loop_gets_its_text():
    """`generate` in a task while another task's stream is open: both would wait for each other."""
    shared = engine()

    async def main() -> None:
        stream = shared.agenerate(PROMPTS[2], PARAMS[2])
        begun = (await anext(stream)).token_ids
        reading = asyncio.create_task(read(stream))
        assert shared.generate(PROMPTS[1], PARAMS[1]).run()[0].token_ids == alone()[1]
        assert begun + await reading == alone()[2]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_error_reaches_the_reader_and_no_other():
    """A request whose logits are not finite takes the others down, or ends without a word where a thread of the engine
    decodes it."""
    shared = engine(2)
    real = shared.prefill.forward

    def forward(model, drafter, kv, row, tokens, *rest):
        hidden_states, features = real(model, drafter, kv, row, tokens, *rest)
        return (hidden_states * float("nan") if tokens[0, 0] == V - 1 else hidden_states), features

    shared.prefill.forward = forward

    async def main() -> None:
        good, bad = (shared.agenerate(p, PARAMS[1]) for p in (PROMPTS[1], [V - 1, 3]))
        results = await asyncio.gather(good.run(), bad.run(), return_exceptions=True)
        assert results[0][0].token_ids == alone()[1] and isinstance(results[1], ArithmeticError)

    asyncio.run(main())


# ------------------------------------------------------------------ prompts


IDS = [3, 5, 7]


@pytest.mark.parametrize(
    "prompt", [IDS, range(3, 9, 2), [np.int64(3), 5, 7], np.array(IDS, np.uint8), torch.tensor(IDS)]
)
def test_every_kind_of_ids_is_the_same_prompt(prompt):
    """An array or tensor of ids that the engine refuses, or decodes as another prompt."""
    model = engine()
    assert model.generate(prompt, PARAMS[0]).run() and model.batch.texts[0].ids[:3] == [3, 5, 7]


def test_text_is_encoded_with_the_tokenizer():
    """A text that is taken for a sequence of characters, and a missing tokenizer that ends in a traceback."""

    class Encodes(PieceTokenizer):
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    with_text = Engine(MODEL, Encodes([bytes([97 + i % 26]) for i in range(V)]))
    ids, texts = (with_text.generate(prompt, PARAMS[0]).run()[0].token_ids for prompt in ([2, 3, 4], "to the moon"))
    assert ids == texts
    with pytest.raises(ValueError, match="no tokenizer; give token ids"):
        engine().generate("to the moon")


@pytest.mark.parametrize("prompt, named", [
    (None, "NoneType"), (b"text", "bytes"), ({3, 5}, "set"), ({"a": 1}, "dict"),
    ([3, "a"], "an item 'a' (str)"), ([3, 1.5], "an item 1.5 (float)"), ([[3, 5]], "an item [3, 5] (list)"),
    (np.array([1.5]), "ndarray of shape (1,) and type float64"),
    (np.array([[3]]), "ndarray of shape (1, 1) and type int64"),
    (torch.tensor(3), "Tensor of shape () and type torch.int64"),
    (torch.tensor([True]), "Tensor of shape (1,) and type torch.bool"),
])  # fmt: skip
def test_anything_else_is_one_clear_type_error(prompt, named):
    """A prompt of a wrong type that fails deep inside, or is decoded as something that nobody asked for."""
    with pytest.raises(TypeError, match=re.escape(named)) as error:
        engine().generate(prompt)
    assert "allowed: text, a list of token ids" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(TypeError, match="Use generate for one prompt"):
        engine().generate_batch("one text")


def test_a_stopped_stream_ends_within_a_part_of_its_prompt():
    """A client that leaves while a long prompt is read, and whose engine stays busy with it; caches that then count as
    filled; a stop that waits."""
    made, seen, long = engine(), [], [1, 5, 9, 22] * 30  # four chunks
    real = made.prefill.forward

    def forward(*args):
        seen.append(len(seen))
        stream.stop()
        return real(*args)

    made.prefill.forward = forward
    stream = made.generate(long, PARAMS[2])
    assert list(stream) == [] and seen == [0] and stream.result.stop_reason == "interrupted"
    made.prefill.forward = real
    again, other = (each.generate(long, PARAMS[2]).run()[0].token_ids for each in (made, engine()))
    assert again == other
    stream = made.generate(long, PARAMS[2])
    first = next(stream)
    stream.stop()
    assert list(stream) == [] and stream.result.token_ids == first.token_ids
    assert made.generate(long, PARAMS[2]).run()[0].cached_tokens > 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_request_leaves_no_threads_of_openmp_behind():
    """Threads that one caller's request leaves behind: the next caller's request decoded at a third of its speed."""

    class Busy(Observer):
        """Makes OpenMP start its threads, which a tiny model does not."""

        def step(self, output, results):
            torch.ones(1 << 22).exp().sum()
            counts.append(len(os.listdir("/proc/self/task")))

    counts: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        release_threads()
        idle = len(os.listdir("/proc/self/task"))
        made = engine()
        made.add_observer(Busy())
        for close in (False, True):
            stream = made.generate(PROMPTS[0], PARAMS[0])
            next(stream), next(stream)
            stream.close() if close else stream.run()
            assert len(os.listdir("/proc/self/task")) == idle
    finally:
        torch.set_num_threads(before)
    assert max(counts) == idle + 2  # otherwise the test shows nothing


# Two streams, so that the engine's own thread decodes. The program ends while it does, and nobody reads the second one.
ENDING = """
import threading, time
from test_streams import PROMPTS, SamplingParams, engine
made = engine(2)
streams = [made.generate(p, SamplingParams(max_new_tokens=n)) for p, n in zip(PROMPTS, (60, 140))]
readers = [threading.Thread(target=lambda s=s: next(s)) for s in streams]
for reader in readers: reader.start()
late = threading.Thread(target=lambda: print(len(streams[0].run()[0].token_ids)))
late.start()
"""


def test_a_program_may_end_while_the_engine_decodes():
    """Python ended the engine's thread within a C++ function: the process was aborted after its last line. A thread that
    still reads gets its whole text."""
    where = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (where, where.parent)))}
    ended = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "60\n", "")
