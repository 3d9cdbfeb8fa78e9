import asyncio
import logging
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from services.runtime import __version__
from services.runtime.client import connect, open_stream
from services.runtime.errors import Overloaded, Unavailable, from_rpc_error
from services.runtime.phase import Phase
from services.runtime.process import Ports, Runtime, run_async
from tests.integration.runtime.echo import SERVICE, EchoApp, EchoConfig, stream, unary, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Running:
    """A process in this loop."""

    ports: Ports
    runtime: Runtime
    app: EchoApp
    result: asyncio.Task[int]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stop_now: asyncio.Event = field(default_factory=asyncio.Event)

    async def exit_code(self) -> int:
        async with asyncio.timeout(60):
            return await self.result


@asynccontextmanager
async def running(config: EchoConfig | None = None) -> AsyncIterator[Running]:
    stop, stop_now, made = asyncio.Event(), asyncio.Event(), list[tuple[Runtime, EchoApp]]()
    ports: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    used = config or EchoConfig()

    def make(runtime: Runtime) -> EchoApp:
        app = EchoApp(runtime, used)
        made.append((runtime, app))
        return app

    task = asyncio.create_task(run_async("echo", used, make, stop=stop, stop_now=stop_now, on_ports=ports.set_result))
    await asyncio.wait(tuple[asyncio.Future[Any], ...]((task, ports)), return_when=asyncio.FIRST_COMPLETED)
    runtime, app = made[0]
    yield Running(ports.result(), runtime, app, task, stop, stop_now)
    stop.set()
    stop_now.set()
    await asyncio.wait([task])


async def only_code(config: EchoConfig) -> int:
    """The exit code of a process that ends by itself."""
    async with asyncio.timeout(60):
        return await run_async("echo", config, lambda runtime: EchoApp(runtime, config), stop=asyncio.Event())


async def health(port: int, service: str = "") -> int:
    async with connect(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))  # type: ignore[attr-defined]  # bare stubs
        return int(answer.status)


async def scraped(process: Running) -> dict[tuple[str, ...], float]:
    """Samples by name and sorted label values."""
    url = f"http://127.0.0.1:{process.ports.metrics}/metrics"
    text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())).decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_process_serves_drains_and_closes_in_this_order() -> None:
    async with running() as process:
        async with connect(f"127.0.0.1:{process.ports.public}") as channel:
            assert await unary(channel, "Say")(b"x") == b"x"
        assert len({process.ports.public, process.ports.admin, process.ports.metrics}) == 3
        process.stop.set()
        assert await process.exit_code() == 0
    assert process.app.calls == ["serve", "drain", "serve cancelled", "close"]
    assert process.runtime.phase is Phase.STOPPED


async def test_readiness_shows_in_health_on_the_public_port_and_life_on_the_operators() -> None:
    async with running() as process:
        assert await health(process.ports.public, SERVICE) == SERVING
        assert await health(process.ports.public) == SERVING
        assert process.runtime.not_ready_why == ""
        process.runtime.set_ready(False, "no route to the scheduler")
        assert await health(process.ports.public, SERVICE) == NOT_SERVING
        assert await health(process.ports.public) == NOT_SERVING
        assert await health(process.ports.admin) == SERVING
        assert process.runtime.not_ready_why == "no route to the scheduler"
        assert not process.runtime.ready


async def test_each_change_of_readiness_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tailrace")
    async with running() as process:
        caplog.clear()
        for ready, why in ((True, ""), (False, "a"), (False, "a"), (False, "b"), (True, ""), (True, "")):
            process.runtime.set_ready(ready, why)
        events = [(record.message, vars(record)["fields"].get("why")) for record in caplog.records]
    assert events == [("not ready", "a"), ("not ready", "b"), ("ready", None)]


async def test_the_start_is_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tailrace")
    async with running(EchoConfig(name="echo-2")) as process:
        (started,) = [record for record in caplog.records if record.message == "started"]
        ports = process.ports
    assert started.name == "tailrace.echo-2"
    fields = vars(started)["fields"]
    assert (fields["name"], fields["version"]) == ("echo-2", __version__)
    assert (fields["port"], fields["admin_port"], fields["metrics_port"]) == (ports.public, ports.admin, ports.metrics)


async def test_metrics_tell_version_phase_and_readiness() -> None:
    async with running() as process:
        metrics = await scraped(process)
        assert metrics["tailrace_build_info", __version__, "echo"] == 1
        assert metrics["tailrace_phase", "serving"] == 1
        assert metrics["tailrace_ready",] == 1


async def test_a_blocked_loop_shows_in_the_lag_histogram() -> None:
    async with running() as process:

        def count(bound: str) -> float:
            labels = {"le": bound}
            return process.runtime.registry.get_sample_value("tailrace_event_loop_lag_seconds_bucket", labels) or 0

        await until(lambda: count("+Inf") > 0)
        time.sleep(0.4)  # noqa: ASYNC251  # blocks the loop on purpose
        await until(lambda: count("+Inf") > count("0.25"))


async def test_epochs_differ_and_are_64_bits() -> None:
    epochs = {Runtime("echo", EchoConfig()).epoch for _ in range(100)}
    assert len(epochs) == 100
    assert all(0 < epoch < 1 << 64 for epoch in epochs)


