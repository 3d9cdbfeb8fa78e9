"""Callers that leave at any moment: nothing of them stays, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tailrace.client import AbortOutcome, AlreadyExists, Client, Delta, Event, Finish, FinishReason
from tests.stack import Stack, in_process_stack

TOKENS = 60
PACE_MS = 2.0
ALONE_S = 0.3
"""About what a request takes when it needn't wait; callers leave between 0 and twice that."""
AT_ONCE = 25


@pytest.fixture
async def stack(model_directory: Path) -> AsyncIterator[Stack]:
    """A small batch, slow prompts and slow steps, so that requests are caught queued, in prefill and in decode."""
    engine = {"fake_pace_ms": PACE_MS, "fake_prefill_us_per_token": 20.0, "max_running": 8, "max_step_tokens": 64}
    async with in_process_stack(model_directory, scheduler=engine) as running:
        yield running


class Callers:
    """Callers over both protocols who leave after a time of their own."""

    def __init__(self, stack: Stack, client: Client, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._client = client
        self._session = session
        self._places = asyncio.Semaphore(AT_ONCE)
        self.left = self.stayed = 0

    async def call(self, number: int) -> None:
        rng = random.Random(number)
        prompt = f"{number} " * rng.randint(1, 200)
        call = self._over_grpc if number % 2 else self._over_http
        async with self._places:
            try:
                await asyncio.wait_for(call(prompt), rng.uniform(0, 2 * ALONE_S))
                self.stayed += 1
            except TimeoutError:
                self.left += 1

    async def _over_grpc(self, prompt: str) -> None:
        async with self._client.generate(prompt, max_tokens=TOKENS, ignore_eos=True) as stream:
            await stream.whole()

    async def _over_http(self, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with self._session.post(f"{self._stack.url}/v1/completions", json=body) as response:
            await response.read()


@pytest.mark.parametrize("cancels", [100, pytest.param(500, marks=pytest.mark.slow)])
async def test_callers_who_leave_at_random_moments_leave_nothing_behind(
    stack: Stack, client: Client, cancels: int
) -> None:
    async def normal() -> list[int]:
        answer = await client.generate("A normal request", max_tokens=TOKENS, seed=3, ignore_eos=True).whole()
        return list(answer.choices[0].token_ids)

    before = await normal()
    async with aiohttp.ClientSession() as session:
        callers = Callers(stack, client, session)
        await asyncio.gather(*(callers.call(number) for number in range(cancels)))
        assert callers.left > cancels // 3
        await stack.wait_idle()
    assert await normal() == before


async def test_an_abort_by_id_ends_the_stream_with_an_event(stack: Stack, client: Client) -> None:
    started = asyncio.Event()
    events: list[Event] = []

    async def read() -> None:
        async for event in client.generate("A long one", max_tokens=5000, ignore_eos=True, request_id="mine"):
            started.set()
            events.append(event)

    reading = asyncio.create_task(read())
    await started.wait()
    assert await client.abort("mine-10") is AbortOutcome.NOT_FOUND
    assert await client.abort("mine", wait_until_released=True) is AbortOutcome.ABORTING
    assert await stack.remembered(("tokenizer", "detokenizer", "scheduler")) == {}
    await reading
    (finish,) = (event for event in events if isinstance(event, Finish))
    assert finish.reason is FinishReason.ABORTED
    assert finish.output_tokens < 5000
    assert await client.abort("mine") is AbortOutcome.NOT_FOUND
    await stack.wait_idle()


async def test_a_reused_id_is_a_new_request_and_a_live_one_with_other_content_is_refused(
    stack: Stack, client: Client
) -> None:
    async with client.generate("A long one", max_tokens=5000, ignore_eos=True, request_id="mine") as first:
        async for event in first:
            if isinstance(event, Delta):
                break
            with pytest.raises(AlreadyExists):
                await client.generate("Another", max_tokens=5, request_id="mine").whole()
    await stack.wait_idle()
    again = await client.generate("Another", max_tokens=5, ignore_eos=True, request_id="mine").whole()
    assert again.choices[0].finish.output_tokens == 5
