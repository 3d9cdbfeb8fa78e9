"""The ids of a stream's events: each says all that is needed to go on after it, whichever gateway is asked.

    cNul-TOKEN~12.40~7.31e~u~z
    form, number of choices, flags (u: usage is wanted, l: log probabilities), the resume token in base64;
    per choice the tokens and code points that its reader has (e: and its finish); ~u: the usage; ~z: everything.

An id without choices is where a reader stands who has nothing yet. To a caller they are opaque.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from dataclasses import dataclass

from services.protocol.answer import Offsets
from services.protocol.request import MAX_CHOICES
from services.runtime.errors import InvalidRequest

LAST_EVENT_ID_HEADER = "Last-Event-ID"
LAST_EVENT_ID_PARAMETER = "last_event_id"
_ID = re.compile(r"([a-z])(\d{1,3})(u?)(l?)-([A-Za-z0-9_-]{1,128})((?:~\d{1,10}\.\d{1,10}e?)*)(~u)?(~z)?")
_AT = b"~%d.%d"


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    """What a reader has of one choice."""

    token_offset: int = 0
    text_offset: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a reader stands in a streamed answer, and how that answer is written.

    `form`: the letter of its endpoint. `opened`: it has what its choices begin with. `over`: it has everything.
    """

    form: str
    resume_token: bytes
    include_usage: bool
    logprobs: bool
    choices: tuple[ChoicePosition, ...]
    opened: bool = False
    usage_told: bool = False
    over: bool = False

    @property
    def offsets(self) -> Offsets:
        """As the contract counts them."""
        return {choice: (at.token_offset, at.text_offset) for choice, at in enumerate(self.choices)}


def read_event_id(text: str) -> Position:
    """The position that an id stands for. Raises InvalidRequest."""
    match = _ID.fullmatch(text)
    if match is None:
        raise _not_ours()
    form, count, usage, logprobs, token, choices, usage_told, over = match.groups()
    n = int(count)
    read = tuple(_choice(part) for part in choices.split("~")[1:])
    if not 1 <= n <= MAX_CHOICES or (read and len(read) != n):
        raise _not_ours()
    return Position(
        form=form,
        resume_token=_token(token),
        include_usage=bool(usage),
        logprobs=bool(logprobs),
        choices=read or (ChoicePosition(),) * n,
        opened=bool(read),
        usage_told=bool(usage_told),
        over=bool(over),
    )


class EventIds:
    """Writes the `id` lines of one answer's events, from where its reader stands."""

    __slots__ = ("_choices", "_head", "_lately", "_line", "_position")

    def __init__(self, position: Position) -> None:
        flags = "u" * position.include_usage + "l" * position.logprobs
        token = urlsafe_b64encode(position.resume_token).decode().rstrip("=")
        self._position = position
        self._head = f"id: {position.form}{len(position.choices)}{flags}-{token}".encode()
        self._choices = [_text(at.token_offset, at.text_offset) + b"e" * at.ended for at in position.choices]
        # Of a single choice, which nearly all answers have, a line is written in one go and remembered as numbers.
        self._line = self._head + _AT + b"\n" if len(self._choices) == 1 else None
        self._lately: tuple[int, int] | None = None

    @property
    def first(self) -> str:
        """The id of a reader who has nothing beyond the position that the ids began with."""
        opened = b"".join(self._choices) if self._position.opened else b""
        return (self._head + opened).decode().removeprefix("id: ")

    def here(self) -> bytes:
        """The reader has what it had, and what every choice begins with."""
        if self._lately is not None:
            self._choices[0], self._lately = _text(*self._lately), None
        return self._head + b"".join(self._choices) + b"\n"

    def moved(self, choice: int, token_offset: int, text_offset: int) -> bytes:
        """It has a choice up to these offsets. Once per delta, so it is cheap."""
        if self._line is not None:
            self._lately = at = token_offset, text_offset
            return self._line % at
        self._choices[choice] = _text(token_offset, text_offset)
        return self.here()

    def ended(self, choice: int) -> bytes:
        """It has the choice's finish."""
        self.here()
        self._choices[choice] += b"e"
        return self.here()

    def usage_told(self) -> bytes:
        """It has the usage."""
        return self.here()[:-1] + b"~u\n"

    def over(self) -> bytes:
        """It has everything."""
        return self.here()[:-1] + b"~z\n"


def _text(token_offset: int, text_offset: int) -> bytes:
    return _AT % (token_offset, text_offset)


def _choice(text: str) -> ChoicePosition:
    tokens, _, code_points = text.removesuffix("e").partition(".")
    offsets = int(tokens), int(code_points)
    if max(offsets) >= 1 << 32:
        raise _not_ours()
    return ChoicePosition(*offsets, ended=text.endswith("e"))


def _token(text: str) -> bytes:
    try:
        return urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (NotBase64, ValueError):
        raise _not_ours() from None


def _not_ours() -> InvalidRequest:
    return InvalidRequest(LAST_EVENT_ID_HEADER, "is no id of an event of this API")
