"""Load over gRPC: all streams on one connection, as a client with one channel has them."""

from __future__ import annotations

import asyncio

from bench.http2 import GrpcConnection
from bench.meter import Meter
from tailrace.v1 import generation_pb2

PATH = "/tailrace.v1.GenerationService/Generate"


async def run(address: str, tokens: int, meter: Meter) -> None:
    """Opens a stream per entry of the meter and returns when all came to their end. Raises ConnectionError."""

    def read(stream: int, message: bytes) -> None:
        event = generation_pb2.GenerationEvent.FromString(message)
        if event.HasField("delta"):
            meter.add(stream, len(event.delta.token_ids))
        elif event.HasField("completed"):
            meter.end(stream, event.completed.usage.output_tokens)

    host, _, port = address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: GrpcConnection(address, PATH, read), host, int(port)
    )
    for stream in range(len(meter.units)):
        connection.call(_request(stream, tokens))
    ended = asyncio.ensure_future(meter.all_ended.wait())
    closed = asyncio.ensure_future(connection.closed.wait())
    await asyncio.wait((ended, closed), return_when=asyncio.FIRST_COMPLETED)
    closed.cancel()
    if not ended.done():
        ended.cancel()
        raise ConnectionError(connection.failed or "the server closed the connection")
    connection.close()


def _request(stream: int, tokens: int) -> bytes:
    request = generation_pb2.GenerateRequest(text=f"Stream {stream} of many:")
    request.options.stopping.max_tokens = tokens
    request.options.stopping.ignore_eos = True
    return request.SerializeToString()
