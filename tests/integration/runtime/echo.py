"""A small real service on raw bytes, for tests of what surrounds a service; run as a module it is a process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services.runtime.config import ConfigError, ProcessConfig, option, require
from services.runtime.errors import TailraceError, Unavailable, answering
from services.runtime.process import Runtime, main

SERVICE = "test.Echo"
Context = grpc.aio.ServicerContext[bytes, bytes]


def unary(channel: grpc.aio.Channel, method: str) -> Callable[..., Any]:
    """The stub of a unary method: bytes in, bytes out."""
    return channel.unary_unary(f"/{SERVICE}/{method}")


def stream(channel: grpc.aio.Channel, method: str) -> Callable[..., Any]:
    """The stub of a server-streaming method."""
    return channel.unary_stream(f"/{SERVICE}/{method}")


def handler(**methods: grpc.RpcMethodHandler[bytes, bytes]) -> grpc.GenericRpcHandler:
    """The service with these methods."""
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def raising(error: Exception) -> grpc.RpcMethodHandler[bytes, bytes]:
    """A unary method that fails inside `answering`."""

    async def fail(request: bytes, context: Context) -> bytes:
        async with answering(context, request_id="r-1"):
            raise error

    return grpc.unary_unary_rpc_method_handler(fail)


@dataclass(frozen=True, kw_only=True)
class EchoConfig(ProcessConfig):
    """How the echo misbehaves."""

    crash: str = option("", help="where to fail: make, config, serve, return, drain, close; empty: nowhere")
    block_s: float = option(0.0, help="how long making the app blocks")
    deaf_s: float = option(0.0, help="how long draining blocks the event loop")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "block_s", self.block_s >= 0, "must be 0 or more")


class EchoApp:
    """Streams that stay open until `Finish` is called, or until the process ends them with b"aborted"."""

    def __init__(self, runtime: Runtime, config: EchoConfig) -> None:
        self.calls: list[str] = []
        self._runtime, self._config = runtime, config
        self._open = 0
        self._draining = False
        self._finish, self._aborted, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if config.crash == "config":
            raise ConfigError("model must be a directory")
        self._crash("make")
        print("making", flush=True)
        time.sleep(config.block_s)

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Say, Hold and Finish."""
        server.add_generic_rpc_handlers(
            (
                handler(
                    Say=grpc.unary_unary_rpc_method_handler(self._say),
                    Hold=grpc.unary_stream_rpc_method_handler(self._hold),
                    Finish=grpc.unary_unary_rpc_method_handler(self._do_finish),
                ),
            )
        )
        return [SERVICE]

    def add_to_admin(self, server: grpc.aio.Server) -> Sequence[str]:
        """Nothing."""
        return []

    async def serve(self) -> None:
        """Ready at once."""
        self.calls.append("serve")
        self._runtime.set_ready(True)
        self._crash("serve")
        if self._config.crash == "return":
            return
        try:
            await asyncio.Event().wait()
        finally:
            self.calls.append("serve cancelled")

    def open_requests(self) -> int:
        """Open Holds."""
        return self._open

    async def drain(self) -> None:
        """Refuses Say and Hold, waits for the open Holds."""
        self.calls.append("drain")
        self._crash("drain")
        self._draining = True
        time.sleep(self._config.deaf_s)  # noqa: ASYNC251  # a blocked loop is what it plays
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Ends what is left."""
        self.calls.append("close")
        self._aborted.set()
        self._finish.set()
        self._crash("close")

    async def _say(self, request: bytes, context: Context) -> bytes:
        async with answering(context):
            self._refuse_when_draining()
            return request

    async def _hold(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        async with answering(context):
            self._refuse_when_draining()
            self._open += 1
            try:
                yield b"opened"
                await self._finish.wait()
                yield b"aborted" if self._aborted.is_set() else b"finished"
            finally:
                self._open -= 1
                self._idle.set()

    async def _do_finish(self, request: bytes, context: Context) -> bytes:
        self._finish.set()
        return b""

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("draining", retry_after_s=2, reason="DRAINING")

    def _crash(self, where: str) -> None:
        if self._config.crash == where:
            raise RuntimeError(f"crash in {where}")


async def rest_of(call: Any) -> list[bytes]:
    """What a stream still brings, to its clean end; for calls that were `read` before, which gRPC will not iterate."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails after 30 s."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # what is waited for lies in another process or thread
            await asyncio.sleep(0.005)


def tree(error: TailraceError) -> dict[str, Any]:
    """What an error is, for comparisons."""
    return {"class": type(error).__name__, **vars(error)}


if __name__ == "__main__":
    sys.exit(main("echo", EchoConfig, EchoApp))
