"""What is known of the schedulers: which incarnation stands behind each open route, and how busy it is."""

from __future__ import annotations

from collections.abc import Collection


class Schedulers:
    """The schedulers by address. One without an open route has no epoch; it and one that drains are not chosen."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._draining: set[str] = set()

    def epoch(self, scheduler: str) -> int:
        """The incarnation behind its route; 0 without one."""
        return self._epochs.get(scheduler, 0)

    def opened(self, scheduler: str, epoch: int) -> None:
        """Its route is open."""
        self._draining.discard(scheduler)
        self._epochs[scheduler] = epoch
        self._sequences.setdefault(scheduler, 0)

    def closed(self, scheduler: str) -> None:
        """Its route is not open any more."""
        self._epochs.pop(scheduler, None)

    def other_than(self, scheduler: str) -> bool:
        """Whether another one has an open route."""
        return any(open_one != scheduler for open_one in self._epochs)

    def loaded(self, scheduler: str, sequences: int, *, draining: bool = False) -> None:
        """It told how many sequences wait and run there, and whether it takes no more."""
        self._sequences[scheduler] = sequences
        if draining:
            self._draining.add(scheduler)
        else:
            self._draining.discard(scheduler)

    def sent(self, scheduler: str, sequences: int) -> None:
        """So many more are on their way to it, until it tells again."""
        self._sequences[scheduler] = self._sequences.get(scheduler, 0) + sequences

    def least_busy(self, *, tried: Collection[str] = ()) -> str | None:
        """Where the next attempt should go, other than where it was tried; None where there is nobody."""
        able = (one for one in self._epochs if one not in self._draining and one not in tried)
        return min(able, key=self._sequences.__getitem__, default=None)
