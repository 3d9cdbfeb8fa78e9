"""Where time comes from: a real clock in production, a virtual one in simulations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Tells the time; whoever needs it is given one."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back. For deadlines and durations."""
        ...

    def unix_ms(self) -> int:
        """Milliseconds since 1970 UTC; may jump when the machine's clock is set. For people and other machines."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """Wall-clock milliseconds since 1970 UTC."""
        return time.time_ns() // 1_000_000


def wall_time(clock: Clock) -> Callable[[float], int]:
    """Turns moments of `clock.now()` into microseconds since 1970 UTC, as the clock stands now.

    Moments that are converted by one result keep their distances exactly.
    """
    origin_us = clock.unix_ms() * 1000 - round(clock.now() * 1_000_000)
    return lambda moment: origin_us + round(moment * 1_000_000)
