"""TokenizerService: what gateways ask, answered by the shell and the gateways' book."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc.aio

from services.protocol.answer import Offsets
from services.protocol.hello import Hello, to_wire
from services.protocol.wire import started_to_wire, trace_from_wire
from services.runtime.clock import Clock
from services.runtime.errors import InvalidRequest, answering
from services.tokenizer.columns import EventColumns
from services.tokenizer.entry import Entry
from services.tokenizer.gateway_streams import Gateway, Gateways, GatewayStream, Readiness
from services.tokenizer.shell import OpenPb, Shell
from services.tokenizer.wire import attached_to_wire, event_batch_to_wire, readiness_to_wire
from tailrace.v1 import tokenizer_pb2, tokenizer_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """TokenizerService over this process's requests."""

    def __init__(self, shell: Shell, gateways: Gateways, *, hello: Hello, clock: Clock) -> None:
        self._shell = shell
        self._gateways = gateways
        self._hello = hello
        self._clock = clock

    async def Open(self, request: tokenizer_pb2.OpenRequest, context: Context) -> tokenizer_pb2.OpenResponse:
        """Accepts a request on a new stream of the gateway."""
        async with answering(context, stream_id=request.stream_id):
            gateway = self._gateways.get(request.gateway_epoch)
            return await self._open(gateway, _request_of(request), request)

    async def Attach(self, request: tokenizer_pb2.AttachRequest, context: Context) -> tokenizer_pb2.AttachResponse:
        """Takes up a request again on a new stream of the gateway."""
        async with answering(context, stream_id=request.stream_id, request_id=request.resume.request_id):
            gateway = self._gateways.get(request.gateway_epoch)
            gateway.check_new(request.stream_id)

            def add_reader(entry: Entry, offsets: Offsets) -> None:
                gateway.check_new(request.stream_id)  # claiming took its time, and the caller may have left
                gateway.add(request.stream_id, entry, offsets)

            entry = await self._shell.resume(
                request.resume,
                tenant=request.tenant,
                add_reader=add_reader,
                only_here=request.only_here,
                trace=trace_from_wire(request.trace),
            )
            return attached_to_wire(self._hello.epoch, entry)

    async def Abort(
        self, request: tokenizer_pb2.TokenizerServiceAbortRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceAbortResponse:
        """Stops a tenant's request."""
        async with answering(context, request_id=request.request_id):
            outcome = await self._shell.abort(
                request.tenant,
                request.request_id,
                wait_until_released=request.wait_until_released,
                only_here=request.only_here,
            )
            return tokenizer_pb2.TokenizerServiceAbortResponse(outcome=outcome.value)  # type: ignore[arg-type]  # the contract's own number

    async def Release(
        self, request: tokenizer_pb2.TokenizerServiceReleaseRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceReleaseResponse:
        """Ends streams on the caller's side."""
        async with answering(context):
            for stream in request.streams:
                delivered = stream.end == tokenizer_pb2.STREAM_END_DELIVERED
                self._gateways.release(request.gateway_epoch, stream.stream_id, delivered=delivered)
            return tokenizer_pb2.TokenizerServiceReleaseResponse(epoch=self._hello.epoch)

    async def StreamEvents(  # type: ignore[override]  # grpc.aio also takes a method that writes
        self, request: tokenizer_pb2.StreamEventsRequest, context: Context
    ) -> None:
        """Serves one gateway until it leaves or a newer call of it takes over."""
        async with answering(context):
            epoch = request.gateway.epoch
            call = self._gateways.connect(epoch)

            async def write(message: EventColumns | Readiness) -> None:
                pb = readiness_to_wire(message) if isinstance(message, Readiness) else event_batch_to_wire(message)
                pb.news_us = call.sender.news_us
                await context.write(pb)

            try:
                await context.write(tokenizer_pb2.StreamEventsResponse(hello=to_wire(self._current_hello())))
                await call.sender.run(write)
            finally:
                self._gateways.disconnect(epoch, call, self._clock.now())

    async def _open(
        self, gateway: Gateway, pb: OpenPb, request: tokenizer_pb2.OpenRequest
    ) -> tokenizer_pb2.OpenResponse:
        def check() -> None:
            gateway.check_new(request.stream_id)

        check()
        added: list[GatewayStream] = []

        def add_reader(entry: Entry) -> GatewayStream:
            added.append(gateway.add(request.stream_id, entry))
            return added[0]

        try:
            entry = await self._shell.open(
                pb,
                tenant=request.tenant,
                deadline_s=request.deadline_in_ms / 1000 if request.deadline_in_ms else None,
                add_reader=add_reader,
                check=check,
                fresh_id=request.fresh_id,
                by_gateway=True,
                trace=trace_from_wire(request.trace),
            )
        except BaseException:
            for stream in added:
                gateway.remove(stream.stream_id)
            raise
        return tokenizer_pb2.OpenResponse(epoch=self._hello.epoch, started=started_to_wire(entry.started))

    def _current_hello(self) -> Hello:
        """Ours, with the context length that a request may use now."""
        return replace(self._hello, context_length=self._shell.context_length)


def _request_of(request: tokenizer_pb2.OpenRequest) -> OpenPb:
    match request.WhichOneof("request"):
        case "generate":
            return request.generate
        case "chat":
            return request.chat
        case _:
            raise InvalidRequest("request", "one of generate and chat is needed")
