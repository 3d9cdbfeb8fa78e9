"""The lives of a sequence, an attempt and a lease, each as one table; an unknown pair raises.

WAITING ──ADMIT──▸ PREFILL ──FIRST_TOKEN──▸ DECODE
   ▴                  │                       │
   ╰──────PREEMPT─────┴───────────────────────╯            from each of the three: ──END──▸ ENDED

UNKNOWN ──SUBMIT──▸ ACCEPTED ──ALL_ENDED──▸ ENDED
   │ ▴                 │                      │
   │ FORGET            ╰──RELEASE──╮          │
   │ ╰────────────── RELEASED ◂────┴──RELEASE─╯            RELEASED is a tombstone
   ╰──ABORT, RELEASE────▴                                 CLAIM changes the owner, not the phase

ABSENT ──CALL_OPENED──▸ HELD ──LAST_CALL_CLOSED──▸ GRACE ──LAST_ATTEMPT_GONE──▸ ABSENT
   ╰───────────────ATTEMPT_ADDED───────────────────▴ ╰──CALL_OPENED──▸ HELD
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class SequencePhase(Enum):
    """Where a sequence stands. In PREFILL and DECODE it holds blocks and a place in the batch."""

    WAITING = "WAITING"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    ENDED = "ENDED"


class SequenceEvent(Enum):
    """What moves a sequence on."""

    ADMIT = "ADMIT"  # it gets a place in the batch and blocks for its prompt
    FIRST_TOKEN = "FIRST_TOKEN"  # the last of its prompt has been computed
    PREEMPT = "PREEMPT"  # its blocks are needed by an earlier one; it will be computed again
    END = "END"  # finished, aborted, past its deadline, or failed


class AttemptPhase(Enum):
    """Where an attempt stands. RELEASED is a tombstone: nothing is kept but the id, which refuses a late Submit."""

    UNKNOWN = "UNKNOWN"
    ACCEPTED = "ACCEPTED"
    ENDED = "ENDED"
    RELEASED = "RELEASED"


class AttemptEvent(Enum):
    """What moves an attempt on."""

    SUBMIT = "SUBMIT"
    ABORT = "ABORT"
    ALL_ENDED = "ALL_ENDED"  # its last sequence has ended
    RELEASE = "RELEASE"
    CLAIM = "CLAIM"  # another tokenizer takes its request over
    FORGET = "FORGET"  # a tombstone's time is over


class LeasePhase(Enum):
    """Whether an owner is known to live: by a call of its own, or not since a while."""

    ABSENT = "ABSENT"
    HELD = "HELD"
    GRACE = "GRACE"


class LeaseEvent(Enum):
    """What moves a lease on."""

    CALL_OPENED = "CALL_OPENED"
    LAST_CALL_CLOSED = "LAST_CALL_CLOSED"
    ATTEMPT_ADDED = "ATTEMPT_ADDED"  # by Submit or Claim
    LAST_ATTEMPT_GONE = "LAST_ATTEMPT_GONE"  # released or claimed away, or never there; while no call is open


class UnexpectedEvent(RuntimeError):
    """An event that its phase does not know: a bug of ours."""


SEQUENCE_TRANSITIONS: Mapping[tuple[SequencePhase, SequenceEvent], SequencePhase] = MappingProxyType(
    {
        (SequencePhase.WAITING, SequenceEvent.ADMIT): SequencePhase.PREFILL,
        (SequencePhase.WAITING, SequenceEvent.END): SequencePhase.ENDED,
        (SequencePhase.PREFILL, SequenceEvent.FIRST_TOKEN): SequencePhase.DECODE,
        (SequencePhase.PREFILL, SequenceEvent.PREEMPT): SequencePhase.WAITING,
        (SequencePhase.PREFILL, SequenceEvent.END): SequencePhase.ENDED,
        (SequencePhase.DECODE, SequenceEvent.PREEMPT): SequencePhase.WAITING,
        (SequencePhase.DECODE, SequenceEvent.END): SequencePhase.ENDED,
    }
)

ATTEMPT_TRANSITIONS: Mapping[tuple[AttemptPhase, AttemptEvent], AttemptPhase] = MappingProxyType(
    {
        (AttemptPhase.UNKNOWN, AttemptEvent.SUBMIT): AttemptPhase.ACCEPTED,
        (AttemptPhase.UNKNOWN, AttemptEvent.ABORT): AttemptPhase.RELEASED,
        (AttemptPhase.UNKNOWN, AttemptEvent.RELEASE): AttemptPhase.RELEASED,
        (AttemptPhase.ACCEPTED, AttemptEvent.SUBMIT): AttemptPhase.ACCEPTED,  # a retry: the same answer again
        (AttemptPhase.ACCEPTED, AttemptEvent.ABORT): AttemptPhase.ACCEPTED,  # ALL_ENDED follows
        (AttemptPhase.ACCEPTED, AttemptEvent.ALL_ENDED): AttemptPhase.ENDED,
        (AttemptPhase.ACCEPTED, AttemptEvent.CLAIM): AttemptPhase.ACCEPTED,
        (AttemptPhase.ACCEPTED, AttemptEvent.RELEASE): AttemptPhase.RELEASED,
        (AttemptPhase.ENDED, AttemptEvent.SUBMIT): AttemptPhase.ENDED,
        (AttemptPhase.ENDED, AttemptEvent.ABORT): AttemptPhase.ENDED,
        (AttemptPhase.ENDED, AttemptEvent.CLAIM): AttemptPhase.ENDED,
        (AttemptPhase.ENDED, AttemptEvent.RELEASE): AttemptPhase.RELEASED,
        (AttemptPhase.RELEASED, AttemptEvent.SUBMIT): AttemptPhase.RELEASED,  # refused
        (AttemptPhase.RELEASED, AttemptEvent.ABORT): AttemptPhase.RELEASED,
        (AttemptPhase.RELEASED, AttemptEvent.RELEASE): AttemptPhase.RELEASED,
        (AttemptPhase.RELEASED, AttemptEvent.ALL_ENDED): AttemptPhase.RELEASED,  # the last one left the running step
        (AttemptPhase.RELEASED, AttemptEvent.FORGET): AttemptPhase.UNKNOWN,
    }
)


LEASE_TRANSITIONS: Mapping[tuple[LeasePhase, LeaseEvent], LeasePhase] = MappingProxyType(
    {
        (LeasePhase.ABSENT, LeaseEvent.CALL_OPENED): LeasePhase.HELD,
        (LeasePhase.ABSENT, LeaseEvent.ATTEMPT_ADDED): LeasePhase.GRACE,
        (LeasePhase.HELD, LeaseEvent.CALL_OPENED): LeasePhase.HELD,
        (LeasePhase.HELD, LeaseEvent.ATTEMPT_ADDED): LeasePhase.HELD,
        (LeasePhase.HELD, LeaseEvent.LAST_CALL_CLOSED): LeasePhase.GRACE,
        (LeasePhase.GRACE, LeaseEvent.CALL_OPENED): LeasePhase.HELD,
        (LeasePhase.GRACE, LeaseEvent.ATTEMPT_ADDED): LeasePhase.GRACE,
        (LeasePhase.GRACE, LeaseEvent.LAST_ATTEMPT_GONE): LeasePhase.ABSENT,
    }
)


def next_sequence_phase(phase: SequencePhase, event: SequenceEvent) -> SequencePhase:
    """The phase after `event`; raises UnexpectedEvent for a pair that is not in the table."""
    try:
        return SEQUENCE_TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedEvent(f"{event.name} while a sequence is {phase.name}") from None


def next_attempt_phase(phase: AttemptPhase, event: AttemptEvent) -> AttemptPhase:
    """The phase after `event`; raises UnexpectedEvent for a pair that is not in the table."""
    try:
        return ATTEMPT_TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedEvent(f"{event.name} while an attempt is {phase.name}") from None


def next_lease_phase(phase: LeasePhase, event: LeaseEvent) -> LeasePhase:
    """The phase after `event`; raises UnexpectedEvent for a pair that is not in the table."""
    try:
        return LEASE_TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedEvent(f"{event.name} while a lease is {phase.name}") from None
