"""Token-level output in OpenAI's two forms: a list of objects for chat, parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from services.protocol.events import TokenInfo, TopLogprob


def chat_logprobs(tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    """Chat's form; each token with its bytes, which need not be whole characters."""
    return {
        "content": [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


class CompletionLogprobs:
    """Completions' form, delta after delta: `text_offset` counts the choice's code points before each token.

    One below 0 is that of a token before the text's beginning, and is told as 0.
    """

    __slots__ = ("_decoder", "_offset")

    def __init__(self, text_offset: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = text_offset

    def more(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """The entries of the next tokens."""
        return {
            "tokens": [token_text(token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_alternatives(token) for token in tokens],
            "text_offset": [self._advance(token.bytes) for token in tokens],
        }

    def _advance(self, token_bytes: bytes) -> int:
        before = self._offset
        self._offset += len(self._decoder.decode(token_bytes))
        return max(before, 0)


def token_text(token_bytes: bytes) -> str:
    """A token's bytes as text; those that are no whole characters are written as \\xNN, as OpenAI does."""
    return token_bytes.decode("utf-8", "backslashreplace")


def _alternatives(token: TokenInfo) -> dict[str, float] | None:
    """None for a prompt's first token, which nothing stands before."""
    return None if token.logprob is None else {token_text(top.bytes): top.logprob for top in token.top}


def _entry(token: TokenInfo | TopLogprob) -> dict[str, Any]:
    return {"token": token_text(token.bytes), "logprob": token.logprob, "bytes": list(token.bytes)}
