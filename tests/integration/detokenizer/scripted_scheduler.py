"""A scheduler that sends what a test tells it to: a real server speaking the contract, with nothing behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from tailrace.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

Response = scheduler_pb2.StreamTokensResponse
Context = grpc.aio.ServicerContext[Any, Any]


class Call:
    """One StreamTokens call that came in. `send` puts something on its way; `ended` is set when the call is over."""

    def __init__(self, route: scheduler_pb2.RouteKey) -> None:
        self.route = route
        self.ended = asyncio.Event()
        self.script: asyncio.Queue[Response | grpc.StatusCode | None] = asyncio.Queue()

    def hello(self, **fields: Any) -> None:
        self.script.put_nowait(Response(hello=common_pb2.Hello(protocol_version=1, epoch=99, **fields)))

    def send(self, **columns: Any) -> None:
        self.script.put_nowait(Response(batch=scheduler_pb2.TokenBatch(**columns)))

    def refuse(self, code: grpc.StatusCode) -> None:
        self.script.put_nowait(code)

    def end(self) -> None:
        self.script.put_nowait(None)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Hands each incoming call to the test."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.address = ""

    async def StreamTokens(  # type: ignore[override]  # noqa: N802  # the contract's name
        self, request: scheduler_pb2.StreamTokensRequest, context: Context
    ) -> None:
        call = Call(request.route)
        self.calls.put_nowait(call)
        try:
            while (step := await call.script.get()) is not None:
                if isinstance(step, grpc.StatusCode):
                    await context.abort(step, "told to refuse")
                await context.write(step)
        finally:
            call.ended.set()


@asynccontextmanager
async def scripted_scheduler() -> AsyncIterator[ScriptedScheduler]:
    scheduler = ScriptedScheduler()  # type: ignore[abstract]  # a detokenizer calls nothing else
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    scheduler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield scheduler
    finally:
        await server.stop(0)
