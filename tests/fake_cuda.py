"""A stand-in for the parts of torch.cuda that `runner.Runner` uses, for machines without a GPU.

Its graphs are as strict as real ones: a capture computes nothing that lasts (what existed before it is put back), and a
replay repeats the recorded operators on the recorded memory, with the host's numbers of that time baked in. A step
that rebinds a buffer, or reads a value on the host, so replays wrongly here too.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(*trees) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tensors(args, kwargs):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self.made | self.before.keys():
                self.before[memory.data_ptr()] = memory, memory.clone()
        out = function(*args, **(kwargs or {}))
        memories = {t.untyped_storage().data_ptr() for t in tensors(out)}
        self.made |= memories - self.before.keys()
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def put_back(self) -> None:
        for memory, copy in self.before.values():
            memory.copy_(copy)

    def play(self) -> None:
        for function, args, kwargs, out in self.calls:
            new = function(*args, **kwargs)
            for recorded, value in zip(tensors(out), tensors(new), strict=True):
                if recorded.data_ptr() != value.data_ptr():
                    recorded.copy_(value)


class FakeCuda:
    """`log` lists what happened, in order: (what, whom)."""

    def __init__(self):
        self.log: list[tuple] = []
        self.pools, self.events, self.current = 0, 0, FakeStream(self, "main")

    def Event(self):  # noqa: N802 (torch's name)
        self.events += 1
        return FakeEvent(self, self.events - 1)

    def Stream(self):  # noqa: N802
        return FakeStream(self, "side")

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
        self.current = stream  # and, as torch does when a capture fails, left so
        tape = Tape()
        try:
            with tape:
                yield
        finally:
            tape.put_back()
        self.log.append(("captured", pool))
        graph.tape = tape


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append(("wait_stream", self.name, other.name))


class FakeEvent:
    def __init__(self, cuda, index):
        self.cuda, self.index = cuda, index

    def record(self):
        self.cuda.log.append(("record", self.index))

    def synchronize(self):
        self.cuda.log.append(("wait", self.index))


class FakeGraph:
    def __init__(self, cuda):
        self.cuda, self.tape = cuda, None

    def replay(self):
        self.cuda.log.append(("replay", self.tape))
        self.tape.play()
