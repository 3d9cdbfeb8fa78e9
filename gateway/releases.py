"""Tells a tokenizer which streams have ended on the caller's side: at once when it is idle, batched when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum

import grpc

from services.protocol.sender import Wakeup
from services.runtime.log import get_logger

RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0

_log = get_logger("gateway")


class StreamEnd(Enum):
    """How a stream ended on the caller's side."""

    DELIVERED = "delivered"
    CALLER_GONE = "caller gone"


Send = Callable[[Mapping[int, StreamEnd]], Awaitable[object]]


class Releases:
    """What one tokenizer is still to be told. Bounded by the streams that could be opened there."""

    __slots__ = ("_pending", "_send", "_sending", "_wakeup")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: dict[int, StreamEnd] = {}
        self._sending = asyncio.Lock()
        self._wakeup = Wakeup()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, stream_id: int, end: StreamEnd) -> None:
        """This stream has ended."""
        self._pending[stream_id] = end
        self._wakeup.set()

    async def run(self) -> None:
        """Sends until cancelled; what can't be sent is kept and sent again."""
        retry_s = RETRY_S_MIN
        while True:
            await self._wakeup.wait()
            while self._pending:
                if await self.flush():
                    retry_s = RETRY_S_MIN
                else:
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, RETRY_S_MAX)

    async def flush(self) -> bool:
        """Sends what there is in one call; False when the tokenizer could not be told."""
        async with self._sending:
            streams = self._pending
            if not streams:
                return True
            self._pending = {}
            try:
                await self._send(streams)
            except grpc.aio.AioRpcError as error:
                self._pending = streams | self._pending
                _log.debug("release failed", streams=len(streams), why=error.details() or error.code().name)
                return False
            except asyncio.CancelledError:
                self._pending = streams | self._pending
                raise
            return True
