"""Whether a server that says nothing is still there: it is asked, and one that leaves that unanswered is left.

Silence alone proves nothing: a full queue and a long prefill are silent. But a server that lives answers its health
check whatever its requests wait for, so one that does not, after a silence, stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

import grpc
import grpc.aio

SILENCE_S = 2.0
"""After so long without an event a stream's server is asked."""

ANSWER_S = 1.0
"""How long it may take to answer."""


class Cancellable(Protocol):
    """What is needed of a call."""

    def cancel(self) -> bool:
        """Ends the call if it has not ended."""
        ...


class Health:
    """One server's, asked by all streams from it with one question at a time."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes
        )
        self._asking: asyncio.Task[bool] | None = None

    async def answers(self) -> bool:
        """Whether it answers, in time and whatever it says."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="health check")
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bool:
        try:
            await self._check(b"", timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        return True


class Watch:
    """Cancels a call whose server stands still, and then is `lost`; told of every event. Idle without `health`.

    `hold` has the next server hold the request, and says whether it does: a server that wakes up and learns that its
    caller has left would stop a request that nobody else reads.
    """

    def __init__(self, call: Cancellable, health: Health | None, hold: Callable[[], Awaitable[bool]]) -> None:
        self.lost = False
        self._call = call
        self._health = health
        self._hold = hold
        self._time = asyncio.get_running_loop().time
        self._heard_at = self._time()
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._health is not None:
            self._watching = asyncio.create_task(self._run(self._health), name="liveness")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def heard(self) -> None:
        """Something came."""
        self._heard_at = self._time()

    async def _run(self, health: Health) -> None:
        while True:
            await asyncio.sleep(self._heard_at + SILENCE_S - self._time())
            asked_at = self._time()
            if asked_at < self._heard_at + SILENCE_S:
                continue
            if not await health.answers() and await self._hold() and self._heard_at < asked_at:
                self.lost = True
                self._call.cancel()
                return
            self._heard_at = max(self._heard_at, asked_at)
