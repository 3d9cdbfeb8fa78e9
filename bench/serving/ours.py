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

NAME = "Tailrace"


async def our_systems(stack: AsyncExitStack, model: Path, flags: Sequence[str]) -> list[System]:
    """Starts the four services with the real engine; they end with `stack`."""
    weights = weights_of(flags)
    ours = await stack.enter_async_context(running(model, *flags, fake_engine=False))
    http = await stack.enter_async_context(HttpTarget(f"http://{ours.http}", ours.model))
    grpc = await stack.enter_async_context(GrpcTarget(ours.grpc))
    pids = tuple(ours.pids.values())
    bits = BITS.get(weights)
    return [System(f"{NAME} gRPC", weights, grpc, pids, bits), System(f"{NAME} HTTP", weights, http, pids, bits)]


def weights_of(flags: Sequence[str]) -> str:
    """The format that these flags of the scheduler ask for; where they don't, a CPU's default."""
    asked = [after for flag, after in pairwise(flags) if flag == "--weights-format"]
    return asked[-1] if asked and asked[-1] != "auto" else "int8"
