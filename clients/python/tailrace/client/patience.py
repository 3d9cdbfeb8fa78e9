"""How long a cut stream is tried to be taken up again: at growing intervals, and not for ever."""

from __future__ import annotations

import asyncio
import random

from tailrace.client.errors import AlreadyExists, ClientError, InvalidRequest, NotFound, Overloaded, Refused

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 2.0

_LASTING = frozenset(
    {"PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE"}
)


class Patience:
    """`limit_s`: since the last event that brought something; 0: none at all."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._pause_s = PAUSE_S_MIN

    def restore(self) -> None:
        """Something came."""
        self._since, self._pause_s = None, PAUSE_S_MIN

    def pause_s(self, cause: ClientError) -> float | None:
        """How long to wait before the next try; None: it can't help, or has been tried long enough."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        if _lasts(cause) or now - self._since >= self._limit_s:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        if isinstance(cause, Overloaded):
            pause_s = max(pause_s, cause.retry_after_s)
        # So that a thousand readers of one dead server do not come back in one moment.
        return pause_s * random.uniform(0.5, 1.5)


def _lasts(cause: ClientError) -> bool:
    """Whether asking again would be answered the same."""
    if isinstance(cause, InvalidRequest | NotFound | AlreadyExists):
        return True
    return isinstance(cause, Refused) and cause.code in _LASTING
