"""The four services as processes of their own, with the fake engine, for as long as a measurement lasts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import grpc.aio

from bench.meter import cpu_s
from cli.readiness import wait_ready
from cli.stack import Plan, Service, free_ports, services_of
from tailrace.v1 import admin_pb2, admin_pb2_grpc

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
SETTLE_ROUND_S = 1.0
SETTLE_ROUNDS_MAX = 20
SETTLED_SHARE = 0.1
"""Of one core, for all four together."""
IDLE_TIMEOUT_S = 60.0
POLL_S = 0.1
LOG_DIRECTORY = Path("build/bench")


@dataclass(frozen=True, slots=True)
class Stack:
    """Where it answers, and its processes, with where each of them does, by service name."""

    grpc: str
    http: str
    model: str
    pids: dict[str, int]
    addresses: dict[str, str]
    admin: dict[str, str]
    metrics_ports: dict[str, int]

    async def wait_idle(self) -> None:
        """Returns once no service remembers a request. Raises TimeoutError."""
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            for address in self.admin.values():
                while await _remembered(address):  # noqa: ASYNC110  # a ledger can only be asked
                    await asyncio.sleep(POLL_S)


@asynccontextmanager
async def running(
    model: Path, *engine_flags: str, fake_engine: bool = True, tracing_endpoint: str = ""
) -> AsyncIterator[Stack]:
    """Starts all four, waits until they take requests, and stops them. Logs go to files in build/bench."""
    http_port, grpc_port = free_ports(2)
    plan = Plan(
        model=model, fake_engine=fake_engine, http_port=http_port, grpc_port=grpc_port, drain_timeout_s=5.0,
        log_level="warning", tracing_endpoint=tracing_endpoint, engine_flags=engine_flags,
    )  # fmt: skip
    services = services_of(plan)
    processes: list[asyncio.subprocess.Process] = []
    try:
        for service in services:
            processes.append(await _start(service))  # noqa: PERF401  # what was started must be known if the next fails
        pids = {service.name: process.pid for service, process in zip(services, processes, strict=True)}
        addresses = {service.name: service.address for service in services}
        admin = {service.name: service.admin_address for service in services}
        await asyncio.wait_for(asyncio.gather(*(wait_ready(service.address) for service in services)), START_TIMEOUT_S)
        await _settle(pids)
        metrics_ports = {service.name: service.metrics_port for service in services}
        yield Stack(
            f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}", model.name, pids, addresses, admin, metrics_ports
        )
    finally:
        for process in processes:
            await _stop(process)


async def _settle(pids: Mapping[str, int]) -> None:
    """Waits, for a while at most, until what they do in the background after their start is done."""
    for _ in range(SETTLE_ROUNDS_MAX):
        before = sum(map(cpu_s, pids.values()))
        await asyncio.sleep(SETTLE_ROUND_S)
        if sum(map(cpu_s, pids.values())) - before <= SETTLED_SHARE * SETTLE_ROUND_S:
            return


async def _start(service: Service) -> asyncio.subprocess.Process:
    with _log_of(service) as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", service.module, *service.flags,
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "TAILRACE_PARENT_PID": str(os.getpid())},
        )  # fmt: skip


async def _remembered(admin_address: str) -> int:
    async with grpc.aio.insecure_channel(admin_address) as channel:
        stub = admin_pb2_grpc.InspectionServiceStub(channel)
        request = admin_pb2.ListRequestsRequest(page_size=1)
        answer: admin_pb2.ListRequestsResponse = await stub.ListRequests(request, timeout=IDLE_TIMEOUT_S)
        return answer.total


def _log_of(service: Service) -> BinaryIO:
    LOG_DIRECTORY.mkdir(parents=True, exist_ok=True)
    return (LOG_DIRECTORY / f"{service.name}.log").open("ab")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
