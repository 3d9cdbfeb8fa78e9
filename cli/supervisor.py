"""Keeps the services running as child processes, and stops them as one.

The order of the end is the flow of requests: what takes them in drains first, what computes them last. A child that
dies is started again with a growing pause. No child outlives this process, even one that is killed with SIGKILL: each
asks the kernel to end with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Sequence
from dataclasses import dataclass, field

from cli.readiness import wait_ready
from cli.restart_policy import RestartPolicy
from cli.stack import Service
from cli.terminal import Terminal

LINE_BYTES_MAX = 1 << 20
LAST_WORDS_TIMEOUT_S = 1.0


@dataclass
class _Child:
    """One service and its current process."""

    service: Service
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs `services`, given in the order in which requests flow through them."""

    def __init__(self, services: Sequence[Service], terminal: Terminal, *, stop_timeout_s: float) -> None:
        self._children = [_Child(service) for service in services]
        self._terminal = terminal
        self._stop_timeout_s = stop_timeout_s
        self._stop = asyncio.Event()
        self.lost = False
        """Whether it stopped because a service could not be kept running."""

    async def run(self) -> None:
        """Starts the services and returns when all have ended, after `stop`, or after one was lost (see `lost`)."""
        async with asyncio.TaskGroup() as tasks:
            for child in self._children:
                tasks.create_task(self._keep(child))
            await self._stop.wait()
            for child in self._children:
                await self._end(child)

    async def wait_all_ready(self) -> bool:
        """True when every service took requests at least once since its start; False when the end came first."""
        stop = asyncio.ensure_future(self._stop.wait())
        ready = asyncio.gather(*(child.ready.wait() for child in self._children))
        try:
            await asyncio.wait((stop, ready), return_when=asyncio.FIRST_COMPLETED)
            return not self._stop.is_set()
        finally:
            stop.cancel()
            ready.cancel()

    def stop(self) -> None:
        """Begins the end; open requests may finish. A second time: at once."""
        if self._stop.is_set():
            self._kill()
        self._stop.set()

    def progress(self) -> str:
        """Which services are ready, as one line."""
        return "  ".join(f"{child.service.name} {'✓' if child.ready.is_set() else '…'}" for child in self._children)

    async def _keep(self, child: _Child) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            code = await self._live(child)
            if self._stop.is_set():
                return
            await self._after_death(child, code, time.monotonic() - started)

    async def _live(self, child: _Child) -> int:
        """One life of a service, from its start to its exit code."""
        child.process = process = await _spawn(child.service)
        if self._stop.is_set():  # while it was being started
            process.terminate()
        watch = asyncio.create_task(self._watch(child))
        relay = asyncio.create_task(self._relay(child, process))
        try:
            code = await process.wait()
            with contextlib.suppress(TimeoutError):  # what it started may still hold its output open
                await asyncio.wait_for(relay, LAST_WORDS_TIMEOUT_S)
            return code
        finally:
            watch.cancel()
            relay.cancel()

    async def _after_death(self, child: _Child, code: int, lived_s: float) -> None:
        pause_s = child.policy.after_death(lived_s, was_ready=child.ready.is_set())
        what = f"{child.service.name} ended {_exit_in_words(code)} after {lived_s:.1f} s"
        if pause_s is None:
            when = "again and again" if child.ready.is_set() else "before it was ready"
            self._terminal.warn(f"{what}, {when}; stopping everything")
            self.lost = True
            self._stop.set()
            return
        self._terminal.warn(f"{what}; starting it again in {pause_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), pause_s)

    async def _watch(self, child: _Child) -> None:
        await wait_ready(child.service.address)
        if child.ready.is_set():
            self._terminal.say(f"{child.service.name} is ready again")
        child.ready.set()

    async def _relay(self, child: _Child, process: Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # beyond LINE_BYTES_MAX; it was dropped
                continue
            if not line:
                return
            self._terminal.service_line(child.service.name, line.decode("utf-8", "replace").rstrip())

    async def _end(self, child: _Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._stop_timeout_s)
        except TimeoutError:
            self._terminal.warn(f"{child.service.name} did not stop within {self._stop_timeout_s:g} s; killed")
            _kill(process)

    def _kill(self) -> None:
        for child in self._children:
            if child.process is not None:
                _kill(child.process)


async def _spawn(service: Service) -> Process:
    """Starts a service in a process group of its own, so that a terminal's Ctrl-C reaches it through us, in order."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TAILRACE_PARENT_PID": str(os.getpid())}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        service.module,
        *service.flags,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=environ,
        process_group=0,
        limit=LINE_BYTES_MAX,
    )


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _exit_in_words(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
