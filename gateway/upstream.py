"""The link to one tokenizer: one call with the events of all our streams, and the unary calls beside it.

The call is made again whenever it ends or falls silent; the tokenizer then replays, and what came before is compared.
One that was silent, does not answer again at once, or has a new epoch is lost to the streams that it had: they are
stranded, and strays.py looks for another one that goes on with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import TypeVar

import grpc
import grpc.aio

from gateway.core import CutReason, Stream, StreamTable
from gateway.releases import Releases, StreamEnd
from gateway.state import LinkEvent, LinkPhase, next_link_phase
from gateway.waker import Waker
from gateway.wire import ended_to_wire, rows_from_wire
from services.protocol import hello as greeting
from services.protocol.events import AbortOutcome
from services.protocol.hello import Hello, hello_of
from services.protocol.hop import Hop
from services.protocol.sender import SUSPECT_S
from services.protocol.wire import started_from_wire
from services.runtime.client import DEFAULT_UNARY_TIMEOUT_S, connect, open_stream
from services.runtime.clock import Clock
from services.runtime.errors import TailraceError, Unavailable, from_rpc_error
from services.runtime.log import get_logger
from services.runtime.metrics import GatewayMetrics
from tailrace.v1 import generation_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 1.0
FAREWELL_S = 1.0  # for the last Release of a closing gateway

# Statuses after which an Open or Attach may have taken effect all the same.
UNCERTAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)

Response = TypeVar("Response")

_log = get_logger("gateway")


class InDoubt(Exception):
    """A call failed with `error`, and may have taken effect all the same."""

    def __init__(self, error: TailraceError) -> None:
        super().__init__(error.message)
        self.error = error


class LinkLost(Exception):
    """The event call ended or can't be used; says why."""


