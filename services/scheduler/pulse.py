"""Tells a step loop that stands still from one that has much to do."""

from __future__ import annotations

PATIENCE = 10.0
"""How many times its expected duration a step may take, beyond the fixed bound, before it counts as stalled."""


class Pulse:
    """When the running step began, how much it has to compute, and how long a token takes of late."""

    __slots__ = ("_seconds_per_token", "_started_at", "_tokens")

    def __init__(self) -> None:
        self._started_at: float | None = None
        self._tokens = 0
        self._seconds_per_token = 0.0

    @property
    def started_at(self) -> float | None:
        """When the running step began; None between steps."""
        return self._started_at

    def begin(self, tokens: int, now: float) -> None:
        """A step starts, over this many tokens."""
        self._started_at, self._tokens = now, tokens

    def end(self, now: float) -> None:
        """It is over."""
        if self._started_at is not None and self._tokens:
            latest = (now - self._started_at) / self._tokens
            # Steps differ widely: one slow one counts at once, fast ones win slowly.
            self._seconds_per_token = max(latest, 0.9 * self._seconds_per_token + 0.1 * latest)
        self._started_at = None

    def stalled(self, bound_s: float, now: float) -> bool:
        """Whether the running step takes longer than `bound_s` and all that its size explains."""
        if self._started_at is None:
            return False
        return now - self._started_at > bound_s + PATIENCE * self._tokens * self._seconds_per_token
