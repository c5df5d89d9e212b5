"""Step times of real model shapes with random weights: one JSON line per cell, written as soon as it is measured.

    python -m scripts.step_time --json FILE              # what `make gpu` measures; finished cells are skipped
    python -m scripts.step_time --json FILE --full       # and the rest
    python -m scripts.step_time --json FILE --device cpu --tiny     # the same code on small shapes, for tests
    python -m scripts.step_time --json FILE --start cold # one start of the 8B shape: imports to the first tokens

A cell is a target, a draft head, a tree and a context. Its weights are random but of the real shapes, made on the device
in their final format, so the time of a step is that of a trained model of the same shape: a step's work depends on
shapes and on the context alone. Acceptance on random weights means nothing (almost every draft is rejected), so tokens/s
is only given for a stated tau and labelled synthetic.

The context stays fixed: before every timed step, outside the timed events, the sequence is set back to `context` cached
tokens (`pin`); the cache below holds the keys and values of a real prompt. `step_ms` is the time between two CUDA events
around one step (one graph replay); `wall_ms` is the engine's own loop, host and read-back included, over a request whose
context passes from below to above the nominal one; their difference is the host's gap.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import inspect
import json
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402 (the clock of --start begins before the imports)
from torch import Tensor, nn  # noqa: E402

import checkpoint  # noqa: E402
import engine as engine_module  # noqa: E402
import kernels  # noqa: E402
import quantize  # noqa: E402
from checkpoint import EagleConfig, EagleFile  # noqa: E402
from eagle_draft import EagleHead, Request  # noqa: E402
from engine import Engine  # noqa: E402
from generate import LoadOptions, build_drafter, named_tree, plan_memory  # noqa: E402
from model import ModelConfig, Transformer  # noqa: E402
from sampling import SamplingParams  # noqa: E402
from scripts.bench import SHAPES, environment, gpu_state, memory_of, step_bytes  # noqa: E402
from scripts.bench_kernels import copy_bandwidth  # noqa: E402

TINY = {"tiny": SHAPES["tiny"]} | {
    "tiny-moe": replace(SHAPES["tiny"], model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
}
SLACK = 128  # cache rows beyond the context: the tree's, and those of a short request
# Trees by number of nodes (root included). The chain and the widest tree are the published EAGLE-3 settings.
TREES = {
    1: "", 4: "chain:3", 8: "chain:7", 16: "dynamic:16,7,8", 24: "dynamic:24,7,8", 26: "paper25",
    32: "dynamic:32,7,8", 60: "dynamic:60,7,10",
}  # fmt: skip
PUBLISHED_TAU = {  # (shape, tree) -> tokens per step on MT-bench at T = 0, and who measured it
    ("llama-3-8b", "chain:7"): (3.91, "SpecBundle, LLaMA-3.1-8B + EAGLE-3"),
    ("llama-3-8b", "dynamic:60,7,10"): (6.13, "EAGLE-3 paper, LLaMA-3.1-8B"),
    ("llama-2-7b", "paper25"): (3.62, "EAGLE paper, LLaMA-2-7B"),
}
QUICK_START = 25.0  # seconds of a cold first request, up to which every cell can afford to be compiled
POISONED = 3  # exit code: the CUDA context is unusable, start again for the remaining cells


class OutOfTime(Exception):
    """A cell took longer than --cell-seconds."""


@dataclass(frozen=True)
class Cell:
    """One measurement. quant '' = 16 bit; head 0 = plain decoding, else the EAGLE generation; ctx: cache rows."""

    shape: str
    quant: str
    head: int
    head_quant: str
    tree: str
    nodes: int
    context: int
    ctx: int

    @property
    def key(self) -> str:
        head = f"eagle{self.head}-{self.head_quant or 'half'} {self.tree}" if self.head else "plain"
        return f"{self.shape} {self.quant or 'half'} | {head} | {self.nodes} nodes | context {self.context}"

    @property
    def engine_key(self) -> tuple:
        """Cells that agree in this share one engine: nothing is compiled or captured twice."""
        return self.shape, self.quant, self.head, self.head_quant, self.tree, self.ctx


def grid(
    shape: str, quant: str, head: int, nodes: Iterable[int], contexts: Iterable[int], ctx: int = 2048
) -> list:
    """Cells of one target, tree by tree. Quantized targets have a head of the same format, 16-bit ones an int8 head."""
    cells = []
    for count in nodes:
        drafted = (head, quant or "int8", TREES[count]) if count > 1 else (0, "", "")
        for context in contexts:
            cells.append(Cell(shape, quant, *drafted, count, context, max(ctx, context) + SLACK))
    return cells


def quick_cells() -> list[Cell]:
    """What `make gpu` measures, most important first."""
    pairs = [(nodes, quant) for widths in ((1, 60), (24, 16)) for quant in ("", "int4") for nodes in widths]
    return [cell for nodes, quant in pairs for cell in grid("llama-3-8b", quant, 3, [nodes], (128, 2048))]


def full_cells() -> list[Cell]:
    """What `make gpu-full` adds."""
    both = (128, 2048)
    cells = grid("llama-3-8b", "", 3, [8], both) + grid("llama-3-8b", "int8", 3, [1, 60, 24, 8], both)
    cells += [
        replace(c, head_quant="") for c in grid("llama-3-8b", "", 3, [60], both)
    ]  # what a plain head costs
    for quant in ("int4", "", "int8"):
        cells += grid("llama-2-7b", quant, 1, [1, 26, 24, 16], both)
    cells += grid("llama-3-8b", "int4", 3, [8, 32], both) + grid("llama-3-8b", "", 3, [32], both)
    for quant in ("", "int4", "int8"):
        cells += grid("llama-3-8b", quant, 3, [1, 24, 60], (8192,), 8192)
    cells += grid("llama-2-70b", "int4", 1, [1, 24, 60], both)
    cells += grid("mixtral-8x7b", "int4", 1, [1, 8, 24, 60], both)
    for quant in ("int4", "int8", ""):
        cells += grid("llama-2-13b", quant, 1, [1, 24, 60], both)
    return cells


def tiny_cells() -> list[Cell]:
    """Every kind of cell on shapes for a CPU."""
    cells = grid("tiny", "", 3, [1, 16], (16, 48), 48) + grid("tiny", "int4", 1, [1, 4], (16,), 16)
    return cells + grid("tiny-moe", "int8", 1, [1, 4], (16,), 16)


# ---- random weights in their final format --------------------------------------------------------------------


def _group(config: ModelConfig) -> int:
    inner = math.gcd(config.hidden_size, config.intermediate_size)
    return next(g for g in (128, 64, 32) if inner % g == 0)


def fill_random_(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a meta module random weights on `device`, in place: codes and scales as codes and scales. Outputs keep the
    size of their inputs (weights of variance 1 / inputs), so activations stay finite through any number of layers."""
    codes = {}
    for name, owner in module.named_modules():
        if isinstance(owner, quantize.QuantLinear):
            spread = (
                22.0 if owner.bits == 4 else 5461.0
            ) * owner.in_features  # variance of uniform codes x inputs
            codes |= {f"{name}.{leaf}".lstrip("."): spread**-0.5 for leaf in ("qweight", "scales")}
    for name, slot in [*module.named_parameters(), *module.named_buffers()]:
        if slot.device.type != "meta" or slot.numel() == 0:
            continue
        if name.endswith(".qweight"):
            low, high = (0, 256) if slot.dtype == torch.uint8 else (-128, 128)
            tensor = torch.randint(low, high, slot.shape, dtype=slot.dtype, device=device)
        elif name in codes:
            tensor = ((torch.rand(slot.shape, device=device) + 0.5) * codes[name]).to(slot.dtype)
        elif not slot.is_floating_point():
            continue
        elif slot.dim() > 1:
            wide = 1.0 if "embed_tokens" in name else slot.shape[-1] ** -0.5
            tensor = torch.empty(slot.shape, dtype=dtype, device=device).normal_(0, wide)
        else:
            tensor = torch.full(slot.shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)
        quantize.set_tensor(module, name, tensor)


