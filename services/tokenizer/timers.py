"""Moments at which entries have to be looked at again. What is to be done then is decided then."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.tokenizer.entry import Entry


class Timers:
    """A heap of (moment, entry); an entry may have several, and a moment that has become pointless costs one look."""

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._count = 0

    def add(self, at: float, entry: Entry) -> None:
        """Look at the entry at this moment."""
        self._count += 1  # keeps entries out of the comparison
        heapq.heappush(self._heap, (at, self._count, entry))

    def prune(self, live: int) -> None:
        """Drops forgotten entries' moments once they are most of the heap: a far one would keep its entry alive."""
        if len(self._heap) > 4 * live + 64:
            self._heap = [moment for moment in self._heap if not moment[2].forgotten]
            heapq.heapify(self._heap)

    def due(self, now: float) -> Iterator[Entry]:
        """Entries whose moment has come, each taken out; once per moment."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]


def past(moment: float | None, grace_s: float, now: float) -> bool:
    """Whether a moment, if there was one, is this long ago."""
    return moment is not None and now >= moment + grace_s
