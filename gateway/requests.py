"""The gateway's `Requests`: GenerationService and the HTTP API over remote tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from gateway.answer import RemoteAnswer
from gateway.attaching import Attaching
from gateway.core import Stream
from gateway.limits import Limits
from gateway.places import Place, Places
from gateway.releases import StreamEnd
from gateway.router import Router
from gateway.strays import Strays
from gateway.upstream import TokenizerLink
from services.protocol.call_span import CallPb, CallSpan
from services.protocol.events import AbortOutcome
from services.protocol.generation import OpenPb
from services.protocol.parse import parse_offsets
from services.protocol.request import MAX_CHOICES
from services.protocol.sender import Wakeup
from services.protocol.wire import trace_to_wire
from services.runtime.clock import Clock
from services.runtime.errors import DeadlineExceeded, InvalidRequest, TailraceError, Unavailable
from services.runtime.metrics import GatewayMetrics
from services.runtime.trace import TraceContext, Tracer
from tailrace.v1 import generation_pb2, tokenizer_pb2

OPEN_TIMEOUT_S = 30.0
"""Longest wait for an acceptance or a refusal: encoding a long prompt, and the scheduler's own answer."""
UNARY_TIMEOUT_S = 30.0
"""Longest wait for Tokenize and Detokenize, and for an abort that waits until nothing is remembered."""


class OpenAnswers:
    """What both front doors have open, oldest first: for drain, inspection, and the watch on slow readers."""

    def __init__(self) -> None:
        self._answers: dict[RemoteAnswer, None] = {}
        self._numbers = count(1)

    def __iter__(self) -> Iterator[RemoteAnswer]:
        return iter(list(self._answers))

    def __len__(self) -> int:
        return len(self._answers)

    def next_number(self) -> int:
        """A stream id that was never used before in this epoch."""
        return next(self._numbers)

    def add(self, answer: RemoteAnswer) -> None:
        """An accepted request."""
        self._answers[answer] = None

    def discard(self, answer: RemoteAnswer) -> None:
        """Its caller's side has ended."""
        self._answers.pop(answer, None)


