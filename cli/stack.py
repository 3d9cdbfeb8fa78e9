"""The four services as one machine runs them: who listens where, and with which flags."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
_INTERNAL_PORTS = 3 + 4 * 2  # three services, and an admin and a metrics port for each of the four


@dataclass(frozen=True, slots=True)
class Service:
    """One service to run: its module for `python -m`, its flags, and where it answers."""

    name: str
    module: str
    address: str
    admin_address: str
    metrics_port: int
    flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to run. `model` is a directory; the fake engine needs it too, for its tokenizer."""

    model: Path
    fake_engine: bool = False
    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 7000
    drain_timeout_s: float = 30.0
    log_level: str = "info"
    tracing_endpoint: str = ""
    engine_flags: tuple[str, ...] = ()


class PortTaken(Exception):
    """Another program listens on a port that was asked for."""


def services_of(plan: Plan) -> list[Service]:
    """The services in the order in which requests flow; internal ports are free ones. Raises PortTaken."""
    check_free(plan.host, plan.http_port, "--http-port")
    check_free(plan.host, plan.grpc_port, "--grpc-port")
    ports = iter(free_ports(_INTERNAL_PORTS))
    gateway = f"{plan.host}:{plan.grpc_port}"
    tokenizer, detokenizer, scheduler = (f"{LOOPBACK}:{next(ports)}" for _ in range(3))
    model = ("--model", str(plan.model))
    engine = ("--engine", "fake") if plan.fake_engine else ()
    upstream = ("--schedulers", scheduler, "--detokenizers", detokenizer)
    return [
        _service("gateway", gateway, ports, plan, "--http-port", str(plan.http_port), "--tokenizers", tokenizer),
        _service("services.tokenizer", tokenizer, ports, plan, *model, *upstream),
        _service("services.detokenizer", detokenizer, ports, plan, *model, "--schedulers", scheduler),
        _service("services.scheduler", scheduler, ports, plan, *model, *engine, *plan.engine_flags),
    ]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below those that the system gives to outgoing connections.

    Raises PortTaken when there aren't that many.
    """
    free = (port for port in random.sample(_PORTS, len(_PORTS)) if _is_free(LOOPBACK, port))
    found = list(islice(free, count))
    if len(found) < count:
        raise PortTaken(f"no {count} free ports from {_PORTS.start} to {_PORTS.stop - 1}")
    return found


def check_free(host: str, port: int, flag: str) -> None:
    """Raises PortTaken, naming the flag that chooses another, when somebody listens there."""
    if not _is_free(host, port):
        raise PortTaken(f"port {port} on {host} is taken or not allowed; choose another with {flag}")


def _service(module: str, address: str, ports: Iterator[int], plan: Plan, *flags: str) -> Service:
    host, _, port = address.rpartition(":")
    admin_port, metrics_port = next(ports), next(ports)
    common = (
        "--host", host, "--port", port, "--admin-port", str(admin_port), "--metrics-port", str(metrics_port),
        "--drain-timeout-s", str(plan.drain_timeout_s), "--log-format", "text", "--log-level", plan.log_level,
        "--die-with-parent",
    )  # fmt: skip
    traced = ("--tracing-endpoint", plan.tracing_endpoint) if plan.tracing_endpoint else ()
    name = module.rpartition(".")[2]
    return Service(name, module, address, f"{host}:{admin_port}", metrics_port, (*common, *traced, *flags))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
