"""How the GPUs of several ranks exchange values, decided once while the model loads, and what that should cost.

Where every GPU can read the memory of all others (NVLink, or peer-to-peer access over PCIe) and torch can share memory
between the processes, an exchange is one-shot: everyone writes its part and reads all others'. Otherwise it is NCCL's.
The costs are published ones of other programs, because eaglet has not been measured on two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import one_line


class Link(NamedTuple):
    """How two cards exchange: seconds of a short exchange, bytes per second of long ones, as published for others."""

    name: str
    seconds: float
    rate: float
    launches: int  # kernels of an exchange before what it brought is added

    def cost(self, sizes: Iterable[int]) -> float:
        """Predicted seconds of exchanges to each of which a rank gives this many bytes."""
        return sum(self.seconds + size / self.rate for size in sizes)


NCCL = Link("NCCL through host memory", 39e-6, 10e9, 1)
ONE_SHOT = Link("one-shot over peer-to-peer memory", 5.76e-6, 20e9, 3)  # write, wait, and wait again after reading


class Exchanges(NamedTuple):
    """What the ranks of an engine exchange for a token of plain decoding."""

    by: str
    count: int
    predicted_ms: float | None  # None where nothing was published, as for CPUs
    why: str = ""  # why it is not one-shot

    def __str__(self) -> str:
        by = f"{self.by} ({self.why})" if self.why else self.by
        cost = "" if self.predicted_ms is None else f"; predicted, not measured: {self.predicted_ms:.1f} ms per token"
        return f"{self.count} exchanges per token by {by}{cost}"


class SharedMemory:
    """What torch offers for sharing the memory of GPUs between processes. Tests have a stand-in."""

    def unreachable(self, ranks: int) -> str:
        """Why these GPUs cannot read each other's memory, or ""."""
        for one, other in permutations(range(ranks), 2):
            if not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot read the memory of GPU {other}"
        return ""

    def allocate(self, size: int) -> Tensor:
        """Memory of `size` bytes of this rank's GPU that can be shared. RuntimeError where the driver cannot."""
        from torch.distributed import _symmetric_memory as symm_mem

        return symm_mem.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))

    def meet(self, memory: Tensor) -> None:
        """Let all ranks map each other's memory. All call it."""
        from torch.distributed import _symmetric_memory as symm_mem

        symm_mem.rendezvous(memory, dist.group.WORLD)


def share_memory(
    ranks: int, size: int, say: Callable[[str], Sequence[str]], offer: SharedMemory
) -> tuple[Tensor | None, str]:
    """Memory of `size` bytes that all ranks read from each other, or None and why there is none. All ranks call it.

    Every rank comes to the same answer, because each tells the others what it could not do before anyone goes on.

    say: tells all ranks this rank's problem, or "", and returns what all of them say.
    """
    memory: list[Tensor] = []
    problem = offer.unreachable(ranks)
    for attempt in (lambda: memory.append(offer.allocate(size)), lambda: offer.meet(memory[0])):
        if obstacle := next(filter(None, say(problem)), ""):
            return None, obstacle
        try:
            attempt()
        except (RuntimeError, ImportError) as error:
            problem = one_line(error)
    obstacle = next(filter(None, say(problem)), "")
    return (None, obstacle) if obstacle else (memory[0], "")
