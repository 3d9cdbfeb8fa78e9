"""Load over the OpenAI-compatible HTTP API: streamed chat completions, one connection each."""

from __future__ import annotations

import asyncio
from typing import cast

import orjson

from bench.meter import Meter

_DONE = b"[DONE]"


async def run(address: str, model: str, tokens: int, meter: Meter) -> None:
    """Opens a stream per entry of the meter and returns when all came to their end. Raises ConnectionError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    cut: asyncio.Future[None] = loop.create_future()
    connections = [
        loop.create_connection(_factory(stream, _request(address, model, stream, tokens), meter, cut), host, int(port))
        for stream in range(len(meter.units))
    ]
    opened = await asyncio.gather(*connections)
    ended = asyncio.ensure_future(meter.all_ended.wait())
    await asyncio.wait((ended, cut), return_when=asyncio.FIRST_COMPLETED)
    for transport, _ in opened:
        transport.close()
    if not ended.done():
        ended.cancel()
        cut.result()


def _factory(stream: int, request: bytes, meter: Meter, cut: asyncio.Future[None]) -> type[asyncio.Protocol]:
    return lambda: _Stream(stream, request, meter, cut)  # type: ignore[return-value]  # a factory is all that is needed


class _Stream(asyncio.Protocol):
    """One streamed answer; counts characters, which the usage at its end makes into tokens."""

    def __init__(self, stream: int, request: bytes, meter: Meter, cut: asyncio.Future[None]) -> None:
        self._stream = stream
        self._request = request
        self._meter = meter
        self._cut = cut
        self._received = b""
        self._tokens = 0
        self._accepted = self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done and not self._cut.done():
            self._cut.set_exception(ConnectionError(f"stream {self._stream} was cut: {self._received[-500:]!r}"))

    def data_received(self, data: bytes) -> None:
        if not self._accepted:
            self._accepted = data.startswith(b"HTTP/1.1 200")
        if not self._accepted:
            self._received += data
            self._transport.close()
            return
        # An event ends with an empty line. Chunked framing stands between events and never inside one of ours; whatever
        # isn't an event is skipped.
        *events, self._received = (self._received + data).split(b"\n\n")
        characters = 0
        for event in events:
            start = event.find(b"data: ")
            if start >= 0:
                characters += self._read(event[start + 6 :])
        if characters:
            self._meter.add(self._stream, characters)

    def _read(self, event: bytes) -> int:
        if event == _DONE:
            self._done = True
            self._meter.end(self._stream, self._tokens)
            return 0
        chunk = orjson.loads(event)
        if chunk.get("usage"):
            self._tokens = chunk["usage"]["completion_tokens"]
        if not chunk.get("choices"):
            return 0
        return len(chunk["choices"][0]["delta"].get("content") or "")


def _request(address: str, model: str, stream: int, tokens: int) -> bytes:
    body = orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Stream {stream} of many"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
