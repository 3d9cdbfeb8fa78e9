"""Text to ids, with the model's own tokenizer.json."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tokenizers import Tokenizer

from services.runtime.errors import InvalidRequest, PreconditionFailed

LONG_TEXT_CHARS = 8000
"""A text from here on is encoded in a thread. A shorter one takes a few milliseconds at most."""


class Encoder:
    """Encodes prompts. `max_prompt_bytes` bounds a text, in UTF-8, before any work is done on it."""

    def __init__(self, directory: Path, *, max_prompt_bytes: int) -> None:
        path = directory / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception, for a missing file as for a broken one
            raise PreconditionFailed(f"{path} can't be read: {error}") from error
        # Its file may ask for either; a prompt is taken whole or refused.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_prompt_bytes = max_prompt_bytes

    async def encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """The text's ids. Raises InvalidRequest naming `field` when the text is too long or gives no id."""
        self.check_size(len(text) if text.isascii() else len(text.encode()), field)
        if len(text) < LONG_TEXT_CHARS:
            ids = self._encode(text, add_special_tokens)
        else:
            ids = await asyncio.to_thread(self._encode, text, add_special_tokens)
        if not ids:
            raise InvalidRequest(field, "gives no token")
        return ids

    def check_size(self, size_bytes: int, field: str) -> None:
        """Raises InvalidRequest naming `field` for what is too long to be encoded at all."""
        if size_bytes > self._max_prompt_bytes:
            raise InvalidRequest(field, f"must be at most {self._max_prompt_bytes} bytes, not {size_bytes}")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` holds the GIL for as long as it takes, `encode_batch` does not.
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        begins_twice = len(ids) > 1 and ids[0] == ids[1] and encoding.special_tokens_mask[0] == 1
        # A prompt that already begins with BOS gets no second one.
        return ids[1:] if begins_twice and add_special_tokens else ids
