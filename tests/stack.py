"""All four services for a test: in one loop, or as the child processes that `tailrace up` starts."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from cli.readiness import wait_ready
from cli.stack import Plan, Service, free_ports, services_of
from cli.supervisor import Supervisor
from cli.terminal import Terminal
from gateway.app import Gateway
from gateway.config import Config as GatewayConfig
from services.detokenizer.app import DetokenizerApp
from services.detokenizer.config import Config as DetokenizerConfig
from services.runtime.config import ProcessConfig
from services.runtime.process import App, Ports, Runtime, run_async
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config as TokenizerConfig
from tailrace.v1 import admin_pb2, admin_pb2_grpc

START_TIMEOUT_S = 90.0
IDLE_TIMEOUT_S = 20.0
POLL_S = 0.02
OPEN_GAUGE = re.compile(
    "^tailrace_.*(_open_(?!routes)|_waiting$|_running$|_log_sequences$|_(unread|unsent|held)_tokens$|_unread_seconds$|_age_seconds$)"
)
FLOW = ("gateway", "tokenizer", "detokenizer", "scheduler")
"""The services in the order in which requests flow, and in which they are stopped."""


@dataclass
class Running:
    """One service inside the test's loop."""

    name: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ports: asyncio.Future[Ports] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    runtime: Runtime | None = None
    app: App | None = None
    exit_code: asyncio.Task[int] | None = None

    def start(self, config: ProcessConfig, make_app: Callable[[Runtime, Any], App]) -> None:
        """Starts it; `ports` tells when it is there, `exit_code` when it has ended."""

        def make(runtime: Runtime) -> App:
            self.runtime, self.app = runtime, make_app(runtime, config)
            return self.app

        self.exit_code = asyncio.create_task(
            run_async(self.name, config, make, stop=self.stop, on_ports=self.ports.set_result)
        )

    async def address(self) -> str:
        """Where it answers, once it does; fails when it ends before."""
        assert self.exit_code is not None
        await asyncio.wait((self.ports, self.exit_code), return_when=asyncio.FIRST_COMPLETED)
        assert self.ports.done(), f"{self.name} ended with exit code {self.exit_code.result()}"
        return f"127.0.0.1:{self.ports.result().public}"

    @property
    def registry(self) -> CollectorRegistry:
        """Its metrics."""
        assert self.runtime is not None
        return self.runtime.registry

    async def end(self) -> int:
        """Stops it as SIGTERM would, and returns its exit code."""
        self.stop.set()
        assert self.exit_code is not None
        return await self.exit_code


@dataclass(frozen=True)
class Stack:
    """Where a running system answers: gRPC and HTTP for callers, admin ports by service name."""

    grpc: str
    http: str
    model: str
    admin: Mapping[str, str]
    services: Mapping[str, Running] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The HTTP API's base."""
        return f"http://{self.http}"

    async def remembered(self, services: Sequence[str] = FLOW) -> dict[str, int]:
        """How many entries each service's ledger has; those without any are left out."""
        totals = {name: await _total(self.admin[name]) for name in services}
        return {name: total for name, total in totals.items() if total}

    async def wait_idle(self, services: Sequence[str] = FLOW) -> None:
        """Returns once every ledger is empty and every gauge of something open reads 0; fails with what is left.

        Gauges are read of services inside this loop alone. Blocks that are free and cached must be all blocks then.
        """
        left: dict[Any, float] = {}
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while left := {**await self.remembered(services), **self._open_gauges(services)}:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"still there: {left}") from None
        if self.services and "scheduler" in services:
            free, cached = self.metric("scheduler", "blocks_free"), self.metric("scheduler", "blocks_cached")
            assert free + cached == self.metric("scheduler", "blocks_capacity")

    def _open_gauges(self, services: Sequence[str]) -> dict[Any, float]:
        gauges = {
            (sample.name, *sample.labels.values()): sample.value
            for name, running in self.services.items()
            if name in services
            for family in running.registry.collect()
            for sample in family.samples
            if family.type == "gauge" and OPEN_GAUGE.search(family.name)
        }
        assert gauges or not self.services
        return {name: value for name, value in gauges.items() if value}

    def metric(self, service: str, name: str, **labels: str) -> float:
        """One metric's value, for a stack inside this loop."""
        value = self.services[service].registry.get_sample_value(f"tailrace_{service}_{name}", labels)
        assert value is not None, f"{service} has no metric {name} {labels}"
        return value


