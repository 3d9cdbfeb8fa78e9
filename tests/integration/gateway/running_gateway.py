"""A whole gateway in the test's own event loop, on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from openai import AsyncOpenAI

from gateway.app import Gateway
from gateway.config import Config
from services.runtime.process import Ports, Runtime, run_async
from tailrace.v1 import generation_pb2_grpc


async def wait_until(condition: Callable[[], object], *, within_s: float = 5.0) -> None:
    """Returns once the condition holds; fails when it does not within the time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # of all kinds, few of which have an event
            await asyncio.sleep(0.005)


class RunningGateway:
    """A gateway that runs, and what a test needs to call it."""

    def __init__(self, runtime: Runtime, gateway: Gateway, stop: asyncio.Event) -> None:
        self.runtime = runtime
        self.gateway = gateway
        self.stop = stop
        self.ports: Ports | None = None
        self.exit_code: int | None = None

    @property
    def url(self) -> str:
        """The HTTP API's root."""
        return f"http://127.0.0.1:{self.gateway.http_port}"

    def openai(self, **options: Any) -> AsyncOpenAI:
        """The official client; it never retries unless told to."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "unused", "max_retries": 0, **options})

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[generation_pb2_grpc.GenerationServiceAsyncStub]:
        """GenerationService on the gateway's gRPC port."""
        assert self.ports is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports.public}") as channel:
            yield generation_pb2_grpc.GenerationServiceStub(channel)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.runtime.registry.get_sample_value(f"tailrace_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def running_gateway(*tokenizers: str, ready: bool = True, **options: Any) -> AsyncIterator[RunningGateway]:
    """Runs a gateway until the block ends; waits until it is ready unless told not to."""
    config = Config(
        **{
            "port": 0,
            "admin_port": 0,
            "metrics_port": 0,
            "http_port": 0,
            "drain_timeout_s": 1.0,
            "tokenizers": tokenizers,
            **options,
        }
    )
    made: list[RunningGateway] = []
    stop, opened = asyncio.Event(), asyncio.Event()

    def make(runtime: Runtime) -> Gateway:
        made.append(RunningGateway(runtime, Gateway(runtime, config), stop))
        return made[0].gateway

    def on_ports(ports: Ports) -> None:
        made[0].ports = ports
        opened.set()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_async("gateway", config, make, stop=stop, on_ports=on_ports))
        async with asyncio.timeout(10):
            await opened.wait()
            await made[0].gateway.http_started.wait()
            if ready:
                await wait_until(lambda: made[0].runtime.ready)
        try:
            yield made[0]
        finally:
            stop.set()
            made[0].exit_code = await running
