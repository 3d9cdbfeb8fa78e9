"""What tracing costs when it is on: CPU per token of the return path with every request traced, and without tracing.

    python -m bench.tracing [--runs 7] [--streams 256] [--pace-ms 20] [--window-s 10]
    python -m bench.tracing --show        one request's trace, from a run with the embedded model

Two stacks run side by side and take turns: off, on, and again; the figure is the ratio of the two medians. CPU is
utime + stime of the four services, their exporters' threads included; the collector's own is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import aiohttp

from bench.load import Run, run_elsewhere
from bench.machine import machine
from bench.meter import FAKE_IDS
from bench.services_under_test import Stack, running
from cli.model_source import model_directory
from tests.span_collector import as_tree, span_collector

OUT = Path("build/bench/tracing.json")
RUN_TIMEOUT_S = 180.0
ENGINE_FLAGS = ("--max-running", "1024", "--max-step-tokens", "2048", "--kv-tokens", str(1 << 23), *FAKE_IDS)
QUESTION = "Name three rivers."
SPANS_OF_A_REQUEST = 18


def main() -> int:
    """Measures, prints and writes the JSON file; or shows a trace."""
    options = _parser().parse_args()
    if options.show:
        print(asyncio.run(_trace()))
        return 0
    before = machine()
    off, on, spans = asyncio.run(_measure(options))
    growth = (median(on) / median(off) - 1) * 100
    print(f"CPU per token, off     {median(off):7.2f} µs   ({min(off):.2f} to {max(off):.2f}, {len(off)} runs)")
    print(f"CPU per token, on      {median(on):7.2f} µs   ({min(on):.2f} to {max(on):.2f}, {len(on)} runs)")
    print(f"growth                 {growth:7.2f} %    {spans} spans")
    document = {
        "cpu_us_per_token": {"off": off, "on": on},
        "growth_percent": round(growth, 2),
        "spans": spans,
        "machine": before,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m bench.tracing " + " ".join(sys.argv[1:]),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to {OUT}")
    return 0


async def _measure(options: argparse.Namespace) -> tuple[list[float], list[float], int]:
    off: list[float] = []
    on: list[float] = []
    model, flags = model_directory(None), (*ENGINE_FLAGS, "--fake-pace-ms", str(options.pace_ms))
    async with (
        span_collector() as collector,
        running(model, *flags) as plain,
        running(model, *flags, tracing_endpoint=collector.endpoint) as traced,
    ):
        for stack in (plain, traced):
            await _us_per_token(stack, options)  # what the first run makes warm is nobody's cost
        for _ in range(options.runs):
            off.append(await _us_per_token(plain, options))
            on.append(await _us_per_token(traced, options))
        return off, on, len(collector.spans)


async def _us_per_token(stack: Stack, options: argparse.Namespace) -> float:
    run = Run(
        transport="grpc", address=stack.grpc, model=stack.model, streams=options.streams, window_s=options.window_s,
        pace_ms=options.pace_ms, pids=tuple(stack.pids.values()),
    )  # fmt: skip
    try:
        window = await run_elsewhere(run, RUN_TIMEOUT_S)
    finally:
        await stack.wait_idle()
    return round(sum(window.cpu_s) / window.tokens * 1e6, 3)


async def _trace() -> str:
    """The second of two equal requests, whose prompt is cached and whose process is warm."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, "temperature": 0, "stream": True}
    async with span_collector() as collector:
        async with (
            running(model_directory(None), fake_engine=False, tracing_endpoint=collector.endpoint) as stack,
            aiohttp.ClientSession() as session,
        ):
            for _ in range(2):
                async with session.post(f"http://{stack.http}/v1/chat/completions", json=body) as response:
                    await response.read()
        spans = await collector.wait(lambda spans: len(spans) >= 2 * SPANS_OF_A_REQUEST)
    second = max(spans, key=lambda span: span.start_ns).trace_id
    return as_tree([span for span in spans if span.trace_id == second])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tracing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="of each kind (default: 7)")
    parser.add_argument("--streams", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument("--pace-ms", type=float, default=20.0, metavar="MS", help="0 is flat out (default: 20)")
    parser.add_argument("--window-s", type=float, default=10.0, metavar="SECONDS", help="of a run (default: 10)")
    parser.add_argument("--show", action="store_true", help="one request's trace, and nothing measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
