"""What goes to a gateway in one message, as columns, and the cursors that fill them.

A cursor here is like protocol.answer's, but writes its row into columns instead of making a Delta: at a row per stream
and step, the objects would cost more than everything else in this process.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.protocol.answer import NO_OFFSETS, AnswerLog, ChoiceLog, Offsets
from services.protocol.events import Finish, TokenInfo, Usage
from services.protocol.sender import MAX_BATCH_BYTES
from services.tokenizer.entry import Cut

MAX_ROW_TOKENS = 2048
"""Most tokens in a row that carries token-level output, which may take half a kilobyte a token."""

_TOKEN_WEIGHT, _INFO_WEIGHT, _TOP_WEIGHT = 12, 32, 24  # bytes on the wire, about, on the heavy side


class EventColumns:
    """One message: row i is entry i of each column; finishes, completions and cuts stand beside them."""

    __slots__ = (
        "choices",
        "completions",
        "cuts",
        "finishes",
        "info_bytes",
        "row_tokens",
        "several_choices",
        "several_tokens",
        "stream_ids",
        "text_offsets",
        "texts",
        "token_counts",
        "token_ids",
        "token_offsets",
    )

    def __init__(self) -> None:
        self.stream_ids: list[int] = []
        self.choices: list[int] = []
        self.token_offsets: list[int] = []
        self.token_counts: list[int] = []
        self.token_ids: list[int] = []
        self.text_offsets: list[int] = []
        self.texts: list[str] = []
        self.row_tokens: list[tuple[int, Sequence[TokenInfo]]] = []
        self.finishes: list[tuple[int, Finish]] = []
        self.completions: list[tuple[int, Usage]] = []
        self.cuts: list[tuple[int, Cut]] = []
        self.several_choices = False
        self.several_tokens = False
        self.info_bytes = 0

    def __bool__(self) -> bool:
        return bool(self.stream_ids or self.finishes or self.completions or self.cuts)

    @property
    def weight_bytes(self) -> int:
        """About how large the message is."""
        return len(self.token_ids) * _TOKEN_WEIGHT + self.info_bytes

    @property
    def is_full(self) -> bool:
        """Whether the rest is for the next message."""
        return self.weight_bytes >= MAX_BATCH_BYTES

    def add_tokens(self, tokens: Sequence[TokenInfo]) -> None:
        """Token-level output of the row that is about to be added."""
        self.row_tokens.append((len(self.stream_ids), tokens))
        self.info_bytes += sum(_INFO_WEIGHT + _TOP_WEIGHT * len(token.top) for token in tokens)

    def add_token(
        self, stream_id: int, choice: int, token_offset: int, token_id: int, text_offset: int, text: str
    ) -> None:
        """A row of one token, which is what most are."""
        self.stream_ids.append(stream_id)
        self.choices.append(choice)
        self.token_offsets.append(token_offset)
        self.token_counts.append(1)
        self.token_ids.append(token_id)
        self.text_offsets.append(text_offset)
        self.texts.append(text)
        if choice:
            self.several_choices = True

    def add_row(
        self, stream_id: int, choice: int, token_offset: int, token_ids: Sequence[int], text_offset: int, text: str
    ) -> None:
        """A row of any number of tokens."""
        self.stream_ids.append(stream_id)
        self.choices.append(choice)
        self.token_offsets.append(token_offset)
        self.token_counts.append(len(token_ids))
        self.token_ids += token_ids
        self.text_offsets.append(text_offset)
        self.texts.append(text)
        if choice:
            self.several_choices = True
        if len(token_ids) != 1:
            self.several_tokens = True


class StreamCursor:
    """Where a gateway's stream stands in an answer. With `whole`, a choice is held until it has ended.

    `offsets`: as in AnswerCursor, the gateway's caller has that much already. Raises ValueError beyond the log.
    """

    __slots__ = ("_choices", "_completed", "_log", "_stream_id", "_whole")

    def __init__(self, log: AnswerLog, stream_id: int, *, whole: bool, offsets: Offsets = NO_OFFSETS) -> None:
        self._log = log
        self._stream_id = stream_id
        self._whole = whole
        self._completed = False
        self._choices = [_ChoiceCursor(log.choices[i], *offsets.get(i, (0, 0))) for i in range(len(log.choices))]

    def token_offset(self, choice: int) -> int:
        """Tokens of a choice that were sent."""
        return self._choices[choice].token_offset

    def take_into(self, columns: EventColumns) -> bool:
        """Puts what is beyond the cursor into the columns, and moves the cursor past it; whether they hold no more.

        Columns that are full at the beginning are not asked for, so it always gets on.
        """
        for choice, cursor in enumerate(self._choices):
            log = cursor.log
            if cursor.finished or (self._whole and log.finish is None):
                continue
            if choice and columns.is_full:
                return True
            if cursor.token_offset < len(log.token_ids) or cursor.text_offset < log.text_length:
                cursor.take_into(columns, self._stream_id, choice)
                if cursor.token_offset < len(log.token_ids):
                    return True
            if log.finish is not None:
                cursor.finished = True
                columns.finishes.append((self._stream_id, log.finish))
        if self._log.usage is not None and not self._completed:
            self._completed = True
            columns.completions.append((self._stream_id, self._log.usage))
        return False


class _ChoiceCursor:
    """Tokens, text pieces and code points taken of one choice."""

    __slots__ = ("finished", "log", "piece", "skip", "text_offset", "token_offset")

    def __init__(self, log: ChoiceLog, token_offset: int, text_offset: int) -> None:
        log.check_offsets(token_offset, text_offset)
        self.log = log
        self.finished = False
        self.token_offset = token_offset
        self.text_offset = text_offset
        self.piece, self.skip = log.piece_at(text_offset)

    def take_into(self, columns: EventColumns, stream_id: int, choice: int) -> None:
        log = self.log
        if log.tokens and not self._take_rows(columns, stream_id, choice):
            return
        start, text_start, piece = self.token_offset, self.text_offset, self.piece
        self.token_offset, self.text_offset, self.piece = len(log.token_ids), log.text_length, len(log.pieces)
        if self.token_offset == start + 1 and self.piece == piece + 1 and not log.tokens and not self.skip:
            columns.add_token(stream_id, choice, start, log.token_ids[start], text_start, log.pieces[piece])
            return
        text = "".join(log.pieces[piece:])[self.skip :]
        self.skip = 0
        if log.tokens:
            columns.add_tokens(log.tokens[start:])
        columns.add_row(stream_id, choice, start, log.token_ids[start:], text_start, text)

    def _take_rows(self, columns: EventColumns, stream_id: int, choice: int) -> bool:
        """All rows of token-level output but the last one, with which the text comes; whether that one has room too."""
        log = self.log
        while len(log.token_ids) - self.token_offset > MAX_ROW_TOKENS and not columns.is_full:
            start = self.token_offset
            end = self.token_offset = start + MAX_ROW_TOKENS
            columns.add_tokens(log.tokens[start:end])
            columns.add_row(stream_id, choice, start, log.token_ids[start:end], self.text_offset, "")
        return not columns.is_full