def random_model(config: ModelConfig, quant: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A target of `config`'s shapes. Quantized weights are packed module by module; call it with the kernel backend
    active. Peak memory: the model and one layer's unpacked codes."""
    torch.manual_seed(0)
    model = checkpoint.build_model(config)
    if quant:
        quantize.apply_spec_(model, quantize.QuantSpec(quant, group_size=_group(config)))
        model.quant = quant
    for part in (*model.layers, model.embed_tokens, model.norm, model.lm_head):
        if part is not None:
            holder = nn.ModuleDict({"embed_tokens" if part is model.embed_tokens else "part": part})
            fill_random_(holder, device, dtype)
            quantize.pack_(holder, dtype)
    model.rotary.build(device, config.max_positions)
    return _filled(model).eval().requires_grad_(False)


def _filled(module: nn.Module) -> nn.Module:
    empty = [name for name, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
    if empty:
        raise RuntimeError(
            f"no random weights were made for {', '.join(empty[:3])}; teach fill_random_ about them."
        )
    return module


def random_head(model: Transformer, version: int, quant: str) -> EagleHead:
    """An EAGLE head of the target's own geometry (EAGLE-3: a draft vocabulary of at most 32,000 ids, taps low, middle,
    high), packed. Call it with the kernel backend active."""
    c, device = model.config, model.device
    torch.manual_seed(version)
    vocab = min(c.vocab_size - 1, 32000) if version == 3 else c.vocab_size
    layer = replace(
        c, model_type="llama", num_hidden_layers=1, vocab_size=vocab, windows=(), num_local_experts=0,
        num_experts_per_tok=0,
    )  # fmt: skip
    L = c.num_hidden_layers
    taps = (2, L // 2, L - 3) if L > 5 else tuple(range(min(L, 2) + 1))[:3]
    config = EagleConfig(
        version,
        layer,
        c.hidden_size,
        taps if version == 3 else (),
        fc_bias=version == 1,
        has_lm_head=version == 3,
    )
    with torch.device("meta"):
        head = EagleHead(config, model).eval().requires_grad_(False)
    if head.draft_ids is not None:
        head.draft_ids = torch.arange(vocab, device=device) * c.vocab_size // vocab
    if quant:
        quantize.apply_spec_(head, quantize.QuantSpec(quant, group_size=_group(c)))
    fill_random_(head, device, model.dtype)
    quantize.pack_(head, model.dtype)
    head.rotary.build(device, model.rotary.length)
    head.trim()
    return _filled(head)


class Builder:
    """Engines for cells; keeps the last model, head and engine, because neighbouring cells share them."""

    def __init__(self, device: torch.device, shapes: dict[str, ModelConfig]):
        self.device, self.shapes = device, shapes
        tuned = quantize.read_tuned(torch.cuda.get_device_name(device))[0] if on_gpu(device) else {}
        self.backend = kernels.KernelBackend("auto", device.type, tuned)
        self.kept: dict[str, tuple[Any, Any]] = {}

    def _keep(self, kind: str, key: Any, make: Callable[[], Any], above: tuple[str, ...]) -> Any:
        if kind not in self.kept or self.kept[kind][0] != key:
            for stale in (kind, *above):  # what was built on it goes too, before the new one needs the memory
                self.kept.pop(stale, None)
            free(self.device)
            self.kept[kind] = (key, make())
        return self.kept[kind][1]

    def dtype(self, cell: Cell) -> torch.dtype:
        if self.device.type == "cpu":
            return torch.float32
        return torch.float16 if cell.quant else torch.bfloat16  # our quantized kernels are fastest in fp16

    def engine(self, cell: Cell, mode: str) -> Engine:
        """The cell's engine. Its `options` and `head` are set as generate.load does."""
        dtype, device = self.dtype(cell), self.device
        config = replace(self.shapes[cell.shape], max_position_embeddings=max(16384, cell.ctx))
        with torch.no_grad(), self.backend.active():
            made = (config, cell.quant, device, dtype)
            model = self._keep("model", made, lambda: random_model(*made), ("head", "engine"))
            head = None
            if cell.head:
                drafted = (cell.head, cell.head_quant)
                head = self._keep("head", (made, drafted), lambda: random_head(model, *drafted), ("engine",))

            def make() -> Engine:
                extra = {"eagle": "random", "tree": cell.tree} if head else {}
                name = str(dtype).removeprefix("torch.")
                how = engine_options(mode)
                extra |= {key: how[key] for key in how if hasattr(LoadOptions(), key)}
                opts = LoadOptions(checkpoint=cell.shape, ctx=cell.ctx, dtype=name, **extra)
                drafter = build_drafter(model, head, opts) if head else None
                engine = Engine(model, None, drafter, 1, cell.ctx, backend=self.backend, **how)
                engine.options, engine.head = opts, head
                return engine

            return self._keep("engine", (cell.engine_key, mode), make, ())

    def drop(self) -> None:
        """Forget everything, after a failure."""
        self.kept.clear()
        free(self.device)


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def free(device: torch.device) -> None:
    gc.collect()
    if on_gpu(device):
        torch.cuda.empty_cache()


# ---- the engine's step ---------------------------------------------------------------------------------------


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


def engine_options(mode: str) -> dict[str, Any]:
    """Options of Engine for a way to run, as far as this Engine has them. engine: as `generate.py --compile`; graph:
    uncompiled kernels in a CUDA graph. Random weights accept nothing, so falling back to plain steps is switched off."""
    wanted: dict[str, Any] = {"compile": mode == "engine", "eagle_always": True}
    known = inspect.signature(Engine.__init__).parameters
    if (
        mode == "graph"
        and "compile_mode" in known
        and "capture" in getattr(engine_module, "COMPILE_MODES", ())
    ):
        wanted |= {"compile": True, "compile_mode": "capture"}
    return {name: value for name, value in wanted.items() if name in known}


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
    request = Request(*(given[name] if name in given else getattr(state, name) for name in Request._fields))
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


# ---- one cell ------------------------------------------------------------------------------------------------


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
        if isinstance(child, quantize.QuantLinear):
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


# ---- files ---------------------------------------------------------------------------------------------------


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


# ---- runs ----------------------------------------------------------------------------------------------------


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


# ---- tables --------------------------------------------------------------------------------------------------


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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="append one line per cell to this file")
    parser.add_argument(
        "--done", type=Path, nargs="*", default=[], help="further files whose finished cells are skipped"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--full", action="store_true", help="also the cells of make gpu-full")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes only: tries the script, measures nothing"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="print the cells and exit")
    parser.add_argument("--run", nargs="+", choices=("engine", "graph", "eager"), help=(
        "ways to run a step, tried in order; engine: as `generate.py --compile`; graph: uncompiled, captured in a CUDA "
        "graph (default: engine graph; on a CPU: eager)"
    ))  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=0, help="start no cell later than this (0: no limit)"
    )
    parser.add_argument("--cell-seconds", type=float, default=300, help="limit of one cell")
    parser.add_argument("--steps", type=int, default=32, help="steps of the engine's own loop")
    parser.add_argument("--repeats", type=int, default=30, help="timed steps")
    parser.add_argument(
        "--synthetic-tau", type=float, default=4.0, help="tau assumed where none is published"
    )
    parser.add_argument("--skip-failed", action="store_true", help="do not retry cells that failed")
    parser.add_argument("--no-launches", dest="launches", action="store_false", help="do not count launches")
    parser.add_argument("--start", metavar="LABEL", help="measure one start instead; LABEL: cold or warm")
    parser.add_argument("--since", type=float, help="with --start: when the command was given, Unix seconds")
    parser.add_argument(
        "--bandwidth", action="store_true", help="only the environment and the copy bandwidth"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """0: every cell has a figure; 1: some failed; 2: usage; POISONED: run again with --skip-failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    cells = tiny_cells() if args.tiny else quick_cells() + (full_cells() if args.full else [])
    cells = [cell for cell in dict.fromkeys(cells) if args.only in cell.key]
    if args.list:
        print("\n".join(cell.key for cell in cells))
        return 0
    device = torch.device(args.device)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the script")
    if device.type == "cpu" and not args.tiny:
        parser.error("--device cpu needs --tiny: the real shapes are for a GPU")
    if args.steps < 2 or args.repeats < 1:
        parser.error("--steps must be at least 2 and --repeats at least 1")
    if not cells:
        parser.error(f"no cell's name contains {args.only!r}; --list prints them")
    env = environment(device)
    env["git"]["commit"] = env["git"]["commit"] or os.environ.get("EAGLET_COMMIT")  # a copy without its .git
    if args.start:
        return run_start(args.start, args, device, env)
    if args.bandwidth:
        line = {
            "type": "environment",
            "environment": env,
            "copy_gbs": round(bandwidth(device) / 1e9, 2),
            "utc": utc(),
        }
        append(args.json, line)
        print(json.dumps(line), flush=True)
        return 0
    return Run(args, device, env).over(cells)


if __name__ == "__main__":
    sys.exit(main())
