"""Our own stack as systems to be measured: gRPC and HTTP, the same processes behind both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench.services_under_test import running
from bench.serving.comparison import System
from bench.serving.targets import GrpcTarget, HttpTarget

NAME = "Tailrace"


async def our_systems(
    stack: AsyncExitStack, model: Path, flags: Sequence[str], *, weights: str = "default"
) -> list[System]:
    """Starts the four services with the real engine; they end with `stack`."""
    ours = await stack.enter_async_context(running(model, *flags, fake_engine=False))
    http = await stack.enter_async_context(HttpTarget(f"http://{ours.http}", ours.model))
    grpc = await stack.enter_async_context(GrpcTarget(ours.grpc))
    pids = tuple(ours.pids.values())
    return [System(f"{NAME} gRPC", weights, grpc, pids), System(f"{NAME} HTTP", weights, http, pids)]
