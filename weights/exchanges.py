"""What the processes of tensor parallelism (ranks) exchange: sums and concatenations, each in the order of the ranks.

A fixed order makes the bits of a row independent of the number of rows and the same in every rank. Each exchange is one
operator, so that a trace of a step shows and counts it. `shared` is memory of this GPU that the other GPUs can read
(`runtime.links`). What fits into it is written there and read by everyone at once, in the order in which NCCL's or
gloo's result is added, so both give the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class ExchangeFailed(RuntimeError):
    """Values could not be exchanged, most likely because another rank has ended."""


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Turn what torch raises for an exchange that fails into ExchangeFailed. Memory that runs out keeps its own error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExchangeFailed(str(error)) from error


@contextlib.contextmanager
def _gathered(x: Tensor, ranks: int, shared: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    if shared is None or x.nbytes > shared.nbytes:
        # the operator below dist.all_gather_into_tensor, which newer versions of torch call by another name
        group = dist.group.WORLD.group_name
        with exchanging():
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.reshape(-1), ranks, group)
            gathered = torch.ops._c10d_functional.wait_tensor(gathered)
        yield gathered.view(ranks, *x.shape).unbind()
        return
    from torch.distributed import _symmetric_memory as symm_mem

    memory = symm_mem.rendezvous(shared, dist.group.WORLD)  # a look-up, as all have met over it before
    memory.get_buffer(memory.rank, x.shape, x.dtype).copy_(x)
    memory.barrier()  # everyone has written
    yield tuple(memory.get_buffer(rank, x.shape, x.dtype) for rank in range(ranks))
    memory.barrier()  # everyone has read


@torch.library.custom_op("eaglet::rank_sum", mutates_args=())
def rank_sum(x: Tensor, ranks: int, shared: Tensor | None = None) -> Tensor:
    """The sum of every rank's x, in the order of the ranks, added in float32 or wider and rounded once."""
    with _gathered(x, ranks, shared) as parts:
        if ranks == 2:
            return parts[0] + parts[1]  # torch adds as below, in one kernel
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)


@rank_sum.register_fake
def _(x, ranks, shared=None):
    return x.new_empty(x.shape)


@torch.library.custom_op("eaglet::rank_concat", mutates_args=())
def rank_concat(x: Tensor, ranks: int, shared: Tensor | None = None) -> Tensor:
    """Every rank's x [..., N] side by side in the order of the ranks, [..., ranks N]."""
    with _gathered(x, ranks, shared) as parts:
        return torch.cat(parts, -1)


@rank_concat.register_fake
def _(x, ranks, shared=None):
    return x.new_empty(*x.shape[:-1], ranks * x.shape[-1])
