"""One thing that is done to one process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is done."""

    KILL = "kill"
    STOP = "stop"


@dataclass(frozen=True)
class Fault:
    """One of them, with its moments: monotonic seconds of the blow, and of the whole system's readiness after it."""

    service: str
    member: int
    kind: Kind
    at: float
    healed_at: float
