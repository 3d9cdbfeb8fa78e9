"""Load over gRPC: all streams on one connection, as a client with one channel has them."""

from __future__ import annotations

import asyncio

from bench.http2 import GrpcConnection
from bench.meter import TOKENS_MAX, Meter
from tailrace.v1 import generation_pb2

PATH = "/tailrace.v1.GenerationService/Generate"


async def run(address: str, meter: Meter) -> None:
    """Opens a stream per entry of the meter and leaves when it has seen enough. Raises ConnectionError."""

    def read(stream: int, message: bytes) -> None:
        event = generation_pb2.GenerationEvent.FromString(message)
        if event.HasField("delta"):
            meter.add(stream, len(event.delta.token_ids))
        elif event.HasField("completed"):
            meter.over.set()

    host, _, port = address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: GrpcConnection(address, PATH, read, on_close=meter.over.set), host, int(port)
    )
    for stream in range(meter.streams):
        connection.call(_request(stream))
    await meter.over.wait()
    if connection.closed:
        raise ConnectionError(connection.failed or "the server closed the connection")
    connection.close()


def _request(stream: int) -> bytes:
    request = generation_pb2.GenerateRequest(text=f"Stream {stream} of many:")
    request.options.stopping.max_tokens = TOKENS_MAX
    request.options.stopping.ignore_eos = True
    return request.SerializeToString()
