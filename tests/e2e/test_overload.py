"""A full system says so at once, and when to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tailrace.client import Answer, Client, Overloaded
from tests.stack import Stack, in_process_stack

AT_ONCE = 12
BOUND_S = 20.0


@pytest.fixture
async def stack(model_directory: Path) -> AsyncIterator[Stack]:
    """Room for one running request and one that waits; the running one takes a while."""
    async with in_process_stack(
        model_directory, scheduler={"max_running": 1, "max_waiting": 1, "fake_pace_ms": 10.0}
    ) as running:
        yield running


async def ask(client: Client) -> Answer | Overloaded:
    try:
        return await client.generate("a", max_tokens=100, ignore_eos=True).whole()
    except Overloaded as full:
        return full


async def test_of_twelve_at_once_two_are_served_and_ten_are_refused_with_a_hint(stack: Stack, client: Client) -> None:
    asked = [asyncio.create_task(ask(client)) for _ in range(AT_ONCE)]
    refused = []
    async with asyncio.timeout(BOUND_S):
        for done in asyncio.as_completed(asked):
            refused.append(await done)
            if len(refused) == AT_ONCE - 2:
                break
        # The refusals came first: nobody waited for a place that wasn't there.
        assert all(isinstance(answer, Overloaded) and answer.retry_after_s > 0 for answer in refused)
        served = [answer for answer in await asyncio.gather(*asked) if isinstance(answer, Answer)]
    assert [len(answer.choices[0].token_ids) for answer in served] == [100, 100]
    await stack.wait_idle()


async def test_http_answers_429_with_retry_after(stack: Stack) -> None:
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
    async with aiohttp.ClientSession(stack.url) as session:

        async def status() -> tuple[int, str | None]:
            async with session.post("/v1/completions", json=body) as response:
                await response.read()
                return response.status, response.headers.get("Retry-After")

        answers = await asyncio.gather(*(status() for _ in range(AT_ONCE)))
    assert [code for code, _ in answers].count(200) == 2
    assert all(code in (200, 429) for code, _ in answers)
    assert all(pause is not None and int(pause) >= 1 for code, pause in answers if code == 429)
