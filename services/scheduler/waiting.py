"""The sequences that wait for a place in the batch, in the order of their ranks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.sequence import Sequence


class Waiting:
    """Sorted at all times; most are added at the end and taken from the front."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """The first one first; they may be removed meanwhile."""
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        """It waits from now on: a new one, or one that was preempted."""
        insort(self._sequences, sequence, key=lambda each: each.rank)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        place = bisect_left(self._sequences, sequence.rank, key=lambda each: each.rank)
        assert self._sequences[place] is sequence
        del self._sequences[place]

    def check_integrity(self) -> None:
        """Raises AssertionError when one is out of order, or holds what only a running one may hold."""
        ranks = [sequence.rank for sequence in self._sequences]
        assert ranks == sorted(ranks), "the waiting ones are out of order"
        assert not any(sequence.blocks or sequence.path for sequence in self._sequences)
