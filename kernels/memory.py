"""What recurrent layers remember of the sequences of an engine, committed behind a step.

A memory cannot be cut back to an earlier token as keys and values can. So the rows of the path that was accepted last
wait beside it (`records.Memory`), and `decoding.snapshots` keeps copies.
"""

import torch
from torch import Tensor

from kernels.records import Memory


def last_rows(path: Tensor, pending: Tensor, width: int) -> Tensor:
    """The last `width` rows [B, ..., width, R] of texts, where path [B, ..., P, R] has `width` rows of each and then
    pending [B] more. Other rows behind them do not count."""
    place = pending[:, None] + torch.arange(width, device=path.device)
    place = place.view(len(path), *[1] * (path.dim() - 3), width, 1)
    return path.gather(-2, place.expand(*path.shape[:-2], -1, path.shape[-1]))


def next_window(layer: Memory, rows: Tensor, width: int) -> Tensor:
    """The last `width` rows [B, width, R] of the text whose last `layer.keep` rows are the first ones of rows [B, T, R].

    width: K - 1, the rows that lie before the accepted path.
    """
    text = torch.cat((last_rows(layer.path, layer.pending, width), rows), 1)
    return last_rows(text, layer.keep, width)


def commit_memory(memory: Memory, path: Tensor, count: Tensor, window: int) -> None:
    """Let the accepted rows of a step wait in `memory.path`, where those before were until the step's forward took them.

    path [B, D + 1]: the accepted nodes; count [B]: how many of them count, 0 for a sequence that had finished. window:
    rows before the path, K - 1. No host sync.
    """
    accepted = path[:, None, :, None].expand(-1, memory.fresh.shape[1], -1, memory.fresh.shape[3])
    rows = torch.cat((last_rows(memory.path, memory.pending, window), memory.fresh.gather(2, accepted)), 2)
    place = memory.path.narrow(2, 0, rows.shape[2])
    place.copy_(torch.where((count > 0)[:, None, None, None], rows, place))
    memory.pending.copy_(torch.where(count > 0, count, memory.pending))


def part_of_text(memory: Memory, row: int, keep: Tensor) -> Memory:
    """The memory of one sequence, for a forward of a part of its text of which the first `keep` [1] rows count."""
    own = Memory(*(t.narrow(0, row, 1) for t in memory))
    return own._replace(frozen=torch.zeros_like(own.frozen), keep=keep)


def commit_text(own: Memory, window: int) -> None:
    """Behind a forward of a part of a text: its rows are in the memory, and the last `window` ones before the path."""
    own.path[:, :, :window] = own.fresh[:, :, :window]
    own.pending.zero_()


def clear(memory: Memory, row: int) -> None:
    """Let a sequence begin anew."""
    for held in (memory.memory, memory.path, memory.pending):
        held[row] = 0
