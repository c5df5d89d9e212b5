"""Stand-ins for a GPU, for machines without one.

`FakeCuda` takes the place of torch.cuda in `engine.runner`. Its graphs are as strict as real ones: a capture computes
nothing that lasts (what existed before it is put back), and a replay repeats the recorded operators on the recorded
memory, with the host's numbers of that time baked in. A step that rebinds a buffer, or reads a value on the host,
therefore replays wrongly here too.

`OneDevice` and `Indexing` let a step run on fake CUDA tensors, which have no values, and reject every read of a value
and every copy to another device. `on_fake_gpu` moves modules and tree tables there.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import kernels
import model
import tree
from bench.random_models import SHAPES, random_head, random_model
from engine.engine import Engine, EngineConfig
from engine.load import open_backend
from families.config import DTYPES
from kernels.backend import Operation
from loading import drafting
from loading.drafting import build_drafter
from loading.options import LoadOptions
from tree import TreeTables


def tensors(*trees) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries. Every operator asks, and torch's `tree_leaves` takes long."""
    found = []
    for nest in trees:
        if isinstance(nest, torch.Tensor):
            found.append(nest)
        elif isinstance(nest, (tuple, list, dict)):
            found += tensors(*(nest.values() if isinstance(nest, dict) else nest))
    return found


class Tape(TorchDispatchMode):
    """Records operators, puts back what they wrote, and plays them again."""

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tensors(args, kwargs):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self.made and memory.data_ptr() not in self.before:
                self.before[memory.data_ptr()] = memory, memory.clone()
        out = function(*args, **(kwargs or {}))
        results = tensors(out)
        self.made |= {t.untyped_storage().data_ptr() for t in results} - self.before.keys()
        self.calls.append((function, args, kwargs or {}, results))
        return out

    def put_back(self) -> None:
        for memory, copy in self.before.values():
            memory.copy_(copy)

    def play(self) -> None:
        for function, args, kwargs, results in self.calls:
            new = function(*args, **kwargs)
            for recorded, value in zip(results, tensors(new), strict=True):
                if recorded.data_ptr() != value.data_ptr():
                    recorded.copy_(value)


class FakeCuda:
    """`log` lists what happened, in order: (what, whom)."""

    def __init__(self):
        self.log: list[tuple] = []
        self.pools, self.events, self.current = 0, 0, self.Stream("main")

    def Event(self):  # noqa: N802 (torch's name)
        index, log = self.events, self.log.append
        self.events += 1
        return SimpleNamespace(record=lambda: log(("record", index)), synchronize=lambda: log(("wait", index)))

    def Stream(self, name="side"):  # noqa: N802
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(("wait_stream", name, other.name)))

    def CUDAGraph(self):  # noqa: N802
        return FakeGraph(self)

    def current_stream(self):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        self.log.append(("enter", stream.name))
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.log.append(("capture", pool, stream.name, capture_error_mode))
        self.current = stream  # and left so, as torch does when a capture fails
        tape = Tape()
        try:
            with tape:
                yield
        finally:
            tape.put_back()
        self.log.append(("captured", pool))
        graph.tape = tape


class FakeGraph:
    def __init__(self, cuda):
        self.cuda, self.tape = cuda, None

    def replay(self):
        self.cuda.log.append(("replay", self.tape))
        self.tape.play()


class Leak(Exception):
    """A step read a value or left the device."""


class OneDevice(TorchDispatchMode):
    """Rejects every read of a value and every tensor that is not on the (fake) GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if any(word in name for word in ("_local_scalar_dense", "::item", "nonzero", "masked_select", "::equal")):
            raise Leak(f"{name} reads a value")
        out = function(*args, **(kwargs or {}))
        for tensor in tensors(args, kwargs, out):
            if tensor.device.type != "cuda":
                raise Leak(f"{name} touches {tensor.device}")
        return out


# How many kernels an operator launches, where it is not one.
KERNELS = {"aten::sort": 3, "aten::topk": 6, "aten::logsumexp": 6, "aten::argmax": 1, "aten::cumsum": 2}
FREE = ("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::_unsafe_view", "prim::device", "aten::expand",
        "aten::promote_types")  # fmt: skip


def is_view(function, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operator wrote nothing and returned the memory of its input."""
    if any(argument.alias_info and argument.alias_info.is_write for argument in function._schema.arguments):
        return False
    held = {t.untyped_storage()._cdata for t in given}
    return bool(made) and all(t.untyped_storage()._cdata in held for t in made)


class Launch(NamedTuple):
    """A launch of one of our kernels: its arguments and its compiler options by name."""

    kernel: object
    arguments: dict[str, object]
    options: dict[str, object]


@contextlib.contextmanager
def recorded():
    """The list of the Triton launches that are made inside, none of which runs."""
    launches = []

    def run(kernel, *args, grid, warmup, **named):
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        arguments = {name: given.pop(name) for name in kernel.arg_names}
        launches.append(Launch(kernel, arguments, given))

    with mock.patch.object(kernels.triton.runtime.jit.JITFunction, "run", run):
        yield launches


def our_operations():
    """Every `Operation` by the name of its operator."""
    modules = [m for name, m in list(sys.modules.items()) if m and name.split(".")[0] in ROOMS]
    found = [thing for m in modules for thing in vars(m).values() if isinstance(thing, Operation)]
    return {f"eaglet::{operation.name}": operation for operation in found}


