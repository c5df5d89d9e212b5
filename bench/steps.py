"""The time of a whole step, whatever is accepted: by arm, number of nodes, batch and context (`scripts.bench --steps`).

The context stays fixed: before every timed step, outside the timed part, the sequences are set back to it. On a GPU a
step is one replay of a CUDA graph between CUDA events. On a CPU it is a call by the host's clock. Afterwards a profiler
runs a few more steps and says which kernels the time went to.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench.arms import Arm, EngineArm, build_engine
from bench.measure import step_bytes
from bench.records import Line
from engine import Engine
from runtime.runner import capture_graph
from sampling import SamplingParams
from support.errors import UsageError
from support.machine import synchronize

SLACK = 8  # tokens that the request decodes which fills the caches
ROUNDS = 15
PROFILED = 5  # steps under the profiler
LONGEST = 24  # of the kernels that a line names


def numbers(flag: str, text: str) -> list[int]:
    """A list such as 1,8,60. Raises UsageError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 1 << 20 for part in parts):
        raise UsageError(f"{flag} {text!r:.40}: expected numbers like 1,8,60.")
    return [int(part) for part in parts]


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`call` as a CUDA graph: the same work without the host's part. On a CPU it is `call` itself.

    Raises RuntimeError for a call that cannot be captured.
    """
    return capture_graph(call, warm_up=2)[0].replay if device.type == "cuda" else call


def milliseconds(call: Callable[[], Any], before: Callable[[], Any], device: torch.device) -> float:
    """The time of one call. `before` runs ahead of it and is not timed. It waits for the device at the end."""
    before()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def kernel_times(call: Callable[[], Any], before: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Microseconds per call by the kernel's name, or the operator's on a CPU, the longest first. `before` counts, too.

    Empty where the profiler sees nothing, as where a driver forbids it.
    """
    cuda = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(PROFILED):
            before()
            call()
        synchronize(device)
    times = {e.key: e.self_device_time_total if cuda else e.self_cpu_time_total for e in profile.key_averages()}
    longest = sorted(times.items(), key=lambda item: -item[1])[:LONGEST]
    return {name[:80]: round(time_ / PROFILED, 2) for name, time_ in longest if time_ > 0}


def pin(engine: Engine, context: int) -> None:
    """Set all sequences back to `context` cached tokens with room to go on. Fills device buffers without waiting."""
    state = engine.state
    values = {state.n: context, state.count: 1, state.produced: 1, state.done: False, state.limit: 1 << 40}
    for buffer, value in values.items():
        buffer.fill_(value)


def ready_step(engine: Engine, context: int) -> Callable[[], Any]:
    """A step of the engine behind a real prompt of `context` tokens, as a call that does not wait for the device."""
    ids = random.Random(0).choices(range(engine.model.config.vocab_size), k=context - SLACK)
    params = SamplingParams(max_new_tokens=SLACK, stop_ids=(2**31 - 1,))
    engine.generate_batch([ids] * engine.batch_size, params).run()  # compiles, captures, fills the caches
    graph = engine.graph(params.mode)
    return graph.replay if graph is not None else captured(partial(engine.step, params.mode), engine.model.device)


def step_engines(arms: Sequence[Arm], widths: Sequence[int], batch: int, ctx: int) -> dict[str, Engine]:
    """Our arms with `batch` sequences, and plain decoding through forwards of each width."""
    ours = [arm for arm in arms if isinstance(arm, EngineArm)]
    base = ours[0].engine
    engines = {arm.name: build_engine(base, arm.options | {"batch_size": batch}, ctx) for arm in ours}
    return engines | {f"plain, {width} nodes": engines[ours[0].name].twin(width) for width in widths}


@torch.inference_mode()
def step_lines(
    arms: Sequence[Arm], contexts: Sequence[int], widths: Sequence[int], batches: Sequence[int], bandwidth: float
) -> Iterator[Line]:
    """One line per engine, batch and context. The engines of a batch are timed in turn, the medians of ROUNDS count.

    bandwidth: of a copy, in bytes per second. The first arm is plain decoding, to which every ratio refers.
    """
    for batch in batches:
        engines = step_engines(arms, widths, batch, max(contexts) + SLACK)
        for context in contexts:
            device = arms[0].engine.model.device
            samples: dict[str, list[float]] = {name: [] for name in engines}
            steps = {}
            for name, engine in engines.items():
                with engine.backend.active():
                    steps[name] = ready_step(engine, context)
            for round_, (name, engine) in itertools.product(range(ROUNDS + 1), engines.items()):
                synchronize(device)
                with engine.backend.active():
                    took = milliseconds(steps[name], partial(pin, engine, context), device)
                if round_:  # the first one warms up
                    samples[name].append(took)
            kernels = {}
            for name, engine in engines.items():
                with engine.backend.active():
                    kernels[name] = kernel_times(steps[name], partial(pin, engine, context), device)
            plain = statistics.median(samples[arms[0].name])
            for name, engine in engines.items():
                ordered = sorted(samples[name])
                median, size = statistics.median(ordered), step_bytes(engine, context)
                yield {
                    "type": "step", "arm": name, "nodes": engine.drafter.N, "depth": engine.drafter.D, "batch": batch,
                    "context": context, "ms": round(median, 5), "p10": round(ordered[len(ordered) // 10], 5),
                    "p90": round(ordered[-1 - len(ordered) // 10], 5), "rounds": len(ordered), "bytes": round(size),
                    "share_of_copy": round(size / (median / 1e3) / bandwidth, 4), "of_plain": round(median / plain, 4),
                    "captured": device.type == "cuda", "microseconds": kernels[name],
                }  # fmt: skip
