"""The log of one request's answer, and the cursors of those who read it.

Whoever stands between the detokenizer and a caller keeps an `AnswerLog` per request: per choice an append-only log of
ids and text. A reader is an `AnswerCursor`; what it takes is everything beyond it, merged. So a slow reader, a resumed
one and a second one need nothing of their own. Memory is bounded by the output limit a request was admitted with.

A log may begin in the middle of an answer, where its only reader stood when it came back. Offsets count from the
answer's beginning all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.protocol.events import Completed, Delta, Finish, TokenInfo, Usage

Offsets = Mapping[int, tuple[int, int]]
"""Choice to (token_offset, text_offset); a choice that is missing stands at its beginning."""

NO_OFFSETS: Offsets = {}

_BEGINNING = (0, 0)


class IntegrityError(Exception):
    """Two accounts of the same output differ, or one has a hole: nothing more may be delivered."""


class ChoiceLog:
    """One choice's ids and text from `token_base` and `text_base` on, and its end; `text_length` counts from 0."""

    __slots__ = ("finish", "pieces", "text_base", "text_length", "token_base", "token_ids", "tokens")

    def __init__(self, token_base: int = 0, text_base: int = 0) -> None:
        self.token_base = token_base
        self.text_base = text_base
        self.token_ids: list[int] = []
        self.tokens: list[TokenInfo] = []
        self.pieces: list[str] = []
        self.text_length = text_base
        self.finish: Finish | None = None

    @property
    def token_length(self) -> int:
        """Number of the choice's ids, those before the log's beginning included."""
        return self.token_base + len(self.token_ids)

    def append(
        self, token_offset: int, token_ids: Sequence[int], text_offset: int, text: str, tokens: Sequence[TokenInfo] = ()
    ) -> bool:
        """Adds a delta that stands at these offsets; True when it brought something new.

        What is here already is compared and dropped. Raises IntegrityError when it differs, leaves a hole, or comes
        after the choice's end.
        """
        if token_offset - self.token_base != len(self.token_ids) or text_offset != self.text_length:
            token_ids, text, tokens = self._beyond(token_offset, token_ids, text_offset, text, tokens)
        if not token_ids and not text:
            return False
        if self.finish is not None:
            raise IntegrityError("output after the choice's end")
        self.token_ids += token_ids
        self.tokens += tokens
        if text:
            self.pieces.append(text)
            self.text_length += len(text)
        return True

    def text_from(self, text_offset: int) -> str:
        """The text beyond an offset in code points."""
        rest: list[str] = []
        start = self.text_length
        for piece in reversed(self.pieces):
            if start <= text_offset:
                break
            start -= len(piece)
            rest.append(piece)
        return "".join(reversed(rest))[max(text_offset - start, 0) :]

    def piece_at(self, text_offset: int) -> tuple[int, int]:
        """The piece in which a code point lies, and how many of the piece's come before it."""
        text_offset -= self.text_base
        for index, piece in enumerate(self.pieces):
            if text_offset < len(piece):
                return index, text_offset
            text_offset -= len(piece)
        return len(self.pieces), 0

    def check_offsets(self, token_offset: int, text_offset: int) -> None:
        """Raises ValueError for a reader that claims to have more than there is, or less than the log begins with."""
        if token_offset > self.token_length or text_offset > self.text_length:
            raise ValueError(f"token {token_offset}, code point {text_offset} is beyond what there is")
        if token_offset < self.token_base or text_offset < self.text_base:
            raise ValueError(f"token {token_offset}, code point {text_offset} is before what there is")

    def _beyond(
        self, token_offset: int, token_ids: Sequence[int], text_offset: int, text: str, tokens: Sequence[TokenInfo]
    ) -> tuple[Sequence[int], str, Sequence[TokenInfo]]:
        known_ids = self.token_length - token_offset
        known_text = self.text_length - text_offset
        if known_ids < 0 or known_text < 0:
            raise IntegrityError(f"a hole before token {token_offset}, code point {text_offset}")
        first = token_offset - self.token_base
        if first < 0 or text_offset < self.text_base:
            raise IntegrityError(f"token {token_offset}, code point {text_offset} is before what was asked for")
        if self.token_ids[first : first + len(token_ids)] != list(token_ids[:known_ids]):
            raise IntegrityError(f"other ids than before from token {token_offset} on")
        if known_text and not _agree(self.text_from(text_offset), text):
            raise IntegrityError(f"other text than before from code point {text_offset} on")
        return token_ids[known_ids:], text[known_text:], tokens[known_ids:]


