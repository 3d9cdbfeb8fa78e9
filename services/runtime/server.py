"""A gRPC port: one `grpc.aio` server with health, reflection, limits, and keepalive fit for quiet long streams."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.runtime import health
from services.runtime.health import Health

MAX_MESSAGE_BYTES = 16 << 20
MAX_METADATA_BYTES = 16 << 10

# A stream may be silent for many minutes (a long prefill, a full queue). So that silence is not mistaken for death,
# both sides ping; and so that pings are not mistaken for an attack, the server allows one every 5 s.
KEEPALIVE_INTERVAL_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = 5_000


class PortUnavailable(OSError):
    """A port that cannot be listened on, most often because another process does."""


class GrpcServer:
    """One port: add servicers to `server`, then `start`. Must be made inside a running loop."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        name: str,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_concurrent_rpcs: int | None = None,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.name = name
        self.health = Health()
        self.server = grpc.aio.server(
            options=_options(max_message_bytes), maximum_concurrent_rpcs=max_concurrent_rpcs, interceptors=interceptors
        )
        self._host, self._port = host, port
        self._credentials = credentials
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)

    async def start(self, service_names: Sequence[str] = ()) -> int:
        """Opens the port and returns its number; `service_names` (full) are reflected, and NOT_SERVING at first.

        Raises PortUnavailable.
        """
        self.health.set(service_names, False)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        port = self._bind()
        await self.server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Says NOT_SERVING, refuses new calls, lets open ones end for `grace_s` seconds, then cancels them."""
        self.health.set_all(False)
        await self.server.stop(grace_s)

    def _bind(self) -> int:
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            _probe(self._host, self._port)
            if self._credentials is not None:
                return self.server.add_secure_port(address, self._credentials)
            return self.server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            raise PortUnavailable(f"cannot listen on {address} for {self.name}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Why a port could not be opened, without the address that Python puts behind it: "Address already in use"."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)  # below 0: of name resolution


def _probe(host: str, port: int) -> None:
    """Raises the operating system's own error; gRPC only says that it failed, and writes to standard error besides."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family, backlog=1).close()


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # two processes on one port would share its calls and hide a mistake
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]
