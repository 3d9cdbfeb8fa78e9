"""A whole tokenizer process in the test's loop, between a scripted engine and stubs, all over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.protocol.hello import hello_of, to_wire
from services.protocol.model_card import load_model_card
from services.runtime.app import Ports, Runtime
from services.runtime.client import connect
from services.runtime.process import run_async
from services.runtime.server import GrpcServer
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config
from tailrace.v1 import (
    admin_pb2_grpc,
    detokenizer_pb2_grpc,
    generation_pb2_grpc,
    scheduler_pb2_grpc,
    tokenizer_pb2_grpc,
)
from tests.integration.tokenizer.engine import Engine
from tests.integration.tokenizer.tiny_model import write_tiny_model


@dataclass
class System:
    """The engine, the process under test, and stubs for each of its ports."""

    engine: Engine
    runtime: Runtime
    app: TokenizerApp
    generation: generation_pb2_grpc.GenerationServiceAsyncStub
    tokenizer: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
    inspection: admin_pb2_grpc.InspectionServiceAsyncStub
    stop: asyncio.Event
    running: asyncio.Task[int] = field(repr=False)

    async def until_idle(self) -> None:
        """Waits until nothing is remembered."""
        async with asyncio.timeout(10):
            while self.app.open_requests():  # noqa: ASYNC110  # the process under test has no event to wait for
                await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's directory."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def system(tiny_model: Path) -> AsyncIterator[System]:
    """A tokenizer that is ready."""
    async with started(tiny_model) as system:
        yield system


@asynccontextmanager
async def started(model: Path, **settings: Any) -> AsyncIterator[System]:
    """A tokenizer with these settings, ready; stopped on the way out, with its exit code checked."""
    engine = Engine(  # type: ignore[abstract]  # what it leaves out, nobody calls
        to_wire(hello_of(77, load_model_card(model)))
    )
    server = GrpcServer(host="127.0.0.1", port=0, name="engine")
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(engine, server.server)
    detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(engine, server.server)
    address = f"127.0.0.1:{await server.start()}"
    config = Config(
        model=model,
        port=0,
        admin_port=0,
        metrics_port=0,
        schedulers=(address,),
        detokenizers=(address,),
        **{"drain_timeout_s": 0.2} | settings,
    )
    try:
        async with _running(config, engine) as system:
            yield system
    finally:
        await server.stop(0)


@asynccontextmanager
async def _running(config: Config, engine: Engine) -> AsyncIterator[System]:
    runtimes: list[Runtime] = []
    apps: list[TokenizerApp] = []
    stop, ports = asyncio.Event(), asyncio.get_running_loop().create_future()

    def make(runtime: Runtime) -> TokenizerApp:
        runtimes.append(runtime)
        apps.append(TokenizerApp(runtime, config))
        return apps[0]

    running = asyncio.create_task(run_async("tokenizer", config, make, stop=stop, on_ports=ports.set_result))
    await asyncio.wait([running, ports], return_when=asyncio.FIRST_COMPLETED)
    bound: Ports = await ports
    channels = [connect(f"127.0.0.1:{port}") for port in (bound.public, bound.admin)]
    await _ready(channels[0])
    try:
        yield System(
            engine=engine,
            runtime=runtimes[0],
            app=apps[0],
            generation=generation_pb2_grpc.GenerationServiceStub(channels[0]),
            tokenizer=tokenizer_pb2_grpc.TokenizerServiceStub(channels[0]),
            inspection=admin_pb2_grpc.InspectionServiceStub(channels[1]),
            stop=stop,
            running=running,
        )
    finally:
        stop.set()
        code = await running
        for channel in channels:
            await channel.close()
        assert code == 0


async def _ready(channel: grpc.aio.Channel) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
    async for response in watch:
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()
