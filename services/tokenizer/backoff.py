"""Pauses between attempts that double up to a bound."""

from __future__ import annotations


class Backoff:
    """Seconds to wait: the first pause, then twice the last one, up to the longest."""

    __slots__ = ("_first_s", "_longest_s", "_next_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next(self) -> float:
        """The next pause."""
        pause, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        return pause

    def reset(self) -> None:
        """It worked: the next pause is the first one again."""
        self._next_s = self._first_s
