"""What a real process does with real signals, and with its parent's end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.client import connect, open_stream
from services.runtime.errors import Unavailable, from_rpc_error
from tests.integration.runtime.echo import rest_of, stream, unary, until

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "tests.integration.runtime.echo", "--log-format", "json"]


@dataclass
class Child:
    """An echo process and its log."""

    popen: subprocess.Popen[str]
    started: dict[str, Any]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.started['port']}"

    def signal(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    async def exit(self) -> tuple[int, list[dict[str, Any]]]:
        """Exit code and the rest of its log, read where `readline` left off: it may have buffered more than a line."""
        assert self.popen.stderr is not None
        log = await asyncio.to_thread(self.popen.stderr.read)
        code = await asyncio.to_thread(self.popen.wait, 60)
        return code, [json.loads(line) for line in log.splitlines()]


def popen(*argv: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    pipe = subprocess.PIPE
    return subprocess.Popen([*PROGRAM, *argv], cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def ended(child: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@asynccontextmanager
async def serving(*argv: str) -> AsyncIterator[Child]:
    with ended(popen(*argv)) as child:
        assert child.stderr is not None
        line = json.loads(await asyncio.to_thread(child.stderr.readline))
        assert line["message"] == "started", line
        yield Child(child, line)


def run_to_end(*argv: str) -> tuple[int, str]:
    with ended(popen(*argv)) as child:
        _, log = child.communicate(timeout=60)
        return child.returncode, log


async def test_sigterm_with_50_open_streams_refuses_new_ones_finishes_old_ones_and_exits_0() -> None:
    async with serving() as child, connect(child.address) as channel:
        calls = [stream(channel, "Hold")(b"") for _ in range(50)]
        assert [await call.read() for call in calls] == [b"opened"] * 50
        health: Any = health_pb2_grpc.HealthStub(channel)
        async with open_stream(lambda: health.Watch(health_pb2.HealthCheckRequest(service=""))) as watch:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            child.signal()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(channel, "Say")(b"", timeout=30)
        await unary(channel, "Finish")(b"", timeout=30)
        rest = [await rest_of(call) for call in calls]
        code, log = await child.exit()
    assert rest == [[b"finished"]] * 50
    assert isinstance(from_rpc_error(refused.value), Unavailable)
    assert code == 0
    assert [line["message"] for line in log] == ["ready", "draining", "stopped"]
    assert log[1]["open_requests"] == 50


async def test_past_the_bound_open_streams_end_with_an_event_and_the_bound_is_kept() -> None:
    async with serving("--drain-timeout-s", "0.5") as child, connect(child.address) as channel:
        calls = [stream(channel, "Hold")(b"") for _ in range(50)]
        assert [await call.read() for call in calls] == [b"opened"] * 50
        begun = time.monotonic()
        child.signal()
        rest = [await rest_of(call) for call in calls]
        code, log = await child.exit()
    assert rest == [[b"aborted"]] * 50
    assert code == 0
    assert time.monotonic() - begun < 20
    (left,) = [line for line in log if line["message"] == "stopping with open requests"]
    assert left["open_requests"] == 50


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_stops_at_once(number: signal.Signals) -> None:
    async with serving("--drain-timeout-s", "1000") as child, connect(child.address) as channel:
        async with open_stream(lambda: stream(channel, "Hold")(b"")) as call:
            assert await call.read() == b"opened"
            child.popen.send_signal(number)
            health: Any = health_pb2_grpc.HealthStub(channel)
            async with open_stream(lambda: health.Watch(health_pb2.HealthCheckRequest(service=""))) as watch:
                async for status in watch:
                    if status.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                        break
            child.popen.send_signal(number)
            assert await call.read() == b"aborted"
        assert (await child.exit())[0] == 0


async def test_an_idle_process_ends_quickly() -> None:
    async with serving() as child:
        begun = time.monotonic()
        child.signal()
        assert (await child.exit())[0] == 0
        assert time.monotonic() - begun < 10


def test_a_signal_during_a_long_start_ends_it_at_once_and_cleanly() -> None:
    with ended(popen("--block-s", "600")) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "making\n"
        child.send_signal(signal.SIGTERM)
        _, log = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "Traceback" not in log


async def test_a_process_that_cannot_end_is_ended_a_little_after_its_bound() -> None:
    async with serving("--drain-timeout-s", "0", "--deaf-s", "600") as child:
        child.signal()
        code, log = await child.exit()
    assert code == 1
    assert log[-1]["message"] == "did not stop in time"


def test_a_bad_configuration_is_one_line_and_exit_2() -> None:
    assert run_to_end("--prot", "1") == (2, "echo: unknown argument --prot; did you mean --port?\n")


def test_a_configuration_that_only_the_app_finds_bad_is_also_exit_2() -> None:
    code, log = run_to_end("--crash", "config")
    lines = [json.loads(line) for line in log.splitlines()]
    assert code == 2
    assert [(line["message"], line.get("why")) for line in lines] == [
        ("bad configuration", "model must be a directory"),
        ("stopped", None),
    ]


def test_a_crash_is_exit_1_with_its_traceback_in_the_log() -> None:
    code, log = run_to_end("--crash", "serve")
    crashed = next(line for line in map(json.loads, log.splitlines()) if line["message"] == "crashed")
    assert code == 1
    assert "crash in serve" in crashed["exception"]


async def test_a_taken_port_is_exit_1_and_one_clear_line() -> None:
    async with serving() as first:
        port = first.started["port"]
        code, log = await asyncio.to_thread(run_to_end, "--port", str(port))
    lines = [json.loads(line) for line in log.splitlines()]
    assert code == 1
    (error,) = [line for line in lines if line["level"] == "error"]
    assert error["why"] == f"cannot listen on 127.0.0.1:{port} for echo: Address already in use"


async def test_a_process_listens_on_loopback_only_unless_told() -> None:
    async with serving() as child:
        listening = [c for c in psutil.Process(child.popen.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        ours = {child.started[key] for key in ("port", "admin_port", "metrics_port")}
        assert {c.laddr.port for c in listening} == ours
        assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}


PARENT = """
import os, subprocess, sys, time
environ = {**os.environ, "TAILRACE_PARENT_PID": str(os.getpid())}
pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
child = subprocess.Popen(sys.argv[1:], stdout=nowhere, stderr=pipe, text=True, env=environ)
print(child.pid, child.stderr.readline(), flush=True)
time.sleep(600)
"""


@contextmanager
def parent(*argv: str) -> Iterator[subprocess.Popen[str]]:
    with ended(subprocess.Popen([sys.executable, "-c", *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)) as process:
        yield process


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody may be left to collect it
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("die", ["true", "false"])
async def test_a_parent_killed_with_sigkill_leaves_no_child_that_was_to_die_with_it(die: str) -> None:
    with parent(PARENT, *PROGRAM, "--die-with-parent", die) as starter:
        assert starter.stdout is not None
        pid, _, line = (await asyncio.to_thread(starter.stdout.readline)).partition(" ")
        assert json.loads(line)["message"] == "started"
        child = psutil.Process(int(pid))
        starter.kill()
        starter.wait()
    if die == "true":
        await until(lambda: is_gone(child))
        return
    with pytest.raises(psutil.TimeoutExpired):  # the control: without the flag it lives on
        await asyncio.to_thread(child.wait, 1)
    child.kill()


def test_a_child_whose_parent_ended_before_it_looked_ends_at_once() -> None:
    code = (
        "from services.runtime.parent import die_with_parent as die; die({'TAILRACE_PARENT_PID': '1'}); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


WATCHED = """
import os, time
from services.runtime.parent import watch_parent
watch_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""


async def test_where_the_kernel_does_not_tell_the_watch_sees_the_parents_end() -> None:
    middle = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"
    with parent(middle, sys.executable, "-c", WATCHED) as starter:
        assert starter.stdout is not None
        child = psutil.Process(int(await asyncio.to_thread(starter.stdout.readline)))
        starter.kill()
        starter.wait()
        await until(lambda: is_gone(child))
