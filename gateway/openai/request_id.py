"""How an HTTP request is called in every service and log, and whether the name is its caller's own.

`Idempotency-Key` names a request by what it is to bring about: the same key with the same content is the same request,
however often it is sent. `X-Request-Id` labels it. With neither a name is made.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from services.runtime.errors import InvalidRequest

REQUEST_ID_HEADER = "X-Request-Id"
IDEMPOTENCY_HEADER = "Idempotency-Key"
KEY_CHARS_MAX = 255
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,120}")


@dataclass(frozen=True, slots=True)
class RequestName:
    """`named`: by its caller, who may send it again and mean the same answer."""

    request_id: str
    named: bool


def name_of(headers: Mapping[str, str]) -> RequestName:
    """What X-Request-Id says, if it can be used; otherwise a new name."""
    given = headers.get(REQUEST_ID_HEADER, "")
    if _VALID_ID.fullmatch(given):
        return RequestName(given, named=True)
    return RequestName(f"req-{secrets.token_hex(12)}", named=False)


def keyed_name_of(headers: Mapping[str, str]) -> RequestName | None:
    """What Idempotency-Key says; None without one. Raises InvalidRequest."""
    key = headers.get(IDEMPOTENCY_HEADER)
    if key is None:
        return None
    if not 1 <= len(key) <= KEY_CHARS_MAX:
        raise InvalidRequest(IDEMPOTENCY_HEADER, f"must have 1 to {KEY_CHARS_MAX} characters, not {len(key)}")
    name = key if _VALID_ID.fullmatch(key) else sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    # Apart from the names that are made and, as far as one may tell, from those that X-Request-Id gives.
    return RequestName(f"key-{name}", named=True)
