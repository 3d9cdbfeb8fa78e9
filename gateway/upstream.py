"""The link to one tokenizer: one call with the events of all our streams, and the unary calls beside it.

The call is made again whenever it ends or falls silent; the tokenizer then replays, and what came before is compared.
Only a tokenizer with a new epoch, or one that stays away beyond the grace, costs the streams that it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import grpc
import grpc.aio

from gateway.core import Stream, StreamTable
from gateway.releases import Releases, StreamEnd
from gateway.state import LinkEvent, LinkPhase, next_link_phase
from gateway.waker import Waker
from gateway.wire import ended_to_wire, rows_from_wire
from services.protocol import hello as greeting
from services.protocol.hello import Hello, hello_of
from services.protocol.hop import Hop
from services.protocol.sender import SUSPECT_S
from services.protocol.wire import started_from_wire
from services.runtime.client import DEFAULT_UNARY_TIMEOUT_S, connect, open_stream
from services.runtime.clock import Clock
from services.runtime.errors import Unavailable, from_rpc_error
from services.runtime.log import get_logger
from tailrace.v1 import generation_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 1.0
FAREWELL_S = 1.0  # for the last Release of a closing gateway

# Statuses after which an Open may have taken effect all the same.
UNCERTAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)

_log = get_logger("gateway")


class LinkLost(Exception):
    """The event call ended or can't be used; says why."""


class Misfit(LinkLost):
    """The tokenizer answers and must not be used."""


