"""Streams whose tokenizer is lost: each is attached through another one, or cut when none takes it in time.

Their callers notice a pause and nothing else. A tokenizer that dies may leave a thousand of them, so only so many ask
at once; who was stranded first asks first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from gateway.attaching import Attaching
from gateway.core import CutReason, Stream
from gateway.router import Router
from gateway.waker import Waker
from services.runtime.errors import InvalidRequest, NotFound, TailraceError, Unavailable
from services.runtime.log import get_logger
from services.runtime.metrics import GatewayMetrics

ATTACHES_AT_ONCE = 32
RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0

_log = get_logger("gateway")


class Strays:
    """Seeks a tokenizer for each stranded stream, for `grace_s` seconds."""

    def __init__(
        self, attaching: Attaching, router: Router, *, waker: Waker, grace_s: float, metrics: GatewayMetrics
    ) -> None:
        self._attaching = attaching
        self._router = router
        self._waker = waker
        self._grace_s = grace_s
        self._waiting = metrics.open_stranded_streams
        self._found = metrics.stranded_total.labels("found")
        self._cut = metrics.stranded_total.labels("cut")
        self._left = metrics.stranded_total.labels("left")
        self._permits = asyncio.Semaphore(ATTACHES_AT_ONCE)
        self._searches: dict[Stream, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Owns the searches until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    def take(self, streams: Collection[Stream], reason: CutReason, why: str) -> None:
        """No more of these comes from where they were served."""
        for stream in streams:
            if reason is CutReason.LOST:
                self._end(stream, why)
            elif stream.strand() and stream not in self._searches:
                assert self._tasks is not None, "a stream was stranded before run()"
                self._waiting.inc()
                self._searches[stream] = self._tasks.create_task(self._search(stream, why))

    def forget(self, stream: Stream) -> None:
        """The stream's caller has left."""
        if (search := self._searches.get(stream)) is not None:
            search.cancel()

    async def _search(self, stream: Stream, why: str) -> None:
        outcome = self._left
        try:
            try:
                async with asyncio.timeout(self._grace_s):
                    await self._until_found(stream)
                outcome = self._found
            except TimeoutError:
                outcome = self._cut
                self._end(stream, why)
            except (NotFound, InvalidRequest) as error:
                outcome = self._cut
                self._end(stream, f"{why}; it can't be rebuilt: {error.message}")
        finally:
            outcome.inc()
            self._waiting.dec()
            del self._searches[stream]

    async def _until_found(self, stream: Stream) -> None:
        """Returns once a tokenizer serves it: its own, which is back, or another. Raises what leaves no hope."""
        pause_s = RETRY_S_MIN
        while stream.stranded:
            await self._router.wait_ready()
            async with self._permits:
                if await self._attached(stream):
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _attached(self, stream: Stream) -> bool:
        if not stream.stranded:
            return True
        assert stream.started is not None
        try:
            await self._attaching.attach(stream, stream.started.resume_token, stream.offsets())
        except (NotFound, InvalidRequest):
            raise
        except TailraceError as error:
            _log.info("stranded stream not attached yet", request_id=stream.request_id, why=error.message)
            return False
        _log.info("stranded stream attached", request_id=stream.request_id)
        return True

    def _end(self, stream: Stream, why: str) -> None:
        _log.warning("stream cut", request_id=stream.request_id, why=why)
        stream.cut_off(Unavailable(why, reason="STREAM_CUT"))
        self._waker.mark([stream])
