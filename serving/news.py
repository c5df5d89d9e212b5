"""A queue from the thread that decodes to the task that answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Generic, TypeVar

GATHER = 0.05  # seconds

Item = TypeVar("Item")


class News(Generic[Item]):
    """Items that one thread puts in and one task takes out, many at a time.

    Both share Python's lock and often the cores, so a task that woke up for every step would slow the steps down. What
    comes first is taken at once. After that the task comes back every GATHER seconds, or when an urgent item comes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._waits = False  # whether the task has nothing to do until an item comes
        self._next = 0.0  # when the task may take again

    def put(self, item: Item, urgent: bool = False) -> None:
        """Add an item, in any thread."""
        self._items.append(item)
        if urgent or self._waits:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    async def take(self, seconds: float) -> list[Item]:
        """All items that came since the last call, or [] if none came for so long."""
        self._wake.clear()
        await self._sleep(self._next - self._loop.time())
        if not self._items:
            self._wake.clear()
            self._waits = True
            if not self._items:  # none came before the thread could see that the task waits
                await self._sleep(seconds)
            self._waits = False
        self._next = self._loop.time() + GATHER
        return [self._items.popleft() for _ in range(len(self._items))]

    async def _sleep(self, seconds: float) -> None:
        """Wait until something wakes the task, but not for longer."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
