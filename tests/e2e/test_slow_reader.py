"""Readers that stop reading among a hundred that don't: they only lag behind, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import psutil
import pytest

from bench.services_under_test import Stack, running
from tailrace.client import Client, Delta

FAST_TOKENS = 60
SLOW_TOKENS = 3000
PACE_MS = "5"
RECEIVE_BUFFER_BYTES = 4096
GROWTH_BYTES_MAX = 64 << 20


@pytest.mark.parametrize(("readers", "pause_s"), [(20, 5.0), pytest.param(100, 30.0, marks=pytest.mark.slow)])
async def test_a_reader_that_stops_among_many_loses_nothing_and_holds_nobody_back(
    model_directory: Path, readers: int, pause_s: float
) -> None:
    flags = ("--fake-pace-ms", PACE_MS, "--kv-tokens", str(1 << 20))
    async with running(model_directory, *flags) as stack, Client(stack.grpc) as client:
        await _fast_readers(client, readers)
        before = _rss(stack)
        expected = asyncio.ensure_future(_whole(client))
        slow = [asyncio.ensure_future(read(stack, client, pause_s)) for read in (_slow_grpc, _slow_sse)]
        rounds = 0
        while not all(reader.done() for reader in slow):
            await _fast_readers(client, readers)
            rounds += 1
        assert rounds > 1
        for text in await asyncio.gather(*slow):
            assert text == await expected
        await stack.wait_idle()
        grown = {name: (size - before[name]) >> 20 for name, size in _rss(stack).items()}
        assert all(megabytes << 20 < GROWTH_BYTES_MAX for megabytes in grown.values()), grown


async def _fast_readers(client: Client, readers: int) -> None:
    asked = [client.generate("Quick", max_tokens=FAST_TOKENS, ignore_eos=True, seed=1) for _ in range(readers)]
    assert len(set(await asyncio.gather(*(stream.text() for stream in asked)))) == 1


async def _whole(client: Client) -> str:
    return await client.generate("Slow", max_tokens=SLOW_TOKENS, ignore_eos=True, seed=2, whole=True).text()


async def _slow_grpc(stack: Stack, client: Client, pause_s: float) -> str:
    texts: list[str] = []
    async for event in client.generate("Slow", max_tokens=SLOW_TOKENS, ignore_eos=True, seed=2):
        if isinstance(event, Delta):
            if len(texts) == 10:
                await asyncio.sleep(pause_s)
            texts.append(event.text)
    return "".join(texts)


async def _slow_sse(stack: Stack, client: Client, pause_s: float) -> str:
    """Through a socket whose reading is really stopped: the little that buffers hold is soon full."""
    body = {"prompt": "Slow", "max_tokens": SLOW_TOKENS, "ignore_eos": True, "seed": 2, "stream": True}
    payload = json.dumps(body).encode()
    host, _, port = stack.http.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    connection.setblocking(False)  # the standard library's own signature
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=RECEIVE_BUFFER_BYTES)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {stack.http}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    received = await reader.read(RECEIVE_BUFFER_BYTES)
    await asyncio.sleep(pause_s)
    received += await reader.read()
    writer.close()
    events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def _rss(stack: Stack) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in stack.pids.items()}
