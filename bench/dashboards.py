"""Draws what Grafana's dashboards show, from a real run through a real Prometheus, to docs/pictures.

    python -m bench.dashboards [--seconds 240]

Callers come and go in waves; the detokenizer is stopped for moments, some callers leave and some ask for too much, so
that there is something to see. The engine is the fake one: what is drawn is the loop. Needs `prometheus`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path

import aiohttp

from bench.charts import Chart, Line, page
from bench.prometheus import scraping, series
from bench.services_under_test import Stack, running
from cli.model_source import model_directory
from deploy.dashboards import DASHBOARDS, Dashboard, Panel
from tailrace.client import Client, ClientError

OUT = Path("docs/pictures")
FLAGS = ("--fake-pace-ms", "20", "--fake-prefill-us-per-token", "40", "--kv-tokens", "16384", "--max-running", "24")
CALLERS_MAX = 28
PAUSES, PAUSE_S = 3, 1.7
SETTLED_S = 20
STEP_S = 1


def main() -> None:
    """Runs, and writes a file per dashboard."""
    parser = argparse.ArgumentParser(prog="python -m bench.dashboards", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, metavar="SECONDS", help="of the run (default: 240)")
    pictures = asyncio.run(_run(parser.parse_args().seconds))
    OUT.mkdir(parents=True, exist_ok=True)
    for uid, picture in pictures.items():
        (OUT / f"{uid.replace('tailrace-', 'dashboard-')}.svg").write_text(picture, encoding="utf-8")


async def _run(seconds: float) -> dict[str, str]:
    """The run's pictures, by dashboard."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            running(model_directory(None), *FLAGS) as stack,
            scraping(stack.metrics_ports, Path(folder)) as session,
        ):
            began = time.time()
            await _load(stack, seconds)
            return {board.uid: await _picture(session, board, began + SETTLED_S, time.time()) for board in DASHBOARDS}


async def _picture(session: aiohttp.ClientSession, dashboard: Dashboard, start: float, end: float) -> str:
    charts = [await _chart(session, panel, start, end) for panel in dashboard.panels]
    note = "a run with the fake engine; halfway the detokenizer was stopped for a moment, three times"
    return page(dashboard.title, note, charts, end - start)


async def _load(stack: Stack, seconds: float) -> None:
    """More and more callers, then fewer; halfway moments of silence."""
    ends = time.monotonic() + seconds
    async with Client(stack.grpc) as client, asyncio.TaskGroup() as tasks:
        for number in range(CALLERS_MAX):
            comes = (number % (CALLERS_MAX // 2)) / (CALLERS_MAX // 2) * 0.3 * seconds
            leaves = ends - (number / CALLERS_MAX) * 0.3 * seconds
            tasks.create_task(_call(client, random.Random(number), comes, leaves))
        await asyncio.sleep(seconds / 2)
        for _ in range(PAUSES):
            os.kill(stack.pids["detokenizer"], signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            os.kill(stack.pids["detokenizer"], signal.SIGCONT)
            await asyncio.sleep(PAUSE_S)


async def _call(client: Client, chance: random.Random, comes_s: float, leaves: float) -> None:
    """One caller: asks again and again, and now and then leaves early or asks for what can't be had."""
    await asyncio.sleep(comes_s)
    shared = "You are a patient teacher who explains how water drives a wheel. " * 6
    while time.monotonic() < leaves:
        prompt = shared + f"Question {chance.randrange(1000)}. " * chance.randrange(1, 60)
        tokens = chance.choice((40, 80, 160, 320))
        try:
            async with client.generate(
                prompt, max_tokens=tokens, ignore_eos=chance.random() < 0.7, timeout_s=chance.choice((60.0, 60.0, 5.0))
            ) as stream:
                left = chance.randrange(20, tokens) if chance.random() < 0.15 else tokens + 1
                async for _ in stream:
                    left -= 1
                    if not left:
                        break
        except ClientError:
            await asyncio.sleep(0.5)
        await asyncio.sleep(chance.random())


async def _chart(session: aiohttp.ClientSession, panel: Panel, start: float, end: float) -> Chart:
    lines: list[Line] = []
    for expression, legend in panel.series:
        found = await series(session, "query_range", query=expression, start=str(start), end=str(end), step=str(STEP_S))
        lines += [
            Line(_named(legend, one["metric"]), [(float(at) - start, float(value)) for at, value in one["values"]])
            for one in found
        ]
    return Chart(panel.title, panel.unit, lines)


def _named(legend: str, labels: dict[str, str]) -> str:
    """As Grafana fills a legend in: a label that is not there leaves nothing."""
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)
    return filled.replace("127.0.0.1:", "port ").strip() or "none"


if __name__ == "__main__":
    main()
