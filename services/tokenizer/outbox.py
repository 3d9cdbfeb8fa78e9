"""What a scheduler is still to be told of attempts: aborts and releases, sent soon, together, and until answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import grpc.aio

from services.protocol.sender import Wakeup
from services.runtime.clock import Clock
from services.runtime.log import get_logger
from services.tokenizer.attempts import Attempts
from services.tokenizer.backoff import Backoff
from services.tokenizer.effects import Effects

# The peer did not answer; whether it acted is not known.
UNANSWERED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

_log = get_logger("tokenizer")


@dataclass(frozen=True, slots=True)
class Told:
    """A scheduler's answer: its epoch, and which of the attempts belong to somebody else now."""

    epoch: int
    stale_ids: Collection[int]


Tell = Callable[[Sequence[int]], Awaitable[Told]]
"""One call about these attempts. Raises AioRpcError."""


class Outbox:
    """One scheduler's; what it answers goes to the ledger."""

    def __init__(
        self,
        scheduler: str,
        *,
        abort: Tell,
        release: Tell,
        attempts: Attempts,
        perform: Callable[[Effects], None],
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._abort = abort
        self._release = release
        self._attempts = attempts
        self._perform = perform
        self._clock = clock
        self._aborts: dict[int, None] = {}
        self._releases: dict[int, None] = {}
        self._wakeup = Wakeup()

    def __len__(self) -> int:
        return len(self._aborts) + len(self._releases)

    def abort(self, attempt_id: int) -> None:
        """Has the scheduler stop an attempt."""
        self._aborts[attempt_id] = None
        self._wakeup.set()

    def release(self, attempt_id: int) -> None:
        """Has the scheduler forget an attempt."""
        self._releases[attempt_id] = None
        self._wakeup.set()

    def drop(self, attempt_id: int) -> None:
        """Nothing has to be said about an attempt any more."""
        self._aborts.pop(attempt_id, None)
        self._releases.pop(attempt_id, None)

    async def run(self) -> None:
        """Sends whenever there is something, until cancelled."""
        while True:
            await self._wakeup.wait()
            await self._flush()

    async def close(self, timeout_s: float) -> None:
        """Sends what is left within the bound."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._flush()
        except TimeoutError:
            _log.warning("left without releasing", scheduler=self._scheduler, attempts=len(self._releases))

    async def _flush(self) -> None:
        """Sends all that waits, everything of a kind in one call, until it is answered."""
        backoff = Backoff(0.05, 1.0)
        while self._aborts or self._releases:
            try:
                await self._send_aborts()
                await self._send_releases()
            except grpc.aio.AioRpcError as error:
                if error.code() not in UNANSWERED:
                    _log.error("scheduler refused", scheduler=self._scheduler, why=error.details())
                await asyncio.sleep(backoff.next())

    async def _send_aborts(self) -> None:
        if not (ids := list(self._aborts)):
            return
        told = await self._abort(ids)
        for attempt_id in ids:
            self._aborts.pop(attempt_id, None)
        self._perform(self._attempts.stale(told.stale_ids, self._clock.now()))

    async def _send_releases(self) -> None:
        if not (ids := list(self._releases)):
            return
        told = await self._release(ids)
        for attempt_id in ids:
            self._releases.pop(attempt_id, None)
        now, stale = self._clock.now(), set(told.stale_ids)
        self._perform(self._attempts.stale(stale, now))
        gone = [attempt_id for attempt_id in ids if attempt_id not in stale]
        self._perform(self._attempts.release_answered(gone, told.epoch, now))
