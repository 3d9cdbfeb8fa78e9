"""A peer as a process, from its start until it is measured no more."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from bench.peers.peer import CantBeHad, Peer
from cli.stack import free_ports

START_TIMEOUT_S = 1800.0
"""One that compiles its model at the first start takes ten minutes on two cores, and more on busy ones."""
STOP_TIMEOUT_S = 20.0
POLL_S = 0.25


@asynccontextmanager
async def running_peer(peer: Peer, root: Path) -> AsyncIterator[tuple[str, int]]:
    """Starts it and gives its URL and its pid once it serves. Raises CantBeHad with where it logged to."""
    (port,) = free_ports(1)
    log_path = root / f"{peer.name.replace(' ', '-')}.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *peer.command(root, port), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **peer.environment(root)}, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        if not await _serves(url, process):
            raise CantBeHad(f"{peer.name} does not start: {_why(process)}; it logs to {log_path}")
        yield url, process.pid
    finally:
        await _stop(process)


async def _serves(url: str, process: asyncio.subprocess.Process) -> bool:
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
            while process.returncode is None:
                if await _healthy(session, url):
                    return True
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        pass
    return False


def _why(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    if code is None:
        return f"it isn't ready after {START_TIMEOUT_S:.0f} s"
    return f"{signal.Signals(-code).name} ended it" if code < 0 else f"it ended with code {code}"


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    """With all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except ProcessLookupError:
            return
        except TimeoutError:
            continue
