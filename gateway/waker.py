"""Wakes callers whose streams have news, a few per turn of the event loop.

A batch brings news for all streams at once. Waking all of them at once would let every caller be written to before the
next batch is read, one token each, however far behind the gateway is. Waking some, and reading in between, makes writes
merge exactly when there is more to write than time to write it; an idle gateway wakes at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from gateway.core import Stream

WOKEN_PER_TURN = 16


class Waker:
    """The streams that wait for their turn, first come, first served."""

    __slots__ = ("_loop", "_running", "_waiting")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Stream] = deque()
        self._running = False

    def mark(self, streams: Iterable[Stream]) -> None:
        """These streams have news."""
        waiting = self._waiting
        for stream in streams:
            if not stream.marked:
                stream.marked = True
                waiting.append(stream)
        if waiting and not self._running:
            self._running = True
            self._run()

    def _run(self) -> None:
        waiting = self._waiting
        for _ in range(min(len(waiting), WOKEN_PER_TURN)):
            stream = waiting.popleft()
            stream.marked = False
            stream.wake()
        if waiting:
            self._loop.call_soon(self._run)
        else:
            self._running = False
