"""Timing calls on a GPU or a CPU.

A GPU's work is captured as one CUDA graph, so that the host's time does not count, and timed between CUDA events. On a
CPU the same functions use the host's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from runtime.runner import capture_graph
from support.machine import synchronize


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`call` as a CUDA graph: the same work without the host's part. On a CPU it is `call` itself.

    Raises RuntimeError for a call that cannot be captured.
    """
    return capture_graph(call, warm_up=2)[0].replay if on_gpu(device) else call


class HostEvent:
    """torch.cuda.Event on the host's clock."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end.at - self.at) * 1e3


def new_event(device: torch.device, external: bool = False) -> Any:
    """external: a CUDA event that every replay of a graph records anew."""
    return torch.cuda.Event(enable_timing=True, external=external) if on_gpu(device) else HostEvent()


def times(call: Callable[[], Any], device: torch.device, repeats: int, before: Callable[[], Any]) -> list[float]:
    """Milliseconds of each of `repeats` calls. `before` runs ahead of every call and is not timed.

    On a GPU the host runs ahead and waits only once, at the end, unless `before` waits.
    """
    events = [(new_event(device), new_event(device)) for _ in range(repeats)]
    for begin, end in events:
        before()
        begin.record()
        call()
        end.record()
    synchronize(device)
    return [begin.elapsed_time(end) for begin, end in events]


def spread(samples: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (the nearest samples) and number of `samples`."""
    ordered = sorted(samples)
    low, high = (round(ordered[round(q * (len(ordered) - 1))], 5) for q in (0.1, 0.9))
    return {"median": round(statistics.median(ordered), 5), "p10": low, "p90": high, "count": len(ordered)}


def describe(error: BaseException) -> str:
    """The type of an error and the first line of its message, for a result file."""
    first, *_ = str(error).strip().split("\n")
    return f"{type(error).__name__}: {first[:300]}"