class Silent(LinkLost):
    """Nothing came on the event call for too long."""


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
        metrics: GatewayMetrics,
        misfit: Callable[[Hello], str | None],
        on_change: Callable[[], None],
        on_cut: Callable[[Collection[Stream], CutReason, str], None],
    ) -> None:
        """`misfit` says why a hello doesn't fit the deployment; `on_change` is called when the phase has changed.

        `on_cut` is given streams of which no more will come from here, and why.
        """
        self.address = address
        self.phase = LinkPhase.DOWN
        self.why = "not connected yet"
        self.peer: Hello | None = None
        self.hop = Hop(clock, self.why)
        self.streams = StreamTable()
        self._epoch = epoch
        self._waker = waker
        self._repeated_tokens = metrics.duplicates_dropped_total
        self._integrity_errors = metrics.integrity_errors_total
        self._misfit = misfit
        self._on_change = on_change
        self._on_cut = on_cut
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done while its streams are cut
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

    async def open(
        self, stream_id: int, stream: Stream, request: tokenizer_pb2.OpenRequest, *, timeout_s: float
    ) -> None:
        """Opens a request whose events go to `stream`, which is kept until `release`.

        Raises the tokenizer's refusal. A caller that leaves meanwhile cancels the call and is released: whether the
        tokenizer had accepted or not, it forgets.
        """
        self.streams.add(stream_id, stream)
        try:
            response = await self._ask(self._tokenizer.Open(request, timeout=timeout_s))
        except InDoubt as doubt:
            self.release(stream_id, StreamEnd.CALLER_GONE)
            raise doubt.error from doubt
        except asyncio.CancelledError:
            self.release(stream_id, StreamEnd.CALLER_GONE)
            raise
        except TailraceError:
            self.streams.discard(stream_id)
            raise
        stream.accept(started_from_wire(response.started), response.epoch)

    async def attach(self, request: tokenizer_pb2.AttachRequest, *, timeout_s: float) -> tokenizer_pb2.AttachResponse:
        """Takes up an accepted request again. Raises the tokenizer's refusal, or InDoubt."""
        return await self._ask(self._tokenizer.Attach(request, timeout=timeout_s))

    def release(self, stream_id: int, end: StreamEnd) -> None:
        """The caller's side of a stream has ended, or is served elsewhere."""
        self.streams.discard(stream_id)
        self.releases.add(stream_id, end)

    async def abort(self, request: tokenizer_pb2.TokenizerServiceAbortRequest, *, timeout_s: float) -> AbortOutcome:
        """Stops a request by its id. Raises Unavailable when the link is lost."""
        try:
            return AbortOutcome((await self._ask(self._tokenizer.Abort(request, timeout=timeout_s))).outcome)
        except InDoubt as doubt:
            raise doubt.error from doubt

    async def _ask(self, call: Awaitable[Response]) -> Response:
        """A call's answer. Raises InDoubt when the link is lost before it: a process that hangs answers nothing."""
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait((answer, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise InDoubt(Unavailable(f"tokenizer {self.address}: {self.why}", reason="TOKENIZER_LOST"))
            return answer.result()
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            raise (InDoubt(refusal) if error.code() in UNCERTAIN else refusal) from error
        finally:
            answer.cancel()

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
            raise Silent(f"silent for {SUSPECT_S:g} s") from error

    async def _read(
        self, call: grpc.aio.UnaryStreamCall[tokenizer_pb2.StreamEventsRequest, tokenizer_pb2.StreamEventsResponse]
    ) -> tokenizer_pb2.StreamEventsResponse:
        async with asyncio.timeout(SUSPECT_S):
            response = await call.read()
        if not isinstance(response, tokenizer_pb2.StreamEventsResponse):
            raise LinkLost("it ended the event call")
        self.hop.heard(response.news_us)
        return response

    def _greet(self, response: tokenizer_pb2.StreamEventsResponse) -> None:
        if response.WhichOneof("payload") != "hello":
            raise LinkLost("its first message is no hello")
        peer = greeting.from_wire(response.hello)
        if why := self._misfit(peer):
            raise Misfit(why)
        self.peer = peer
        self._take_up(peer.epoch)
        if self._lost.done():
            self._lost = asyncio.get_running_loop().create_future()
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
            self._integrity_errors.inc()
            _log.error("integrity error", request_id=broken.stream.request_id, why=broken.why, address=self.address)
        for stream_id, stream, reason in applied.cuts:
            self.release(stream_id, StreamEnd.CALLER_GONE)
            self._on_cut([stream], reason, f"tokenizer {self.address} sends no more of it: {reason.name}")
        if applied.repeated_tokens:
            self._repeated_tokens.inc(applied.repeated_tokens)
        self._waker.mark(applied.touched)

    def _take_up(self, epoch: int) -> None:
        """The tokenizer is here again: what it had is served again, unless this is another incarnation."""
        older = [stream for stream in self.streams if stream.peer_epoch not in (0, epoch)]
        for stream in self.streams:
            if stream.stranded and stream.peer_epoch == epoch:
                stream.found(epoch)
        self._on_cut(older, CutReason.LEFT, "the tokenizer that had this request was restarted")

    def _lose(self, lost: LinkLost) -> None:
        answered = self.connected
        self._move(LinkEvent.MISFIT if isinstance(lost, Misfit) else LinkEvent.LOST, str(lost))
        if answered:
            _log.warning("tokenizer lost", address=self.address, why=str(lost), open_streams=len(self.streams))
        if isinstance(lost, Silent) or not answered:  # one that only ended the call may answer the next one at once
            if not self._lost.done():
                self._lost.set_result(None)
            why = f"tokenizer {self.address}, which has this request, can't be reached: {lost}"
            self._on_cut(list(self.streams), CutReason.LEFT, why)

    def _move(self, event: LinkEvent, why: str) -> None:
        self.phase, self.why = next_link_phase(self.phase, event), why
        if event is LinkEvent.HELLO:
            self.hop.opened()
        elif event in (LinkEvent.LOST, LinkEvent.MISFIT):
            self.hop.lost(why)
        self._on_change()
