"""A request's two lives as tables: its caller's side, and the engine's side of each attempt. An unknown pair raises.

caller   OPEN ──DELIVERED──▸ FINISHED          DETACHED ──EXPIRED──▸ GONE
           ├──LEFT─────────▸ GONE                 ▴ │
           ├──REFUSED──────▸ GONE           DETACH│ │ATTACH         (REFUSED there: it could not be claimed in time)
           └──────────────────────────────────────┴─┘ OPEN          from OPEN and DETACHED: TAKEN ──▸ GONE

engine   SUBMITTING ──ACCEPTED──▸ RUNNING ──ENDED──▸ ENDED ──RELEASE──▸ RELEASING ──RELEASED──▸ RELEASED
           ├──REFUSED──▸ RELEASED  └──────RELEASE──────────────────────────▴
           └──RELEASE──────────────────────────────────────────────────────┘   from everywhere: LOST ──▸ RELEASED
"""

from __future__ import annotations

from enum import Enum


class CallerPhase(Enum):
    """Where the caller's side of a request stands."""

    OPEN = "OPEN"
    """Somebody reads its answer, or will."""
    FINISHED = "FINISHED"
    """The terminal event was handed to the caller's transport; final."""
    DETACHED = "DETACHED"
    """The caller left and may come back."""
    GONE = "GONE"
    """The caller left for good, or was refused; final."""


class CallerEvent(Enum):
    """What can happen on the caller's side."""

    DELIVERED = "DELIVERED"
    LEFT = "LEFT"
    REFUSED = "REFUSED"
    DETACH = "DETACH"
    ATTACH = "ATTACH"
    EXPIRED = "EXPIRED"
    TAKEN = "TAKEN"
    """Its answer goes on at another tokenizer, or nowhere; here its readers are cut."""


class EnginePhase(Enum):
    """Where an attempt stands at its scheduler."""

    SUBMITTING = "SUBMITTING"
    """Submit, or Claim, is on its way; nothing proves that it arrived."""
    RUNNING = "RUNNING"
    """The scheduler has it."""
    ENDED = "ENDED"
    """Its KV blocks are free; its ids are still kept there."""
    RELEASING = "RELEASING"
    """It was told to forget it."""
    RELEASED = "RELEASED"
    """Nothing remembers it there; final."""


class EngineEvent(Enum):
    """What can happen to an attempt."""

    ACCEPTED = "ACCEPTED"
    """Submit was answered, or an event of it came."""
    REFUSED = "REFUSED"
    """Submit was refused: the scheduler keeps nothing."""
    ENDED = "ENDED"
    """The engine ended all its sequences."""
    RELEASE = "RELEASE"
    """We ask the scheduler to forget it."""
    RELEASED = "RELEASED"
    """Nothing of it can come any more."""
    LOST = "LOST"
    """The scheduler that had it is gone, with all that it knew."""


class UnexpectedEvent(RuntimeError):
    """An event that can't happen in this phase: a bug of ours."""


CALLER_TRANSITIONS: dict[tuple[CallerPhase, CallerEvent], CallerPhase] = {
    (CallerPhase.OPEN, CallerEvent.DELIVERED): CallerPhase.FINISHED,
    (CallerPhase.OPEN, CallerEvent.LEFT): CallerPhase.GONE,
    (CallerPhase.OPEN, CallerEvent.REFUSED): CallerPhase.GONE,
    (CallerPhase.OPEN, CallerEvent.DETACH): CallerPhase.DETACHED,
    (CallerPhase.DETACHED, CallerEvent.ATTACH): CallerPhase.OPEN,
    (CallerPhase.DETACHED, CallerEvent.EXPIRED): CallerPhase.GONE,
    (CallerPhase.DETACHED, CallerEvent.REFUSED): CallerPhase.GONE,
    (CallerPhase.OPEN, CallerEvent.TAKEN): CallerPhase.GONE,
    (CallerPhase.DETACHED, CallerEvent.TAKEN): CallerPhase.GONE,
}

ENGINE_TRANSITIONS: dict[tuple[EnginePhase, EngineEvent], EnginePhase] = {
    (EnginePhase.SUBMITTING, EngineEvent.ACCEPTED): EnginePhase.RUNNING,
    (EnginePhase.SUBMITTING, EngineEvent.REFUSED): EnginePhase.RELEASED,
    (EnginePhase.SUBMITTING, EngineEvent.RELEASE): EnginePhase.RELEASING,
    (EnginePhase.SUBMITTING, EngineEvent.LOST): EnginePhase.RELEASED,
    (EnginePhase.RUNNING, EngineEvent.ENDED): EnginePhase.ENDED,
    (EnginePhase.RUNNING, EngineEvent.RELEASE): EnginePhase.RELEASING,
    (EnginePhase.RUNNING, EngineEvent.LOST): EnginePhase.RELEASED,
    (EnginePhase.ENDED, EngineEvent.RELEASE): EnginePhase.RELEASING,
    (EnginePhase.ENDED, EngineEvent.LOST): EnginePhase.RELEASED,
    # The answer to a Submit that a Release has overtaken; whatever it says, the Release decides.
    (EnginePhase.RELEASING, EngineEvent.ACCEPTED): EnginePhase.RELEASING,
    (EnginePhase.RELEASING, EngineEvent.REFUSED): EnginePhase.RELEASED,
    (EnginePhase.RELEASING, EngineEvent.ENDED): EnginePhase.RELEASING,
    (EnginePhase.RELEASING, EngineEvent.RELEASED): EnginePhase.RELEASED,
    (EnginePhase.RELEASING, EngineEvent.LOST): EnginePhase.RELEASED,
    # Submit's answer and the first event each prove acceptance, in either order.
    (EnginePhase.RUNNING, EngineEvent.ACCEPTED): EnginePhase.RUNNING,
    (EnginePhase.ENDED, EngineEvent.ACCEPTED): EnginePhase.ENDED,
}

CALLER_FINAL = frozenset({CallerPhase.FINISHED, CallerPhase.GONE})


def after_caller(phase: CallerPhase, event: CallerEvent) -> CallerPhase:
    """The caller's next phase. Raises UnexpectedEvent for a pair that is not in the table."""
    try:
        return CALLER_TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedEvent(f"caller: {event.name} while {phase.name}") from None


def after_engine(phase: EnginePhase, event: EngineEvent) -> EnginePhase:
    """The attempt's next phase. Raises UnexpectedEvent for a pair that is not in the table."""
    try:
        return ENGINE_TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedEvent(f"engine: {event.name} while {phase.name}") from None
