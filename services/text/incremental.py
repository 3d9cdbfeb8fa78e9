"""Ids of one sequence in, text out: a character leaves when it is whole, and is never taken back.

The text of a sequence is the bytes of its shown tokens, joined and read as UTF-8; each maximal subpart of an ill-formed
sequence becomes one U+FFFD (The Unicode Standard, section 3.9, "U+FFFD Substitution of Maximal Subparts"). Reading is
incremental, so that neither the work per token nor the memory depends on what came before: at most three bytes wait.
"""

from __future__ import annotations

from codecs import utf_8_decode

from services.text.vocabulary import Vocabulary


class IncrementalDecoder:
    """The text of one sequence, token by token.

    `incomplete` are the bytes of a character that isn't whole yet. `hidden` is the text of the last token if it was a
    special one that isn't shown, otherwise empty. `settled` says that the next id, if the vocabulary has it as plain,
    gives exactly its plain text: `push` is but a look-up then, and a caller may do it.
    """

    __slots__ = (
        "_after_special",
        "_plain",
        "_skip",
        "_spaces",
        "_strip",
        "_vocabulary",
        "hidden",
        "incomplete",
        "settled",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
        begins_text: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._plain = vocabulary.plain
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._strip = begins_text and vocabulary.strips_first_space
        self._after_special = False
        self.incomplete = b""
        self.hidden = ""
        self.settled = not self._strip

    def contribution(self, token_id: int) -> bytes:
        """The bytes that the next token would add to the text. Raises UnknownTokenId."""
        piece = self._vocabulary.bytes_of(token_id)
        if token_id in self._vocabulary.special:
            if self._skip:
                return b""
            return b" " + piece if self._after_special else piece
        return piece[1:] if self._strip and piece.startswith(b" ") else piece

    def push(self, token_id: int) -> str:
        """The characters that this token completes. Raises UnknownTokenId, and then nothing has changed."""
        if self.settled:
            text = self._plain.get(token_id)
            if text is not None:
                return text
        special = token_id in self._vocabulary.special
        data = self.contribution(token_id)
        if special and self._skip:
            text, self.hidden = "", self._vocabulary.pieces[token_id].decode(errors="replace")
        else:
            text, self.hidden = self._append(data), ""
            self._after_special = special and self._spaces
            self._strip = self._strip and not self._vocabulary.pieces[token_id]
        self.settled = not (self.incomplete or self.hidden or self._after_special or self._strip)
        return text

    def finish(self) -> str:
        """The text of what is incomplete at the end: one U+FFFD, since it is the start of one character; or nothing."""
        incomplete, self.incomplete = self.incomplete, b""
        return "\ufffd" if incomplete else ""

    def _append(self, data: bytes) -> str:
        data = self.incomplete + data
        text, used = utf_8_decode(data, "replace", False)
        rest = data[used:]
        if _is_half_a_surrogate(rest):
            text, rest = text + "\ufffd\ufffd", b""
        self.incomplete = rest
        return text


def _is_half_a_surrogate(data: bytes) -> bool:
    """Two bytes that no character begins with, but that Python's decoder keeps for its `surrogatepass`."""
    return len(data) == 2 and data[0] == 0xED and data[1] >= 0xA0
