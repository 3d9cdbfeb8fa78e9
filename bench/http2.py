"""Just enough of an HTTP/2 client to read many gRPC streams of one connection at little cost (RFC 9113, RFC 7541).

gRPC's own Python client costs more per message than our four services together; a load generator that did would measure
itself. This one sends requests with literal headers, opens every window wide, and skips the headers that it gets: an
answer's own Completed says that it is whole.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW_BYTES_MAX = 2**31 - 1
WINDOW_BYTES_DEFAULT = 65_535
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS, PADDED = 1, 1, 4, 8
_INITIAL_WINDOW_SIZE = 4
_FRAME_HEADER = 9
_MESSAGE_HEADER = 5

OnMessage = Callable[[int, bytes], None]


class GrpcConnection(asyncio.Protocol):
    """One connection; `on_message` gets each answer's number (from 0, in the order of `call`) and message."""

    def __init__(
        self, authority: str, path: str, on_message: OnMessage, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self._request_headers = _headers(authority, path)
        self._on_message = on_message
        self._on_close = on_close
        self._received = bytearray()
        self._partial: dict[int, bytes] = {}
        self._calls = 0
        self.failed: str | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opens both windows as wide as they go."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        settings = _frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, WINDOW_BYTES_MAX))
        more = struct.pack(">I", WINDOW_BYTES_MAX - WINDOW_BYTES_DEFAULT)
        self._transport.write(PREFACE + settings + _frame(WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, error: Exception | None) -> None:
        """Everything that was open is cut."""
        self.closed = True
        self._on_close()

    def call(self, message: bytes) -> int:
        """Starts a call with one request message; returns its number."""
        stream = 2 * self._calls + 1
        body = struct.pack(">BI", 0, len(message)) + message
        headers = _frame(HEADERS, END_HEADERS, stream, self._request_headers)
        self._transport.write(headers + _frame(DATA, END_STREAM, stream, body))
        self._calls += 1
        return self._calls - 1

    def close(self) -> None:
        """Ends the connection and what is open on it."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Takes whole frames off what has come."""
        received = self._received
        received += data
        start, end = 0, len(received)
        while end - start >= _FRAME_HEADER:
            length = received[start] << 16 | received[start + 1] << 8 | received[start + 2]
            after = start + _FRAME_HEADER + length
            if after > end:
                break
            kind, flags = received[start + 3], received[start + 4]
            stream = int.from_bytes(received[start + 5 : start + 9], "big")
            self._frame_received(kind, flags, stream, bytes(received[start + _FRAME_HEADER : after]))
            start = after
        del received[:start]

    def _frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._messages(stream, payload[1 : len(payload) - payload[0]] if flags & PADDED else payload)
        elif kind == PING and not flags & ACK:
            self._transport.write(_frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(_frame(SETTINGS, ACK, 0, b""))
        elif kind == GOAWAY or (kind == RST_STREAM and payload != b"\0\0\0\0"):
            self.failed = f"frame {kind} on stream {stream}: {payload!r}"
            self._transport.close()

    def _messages(self, stream: int, payload: bytes) -> None:
        if stream in self._partial:
            payload = self._partial.pop(stream) + payload
        start, end = 0, len(payload)
        while end - start >= _MESSAGE_HEADER:
            after = start + _MESSAGE_HEADER + int.from_bytes(payload[start + 1 : start + 5], "big")
            if after > end:
                break
            self._on_message(stream >> 1, payload[start + _MESSAGE_HEADER : after])
            start = after
        if start < end:
            self._partial[stream] = payload[start:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _headers(authority: str, path: str) -> bytes:
    """A gRPC request's headers as literals that no table has to remember."""
    post, http = b"\x83", b"\x86"  # indexed :method POST, :scheme http
    return (
        post + http + b"\x04" + _text(path) + b"\x01" + _text(authority)
        + b"\x00" + _text("content-type") + _text("application/grpc")
        + b"\x00" + _text("te") + _text("trailers")
    )  # fmt: skip


def _text(text: str) -> bytes:
    encoded = text.encode()
    assert len(encoded) < 127, "longer texts need HPACK's longer form"
    return bytes((len(encoded),)) + encoded
