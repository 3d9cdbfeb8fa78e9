"""A Prometheus of one's own that scrapes a stack each second, with the rules of `deploy`. Needs `prometheus`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from cli.stack import free_ports

RULES = Path(__file__).parent.parent / "deploy/prometheus/rules"


@asynccontextmanager
async def scraping(metrics_ports: Mapping[str, int], folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that asks it, while it scrapes these ports, by job; its files lie in `folder`."""
    [own_port] = free_ports(1)
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in metrics_ports.items()
    ]
    intervals = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": intervals, "rule_files": [f"{RULES}/*.yml"], "scrape_configs": jobs}))
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own_port}", "--log.level=error",
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{own_port}") as session:
            yield session
    finally:
        process.terminate()
        await process.wait()


async def series(session: aiohttp.ClientSession, path: str, **parameters: str) -> list[dict[str, Any]]:
    """What `/api/v1/query` or `/api/v1/query_range` answers; [] while it is starting."""
    try:
        async with session.get(f"/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
    except aiohttp.ClientError:
        return []
    if answer["status"] != "success":
        raise ValueError(f"{parameters}: {answer}")
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found