class RemoteRequests:
    """Opens requests for one front door, "grpc" or "http", at whatever tokenizer the router picks."""

    def __init__(
        self,
        *,
        transport: str,
        epoch: int,
        router: Router,
        places: Places,
        attaching: Attaching,
        strays: Strays,
        limits: Limits,
        answers: OpenAnswers,
        metrics: GatewayMetrics,
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        self._transport = transport
        self._tracer = tracer
        self._clock = clock
        self._epoch = epoch
        self._router = router
        self._places = places
        self._attaching = attaching
        self._strays = strays
        self._limits = limits
        self._answers = answers
        outcomes = metrics.requests_total
        self._completed = outcomes.labels(transport, "completed")
        self._refused = outcomes.labels(transport, "refused")
        self._cancelled = outcomes.labels(transport, "cancelled")
        self._failed = outcomes.labels(transport, "failed")
        self._resumed = metrics.resumes_total.labels(transport, "resumed")
        self._not_resumed = metrics.resumes_total.labels(transport, "refused")
        self._open_streams = metrics.open_streams.labels(transport)
        self._tokens = metrics.output_tokens_total.labels(transport)
        self._writes = metrics.write_batches_total.labels(transport)

    async def open(
        self,
        request: OpenPb,
        *,
        tenant: str,
        deadline_s: float | None,
        caller: TraceContext | None = None,
        named: bool = True,
    ) -> RemoteAnswer:
        """Opens a request at a tokenizer. Raises its refusal, Overloaded at a limit, or Unavailable.

        `named`: its id, if it has one, is its caller's, who may send the same request again and mean the same answer.
        """
        span = self._span_of(request, caller)
        try:
            _check_choices(request)
            with self._limits.held_unless_it_raises(tenant):
                return await self._open(request, tenant, deadline_s, span, named=named and bool(request.request_id))
        except TailraceError as error:
            self._refused.inc()
            span.ended("refused", error=error.reason)
            raise
        except asyncio.CancelledError:
            self._cancelled.inc()
            span.ended("cancelled")
            raise

    async def resume(
        self, request: generation_pb2.ResumeRequest, *, tenant: str, caller: TraceContext | None = None
    ) -> RemoteAnswer:
        """Takes up a request again, whichever tokenizer has it or can claim it. Raises NotFound, or as `open`."""
        span = self._span_of(request, caller)
        try:
            with self._limits.held_unless_it_raises(tenant):
                answer = await self._resume(request, tenant, span)
        except TailraceError as error:
            self._not_resumed.inc()
            span.ended("refused", error=error.reason)
            raise
        except asyncio.CancelledError:
            span.ended("cancelled")
            raise
        self._resumed.inc()
        return answer

    async def abort(self, request_id: str, *, tenant: str, wait_until_released: bool) -> AbortOutcome:
        """Stops a request by its id, whichever tokenizer has it: one that takes nothing new too."""
        links = self._router.in_order(tenant, request_id)
        request = tokenizer_pb2.TokenizerServiceAbortRequest(
            tenant=tenant, request_id=request_id, wait_until_released=wait_until_released, only_here=True
        )
        if not self._router.lone:
            for link in [link for link in links if link.connected]:
                with suppress(Unavailable):  # if it has the request, the schedulers know of it
                    outcome = await link.abort(request, timeout_s=UNARY_TIMEOUT_S)
                    if outcome is not AbortOutcome.NOT_FOUND:
                        return outcome
        request.only_here = False
        return await self._router.first_ready(links).abort(request, timeout_s=UNARY_TIMEOUT_S)

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """Text to ids, at any tokenizer."""
        return await self._router.pick().generation.Tokenize(request, timeout=UNARY_TIMEOUT_S)

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """Ids to text, at any tokenizer."""
        return await self._router.pick().generation.Detokenize(request, timeout=UNARY_TIMEOUT_S)

    async def list_models(self) -> generation_pb2.ListModelsResponse:
        """The served models, as any tokenizer knows them."""
        return await self._router.pick().generation.ListModels(generation_pb2.ListModelsRequest())

    def _span_of(self, call: CallPb, caller: TraceContext | None) -> CallSpan:
        return CallSpan(self._tracer, self._clock, call, caller, self._transport)

    async def _open(
        self, request: OpenPb, tenant: str, deadline_s: float | None, span: CallSpan, *, named: bool
    ) -> RemoteAnswer:
        """Opens it at the first tokenizer that is ready; where that one is lost before it answers, at the next."""
        timeout_s = OPEN_TIMEOUT_S if deadline_s is None else min(deadline_s, OPEN_TIMEOUT_S)
        arrived_at = self._clock.now()
        links = self._router.in_order(tenant, request.request_id) if named else self._router.by_load()
        refusal: Unavailable | None = None
        try:
            async with asyncio.timeout(timeout_s):
                for link in [link for link in links if link.ready]:
                    left_s = None if deadline_s is None else deadline_s - (self._clock.now() - arrived_at)
                    try:
                        return await self._open_at(link, request, tenant, left_s, span, named=named)
                    except Unavailable as error:
                        refusal = error
        except TimeoutError:
            raise DeadlineExceeded(f"no tokenizer accepted the request within {timeout_s:g} s") from None
        raise refusal or self._router.none_ready()

    async def _open_at(
        self,
        link: TokenizerLink,
        request: OpenPb,
        tenant: str,
        deadline_s: float | None,
        span: CallSpan,
        *,
        named: bool,
    ) -> RemoteAnswer:
        """A stream of its own for each try: the one before may have had output, of another run."""
        wakeup = Wakeup()
        options = request.options
        stream = Stream(
            tenant=tenant,
            request_id=request.request_id,
            n=options.n if options.HasField("n") else 1,
            whole=options.delivery == generation_pb2.DELIVERY_WHOLE,
            wake=wakeup.set,
            trace=span.context,
        )
        place = Place(link, self._answers.next_number())
        pb = self._open_request(place.stream_id, request, tenant, deadline_s, span.context)
        pb.fresh_id = not named
        await link.open(place.stream_id, stream, pb, timeout_s=OPEN_TIMEOUT_S)
        self._places.settle(stream, place)
        return self._answer(stream, wakeup, span)

    async def _resume(self, request: generation_pb2.ResumeRequest, tenant: str, span: CallSpan) -> RemoteAnswer:
        offsets = parse_offsets(request.offsets, "offsets", MAX_CHOICES)
        wakeup = Wakeup()
        stream = Stream(
            tenant=tenant,
            request_id=request.request_id,
            n=None,
            wake=wakeup.set,
            offsets=offsets,
            trace=span.context,
        )
        try:
            await self._attaching.attach(stream, request.resume_token, offsets)
        except TailraceError:
            self._places.vacate_later(stream)
            raise
        except asyncio.CancelledError:
            self._places.vacate(stream)
            raise
        return self._answer(stream, wakeup, span)

    def _answer(self, stream: Stream, wakeup: Wakeup, span: CallSpan) -> RemoteAnswer:
        answer = RemoteAnswer(stream, wakeup, self._close, span)
        span.accepted(answer.started)
        self._answers.add(answer)
        self._open_streams.inc()
        return answer

    def _open_request(
        self, stream_id: int, request: OpenPb, tenant: str, deadline_s: float | None, trace: TraceContext | None
    ) -> tokenizer_pb2.OpenRequest:
        pb = tokenizer_pb2.OpenRequest(
            gateway_epoch=self._epoch, stream_id=stream_id, tenant=tenant, trace=trace_to_wire(trace)
        )
        if deadline_s is not None:
            pb.deadline_in_ms = max(1, min(int(deadline_s * 1000), (1 << 32) - 1))
        if isinstance(request, generation_pb2.ChatRequest):
            pb.chat.CopyFrom(request)
        else:
            pb.generate.CopyFrom(request)
        return pb

    def _close(self, answer: RemoteAnswer, delivered: bool) -> None:
        """The one end of every accepted request on the caller's side."""
        stream = answer.stream
        stream.close()
        self._strays.forget(stream)
        # An end of our own making was delivered, but the tokenizer does not know of it: there the caller has left.
        finished = delivered and not stream.ended_here
        self._places.vacate(stream, StreamEnd.DELIVERED if finished else StreamEnd.CALLER_GONE)
        self._answers.discard(answer)
        self._limits.release(stream.tenant)
        self._open_streams.dec()
        self._tokens.inc(answer.tokens)
        self._writes.inc(answer.takes)
        failed = stream.cut is not None or stream.ended_here
        (self._failed if failed else self._completed if delivered else self._cancelled).inc()
        outcome = "failed" if failed else "completed" if delivered else "cancelled"
        if answer.span is not None:
            answer.span.ended(outcome, stream.log, error="" if stream.cut is None else stream.cut.reason)


def _check_choices(request: OpenPb) -> None:
    """Before anything is kept per choice."""
    if request.options.HasField("n") and not 1 <= request.options.n <= MAX_CHOICES:
        raise InvalidRequest("options.n", f"must be 1 to {MAX_CHOICES}, not {request.options.n}")
