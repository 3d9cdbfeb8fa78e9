"""The client's side of a call: as much of `grpc.aio.Channel` as our processes use, over the simulated network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import grpc
import grpc.aio

from services.runtime.client import DEFAULT_UNARY_TIMEOUT_S
from tests.simulation.loop import ProcessLoop
from tests.simulation.network import Network, Wire
from tests.simulation.shown import shown

Trailers = Sequence[tuple[str, str | bytes]]


class SimChannel:
    """A channel to `host:port`. A unary call without a timeout gets the one that our interceptor would give it."""

    def __init__(self, network: Network, loop: ProcessLoop, address: str) -> None:
        self.network = network
        self.loop = loop
        self.address = address
        self.calls: dict[ClientCall, None] = {}

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: object) -> Any:
        """A method that gives one answer."""

        def call(request: Any, *, timeout: float | None = None, **_: object) -> ClientCall:
            given = DEFAULT_UNARY_TIMEOUT_S if timeout is None else timeout
            return ClientCall(self, method, request_serializer, request, response_deserializer, given, streams=False)

        return call

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: object) -> Any:
        """A method that gives a stream."""

        def call(request: Any, *, timeout: float | None = None, **_: object) -> ClientCall:
            return ClientCall(self, method, request_serializer, request, response_deserializer, timeout, streams=True)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Cancels what is open."""
        for call in list(self.calls):
            call.cancel()


class ClientCall:
    """One call as its caller holds it: awaited, iterated or read."""

    def __init__(
        self,
        channel: SimChannel,
        method: str,
        serialize: Callable[[Any], bytes],
        request: Any,
        deserialize: Callable[[bytes], Any],
        timeout_s: float | None,
        *,
        streams: bool,
    ) -> None:
        self.method = method.rpartition("/")[2]
        self.answer_is_lost = False
        self.expires_at = None if timeout_s is None else channel.network.world.now + timeout_s
        self.request = serialize(request)
        self.path = method
        self._channel = channel
        self._loop = channel.loop
        self._world = channel.network.world
        self._deserialize = deserialize
        self._streams = streams
        self._inbox: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._status: tuple[grpc.StatusCode, str, Trailers] | None = None
        self._cancelled = False
        self._messages: AsyncIterator[Any] | None = None
        self._timer = None if timeout_s is None else self._loop.call_later(max(timeout_s, 0), self._expire)
        self._wire = Wire(channel.network, self._loop, channel.address.rpartition(":")[0], self)
        if self._world.tells:
            self._world.tell(self._loop.name, f"→ {self._wire.host} {self.method} {shown(request)}")
        channel.calls[self] = None
        channel.network.open(self._wire, channel.address, streams=streams)

    # -- what arrives

    def message(self, data: bytes) -> None:
        """A message of a stream, or the one answer."""
        if self._status is None:
            self._inbox.append(data)
            self._wake()

    def ended(self, code: grpc.StatusCode, details: str, trailers: Trailers) -> None:
        """The status, after the last message."""
        self._end(code, details, trailers)
        self._channel.network.forget(self._wire)

    def broken(self, why: str) -> None:
        """The connection is gone."""
        if self._status is None:
            self._end(grpc.StatusCode.UNAVAILABLE, why, ())

    # -- what its owner does

    def cancel(self) -> bool:
        """Gives the call up."""
        if self._status is not None:
            return False
        self._cancelled = True
        self._give_up(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def cancelled(self) -> bool:
        """Whether it was given up here."""
        return self._cancelled

    def done(self) -> bool:
        """Whether its status is known."""
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        """Its status, once it has one."""
        while self._status is None:
            await self._wait()
        return self._status[0]

    async def read(self) -> Any:
        """The next message, or EOF at a good end. Raises AioRpcError at a bad one."""
        while not self._inbox and self._status is None:
            await self._wait()
        if self._inbox:
            data = self._inbox.popleft()
            server = self._wire.server
            if server is not None and self._streams:
                server.was_read()
            return self._deserialize(data)
        self._raise_unless_ok()
        return grpc.aio.EOF

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._messages is None:
            self._messages = self._iterate()
        return self._messages

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _iterate(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def _answer(self) -> Any:
        while self._status is None:
            await self._wait()
        self._raise_unless_ok()
        return self._deserialize(self._inbox[0])

    async def _wait(self) -> None:
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        if self._status is None:
            self._world.count("unary call: timed out")
            self._give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _give_up(self, code: grpc.StatusCode, details: str) -> None:
        self._end(code, details, ())
        self._wire.to_server(lambda server: server.left())

    def _end(self, code: grpc.StatusCode, details: str, trailers: Trailers) -> None:
        if self._status is not None:
            return
        self._status = (code, details, trailers)
        self._channel.calls.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._world.tells and code is not grpc.StatusCode.OK:
            self._world.tell(self._loop.name, f"← {self._wire.host} {self.method}: {code.name} {details}")
        self._wake()

    def _raise_unless_ok(self) -> None:
        assert self._status is not None
        code, details, trailers = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)
