"""The life of a process as one table: STARTING → SERVING → DRAINING → STOPPED.

STARTING ──STARTED──▸ SERVING ──DRAIN──▸ DRAINING ──STOP──▸ STOPPED
    ├──────DRAIN───────────────────────────▴                   ▴
    └──────STOP──────────────┴─────────────────────────────────┘
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType


class Phase(Enum):
    """Where a process stands in its life."""

    STARTING = "starting"  # its ports are not open yet
    SERVING = "serving"  # takes new work when it is also ready
    DRAINING = "draining"  # refuses new work, finishes what is open
    STOPPED = "stopped"  # nothing runs any more; final


class PhaseEvent(Enum):
    """What moves a process on."""

    STARTED = "started"  # every port is open
    DRAIN = "drain"  # a signal or an operator asked for the end
    STOP = "stop"  # drained, past the bound, told twice, or crashed


class UnexpectedPhaseEvent(RuntimeError):
    """An event that its phase does not know: a bug of ours."""


TRANSITIONS = MappingProxyType(
    {
        (Phase.STARTING, PhaseEvent.STARTED): Phase.SERVING,
        (Phase.STARTING, PhaseEvent.DRAIN): Phase.DRAINING,
        (Phase.STARTING, PhaseEvent.STOP): Phase.STOPPED,
        (Phase.SERVING, PhaseEvent.DRAIN): Phase.DRAINING,
        (Phase.SERVING, PhaseEvent.STOP): Phase.STOPPED,
        (Phase.DRAINING, PhaseEvent.STOP): Phase.STOPPED,
    }
)


def next_phase(phase: Phase, event: PhaseEvent) -> Phase:
    """The phase after `event`; raises UnexpectedPhaseEvent for a pair that is not in the table."""
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedPhaseEvent(f"{event.name} while {phase.name}") from None
