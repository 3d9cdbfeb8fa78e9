"""`tailrace health`: does a server take requests? Made for people, scripts and container health checks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.exit_code import ExitCode
from cli.server_address import DEFAULT

_STATUS = health_pb2.HealthCheckResponse.ServingStatus


def main(argv: Sequence[str]) -> int:
    """Prints the answer; exit code 0 means it takes requests, 1 that it doesn't, 3 that nobody answers."""
    options = _parser().parse_args(argv)
    with grpc.insecure_channel(options.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=options.service)
        try:
            status = stub.Check(request, timeout=options.timeout_s).status  # type: ignore[attr-defined]  # a gap in its stub
        except grpc.RpcError as error:
            return _report_failure(error, options.address)
    print(f"{options.address}: {_STATUS.Name(status)}")
    return ExitCode.OK if status == health_pb2.HealthCheckResponse.SERVING else ExitCode.FAILED


def _report_failure(error: grpc.RpcError, address: str) -> int:
    assert isinstance(error, grpc.Call)  # every error of a call is one
    if error.code() is grpc.StatusCode.NOT_FOUND:
        print(f"{address}: it serves no such service", file=sys.stderr)
        return ExitCode.FAILED
    print(f"{address}: nobody answers ({error.details()})", file=sys.stderr)
    return ExitCode.UNREACHABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tailrace health", description="Asks a server whether it takes requests.")
    parser.add_argument("address", nargs="?", default=DEFAULT, metavar="HOST:PORT", help=f"default: {DEFAULT}")
    parser.add_argument("--service", default="", metavar="NAME", help="a full service name; default: the whole process")
    parser.add_argument("--timeout-s", type=float, default=3.0, metavar="SECONDS", help="default: 3")
    return parser
