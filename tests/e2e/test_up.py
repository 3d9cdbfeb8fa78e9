"""`tailrace up` as a person runs it: a child process, its exit code, what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from cli.stack import LOOPBACK, free_ports
from tailrace.client import Client

BOUND_S = 90.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Up:
    """One `tailrace up`, and what it has written."""

    process: asyncio.subprocess.Process
    grpc: str
    lines: list[str] = field(default_factory=list)

    async def until(self, pattern: str) -> str:
        """The next line in which the pattern is found; fails when the output ends before."""
        assert self.process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            async for raw in self.process.stdout:
                self.lines.append(raw.decode().rstrip())
                if re.search(pattern, self.lines[-1]):
                    return self.lines[-1]
        raise AssertionError(f"no {pattern!r} in:\n" + "\n".join(self.lines))

    async def end(self) -> int:
        """Its exit code, once it has ended."""
        assert self.process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            self.lines += (await self.process.stdout.read()).decode().splitlines()
            return await self.process.wait()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@asynccontextmanager
async def up(model: Path, *flags: str) -> AsyncIterator[Up]:
    http_port, grpc_port = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", "up", "--fake-engine", "--model", str(model),
        "--http-port", str(http_port), "--grpc-port", str(grpc_port), *flags,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield Up(process, f"{LOOPBACK}:{grpc_port}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_up_serves_restarts_what_dies_and_stops_with_0(model_directory: Path) -> None:
    async with up(model_directory) as system:
        await system.until("ready after")
        async with Client(system.grpc) as client:
            assert (await client.generate("a", max_tokens=3, ignore_eos=True).whole()).usage.output_tokens == 3
        detokenizer = next(child for child in system.children() if "services.detokenizer" in child.cmdline())
        detokenizer.kill()
        await system.until("detokenizer ended by signal 9")
        await system.until("detokenizer is ready again")
        system.process.send_signal(signal.SIGINT)
        assert await system.end() == 0


async def test_up_that_is_killed_leaves_no_process(model_directory: Path) -> None:
    async with up(model_directory) as system:
        await system.until("ready after")
        children = system.children()
        assert len(children) == 4
        system.process.kill()
        await system.process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, BOUND_S)
        assert alive == []


async def test_up_under_load_finishes_what_is_open_on_sigterm(model_directory: Path) -> None:
    async with up(model_directory) as system:
        await system.until("ready after")
        async with Client(system.grpc) as client:
            options = {"max_tokens": 3000, "ignore_eos": True}
            started = asyncio.Semaphore(0)

            async def ask(number: int) -> int:
                tokens = 0
                async for event in client.generate(f"{number}", **options):  # type: ignore[arg-type]  # a plain dict
                    started.release()
                    tokens += len(getattr(event, "token_ids", ()))
                return tokens

            asked = [asyncio.create_task(ask(number)) for number in range(10)]
            await started.acquire()
            system.process.send_signal(signal.SIGTERM)
            code = await system.end()
            finished = await asyncio.gather(*asked, return_exceptions=True)
        assert code == 0
        assert 3000 in finished


async def test_demo_streams_an_answer_and_says_how_to_get_the_next(model_directory: Path) -> None:
    async with up(model_directory, "--demo") as system:
        await system.until("Ctrl-C stops everything")
        said = "\n".join(system.lines)
        assert all(way in said for way in ("curl -N", "import openai", "buf curl", "tailrace.client", "tailrace chat"))
        system.process.send_signal(signal.SIGINT)
        assert await system.end() == 0


async def test_a_taken_port_is_said_before_anything_starts(model_directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        async with up(model_directory, "--http-port", str(taken.getsockname()[1])) as system:
            assert await system.end() == 1
            assert len(system.lines) == 1
            assert "choose another with --http-port" in system.lines[0]


async def test_a_model_that_cannot_be_loaded_stops_everything_and_says_why(
    model_directory: Path, tmp_path: Path
) -> None:
    for name in os.listdir(model_directory):
        if name != "config.json" and not name.endswith(".safetensors"):
            (tmp_path / name).symlink_to(model_directory / name)
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    async with up(tmp_path) as system:
        assert await system.end() == 1
        assert any("before it was ready" in line for line in system.lines)
        assert any("config.json" in line for line in system.lines)


@pytest.mark.parametrize("name", ["no-such-directory", "README.md"])
async def test_what_is_no_model_is_refused(name: str) -> None:
    async with up(ROOT / name) as system:
        assert await system.end() == 1
        assert name in system.lines[0]
