"""A load generator's process: `python -m bench.load` with a Run as JSON on standard input; a Window on its output."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from dataclasses import asdict, dataclass
from typing import Literal

import uvloop

from bench import grpc_load, sse_load
from bench.meter import Meter, Window

Transport = Literal["grpc", "sse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: `streams` long answers from the server at `address`, whose processes are `pids`, for `window_s`."""

    transport: Transport
    address: str
    model: str
    streams: int
    window_s: float
    pace_ms: float
    pids: tuple[int, ...]


async def run_elsewhere(run: Run, timeout_s: float) -> Window:
    """Makes the run in a process of its own. Raises RuntimeError with what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.load",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, said = await asyncio.wait_for(process.communicate(json.dumps(asdict(run)).encode()), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        why = said.decode().strip().splitlines()[-1:]
        raise RuntimeError(f"{run.transport}, {run.streams} streams: {why}")
    return Window(**json.loads(out))


async def _run(run: Run, meter: Meter) -> None:
    sampling = asyncio.create_task(meter.sample())
    if run.transport == "grpc":
        await grpc_load.run(run.address, meter)
    else:
        await sse_load.run(run.address, run.model, meter)
    await sampling


def main() -> None:
    """Reads a Run, makes it, writes the Window."""
    run = Run(**json.load(sys.stdin))
    gc.disable()  # a pause of the client's own would count as the server's latency
    meter = Meter(run.streams, run.pids, run.window_s)
    uvloop.run(_run(run, meter))
    window = meter.window(run.pace_ms)
    if window is None:
        sys.exit("the streams ended before there was a steady window")
    json.dump(window.as_json(), sys.stdout)


if __name__ == "__main__":
    main()
