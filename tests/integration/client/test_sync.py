from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from tailrace.client import Delta, StreamCut
from tailrace.client.sync import Client
from tests.integration.client.servicer import WHOLE, ScriptedServer

T = TypeVar("T")


async def beside(server: ScriptedServer, use: Callable[[Client], T]) -> T:
    """Runs blocking code in a thread, while this loop serves."""

    def run() -> T:
        with Client(server.address) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_a_blocking_loop_reads_the_same_events(server: ScriptedServer) -> None:
    texts = await beside(server, lambda client: [e.text for e in client.generate("p") if isinstance(e, Delta)])
    assert texts == ["hé", "🙂"]


async def test_text_and_whole_block_until_the_end(server: ScriptedServer) -> None:
    assert await beside(server, lambda client: client.generate("p").text()) == "hé🙂"
    assert (await beside(server, lambda client: client.generate("p").whole())).usage.output_tokens == 3


async def test_leaving_a_blocking_loop_cancels_the_call(server: ScriptedServer) -> None:
    server.script, server.hangs = WHOLE[:2], True

    def first_text(client: Client) -> str:
        return next(event.text for event in client.generate("p") if isinstance(event, Delta))

    assert await beside(server, first_text) == "hé"
    await asyncio.wait_for(server.caller_left.wait(), 10)


async def test_errors_are_the_same(server: ScriptedServer) -> None:
    server.script = WHOLE[:2]
    with pytest.raises(StreamCut):
        await beside(server, lambda client: client.generate("p").text())
