"""TODO."""

from __future__ import annotations

import argparse
import collections
import contextlib
import inspect
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.environment import gpu_state, memory_of
from bench.kernel_timing import copy_bandwidth
from bench.measure import step_bytes
from bench.random_models import SHAPES
from bench.step_cells import (
    PUBLISHED_TAU,
    QUICK_START,
    TINY,
    Builder,
    Cell,
    free,
    on_gpu,
    quick_cells,
    tiny_cells,
)
from drafters.base import DraftInput
from engine import Engine
from load import plan_memory
from sampling import SamplingParams
from tree import named_tree
from weights.heads import EagleFile
from weights.quantized import QuantLinear

STARTED = time.time()


POISONED = 3  # exit code: the CUDA context is unusable, start again for the remaining cells


class OutOfTime(Exception):
    """A cell took longer than --cell-seconds."""


def pin(engine: Engine, context: int) -> None:
    """Set sequence 0 back to `context` cached tokens with room to go on: fills of device buffers, no sync."""
    values = dict(n=context, count=1, produced=1, done=False, limit=1 << 40)
    for name, value in values.items():
        getattr(engine.state, name).fill_(value)


def step_call(engine: Engine) -> tuple[Callable[[], Any], str]:
    """(the engine's step as a call that does not wait for the device, how it runs). The only place here that knows how
    an engine runs a step; call it under inference mode with the backend active, after a request has warmed it up."""
    mode = SamplingParams().mode
    if on_gpu(engine.model.device) and hasattr(engine, "_call"):  # the engine captured its step itself
        graph, _ = engine.runner.graphs.get(engine._call(engine.drafter, mode)[0], (None, None))
        if graph is not None:
            return graph.replay, "the engine's CUDA graph"

    def step() -> Any:
        return engine._step(engine.model, engine.drafter, engine.state, mode)

    if not on_gpu(engine.model.device):
        return step, "called on the CPU"
    return captured(step), "one CUDA graph, captured here around the engine's step"


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """One CUDA graph of `call` (warmed up on a side stream first); replaying it is the same work without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, capture_error_mode="thread_local"
    ):  # compile workers may still use the device
        call()
    return graph.replay


def times(
    call: Callable[[], Any], device: torch.device, repeats: int, before: Callable[[], Any]
) -> list[float]:
    """Milliseconds of `repeats` calls, each after `before`, which is not timed. On CUDA by events: the host runs ahead
    and waits once, at the end."""
    samples, events = [], []
    for _ in range(repeats):
        before()
        if on_gpu(device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        else:
            started = time.perf_counter()
            call()
            samples.append((time.perf_counter() - started) * 1e3)
    if on_gpu(device):
        torch.cuda.synchronize()
        samples = [begin.elapsed_time(end) for begin, end in events]
    return samples


def spread(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)

    def quantile(q: float) -> float:
        return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]

    return {
        "median": round(statistics.median(ordered), 5), "p10": round(quantile(0.1), 5),
        "p90": round(quantile(0.9), 5), "count": len(ordered),
    }  # fmt: skip


def parts(engine: Engine) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(draft alone, verify alone) on the engine's state: the drafter's call, and the target's forward on its tree with
    logits. What a step takes beyond their sum is acceptance and commit."""
    model, drafter, state = engine.model, engine.drafter, engine.state
    given = {"state": state.sampling, "mode": SamplingParams().mode, "noise": None}
    request = DraftInput(
        *(given[name] if name in given else getattr(state, name) for name in DraftInput._fields)
    )
    tree = drafter.draft(request)

    def draft() -> Any:
        return drafter.draft(request)

    def verify() -> Tensor:
        nodes = model.nodes(state.n, tree.depth, tree.ancestors, state.slots)
        return model.logits(model(tree.tokens, nodes, state.kv, drafter.taps)[0])

    return draft, verify


