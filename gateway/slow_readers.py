"""Ends callers that take nothing while data waits for them: what they hold is theirs only while they read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gateway.answer import RemoteAnswer
from services.runtime.clock import Clock
from services.runtime.log import get_logger

CHECK_S = 1.0

_log = get_logger("gateway")


class SlowReaders:
    """Looks at every open answer once a second; the writers themselves spend nothing on it."""

    def __init__(self, answers: Iterable[RemoteAnswer], *, clock: Clock, timeout_s: float) -> None:
        self._answers = answers
        self._clock = clock
        self._timeout_s = timeout_s
        self._stuck: dict[RemoteAnswer, tuple[int, float]] = {}  # the batch it is stuck at, and since when

    def stuck_since(self, answer: RemoteAnswer) -> float | None:
        """Since when a caller has taken nothing of what waits for it, as far as was looked; None: it reads."""
        return self._stuck[answer][1] if answer in self._stuck and not answer.waiting else None

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_S, self._timeout_s / 4))
            self.check()

    def check(self) -> None:
        """Ends every answer whose writer has been at one batch for too long."""
        now = self._clock.now()
        before, self._stuck = self._stuck, {}
        for answer in self._answers:
            if answer.waiting:
                continue
            takes, since = before.get(answer, (answer.takes, now))
            if takes != answer.takes:
                takes, since = answer.takes, now
            if now - since >= self._timeout_s and answer.evict is not None:
                _log.warning("slow reader ended", request_id=answer.stream.request_id, waited_s=round(now - since, 1))
                answer.evict()
            else:
                self._stuck[answer] = takes, since
