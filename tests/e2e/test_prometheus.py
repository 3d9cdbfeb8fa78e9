"""Rules and dashboards against a real Prometheus that scrapes a live, busy stack."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.stack import free_ports
from deploy.dashboards import FOLDER
from tailrace.client import Client
from tests.stack import FLOW, Stack, in_process_stack

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


@asynccontextmanager
async def prometheus(stack: Stack, folder: Path) -> AsyncIterator[str]:
    """Its address, while it scrapes the stack each second with the rules of `deploy`."""
    [port] = free_ports(1)
    ports = {name: stack.services[name].ports.result().metrics for name in FLOW}
    jobs = [{"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for name, port in ports.items()]
    intervals = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    rules = [str(DEPLOY / "rules/*.yml")]
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": intervals, "rule_files": rules, "scrape_configs": jobs}))
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def query(session: aiohttp.ClientSession, expression: str) -> list[dict[str, Any]]:
    """An expression's series now; [] while Prometheus is starting."""
    try:
        async with session.get("/api/v1/query", params={"query": expression}) as response:
            answer = await response.json()
    except aiohttp.ClientError:
        return []
    assert answer["status"] == "success", f"{expression}: {answer}"
    series: list[dict[str, Any]] = answer["data"]["result"]
    return series


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
        prometheus(stack, tmp_path) as url,
        Client(stack.grpc) as client,
        aiohttp.ClientSession(url) as session,
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