def launches(call: Callable[[], Any]) -> dict[str, Any]:
    """What one call launches, by torch.profiler: CUDA graphs and kernels launched by the host, kernels that ran."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    names = collections.Counter()
    kernels_run = 0
    for event in recorded.events():
        names[event.name] += 1
        kernels_run += event.device_type == torch.autograd.DeviceType.CUDA
    kernel = sum(n for name, n in names.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return {"graphs": names["cudaGraphLaunch"], "kernels_from_host": kernel, "device_activities": kernels_run}


def prompt_ids(vocab: int, length: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(vocab) for _ in range(length)]


def draft_rows(tree: str) -> list[int]:
    """Rows of every draft forward of a step: what was accepted is fed again (D + 1 rows), then level by level."""
    if not tree:
        return []
    parsed = named_tree(tree)
    dynamic = hasattr(parsed, "topk")
    return [parsed.D + 1, *([parsed.topk] * parsed.depth if dynamic else map(len, parsed.levels))]


def attempt(row: dict[str, Any], name: str, ask: Callable[[], Any]) -> Any:
    """What `ask` gives; if it fails, None and a note in the row: an extra must not cost the cell its step time."""
    try:
        return ask()
    except OutOfTime:
        raise
    except Exception as error:
        row.setdefault("notes", {})[name] = describe(error)
        return None


def split(engine: Engine, cell: Cell, repeats: int, step_ms: float) -> dict[str, Any]:
    """Milliseconds of a step's parts: as marked inside the engine's step where it marks them, else draft and verify each
    timed alone as a graph of its own; `rest`: acceptance, commit, the ring."""
    device, count = engine.model.device, max(3, repeats // 3)
    notes: dict[str, Any] = {}
    found, how = None, "marked inside the step"
    if "mark" in inspect.signature(engine._step).parameters:
        found = attempt(notes, "marks", lambda: marked(engine, cell.context, count))
    if found is None:
        pin(engine, cell.context)
        wrap = captured if on_gpu(device) else lambda call: call
        found = [statistics.median(times(wrap(part), device, count, lambda: None)) for part in parts(engine)]
        how = "; ".join(["draft and verify timed alone", *notes.get("notes", {}).values()])
    draft, verify = found
    rest = step_ms - draft - verify
    return {"draft": round(draft, 5), "verify": round(verify, 5), "rest": round(rest, 5), "how": how}


def marked(engine: Engine, context: int, repeats: int) -> tuple[float, float]:
    """Median milliseconds of (draft, verify) between the marks that the engine's step sets: events inside the graph."""
    mode, on_device, at = SamplingParams().mode, on_gpu(engine.model.device), {}

    def mark(phase: str) -> None:
        if not on_device:
            at[phase] = time.perf_counter() * 1e3
            return
        if phase not in at:  # external: recorded anew by every replay
            at[phase] = torch.cuda.Event(enable_timing=True, external=True)
        at[phase].record()

    def step() -> None:
        mark("start")
        engine._step(engine.model, engine.drafter, engine.state, mode, mark=mark)

    call, samples = captured(step) if on_device else step, []
    for _ in range(repeats):
        pin(engine, context)
        call()
        if on_device:
            torch.cuda.synchronize()
        marks = [at[phase] for phase in ("start", "draft", "verify")]
        samples.append(
            [a.elapsed_time(b) if on_device else b - a for a, b in zip(marks, marks[1:], strict=False)]
        )
    draft, verify = zip(*samples, strict=True)
    return statistics.median(draft), statistics.median(verify)


