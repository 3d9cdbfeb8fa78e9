"""Our own stack as systems to be measured: gRPC and HTTP, the same processes behind both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

from bench.services_under_test import running
from bench.serving.comparison import System
from bench.serving.limits import BITS
from bench.serving.targets import GrpcTarget, HttpTarget
from services.scheduler.engine.cpu_engine import CpuEngineConfig, stored_format
from services.scheduler.model.config_json import read_config

NAME = "Tailrace"


async def our_systems(stack: AsyncExitStack, model: Path, flags: Sequence[str]) -> list[System]:
    """Starts the four services with the real engine; they end with `stack`."""
    weights = weights_of(flags, model)
    ours = await stack.enter_async_context(running(model, *flags, fake_engine=False))
    http = await stack.enter_async_context(HttpTarget(f"http://{ours.http}", ours.model))
    grpc = await stack.enter_async_context(GrpcTarget(ours.grpc))
    pids = tuple(ours.pids.values())
    bits = BITS.get(weights)
    return [System(f"{NAME} gRPC", weights, grpc, pids, bits), System(f"{NAME} HTTP", weights, http, pids, bits)]


def weights_of(flags: Sequence[str], model: Path) -> str:
    """The format that these flags of the scheduler ask for; where they don't, what it takes for the model on a CPU."""
    asked = ["auto", *(after for flag, after in pairwise(flags) if flag == "--weights-format")]
    config = CpuEngineConfig(model=model, weights_format=asked[-1])
    return stored_format(config, read_config(model)).name.lower()
