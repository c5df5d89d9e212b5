"""The step time of one cell, its parts, its sizes, and what follows from them.

The context stays fixed. Before every timed step, outside the timed events, the sequence is set back to `context` cached
tokens (`pin`). The cache below holds the keys and values of a real prompt.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.environment import gpu_state, memory_of
from bench.measure import step_bytes
from bench.step_cells import PUBLISHED_TAU, Cell, draft_rows
from bench.timing import captured, describe, new_event, on_gpu, spread, times
from engine import Engine
from memory_plan import plan_memory
from model import weight_bytes
from sampling import SamplingMode
from step import PHASES, draft_input
from support.machine import synchronize
from weights.heads import EagleFile


class OutOfTime(Exception):
    """A cell took longer than --cell-seconds."""


def pin(engine: Engine, context: int) -> None:
    """Set sequence 0 back to `context` cached tokens with room to go on. Fills device buffers without waiting."""
    state = engine.state
    values = {state.n: context, state.count: 1, state.produced: 1, state.done: False, state.limit: 1 << 40}
    for buffer, value in values.items():
        buffer.fill_(value)


def step_call(engine: Engine, mode: SamplingMode) -> tuple[Callable[[], Any], str]:
    """The engine's step as a call that does not wait for the device, and how it runs.

    Call it under inference mode with the backend active, after a request has warmed the engine up.
    """
    graph, device = engine.graph(mode), engine.model.device
    if graph is not None:
        return graph.replay, "the engine's CUDA graph"
    how = "one CUDA graph, captured here around the engine's step" if on_gpu(device) else "called on the CPU"
    return captured(partial(engine.step, mode), device), how


def parts(engine: Engine) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two calls on the engine's state: greedy drafting alone, and verifying alone (the target's forward with logits)."""
    model, drafter, state = engine.model, engine.drafter, engine.state
    inputs = draft_input(state, SamplingMode())
    tree = drafter.draft(inputs)

    def verify() -> torch.Tensor:
        nodes = model.nodes(state.n, tree.depth, tree.ancestors, state.slots)
        return model.logits(model(tree.tokens, nodes, state.kv, drafter.taps)[0])

    return partial(drafter.draft, inputs), verify


def marked(engine: Engine, mode: SamplingMode, context: int, repeats: int) -> list[float]:
    """Median milliseconds of drafting and of verifying, between the marks that the engine's step sets."""
    device = engine.model.device
    at = {phase: new_event(device, external=True) for phase in ("start", *PHASES)}

    def step() -> None:
        at["start"].record()
        engine.step(mode, lambda phase: at[phase].record())

    call = captured(step, device)
    samples = []
    for _ in range(repeats):
        pin(engine, context)
        call()
        synchronize(device)
        samples.append([at[a].elapsed_time(at[b]) for a, b in (("start", "draft"), ("draft", "verify"))])
    return [statistics.median(phase) for phase in zip(*samples, strict=True)]


