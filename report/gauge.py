"""The gauge: where the time of a step goes."""

from __future__ import annotations

import time
from typing import Any

import torch

from engine import Engine
from runtime.results import GenerationResult
from step import PHASES, Observer, StepOutput


class Gauge(Observer):
    """Times the phases of an engine's steps, with CUDA events on a GPU and with the clock on a CPU.

    A captured graph records the events at every replay. Without a gauge a step holds no trace of it.
    """

    marks = True

    def __init__(self, engine: Engine):
        self.cuda = engine.model.device.type == "cuda"
        self.milliseconds = dict.fromkeys(PHASES, 0.0)
        self.times: dict[str, Any] = {}
        self.runner = engine.runner
        engine.add_observer(self)

    def mark(self, phase: str) -> None:
        if not self.cuda:
            self.times[phase] = time.perf_counter()
            return
        if phase not in self.times:  # an external event can be asked for its time after a replay too
            self.times[phase] = torch.cuda.Event(enable_timing=True, external=True)
        self.times[phase].record()

    def step(self, output: StepOutput) -> None:
        before = self.times["start"]
        for phase in PHASES:
            now = self.times[phase]
            self.milliseconds[phase] += before.elapsed_time(now) if self.cuda else (now - before) * 1e3
            before = now

    def split(self, result: GenerationResult) -> dict[str, float]:
        """Milliseconds per step: every phase, the host (reading the output, launching), and the whole step."""
        steps = max(result.steps, 1)
        parts = {phase: ms / steps for phase, ms in self.milliseconds.items()}
        whole = result.decode_seconds * 1e3 / steps
        return parts | {"host": whole - sum(parts.values()), "step": whole}

    def line(self, result: GenerationResult) -> str:
        """`step 9.8 ms = draft 3.1 + verify 5.9 + accept 0.6 + host 0.2; 1 graph launch per step`."""
        parts = self.split(result)
        whole = parts.pop("step")
        text = f"step {whole:.2f} ms = " + " + ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
        return f"{text}; {self.launches()}"

    def launches(self) -> str:
        """How many CUDA graphs a step launched: 1 when all of it was captured."""
        if not self.runner.replays:
            return "no graph: kernels are launched one by one"
        each = self.runner.replays / self.runner.issued
        return f"{each:g} graph launch{'' if each == 1 else 'es'} per step"
