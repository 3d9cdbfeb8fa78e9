import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime.client import connect, open_stream
from services.runtime.errors import InternalError, InvalidRequest, Overloaded, abort, answering, from_rpc_error
from services.runtime.server import MAX_MESSAGE_BYTES, GrpcServer, PortUnavailable
from tests.integration.runtime.echo import SERVICE, Context, handler, raising, stream, tree, unary

Status = health_pb2.HealthCheckResponse
HealthListRequest: Any = health_pb2.HealthListRequest  # type: ignore[attr-defined]  # newer than the stubs


@asynccontextmanager
async def served(**methods: Any) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer(host="127.0.0.1", port=0, name="test")
    server.server.add_generic_rpc_handlers((handler(**methods),))
    port = await server.start([SERVICE])
    async with connect(f"127.0.0.1:{port}") as channel:
        yield server, channel
    await server.stop(0)


def health_stub(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)  # Any: the stubs know no methods of it


def answers(behaviour: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(behaviour)


async def say(request: bytes, context: Context) -> bytes:
    return request


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def test_health_is_per_service_and_the_whole_serves_while_all_services_do() -> None:
    async with served() as (server, channel):
        health = health_stub(channel)

        async def check(name: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

        assert (await check(SERVICE), await check("")) == (Status.NOT_SERVING, Status.NOT_SERVING)
        server.health.set([SERVICE, "test.Other"], True)
        assert (await check(SERVICE), await check("")) == (Status.SERVING, Status.SERVING)
        server.health.set(["test.Other"], False)
        assert (await check(SERVICE), await check("")) == (Status.SERVING, Status.NOT_SERVING)
        unknown = await failure(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND
        listed = (await health.List(HealthListRequest())).statuses
        assert {name: answer.status for name, answer in listed.items()} == {
            "": Status.NOT_SERVING,
            SERVICE: Status.SERVING,
            "test.Other": Status.NOT_SERVING,
        }


async def test_a_health_watcher_sees_each_change_and_a_late_birth() -> None:
    async with served() as (server, channel):
        health = health_stub(channel)
        async with open_stream(lambda: health.Watch(health_pb2.HealthCheckRequest(service="test.New"))) as watch:
            seen = [(await watch.read()).status]
            for serving in (False, True, False):
                server.health.set(["test.New"], serving)
                seen.append((await watch.read()).status)
    assert seen == [Status.SERVICE_UNKNOWN, Status.NOT_SERVING, Status.SERVING, Status.NOT_SERVING]


async def test_stopping_tells_health_watchers_before_it_cuts_them() -> None:
    async with served() as (server, channel):
        server.health.set([SERVICE], True)
        health = health_stub(channel)
        async with open_stream(lambda: health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))) as watch:
            assert (await watch.read()).status == Status.SERVING
            stopping = asyncio.create_task(server.stop(0.5))
            assert (await watch.read()).status == Status.NOT_SERVING
            await stopping


async def test_reflection_lists_the_services() -> None:
    async with served() as (_, channel):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast("Any", channel))  # the stubs know no grpc.aio
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
    listed = {service.name for service in answer.list_services_response.service}
    assert listed == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_messages_beyond_grpcs_usual_4_mib_pass_up_to_the_limit_both_ways() -> None:
    async with served(Say=answers(say)) as (_, channel):
        most = bytes(MAX_MESSAGE_BYTES)
        assert await unary(channel, "Say")(most) == most
        over = await failure(unary(channel, "Say")(most + b"x"))
        assert over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await unary(channel, "Say")(b"still alive") == b"still alive"


async def test_metadata_beyond_the_limit_is_refused_and_the_connection_lives() -> None:
    async with served(Say=answers(say)) as (_, channel):
        assert await unary(channel, "Say")(b"a", metadata=(("x-note", "n" * 8_000),)) == b"a"
        over = await failure(unary(channel, "Say")(b"a", metadata=(("x-note", "n" * 20_000),)))
        assert over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await unary(channel, "Say")(b"b") == b"b"


