"""Ends callers that take nothing while data waits for them: what they hold is theirs only while they read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from math import inf
from typing import Generic, Protocol, TypeVar

from services.runtime.clock import Clock
from services.runtime.error_tree import Unavailable
from services.runtime.log import Logger

CHECK_S = 1.0


class Evictable(Protocol):
    """An answer whose caller can be ended."""

    evict: Callable[[], object] | None
    """Ends a caller that takes nothing."""
    writes: int
    """What its caller's transport took of the latest batches, where a batch is several writes."""


class Written(Evictable, Hashable, Protocol):
    """An answer that is being written to its caller."""

    takes: int
    """Batches handed to the caller's writer."""
    waiting: bool
    """The writer has written all it got and waits for more."""

    @property
    def request_id(self) -> str:
        """Whose answer it is."""


A = TypeVar("A", bound=Written)


class SlowReaders(Generic[A]):
    """Looks at every open answer once a second; the writers themselves spend nothing on it."""

    def __init__(
        self,
        answers: Iterable[A],
        *,
        clock: Clock,
        timeout_s: float,
        log: Logger,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called for each caller that is ended."""
        self._answers = answers
        self._clock = clock
        self._timeout_s = timeout_s
        self._log = log
        self._on_end = on_end
        self._stuck: dict[A, tuple[tuple[int, int], float]] = {}  # the write it is stuck at, and since when

    def stuck_since(self, answer: A) -> float | None:
        """Since when a caller has taken nothing of what waits for it, as far as was looked; None: it reads."""
        at, since = self._stuck.get(answer, (None, 0.0))
        return since if at == _place(answer) and not answer.waiting else None

    def longest_s(self) -> float:
        """For how long the caller that stands still the longest has taken nothing; 0: all read."""
        stuck = (since for answer in list(self._stuck) if (since := self.stuck_since(answer)) is not None)
        return max(self._clock.now() - min(stuck, default=inf), 0.0)

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_S, self._timeout_s / 4))
            self.check()

    def check(self) -> None:
        """Ends every answer whose writer has been at one write for too long."""
        now = self._clock.now()
        before, self._stuck = self._stuck, {}
        for answer in self._answers:
            if answer.waiting:
                continue
            place = _place(answer)
            at, since = before.get(answer, (place, now))
            if at != place:
                since = now
            if now - since >= self._timeout_s and answer.evict is not None:
                self._log.warning("slow reader ended", request_id=answer.request_id, waited_s=round(now - since, 1))
                self._on_end()
                answer.evict()
            else:
                self._stuck[answer] = place, since


def _place(answer: Written) -> tuple[int, int]:
    return answer.takes, answer.writes


@asynccontextmanager
async def evictable(answer: Evictable) -> AsyncIterator[None]:
    """Around the writing of an answer: its `evict` ends that, and raises what the caller finds if it reads on."""
    writing, now = asyncio.timeout(None), asyncio.get_running_loop().time
    answer.evict = lambda: writing.reschedule(now())
    try:
        async with writing:
            yield
    except TimeoutError:
        if not writing.expired():
            raise
        raise Unavailable("the caller took nothing for too long while data waited", reason="SLOW_READER") from None
