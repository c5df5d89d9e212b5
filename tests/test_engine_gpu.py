"""The engine on a CUDA device: graphs give the eager tokens, nothing waits in the loop, one launch per step.

Run it with `make gpu` (pytest -m gpu). Without a device it is skipped.
"""

from __future__ import annotations

import pytest
import torch

from engine import Engine
from generate import DEMO_PROMPT
from load import load
from options import DEMO
from sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HEADS = sorted(str(p) for p in DEMO.glob("eagle*") if p.is_dir())[:1]
TREES = [None, "paper25", "dynamic:32,6,6"]


def build(tree: str | None, mode: str | None, **options) -> Engine:
    """The demo model on the GPU. Without a tree it decodes plainly, without a mode it runs eagerly."""
    eagle = {} if tree is None else {"eagle": HEADS[0], "tree": tree}
    compiled = {} if mode is None else {"compile": True, "compile_mode": mode}
    return load(DEMO, device="cuda", ctx=1024, **({"eagle_always": True} | eagle | compiled | options))


def prompt_of(engine: Engine) -> list[int]:
    return engine.tokenizer.encode(DEMO_PROMPT)


def decode(engine: Engine, **params):
    result = engine.generate(prompt_of(engine), SamplingParams(**({"max_new_tokens": 80} | params))).run()[0]
    return result.token_ids, result.tokens_per_step, result.stop_reason


REQUESTS = [
    dict(),
    dict(temperature=0.7, seed=1),
    dict(temperature=1.3, seed=2),
    dict(temperature=1.0, top_p=0.9, seed=3),
    dict(stop=("\n\n",)),
]


@pytest.mark.parametrize("tree", TREES)
def test_graph_equals_eager(tree):
    """A captured step gives the ids and step lengths of the eager step, request after request. Only a new kind of
    sampling captures another graph; a new temperature, seed, prompt or stop string does not."""
    graph, eager = build(tree, "capture"), build(tree, None)
    for number, params in enumerate(REQUESTS):
        assert decode(graph, **params) == decode(eager, **params), params
        assert len(graph.runner.graphs) == (1, 2, 2, 3, 3)[number]
    longer = prompt_of(graph) * 2
    assert graph.generate(longer).run()[0].token_ids == eager.generate(longer).run()[0].token_ids


@pytest.mark.parametrize("mode", ("graph", "reduce-overhead"))
def test_compiled_modes_agree_to_rounding(mode):
    """Compiled steps give the tokens of eager plain decoding, except where two tokens are nearly tied, because
    Inductor's kernels round differently."""
    compiled, eager = build("paper25", mode), build(None, None)
    for params in REQUESTS[:2]:
        (ours, *_), (theirs, *_) = decode(compiled, **params), decode(eager, **params)
        fork = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if fork is not None:
            prompt = prompt_of(eager)
            sampling = SamplingParams(**params)
            tokens = ours[fork], theirs[fork]
            assert eager.margin(prompt + ours[:fork], len(prompt), sampling, *tokens)[0] < 0.25, fork


@pytest.mark.parametrize("fallback", (False, True))
@pytest.mark.parametrize("tree", TREES[1:])
def test_nothing_in_the_loop_waits_for_the_device(tree, fallback):
    """After the first token, no step synchronises with the host (torch's sync debug mode raises no error), also while
    plain steps take over and the drafter catches up."""
    engine = build(tree, "capture", eagle_always=not fallback)
    decode(engine)  # captures, and measures where plain steps may take over
    if fallback:
        engine.timings = {(SamplingParams().mode, 1): (1.0, 100.0)}
    stream = engine.generate(prompt_of(engine), SamplingParams(max_new_tokens=300))
    chunks = iter(stream)
    next(chunks)  # the prompt's forward may wait: its token is the first answer
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in chunks:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stream.result.new_tokens == 300
    assert (stream.result.plain_tokens >= 64) == fallback


def test_one_launch_per_step():
    """Each step launches one CUDA graph, and a request at most two kernels beside the graphs."""
    engine = build("paper25", "capture")
    decode(engine)
    stream = engine.generate(prompt_of(engine), SamplingParams(max_new_tokens=120))
    chunks = iter(stream)
    next(chunks)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in chunks:
            pass
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    steps = stream.result.steps
    assert steps <= names.count("cudaGraphLaunch") <= steps + engine.lag
    assert sum(name.startswith("cudaLaunchKernel") for name in names) <= 2  # the step counter, a host-side stop


def test_a_batch_in_one_graph():
    """A captured batch gives the tokens and stop reasons of the eager batch. The sequences end at different times."""
    prompts = [prompt_of(build(None, None))[:k] for k in (12, 7, 20)]
    params = SamplingParams(max_new_tokens=60, temperature=0.8, seed=4, stop=("\n\n",))
    outputs = [
        [(r.token_ids, r.stop_reason) for r in engine.generate_batch(prompts, params).run()]
        for engine in (build("paper25", "capture", batch_size=3), build("paper25", None, batch_size=3))
    ]
    assert outputs[0] == outputs[1]


def test_the_first_request_measures_and_reports():
    """The first request measures a plausible break-even, and its step times do not include the captures."""
    engine = build("paper25", "capture", eagle_always=False)
    decode(engine)
    assert 0.5 < engine.break_even_tau < 50 and max(engine.step_seconds) < 0.1


def test_zz_a_step_that_cannot_be_captured_leaves_a_usable_engine():
    """A step that needs the host is a one-line error, and the engine then gives the right tokens. It is the last test,
    because it provokes a CUDA error."""
    engine, eager = build("paper25", "capture"), build("paper25", None)
    real = engine._step

    def reading(*args, **named):
        out = real(*args, **named)
        out.count.tolist()
        return out

    engine._step = reading
    with pytest.raises(RuntimeError, match="could not be captured.*one kernel at a time"):
        decode(engine)
    engine._step = real
    assert decode(engine) == decode(eager)
