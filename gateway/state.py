"""The two lives that a gateway watches, as tables: a link to a tokenizer, and a caller's stream.

    link:    DOWN ──CALLED──▸ GREETING ──HELLO──▸ IDLE ⇄ READY          (ABLE, UNABLE)
                                 ├──LOST──▸ DOWN ◂──LOST──┴───┘
                                 └──MISFIT──▸ UNFIT ──CALLED──▸ GREETING

    stream:  OPENING ──ACCEPTED──▸ OPEN ──END──▸ ENDED ──CLOSE──▸ CLOSED
                │           STRAND│ ▴FOUND          ▴
                │                 ▾ │               │
                │              STRANDED ─────END────┤
                └──END──────────────────────────────┘   ⟲ ACCEPTED, FOUND (an answer may be complete before it is told)

             CLOSE too from OPEN and STRANDED: the caller left. One that is refused before it is OPEN is simply dropped.

An unknown pair raises.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType


class LinkPhase(Enum):
    """Where the link to one tokenizer stands."""

    DOWN = "down"  # no call, or one that went silent
    GREETING = "greeting"  # called, its hello is awaited
    IDLE = "idle"  # connected, and can't take new requests: it has no route to a scheduler
    READY = "ready"  # new requests may go there
    UNFIT = "unfit"  # it answers, and must not be used: another model or protocol


class LinkEvent(Enum):
    """What moves a link."""

    CALLED = "called"
    HELLO = "hello"
    ABLE = "able"
    UNABLE = "unable"
    MISFIT = "misfit"
    LOST = "lost"


class StreamPhase(Enum):
    """Where a caller's stream stands."""

    OPENING = "opening"  # Open or Attach is sent, its answer awaited; events may come already
    OPEN = "open"  # accepted
    STRANDED = "stranded"  # the tokenizer that had it is lost; another is sought to go on with
    ENDED = "ended"  # its last event is in the log, or it was cut
    CLOSED = "closed"  # the caller's side has ended; final


class StreamEvent(Enum):
    """What moves a stream."""

    ACCEPTED = "accepted"
    STRAND = "strand"
    FOUND = "found"
    END = "end"
    CLOSE = "close"


class UnexpectedEvent(RuntimeError):
    """An event that its phase does not know: a bug of ours."""


LINK_TRANSITIONS = MappingProxyType(
    {
        (LinkPhase.DOWN, LinkEvent.CALLED): LinkPhase.GREETING,
        (LinkPhase.GREETING, LinkEvent.HELLO): LinkPhase.IDLE,
        (LinkPhase.GREETING, LinkEvent.MISFIT): LinkPhase.UNFIT,
        (LinkPhase.GREETING, LinkEvent.LOST): LinkPhase.DOWN,
        (LinkPhase.IDLE, LinkEvent.ABLE): LinkPhase.READY,
        (LinkPhase.IDLE, LinkEvent.UNABLE): LinkPhase.IDLE,
        (LinkPhase.IDLE, LinkEvent.LOST): LinkPhase.DOWN,
        (LinkPhase.READY, LinkEvent.ABLE): LinkPhase.READY,
        (LinkPhase.READY, LinkEvent.UNABLE): LinkPhase.IDLE,
        (LinkPhase.READY, LinkEvent.LOST): LinkPhase.DOWN,
        (LinkPhase.UNFIT, LinkEvent.CALLED): LinkPhase.GREETING,
    }
)

STREAM_TRANSITIONS = MappingProxyType(
    {
        (StreamPhase.OPENING, StreamEvent.ACCEPTED): StreamPhase.OPEN,
        (StreamPhase.OPENING, StreamEvent.END): StreamPhase.ENDED,
        (StreamPhase.OPEN, StreamEvent.STRAND): StreamPhase.STRANDED,
        (StreamPhase.OPEN, StreamEvent.FOUND): StreamPhase.OPEN,
        (StreamPhase.OPEN, StreamEvent.END): StreamPhase.ENDED,
        (StreamPhase.OPEN, StreamEvent.CLOSE): StreamPhase.CLOSED,
        (StreamPhase.STRANDED, StreamEvent.FOUND): StreamPhase.OPEN,
        (StreamPhase.STRANDED, StreamEvent.END): StreamPhase.ENDED,
        (StreamPhase.STRANDED, StreamEvent.CLOSE): StreamPhase.CLOSED,
        (StreamPhase.ENDED, StreamEvent.ACCEPTED): StreamPhase.ENDED,
        (StreamPhase.ENDED, StreamEvent.FOUND): StreamPhase.ENDED,
        (StreamPhase.ENDED, StreamEvent.CLOSE): StreamPhase.CLOSED,
    }
)


def next_link_phase(phase: LinkPhase, event: LinkEvent) -> LinkPhase:
    """The link's phase after `event`; raises UnexpectedEvent for a pair that is not in the table."""
    try:
        return LINK_TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedEvent(f"link: {event.name} while {phase.name}") from None


def next_stream_phase(phase: StreamPhase, event: StreamEvent) -> StreamPhase:
    """The stream's phase after `event`; raises UnexpectedEvent for a pair that is not in the table."""
    try:
        return STREAM_TRANSITIONS[phase, event]
    except KeyError:
        raise UnexpectedEvent(f"stream: {event.name} while {phase.name}") from None
