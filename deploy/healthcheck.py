"""Asks a process over gRPC whether it serves: exit 0 if so, 1 with the reason if not. For a container's health check.

python deploy/healthcheck.py [HOST:PORT]      default: the variable TAILRACE_HEALTH_ADDRESS
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
SERVING = health_pb2.HealthCheckResponse.SERVING


def trouble(address: str) -> str | None:
    """Why the process at `address` is not to be sent requests; None when it is."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)  # type: ignore[attr-defined]  # stubs lack it
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    return None if answer.status == SERVING else f"{address}: not serving"


def main(argv: list[str]) -> int:
    address = argv[0] if argv else os.environ["TAILRACE_HEALTH_ADDRESS"]
    found = trouble(address)
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
