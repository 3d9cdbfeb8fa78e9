"""An answer on its way: events as they come, checked against the stream's law, over as many connections as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio

from tailrace.client.errors import ClientError, StreamCut, Unreachable
from tailrace.client.events import Answer, Choice, Completed, Delta, Event, Finish, Started, TokenInfo
from tailrace.client.handle import Handle
from tailrace.client.law import StreamLaw
from tailrace.client.liveness import Watch
from tailrace.client.patience import Patience
from tailrace.client.servers import Servers
from tailrace.client.wire import read_error, read_event
from tailrace.v1 import generation_pb2


class Call(AsyncIterable[generation_pb2.GenerationEvent], Protocol):
    """What is needed of a gRPC call."""

    def cancel(self) -> bool:
        """Ends the call if it has not ended."""
        ...

    def read(self) -> Awaitable[object]:
        """The next event."""
        ...


HOLD_S = 5.0
"""How long another server may take until it holds a request."""

Start = Callable[[Any], Call]
"""Begins the stream on one server's stub."""


class Stream:
    """One request's answer. Iterate it once; leaving the loop, or `async with`, cancels what is left.

    A stream that is cut is taken up again where it stood, by itself. Raises a Refused or Unreachable when the request
    is not accepted, StreamCut when the rest can't be had.
    """

    def __init__(self, servers: Servers, start: Start, law: StreamLaw, *, resume_for_s: float) -> None:
        self._servers = servers
        self._start = start
        self._law = law
        self._resume_for_s = resume_for_s
        self._call: Call | None = None
        self._held: Call | None = None
        self._cancelled = asyncio.Event()
        self._asked = 0

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @property
    def handle(self) -> Handle | None:
        """What `Client.resume` needs to go on after the last event that was read; None before Started."""
        return self._law.handle

    def cancel(self) -> None:
        """Leaves the request, which stops it unless it was to be detached; whoever reads gets StreamCut.

        Harmless after the end.
        """
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def whole(self) -> Answer:
        """The joined answer; of a resumed stream, the rest of it."""
        return join([event async for event in self], len(self._law.offsets))

    async def text(self) -> str:
        """The text of the only (or first) choice."""
        return (await self.whole()).choices[0].text

    async def texts(self) -> list[str]:
        """The text of every choice."""
        return [choice.text for choice in (await self.whole()).choices]

    async def _events(self) -> AsyncIterator[Event]:
        if self._call is not None:
            raise RuntimeError("a stream can be read once")
        patience, start = Patience(self._resume_for_s), self._start
        try:
            while True:
                stub = self._servers.stub
                self._call = call = start(stub)
                try:
                    with self._watch(call, stub) as watch:
                        async for event in self._read(call, watch):
                            patience.restore()
                            yield event
                    self._law.check_end()
                    return
                except (StreamCut, Unreachable) as cut:
                    cause: ClientError = cut
                except grpc.aio.AioRpcError as error:
                    cause = read_error(error)
                finally:
                    call.cancel()
                if isinstance(cause, Unreachable | StreamCut):
                    self._servers.turn_from(stub)
                await self._until_next_try(cause, patience)
                if (handle := self._law.handle) is not None:
                    self._law.cut()
                    start = _resuming(handle, self._servers)
        finally:
            self._let_go()

    async def _read(self, call: Call, watch: Watch) -> AsyncIterator[Event]:
        """The events of one connection that are new to the reader."""
        try:
            async for pb in call:
                watch.heard()
                self._let_go()
                event = read_event(pb)
                if event is not None and self._law.check(event):
                    yield event
        except asyncio.CancelledError:
            # gRPC raises the same for a cancelled call as asyncio does for a cancelled task.
            if _task_is_cancelled():
                raise
            if self._cancelled.is_set():
                raise StreamCut("the stream was cancelled by its reader") from None
            if watch.lost:
                raise Unreachable("the server says nothing, and does not answer") from None
            raise

    def _watch(self, call: Call, stub: Any) -> Watch:
        health = self._servers.health_of(stub) if self._resume_for_s > 0 else None
        return Watch(call, health, partial(self._hold, self._servers.after(stub)))

    async def _hold(self, stub: Any) -> bool:
        """Has this server read the rest too, until another call does; whether the old one can be left."""
        handle = self._law.handle
        if handle is None:
            return True  # nobody has accepted it: it is asked anew
        if not handle.resume_token:
            return False
        self._let_go()
        self._held = held = _resuming(handle, self._servers)(stub)
        try:
            async with asyncio.timeout(HOLD_S):
                return isinstance(await held.read(), generation_pb2.GenerationEvent)
        except (grpc.aio.AioRpcError, TimeoutError):
            return False

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.cancel()
            self._held = None

    async def _until_next_try(self, cause: ClientError, patience: Patience) -> None:
        """Returns when it is time to go on, or to ask once more. Raises what ended it where that is of no use."""
        if self._cancelled.is_set():
            raise StreamCut("the stream was cancelled by its reader") from cause
        pause_s = self._pause_s(cause, patience)
        if pause_s is None:
            if not self._law.started or isinstance(cause, StreamCut):
                raise cause
            raise StreamCut(f"the stream was cut: {cause}") from cause
        try:
            async with asyncio.timeout(pause_s):
                await self._cancelled.wait()
        except TimeoutError:
            return
        raise StreamCut("the stream was cancelled by its reader")

    def _pause_s(self, cause: ClientError, patience: Patience) -> float | None:
        handle = self._law.handle
        if handle is not None:
            return patience.pause_s(cause) if handle.resume_token else None
        # Nothing was told yet, so it may be asked again: once at every server, for one of them may have died just then.
        self._asked += 1
        again = isinstance(cause, Unreachable) and self._asked < max(2, len(self._servers))
        return patience.pause_s(cause) if again else None


def _resuming(handle: Handle, servers: Servers) -> Start:
    return lambda stub: stub.Resume(handle.request(), metadata=servers.metadata)


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
