"""Which attempt's time is over next: the request's own, or that of waiting for a place."""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import NamedTuple


class Due(NamedTuple):
    """`waiting`: from `moment` on it may not wait for its first place any more. Otherwise: it may not be open."""

    moment: float
    attempt_id: int
    waiting: bool


class Deadlines:
    """A queue of moments. Entries of attempts that are gone stay until they are due, or are pruned."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[Due] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next(self) -> float | None:
        """The earliest moment; None without one."""
        return self._due[0].moment if self._due else None

    def add(self, moment: float, attempt_id: int, *, waiting: bool = False) -> None:
        """This attempt must end then; with `waiting`, what of it still waits for a place."""
        heapq.heappush(self._due, Due(moment, attempt_id, waiting))

    def take_due(self, now: float) -> list[Due]:
        """Those whose moment has come, each once."""
        due: list[Due] = []
        while self._due and self._due[0].moment <= now:
            due.append(heapq.heappop(self._due))
        return due

    def prune(self, known: Container[int], count: int) -> None:
        """Drops in bulk those of attempts that are gone: a far one would otherwise be kept for its whole time."""
        if len(self._due) > 4 * count + 64:
            self._due = [due for due in self._due if due.attempt_id in known]
            heapq.heapify(self._due)
