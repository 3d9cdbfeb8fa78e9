"""Text as JSON bytes that survive every client: line separators are escaped, for many split a stream by any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def json_text(text: str) -> bytes:
    """A string, quoted."""
    encoded = orjson.dumps(text)
    return encoded if text.isascii() else _escape_separators(encoded)


def json_object(value: Mapping[str, Any]) -> bytes:
    """An object."""
    return _escape_separators(orjson.dumps(value))


def _escape_separators(encoded: bytes) -> bytes:
    # U+2028, U+2029 and U+0085 in UTF-8, which is self-synchronising: these bytes are nothing else. The other
    # characters that `str.splitlines` knows are control characters, which JSON escapes anyway.
    if b"\xe2\x80\xa8" in encoded or b"\xe2\x80\xa9" in encoded:
        encoded = encoded.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return encoded.replace(b"\xc2\x85", b"\\u0085")