ROOMS = ("kernels", "model", "decoding", "drafters", "eagle_draft", "engine")


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would launch, by (part of the step, operator). Views and allocations are free.

    Our operators run what they run on a GPU, so that the kernels and the copies in them count. `part` is set by those who
    run a part of a step. `launches` lists our own kernels.
    """

    def __init__(self):
        super().__init__()
        self.part, self.counts, self.launches, self.ours = "other", Counter(), [], our_operations()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (operation := self.ours.get(function.name().split(".")[0])) is not None:
            given = operation._named(args)
            assert not operation.problem(*given), operation.name
            with recorded() as launches, self, Indexing():
                out = operation.triton(*given)
            self.launches += launches
            for launch in launches:
                self.counts[self.part, launch.kernel.__name__] += 1
            return out if out is None or isinstance(out, torch.Tensor) else list(out)
        out = function(*args, **(kwargs or {}))
        name = function.name().split(".")[0]
        empty = tensors(out) and not any(tensor.numel() for tensor in tensors(out))
        if not (empty or name.startswith(FREE) or is_view(function, tensors(args, kwargs), tensors(out))):
            self.counts[self.part, name] += KERNELS.get(name, 1)
        return out


class Indexing(TorchFunctionMode):
    """Does x[...], ~x and copy_ by operators, because their bindings in a CPU build of torch want a real device guard.

    It rejects what makes the binding read a value: a 0-d tensor or a mask as an index.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return self.at(*args)
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        if function is torch.Tensor.__invert__:
            return args[0].bitwise_not()
        if function is torch.Tensor.__setitem__:
            target, value = self.at(*args[:2]), args[2]
            return torch.ops.aten.copy_(target, value) if isinstance(value, torch.Tensor) else target.fill_(value)
        if function is torch.Tensor.contiguous:
            return torch.ops.aten.contiguous(*args)
        return function(*args, **(kwargs or {}))

    def at(self, x, index):
        index = index if isinstance(index, tuple) else (index,)
        rest = [slice(None)] * (x.dim() - sum(i is not None and i is not Ellipsis for i in index))
        if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
            where = next(k for k, i in enumerate(index) if i is Ellipsis)
            index = (*index[:where], *rest, *index[where + 1 :])
        dim, picked = 0, {}
        for i in index:
            if i is None:
                x, dim = x.unsqueeze(dim), dim + 1
            elif isinstance(i, int):
                x = x.select(dim, i)
            elif isinstance(i, slice):
                x, dim = torch.ops.aten.slice(x, dim, i.start, i.stop, i.step or 1), dim + 1
            elif i.dim() == 0 or i.dtype == torch.bool:
                raise Leak("indexing reads a value")
            else:
                picked[dim], dim = i, dim + 1
        if not picked:
            return x
        return torch.ops.aten.index(x, [picked.get(d) for d in range(max(picked) + 1)])


@contextlib.contextmanager
def fake_gpu(monkeypatch):
    """Tensors on "cuda" are fake ones inside: what would be copied from the host is made in place there."""
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20, major=9, minor=0, name="fake")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "fake")
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock())

    def build(self, device, length=None):
        self.length = length or self.length
        self.cos, self.sin = (
            torch.empty(self.length, sum(head_dim for _, head_dim in self.ropes) // 2, device=device) for _ in range(2)
        )

    monkeypatch.setattr(model.RotaryTable, "build", build)
    ready = {rows: tree.tree_tables([tree.PAPER25] * rows) for rows in (1, 4)}
    monkeypatch.setattr(drafting, "tree_tables", lambda which, device: on_fake_gpu(ready[len(which)]))
    with torch._subclasses.fake_tensor.FakeTensorMode(), Indexing():
        yield


TREES = {16: "dynamic:16,7,8", 24: "dynamic:24,7,8", 26: "paper25", 60: "dynamic:60,7,10"}


def step_engine(shape, quant, version, nodes, layers, batch=1):
    """An engine of random weights on the fake GPU: the shape's first layers. nodes: of its tree, 1 for plain decoding;
    version: of its head; batch: how many sequences."""
    config, device = SHAPES[shape], torch.device("cuda")
    config = replace(config, num_hidden_layers=layers, windows=config.windows[:layers])
    drafting = {"eagle": "random", "tree": TREES[nodes]} if nodes > 1 else {}
    dtype = "float16" if quant else "bfloat16"  # the quantized kernels are fastest in fp16
    options = LoadOptions(shape, ctx=256, slots=batch, dtype=dtype, device="cuda", eagle_always=True, **drafting)
    backend = open_backend(LoadOptions(device="cuda"), lambda note: None)
    with torch.no_grad(), backend.active():
        target = random_model(config, quant, device, DTYPES[dtype])
        head = random_head(target, str(version), quant or "int8") if nodes > 1 else None
        drafter = build_drafter(target, options, backend, head)
        return Engine(target, None, drafter, EngineConfig.of(options, backend, head))


def on_fake_gpu(thing):
    """Replace every tensor of a module (in place) or of tree tables by an empty one on the fake GPU."""
    if isinstance(thing, torch.nn.Module):
        for module in thing.modules():
            for store in (module._parameters, module._buffers):
                for name, t in store.items():
                    if t is not None:
                        store[name] = on_fake_gpu(t)
        return thing
    if isinstance(thing, TreeTables):
        return TreeTables(**tree_map(on_fake_gpu, dict(vars(thing))))
    if isinstance(thing, torch.Tensor):
        fake = torch.empty(thing.shape, dtype=thing.dtype, device="cuda")
        return torch.nn.Parameter(fake, False) if isinstance(thing, torch.nn.Parameter) else fake
    return thing
