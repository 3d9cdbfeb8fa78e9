"""An answer on its way: events as they come, checked against the stream's law."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Protocol, Self

import grpc.aio

from tailrace.client.errors import StreamCut
from tailrace.client.events import Answer, Choice, Completed, Delta, Event, Finish, Started, TokenInfo
from tailrace.client.law import StreamLaw
from tailrace.client.wire import read_error, read_event
from tailrace.v1 import generation_pb2


class Call(AsyncIterable[generation_pb2.GenerationEvent], Protocol):
    """What is needed of a gRPC call."""

    def cancel(self) -> bool:
        """Ends the call if it has not ended."""
        ...


class Stream:
    """One request's answer. Iterate it once; leaving the loop, or `async with`, cancels what is left.

    Raises a Refused or Unreachable when the request is not accepted, StreamCut when the rest can't be had.
    """

    def __init__(self, start: Callable[[], Call], n: int) -> None:
        self._start = start
        self._n = n
        self._call: Call | None = None
        self._cancelled = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stops the request, whoever reads it gets StreamCut. Harmless after the end."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def whole(self) -> Answer:
        """The joined answer."""
        return join([event async for event in self], self._n)

    async def text(self) -> str:
        """The text of the only (or first) choice."""
        return (await self.whole()).choices[0].text

    async def texts(self) -> list[str]:
        """The text of every choice."""
        return [choice.text for choice in (await self.whole()).choices]

    async def _events(self) -> AsyncIterator[Event]:
        if self._call is not None:
            raise RuntimeError("a stream can be read once")
        self._call = call = self._start()
        law = StreamLaw(self._n)
        try:
            async for pb in call:
                event = read_event(pb)
                if event is not None:
                    law.check(event)
                    yield event
        except grpc.aio.AioRpcError as error:
            cause = read_error(error)
            if law.started:
                raise StreamCut(f"the stream was cut: {cause}") from cause
            raise cause from error
        except asyncio.CancelledError:
            # gRPC raises the same for a cancelled call as asyncio does for a cancelled task.
            if self._cancelled and not _task_is_cancelled():
                raise StreamCut("the stream was cancelled by its reader") from None
            raise
        finally:
            call.cancel()
        law.check_end()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def join(events: Iterable[Event], n: int) -> Answer:
    """A whole stream's events as one answer; they must obey the law."""
    parts = [_Parts() for _ in range(n)]
    started, completed = None, None
    for event in events:
        match event:
            case Started():
                started = event
            case Delta(choice=choice):
                parts[choice].add(event)
            case Finish(choice=choice):
                parts[choice].finish = event
            case Completed():
                completed = event
    assert started is not None
    assert completed is not None
    return Answer(started, [part.choice() for part in parts], completed.usage)


class _Parts:
    """One choice's deltas, being joined."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.tokens: list[TokenInfo] = []
        self.finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.tokens += delta.tokens

    def choice(self) -> Choice:
        assert self.finish is not None
        return Choice("".join(self.texts), self.token_ids, self.tokens, self.finish)
