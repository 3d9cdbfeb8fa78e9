"""Load over the OpenAI-compatible HTTP API: streamed chat completions, one connection each."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import orjson

from bench.meter import CHARACTERS_PER_TOKEN, TOKENS_MAX, Meter

_DONE = b"[DONE]"


async def run(address: str, model: str, meter: Meter) -> None:
    """Opens a stream per entry of the meter and leaves when it has seen enough. Raises ConnectionError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    opened = await asyncio.gather(
        *(
            loop.create_connection(partial(_Stream, stream, _request(address, model, stream), meter), host, int(port))
            for stream in range(meter.streams)
        )
    )
    await meter.over.wait()
    cut = [stream.received[-300:] for _, stream in opened if stream.cut]
    if cut:
        raise ConnectionError(f"{len(cut)} streams were cut, such as after {cut[0]!r}")
    for transport, _ in opened:
        transport.close()


class _Stream(asyncio.Protocol):
    """One streamed answer, read for its text."""

    def __init__(self, stream: int, request: bytes, meter: Meter) -> None:
        self._stream = stream
        self._request = request
        self._meter = meter
        self._accepted = False
        self.received = b""
        self.cut = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        """Before the meter has seen enough, that is a failure."""
        self.cut = not self._meter.over.is_set()
        self._meter.over.set()

    def data_received(self, data: bytes) -> None:
        """An event ends with an empty line. Chunked framing stands between events; what isn't an event is skipped."""
        if not self._accepted:
            self._accepted = data.startswith(b"HTTP/1.1 200")
        *events, self.received = (self.received + data).split(b"\n\n")
        tokens = sum(map(self._read, events)) if self._accepted else 0
        if tokens:
            self._meter.add(self._stream, tokens)

    def _read(self, event: bytes) -> float:
        start = event.find(b"data: ")
        if start < 0:
            return 0
        if event.endswith(_DONE):
            self._meter.over.set()
            return 0
        choices = orjson.loads(event[start + 6 :]).get("choices")
        return len(choices[0]["delta"].get("content") or "") / CHARACTERS_PER_TOKEN if choices else 0


def _request(address: str, model: str, stream: int) -> bytes:
    body = orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Stream {stream} of many"}],
            "max_tokens": TOKENS_MAX,
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
