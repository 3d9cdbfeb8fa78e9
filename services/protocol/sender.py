"""The loop that sends a batched stream: wait for news, take all of it in one message, write it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")

HEARTBEAT_S = 0.5
"""Silence after which a sender shows that it lives."""

SUSPECT_S = 2.0
"""Silence after which a receiver gives a hop up."""

MAX_BATCH_BYTES = 1 << 20
"""About how large one message may grow; more is sent in the next one."""


class Wakeup:
    """Lets one task wait for news with a bound, at the cost of a future and a timer."""

    __slots__ = ("_loop", "_news", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """There is news. Only from the loop's own thread."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True when there was or came news, which is then taken; False after the timeout."""
        if not self._news:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, _wake, self._waiter) if timeout_s is not None else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        news, self._news = self._news, False
        return news


class Sender(Generic[Message]):
    """One reader's side of a batched stream.

    `take` gives the next message with everything beyond the reader's cursors, or None when there is nothing;
    `heartbeat` makes an empty one. Whatever comes while a message is being written is merged into the next: flow
    control of the transport is the only brake, and only on this reader.

    `news_us` says since when the oldest news in the message that is being written has waited, for the receiver to know
    how far it is behind; 0 while that is not known. It costs a look at the clock per message.
    """

    __slots__ = ("_clock", "_heartbeat", "_heartbeat_s", "_news_at", "_take", "_wakeup", "news_us")

    def __init__(
        self, take: Callable[[], Message | None], heartbeat: Callable[[], Message], *, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._take = take
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._wakeup = Wakeup()
        self._clock = asyncio.get_running_loop().time
        self._news_at: float | None = None
        self.news_us = 0

    def wake(self) -> None:
        """There is something to take. Only from the loop's own thread."""
        if self._news_at is None:
            self._news_at = self._clock()
        self._wakeup.set()

    async def run(self, write: Callable[[Message], Awaitable[None]]) -> None:
        """Sends until cancelled, and is never silent for longer than the heartbeat."""
        clock = self._clock
        due = clock() + self._heartbeat_s
        while True:
            news_at, self._news_at = self._news_at, None
            message = self._take()
            if message is None:
                # News that gives no message, as of an answer that is wanted whole, is silence to the reader: only a
                # write puts the heartbeat off.
                left = due - clock()
                if left > 0 and await self._wakeup.wait(left):
                    continue
                message, news_at = self._heartbeat(), clock()
            if news_at is not None:  # otherwise it is the rest of what went before
                self.news_us = round(news_at * 1e6)
            await write(message)
            due = clock() + self._heartbeat_s


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
