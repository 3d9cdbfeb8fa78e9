"""A real gRPC server that speaks the contract and sends exactly what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tailrace.v1 import common_pb2, generation_pb2, generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
Pb = generation_pb2.GenerationEvent


def started(request_id: str = "r-1", resume_token: bytes = b"") -> Pb:
    """Without a token the request can't be resumed."""
    return Pb(
        started=generation_pb2.Started(
            request_id=request_id, resume_token=resume_token, model="fake", prompt_tokens=3, seed=7
        )
    )


def delta(text: str, ids: Sequence[int], tokens_after: int, text_after: int, choice: int = 0) -> Pb:
    return Pb(
        delta=generation_pb2.Delta(
            choice=choice, text=text, token_ids=ids, next_token_offset=tokens_after, next_text_offset=text_after
        )
    )


def finish(output_tokens: int, choice: int = 0) -> Pb:
    return Pb(
        finish=generation_pb2.Finish(choice=choice, reason=common_pb2.FINISH_REASON_LENGTH, output_tokens=output_tokens)
    )


def completed(output_tokens: int) -> Pb:
    return Pb(completed=generation_pb2.Completed(usage=common_pb2.Usage(prompt_tokens=3, output_tokens=output_tokens)))


WHOLE = [started(), delta("hé", [1], 1, 2), delta("🙂", [2, 3], 3, 3), finish(3), completed(3)]


class ScriptedServer(generation_pb2_grpc.GenerationServiceServicer):
    """Sends `script`; then ends with `status`, or, when `hangs`, waits for its caller to leave.

    Each Resume gets the next of `resumes`: events, or a status to be refused with; without one it is NOT_FOUND.
    """

    def __init__(self) -> None:
        self.script: Sequence[Pb] = WHOLE
        self.status: tuple[grpc.StatusCode, str, Any] | None = None
        self.hangs = False
        self.resumes: list[Sequence[Pb] | tuple[grpc.StatusCode, str, Any]] = []
        self.resume_requests: list[generation_pb2.ResumeRequest] = []
        self.keys: list[str] = []
        self.called = asyncio.Event()
        self.caller_left = asyncio.Event()
        self.requests: list[generation_pb2.GenerateRequest | generation_pb2.ChatRequest] = []
        self.health_checks = 0
        self.address = ""

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> AsyncIterator[Pb]:
        async for event in self._answer(request, context):
            yield event

    async def Chat(self, request: generation_pb2.ChatRequest, context: Context) -> AsyncIterator[Pb]:
        async for event in self._answer(request, context):
            yield event

    async def Resume(self, request: generation_pb2.ResumeRequest, context: Context) -> AsyncIterator[Pb]:
        self.resume_requests.append(request)
        self._note_key(context)
        scripted = self.resumes.pop(0) if self.resumes else (grpc.StatusCode.NOT_FOUND, "not in the script", ())
        if isinstance(scripted, tuple):
            await context.abort(*scripted)
            raise AssertionError
        for event in scripted:
            yield event
        if scripted[-1].WhichOneof("event") != "completed":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut again")

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        known = request.request_id == "r-1"
        outcome = generation_pb2.ABORT_OUTCOME_ABORTING if known else generation_pb2.ABORT_OUTCOME_NOT_FOUND
        return generation_pb2.AbortResponse(outcome=outcome)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        if request.WhichOneof("input") == "conversation":
            return generation_pb2.TokenizeResponse(token_ids=range(len(request.conversation.messages)))
        return generation_pb2.TokenizeResponse(
            token_ids=map(ord, request.text), token_bytes=map(str.encode, request.text)
        )

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Context
    ) -> generation_pb2.ListModelsResponse:
        model = generation_pb2.Model(model_id="fake", context_length=10, vocab_size=20)
        return generation_pb2.ListModelsResponse(models=[model])

    async def _answer(
        self, request: generation_pb2.GenerateRequest | generation_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[Pb]:
        self.requests.append(request)
        self._note_key(context)
        # A generator that is cancelled while gRPC sends what it yielded never hears of it: the call itself tells.
        context.add_done_callback(lambda _: self.caller_left.set())
        self.called.set()
        for event in self.script:
            yield event
        if self.hangs:
            await asyncio.Event().wait()
        if self.status is not None:
            await context.abort(*self.status)

    def _note_key(self, context: Context) -> None:
        self.keys += [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]


class _Health(health_pb2_grpc.HealthServicer):
    """Answers, and counts."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        self._server.health_checks += 1
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def serving() -> AsyncIterator[ScriptedServer]:
    """A ScriptedServer on a free port."""
    servicer = ScriptedServer()
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(servicer), server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)
