"""The most memory that processes had in use together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import psutil

SAMPLE_INTERVAL_S = 0.25


@dataclass
class Peak:
    """Grows while it is watched."""

    rss_bytes: int = 0

    @property
    def megabytes(self) -> int:
        """Of 10⁶ bytes."""
        return round(self.rss_bytes / 1e6)


@contextlib.asynccontextmanager
async def watched(pids: Sequence[int], peak: Peak) -> AsyncIterator[None]:
    """Looks at these processes and their children every now and then."""
    task = asyncio.create_task(_watch(pids, peak))
    try:
        yield
    finally:
        task.cancel()


async def _watch(pids: Sequence[int], peak: Peak) -> None:
    while True:
        peak.rss_bytes = max(peak.rss_bytes, sum(map(_rss, pids)))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _rss(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    except psutil.Error:  # it ended meanwhile
        return 0
