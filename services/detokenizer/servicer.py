"""DetokenizerService: one call is one route, and holds all the state there is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import grpc.aio

from services.detokenizer.route import Route
from services.detokenizer.spans import SequenceSpans
from services.detokenizer.upstream import Schedulers, TokenStream
from services.detokenizer.wire import write_hello
from services.protocol.hello import Hello, mismatch
from services.protocol.sender import Wakeup
from services.protocol.views import RouteKey
from services.protocol.views_wire import route_from_wire
from services.runtime.clock import Clock
from services.runtime.errors import InvalidRequest, PreconditionFailed, Unavailable, answering
from services.runtime.metrics import DetokenizerMetrics
from services.runtime.trace import NO_TRACER, Tracer
from services.text.vocabulary import Vocabulary
from tailrace.v1 import detokenizer_pb2, detokenizer_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DetokenizerServicer(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """Serves routes to the schedulers that it may ask; `accepting` says whether a new one is taken.

    `routes` are the open ones; `progress` is set when sequences may have ended.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        vocabulary: Vocabulary,
        addresses: Collection[str],
        schedulers: Schedulers,
        metrics: DetokenizerMetrics,
        accepting: Callable[[], bool],
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        self.routes: dict[Route, None] = {}
        self.progress = Wakeup()
        self._hello = hello
        self._vocabulary = vocabulary
        self._addresses = addresses
        self._schedulers = schedulers
        self._metrics = metrics
        self._accepting = accepting
        self._tracer = tracer
        self._clock = clock

    async def StreamText(  # type: ignore[override]  # written with context.write, so that `finally` always runs
        self, request: detokenizer_pb2.StreamTextRequest, context: Context
    ) -> None:
        """Opens a route, which ends with this call."""
        async with answering(context, tokenizer=request.route.tokenizer, scheduler=request.scheduler):
            self._check(request)
            async with self._schedulers.stream_tokens(request.scheduler, request.route) as tokens:
                theirs = await tokens.hello()
                why = mismatch(self._hello, theirs)
                if why is not None:
                    raise PreconditionFailed(f"scheduler {request.scheduler}: {why}")
                await context.write(write_hello(self._hello, theirs))
                await self._serve(route_from_wire(request.route), tokens, context)

    async def _serve(self, key: RouteKey, tokens: TokenStream, context: Context) -> None:
        traced = self._tracer is not NO_TRACER
        spans = SequenceSpans(self._tracer, self._clock, key, tokens.address) if traced else None
        route = Route(key, tokens, self._vocabulary, self._metrics, self.progress.set, spans)
        self.routes[route] = None
        if not self._accepting():
            route.drain()  # it began while this route was being opened
        try:
            await route.run(context.write)
        finally:
            del self.routes[route]
            self.progress.set()
            if spans is not None:
                spans.close()

    def _check(self, request: detokenizer_pb2.StreamTextRequest) -> None:
        if not self._accepting():
            raise Unavailable("the detokenizer takes no new routes")
        if request.scheduler not in self._addresses:
            raise InvalidRequest("scheduler", f"{request.scheduler!r} is not one that this detokenizer may ask")
        if not request.route.tokenizer:
            raise InvalidRequest("route.tokenizer", "must not be empty")
