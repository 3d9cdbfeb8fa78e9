"""SchedulerService over the step loop: the only place where its gRPC calls are seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from services.protocol.hello import Hello
from services.protocol.inspection import AdminServicer
from services.protocol.sender import HEARTBEAT_S, Sender
from services.runtime.errors import Unavailable, answering
from services.scheduler import wire
from services.scheduler.call import STOPPING, Call
from services.scheduler.constraint.workshop import Workshop
from services.scheduler.effects import Load
from services.scheduler.loop import StepLoop
from tailrace.v1 import admin_pb2, scheduler_pb2, scheduler_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

LOAD_INTERVAL_S = 0.05
"""Loads are told at most this often: a queue changes at every step."""

LOAD_HEARTBEAT_S = HEARTBEAT_S - LOAD_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Serving:
    """What a loaded scheduler answers with."""

    loop: StepLoop
    hello: Hello
    workshop: Workshop


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """`serving` gives the loaded scheduler or raises Unavailable."""

    def __init__(self, serving: Callable[[], Serving]) -> None:
        self._serving = serving

    async def Submit(self, request: scheduler_pb2.SubmitRequest, context: Context) -> scheduler_pb2.SubmitResponse:
        """Accepts an attempt."""
        async with answering(context, request_id=request.request_id):
            serving = self._serving()
            serving.loop.submit(await serving.workshop.prepare(wire.parse_submit(request)))
            return scheduler_pb2.SubmitResponse(epoch=serving.hello.epoch)

    async def Abort(
        self, request: scheduler_pb2.SchedulerServiceAbortRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceAbortResponse:
        """Stops attempts."""
        async with answering(context):
            serving = self._serving()
            reason, sender = wire.parse_abort_reason(request.reason), wire.parse_sender(request)
            stale = serving.loop.abort(request.attempt_ids, reason, sender)
            return scheduler_pb2.SchedulerServiceAbortResponse(epoch=serving.hello.epoch, stale_attempt_ids=stale)

    async def Release(
        self, request: scheduler_pb2.SchedulerServiceReleaseRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceReleaseResponse:
        """Stops and forgets attempts."""
        async with answering(context):
            serving = self._serving()
            stale = serving.loop.release(request.attempt_ids, wire.parse_sender(request))
            return scheduler_pb2.SchedulerServiceReleaseResponse(epoch=serving.hello.epoch, stale_attempt_ids=stale)

    async def Find(self, request: scheduler_pb2.FindRequest, context: Context) -> scheduler_pb2.FindResponse:
        """Tells what is held of a request."""
        async with answering(context, request_id=request.request_id):
            serving = self._serving()
            return wire.held_to_wire(serving.hello.epoch, serving.loop.find(request.tenant, request.request_id))

    async def Claim(self, request: scheduler_pb2.ClaimRequest, context: Context) -> scheduler_pb2.ClaimResponse:
        """Gives a request to another tokenizer."""
        async with answering(context, request_id=request.request_id):
            serving = self._serving()
            claimed = serving.loop.claim(wire.parse_claim(request))
            return wire.claimed_to_wire(serving.hello.epoch, claimed)

    async def Reconcile(
        self, request: scheduler_pb2.ReconcileRequest, context: Context
    ) -> scheduler_pb2.ReconcileResponse:
        """Compares what a tokenizer wants with what is held for it."""
        async with answering(context):
            serving = self._serving()
            owner = wire.parse_owner(request.tokenizer, request.tokenizer_epoch)
            reconciled = serving.loop.reconcile(owner, request.highest_attempt_number, request.live_attempt_ids)
            return wire.reconciled_to_wire(serving.hello.epoch, reconciled)

    async def StreamTokens(  # type: ignore[override]  # a coroutine that writes, so that `finally` always runs
        self, request: scheduler_pb2.StreamTokensRequest, context: Context
    ) -> None:
        """Serves a route until its caller leaves or a newer call takes over."""
        async with answering(context):
            serving = self._serving()
            call = serving.loop.open_call(*wire.parse_route_key(request.route))
            with serving.loop.holding_lease(call.route):
                try:
                    await context.write(wire.tokens_hello(serving.hello))
                    await _send_tokens(serving.loop, call, context)
                finally:
                    serving.loop.close_call(call)

    async def StreamLoad(  # type: ignore[override]  # likewise
        self, request: scheduler_pb2.StreamLoadRequest, context: Context
    ) -> None:
        """Tells the load, as it changes; the caller's lease."""
        async with answering(context):
            serving = self._serving()
            loads = _Loads(serving.loop)
            sender = Sender(loads.take_changed, loads.take, heartbeat_s=LOAD_HEARTBEAT_S)
            owner = wire.parse_owner(request.tokenizer, request.tokenizer_epoch)
            with serving.loop.holding_lease(owner), serving.loop.watching(sender.wake):
                await context.write(wire.load_hello(serving.hello))
                await sender.run(lambda message: _write_spaced(context, message))


class SchedulerAdminServicer(AdminServicer):
    """AdminService, with a prefix cache. `serving` gives the loaded scheduler or raises Unavailable."""

    def __init__(
        self, serving: Callable[[], Serving], request_drain: Callable[[], None], open_requests: Callable[[], int]
    ) -> None:
        super().__init__(request_drain, open_requests)
        self._serving = serving

    async def FlushPrefixCache(
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Context
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Forgets every cached prefix, at once; what is in use stays with its users."""
        async with answering(context):
            return admin_pb2.FlushPrefixCacheResponse(held_blocks=self._serving().loop.flush_prefix_cache())


async def _send_tokens(loop: StepLoop, call: Call, context: Context) -> None:
    def take() -> scheduler_pb2.StreamTokensResponse | None:
        rows = loop.take(call)
        return None if rows is None else wire.tokens_to_wire(rows)

    async def write(message: scheduler_pb2.StreamTokensResponse) -> None:
        message.news_us = sender.news_us
        await context.write(message)

    sender = Sender(take, wire.tokens_heartbeat)
    call.wake = sender.wake
    await sender.run(write)


async def _write_spaced(context: Context, message: scheduler_pb2.StreamLoadResponse) -> None:
    await context.write(message)
    await asyncio.sleep(LOAD_INTERVAL_S)


class _Loads:
    """One reader's view of the load: what it was told last."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._told: Load | None = None

    def take_changed(self) -> scheduler_pb2.StreamLoadResponse | None:
        if self._loop.closed:
            raise Unavailable("the scheduler stops", reason=STOPPING)
        load = self._loop.load()
        return None if load == self._told else self._tell(load)

    def take(self) -> scheduler_pb2.StreamLoadResponse:
        return self._tell(self._loop.load())

    def _tell(self, load: Load) -> scheduler_pb2.StreamLoadResponse:
        self._told = load
        return wire.load_to_wire(load)
