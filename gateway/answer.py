"""A remote tokenizer's answer as one caller reads it: GenerationService's `Answer` over a stream of a link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from gateway.core import Stream
from services.protocol.call_span import CallSpan
from services.protocol.events import Completed, Delta, Finish, Started
from services.protocol.sender import Wakeup


class RemoteAnswer:
    """One caller's reading of one stream."""

    __slots__ = ("_on_close", "_wakeup", "evict", "span", "stream", "takes", "waiting", "writes")

    def __init__(
        self,
        stream: Stream,
        wakeup: Wakeup,
        on_close: Callable[[RemoteAnswer, bool], None],
        span: CallSpan | None = None,
    ) -> None:
        """`on_close` is told once how the caller's side ended: True when it had the terminal event."""
        self.stream = stream
        self.span = span
        self.takes = 0  # batches handed to the caller's writer
        self.writes = 0  # and what its transport took of them
        self.waiting = False  # the writer has written all it got and waits for more
        self.evict: Callable[[], object] | None = None  # ends a caller that takes nothing
        self._wakeup = wakeup
        self._on_close = on_close

    @property
    def request_id(self) -> str:
        """The caller's label or the one that was made; empty before it is known."""
        return self.stream.request_id

    @property
    def started(self) -> Started:
        """The first event, known since Open was answered."""
        assert self.stream.started is not None
        return self.stream.started

    @property
    def tokens(self) -> int:
        """Output tokens that were handed to the caller's writer."""
        taken = self.stream.cursor.offsets()
        return sum(at - log.token_base for (at, _), log in zip(taken, self.stream.log.choices, strict=True))

    def batches(self) -> AsyncIterator[Sequence[Delta | Finish | Completed]]:
        """What is new, merged since the last batch, until Completed. Raises Unavailable when the stream was cut."""
        return self._batches() if self.span is None else self.span.noting(self._batches())

    async def _batches(self) -> AsyncIterator[Sequence[Delta | Finish | Completed]]:
        stream = self.stream
        while not stream.cursor.done:
            # A writer that comes back from a write waits for its moment too, though there may be news: see waker.py.
            # But a cut wakes once and nothing comes after it: whoever was behind takes the rest, and then the reason.
            if stream.cut is None:
                self.waiting = True
                await self._wakeup.wait()
                self.waiting = False
            events = stream.take()
            if events:
                self.takes += 1
                yield events

    def close(self, *, delivered: bool) -> None:
        """The caller's side has ended."""
        self._on_close(self, delivered)
