"""The public contract's one servicer, over whatever holds the requests.

The tokenizer serves it over its own ledger, the gateway over a remote tokenizer: both give it a `Requests`. It alone
decides how an answer becomes a gRPC stream: Started, then what the answer has, merged while the caller is slow, and the
end told back in one place, whether the caller had it or left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, cast

import grpc.aio

from services.protocol.events import AbortOutcome, Completed, Delta, Finish, Started
from services.protocol.slow_readers import Evictable, evictable
from services.protocol.wire import event_to_wire
from services.runtime.errors import answering
from services.runtime.trace import TRACEPARENT, TRACESTATE, TraceContext, read_headers
from tailrace.v1 import generation_pb2, generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
OpenPb = generation_pb2.GenerateRequest | generation_pb2.ChatRequest


class Answer(Evictable, Protocol):
    """An accepted request, as one of its callers reads it."""

    @property
    def started(self) -> Started:
        """The stream's first event."""

    def batches(self) -> AsyncIterator[Sequence[Delta | Finish | Completed]]:
        """What is new, merged since the last batch, until Completed, which is last.

        Raises a TailraceError when the rest can't be had (the stream is cut).
        """

    def close(self, *, delivered: bool) -> None:
        """The caller's side has ended: its transport has the terminal event, or it left. Called exactly once."""


class Requests(Protocol):
    """Who holds the requests. Every method raises a TailraceError to refuse. `caller`: where it stands in a trace."""

    async def open(
        self, request: OpenPb, *, tenant: str, deadline_s: float | None, caller: TraceContext | None
    ) -> Answer: ...

    async def resume(
        self, request: generation_pb2.ResumeRequest, *, tenant: str, caller: TraceContext | None
    ) -> Answer: ...

    async def abort(self, request_id: str, *, tenant: str, wait_until_released: bool) -> AbortOutcome: ...

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse: ...

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse: ...

    async def list_models(self) -> generation_pb2.ListModelsResponse: ...


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService over a `Requests`. `tenant_of` tells whose call it is, and may refuse it."""

    def __init__(self, requests: Requests, tenant_of: Callable[[Context], str] = lambda _: "") -> None:
        self._requests = requests
        self._tenant_of = tenant_of

    async def Generate(  # type: ignore[override]  # written with context.write, so that `finally` always runs
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Continues a prompt."""
        async with answering(context):
            await self._open(request, context)

    async def Chat(  # type: ignore[override]  # written with context.write, so that `finally` always runs
        self, request: generation_pb2.ChatRequest, context: Context
    ) -> None:
        """Answers a conversation."""
        async with answering(context):
            await self._open(request, context)

    async def Resume(  # type: ignore[override]  # written with context.write, so that `finally` always runs
        self, request: generation_pb2.ResumeRequest, context: Context
    ) -> None:
        """Takes up a stream again."""
        async with answering(context):
            tenant, caller = self._tenant_of(context), _caller_of(context)
            await _stream(await self._requests.resume(request, tenant=tenant, caller=caller), context)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """Stops a request."""
        async with answering(context):
            outcome = await self._requests.abort(
                request.request_id,
                tenant=self._tenant_of(context),
                wait_until_released=request.wait_until_released,
            )
        return generation_pb2.AbortResponse(outcome=cast(generation_pb2.AbortOutcome, outcome.value))

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        """Text to ids."""
        async with answering(context):
            return await self._requests.tokenize(request)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        """Ids to text."""
        async with answering(context):
            return await self._requests.detokenize(request)

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Context
    ) -> generation_pb2.ListModelsResponse:
        """The served models."""
        async with answering(context):
            return await self._requests.list_models()

    async def _open(self, request: OpenPb, context: Context) -> None:
        tenant, deadline_s, caller = self._tenant_of(context), context.time_remaining(), _caller_of(context)
        answer = await self._requests.open(request, tenant=tenant, deadline_s=deadline_s, caller=caller)
        await _stream(answer, context)


def _caller_of(context: Context) -> TraceContext | None:
    metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    parents = [value for key, value in metadata if key == TRACEPARENT]
    return read_headers(parents, [value for key, value in metadata if key == TRACESTATE])


async def _stream(answer: Answer, context: Context) -> None:
    """Writes an answer to its caller. A cancelled call (the caller left) passes `finally` like every other end."""
    delivered = False
    try:
        async with evictable(answer):
            await context.write(event_to_wire(answer.started))
            async for batch in answer.batches():
                for event in batch:
                    await context.write(event_to_wire(event))
                    answer.writes += 1
        delivered = True
    finally:
        answer.close(delivered=delivered)
