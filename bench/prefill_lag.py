"""How long a scheduler's event loop is kept waiting while it prefills a long prompt with the real model.

    python -m bench.prefill_lag [--tokens 2048] [--prompts 5]

Beside each prompt the scheduler's health is asked over and over, and every answer's time is taken: what an answer takes
beyond an idle scheduler's is the loop's lag, seen from outside. The aim is a lag below 20 ms at 2,048 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.services_under_test import Stack, running
from cli.model_source import model_directory
from tailrace.client import Client

IDLE_S = 2.0
AIM_MS = 20.0


def main() -> int:
    """Prints the percentiles; exit code 1 when the worst lag is above the aim."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefill_lag", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of each prompt (default: 2048)")
    parser.add_argument("--prompts", type=int, default=5, help="prompts, one after the other (default: 5)")
    options = parser.parse_args()
    return asyncio.run(_measure(options.tokens, options.prompts))


async def _measure(tokens: int, prompts: int) -> int:
    async with running(model_directory(None), fake_engine=False) as stack, Client(stack.grpc) as client:
        idle_ms = await _round_trips_ms(stack, asyncio.create_task(asyncio.sleep(IDLE_S)))
        busy_ms: list[float] = []
        for number in range(prompts):
            prompt = [17 + (number * 7919 + position * 31) % 40_000 for position in range(tokens)]
            busy_ms += await _round_trips_ms(stack, asyncio.create_task(client.generate(prompt, max_tokens=1).text()))
    lag_ms = np.subtract(busy_ms, np.median(idle_ms))
    p50, p99 = np.percentile(lag_ms, [50, 99])
    print(f"idle round trip {np.median(idle_ms):.2f} ms; {len(busy_ms)} round trips during {prompts} × {tokens} tokens")
    print(f"lag p50 {p50:.2f} ms, p99 {p99:.2f} ms, worst {lag_ms.max():.2f} ms (aim: below {AIM_MS:g} ms)")
    return 0 if lag_ms.max() < AIM_MS else 1


async def _round_trips_ms(stack: Stack, during: asyncio.Task[object]) -> list[float]:
    """Health checks at the scheduler's admin port (the same loop), one after the other, while a task runs."""
    taken: list[float] = []
    async with grpc.aio.insecure_channel(stack.admin["scheduler"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while not during.done():
            started = time.perf_counter()
            await stub.Check(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]  # a gap in its stub
            taken.append((time.perf_counter() - started) * 1000)
            await asyncio.sleep(0.001)
    await during
    return taken[1:]


if __name__ == "__main__":
    sys.exit(main())
