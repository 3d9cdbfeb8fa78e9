"""When a service that died is started again, and when that is given up."""

from __future__ import annotations

from dataclasses import dataclass, field

BACKOFF_S_MIN = 0.25
BACKOFF_S_MAX = 5.0
STEADY_S = 30.0
DEATHS_MAX = 5


@dataclass
class RestartPolicy:
    """One service's deaths. A life of `STEADY_S` seconds clears the record; DEATHS_MAX deaths without one end it."""

    deaths: int = field(default=0, init=False)

    def after_death(self, lived_s: float, *, was_ready: bool) -> float | None:
        """Seconds until the next start, or None to give up.

        One that was never ready is not started again: a wrong flag or an unreadable model stays wrong.
        """
        if not was_ready and self.deaths == 0:
            return None
        self.deaths = 1 if lived_s >= STEADY_S else self.deaths + 1
        if self.deaths > DEATHS_MAX:
            return None
        return min(BACKOFF_S_MIN * 2.0 ** (self.deaths - 1), BACKOFF_S_MAX)