@asynccontextmanager
async def in_process_stack(
    model: Path,
    *,
    scheduler: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    every: Mapping[str, Any] | None = None,
) -> AsyncIterator[Stack]:
    """All four inside this loop, with the fake engine, on free ports; the mappings are fields for their configurations.

    `every`: for all of them. They are stopped in the order in which requests flow.
    """
    services = {name: Running(name) for name in FLOW}
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            common = {
                "port": 0,
                "admin_port": 0,
                "metrics_port": 0,
                "drain_timeout_s": 20.0,
                "model": model,
                **(every or {}),
            }
            engine = {**common, "engine": "fake", **(scheduler or {})}
            services["scheduler"].start(SchedulerConfig(**engine), SchedulerApp)
            schedulers = (await services["scheduler"].address(),)
            services["detokenizer"].start(DetokenizerConfig(**common, schedulers=schedulers), DetokenizerApp)
            upstream = {"schedulers": schedulers, "detokenizers": (await services["detokenizer"].address(),)}
            services["tokenizer"].start(TokenizerConfig(**{**common, **upstream, **(tokenizer or {})}), TokenizerApp)
            del common["model"]
            front = {"http_port": 0, "tokenizers": (await services["tokenizer"].address(),)}
            services["gateway"].start(GatewayConfig(**{**common, **front, **(gateway or {})}), Gateway)
            await wait_ready(await services["gateway"].address())
        yield await _stack_of(services, model)
    finally:
        for name in FLOW:
            if services[name].exit_code is not None:
                await services[name].end()


async def _stack_of(services: Mapping[str, Running], model: Path) -> Stack:
    app = services["gateway"].app
    assert isinstance(app, Gateway)
    await app.http_started.wait()
    return Stack(
        grpc=await services["gateway"].address(),
        http=f"127.0.0.1:{app.http_port}",
        model=model.name,
        admin={name: f"127.0.0.1:{running.ports.result().admin}" for name, running in services.items()},
        services=services,
    )


@asynccontextmanager
async def process_stack(model: Path, *engine_flags: str, fake_engine: bool = True) -> AsyncIterator[Stack]:
    """All four as child processes, kept by the supervisor of `tailrace up`."""
    http_port, grpc_port = free_ports(2)
    plan = Plan(
        model=model, fake_engine=fake_engine, http_port=http_port, grpc_port=grpc_port, drain_timeout_s=20.0,
        engine_flags=engine_flags,
    )  # fmt: skip
    services = services_of(plan)
    out = io.StringIO()
    supervisor = Supervisor(services, Terminal(out), stop_timeout_s=30.0)
    running = asyncio.create_task(supervisor.run())
    try:
        ready = await asyncio.wait_for(supervisor.wait_all_ready(), START_TIMEOUT_S)
        assert ready, out.getvalue()
        yield _process_stack_of(services, http_port, model)
    finally:
        supervisor.stop()
        await running
    assert not supervisor.lost, out.getvalue()


def _process_stack_of(services: list[Service], http_port: int, model: Path) -> Stack:
    return Stack(
        grpc=services[0].address,
        http=f"127.0.0.1:{http_port}",
        model=model.name,
        admin={service.name: service.admin_address for service in services},
    )


async def _total(admin_address: str) -> int:
    async with grpc.aio.insecure_channel(admin_address) as channel:
        stub = admin_pb2_grpc.InspectionServiceStub(channel)
        answer = await stub.ListRequests(admin_pb2.ListRequestsRequest(page_size=1), timeout=5)
        return answer.total
