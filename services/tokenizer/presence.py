"""Whether a scheduler is there: what its tokenizer concludes when the route from it has ended.

A scheduler's event loop answers within milliseconds whatever its engine computes: a long prefill is never silent. So
one of which nothing was heard for SUSPECT_S, and that leaves a question put to it after that unanswered, stands still;
and one that refuses connections is gone. To be wrong costs a prefill at another scheduler and no byte: what the first
one still has is released once it is heard of again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from services.protocol.sender import SUSPECT_S
from services.runtime.clock import Clock
from services.tokenizer.attempts import Attempts
from services.tokenizer.effects import Effects

ANSWER_S = 1.0
"""How long a scheduler may take to say who it is."""

REFUSED_S = 0.1
"""How long a scheduler may refuse connections before its requests go on at another one: twice, or it was but a cut."""

REFUSED_ALONE_S = 1.0
"""The same where there is no other: then they wait for one to come back."""


class Presence:
    """One scheduler's. `ask(timeout_s)` is a call that it answers with its epoch, and raises AioRpcError."""

    def __init__(
        self,
        scheduler: str,
        *,
        ask: Callable[[float], Awaitable[int]],
        attempts: Attempts,
        perform: Callable[[Effects], None],
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._ask = ask
        self._attempts = attempts
        self._perform = perform
        self._clock = clock
        self._heard_at = clock.now()
        self._refused_since: float | None = None

    def heard(self) -> None:
        """Something came from it."""
        self._heard_at = self._clock.now()
        self._refused_since = None

    def stopping(self) -> None:
        """It said that its process ends."""
        self._perform(self._attempts.scheduler_lost(self._scheduler, self._clock.now()))

    async def look(self) -> None:
        """With the route down, asks the scheduler itself who it is: a new incarnation has nothing of the old one's.

        One that merely does not answer may have been stopped, with all that it knows: it is waited for unless there is
        another.
        """
        try:
            epoch = await self._ask(ANSWER_S)
        except grpc.aio.AioRpcError as error:
            self._perform(self._unreachable(error.code(), self._clock.now()))
        else:
            self.heard()
            self._perform(self._attempts.scheduler_seen(self._scheduler, epoch, self._clock.now()))

    def _unreachable(self, code: grpc.StatusCode, now: float) -> Effects:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and now >= self._heard_at + SUSPECT_S:
            return self._attempts.scheduler_silent(self._scheduler, now)
        if code is not grpc.StatusCode.UNAVAILABLE:
            return []
        self._refused_since = since = self._refused_since or now
        if now >= since + REFUSED_ALONE_S:
            return self._attempts.scheduler_lost(self._scheduler, now)
        if now >= since + REFUSED_S:
            return self._attempts.scheduler_silent(self._scheduler, now)
        return []