async def test_concurrent_calls_are_limited_only_when_told() -> None:
    entered, leave = asyncio.Semaphore(0), asyncio.Event()

    async def hold(request: bytes, context: Context) -> bytes:
        entered.release()
        await leave.wait()
        return request

    server = GrpcServer(host="127.0.0.1", port=0, name="test", max_concurrent_rpcs=1)
    server.server.add_generic_rpc_handlers((handler(Hold=answers(hold)),))
    async with connect(f"127.0.0.1:{await server.start()}") as channel:
        first = asyncio.ensure_future(unary(channel, "Hold")(b"1"))
        await entered.acquire()
        refused = await failure(unary(channel, "Hold")(b"2"))
        leave.set()
        assert await first == b"1"
    await server.stop(0)
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    leave.clear()
    async with served(Hold=answers(hold)) as (_, channel):
        many = [asyncio.ensure_future(unary(channel, "Hold")(b"x")) for _ in range(200)]
        inside = asyncio.gather(*(entered.acquire() for _ in many))
        await asyncio.wait([inside, *many], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert inside.done(), f"still outside or refused: {[call for call in many if call.done()] or 'nobody answered'}"
        leave.set()
        assert await asyncio.gather(*many) == [b"x"] * 200


async def test_a_taken_port_is_one_clear_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = GrpcServer(host="127.0.0.1", port=port, name="tokenizer")
        with pytest.raises(PortUnavailable) as refused:
            await server.start()
        await server.stop(0)
    assert str(refused.value) == f"cannot listen on 127.0.0.1:{port} for tokenizer: Address already in use"
    assert capfd.readouterr().err == ""


async def test_a_host_that_is_not_there_is_named() -> None:
    for host, why in (("no.such.host.invalid", "ame"), ("203.0.113.1", "assign")):  # a name; an address of nobody's
        server = GrpcServer(host=host, port=0, name="test")
        with pytest.raises(PortUnavailable, match=rf"cannot listen on {host}:0 for test: .*{why}"):
            await server.start()
        await server.stop(0)


async def test_a_second_server_on_the_port_of_the_first_is_refused() -> None:
    async with served() as (_, _):
        first = GrpcServer(host="127.0.0.1", port=0, name="first")
        second = GrpcServer(host="127.0.0.1", port=await first.start(), name="second")
        with pytest.raises(PortUnavailable, match="second"):
            await second.start()
        await first.stop(0)
        await second.stop(0)


@pytest.mark.parametrize("host", ["::1", "localhost"])
async def test_other_ways_to_say_loopback_work(host: str) -> None:
    server = GrpcServer(host=host, port=0, name="test")
    server.server.add_generic_rpc_handlers((handler(Say=answers(say)),))
    port = await server.start()
    async with connect(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as channel:
        assert await unary(channel, "Say")(b"x") == b"x"
    await server.stop(0)


async def test_a_stop_lets_open_calls_end_within_its_grace_and_cancels_the_rest() -> None:
    ended, entered = asyncio.Event(), asyncio.Semaphore(0)
    outcomes = []

    async def until_ended(request: bytes, context: Context) -> bytes:
        entered.release()
        await ended.wait()
        return b"ended"

    async def for_ever(request: bytes, context: Context) -> bytes:
        entered.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise
        return b""

    async with served(Short=answers(until_ended), Long=answers(for_ever)) as (server, channel):
        short = asyncio.ensure_future(unary(channel, "Short")(b""))
        long = asyncio.ensure_future(unary(channel, "Long")(b""))
        for _ in range(2):
            await entered.acquire()
        stopping = asyncio.create_task(server.stop(0.5))
        ended.set()
        assert await short == b"ended"
        assert (await failure(long)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        await stopping
    assert outcomes == ["cancelled"]


async def test_an_error_reaches_a_caller_three_hops_away_as_it_was_raised() -> None:
    raised = InvalidRequest("sampling.top_p", "must be in (0, 1]", reason="OUT_OF_RANGE")

    def forwards(to: grpc.aio.Channel) -> Any:
        async def forward(request: bytes, context: Context) -> Any:
            async with answering(context):
                return await unary(to, "Say")(request)

        return answers(forward)

    async with (
        served(Say=raising(raised)) as (_, third),
        served(Say=forwards(third)) as (_, second),
        served(Say=forwards(second)) as (_, first),
    ):
        error = await failure(unary(first, "Say")(b""))
    assert tree(from_rpc_error(error)) == tree(raised)


async def test_overload_tells_the_pause_in_details_and_pushback() -> None:
    async with served(Say=raising(Overloaded("full", retry_after_s=0.25, reason="QUEUE_FULL"))) as (_, channel):
        error = await failure(unary(channel, "Say")(b""))
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "250"
    restored = from_rpc_error(error)
    assert isinstance(restored, Overloaded)
    assert (restored.retry_after_s, restored.reason) == (0.25, "QUEUE_FULL")


async def test_a_bug_is_answered_internal_without_its_text_and_logged_with_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(Say=raising(KeyError("secret"))) as (_, channel):
        error = await failure(unary(channel, "Say")(b""))
    assert isinstance(from_rpc_error(error), InternalError)
    assert "secret" not in str(error)
    (record,) = [record for record in caplog.records if record.name == "tailrace.runtime"]
    assert vars(record)["fields"] == {"request_id": "r-1"}
    assert record.exc_info is not None
    assert "secret" in repr(record.exc_info[1])


async def test_an_error_in_a_stream_follows_what_was_sent() -> None:
    async def generate(request: bytes, context: Context) -> AsyncIterator[bytes]:
        async with answering(context):
            yield b"one"
            raise Overloaded("full", retry_after_s=3)

    async def write(request: bytes, context: Context) -> None:
        async with answering(context):
            await context.write(b"one")
            await abort(context, Overloaded("full", retry_after_s=3))

    async with served(
        Generate=grpc.unary_stream_rpc_method_handler(generate),
        Write=grpc.unary_stream_rpc_method_handler(write),
    ) as (_, channel):
        for method in ("Generate", "Write"):
            async with open_stream(partial(stream(channel, method), b"")) as call:
                assert await call.read() == b"one"
                restored = from_rpc_error(await failure(call.read()))
            assert tree(restored) == tree(Overloaded("full", retry_after_s=3))


async def test_cancellation_passes_through_answering() -> None:
    cancelled, entered = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Context) -> bytes:
        try:
            async with answering(context):
                entered.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return b""

    async with served(Wait=answers(wait)) as (_, channel):
        call = unary(channel, "Wait")(b"")
        await entered.wait()
        call.cancel()
        await cancelled.wait()
    gc.collect()  # an unretrieved exception would warn now, and warnings are errors


@pytest.mark.parametrize("gone", ["the caller", "the server"])
async def test_a_write_to_a_peer_who_has_left_is_no_bug_of_ours(gone: str, caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()
    caplog.set_level(logging.DEBUG, "tailrace.runtime")

    async def write(request: bytes, context: Context) -> None:
        try:
            async with answering(context, request_id="r-1"):
                await context.write(b"one")
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                await context.write(b"two")
        finally:
            ended.set()

    async with served(Write=grpc.unary_stream_rpc_method_handler(write)) as (server, channel):
        async with open_stream(partial(stream(channel, "Write"), b"")) as call:
            assert await call.read() == b"one"
            if gone == "the server":
                await server.stop(0)
        await ended.wait()
    (record,) = [record for record in caplog.records if record.name == "tailrace.runtime"]
    assert (record.levelno, record.getMessage()) == (logging.DEBUG, "the peer left")
    assert vars(record)["fields"]["request_id"] == "r-1"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
