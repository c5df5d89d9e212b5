"""The first look at a GPU: each kernel beside its reference, and a row alone beside the same row among others.

The kernels are tested on few cards. So the first time that a model runs on a card, with some version of torch and Triton,
two steps and four forwards are made in which every kernel and its reference do the same calls. The answer is kept
in the cache folder. What a kernel gets wrong is left to its reference from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import kernels
from decoding.drafter import Drafter
from decoding.params import SamplingParams
from decoding.step import DecodeState, decode_step
from engine.stepping import EngineConfig, Stepper
from kernels.records import StepBuffers
from model import Transformer
from support import cache
from support.errors import is_out_of_memory, one_line
from support.files import read_json, write_json
from support.machine import describe_device, synchronize

ROWS = (1, 16, 60, 288)  # of the forwards that a row is compared in, the last one as wide as a part of a prompt
CONTEXT = 300  # cached tokens behind which the steps are made
SPARE = 300  # places for the nodes of the widest tree
# How far a kernel's result may be from its reference's, in units of the reference's norm. The tests of a device allow
# half of it at most, also for sums in fp16. One wrong row of 60 is 0.13, one wrong tile of 128 columns of 4,096 is 0.18.
TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.04, torch.float32: 1e-3}
INT8 = 0.04  # the same where keys and values are rounded to int8
MODES = (SamplingParams(temperature=0.0).mode, SamplingParams(temperature=1.0, top_p=0.9).mode)


@dataclass
class Findings:
    """What a look found. Both are empty where all is well."""

    wrong: dict[str, str] = field(default_factory=dict)  # operation -> what its kernel does
    uneven: str = ""  # the first operation at which a row has other bits among others


class Comparison:
    """Makes the calls of all kernels (`kernels.watched`). The first call of each kind is made by the reference, too."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance
        self.found = Findings()
        self.compared: set[tuple] = set()
        self.alone: list[tuple[str, list[Tensor]]] = []  # what each call gave in a forward of one row: numbers alone
        self.rows = 0  # of the present forward, if rows are compared
        self.calls = 0  # made in it
        self.inside = False  # a call, whose own calls are a part of it

    def __call__(self, operation: kernels.Operation, args: list[Any]) -> Any:
        if operation.key in self.found.wrong:
            return self._reference(operation, args)
        kind, inside, self.inside = _kind(operation, args), self.inside, True
        out = operation.triton(*args) if kind in self.compared else self._both(operation, args)
        self.inside = inside
        self.compared.add(kind)
        if inside:
            return out
        numbers = [t for t in _tensors(out) if t.is_floating_point()]
        if self.rows == 1:
            self.alone.append((operation.name, [t.clone() for t in numbers]))
        elif self.rows and not self.found.uneven and not self._same_row(operation.name, numbers):
            self.found.uneven = f"a row has other bits at {operation.name} among {self.rows} rows than alone"
        self.calls += 1
        return out

    def begin(self, rows: int) -> None:
        """The calls from now on belong to a forward of so many rows, whose first one is the same in all of them."""
        self.rows, self.calls = rows, 0

    def _same_row(self, name: str, numbers: list[Tensor]) -> bool:
        """Whether the first row of a result has the bits that it has alone. The shapes differ in the rows' axis alone."""
        other, alone = self.alone[self.calls]
        for own, wide in zip(alone, numbers, strict=True):
            for axis, size in enumerate(own.shape):
                wide = wide.narrow(axis, 0, min(size, wide.shape[axis]))
            if name != other or not torch.equal(wide, own):
                return False
        return True

    def _both(self, operation: kernels.Operation, args: list[Any]) -> Any:
        copies = [tree_map(torch.clone, arg) if i in operation.written else arg for i, arg in enumerate(args)]
        want, problem = None, ""
        try:
            want = self._reference(operation, copies)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        try:
            out = operation.triton(*args)
        except Exception as error:  # whatever Triton and its compiler raise for what a device cannot run
            if want is None or is_out_of_memory(error):
                raise
            out, problem = want, f"cannot run here ({one_line(error):.200})"
            for i in operation.written:
                for ours, theirs in zip(_tensors(args[i]), _tensors(copies[i]), strict=True):
                    ours.copy_(theirs)
        if not problem and want is not None:
            ours, theirs = _tensors([out, *_read(args, operation)]), _tensors([want, *_read(copies, operation)])
            exact = operation.key not in ("packed_topk", "draft_topk")  # ids of nearly equal scores may change places
            problems = (self._difference(*pair, exact) for pair in zip(ours, theirs, strict=True))
            problem = next(filter(None, problems), "")
        if problem:
            self.found.wrong.setdefault(operation.key, f"{operation.name} {problem}")
        return out

    def _reference(self, operation: kernels.Operation, args: list[Any]) -> Any:
        with kernels.KernelBackend("reference", _tensors(args)[0].device.type).active(), kernels.watched(None):
            return operation.by_reference(*args)

    def _difference(self, got: Tensor, want: Tensor, exact: bool) -> str:
        """What is wrong with a kernel's result, or "". Waits for the device."""
        if not got.is_floating_point():
            wrong = int((got != want).sum()) if exact else 0
            return f"differs from its reference in {wrong} of {want.numel()} integers" if wrong else ""
        got, want = got.double(), want.double()
        same = (got == want) | (got.isnan() & want.isnan())  # infinities, too
        size = torch.where(want.isfinite(), want, 0.0).norm().clamp(1e-9)
        off = float(torch.where(same, 0.0, got - want).norm() / size)
        return "" if off <= self.tolerance else f"is {off:.1%} off its reference"


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples."""
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def _kind(operation: kernels.Operation, args: list[Any]) -> tuple:
    """What makes a call one of another kind: shapes and dtypes of tensors, and all other values."""
    return operation.name, *((t.dtype, t.shape) if isinstance(t, Tensor) else t for t in tree_leaves(args))


def _read(args: list[Any], operation: kernels.Operation) -> list[Any]:
    """What an operation wrote, as it is read: an int8 cache as numbers, and no places that take what nobody reads."""
    written = [args[i] for i in operation.written]
    for i, value in enumerate(written):
        if isinstance(value, StepBuffers):
            written[i] = value._replace(tokens=value.tokens[:, :-1], history=value.history[:, :-1])
        elif isinstance(value, Tensor) and value.dtype == torch.int8:
            written[i] = kernels.dequantize_rows(value, torch.float32)
    return written


@torch.inference_mode()
def look(model: Transformer, drafter: Drafter, config: EngineConfig) -> Findings:
    """Make steps of this model and drafter on caches of their own, and compare. Waits for the device.

    The drafter's caches hold other numbers afterwards.
    """
    small = replace(config, ctx=min(CONTEXT + SPARE, model.config.max_positions), pool=None, compile=False)
    stepper = Stepper(model, drafter, small)
    context = min(CONTEXT, stepper.ctx // 2)
    comparison = Comparison(max(TOLERANCE[model.dtype], INT8 if config.kv_dtype == torch.int8 else 0.0))
    with stepper.paused(), config.backend.active(), kernels.watched(comparison):
        for mode in MODES:
            stepper.fill()
            stepper.pin(context)
            decode_step(model, drafter, stepper.state, mode)
        for rows in () if comparison.found.wrong else ROWS:
            comparison.begin(rows)
            _forward(model, stepper.state.first(1), context, rows)
    synchronize(model.device)
    return comparison.found


def _forward(model: Transformer, state: DecodeState, context: int, rows: int) -> None:
    """A forward of nodes that do not see each other. The first one has the same token however many there are."""
    device = model.device
    tokens = torch.arange(1, rows + 1, device=device)[None] * 7 % model.config.vocab_size
    alone = torch.eye(rows, dtype=torch.bool, device=device)[None]
    start = torch.full((1,), context, device=device)
    nodes = model.nodes(start, torch.zeros_like(tokens), alone, state.slots, state.segments)
    memory = state.memory
    if memory is not None:  # of all widths the same one
        memory.pending.zero_()
        memory = memory._replace(frozen=torch.ones_like(memory.frozen))
    model.logits(model(tokens, nodes, state.kv, memory=memory)[0])


# ---- once for each model and device ---------------------------------------------------------------------------


def first_look(
    model: Transformer, drafter: Drafter, config: EngineConfig, report: Callable[[str], None], again: bool = False
) -> None:
    """Look at this model on its device unless that was done before, and leave to the reference what a kernel gets wrong.

    The answer holds for the device, the versions of torch and Triton, our sources, and the model's shapes and formats.
    config.backend: its table is changed. report: called with what the user should know. again: look in any case.
    """
    place, name = answers_file(model.device), fingerprint(model, drafter, config)
    answers: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # there are none yet, or the file is damaged
        answers = read_json(place)
    if again or name not in answers:
        report("look    this model is new on this GPU, so its kernels are compared with their references")
        started = time.perf_counter()
        try:
            found = look(model, drafter, config)
        except Exception as error:  # whatever it is, it must not keep a model from being used
            return report(f"note    the comparison ended early, so the kernels run as they are: {one_line(error)}")
        answers[name] = {"wrong": found.wrong, "uneven": found.uneven}
        with contextlib.suppress(OSError):  # it is made again next time
            place.parent.mkdir(parents=True, exist_ok=True)
            write_json(place, answers)
        if not found.wrong and not found.uneven:
            seconds = time.perf_counter() - started
            report(f"look    all agree, and a row has the same bits alone and among {ROWS[-1]} ({seconds:.1f} s)")
    for operation, problem in answers[name]["wrong"].items():
        config.backend.table[operation] = "reference", f"the first look at this device: {problem}"
        report(f"note    on this GPU {problem}; its reference runs instead: slower, and drafts may change the text")
    if uneven := answers[name]["uneven"]:
        report(f"note    on this GPU {uneven}, so drafts may change the text")


def answers_file(device: torch.device) -> Path:
    """Where the answers for a device, these versions and these sources are kept."""
    return cache.folder() / "first_look" / f"{cache.key(describe_device(device))}.json"


def fingerprint(model: Transformer, drafter: Drafter, config: EngineConfig) -> str:
    """What the shapes and formats of all kernels follow from."""
    head = repr(config.head.config) if config.head else ""
    drafts = type(drafter).__name__, drafter.N, drafter.D
    facts = (model.config, model.dtype, model.quant, head, drafts, config.batch_size, config.kv_dtype)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
