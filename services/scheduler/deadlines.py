"""Which attempt passes its deadline next."""

from __future__ import annotations

import heapq
from collections.abc import Container


class Deadlines:
    """A queue of (moment, attempt). Entries of attempts that are gone stay until they are due, or are pruned."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next(self) -> float | None:
        """The earliest moment; None without one."""
        return self._due[0][0] if self._due else None

    def add(self, moment: float, attempt_id: int) -> None:
        """This attempt must end then."""
        heapq.heappush(self._due, (moment, attempt_id))

    def take_due(self, now: float) -> list[int]:
        """The attempts whose moment has come, each once."""
        due: list[int] = []
        while self._due and self._due[0][0] <= now:
            due.append(heapq.heappop(self._due)[1])
        return due

    def prune(self, known: Container[int], count: int) -> None:
        """Drops in bulk those of attempts that are gone: a far one would otherwise be kept for its whole time."""
        if len(self._due) > 2 * count + 64:
            self._due = [entry for entry in self._due if entry[1] in known]
            heapq.heapify(self._due)
