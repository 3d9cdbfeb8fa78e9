"""What being looked at costs: CPU per token of the return path with metrics scraped and inspection polled, and without.

    python -m bench.observation [--runs 7] [--streams 256] [--pace-ms 20] [--window-s 10]

One stack for all runs, which alternate: unobserved, observed, and again; the figure is the ratio of the two medians.
Observed, each process's /metrics is read each second, and each admin port is asked as `tailrace top` asks it. CPU is
utime + stime of the four services; the observer's own is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import aiohttp

from bench.load import Run, run_elsewhere
from bench.machine import machine
from bench.meter import FAKE_IDS, Window
from bench.services_under_test import Stack, running
from cli.loop import Loop
from cli.model_source import model_directory
from cli.top import ASKED

OUT = "build/bench/observation-{streams}.json"
INTERVAL_S = 1.0
RUN_TIMEOUT_S = 180.0
GOAL_PERCENT = 3.0
ENGINE_FLAGS = ("--max-running", "1024", "--max-step-tokens", "2048", "--kv-tokens", str(1 << 23), *FAKE_IDS)


def main() -> int:
    """Measures, prints and writes the JSON file; exit code 1 when it costs more than the goal."""
    options = _parser().parse_args()
    before = machine()
    plain, observed = asyncio.run(_measure(options))
    growth = (median(observed) / median(plain) - 1) * 100
    print(f"CPU per token, unobserved  {median(plain):7.2f} µs   ({_spread(plain)})")
    print(f"CPU per token, observed    {median(observed):7.2f} µs   ({_spread(observed)})")
    print(f"growth                     {growth:7.2f} %    goal: at most {GOAL_PERCENT:g} %")
    document = {
        "cpu_us_per_token": {"unobserved": plain, "observed": observed},
        "growth_percent": round(growth, 2),
        "machine": before,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m bench.observation " + " ".join(sys.argv[1:]),
    }
    out = Path(OUT.format(streams=options.streams))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to {out}")
    return 0 if growth <= GOAL_PERCENT else 1


async def _measure(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    plain: list[float] = []
    observed: list[float] = []
    async with running(model_directory(None), *ENGINE_FLAGS, "--fake-pace-ms", str(options.pace_ms)) as stack:
        await _window(stack, options)  # what the first run makes warm is nobody's cost
        for _ in range(options.runs):
            plain.append(_us_per_token(await _window(stack, options)))
            async with _observer(stack):
                observed.append(_us_per_token(await _window(stack, options)))
    return plain, observed


async def _window(stack: Stack, options: argparse.Namespace) -> Window:
    """One run, and the wait until the services have forgotten it."""
    run = Run(
        transport="grpc", address=stack.grpc, model=stack.model, streams=options.streams, window_s=options.window_s,
        pace_ms=options.pace_ms, pids=tuple(stack.pids.values()),
    )  # fmt: skip
    try:
        return await run_elsewhere(run, RUN_TIMEOUT_S)
    finally:
        await stack.wait_idle()


@asynccontextmanager
async def _observer(stack: Stack) -> AsyncIterator[None]:
    """Meanwhile, everything is scraped and asked each second."""

    async def observe() -> None:
        async with Loop(list(stack.admin.items())) as loop, aiohttp.ClientSession() as session:
            while True:
                await asyncio.gather(
                    loop.look(ASKED), *(_scrape(session, port) for port in stack.metrics_ports.values())
                )
                await asyncio.sleep(INTERVAL_S)

    task = asyncio.create_task(observe())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and task.exception() is not None:
        raise RuntimeError("the observer failed") from task.exception()


async def _scrape(session: aiohttp.ClientSession, port: int) -> None:
    async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
        await response.read()


def _us_per_token(window: Window) -> float:
    return round(sum(window.cpu_s) / window.tokens * 1e6, 3)


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}, {len(values)} runs"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.observation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="of each kind (default: 7)")
    parser.add_argument("--streams", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument("--pace-ms", type=float, default=20.0, metavar="MS", help="0 is flat out (default: 20)")
    parser.add_argument("--window-s", type=float, default=10.0, metavar="SECONDS", help="of a run (default: 10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
