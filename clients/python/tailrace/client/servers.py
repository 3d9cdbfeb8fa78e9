"""The servers that a client may ask, one at a time: the next one when the one before can't be reached."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from tailrace.client.liveness import Health
from tailrace.v1 import generation_pb2_grpc

MAX_MESSAGE_BYTES = 16 << 20

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A long prefill or a full queue is silence; pings tell it from a dead server.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Servers:
    """A connection to each address, made when it is first used. Must be made inside a running loop."""

    def __init__(self, addresses: Sequence[str], api_key: str | None) -> None:
        self.metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channels = [grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) for address in addresses]
        self._stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._health = [Health(channel) for channel in self._channels]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._stubs)

    @property
    def stub(self) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        """The one whose turn it is."""
        return self._stubs[self._turn]

    def turn_from(self, stub: generation_pb2_grpc.GenerationServiceAsyncStub) -> None:
        """This one failed a caller: the next one's turn, unless another caller has said so already."""
        if stub is self.stub:
            self._turn = (self._turn + 1) % len(self._stubs)

    def after(
        self, stub: generation_pb2_grpc.GenerationServiceAsyncStub
    ) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        """The one whose turn is next."""
        return self._stubs[(self._stubs.index(stub) + 1) % len(self)]

    def health_of(self, stub: generation_pb2_grpc.GenerationServiceAsyncStub) -> Health | None:
        """How to ask whether it stands still; None where there is no other to turn to."""
        return self._health[self._stubs.index(stub)] if len(self) > 1 else None

    async def close(self) -> None:
        """Ends the connections, and with them every open stream."""
        for channel in self._channels:
            await channel.close()
