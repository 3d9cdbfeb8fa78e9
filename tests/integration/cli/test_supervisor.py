from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cli import restart_policy
from cli.stack import Service, free_ports
from cli.supervisor import Supervisor
from cli.terminal import Terminal

BOUND_S = 60


@dataclass
class Running:
    """A supervisor at work, what it wrote, and what its services noted."""

    supervisor: Supervisor
    task: asyncio.Task[None]
    out: io.StringIO
    diary: Path

    def notes(self) -> list[str]:
        return self.diary.read_text().splitlines() if self.diary.exists() else []

    def pid_of(self, name: str) -> int:
        children = psutil.Process().children()
        return next(child.pid for child in children if name in child.cmdline())


Start = Callable[..., Awaitable[Running]]


@asynccontextmanager
async def running(diary: Path, *flags_of: tuple[str, ...]) -> AsyncIterator[Running]:
    out = io.StringIO()
    services = [_service(f"s{number}", diary, flags) for number, flags in enumerate(flags_of)]
    supervisor = Supervisor(services, Terminal(out), stop_timeout_s=20)
    task = asyncio.create_task(supervisor.run())
    try:
        yield Running(supervisor, task, out, diary)
    finally:
        supervisor.stop()
        await asyncio.wait_for(task, BOUND_S)


def _service(name: str, diary: Path, flags: tuple[str, ...]) -> Service:
    port, admin_port, metrics_port = map(str, free_ports(3))
    common = ("--name", name, "--port", port, "--admin-port", admin_port, "--metrics-port", metrics_port)
    return Service(
        name, "tests.integration.cli.small_service", f"127.0.0.1:{port}", f"127.0.0.1:{admin_port}", int(metrics_port),
        (*common, "--diary", str(diary), "--die-with-parent", "--log-format", "text", *flags),
    )  # fmt: skip


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110  # what other processes do can only be looked at
            await asyncio.sleep(0.02)


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    return tmp_path / "diary"


async def test_services_stop_in_the_order_in_which_requests_flow(diary: Path) -> None:
    async with running(diary, (), (), ()) as stack:
        assert await asyncio.wait_for(stack.supervisor.wait_all_ready(), BOUND_S)
        stack.supervisor.stop()
        await asyncio.wait_for(stack.task, BOUND_S)
    assert [note for note in stack.notes() if "drains" in note] == ["s0 drains", "s1 drains", "s2 drains"]
    assert not stack.supervisor.lost


async def test_a_killed_service_is_started_again(diary: Path) -> None:
    async with running(diary, (), ()) as stack:
        assert await asyncio.wait_for(stack.supervisor.wait_all_ready(), BOUND_S)
        os.kill(stack.pid_of("s1"), signal.SIGKILL)
        await until(lambda: "s1 is ready again" in stack.out.getvalue())
        assert "s1 ended by signal 9" in stack.out.getvalue()
        assert stack.notes().count("s1 starts") == 2
        assert stack.notes().count("s0 starts") == 1


async def test_a_service_that_fails_before_it_is_ready_stops_everything(diary: Path) -> None:
    async with running(diary, (), ("--getting-ready", "false", "--life-s", "0.1")) as stack:
        assert not await asyncio.wait_for(stack.supervisor.wait_all_ready(), BOUND_S)
        await asyncio.wait_for(stack.task, BOUND_S)
    assert stack.supervisor.lost
    assert "s1 ended with exit code 1" in stack.out.getvalue()
    assert "before it was ready" in stack.out.getvalue()
    assert stack.notes().count("s1 starts") == 1


async def test_a_service_that_dies_again_and_again_is_given_up(diary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "DEATHS_MAX", 1)
    async with running(diary, ("--life-s", "0.5")) as stack:
        await asyncio.wait_for(stack.task, BOUND_S)
    assert stack.supervisor.lost
    assert "again and again" in stack.out.getvalue()
    assert stack.notes().count("s0 starts") == 2


async def test_what_services_write_comes_out_with_their_names(diary: Path) -> None:
    async with running(diary, ("--life-s", "x")) as stack:
        await asyncio.wait_for(stack.task, BOUND_S)
    (said,) = (line for line in stack.out.getvalue().splitlines() if "life_s" in line)
    assert said.startswith("s0 ")


async def test_a_second_stop_kills_what_still_drains(diary: Path) -> None:
    async with running(diary, ()) as stack:
        assert await asyncio.wait_for(stack.supervisor.wait_all_ready(), BOUND_S)
        os.kill(stack.pid_of("s0"), signal.SIGSTOP)  # it can't drain
        stack.supervisor.stop()
        stack.supervisor.stop()
        await asyncio.wait_for(stack.task, BOUND_S)
    assert "s0 drains" not in stack.notes()
