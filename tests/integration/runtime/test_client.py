import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.runtime import client
from services.runtime.client import connect, open_stream
from services.runtime.server import GrpcServer
from tests.integration.runtime.echo import Context, handler, stream, unary


async def started(port: int = 0, **methods: Any) -> tuple[GrpcServer, int]:
    server = GrpcServer(host="127.0.0.1", port=port, name="test")
    server.server.add_generic_rpc_handlers((handler(**methods),))
    return server, await server.start()


async def tells_time_left(request: bytes, context: Context) -> bytes:
    return str(context.time_remaining()).encode()


async def says(request: bytes, context: Context) -> bytes:
    return request


async def test_a_unary_call_without_a_timeout_gets_one_and_a_given_one_is_kept() -> None:
    server, port = await started(Left=grpc.unary_unary_rpc_method_handler(tells_time_left))
    async with connect(f"127.0.0.1:{port}") as channel:
        default = float(await unary(channel, "Left")(b""))
        given = float(await unary(channel, "Left")(b"", timeout=90))
    await server.stop(0)
    assert default == pytest.approx(client.DEFAULT_UNARY_TIMEOUT_S, abs=2)
    assert given == pytest.approx(90, abs=5)


async def test_a_unary_call_to_a_silent_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "DEFAULT_UNARY_TIMEOUT_S", 0.2)

    async def silent(request: bytes, context: Context) -> bytes:
        await asyncio.Event().wait()
        return b""

    server, port = await started(Say=grpc.unary_unary_rpc_method_handler(silent))
    async with connect(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await unary(channel, "Say")(b"")
    await server.stop(0)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("way_out", ["break", "exception", "cancellation"])
async def test_leaving_a_stream_cancels_it_whatever_the_way_out(way_out: str) -> None:
    opened, gone = asyncio.Event(), asyncio.Event()

    async def endless(request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            yield b"one"
            await asyncio.Event().wait()
        finally:
            gone.set()

    async def read(channel: grpc.aio.Channel) -> None:
        async with open_stream(lambda: stream(channel, "Endless")(b"")) as call:
            async for _ in call:
                opened.set()
                if way_out == "break":
                    break
                if way_out == "exception":
                    raise ValueError
                await asyncio.Event().wait()

    server, port = await started(Endless=grpc.unary_stream_rpc_method_handler(endless))
    async with connect(f"127.0.0.1:{port}") as channel:
        reading = asyncio.create_task(read(channel))
        await opened.wait()
        if way_out == "cancellation":
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(5):
            await gone.wait()
    await server.stop(0)


@pytest.mark.parametrize("down_s", [0.5, pytest.param(15, marks=pytest.mark.slow)])
async def test_a_restarted_server_is_found_again_however_long_it_was_down(down_s: float) -> None:
    say: Any = grpc.unary_unary_rpc_method_handler(says)
    server, port = await started(Say=say)
    async with connect(f"127.0.0.1:{port}") as channel:
        assert await unary(channel, "Say")(b"1") == b"1"
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as down:
            await unary(channel, "Say")(b"2")
        await asyncio.sleep(down_s)  # an uncapped backoff would have grown to 6 s after 15
        server, _ = await started(port, Say=say)
        begun = asyncio.get_running_loop().time()
        assert await unary(channel, "Say")(b"3", wait_for_ready=True) == b"3"
        waited = asyncio.get_running_loop().time() - begun
    await server.stop(0)
    assert down.value.code() is grpc.StatusCode.UNAVAILABLE
    assert waited < 3  # the cap is 1 s, and gRPC varies it by 20 %


async def test_calls_alternate_between_all_addresses_of_a_name() -> None:
    async def from_first(request: bytes, context: Context) -> bytes:
        return b"first"

    async def from_second(request: bytes, context: Context) -> bytes:
        return b"second"

    one, first = await started(Say=grpc.unary_unary_rpc_method_handler(from_first))
    two, second = await started(Say=grpc.unary_unary_rpc_method_handler(from_second))
    async with connect(f"ipv4:127.0.0.1:{first},127.0.0.1:{second}") as channel:
        answers: set[bytes] = set()
        async with asyncio.timeout(10):
            while len(answers) < 2:
                answers.add(await unary(channel, "Say")(b"", wait_for_ready=True))
    await one.stop(0)
    await two.stop(0)
    assert answers == {b"first", b"second"}


async def test_a_web_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server, port = await started(Say=grpc.unary_unary_rpc_method_handler(says))
    async with connect(f"127.0.0.1:{port}") as channel:
        assert await unary(channel, "Say")(b"x") == b"x"
    await server.stop(0)


@pytest.mark.slow
async def test_a_stream_silent_for_more_than_three_keepalive_intervals_lives() -> None:
    async def quiet(request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield b"begin"
        await asyncio.sleep(70)
        yield b"end"

    server, port = await started(Quiet=grpc.unary_stream_rpc_method_handler(quiet))
    async with (
        connect(f"127.0.0.1:{port}") as channel,
        open_stream(lambda: stream(channel, "Quiet")(b"")) as call,
    ):
        assert [message async for message in call] == [b"begin", b"end"]
    await server.stop(0)
