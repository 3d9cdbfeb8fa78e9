"""The HTTP port: a bounded number of connections, each with a bounded time to say what it wants."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.openai.errors import reply_of
from gateway.openai.json_text import json_object
from services.runtime.errors import Unavailable
from services.runtime.server import PortUnavailable

BACKLOG = 1024
_BODY = json_object(reply_of(Unavailable("too many connections are open", reason="TOO_MANY_CONNECTIONS")).body)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class HttpServer:
    """One HTTP port for an aiohttp application."""

    def __init__(
        self,
        application: web.Application,
        *,
        host: str,
        port: int,
        connections_max: int,
        headers_timeout_s: float,
    ) -> None:
        self.port = port
        self._host = host
        self._connections_max = connections_max
        # aiohttp counts its keep-alive time from the connection's start too, so it bounds slow headers as well.
        # A caller that leaves cancels its handler, which is how we learn of it.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, keepalive_timeout=headers_timeout_s, access_log=None
        )
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Opens the port; `port` tells which when 0 was asked for. Raises PortUnavailable."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._accept, self._host, self.port, backlog=BACKLOG)
        except OSError as error:
            raise PortUnavailable(f"cannot listen on {self._host}:{self.port} for HTTP: {error.strerror}") from error
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the port and every connection."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        return _Refusing() if len(server.connections) >= self._connections_max else server()


class _Refusing(asyncio.Protocol):
    """Answers a connection beyond the limit before reading from it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Says so and hangs up."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(_REFUSAL)
        transport.close()
