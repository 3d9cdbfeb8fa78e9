"""The end of a system under load: no new requests, the open ones finish, everybody leaves with exit code 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.runtime.phase import Phase
from tailrace.client import Client, Completed, Delta, Event, Finish, FinishReason, Stream, Unreachable
from tests.stack import FLOW, Stack, in_process_stack

STREAMS = 50
PACE_MS = 10.0


@pytest.fixture
async def stack(model_directory: Path) -> AsyncIterator[Stack]:
    async with in_process_stack(model_directory, scheduler={"fake_pace_ms": PACE_MS}) as running:
        yield running


async def read(stream: Stream, begun: asyncio.Semaphore) -> list[Event]:
    """Reads to the end, and says when the first delta came."""
    events: list[Event] = []
    async for event in stream:
        if isinstance(event, Delta) and not any(isinstance(earlier, Delta) for earlier in events):
            begun.release()
        events.append(event)
    return events


async def begin(client: Client, tokens: int) -> list[asyncio.Task[list[Event]]]:
    """Opens STREAMS streams and returns when all of them flow."""
    begun = asyncio.Semaphore(0)
    streams = [client.generate(f"{number}", max_tokens=tokens, ignore_eos=True) for number in range(STREAMS)]
    tasks = [asyncio.create_task(read(stream, begun)) for stream in streams]
    for _ in tasks:
        await begun.acquire()
    return tasks


async def wait_draining(stack: Stack) -> None:
    runtime = stack.services["gateway"].runtime
    assert runtime is not None
    async with asyncio.timeout(20):
        while runtime.phase is not Phase.DRAINING:  # noqa: ASYNC110  # a process's phase can only be asked
            await asyncio.sleep(0.005)


async def test_a_drain_refuses_new_requests_and_finishes_the_open_ones(stack: Stack, client: Client) -> None:
    tasks = await begin(client, tokens=150)
    stack.services["gateway"].stop.set()
    await wait_draining(stack)
    with pytest.raises(Unreachable):
        await client.generate("late").text()
    for events in await asyncio.gather(*tasks):
        assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 150
        assert isinstance(events[-1], Completed)
    assert await stack.services["gateway"].end() == 0
    await stack.wait_idle(FLOW[1:])


async def test_the_whole_system_stops_under_load_and_every_process_leaves_with_0(stack: Stack, client: Client) -> None:
    tasks = await begin(client, tokens=150)
    codes = [await stack.services[name].end() for name in FLOW]
    assert codes == [0, 0, 0, 0]
    assert all(isinstance(events[-1], Completed) for events in await asyncio.gather(*tasks))


async def test_past_the_bound_callers_get_an_abort_event_and_no_cut(model_directory: Path) -> None:
    async with (
        in_process_stack(
            model_directory, scheduler={"fake_pace_ms": PACE_MS}, gateway={"drain_timeout_s": 0.2}
        ) as stack,
        Client(stack.grpc) as client,
    ):
        tasks = await begin(client, tokens=5000)
        assert await stack.services["gateway"].end() == 0
        for events in await asyncio.gather(*tasks):
            assert [event.reason for event in events if isinstance(event, Finish)] == [FinishReason.ABORTED]
            assert isinstance(events[-1], Completed)
        await stack.wait_idle(FLOW[1:])
