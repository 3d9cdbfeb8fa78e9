"""Wakes callers whose streams have news, each at most so often that all of them together can be written to.

A write to a caller costs a system call, however little is in it. A caller that was just written to therefore waits a
moment, in which more comes and is merged into its next write. The moment is as long as it takes to write to all that
have news now, and as long again for everything else: measured, so that it grows when the machine is busy. A gateway
with few streams adds nothing, one that is flooded writes larger pieces instead of falling behind, and a stream slower
than the moment is never held up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from gateway.core import Stream

COST_S_MIN = 30e-6
"""What a write is taken to cost at least, seconds."""

PAUSE_S_MAX = 1.0
"""Longest wait between two writes to one caller, however many there are.

It is reached by 5,000 callers whose writes cost 100 µs each. A bound that fewer reach does harm: all time then goes
into writes of one token, and the news of this gateway queue up in the transport, where nothing can merge them.
"""

WRITES_PER_TURN = 64
"""Callers that are written to in one turn of the event loop, before new calls and other news have theirs."""

TICK_S = 0.001
"""The event loop's own resolution of time."""

MEMORY_WRITES = 64
"""A measurement over as many writes counts as much as all earlier ones together."""


class Waker:
    """The streams that wait for their moment, by the tick in which it comes."""

    __slots__ = ("_cost_s", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._cost_s = COST_S_MIN
        self._waiting: dict[int, list[Stream]] = {}

    def mark(self, streams: Collection[Stream]) -> None:
        """These streams have news: wakes those that were last woken long enough ago, and the others in time."""
        now = self._loop.time()
        pause_s = min(2 * self._cost_s * len(streams), PAUSE_S_MAX)
        due: list[Stream] = []
        for stream in streams:
            if stream.marked:
                continue
            if stream.woken_at + pause_s <= now:
                due.append(stream)
            else:
                stream.marked = True
                self._wait_for(int((stream.woken_at + pause_s) / TICK_S) + 1, stream)
        self._wake(due)

    def _wait_for(self, tick: int, stream: Stream) -> None:
        waiting = self._waiting.get(tick)
        if waiting is None:
            waiting = self._waiting[tick] = []
            self._loop.call_at(tick * TICK_S, self._end_tick, tick)
        waiting.append(stream)

    def _end_tick(self, tick: int) -> None:
        self._wake(self._waiting.pop(tick))

    def _wake(self, streams: Sequence[Stream]) -> None:
        if not streams:
            return
        now, later = self._loop.time(), streams[WRITES_PER_TURN:]
        for stream in streams[:WRITES_PER_TURN]:
            stream.marked = False
            stream.woken_at = now
            stream.wake()
        # The writers run in the loop's next turn, and what they wrote is sent at the latest in the one after it.
        self._loop.call_soon(self._loop.call_soon, self._measure, now, len(streams) - len(later))
        if later:
            for stream in later:
                stream.marked = True
            self._loop.call_soon(self._wake, later)

    def _measure(self, started: float, writes: int) -> None:
        cost_s = max((self._loop.time() - started) / writes, COST_S_MIN)
        self._cost_s += writes / (writes + MEMORY_WRITES) * (cost_s - self._cost_s)
