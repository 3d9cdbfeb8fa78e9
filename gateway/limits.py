"""How many requests may be open at once: in all, and per tenant. A refusal costs nothing and comes at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.runtime.errors import Overloaded, Unavailable

RETRY_AFTER_S = 1.0


class Limits:
    """The permits of open requests. A request holds one from before it is opened until its caller's side has ended."""

    def __init__(self, *, open_max: int, tenant_max: Callable[[str], int | None] = lambda _: None) -> None:
        """`tenant_max` tells a tenant's own limit; None: it has none."""
        self._open_max = open_max
        self._tenant_max = tenant_max
        self._total = 0
        self._open: Counter[str] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open(self) -> int:
        """Requests that hold a permit."""
        return self._total

    def acquire(self, tenant: str) -> None:
        """Takes a permit, to be given back with `release`. Raises Overloaded, or Unavailable while draining."""
        if self._draining:
            raise Unavailable("the gateway is draining and takes no new requests", reason="DRAINING")
        tenant_max = self._tenant_max(tenant)
        if tenant_max is not None and self._open[tenant] >= tenant_max:
            raise Overloaded(
                f"{tenant_max} requests of this key are open, its limit", RETRY_AFTER_S, reason="TENANT_FULL"
            )
        if self._total >= self._open_max:
            raise Overloaded(f"{self._open_max} requests are open, the limit", RETRY_AFTER_S, reason="GATEWAY_FULL")
        self._total += 1
        self._open[tenant] += 1
        self._idle.clear()

    def release(self, tenant: str) -> None:
        """Gives a permit back."""
        self._total -= 1
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
        if not self._total:
            self._idle.set()

    @contextmanager
    def held_unless_it_raises(self, tenant: str) -> Iterator[None]:
        """Takes a permit and gives it back only when the block raises."""
        self.acquire(tenant)
        try:
            yield
        except BaseException:
            self.release(tenant)
            raise

    def refuse_new(self) -> None:
        """From now on every new request is refused as draining."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()
