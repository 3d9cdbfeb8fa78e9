"""A service in a process of its own that a test kills, stops and starts again on the same port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cli.readiness import wait_ready
from cli.stack import free_ports

END_TIMEOUT_S = 20.0


@dataclass
class Killable:
    """One service, by its module for `python -m`; `log` is a file for what it says, none: this process's own output."""

    module: str
    flags: tuple[str, ...]
    log: Path | None = None
    port: int = field(default_factory=lambda: free_ports(1)[0])
    admin_port: int = 0
    process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        """Where it answers."""
        return f"127.0.0.1:{self.port}"

    @property
    def admin_address(self) -> str:
        """Where it answers to operators; needs an `admin_port` that was chosen."""
        return f"127.0.0.1:{self.admin_port}"

    async def start(self) -> None:
        """Starts it; whoever needs it waits until it answers."""
        ports = ("--port", str(self.port), "--admin-port", str(self.admin_port), "--metrics-port", "0")
        command = (sys.executable, "-m", self.module, *ports, "--log-level", "warning", *self.flags)
        output = None if self.log is None else self.log.open("ab")
        try:
            self.process = await asyncio.create_subprocess_exec(
                *command, "--die-with-parent", stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, "TAILRACE_PARENT_PID": str(os.getpid())},
            )  # fmt: skip
        finally:
            if output is not None:
                output.close()

    async def wait_ready(self) -> None:
        """Until it takes requests."""
        await wait_ready(self.address)

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it lives."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """No goodbye. Harmless when it is dead already."""
        self.send(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()

    async def end(self) -> None:
        """As an operator would; killed when that takes too long."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if self.process is not None:
                    await self.process.wait()
        except TimeoutError:
            await self.kill()