class AnswerLog:
    """One request's answer: a log per choice, beginning at `offsets`, and its completion."""

    __slots__ = ("choices", "usage")

    def __init__(self, n: int, offsets: Offsets = NO_OFFSETS) -> None:
        self.choices = [ChoiceLog(*offsets.get(choice, _BEGINNING)) for choice in range(n)]
        self.usage: Usage | None = None

    def widen(self, n: int) -> None:
        """There are `n` choices at least: of a resumed answer it is not known from the start how many."""
        while len(self.choices) < n:
            self.choices.append(ChoiceLog())

    def finish(self, finish: Finish) -> bool:
        """Ends a choice; True when it had not ended. Raises IntegrityError when it had ended otherwise."""
        log = self.choices[finish.choice]
        if log.finish is None:
            log.finish = finish
            return True
        if log.finish != finish:
            raise IntegrityError(f"choice {finish.choice} ended as {log.finish} and as {finish}")
        return False

    @property
    def all_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(log.finish is not None for log in self.choices)

    def complete(self, usage: Usage) -> None:
        """Ends the request; all its choices must have ended."""
        assert self.all_finished
        assert self.usage is None
        self.usage = usage


class AnswerCursor:
    """Where one reader stands in an answer.

    With `whole`, a choice's delta is held until the choice has ended, so that it is one.
    """

    __slots__ = ("_choices", "_completed", "_log", "_whole")

    def __init__(self, log: AnswerLog, *, whole: bool = False, offsets: Offsets = NO_OFFSETS) -> None:
        """`offsets`: what the reader has, at least what the log begins with. Raises ValueError beyond the log."""
        self._log = log
        self._whole = whole
        self._completed = False
        self._choices = [
            _ChoiceCursor(choice, *offsets.get(index, (choice.token_base, choice.text_base)))
            for index, choice in enumerate(log.choices)
        ]

    @property
    def done(self) -> bool:
        """Whether the reader has taken the completion."""
        return self._completed

    def offsets(self) -> list[tuple[int, int]]:
        """Per choice: tokens and code points taken."""
        return [(cursor.token_offset, cursor.text_offset) for cursor in self._choices]

    def take(self) -> list[Delta | Finish | Completed]:
        """Everything beyond the cursor, merged, in the order a caller must see it; moves the cursor past it."""
        events: list[Delta | Finish | Completed] = []
        for choice, cursor in enumerate(self._choices):
            if not cursor.finished and not (self._whole and cursor.log.finish is None):
                events += cursor.take(choice)
        if self._log.usage is not None and not self._completed:
            self._completed = True
            events.append(Completed(self._log.usage))
        return events


class _ChoiceCursor:
    """Where one reader stands in one choice. `piece` is the next text piece; `skip` what it already has of that one."""

    __slots__ = ("finished", "log", "piece", "skip", "text_offset", "token_offset")

    def __init__(self, log: ChoiceLog, token_offset: int, text_offset: int) -> None:
        log.check_offsets(token_offset, text_offset)
        self.log = log
        self.finished = False
        self.token_offset = token_offset
        self.text_offset = text_offset
        self.piece, self.skip = log.piece_at(text_offset)

    def take(self, choice: int) -> Iterable[Delta | Finish]:
        log = self.log
        if self.token_offset < log.token_length or self.text_offset < log.text_length:
            yield self._delta(choice)
        if log.finish is not None:
            self.finished = True
            yield log.finish

    def _delta(self, choice: int) -> Delta:
        log = self.log
        start, self.token_offset = self.token_offset - log.token_base, log.token_length
        pieces, self.piece = log.pieces[self.piece :], len(log.pieces)
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        if self.skip:
            text, self.skip = text[self.skip :], 0
        self.text_offset = log.text_length
        return Delta(choice, text, log.token_ids[start:], self.token_offset, self.text_offset, log.tokens[start:])


def _agree(ours: str, theirs: str) -> bool:
    shorter = min(len(ours), len(theirs))
    return ours[:shorter] == theirs[:shorter]
