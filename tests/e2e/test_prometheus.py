"""Rules and dashboards against a real Prometheus that scrapes a live, busy stack."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.prometheus import scraping, series
from deploy.dashboards import FOLDER
from tailrace.client import Client
from tests.stack import FLOW, in_process_stack

DEPLOY = Path(__file__).parent.parent.parent / "deploy/prometheus"
SCRAPES = 4

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not installed (Debian: prometheus)",
)


async def promtool(*arguments: str) -> tuple[int | None, str]:
    """Its exit code, and what it says."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "promtool", *arguments, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    code, said = await promtool("test", "rules", str(DEPLOY / "tests/tailrace.yml"))
    assert code == 0, said


async def test_the_configuration_and_its_rules_are_right() -> None:
    code, said = await promtool("check", "config", str(DEPLOY / "prometheus.yml"))
    assert code == 0, said


async def query(session: aiohttp.ClientSession, expression: str) -> list[dict[str, Any]]:
    """An expression's series now; [] while Prometheus is starting."""
    return await series(session, "query", query=expression)


async def until_scraped(session: aiohttp.ClientSession) -> None:
    """Until there is enough for every rate, and the rules have been evaluated."""
    async with asyncio.timeout(60):
        for expression in (
            f"min(count_over_time(up[1m])) >= {SCRAPES}",
            "count(up == 1) == 4",
            "tailrace:output_tokens:rate1m > 0",
            'tailrace:requests:rate1m{reason="LENGTH"} > 0',
        ):
            while not await query(session, expression):  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def test_every_panels_expression_gives_series_on_a_live_stack(model_directory: Path, tmp_path: Path) -> None:
    targets = [
        (panel["title"], target["expr"])
        for path in sorted(FOLDER.glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    async with (
        in_process_stack(model_directory, scheduler={"fake_pace_ms": 5.0}) as stack,
        scraping({name: stack.services[name].ports.result().metrics for name in FLOW}, tmp_path) as session,
        Client(stack.grpc) as client,
        asyncio.TaskGroup() as tasks,
    ):
        load = [tasks.create_task(_ask(client, number)) for number in range(8)]
        await until_scraped(session)
        empty = [f"{title}: {expression}" for title, expression in targets if not await query(session, expression)]
        alerts = await query(session, 'ALERTS{alertstate="firing"}')
        for task in load:
            task.cancel()
    assert not empty
    assert not alerts, "a healthy stack rings no bell"


async def _ask(client: Client, number: int) -> None:
    while True:
        await client.generate(f"hello {number}", max_tokens=60, ignore_eos=True).whole()
