"""Whether a scheduler is there: what its tokenizer concludes when the route from it has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from services.runtime.clock import Clock
from services.tokenizer.attempts import Attempts
from services.tokenizer.effects import Effects

REFUSED_S = 1.0
"""How long a scheduler may refuse connections before its requests go on without it."""

SILENT_S = 3.0
"""How long a scheduler may leave everything unanswered before its requests go on at another one."""


class Presence:
    """One scheduler's. `ask` is a call that it answers with its epoch, and raises AioRpcError."""

    def __init__(
        self,
        scheduler: str,
        *,
        ask: Callable[[], Awaitable[int]],
        attempts: Attempts,
        perform: Callable[[Effects], None],
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._ask = ask
        self._attempts = attempts
        self._perform = perform
        self._clock = clock
        self._unreachable_since: float | None = None

    def proved(self) -> None:
        """Its route is open."""
        self._unreachable_since = None

    def stopping(self) -> None:
        """It said that its process ends."""
        self._perform(self._attempts.scheduler_lost(self._scheduler, self._clock.now()))

    async def look(self) -> None:
        """With the route down, asks the scheduler itself who it is: a new incarnation has nothing of the old one's.

        One that refuses connections for a while is given up. One that merely does not answer may have been stopped,
        with all that it knows; it is waited for unless there is another.
        """
        try:
            epoch = await self._ask()
        except grpc.aio.AioRpcError as error:
            self._unreachable(error.code())
            return
        self._unreachable_since = None
        self._perform(self._attempts.scheduler_seen(self._scheduler, epoch, self._clock.now()))

    def _unreachable(self, code: grpc.StatusCode) -> None:
        now = self._clock.now()
        self._unreachable_since = since = self._unreachable_since or now
        if code is grpc.StatusCode.UNAVAILABLE and now >= since + REFUSED_S:
            self._perform(self._attempts.scheduler_lost(self._scheduler, now))
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED and now >= since + SILENT_S:
            self._perform(self._attempts.scheduler_silent(self._scheduler, now))
