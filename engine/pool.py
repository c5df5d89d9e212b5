"""Which places of the cache each row has, where not all rows can have a whole context at once.

A row has one span of places behind each other. The places of a span count from its own start for everything that is
computed, so a span may be moved between two steps.
"""

from collections.abc import Sequence

from decoding.step import DecodeState

PART = 256  # places that are moved at once, through a copy


class Pool:
    """Hands out the spans of a DecodeState."""

    def __init__(self, state: DecodeState):
        self.state = state

    def room(self, rows: Sequence[int] = ()) -> int:
        """Places that no row has, or only these rows have."""
        spans = self.state.spans
        taken = sum(size for b, (first, size) in enumerate(spans) if first < self.state.places and b not in rows)
        return self.state.places - taken

    def cut(self, row: int, tokens: int) -> None:
        """Take everything but its first tokens from a row that has no request."""
        state, (first, size) = self.state, self.state.spans[row]
        span = (first, min(size, tokens + 1)) if tokens else state.nowhere
        if span != state.spans[row]:
            state.spans[row] = span
            # Steps may run the row, too. What they write lies behind the tokens.
            state.n[row], state.count[row] = max(1, span[1] - 1), 1

    def extend(self, row: int, size: int) -> None:
        """Give a row `size` places, of which `room([row])` has enough, with what it holds. Moves what is in the way."""
        state, (first, held) = self.state, self.state.spans[row]
        others = sorted((span, b) for b, span in enumerate(state.spans) if b != row and span[0] < state.places)
        held = 0 if first == state.places else min(held, size)
        start = self._gap([span for span, _ in others], first, size)
        if start is None:  # what lies before the row moves to the front, what lies behind it to the end
            start, end = 0, state.places
            for span, b in others:
                if span[0] < first:
                    self._move(b, start)
                    start += span[1]
            for span, b in reversed(others):
                if span[0] > first:
                    end -= span[1]
                    self._move(b, end)
        state.spans[row] = (first, held)
        self._move(row, start)
        state.spans[row] = (start, size)

    def _gap(self, spans: Sequence[tuple[int, int]], own: int, size: int) -> int | None:
        """Where `size` places are free: at the row's own start if possible, else as early as possible."""
        ends = [0, *(first + held for first, held in spans)]
        free = list(zip(ends, [*(first for first, _ in spans), self.state.places], strict=True))
        if any(begin <= own and own + size <= end for begin, end in free):
            return own
        return next((begin for begin, end in free if begin + size <= end), None)

    def _move(self, row: int, to: int) -> None:
        """Move what a row holds. Places that the old and the new span share are read before they are written."""
        first, size = self.state.spans[row]
        self.state.spans[row] = (to, size)
        parts = range(0, size if to != first else 0, PART)
        for at in parts if to < first else reversed(parts):
            count = min(PART, size - at)
            for kv in self.state.kv:
                kv.narrow(-2, to + at, count).copy_(kv.narrow(-2, first + at, count).clone())
