"""What the processes of tensor parallelism (ranks) exchange: sums and concatenations, each in the order of the ranks.

A fixed order makes the bits of a row independent of the number of rows and the same in every rank. Each exchange is one
operator, so that a trace of a step shows and counts it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def _gathered(x: Tensor, ranks: int) -> list[Tensor]:
    parts = list(x.new_empty(ranks, *x.shape).unbind())
    dist.all_gather(parts, x.contiguous())
    return parts


@torch.library.custom_op("eaglet::rank_sum", mutates_args=())
def rank_sum(x: Tensor, ranks: int) -> Tensor:
    """The sum of every rank's x, in the order of the ranks, added in float32 or wider and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total, *others = (part.to(wide, copy=True) for part in _gathered(x, ranks))
    for part in others:
        total += part
    return total.to(x.dtype)


@rank_sum.register_fake
def _(x, ranks):
    return x.new_empty(x.shape)


@torch.library.custom_op("eaglet::rank_concat", mutates_args=())
def rank_concat(x: Tensor, ranks: int) -> Tensor:
    """Every rank's x [..., N] side by side in the order of the ranks, [..., ranks N]."""
    return torch.cat(_gathered(x, ranks), -1)


@rank_concat.register_fake
def _(x, ranks):
    return x.new_empty(*x.shape[:-1], ranks * x.shape[-1])
