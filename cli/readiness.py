"""Waiting until a service takes requests, by the standard health service."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
]
RETRY_PAUSE_S = 0.1


async def wait_ready(address: str) -> None:
    """Returns once the process at `host:port` says SERVING, however long it takes to come up."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        while True:
            if await _watch_once(channel):
                return
            await asyncio.sleep(RETRY_PAUSE_S)  # the process went away; a new one will be watched


async def _watch_once(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)  # type: ignore[attr-defined]  # a gap in its stub
    try:
        async for answer in call:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
    except grpc.aio.AioRpcError:
        pass
    finally:
        call.cancel()
    return False
