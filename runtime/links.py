"""How the GPUs of several ranks exchange values, decided once while the model loads.

Where every GPU can read the memory of all others (NVLink, or peer-to-peer access over PCIe) and torch can share memory
between the processes, an exchange is one-shot: everyone writes its part and reads all others'. Otherwise it is NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import one_line

NCCL = "NCCL through host memory"
ONE_SHOT = "one-shot over peer-to-peer memory"


class Exchanges(NamedTuple):
    """What the ranks of an engine exchange for a token of plain decoding."""

    by: str
    count: int
    why: str = ""  # why it is not one-shot

    def __str__(self) -> str:
        return f"{self.count} exchanges per token by {self.by}" + (f" ({self.why})" if self.why else "")


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
