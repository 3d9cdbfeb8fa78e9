"""A service that lives as long as its flags say: `python -m tests.integration.cli.small_service --name sleeper`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from services.runtime.config import ProcessConfig, option
from services.runtime.process import Runtime, main


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    """How it behaves."""

    life_s: float = option(3600.0, help="how long it lives before it crashes")
    getting_ready: bool = option(True, help="whether it ever takes requests")
    diary: Path = option(help="file to which it adds a line at its start and at its drain")


class App:
    """Does nothing but live."""

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self._runtime = runtime
        self._config = config

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        return ()

    def add_to_admin(self, server: grpc.aio.Server) -> Sequence[str]:
        return ()

    async def serve(self) -> None:
        self._note("starts")
        if self._config.getting_ready:
            self._runtime.set_ready(True)
        await asyncio.sleep(self._config.life_s)
        raise RuntimeError("its life is over")

    def open_requests(self) -> int:
        return 0

    async def drain(self) -> None:
        self._note("drains")

    async def close(self) -> None:
        pass

    def _note(self, what: str) -> None:
        with self._config.diary.open("a") as diary:
            diary.write(f"{self._runtime.name} {what}\n")


if __name__ == "__main__":
    sys.exit(main("small", Config, App))
