"""A whole scheduler process inside the test's loop, and a client that reads it over real gRPC."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.app import Ports, Runtime
from services.runtime.client import connect, open_stream
from services.runtime.process import run_async
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from tailrace.v1 import admin_pb2, admin_pb2_grpc, common_pb2, scheduler_pb2, scheduler_pb2_grpc

TOKENIZER, EPOCH = "tokenizer-1", 7
WAIT_S = 60.0


class TokenReader:
    """One StreamTokens call, read into whole outputs; it checks offsets as the contract promises them."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.hello: common_pb2.Hello | None = None
        self.names: dict[int, tuple[int, int]] = {}
        self.ids: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[int, int], scheduler_pb2.SequenceEnd] = {}
        self.released: list[int] = []
        self.batches = 0
        self.heartbeats = 0

    async def read_hello(self) -> common_pb2.Hello:
        message = await self.call.read()
        assert message is not grpc.aio.EOF, await self.call.details()
        assert message.WhichOneof("payload") == "hello"
        self.hello = message.hello
        return self.hello

    async def read(self) -> None:
        message = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert message is not grpc.aio.EOF
        assert message.WhichOneof("payload") == "batch"
        self.batches += 1
        self.heartbeats += not message.batch.ByteSize()
        self._take(message.batch)

    async def read_until(self, reached: Callable[[TokenReader], bool]) -> None:
        while not reached(self):
            await self.read()

    async def read_ends(self, *attempt_ids: int) -> None:
        await self.read_until(lambda reader: {a for a, _ in reader.ends} >= set(attempt_ids))

    def _take(self, batch: scheduler_pb2.TokenBatch) -> None:
        for start in batch.starts:
            assert start.sequence not in self.names
            self.names[start.sequence] = (start.attempt_id, start.choice)
        counts = batch.token_counts or [1] * len(batch.sequences)
        position = 0
        for number, offset, count in zip(batch.sequences, batch.token_offsets, counts, strict=True):
            name = self.names[number]
            assert offset == len(self.ids[name])
            self.ids[name] += batch.token_ids[position : position + count]
            position += count
        for end in batch.ends:
            name = self.names[end.sequence]
            assert name not in self.ends
            assert end.token_offset == len(self.ids[name])
            self.ends[name] = end
        self.released += batch.released_attempt_ids


