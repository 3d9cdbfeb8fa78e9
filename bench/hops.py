"""The least that a chain of gRPC hops adds on this machine: what the return path's latency is to be judged by.

    python -m bench.hops [--hops 4] [--seconds 10]

Each hop is a process of its own that does nothing but pass messages on: a server-streaming `grpc.aio` call, uvloop, one
message per 20 ms on the wall clock's grid, as the fake engine steps. Beside it stands a bare TCP hop, without gRPC or
an event loop: a blocking read in one process, a write in another. What is left between the two is gRPC's price.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import socket
import struct
import sys
import time
from collections.abc import Iterable

import grpc
import grpc.aio
import numpy as np
import uvloop

PACE_S = 0.02
WARM_UP = 20
"""Messages that come before connections and caches are warm."""
STAMP = struct.Struct("!d")
METHOD = "/bench.Hop/Stream"


def main() -> int:
    """Prints both latencies."""
    parser = argparse.ArgumentParser(prog="python -m bench.hops", description=__doc__)
    parser.add_argument("--hops", type=int, default=4, help="processes that pass each message on (default: 4)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each is measured (default: 10)")
    options = parser.parse_args()
    messages = int(options.seconds / PACE_S) + WARM_UP
    _show("one TCP hop", _tcp_hop_ms(messages))
    _show(f"{options.hops} gRPC hops", _grpc_hops_ms(options.hops, messages))
    return 0


def _show(what: str, latencies_ms: Iterable[float]) -> None:
    p50, p99 = np.percentile(list(latencies_ms)[WARM_UP:], [50, 99])
    print(f"{what:<14} p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def _since_stamp_ms(stamp: bytes) -> float:
    return float((time.time() - STAMP.unpack(stamp)[0]) * 1000)


def _to_grid_s() -> float:
    return PACE_S - time.time() % PACE_S


def _tcp_hop_ms(messages: int) -> list[float]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = multiprocessing.Process(target=_write_stamps, args=(server.getsockname(), messages), daemon=True)
        writer.start()
        with server.accept()[0] as connection:
            return [_since_stamp_ms(connection.recv(STAMP.size, socket.MSG_WAITALL)) for _ in range(messages)]


def _write_stamps(address: tuple[str, int], messages: int) -> None:
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(messages):
            time.sleep(_to_grid_s())
            connection.sendall(STAMP.pack(time.time()))


def _grpc_hops_ms(hops: int, messages: int) -> list[float]:
    spawn = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    port = 0
    for _ in range(hops):
        receiver, sender = spawn.Pipe(duplex=False)
        spawn.Process(target=_serve, args=(port, sender), daemon=True).start()
        port = receiver.recv()
    return uvloop.run(_read(port, messages))


def _serve(upstream_port: int, ready: multiprocessing.connection.Connection) -> None:
    """One hop: the first makes the messages, the others pass on what the one before sends."""
    uvloop.run(_serve_hop(upstream_port, ready))


async def _serve_hop(upstream_port: int, ready: multiprocessing.connection.Connection) -> None:
    async def stream(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if not upstream_port:
            while True:
                await asyncio.sleep(_to_grid_s())
                await context.write(STAMP.pack(time.time()))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{upstream_port}") as channel:
            async for message in _call(channel):
                await context.write(message)

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(
        "bench.Hop", {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    )
    server.add_generic_rpc_handlers((handler,))
    ready.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


async def _read(port: int, messages: int) -> list[float]:
    latencies_ms: list[float] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = _call(channel)
        async for message in call:
            latencies_ms.append(_since_stamp_ms(message))
            if len(latencies_ms) == messages:
                call.cancel()
                break
    return latencies_ms


def _call(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
    return method(b"")


if __name__ == "__main__":
    sys.exit(main())
