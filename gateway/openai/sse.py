"""A response of server-sent events, written with as little between the bytes and the socket as HTTP allows."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back otherwise
}


class EventStream:
    """One caller's stream. A write waits only while the caller is behind by more than its transport's buffer."""

    __slots__ = ("_response",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._response = web.StreamResponse(headers={**HEADERS, **headers})

    async def start(self, http: web.Request) -> None:
        """Sends the headers."""
        await self._response.prepare(http)

    async def write(self, events: bytes) -> None:
        """Sends whole events."""
        if events:
            await self._response.write(events)

    async def end(self, last: bytes, *, close_connection: bool = False) -> web.StreamResponse:
        """Sends the last events and the end of the body."""
        if close_connection:
            self._response.force_close()
        await self._response.write_eof(last)
        return self._response
