"""Taking no more memory than is needed: modules without weights, zeros without pages, freed memory that is given back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
INITIALISERS = frozenset(value for value in vars(torch.nn.init).values() if callable(value))


class _NoInitialisation(TorchFunctionMode):
    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in INITIALISERS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are made inside are on the meta device: they have shapes and take no memory.

    Nothing initialises their weights. On the meta device that would have no effect but to import torch's compiler, which
    takes a second and 40 MB.
    """
    with torch.device("meta"), _NoInitialisation():
        yield


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros, but on a CPU the system supplies a page of it only when something is written there.

    A KV cache is as long as the context, and most requests use little of it. Huge pages would be 2 MB each, which is a
    head's keys of thousands of tokens.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


@contextlib.contextmanager
def freed_memory_returns() -> Iterator[None]:
    """Inside, the memory of freed tensors goes back to the system at once, where the C library is glibc.

    By itself glibc keeps freed blocks up to 32 MB for later. While a model is read and packed, these are copies of its
    weights, which nobody needs later.
    """
    libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if libc is None:
        yield
        return
    for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        libc.mallopt(name, 128 << 10)  # where glibc starts, and what it raises after the first large block
    try:
        yield
    finally:
        libc.malloc_trim(0)
        # As high as glibc itself would go: a step frees and takes the same blocks again and again.
        libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
