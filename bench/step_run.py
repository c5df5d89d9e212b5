"""A run over step-time cells that can be stopped at any point and goes on where it was stopped.

Every cell is one line of a JSON-lines file, written as soon as the cell is measured. A failure is a line, too. Lines of
type `launches` and `start` are written here as well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.environment import environment
from bench.step_cells import Builder, Cell, quick_cells, tiny_cells
from bench.step_time import OutOfTime, finish, launches, measure, pin, prompt_ids, step_call
from bench.timing import describe, on_gpu
from engine import Engine
from support.files import append_json_lines, read_json_lines
from support.machine import copy_bandwidth, synchronize

POISONED = 3  # exit code: the CUDA context is unusable, start again for the remaining cells
QUICK_START = 25.0  # seconds of a cold first request, up to which every cell can afford to be compiled

Line = dict[str, Any]


def utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine(device: torch.device) -> dict[str, Any]:
    """The environment of a run. A copy of the code without its .git takes its commit from EAGLET_COMMIT."""
    env = environment(device)
    env["git"]["commit"] = env["git"]["commit"] or os.environ.get("EAGLET_COMMIT")
    return env


def identity(env: dict[str, Any]) -> tuple:
    """Device, torch and commit: finished cells count only where these are the same."""
    return env["device"], env["versions"]["torch"], env["git"]["commit"]


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OutOfTime once the block has taken `seconds`.

    This works in the main thread only. Code that never returns to Python is not interrupted, so the caller needs a
    limit of its own that ends the process.
    """

    def ring(signum, frame):
        raise OutOfTime(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def usable(device: torch.device) -> bool:
    """Whether the device still answers. An illegal memory access ends a CUDA context for good."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def ways(chosen: list[str] | None, device: torch.device, lines: list[Line], env: dict[str, Any]) -> list[list[str]]:
    """The passes over the cells. Each pass is a list of ways to run, tried in order until one gives a figure.

    If the last cold start compiled quickly, the only pass runs the engine as users run it, and a plain capture where
    that fails. Otherwise the first pass captures uncompiled kernels, which is sure and quick, and the second runs the
    engine as far as time goes. On a CPU, or if the ways are `chosen`, there is one pass.
    """
    if chosen or not on_gpu(device):
        return [chosen or ["eager"]]
    cold = [line for line in lines if line.get("cache") == "cold" and "first_request_s" in line]
    cold = [line for line in cold if identity(line["environment"]) == identity(env)]
    quick = cold and "error" not in cold[-1] and cold[-1]["first_request_s"] <= QUICK_START
    return [["engine", "graph"]] if quick else [["graph"], ["engine"]]


def warmed_up(builder: Builder, cell: Cell, mode: str, new_tokens: int) -> Engine:
    """The cell's engine after one request."""
    engine = builder.engine(cell, mode)
    prompt = prompt_ids(engine.model.config.vocab_size, cell.context)
    engine.generate(prompt, cell.params(new_tokens)).run()
    return engine


class Run:
    """One run over cells: their lines so far, which way to run is given up, and the engine at hand."""

    def __init__(self, args: argparse.Namespace, device: torch.device, env: dict[str, Any], started: float):
        """args: the options of `scripts.step_time`; started: when the process began, for the limit --seconds."""
        self.args, self.device, self.env, self.started = args, device, env, started
        lines = [line for path in (args.json, *args.done) for line in read_json_lines(path)]
        self.passes = ways(args.run, device, lines, env)
        cells = [line for line in lines if line.get("type") == "step_time"]
        self.lines = [line for line in cells if identity(line["environment"]) == identity(env)]
        self.latest: tuple[Cell, str] | None = None  # the cell whose engine is at hand, and the way it runs
        self.broken: dict[str, str] = {}  # way -> why it is not tried again
        self.builder = Builder(device)
        self.copy = copy_bandwidth(device)

    def measured(self, cell: Cell) -> set[str]:
        """The ways to run that have given the cell a figure."""
        return {line["mode"] for line in self.lines if line["key"] == cell.key and "step_ms" in line}

    def failed(self, cell: Cell) -> set[str]:
        """The ways to run that have failed in a line of the cell without a figure."""
        lines = [line for line in self.lines if line["key"] == cell.key and "step_ms" not in line]
        return {way for line in lines for way in line["problems"]}

    def plain_ms(self, cell: Cell, mode: str) -> float | None:
        """The latest plain step of the same target, context and way to run; None if there is none."""
        same = {
            "shape": cell.shape,
            "quant": cell.quant,
            "context": cell.context,
            "ctx": cell.ctx,
            "head": 0,
            "sampling": "",
        }
        found = [line for line in self.lines if (same | {"mode": mode}).items() <= line.items()]
        return found[-1]["step_ms"]["median"] if found else None

    def finished(self, cell: Cell, modes: list[str]) -> bool:
        """Whether a pass has nothing to add. The engine's own figure is worth having beside a captured one."""
        if self.args.skip_failed and self.failed(cell) >= set(modes):
            return True
        found = self.measured(cell)
        return "engine" in found if modes == ["engine"] else bool(found)

    def over(self, cells: list[Cell]) -> int:
        """Measure the cells. Returns 0 if every cell has a figure or time ran out, 1 if some failed, or POISONED."""
        for modes in self.passes:
            todo = [cell for cell in cells if not self.finished(cell, modes)]
            counts = f"{len(todo)} cells to measure, {len(cells) - len(todo)} done"
            print(f"{counts}; {' or '.join(modes)}; copy {self.copy / 1e9:.0f} GB/s", flush=True)
            for number, cell in enumerate(todo):
                if all(mode in self.broken for mode in modes):
                    print(f"given up: {'; '.join(self.broken[mode] for mode in modes)}", flush=True)
                    break
                if self.late():
                    print(f"out of time: {len(todo) - number} cells are left for the next run", flush=True)
                    break
                if not self.one(cell, modes):
                    return POISONED
        if on_gpu(self.device) and self.args.launches:
            self.count_launches(cells)
        return int(any(self.failed(cell) and not self.measured(cell) for cell in cells))

    def late(self) -> bool:
        return bool(self.args.seconds) and time.time() - self.started > self.args.seconds

    def one(self, cell: Cell, modes: list[str]) -> bool:
        """Measure one cell and write its line. Returns False if the device no longer answers."""
        started, alive = time.time(), True
        dtype = str(self.builder.dtype(cell)).removeprefix("torch.")
        line: Line = {"type": "step_time", "key": cell.key, **asdict(cell), "dtype": dtype}
        line |= {"environment": self.env, "command": " ".join(sys.argv), "problems": {}}
        for mode in modes:
            failed = self.args.skip_failed and mode in self.failed(cell)
            problem = "failed in an earlier run" if failed else self.broken.get(mode)
            if not problem:
                row, problem = self.try_mode(cell, mode)
                if row is not None:
                    plain = self.plain_ms(cell, mode)
                    line |= {"mode": mode} | finish(row, cell, self.copy, plain, self.args.synthetic_tau)
                    self.latest = (cell, mode)
                    break
                alive = usable(self.device)
            line["problems"][mode] = problem
            if not alive:
                break
        if "step_ms" in line:
            shown = f"{line['step_ms']['median']:.3f} ms, {line['share_of_copy']:.0%} of copy ({line['mode']})"
        else:
            line["error"] = "; ".join(f"{mode}: {text}" for mode, text in line["problems"].items())
            shown = f"failed: {line['error']}" + "; the device no longer answers" * (not alive)
        line |= {"seconds": round(time.time() - started, 2), "utc": utc()}
        self.lines.append(line)
        append_json_lines(self.args.json, line)
        print(f"{cell.key}: {shown}  [{line['seconds']:.0f} s]", flush=True)
        return alive

    def try_mode(self, cell: Cell, mode: str) -> tuple[Line | None, str]:
        """What one way to run gives: its figures, or None and what went wrong.

        The error ends here, because its traceback would keep the tensors of the failed cell alive.
        """
        try:
            with limited(self.args.cell_seconds):
                if on_gpu(self.device):
                    torch.cuda.reset_peak_memory_stats(self.device)
                return measure(cell, self.builder.engine(cell, mode), self.args.steps, self.args.repeats), ""
        except Exception as error:  # whatever went wrong is this cell's result
            problem = describe(error)
            if isinstance(error, OutOfTime):
                self.broken[mode] = f"not tried: an earlier cell took {problem}"
        self.builder.drop()
        torch._dynamo.reset()
        return None, problem

    def count_launches(self, cells: list[Cell]) -> None:
        """Write `launches` lines: of the engine at hand and, if there is time, of the first plain and drafted cell.

        This comes last, because a profiler slows what follows.
        """
        firsts = [next((c for c in cells if bool(c.head) == drafted), None) for drafted in (False, True)]
        chosen = [self.latest] if self.latest else []
        chosen += [(c, mode) for c in firsts if c for mode in sorted(self.measured(c))]
        for cell, mode in dict.fromkeys(chosen):
            if (cell, mode) != self.latest and self.late():
                continue
            line = {"type": "launches", "key": cell.key, "mode": mode, "environment": self.env, "utc": utc()}
            try:
                with limited(self.args.cell_seconds):
                    engine = warmed_up(self.builder, cell, mode, 3)
                    with torch.inference_mode(), engine.backend.active():
                        pin(engine, cell.context)
                        found = launches(step_call(engine, cell.params(1).mode)[0])
            except Exception as error:
                found = {"error": describe(error)}
            append_json_lines(self.args.json, line | found)
            names = found.pop("by_name", {})
            print(
                "\n".join([f"launches, {cell.key}: {found}", *(f"{n:6} {name}" for name, n in names.items())]),
                flush=True,
            )


def run_start(label: str, path: Path, since: float, device: torch.device, env: dict[str, Any], tiny: bool) -> int:
    """Time one start, from the Unix time `since` to the first decoded tokens, and append its line to `path`.

    Returns 1 if it failed, else 0.
    """
    cell = next(cell for cell in (tiny_cells() if tiny else quick_cells()) if cell.head)
    line: Line = {"type": "start", "cache": label, "key": cell.key, "environment": env}
    line |= {"command": " ".join(sys.argv), "weights": "random, made on the device; reading files is not in it"}
    builder, mode = Builder(device), "engine" if on_gpu(device) else "eager"
    build, request = partial(builder.engine, cell, mode), partial(warmed_up, builder, cell, mode, 9)
    begun = time.time()
    stages = {"imports_s": round(begun - since, 3)}
    try:
        for stage, call in (("build_s", build), ("first_request_s", request), ("second_request_s", request)):
            call()
            synchronize(device)
            stages[stage], begun = round(time.time() - begun, 3), time.time()
        line["total_s"] = round(begun - since - stages["second_request_s"], 3)
    except Exception as error:
        line["error"] = describe(error)
    append_json_lines(path, line | stages | {"utc": utc()})
    print(f"{label} start: {line.get('error') or line['total_s']} s  {stages}", flush=True)
    return int("error" in line)
