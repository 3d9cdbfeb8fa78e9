"""How long the engine goes on for a caller who has left.

    python -m bench.cancels [--cancels 500] [--pace-ms 20]

A gRPC caller drops its call at a random moment, an HTTP caller closes its connection; from then on the scheduler is
asked over and over whether it still remembers anything. Until it says no is the whole way: the caller's transport,
gateway, tokenizer, scheduler, the end of the running step, and the release. The aim is a 99th percentile below 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import grpc.aio
import numpy as np
from rich.progress import track

from bench.services_under_test import Stack, running
from cli.model_source import model_directory
from tailrace.client import Client
from tailrace.v1 import admin_pb2, admin_pb2_grpc

AIM_MS = 50.0
STAY_S_MAX = 0.1
TOKENS = 4000


def main() -> int:
    """Prints the percentiles; exit code 1 when one is above the aim."""
    parser = argparse.ArgumentParser(prog="python -m bench.cancels", description=__doc__)
    parser.add_argument("--cancels", type=int, default=500, help="callers who leave, per transport (default: 500)")
    parser.add_argument("--pace-ms", type=float, default=20.0, help="length of an engine step (default: 20)")
    options = parser.parse_args()
    return asyncio.run(_measure(options.cancels, options.pace_ms))


async def _measure(cancels: int, pace_ms: float) -> int:
    async with running(model_directory(None), "--fake-pace-ms", str(pace_ms)) as stack:
        leavers = [("grpc", _leave_grpc), ("http", _leave_http)]
        worst_ms = [await _measure_one(stack, name, leave, cancels) for name, leave in leavers]
    return 0 if max(worst_ms) < AIM_MS else 1


@dataclass(frozen=True, slots=True)
class _Caller:
    client: Client
    session: aiohttp.ClientSession
    stack: Stack


Leave = Callable[[_Caller, float], Awaitable[None]]
"""Opens a request, stays for some seconds, and leaves."""


async def _measure_one(stack: Stack, name: str, leave: Leave, cancels: int) -> float:
    taken_ms: list[float] = []
    async with (
        Client(stack.grpc) as client,
        aiohttp.ClientSession() as session,
        grpc.aio.insecure_channel(stack.admin["scheduler"]) as channel,
    ):
        inspection = admin_pb2_grpc.InspectionServiceStub(channel)
        caller = _Caller(client, session, stack)
        for number in track(range(cancels), name, transient=True):
            await leave(caller, random.Random(number).uniform(0, STAY_S_MAX))
            left_at = time.perf_counter()
            await _forgotten(inspection)
            taken_ms.append((time.perf_counter() - left_at) * 1000)
    p50, p99 = np.percentile(taken_ms, [50, 99])
    print(
        f"{name}: {cancels} callers left; forgotten after p50 {p50:.1f} ms, p99 {p99:.1f} ms (aim: below {AIM_MS:g} ms)"
    )
    return float(p99)


async def _forgotten(inspection: admin_pb2_grpc.InspectionServiceAsyncStub) -> None:
    """Returns when the scheduler remembers nothing, twice: a request may just have been on its way."""
    silent = 0
    while silent < 2:
        answer = await inspection.ListRequests(admin_pb2.ListRequestsRequest(page_size=1))
        silent = 0 if answer.total else silent + 1


async def _leave_grpc(caller: _Caller, stay_s: float) -> None:
    async with caller.client.generate("A caller who leaves", max_tokens=TOKENS, ignore_eos=True) as stream:
        await _stay(stream.whole(), stay_s)


async def _leave_http(caller: _Caller, stay_s: float) -> None:
    body = {"prompt": "A caller who leaves", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    async with caller.session.post(f"http://{caller.stack.http}/v1/completions", json=body) as response:
        await _stay(response.read(), stay_s)
        response.close()


async def _stay(reading: Awaitable[object], stay_s: float) -> None:
    try:
        await asyncio.wait_for(reading, stay_s)
    except TimeoutError:
        return
    raise RuntimeError("the answer ended before its caller left")


if __name__ == "__main__":
    sys.exit(main())
