"""The one StreamTokens call of a route: its hello, then its batches, never silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc.aio

from services.protocol.hello import Hello, from_wire
from services.protocol.hop import Hop
from services.protocol.sender import SUSPECT_S
from services.protocol.views import RouteKey
from services.protocol.views_wire import route_from_wire
from services.runtime.client import connect, open_stream
from services.runtime.clock import Clock
from services.runtime.errors import TailraceError, Unavailable, from_rpc_error
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc

Call = grpc.aio.UnaryStreamCall[Any, scheduler_pb2.StreamTokensResponse]


class Schedulers:
    """Channels to the schedulers, one per address, opened when first asked for."""

    def __init__(self, clock: Clock) -> None:
        self.calls: dict[TokenStream, RouteKey] = {}
        self._clock = clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._hops: dict[tuple[str, str], Hop] = {}

    @asynccontextmanager
    async def stream_tokens(
        self, address: str, route: scheduler_pb2.RouteKey, *, suspect_s: float = SUSPECT_S
    ) -> AsyncIterator[TokenStream]:
        """Opens a route's token stream; it is cancelled on the way out."""
        channel = self._channels.get(address) or self._channels.setdefault(address, connect(address))
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.StreamTokensRequest(route=route)
        async with open_stream(lambda: stub.StreamTokens(request)) as call:
            with self._shown(address, route) as hop:
                tokens = TokenStream(address, call, suspect_s, hop)
                self.calls[tokens] = route_from_wire(route)
                try:
                    yield tokens
                finally:
                    del self.calls[tokens]

    @contextmanager
    def _shown(self, address: str, route: scheduler_pb2.RouteKey) -> Iterator[Hop]:
        """A hop that is made again and again, and never comes up, is down since the first time."""
        key = address, route.tokenizer
        hop = self._hops.setdefault(key, Hop(self._clock, "its hello is awaited"))
        hop.called()
        try:
            yield hop
        finally:
            if hop.up:
                # A tokenizer that was restarted may have called before its old call was seen to end: one hop for both.
                self._hops.pop(key, None)

    async def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels.values():
            await channel.close()


class TokenStream:
    """A token stream that has been asked for. Whatever goes wrong is said with the scheduler's address."""

    def __init__(self, address: str, call: Call, suspect_s: float, hop: Hop) -> None:
        self.address = address
        self.hop = hop
        self.peer: Hello | None = None
        self._call = call
        self._suspect_s = suspect_s

    async def hello(self) -> Hello:
        """The scheduler's first message. Raises its refusal, or Unavailable."""
        response = await self._next()
        if response.WhichOneof("payload") != "hello":
            raise self._broken("it began without a hello")
        self.peer = from_wire(response.hello)
        self.hop.opened()
        return self.peer

    async def batch(self) -> scheduler_pb2.TokenBatch:
        """The next batch, which may be empty. Raises what ended the stream; there is no good end."""
        response = await self._next()
        if response.WhichOneof("payload") != "batch":
            raise self._broken("a message that is no batch")
        return response.batch

    async def _next(self) -> scheduler_pb2.StreamTokensResponse:
        try:
            async with asyncio.timeout(self._suspect_s):
                response = await self._call.read()
        except TimeoutError:
            self.hop.lost(f"it has been silent for {self._suspect_s:g} s")
            raise Unavailable(f"scheduler {self.address} has been silent for {self._suspect_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            self.hop.lost(refusal.message)
            raise self._named(refusal) from error
        if not isinstance(response, scheduler_pb2.StreamTokensResponse):  # gRPC's mark of an end with status OK
            raise Unavailable(f"scheduler {self.address} ended the stream")
        self.hop.heard(response.news_us)
        return response

    def _broken(self, how: str) -> TailraceError:
        return Unavailable(f"scheduler {self.address} breaks the protocol: {how}", reason="PROTOCOL_BROKEN")

    def _named(self, error: TailraceError) -> TailraceError:
        error.message = f"scheduler {self.address}: {error.message}"
        return error
