"""A server that says nothing is asked whether it lives; only one that does not answer that either is left."""

from __future__ import annotations

import asyncio

import pytest

from cli.stack import free_ports
from tailrace.client import Client, Delta, StreamCut, liveness
from tests.cable import cable
from tests.integration.client.servicer import ScriptedServer, completed, finish, serving
from tests.integration.client.test_resuming import FIRST, HERE, SECOND

REST = [HERE, SECOND, finish(3), completed(3)]


async def test_a_server_that_stands_still_is_left_for_the_next_one_once_that_holds_the_request(
    server: ScriptedServer,
) -> None:
    server.script, server.hangs = [HERE, FIRST], True
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with serving() as other, cable(address, server.address) as line, Client(address, other.address) as client:
        other.resumes = [[HERE], REST]
        text = ""
        async with asyncio.timeout(15):  # keepalive would take half a minute
            async for event in client.generate("p"):
                if isinstance(event, Delta):
                    text += event.text
                    line.freeze()
    assert text == "hé🙂"
    assert len(other.resume_requests) == 2, "to hold the request, and to read on"


async def test_one_whose_request_no_other_can_hold_is_not_left(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENCE_S", 0.1)
    monkeypatch.setattr(liveness, "ANSWER_S", 0.1)
    server.script, server.hangs = [HERE, FIRST], True
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with (
        serving() as other,
        cable(address, server.address) as line,
        Client(address, other.address) as client,
        client.generate("p") as stream,
    ):
        events = aiter(stream)
        for _ in range(2):
            await anext(events)
        line.freeze()
        reading = asyncio.ensure_future(anext(events))
        async with asyncio.timeout(15):
            while len(other.resume_requests) < 3:  # noqa: ASYNC110  # the server has no event for it
                await asyncio.sleep(0.01)
        assert not reading.done()
        assert not server.caller_left.is_set()
        stream.cancel()
        with pytest.raises(StreamCut):
            await reading


async def test_one_that_stands_still_before_it_has_accepted_is_left_too(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENCE_S", 0.3)
    server.script, server.hangs = [], True
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with serving() as other, cable(address, server.address) as line, Client(address, other.address) as client:
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(15):
            asking = tasks.create_task(client.generate("p").text())
            await server.called.wait()
            line.freeze()
        assert asking.result() == "hé🙂"


async def test_one_that_is_only_quiet_is_kept_however_long(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENCE_S", 0.05)
    server.script, server.hangs = [HERE, FIRST], True
    async with serving() as other, Client(server.address, other.address) as client:
        async with client.generate("p") as stream:
            events = aiter(stream)
            for _ in range(2):
                await anext(events)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(events), 1.0)
        assert server.health_checks > 3
        assert not other.resume_requests
        assert not server.resume_requests


async def test_where_there_is_no_other_nobody_is_asked(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENCE_S", 0.05)
    server.script, server.hangs = [HERE, FIRST], True
    async with Client(server.address) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate("p").text(), 0.5)
    assert server.health_checks == 0
