"""What the return path costs alone: CPU per token in each of our processes, tokens/s, and the latency it adds.

    python -m bench.return_path [--quick] [--transport grpc|sse] [--streams 1,256] [--pace-ms 20,0] [--runs 3]

The four services run as processes with the fake engine, which gives one token a step and sequence, either on the wall
clock's grid of 20 ms (paced) or as fast as it can (flat out). Clients run in one process of their own: gRPC streams on
one connection, or SSE chat completions with a connection each. Each case has a stack of its own and its figures are
the median of several runs; each run counts its steady window alone (see `meter`). CPU is utime + stime of
/proc/PID/stat. Latency is a delta's arrival modulo the pace, so it includes everything from the end of the engine's
step to the client's own read; it means nothing flat out, nor where the machine can't keep up with the pace, and is
null there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.load import Run, Transport, run_elsewhere
from bench.machine import machine
from bench.meter import FAKE_IDS, Window
from bench.services_under_test import Stack, running
from cli.model_source import model_directory

SERVICES = ("scheduler", "detokenizer", "tokenizer", "gateway")
OUT = Path("build/bench/return-path.json")
KEEPS_UP = 0.95
TABLE_WIDTH_MIN = 110
RUN_TIMEOUT_S = 120.0
# Room for 1,024 streams of the longest answer, so that nothing waits for blocks or a place.
ENGINE_FLAGS = ("--max-running", "1024", "--max-step-tokens", "2048", "--kv-tokens", str(1 << 23), *FAKE_IDS)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    transport: Transport
    streams: int
    pace_ms: float

    def __str__(self) -> str:
        return f"{self.transport}, {self.streams} streams, {f'{self.pace_ms:g} ms' if self.pace_ms else 'flat out'}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how often each case is measured."""

    runs: int
    window_s: float


def main() -> int:
    """Measures, prints the table and writes the JSON file."""
    options = _parser().parse_args()
    runs = options.runs or (1 if options.quick else 3)
    effort = Effort(runs, window_s=1.5 if options.quick else 4.0)
    cases = [
        Case(transport, streams, pace_ms)
        for pace_ms in options.pace_ms
        for transport in options.transport
        for streams in options.streams
    ]
    before = machine()
    rows = asyncio.run(_measure(cases, effort))
    console = Console()
    console.width = max(console.width, TABLE_WIDTH_MIN)  # a log has no width of its own
    console.print(_table(rows))
    _write(rows, before)
    return 0


async def _measure(cases: Sequence[Case], effort: Effort) -> list[Row]:
    rows = []
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(cases) * effort.runs)
        for case in cases:
            progress.update(bar, description=f"{case}: starting")
            # A stack of its own for each: what one case leaves warm or grown must not be measured with the next.
            async with running(model_directory(None), *ENGINE_FLAGS, "--fake-pace-ms", str(case.pace_ms)) as stack:
                progress.update(bar, description=str(case))
                windows = []
                for _ in range(effort.runs):
                    windows.append(await _window(stack, case, effort))
                    progress.advance(bar)
            rows.append(_row(case, windows))
    return rows


async def _window(stack: Stack, case: Case, effort: Effort) -> Window:
    """One run, and the wait until the services have forgotten it."""
    run = Run(
        transport=case.transport, address=stack.grpc if case.transport == "grpc" else stack.http, model=stack.model,
        streams=case.streams, window_s=effort.window_s, pace_ms=case.pace_ms,
        pids=tuple(stack.pids[name] for name in SERVICES),
    )  # fmt: skip
    try:
        return await run_elsewhere(run, RUN_TIMEOUT_S)
    finally:
        await stack.wait_idle()


def _row(case: Case, windows: Sequence[Window]) -> Row:
    tokens_per_s = median(w.tokens / w.seconds for w in windows)
    cpu = {
        name: round(median(w.cpu_s[index] / w.tokens for w in windows) * 1e6, 2) for index, name in enumerate(SERVICES)
    }
    cpu["total"] = round(median(sum(w.cpu_s) / w.tokens for w in windows) * 1e6, 2)
    keeps_up = bool(case.pace_ms) and tokens_per_s >= KEEPS_UP * case.streams / case.pace_ms * 1000
    percentiles = [round(median(values), 2) for values in zip(*(w.latencies_ms for w in windows), strict=True)]
    p50, p99 = percentiles if keeps_up else (None, None)
    return {
        "transport": case.transport,
        "streams": case.streams,
        "pace_ms": case.pace_ms,
        "tokens_per_s": round(tokens_per_s, 1),
        "cpu_us_per_token": cpu,
        "latency_ms": {"p50": p50, "p99": p99},
    }


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="the return path alone (µs of CPU per token; ms of added latency)")
    for heading in ("transport", "streams", "pace", "tokens/s", *SERVICES, "total", "p50", "p99"):
        table.add_column(heading, justify="left" if heading == "transport" else "right")
    for row in rows:
        cpu, latency = row["cpu_us_per_token"], row["latency_ms"]
        table.add_row(
            row["transport"], str(row["streams"]), f"{row['pace_ms']:g} ms" if row["pace_ms"] else "–",
            f"{row['tokens_per_s']:,.0f}", *(f"{cpu[name]:.1f}" for name in (*SERVICES, "total")),
            *("–" if latency[name] is None else f"{latency[name]:.2f}" for name in ("p50", "p99")),
        )  # fmt: skip
    return table


def _write(rows: Sequence[Row], before: dict[str, object]) -> None:
    document = {
        "rows": rows,
        "machine": before,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m bench.return_path " + " ".join(sys.argv[1:]),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to {OUT}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.return_path", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short run of each case")
    parser.add_argument("--runs", type=int, metavar="N", help="runs per case (default: 3; quick: 1)")
    parser.add_argument("--transport", type=_list_of(str), default=get_args(Transport), metavar="grpc,sse")
    parser.add_argument("--streams", type=_list_of(int), default=(1, 32, 256, 1024), metavar="N,…")
    parser.add_argument("--pace-ms", type=_list_of(float), default=(20.0, 0.0), metavar="MS,…", help="0 is flat out")
    return parser


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
