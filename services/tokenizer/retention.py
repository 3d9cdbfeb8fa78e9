"""How long a request is kept that nobody reads: one that was detached, and a finished answer that is to stay readable.

Room for it is reserved when the request is opened, for its prompt, which stays with it, and the longest answer it may
have: nothing that was promised to be kept is ever thrown out for another.
"""

from __future__ import annotations

from services.protocol.request import OnDisconnect, ValidRequest
from services.runtime.error_tree import Overloaded
from services.tokenizer.entry import Entry

TOKEN_BYTES = 64
"""About what an output token takes in an answer's log: its id, its text and what Python puts around them."""

INFO_BYTES = 256
"""What token-level output adds per token, and per alternative."""

PROMPT_TOKEN_BYTES = 64
"""About what a token of its prompt takes: its id, and its text as it came and in the record left at schedulers."""


class Retention:
    """Room for requests that nobody reads. `detach_ttl_s` holds where a request names no time of its own."""

    def __init__(self, *, detach_ttl_s: float, max_count: int, max_bytes: int) -> None:
        self.closed = False
        self.reserved_bytes = 0
        self._detach_ttl_s = detach_ttl_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._reserved: dict[Entry, int] = {}

    def check(self, request: ValidRequest, max_tokens: int = 1, prompt_tokens: int = 0) -> None:
        """Raises Overloaded when there is no room for a request that is to be kept."""
        if not _to_be_kept(request):
            return
        if len(self._reserved) >= self._max_count:
            raise Overloaded(f"{self._max_count} answers are kept here, which is the limit", reason="RETENTION_FULL")
        if self.reserved_bytes + _most_bytes(request, max_tokens, prompt_tokens) > self._max_bytes:
            raise Overloaded(
                f"answers kept here may take {self._max_bytes} bytes, and this one would take more than is left",
                reason="RETENTION_FULL",
            )

    def reserve(self, entry: Entry) -> None:
        """Takes room for an entry, if it is to be kept."""
        request = entry.pinned.request
        if _to_be_kept(request):
            size = _most_bytes(request, request.stopping.max_tokens or 1, len(entry.pinned.prompt_ids))
            self._reserved[entry] = size
            self.reserved_bytes += size

    def free(self, entry: Entry) -> None:
        """The entry is forgotten."""
        self.reserved_bytes -= self._reserved.pop(entry, 0)

    def keeps_until(self, entry: Entry, now: float) -> float | None:
        """Until when an entry is kept whose last reader has just gone; None: it is not."""
        request = entry.pinned.request
        moments = []
        if request.on_disconnect is OnDisconnect.DETACH and entry.finished_at is None:
            moments.append(now + (request.detach_ttl_ms / 1000 or self._detach_ttl_s))
        if request.retain_ms and entry.completed_at is not None:
            moments.append(entry.completed_at + request.retain_ms / 1000)
        return max((moment for moment in moments if moment > now), default=None)

    def goes_on_until(self, entry: Entry, now: float) -> float | None:
        """Until when an entry is kept whose time as a detached one is over; None: no longer."""
        request = entry.pinned.request
        if entry.completed_at is None or entry.completed_at + request.retain_ms / 1000 <= now:
            return None
        return entry.completed_at + request.retain_ms / 1000


def _to_be_kept(request: ValidRequest) -> bool:
    return request.retain_ms > 0 or request.on_disconnect is OnDisconnect.DETACH


def _most_bytes(request: ValidRequest, max_tokens: int, prompt_tokens: int) -> int:
    infos = 1 + (request.logprobs or 0) if request.token_info else 0
    answer = request.n * max_tokens * (TOKEN_BYTES + infos * INFO_BYTES)
    prompt_infos = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
    return answer + prompt_tokens * (PROMPT_TOKEN_BYTES + prompt_infos * INFO_BYTES)