class TokenizerLink:
    """One tokenizer, as the gateway sees it."""

    def __init__(
        self,
        address: str,
        *,
        epoch: int,
        clock: Clock,
        waker: Waker,
        grace_s: float,
        misfit: Callable[[Hello], str | None],
        on_change: Callable[[], None],
    ) -> None:
        """`misfit` says why a hello doesn't fit the deployment; `on_change` is called when the phase has changed."""
        self.address = address
        self.phase = LinkPhase.DOWN
        self.why = "not connected yet"
        self.peer: Hello | None = None
        self.hop = Hop(clock, self.why)
        self.streams = StreamTable()
        self._epoch = epoch
        self._clock = clock
        self._waker = waker
        self._grace_s = grace_s
        self._misfit = misfit
        self._on_change = on_change
        self._lost_at: float | None = None
        self._channel = connect(address)
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self.releases = Releases(self._send_releases)

    @property
    def ready(self) -> bool:
        """Whether new requests may go there."""
        return self.phase is LinkPhase.READY

    @property
    def connected(self) -> bool:
        """Whether its events come, new requests or not."""
        return self.phase in (LinkPhase.READY, LinkPhase.IDLE)

    async def run(self) -> None:
        """Keeps the event call open and sends releases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.releases.run(), name=f"releases to {self.address}")
            tasks.create_task(self._follow(), name=f"events from {self.address}")

    async def close(self) -> None:
        """Tells what is left to be told, and closes the channel."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self.releases.flush()
        await self._channel.close()

    async def open(self, stream: Stream, request: tokenizer_pb2.OpenRequest, *, timeout_s: float) -> None:
        """Opens a request whose events go to `stream`, which is kept until `release`.

        Raises the tokenizer's refusal. A caller that leaves meanwhile cancels the call and is released: whether the
        tokenizer had accepted or not, it forgets.
        """
        self.streams.add(stream)
        try:
            response = await self._tokenizer.Open(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self._drop(stream, tell=error.code() in UNCERTAIN)
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            self._drop(stream, tell=True)
            raise
        stream.accept(started_from_wire(response.started), response.epoch)

    def release(self, stream: Stream, end: StreamEnd) -> None:
        """The caller's side of the stream has ended."""
        self._drop(stream, tell=False)
        self.releases.add(stream.stream_id, end)

    async def abort(self, request: tokenizer_pb2.TokenizerServiceAbortRequest, *, timeout_s: float) -> int:
        """Stops a request by its id; the contract's AbortOutcome."""
        return (await self._tokenizer.Abort(request, timeout=timeout_s)).outcome

    def _drop(self, stream: Stream, *, tell: bool) -> None:
        stream.close()
        self.streams.discard(stream)
        if tell:
            self.releases.add(stream.stream_id, StreamEnd.CALLER_GONE)

    async def _send_releases(self, streams: Mapping[int, StreamEnd]) -> None:
        request = tokenizer_pb2.TokenizerServiceReleaseRequest(
            gateway_epoch=self._epoch, streams=ended_to_wire(streams)
        )
        await self._tokenizer.Release(request, timeout=DEFAULT_UNARY_TIMEOUT_S)

    async def _follow(self) -> None:
        pause_s = RECONNECT_S_MIN
        while True:
            try:
                await self._call()
            except LinkLost as lost:
                if self.connected:
                    pause_s = RECONNECT_S_MIN
                self._lose(lost)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    async def _call(self) -> None:
        """One event call, from its start until it is lost, which it always is. Raises LinkLost."""
        self._move(LinkEvent.CALLED, self.why)
        self.hop.called()
        request = tokenizer_pb2.StreamEventsRequest(gateway=greeting.to_wire(hello_of(self._epoch)))
        try:
            async with open_stream(lambda: self._tokenizer.StreamEvents(request)) as call:
                self._greet(await self._read(call))
                while True:
                    self._receive(await self._read(call))
        except grpc.aio.AioRpcError as error:
            raise LinkLost(error.details() or error.code().name) from error
        except TimeoutError as error:
            raise LinkLost(f"silent for {SUSPECT_S:g} s") from error

    async def _read(
        self, call: grpc.aio.UnaryStreamCall[tokenizer_pb2.StreamEventsRequest, tokenizer_pb2.StreamEventsResponse]
    ) -> tokenizer_pb2.StreamEventsResponse:
        async with asyncio.timeout(SUSPECT_S):
            response = await call.read()
        self.hop.heard()
        if not isinstance(response, tokenizer_pb2.StreamEventsResponse):
            raise LinkLost("it ended the event call")
        return response

    def _greet(self, response: tokenizer_pb2.StreamEventsResponse) -> None:
        if response.WhichOneof("payload") != "hello":
            raise LinkLost("its first message is no hello")
        peer = greeting.from_wire(response.hello)
        if why := self._misfit(peer):
            raise Misfit(why)
        self._forget_older(peer.epoch)
        self.peer, self._lost_at = peer, None
        self._move(LinkEvent.HELLO, "waiting for its readiness")
        _log.info("tokenizer connected", address=self.address, model=peer.model_id, version=peer.software_version)

    def _receive(self, response: tokenizer_pb2.StreamEventsResponse) -> None:
        if response.HasField("readiness"):
            readiness = response.readiness
            self._move(LinkEvent.ABLE if readiness.ready else LinkEvent.UNABLE, readiness.why_not)
        if not response.HasField("batch"):
            return
        try:
            applied = self.streams.apply(rows_from_wire(response.batch))
        except ValueError as error:
            raise LinkLost(f"a batch whose columns do not match: {error}") from error
        for broken in applied.broken:
            _log.error("integrity error", request_id=broken.stream.request_id, why=broken.why, address=self.address)
        self._waker.mark(applied.touched)

    def _forget_older(self, epoch: int) -> None:
        """The streams of an earlier incarnation are lost with it."""
        for stream in list(self.streams):
            if stream.peer_epoch not in (0, epoch):
                self._cut(stream, "the tokenizer that had this request was restarted")

    def _lose(self, lost: LinkLost) -> None:
        self._move(LinkEvent.MISFIT if isinstance(lost, Misfit) else LinkEvent.LOST, str(lost))
        now = self._clock.now()
        if self._lost_at is None:
            self._lost_at = now
            if self.peer is not None:  # while both start it isn't there yet, which is nobody's loss
                _log.warning("tokenizer lost", address=self.address, why=str(lost), open_streams=len(self.streams))
        if now - self._lost_at >= self._grace_s:
            for stream in list(self.streams):
                self._cut(stream, "the tokenizer that has this request can't be reached")

    def _cut(self, stream: Stream, why: str) -> None:
        self.streams.discard(stream)
        stream.cut_off(Unavailable(why, reason="STREAM_CUT"))
        self._waker.mark([stream])

    def _move(self, event: LinkEvent, why: str) -> None:
        self.phase, self.why = next_link_phase(self.phase, event), why
        if event is LinkEvent.HELLO:
            self.hop.opened()
        elif event in (LinkEvent.LOST, LinkEvent.MISFIT):
            self.hop.lost(why)
        self._on_change()