def split(engine: Engine, cell: Cell, repeats: int, step_ms: float) -> dict[str, Any]:
    """Milliseconds of a step's parts. `rest` is acceptance, commit and the ring. `how` says how they were measured.

    If the marks inside the engine's step fail, drafting and verifying are each timed alone, as graphs of their own.
    """
    device, count = engine.model.device, max(3, repeats // 3)
    notes: dict[str, str] = {}
    how = "marked inside the step"
    found = attempt(notes, "marks", lambda: marked(engine, cell.params(1).mode, cell.context, count))
    if found is None and not cell.sampling:
        pin(engine, cell.context)
        calls = [captured(part, device) for part in parts(engine)]
        found = [statistics.median(times(call, device, count, lambda: None)) for call in calls]
        how = f"draft and verify timed alone; {notes['marks']}"
    if found is None:
        raise RuntimeError(notes["marks"])
    draft, verify = (round(ms, 5) for ms in found)
    return {"draft": draft, "verify": verify, "rest": round(step_ms - sum(found), 5), "how": how}


def launches(call: Callable[[], Any]) -> dict[str, Any]:
    """What one call launches: CUDA graphs and kernels launched by the host, and activities on the device by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as recorded:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events()]
    on_device = [e.name for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    by_name = Counter(name.split("(")[0][:80] for name in on_device)
    return {
        "graphs": names.count("cudaGraphLaunch"),
        "kernels_from_host": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names),
        "device_activities": len(on_device),
        "by_name": dict(by_name.most_common()),
    }


def prompt_ids(vocab: int, length: int) -> list[int]:
    """The same random prompt for the same arguments."""
    return random.Random(0).choices(range(vocab), k=length)


def attempt(notes: dict[str, str], name: str, ask: Callable[[], Any]) -> Any:
    """What `ask` returns. If it fails, None and a note: an extra must not cost the cell its step time."""
    try:
        return ask()
    except OutOfTime:
        raise
    except Exception as error:
        notes[name] = describe(error)
        return None


def measure(cell: Cell, engine: Engine, steps: int, repeats: int) -> dict[str, Any]:
    """Times, memory and sizes of one cell. `steps` run in the engine's own loop, `repeats` steps are timed alone."""
    device, model = engine.model.device, engine.model
    notes: dict[str, str] = {}
    prompt = prompt_ids(model.config.vocab_size, max(1, cell.context - steps // 2))
    engine.generate(prompt, cell.params(3)).run()  # compiles, captures, fills the cache
    result = engine.generate(prompt, cell.params(steps + 1)).run()[0]
    reset = partial(pin, engine, cell.context)
    with torch.inference_mode(), engine.backend.active():
        reset()
        call, how = step_call(engine, cell.params(1).mode)
        times(call, device, 2, reset)
        step_ms = spread(times(call, device, repeats, reset))
        peak = torch.cuda.max_memory_allocated(device) if on_gpu(device) else None
        with ThreadPoolExecutor(1) as watcher:  # asked right after the work, answered while the parts run
            clocks = watcher.submit(gpu_state, device)
            parted = cell.head and attempt(notes, "split", lambda: split(engine, cell, repeats, step_ms["median"]))
    sizes = step_bytes(engine, cell.context), model.weight_bytes(cell.nodes), model.kv_bytes(cell.context)
    total, weights, kv = map(round, sizes)
    plan = attempt(notes, "planned", lambda: planned(engine))
    tensors = attempt(notes, "memory_of", lambda: memory_of(engine))
    row = {
        "wall_ms": round(result.decode_seconds / result.steps * 1e3, 5), "wall_steps": result.steps,
        "tau_of_random_weights": round(result.tau, 3), "how": how, "step_ms": step_ms, "split_ms": parted or None,
        "gpu": clocks.result(), "bytes_per_step": total, "weight_bytes": weights, "kv_bytes": kv,
        "draft_bytes": total - weights - kv, "rows": {"target": engine.drafter.N, "draft": draft_rows(cell.tree)},
        "memory": {"plan": plan, "tensors": tensors, "peak": peak},
    }  # fmt: skip
    return row | ({"notes": notes} if notes else {})


def planned(engine: Engine) -> int:
    """Bytes that `plan_memory` foresees, given what the weights of the model and of the head take as stored."""
    model, head = engine.model, engine.head
    rows = 1 << 20  # so many rows read every expert's weights
    stored = round(weight_bytes(model, rows))
    if model.lm_head is not None:  # a tied embedding is counted already
        stored += model.embed_tokens.weight.nbytes
    file = EagleFile(head.config, {}, []) if head is not None else None
    plan = plan_memory(model.config, engine.options, file, stored)
    return replace(plan, head=round(weight_bytes(head, rows)) if head is not None else 0).total


def finish(row: dict[str, Any], cell: Cell, copy: float, plain_ms: float | None, assumed: float) -> dict[str, Any]:
    """Add what follows from the measured figures: share of the copy bandwidth, break-even tau, synthetic tokens/s.

    copy: bytes per second; plain_ms: the plain step of the same target and context, if it is known; assumed: the tau
    for trees without a published one.
    """
    median = row["step_ms"]["median"]
    # A graph captured here is not what the engine's loop ran, so the two times have no gap between them.
    own = "captured here" not in row.get("how", "")
    plain_ms = plain_ms if cell.head else median
    tau, source = 1.0, "plain decoding"
    if cell.head:
        tau, source = PUBLISHED_TAU.get((cell.shape, cell.tree), (assumed, "assumed"))
    return row | {
        "copy_gbs": round(copy / 1e9, 2),
        "share_of_copy": round(row["bytes_per_step"] / (median / 1e3) / copy, 4),
        "host_gap_ms": round(row["wall_ms"] - median, 5) if own else None,
        "plain_step_ms": plain_ms,
        "break_even_tau": round(median / plain_ms, 4) if plain_ms else None,
        "synthetic": {
            "given_tau": tau, "source": source, "tokens_per_second": round(tau / median * 1e3, 2),
            "label": "synthetic: given tau / measured step time; no acceptance was measured",
        },
    }  # fmt: skip
