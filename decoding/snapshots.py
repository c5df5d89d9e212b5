"""Snapshots: copies, made while a prompt is read, of what cannot be cut back to an earlier token.

The target's keys and values can be cut back to any token. The memory of recurrent layers cannot, and the ring of a
drafter with a window has only its last positions. So both are copied to the host at some places of a prompt, above all
at the ends of turns, where a later prompt is likely to differ from this one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from decoding.drafter import Drafter
from decoding.step import DecodeState

APART = 64  # tokens between two snapshots at least; fewer are run again sooner than they are copied
SNAPSHOTS = 8  # of a text at most
SNAPSHOT_BYTES = 512 << 20  # of all rows of an engine, unless two of each take more


class Snapshot(NamedTuple):
    """What is remembered of the first `end` tokens of a text, on the host."""

    at: int  # tokens that the memory of recurrent layers has; the rows behind them wait
    end: int
    drafted: int  # rows that were made for the draft caches
    tensors: tuple[Tensor, ...] = ()  # copies of `remembered`; none while they are on disk

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors)

    def restore(self, state: DecodeState, drafter: Drafter, row: int, start: int) -> None:
        """Let a row go on from token `start`, which is at least `at` and at most `end`."""
        for place, part in zip(remembered(state, drafter, row), self.tensors, strict=True):
            place.copy_(part)
        if state.memory is not None:
            state.memory.pending[row] = start - self.at


def memory_of(state: DecodeState, row: int) -> list[Tensor]:
    """What recurrent layers remember of a row, with the rows that wait. Empty for a model without such layers."""
    return [state.memory.memory[row], state.memory.path[row]] if state.memory else []


def remembered(state: DecodeState, drafter: Drafter, row: int) -> list[Tensor]:
    """What cannot be cut back of a row: the memory of recurrent layers, and a ring."""
    return memory_of(state, row) + [cache.narrow(-4, row, 1) for cache in drafter.caches if drafter.ring]


def most_snapshots(rows: int, nbytes: int) -> int:
    """How many snapshots of so many bytes each of the rows of an engine may have, 0 if there is nothing in them."""
    return min(SNAPSHOTS, max(2, SNAPSHOT_BYTES // (rows * nbytes))) if nbytes else 0


def resting_places(text: Sequence[int], start: int, turns: Collection[int], taken: Sequence[Snapshot]) -> list[int]:
    """After how many tokens a snapshot of a text is taken while it is read from token `start` on, in their order.

    The first one is behind the system message and the tools, and the last one before the answer. Between them the
    distance from the end grows by a factor of four, so they are few, and what is run again is at most four times what
    differs.

    turns: ids that begin or end a turn. taken: the snapshots that the text has.
    """
    P = len(text)
    marks = [at for at in range(start + APART, P) if text[at] in turns]
    wanted = marks[:1] + marks[-1:]
    reach = APART
    while P - reach > start:
        wanted.append(next((at for at in reversed(marks) if P - 4 * reach < at <= P - reach), P - reach))
        reach *= 4
    kept = [0, start, *(snapshot.end for snapshot in taken)]
    places: list[int] = []
    for place in wanted:
        if place > start and all(abs(place - other) >= APART for other in kept + places):
            places.append(place)
    return sorted(places)
