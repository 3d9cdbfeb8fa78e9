"""The server's side of a call: as much of `grpc.aio.Server` as our processes use, over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from tests.simulation.channel import ClientCall, Trailers
from tests.simulation.loop import ProcessLoop
from tests.simulation.network import Network, Wire
from tests.simulation.shown import shown

NOT_TOLD = ("batch { }", "load {")
"""Heartbeats, and what is as good as one."""


class SimServer:
    """One port of one process."""

    def __init__(self, network: Network, loop: ProcessLoop) -> None:
        self.loop = loop
        self._network = network
        self._address = ""
        self._methods: dict[str, Any] = {}
        self._calls: dict[ServerCall, None] = {}
        self._open = True
        self._idle: asyncio.Future[None] | None = None

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """What a generated `add_…_to_server` gives."""
        self._methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """The same methods once more."""

    def add_insecure_port(self, address: str) -> int:
        """Where it will listen."""
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        """Listens."""
        self._network.servers[self._address] = self

    async def stop(self, grace: float | None) -> None:
        """Refuses new calls, lets open ones end for a while, then ends them."""
        self._open = False
        if self._network.servers.get(self._address) is self:
            del self._network.servers[self._address]
        if self._calls and grace:
            self._idle = self.loop.create_future()
            try:
                async with asyncio.timeout(grace):
                    await self._idle
            except TimeoutError:
                pass
        for call in list(self._calls):
            call.end(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")
            call.task.cancel()

    def accept(self, wire: Wire) -> None:
        """A call has come."""
        call = ServerCall(self._network, self.loop, wire, wire.client.expires_at)
        wire.server = call
        handler = self._methods.get(wire.client.path)
        if not self._open or handler is None:
            code = grpc.StatusCode.UNIMPLEMENTED if self._open else grpc.StatusCode.UNAVAILABLE
            call.end(code, "Method not found!" if self._open else "the server is stopped")
            return
        self._calls[call] = None
        call.task = self.loop.create_task(call.serve(handler, wire.client.request))
        call.task.add_done_callback(partial(self._served, call))
        if wire.broken:
            # Its connection broke while it waited at a paused process's door.
            self._network.world.after(self._network.moment(), lambda: self.loop.deliver(call.left))

    def _served(self, call: ServerCall, task: asyncio.Task[None]) -> None:
        self._calls.pop(call, None)
        if not self._calls and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._network.world.violated(f"{self.loop.name}: a servicer raised {error!r}")


class ServerCall:
    """One call as its servicer sees it: a `ServicerContext`."""

    task: asyncio.Task[None]

    def __init__(self, network: Network, loop: ProcessLoop, wire: Wire, expires_at: float | None) -> None:
        self._network = network
        self._loop = loop
        self._wire = wire
        self._expires_at = expires_at
        self._serialize: Any = None
        self._over = False
        self._unread = 0
        self._room: asyncio.Future[None] | None = None

    async def serve(self, handler: Any, request: bytes) -> None:
        """Runs the servicer's method."""
        self._serialize = handler.response_serializer
        message = handler.request_deserializer(request)
        try:
            if not handler.response_streaming:
                self._send(await handler.unary_unary(message, self))
            else:
                result = handler.unary_stream(message, self)
                if hasattr(result, "__aiter__"):
                    async for response in result:
                        await self.write(response)
                else:
                    await result
            self.end(grpc.StatusCode.OK, "")
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            # Cancelled from inside its process: the call goes with its handler.
            self.end(grpc.StatusCode.CANCELLED, "the servicer gave the call up")
            raise
        finally:
            self._over = True

    # -- what arrives

    def left(self) -> None:
        """The caller has left, or the connection is gone."""
        if not self._over:
            self._over = True
            self._network.forget(self._wire)
            self.task.cancel()

    def was_read(self) -> None:
        """The caller has taken a message."""
        self._unread -= 1
        if self._room is not None:
            self._wire.to_server(ServerCall.has_room)

    def has_room(self) -> None:
        """A message more may be written."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # -- what the servicer does

    async def write(self, response: Any) -> None:
        """Sends a message; waits while too many have not been read."""
        while self._unread >= self._network.window:
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None
        if self._over:
            raise grpc.aio.UsageError("RPC already finished.")
        self._unread += 1
        self._send(response)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Trailers = ()) -> None:
        """Ends the call with a status."""
        self.end(code, details, trailing_metadata)
        raise grpc.aio.AbortError

    def end(self, code: grpc.StatusCode, details: str, trailers: Trailers = ()) -> None:
        """Sends the status, once."""
        if self._over:
            return
        self._over = True
        client = self._wire.client
        if client.answer_is_lost:
            self._wire.break_off("connection reset by peer")
        else:
            self._wire.to_client(lambda client: client.ended(code, details, trailers))

    def time_remaining(self) -> float | None:
        """What is left of the caller's deadline, seconds."""
        return None if self._expires_at is None else max(self._expires_at - self._network.world.now, 0.0)

    def invocation_metadata(self) -> Trailers:
        """None is sent here."""
        return ()

    def _send(self, response: Any) -> None:
        world, data = self._network.world, self._serialize(response)
        if world.tells and not (words := shown(response)).startswith(NOT_TOLD):
            world.tell(self._loop.name, f"⇒ {self._wire.caller.name} {self._wire.client.method} {words}")
        if not self._wire.client.answer_is_lost:
            self._wire.to_client(partial(ClientCall.message, data=data))