async def test_a_drain_refuses_new_calls_and_waits_for_the_open_ones() -> None:
    async with running() as process, connect(f"127.0.0.1:{process.ports.public}") as channel:
        async with open_stream(lambda: stream(channel, "Hold")(b"")) as call:
            assert await call.read() == b"opened"
            process.runtime.request_drain()
            await until(lambda: process.runtime.phase is Phase.DRAINING)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unary(channel, "Say")(b"", timeout=30)
            assert await health(process.ports.public) == NOT_SERVING
            assert process.runtime.not_ready_why == "draining"
            assert not process.result.done()
            await unary(channel, "Finish")(b"", timeout=30)
            assert await call.read() == b"finished"
            assert await call.read() is grpc.aio.EOF
        assert await process.exit_code() == 0
    error = from_rpc_error(refused.value)
    assert isinstance(error, Unavailable)
    assert (error.reason, error.retry_after_s) == ("DRAINING", 2)


async def test_past_the_bound_open_streams_get_an_event_not_a_cut() -> None:
    async with (
        running(EchoConfig(drain_timeout_s=0.3)) as process,
        connect(f"127.0.0.1:{process.ports.public}") as channel,
    ):
        async with open_stream(lambda: stream(channel, "Hold")(b"")) as call:
            assert await call.read() == b"opened"
            process.stop.set()
            assert await call.read() == b"aborted"
            assert await call.read() is grpc.aio.EOF
        assert await process.exit_code() == 0


async def test_a_process_limits_its_concurrent_calls_when_told() -> None:
    async with (
        running(EchoConfig(max_concurrent_rpcs=1)) as process,
        connect(f"127.0.0.1:{process.ports.public}") as channel,
    ):
        async with open_stream(lambda: stream(channel, "Hold")(b"")) as call:
            assert await call.read() == b"opened"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unary(channel, "Say")(b"", timeout=30)
        assert isinstance(from_rpc_error(refused.value), Overloaded)
        await until(lambda: process.app.open_requests() == 0)
        assert await unary(channel, "Say")(b"x") == b"x"


async def test_a_drain_request_may_set_its_own_bound() -> None:
    async with (
        running(EchoConfig(drain_timeout_s=1000)) as process,
        connect(f"127.0.0.1:{process.ports.public}") as channel,
    ):
        async with open_stream(lambda: stream(channel, "Hold")(b"")) as call:
            assert await call.read() == b"opened"
            process.runtime.request_drain(timeout_s=0.1)
            assert await call.read() == b"aborted"
        assert await process.exit_code() == 0


async def test_being_told_twice_ends_the_drain_at_once() -> None:
    async with (
        running(EchoConfig(drain_timeout_s=1000)) as process,
        connect(f"127.0.0.1:{process.ports.public}") as channel,
    ):
        async with open_stream(lambda: stream(channel, "Hold")(b"")) as call:
            assert await call.read() == b"opened"
            process.stop.set()
            process.stop_now.set()
            assert await call.read() == b"aborted"
        assert await process.exit_code() == 0


@pytest.mark.parametrize(("where", "code"), [("make", 1), ("config", 2), ("serve", 1), ("return", 1)])
async def test_a_process_that_fails_says_why_and_exits_with_its_code(
    where: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert await only_code(EchoConfig(crash=where)) == code
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (record.exc_info is None) == (where == "config")  # what the operator can mend needs no traceback


async def test_a_crash_while_serving_still_closes_the_app() -> None:
    apps = []
    config = EchoConfig(crash="serve")

    def make(runtime: Runtime) -> EchoApp:
        apps.append(EchoApp(runtime, config))
        return apps[0]

    assert await run_async("echo", config, make, stop=asyncio.Event()) == 1
    assert apps[0].calls == ["serve", "close"]


@pytest.mark.parametrize(("where", "code"), [("drain", 1), ("close", 0)])
async def test_a_failure_at_the_end_does_not_hang_the_end(where: str, code: int) -> None:
    async with running(EchoConfig(crash=where)) as process:
        process.stop.set()
        assert await process.exit_code() == code
    assert process.app.calls[-1] == "close"


@pytest.mark.parametrize("which", ["port", "admin_port", "metrics_port"])
async def test_a_taken_port_ends_the_start_with_one_line_and_closes_what_was_opened(
    which: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as first:
        config = {
            "port": EchoConfig(port=first.ports.public),
            "admin_port": EchoConfig(admin_port=first.ports.admin),
            "metrics_port": EchoConfig(metrics_port=first.ports.metrics),
        }[which]
        caplog.clear()
        assert await only_code(config) == 1
        (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        why = vars(record)["fields"]["why"]
    assert why.startswith(f"cannot listen on 127.0.0.1:{getattr(config, which)} for echo")
    assert why.endswith("Address already in use")
    assert record.exc_info is None


async def test_a_cancelled_run_closes_everything() -> None:
    async with running() as process:
        process.result.cancel()
        with pytest.raises(asyncio.CancelledError):
            await process.result
        assert process.app.calls[-1] == "close"
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", process.ports.public)
