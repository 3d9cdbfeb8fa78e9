"""The one StreamTokens call of a route: its hello, then its batches, never silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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

RETRIED_WITHIN_S = 2.0
"""A tokenizer that lost a stream asks for it again by then: it pauses for a second at most."""

Call = grpc.aio.UnaryStreamCall[Any, scheduler_pb2.StreamTokensResponse]


class Schedulers:
    """Channels to the schedulers, one per address, opened when first asked for; and the streams of each."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._newest: dict[tuple[str, str], TokenStream] = {}

    def streams(self) -> Sequence[TokenStream]:
        """The newest one of each tokenizer from each scheduler: open, or lost so lately that it is about to be."""
        return [stream for stream in self._newest.values() if self._lives(stream)]

    @asynccontextmanager
    async def stream_tokens(
        self, address: str, route: scheduler_pb2.RouteKey, *, suspect_s: float = SUSPECT_S
    ) -> AsyncIterator[TokenStream]:
        """Opens a route's token stream; it is cancelled on the way out."""
        channel = self._channels.get(address) or self._channels.setdefault(address, connect(address))
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.StreamTokensRequest(route=route)
        key = address, route.tokenizer
        async with open_stream(lambda: stub.StreamTokens(request)) as call:
            tokens = TokenStream(address, route_from_wire(route), call, suspect_s, self._hop(key))
            self._newest[key] = tokens
            try:
                yield tokens
            finally:
                tokens.ended_at = self._clock.now()
                if tokens.hop.up and self._newest.get(key) is tokens:  # let go, not lost
                    del self._newest[key]

    def _hop(self, key: tuple[str, str]) -> Hop:
        """A hop that is made again and again, and never comes up, is down since the first time."""
        self._newest = {key: stream for key, stream in self._newest.items() if self._lives(stream)}
        before = self._newest.get(key)
        hop = Hop(self._clock, "its hello is awaited") if before is None or before.hop.up else before.hop
        hop.called()
        return hop

    def _lives(self, stream: TokenStream) -> bool:
        return stream.ended_at is None or self._clock.now() - stream.ended_at < RETRIED_WITHIN_S

    async def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels.values():
            await channel.close()


class TokenStream:
    """A token stream that has been asked for. Whatever goes wrong is said with the scheduler's address."""

    def __init__(self, address: str, route: RouteKey, call: Call, suspect_s: float, hop: Hop) -> None:
        self.address = address
        self.route = route
        self.hop = hop
        self.peer: Hello | None = None
        self.ended_at: float | None = None
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
            self.hop.lost("it ended the stream")
            raise Unavailable(f"scheduler {self.address} ended the stream")
        self.hop.heard(response.news_us)
        return response

    def _broken(self, how: str) -> TailraceError:
        return Unavailable(f"scheduler {self.address} breaks the protocol: {how}", reason="PROTOCOL_BROKEN")

    def _named(self, error: TailraceError) -> TailraceError:
        error.message = f"scheduler {self.address}: {error.message}"
        return error