def measure(cell: Cell, engine: Engine, steps: int, repeats: int) -> dict[str, Any]:
    """Times, memory and sizes of one cell on its engine. `steps`: of the engine's own loop; `repeats`: timed steps."""
    device, model = engine.model.device, engine.model
    prompt = prompt_ids(model.config.vocab_size, max(1, cell.context - steps // 2))
    engine.generate(prompt, SamplingParams(max_new_tokens=3)).run()  # compiles, captures, fills the cache
    result = engine.generate(prompt, SamplingParams(max_new_tokens=steps + 1)).run()[0]
    row: dict[str, Any] = {
        "wall_ms": round(result.decode_seconds / result.steps * 1e3, 5),
        "wall_steps": result.steps,
    }
    row["tau_of_random_weights"] = round(result.tau, 3)
    with torch.inference_mode(), engine.backend.active():
        pin(engine, cell.context)
        call, row["how"] = step_call(engine)
        times(call, device, 2, lambda: pin(engine, cell.context))
        row["step_ms"] = spread(times(call, device, repeats, lambda: pin(engine, cell.context)))
        peak = torch.cuda.max_memory_allocated(device) if on_gpu(device) else None
        with ThreadPoolExecutor(1) as watcher:  # asked right after the work, answered while the parts run
            clocks = watcher.submit(gpu_state, device)
            row["split_ms"] = None
            if cell.head:
                median = row["step_ms"]["median"]
                row["split_ms"] = attempt(row, "split", lambda: split(engine, cell, repeats, median))
            row["gpu"] = clocks.result()
    row["bytes_per_step"] = round(step_bytes(engine, cell.context))
    row["weight_bytes"] = round(model.weight_bytes(cell.nodes))
    row["kv_bytes"] = round(model.kv_bytes(cell.context))
    row["draft_bytes"] = row["bytes_per_step"] - row["weight_bytes"] - row["kv_bytes"]
    row["rows"] = {"target": engine.drafter.N, "draft": draft_rows(cell.tree)}
    plan, tensors = (attempt(row, f.__name__, lambda f=f: f(engine)) for f in (planned, memory_of))
    row["memory"] = {"plan": plan, "tensors": tensors, "peak": peak}
    return row


def planned(engine: Engine) -> int:
    """Bytes that generate.plan_memory foresees; weights of quantized models are counted as stored, as for a file."""
    opts, model, head = engine.options, engine.model, engine.head
    stored = {id(m): module_bytes(m) for m in (model, head) if m is not None}
    quantized = getattr(model, "quant", None)
    file = EagleFile(head.config, dict(head.state_dict()), []) if head is not None else None
    plan = plan_memory(model.config, opts, file, stored[id(model)] if quantized else 0)
    return replace(plan, head=stored[id(head)]).total if head is not None else plan.total


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights as stored, whatever they are packed into."""
    total = sum(p.nbytes for p in module.parameters())
    for child in module.modules():
        if isinstance(child, QuantLinear):
            total += max(1, child.experts) * child.in_features * child.out_features * child.bits // 8
            total += child.scales.nbytes
    return total


def finish(
    row: dict[str, Any], cell: Cell, copy: float, plain_ms: float | None, assumed: float
) -> dict[str, Any]:
    """Add what follows from the measured figures: share of the copy bandwidth, break-even tau, synthetic tokens/s."""
    median = row["step_ms"]["median"]
    row["copy_gbs"] = round(copy / 1e9, 2)
    row["share_of_copy"] = round(row["bytes_per_step"] / (median / 1e3) / copy, 4)
    own = "captured here" not in row.get(
        "how", ""
    )  # else the engine's loop ran something slower than that graph
    row["host_gap_ms"] = round(row["wall_ms"] - median, 5) if own else None
    plain_ms = plain_ms if cell.head else median
    row["plain_step_ms"] = plain_ms
    row["break_even_tau"] = round(median / plain_ms, 4) if plain_ms else None
    tau, source = 1.0, "plain decoding"
    if cell.head:
        tau, source = PUBLISHED_TAU.get((cell.shape, cell.tree), (assumed, "assumed"))
    row["synthetic"] = {
        "given_tau": tau, "source": source, "tokens_per_second": round(tau / median * 1e3, 2),
        "label": "synthetic: given tau / measured step time; no acceptance was measured",
    }  # fmt: skip
    return row


def append(path: Path, line: dict[str, Any]) -> None:
    """One JSON line, on the disk before this returns; a line that a killed run left half-written is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    broken = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
    with path.open("a", encoding="utf-8") as out:
        out.write("\n" * broken + json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


def read_lines(path: Path, whole: bool = False) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line or the `whole` file one object; half-written ones are passed over, a
    missing file is empty."""
    found, text = [], path.read_text(encoding="utf-8") if path.exists() else ""
    for piece in [text] if whole else text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(piece))
    return [line for line in found if isinstance(line, dict)]


def identity(env: dict[str, Any]) -> tuple:
    """What a finished cell must agree in to be skipped: device, torch, commit."""
    return env["device"], env["versions"]["torch"], env["git"]["commit"]


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """OutOfTime once the block has taken `seconds` (main thread only; code that never returns to Python is not
    interrupted: the caller's own limit ends the process)."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(signum, frame):
        raise OutOfTime(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def usable(device: torch.device) -> bool:
    """Whether the device still answers; an illegal access ends a CUDA context for good."""
    if not on_gpu(device):
        return True
    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return False


def ways(
    args: argparse.Namespace, device: torch.device, lines: list[dict[str, Any]], env: dict[str, Any]
) -> list:
    """The passes over the cells: each a list of ways to run, tried in order until one gives a figure.

    Where a cold start was seen to compile quickly, the engine as users run it, and a plain capture where that fails. Else
    every cell with uncompiled kernels in a graph first, which is sure and quick, and then the engine as far as time goes.
    """
    if args.run or not on_gpu(device):
        return [args.run or ["eager"]]
    starts = [line for line in lines if line.get("type") == "start" and "first_request_s" in line]
    starts = [
        line for line in starts if identity(line["environment"]) == identity(env) and line["cache"] == "cold"
    ]
    quick = bool(starts) and starts[-1]["first_request_s"] <= QUICK_START and "error" not in starts[-1]
    return [["engine", "graph"]] if quick else [["graph"], ["engine"]]


class Run:
    """The state of one run over cells: what is done, what failed, which way to run is given up, the plain baselines."""

    def __init__(self, args: argparse.Namespace, device: torch.device, env: dict[str, Any]):
        self.args, self.device, self.env = args, device, env
        lines = [line for path in (args.json, *args.done) for line in read_lines(path)]
        self.passes = ways(args, device, lines, env)
        mine = [line for line in lines if line.get("type") == "step_time"]
        mine = [line for line in mine if identity(line["environment"]) == identity(env)]
        self.done = {(line["key"], line["mode"]) for line in mine if "step_ms" in line}
        self.failed = {(line["key"], way) for line in mine if "error" in line for way in line["problems"]}
        self.plain = {
            self.baseline(line): line["step_ms"]["median"]
            for line in mine
            if "mode" in line and not line["head"]
        }
        self.latest: list[tuple[Cell, str]] = []  # the cell whose engine is at hand
        self.broken: dict[str, str] = {}  # way -> why it is not tried again
        self.builder, self.copy = Builder(device, SHAPES | TINY), bandwidth(device)

    @staticmethod
    def baseline(line: dict[str, Any]) -> tuple:
        """What a plain cell must agree in to be the baseline of another."""
        return tuple(line[key] for key in ("shape", "quant", "context", "ctx", "mode"))

    def finished(self, cell: Cell, modes: list[str]) -> bool:
        """Whether this pass has nothing to add: the engine's own figure is worth having beside a captured one's."""
        enough = {mode for key, mode in self.done if key == cell.key}
        if self.args.skip_failed and all((cell.key, mode) in self.failed for mode in modes):
            return True
        return bool(enough & set(modes) if modes == ["engine"] else enough)

    def over(self, cells: list[Cell]) -> int:
        """0: every cell has a figure (or time ran out); 1: some failed; POISONED."""
        for modes in self.passes:
            todo = [cell for cell in cells if not self.finished(cell, modes)]
            print(
                f"{len(todo)} cells to measure, {len(cells) - len(todo)} done; {' or '.join(modes)}; "
                f"copy {self.copy / 1e9:.0f} GB/s",
                flush=True,
            )
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
        without = {key for key, _ in self.failed} - {key for key, _ in self.done}
        return int(any(cell.key in without for cell in cells))

    def late(self) -> bool:
        return bool(self.args.seconds) and time.time() - STARTED > self.args.seconds

    def one(self, cell: Cell, modes: list[str]) -> bool:
        """Measure one cell and write its line; False if the device no longer answers."""
        started, alive = time.time(), True
        dtype = str(self.builder.dtype(cell)).removeprefix("torch.")
        line = {"type": "step_time", "key": cell.key, **asdict(cell), "dtype": dtype, "environment": self.env}
        line |= {"command": " ".join(sys.argv), "problems": {}}
        for mode in modes:
            before = (
                "failed in an earlier run"
                if (cell.key, mode) in self.failed and self.args.skip_failed
                else ""
            )
            if before or mode in self.broken:
                line["problems"][mode] = before or self.broken[mode]
                continue
            try:
                with limited(self.args.cell_seconds):
                    if on_gpu(self.device):
                        torch.cuda.reset_peak_memory_stats(self.device)
                    row = measure(cell, self.builder.engine(cell, mode), self.args.steps, self.args.repeats)
            except Exception as error:  # whatever went wrong is this cell's result
                row = None
                line["problems"][mode] = describe(error)
                if isinstance(error, OutOfTime):
                    self.broken[mode] = f"not tried: an earlier cell took {describe(error)}"
            if row is not None:
                line["mode"] = mode
                alone = self.plain.get(self.baseline(line))
                line |= finish(row, cell, self.copy, alone, self.args.synthetic_tau)
                break
            self.builder.drop()  # outside the handler: its traceback would keep the tensors alive
            torch._dynamo.reset()
            alive = usable(self.device)
            if not alive:
                break
        line |= {"seconds": round(time.time() - started, 2), "utc": utc()}
        if "step_ms" in line:
            self.done.add((cell.key, line["mode"]))
            self.latest = [(cell, line["mode"])]
            if not cell.head:
                self.plain[self.baseline(line)] = line["step_ms"]["median"]
            shown = (
                f"{line['step_ms']['median']:.3f} ms, {line['share_of_copy']:.0%} of copy ({line['mode']})"
            )
        else:
            line["error"] = "; ".join(f"{mode}: {text}" for mode, text in line["problems"].items())
            self.failed |= {(cell.key, mode) for mode in line["problems"]}
            shown = f"failed: {line['error']}" + "; the device no longer answers" * (not alive)
        append(self.args.json, line)
        print(f"{cell.key}: {shown}  [{line['seconds']:.0f} s]", flush=True)
        return alive

    def count_launches(self, cells: list[Cell]) -> None:
        """`launches` lines, last, as a profiler slows what follows: of the engine at hand, and if there is time of the
        first plain and the first drafted cell."""
        firsts = [next((c for c in cells if bool(c.head) == drafted), None) for drafted in (False, True)]
        chosen = [
            (c, mode) for c in firsts for key, mode in sorted(self.done) if c is not None and c.key == key
        ]
        for cell, mode in dict.fromkeys(self.latest + chosen):
            if (cell, mode) not in self.latest and self.late():
                continue
            line = {"type": "launches", "key": cell.key, "mode": mode, "environment": self.env, "utc": utc()}
            try:
                with limited(self.args.cell_seconds):
                    engine = self.builder.engine(cell, mode)
                    prompt = prompt_ids(engine.model.config.vocab_size, cell.context)
                    engine.generate(prompt, SamplingParams(max_new_tokens=3)).run()
                    with torch.inference_mode(), engine.backend.active():
                        pin(engine, cell.context)
                        line |= launches(step_call(engine)[0])
            except Exception as error:
                line["error"] = describe(error)
            append(self.args.json, line)
            found = {
                k: line[k] for k in ("graphs", "kernels_from_host", "device_activities", "error") if k in line
            }
            print(f"launches, {cell.key}: {found}", flush=True)


def utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy far larger than the last-level cache."""
    found = copy_bandwidth(device, (1 << 30) if on_gpu(device) else (1 << 24))
    free(device)
    return found


def run_start(label: str, args: argparse.Namespace, device: torch.device, env: dict[str, Any]) -> int:
    """One start: from the command (args.since, else this script's first line) to the first decoded tokens."""
    cell = next(c for c in (tiny_cells() if args.tiny else quick_cells()) if c.head)
    since = args.since or STARTED
    line = {
        "type": "start",
        "cache": label,
        "key": cell.key,
        "environment": env,
        "command": " ".join(sys.argv),
    }
    line |= {
        "weights": "random, made on the device; reading files is not in it",
        "imports_s": time.time() - since,
    }
    stages = {}
    try:
        builder, mark = Builder(device, SHAPES | TINY), time.time()
        engine = builder.engine(cell, "engine" if on_gpu(device) else "eager")
        if on_gpu(device):
            torch.cuda.synchronize()
        stages["build_s"], mark = time.time() - mark, time.time()
        prompt = prompt_ids(engine.model.config.vocab_size, cell.context)
        engine.generate(prompt, SamplingParams(max_new_tokens=9)).run()
        stages["first_request_s"], mark = time.time() - mark, time.time()
        engine.generate(prompt, SamplingParams(max_new_tokens=9)).run()
        stages["second_request_s"] = time.time() - mark
        line["total_s"] = round(mark - since, 3)
    except Exception as error:
        line["error"] = describe(error)
    line |= {name: round(value, 3) for name, value in stages.items()} | {
        "imports_s": round(line["imports_s"], 3)
    }
    append(args.json, line | {"utc": utc()})
    print(f"{label} start: {line.get('total_s') or line.get('error')} s  {stages}", flush=True)
    return int("error" in line)


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Markdown of the cells that have a figure; of a cell measured twice the later line counts."""
    latest: dict[tuple, dict[str, Any]] = {}
    for line in lines:
        if line.get("type") == "step_time" and "step_ms" in line:
            latest[line["environment"]["device"], line["key"]] = line
    rows = [
        "| device | target | weights | head, tree | nodes | context | step ms (p10 to p90) | of copy | over plain | "
        "draft share | tok/s at given tau |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line in sorted(
        latest.values(),
        key=lambda r: (r["environment"]["device"], r["shape"], r["quant"], r["context"], r["nodes"]),
    ):
        ms, split, fake = line["step_ms"], line["split_ms"], line["synthetic"]
        head = (
            f"EAGLE-{line['head']} {line['head_quant'] or line['dtype']}, {line['tree']}"
            if line["head"]
            else "plain"
        )
        over = f"{line['break_even_tau']:.2f}x" if line["break_even_tau"] else "-"
        share = f"{split['draft'] / ms['median']:.0%}" if split else "-"
        given = f"{fake['tokens_per_second']:.0f} ({fake['source']}, {fake['given_tau']:g})"
        if fake["source"] == "assumed":
            given = "-"
        rows.append(
            f"| {line['environment']['device']} | {line['shape']} | {line['quant'] or line['dtype']} | {head} | "
            f"{line['nodes']} | {line['context']} | {ms['median']:.3f} ({ms['p10']:.3f} to {ms['p90']:.3f}) | "
            f"{line['share_of_copy']:.0%} | {over} | {share} | {given} |"
        )
    return "\n".join(rows) if latest else ""
