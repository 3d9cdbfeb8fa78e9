"""The life of one StreamText call: tokens in, text out, until either side ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from services.detokenizer.batch import TextBatch
from services.detokenizer.core import Core
from services.detokenizer.packing import merged, split, weight
from services.detokenizer.spans import SequenceSpans
from services.detokenizer.state import ProtocolError
from services.detokenizer.upstream import TokenStream
from services.detokenizer.wire import TextMessage, draining, heartbeat, read_batch, write_batch
from services.protocol.events import StopText
from services.protocol.sender import MAX_BATCH_BYTES, Sender, Wakeup
from services.protocol.views import RouteKey
from services.runtime.errors import TailraceError, Unavailable
from services.runtime.metrics import DetokenizerMetrics
from services.text.vocabulary import Vocabulary

MAX_UNSENT_BATCHES = 64
"""Batches read and not yet written: beyond it the scheduler waits, whose logs merge what comes meanwhile."""


class Route:
    """One call; `on_fewer` is told when sequences may have ended.

    While its reader is slow, news is merged; beyond a bound the scheduler isn't read either.
    """

    def __init__(
        self,
        key: RouteKey,
        tokens: TokenStream,
        vocabulary: Vocabulary,
        metrics: DetokenizerMetrics,
        on_fewer: Callable[[], None],
        spans: SequenceSpans | None = None,
    ) -> None:
        self.core = Core(vocabulary)
        self.key = key
        self.tokens = tokens
        self._metrics = metrics
        self._on_fewer = on_fewer
        self._spans = spans
        self._sender: Sender[TextMessage] = Sender(self._take, heartbeat)
        self._cut: deque[TextBatch] = deque()
        self._unsent_batches = 0
        self._tell_draining = False
        self._room = Wakeup()
        self._ended: asyncio.Future[TailraceError] = asyncio.get_running_loop().create_future()

    def drain(self) -> None:
        """Asks the tokenizer to open its route elsewhere; this call goes on until then."""
        self._tell_draining = True
        self._sender.wake()

    def end(self, why: TailraceError) -> None:
        """Ends the call from inside this process."""
        if not self._ended.done():
            self._ended.set_result(why)

    async def run(self, write: Callable[[TextMessage], Awaitable[None]]) -> None:
        """Serves until something ends it, and raises that."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(), name="read tokens")
                tasks.create_task(self._send(write), name="send text")
                raise await self._ended
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _send(self, write: Callable[[TextMessage], Awaitable[None]]) -> None:
        async def write_stamped(message: TextMessage) -> None:
            message.news_us = self._sender.news_us
            await write(message)

        await self._sender.run(write_stamped)

    async def _read(self) -> None:
        while True:
            batch = await self.tokens.batch()
            try:
                read_batch(batch, self.core)
            except ProtocolError as error:
                why = f"scheduler {self.tokens.address} breaks the protocol: {error}"
                raise Unavailable(why, reason="PROTOCOL_BROKEN") from error
            self._unsent_batches += 1
            self._sender.wake()
            while self._unsent_batches > MAX_UNSENT_BATCHES:
                await self._room.wait()

    def _take(self) -> TextMessage | None:
        if self._tell_draining:
            self._tell_draining = False
            return draining()
        if not self._cut:
            self._cut.extend(self._pieces())
        return write_batch(self._cut.popleft()) if self._cut else None

    def _pieces(self) -> list[TextBatch]:
        several, self._unsent_batches = self._unsent_batches > 1, 0
        self._room.set()
        batch = self.core.take()
        if batch is None:
            return []
        self._count(batch)
        if self._spans is not None:
            self._spans.follow(batch)
        if weight(batch) > MAX_BATCH_BYTES:
            return list(split(batch, MAX_BATCH_BYTES))
        return [merged(batch) if several else batch]

    def _count(self, batch: TextBatch) -> None:
        self._metrics.output_tokens_total.inc(len(batch.token_ids))
        if self.core.wasted_tokens:
            self._metrics.wasted_tokens_total.inc(self.core.wasted_tokens)
            self.core.wasted_tokens = 0
        if batch.finishes:
            stops = sum(isinstance(finish.stop, StopText) for finish in batch.finishes)
            self._metrics.stop_matches_total.inc(stops)
        if batch.finishes or batch.released_attempt_ids:
            self._on_fewer()
