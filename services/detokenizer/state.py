"""The life of a sequence in one call, as a table: one finish, then nothing but the engine's own end."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where a sequence stands. It is forgotten when its attempt is released, in whichever phase."""

    OPEN = auto()
    """Its text goes out as it comes."""
    FINISHED = auto()
    """Its finish is out; the engine may not know yet, and its further tokens are ignored."""
    ENDED = auto()
    """Its finish is out, and the engine has ended it."""


class Happening(Enum):
    """What can happen to a sequence."""

    TOKENS = auto()
    """The engine gave tokens."""
    CUT = auto()
    """A stop text, or a token that doesn't exist, ends it before the engine does."""
    END = auto()
    """The engine ended it."""


class ProtocolError(Exception):
    """The token stream breaks its own rules: it can't be trusted, and the call that carries it has to end."""


TRANSITIONS: dict[tuple[Phase, Happening], Phase] = {
    (Phase.OPEN, Happening.TOKENS): Phase.OPEN,
    (Phase.OPEN, Happening.CUT): Phase.FINISHED,
    (Phase.OPEN, Happening.END): Phase.ENDED,
    (Phase.FINISHED, Happening.TOKENS): Phase.FINISHED,
    (Phase.FINISHED, Happening.END): Phase.ENDED,
}


def after(phase: Phase, happening: Happening) -> Phase:
    """The next phase. Raises ProtocolError for what can't happen then."""
    try:
        return TRANSITIONS[phase, happening]
    except KeyError:
        raise ProtocolError(f"{happening.name} after {phase.name}") from None