class Stand:
    """A running scheduler and its clients."""

    def __init__(self, app: SchedulerApp, runtime: Runtime, ports: Ports, stop: asyncio.Event) -> None:
        self.app, self.runtime, self.ports, self.stop = app, runtime, ports, stop
        self.channel = connect(f"127.0.0.1:{ports.public}")
        self.admin_channel = connect(f"127.0.0.1:{ports.admin}")
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.inspection = admin_pb2_grpc.InspectionServiceStub(self.admin_channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.admin_channel)
        self.process: asyncio.Task[int] | None = None

    @property
    def core(self) -> SchedulerCore:
        assert self.app._serving is not None
        return self.app._serving.loop.core

    async def submit(self, attempt_id: int, **changes: Any) -> scheduler_pb2.SubmitResponse:
        response: scheduler_pb2.SubmitResponse = await self.stub.Submit(submit_pb(attempt_id, **changes))
        return response

    async def abort(self, *attempt_ids: int) -> None:
        await self.stub.Abort(scheduler_pb2.SchedulerServiceAbortRequest(attempt_ids=attempt_ids))

    async def release(self, *attempt_ids: int) -> None:
        await self.stub.Release(scheduler_pb2.SchedulerServiceReleaseRequest(attempt_ids=attempt_ids))

    @asynccontextmanager
    async def tokens(self, generation: int = 1, epoch: int = EPOCH) -> AsyncIterator[TokenReader]:
        """An open route whose hello has come."""
        key = scheduler_pb2.RouteKey(tokenizer=TOKENIZER, tokenizer_epoch=epoch, generation=generation)
        async with open_stream(lambda: self.stub.StreamTokens(scheduler_pb2.StreamTokensRequest(route=key))) as call:
            reader = TokenReader(call)
            await reader.read_hello()
            yield reader

    async def claim(self, request_id: str, epoch: int, attempt_number: int = 1) -> scheduler_pb2.ClaimResponse:
        """By another epoch of the tokenizer."""
        request = scheduler_pb2.ClaimRequest(
            request_id=request_id, tokenizer=TOKENIZER, tokenizer_epoch=epoch, attempt_number=attempt_number
        )
        response: scheduler_pb2.ClaimResponse = await self.stub.Claim(request)
        return response

    async def released(self, *attempt_ids: int) -> None:
        """Returns when the scheduler has forgotten these."""
        await self._changed_until(lambda: not set(attempt_ids) & set(self.core.attempts))

    @asynccontextmanager
    async def loads(self, epoch: int = EPOCH) -> AsyncIterator[Any]:
        """An open load stream."""
        request = scheduler_pb2.StreamLoadRequest(tokenizer=TOKENIZER, tokenizer_epoch=epoch)
        async with open_stream(lambda: self.stub.StreamLoad(request)) as call:
            yield call

    async def ready(self) -> None:
        """Returns when health says so."""
        request = health_pb2.HealthCheckRequest(service="tailrace.v1.SchedulerService")
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        async with open_stream(lambda: stub.Watch(request)) as call:
            while (await asyncio.wait_for(call.read(), WAIT_S)).status != health_pb2.HealthCheckResponse.SERVING:
                pass

    async def health(self, changes: int) -> AsyncIterator[str]:
        """The next so many changes of the service's health."""
        request = health_pb2.HealthCheckRequest(service="tailrace.v1.SchedulerService")
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        async with open_stream(lambda: stub.Watch(request)) as call:
            await call.read()
            for _ in range(changes):
                status = (await asyncio.wait_for(call.read(), WAIT_S)).status
                yield health_pb2.HealthCheckResponse.ServingStatus.Name(status)

    async def views(self, **which: Any) -> list[admin_pb2.RequestView]:
        response = await self.inspection.ListRequests(admin_pb2.ListRequestsRequest(**which))
        return list(response.requests)

    async def process_view(self) -> admin_pb2.ProcessView:
        return (await self.inspection.ListRequests(admin_pb2.ListRequestsRequest(page_size=1))).process

    async def idle(self) -> None:
        """Returns when nothing waits or runs and the engine was told of every end."""
        await self._changed_until(lambda: not self.core.has_work and not self.core.open_sequences)

    async def _changed_until(self, reached: Callable[[], bool]) -> None:
        assert self.app._serving is not None
        changed = asyncio.Event()
        with self.app._serving.loop.watching(changed.set):
            while not reached():
                changed.clear()
                await asyncio.wait_for(changed.wait(), WAIT_S)


def submit_pb(attempt_id: int, **changes: Any) -> scheduler_pb2.SubmitRequest:
    """A valid Submit of one choice with eight tokens; `max_tokens` and `stop_token_ids` are for its stop conditions."""
    stopping: dict[str, Any] = {"max_tokens": 8}
    stopping |= {key: changes.pop(key) for key in ("max_tokens", "min_tokens", "stop_token_ids") if key in changes}
    fields: dict[str, Any] = {
        "attempt_number": attempt_id,
        "tokenizer": TOKENIZER,
        "tokenizer_epoch": EPOCH,
        "request_id": f"r-{attempt_id}",
        "fence": 1,
        "prompt_ids": [20, 21, 22],
        "choices": [scheduler_pb2.SubmitChoice(choice=0)],
        "sampling": common_pb2.SamplingParams(seed=attempt_id),
        "stopping": common_pb2.StopConditions(**stopping),
    }
    return scheduler_pb2.SubmitRequest(attempt_id=attempt_id, **(fields | changes))


@asynccontextmanager
async def scheduler(**settings: Any) -> AsyncIterator[Stand]:
    """A scheduler with the fake engine, ready; stopped at the end, and its accounts checked."""
    defaults: dict[str, Any] = {"engine": "fake", "port": 0, "admin_port": 0, "metrics_port": 0, "drain_timeout_s": 5.0}
    config = SchedulerConfig(**(defaults | settings))
    stop = asyncio.Event()
    made: list[tuple[SchedulerApp, Runtime]] = []
    ports: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()

    def make(runtime: Runtime) -> SchedulerApp:
        made.append((SchedulerApp(runtime, config), runtime))
        return made[0][0]

    process = asyncio.create_task(run_async("scheduler", config, make, stop=stop, on_ports=ports.set_result))
    bound = await ports
    stand = Stand(*made[0], bound, stop)
    stand.process = process
    try:
        await stand.channel.channel_ready()
        await stand.ready()
        yield stand
    finally:
        stop.set()
        await stand.channel.close()
        await stand.admin_channel.close()
        assert await process == 0
