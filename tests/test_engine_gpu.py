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
    """Catches a replay that repeats the request in which it was captured. The same kernels, captured, must give the
    same ids in the same steps, request after request, and a new temperature, seed, prompt or stop string must not
    capture again."""
    graph, eager = build(tree, "capture"), build(tree, None)
    for number, params in enumerate(REQUESTS):
        assert decode(graph, **params) == decode(eager, **params), params
        assert len(graph.runner.graphs) == (1, 2, 2, 3, 3)[number]
    turn = prompt_of(graph) * 2
    assert graph.generate(turn).run()[0].token_ids == eager.generate(turn).run()[0].token_ids


@pytest.mark.parametrize("mode", ("graph", "reduce-overhead"))
def test_compiled_modes_agree_to_rounding(mode):
    """Catches compiled steps that decode something else. Inductor's kernels round differently, so a fork is allowed,
    but only where two tokens are nearly tied."""
    compiled, eager = build("paper25", mode), build(None, None)
    for params in REQUESTS[:2]:
        (ours, *_), (theirs, *_) = decode(compiled, **params), decode(eager, **params)
        fork = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if fork is not None:
            prompt = prompt_of(eager)
            sampling = SamplingParams(**params)
            tokens = ours[fork], theirs[fork]
            assert eager.margin(0, prompt + ours[:fork], len(prompt), sampling, *tokens)[0] < 0.25, fork


@pytest.mark.parametrize("fallback", (False, True))
@pytest.mark.parametrize("tree", TREES[1:])
def test_nothing_in_the_loop_waits_for_the_device(tree, fallback):
    """Catches a hidden synchronisation (an .item(), a copy to pageable memory), which makes the GPU idle in every
    step, also while plain steps take over and the drafter catches up."""
    engine = build(tree, "capture", eagle_always=not fallback)
    decode(engine)  # captures, and measures where plain steps may take over
    if fallback:
        engine.timings = {SamplingParams().mode: (1.0, 100.0)}
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
    """Catches kernels that are launched beside the graph, and several graphs per step."""
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
    """Catches rows of a captured batch that disturb each other. The sequences end at different times."""
    prompts = [prompt_of(build(None, None))[:k] for k in (12, 7, 20)]
    params = SamplingParams(max_new_tokens=60, temperature=0.8, seed=4, stop=("\n\n",))
    found = [
        [(r.token_ids, r.stop_reason) for r in engine.generate_batch(prompts, params).run()]
        for engine in (build("paper25", "capture", batch_size=3), build("paper25", None, batch_size=3))
    ]
    assert found[0] == found[1]


def test_the_first_request_measures_and_reports():
    """Catches a break-even of zero or less, and captures that are counted into it."""
    engine = build("paper25", "capture", eagle_always=False)
    decode(engine)
    assert 0.5 < engine.break_even_tau < 50 and max(engine.step_seconds) < 0.1


def test_zz_a_step_that_cannot_be_captured_leaves_a_usable_engine():
    """Catches an operator that needs the host and leaves a broken engine. The error is one clear line, and then come
    the right tokens, eagerly. It is the last test because it provokes a CUDA error."""
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
