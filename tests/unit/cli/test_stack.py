from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cli.stack import LOOPBACK, Plan, PortTaken, check_free, free_ports, services_of


def plan() -> Plan:
    http_port, grpc_port = free_ports(2)
    return Plan(model=Path("model"), http_port=http_port, grpc_port=grpc_port)


def flag(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_services_stand_in_the_order_in_which_requests_flow() -> None:
    names = [service.name for service in services_of(plan())]
    assert names == ["gateway", "tokenizer", "detokenizer", "scheduler"]


def test_no_port_is_given_twice() -> None:
    ports = [
        flag(service.flags, name)
        for service in services_of(plan())
        for name in ("--port", "--admin-port", "--metrics-port")
    ]
    assert len(set(ports)) == len(ports) == 12


def test_every_service_ends_with_its_parent_and_listens_on_loopback() -> None:
    for service in services_of(plan()):
        assert "--die-with-parent" in service.flags
        assert flag(service.flags, "--host") == LOOPBACK


def test_every_service_sends_its_spans_where_they_are_wanted_and_none_is_told_of_tracing_otherwise() -> None:
    traced = services_of(replace(plan(), tracing_endpoint="http://127.0.0.1:4317"))
    assert {flag(service.flags, "--tracing-endpoint") for service in traced} == {"http://127.0.0.1:4317"}
    assert not [service for service in services_of(plan()) if "--tracing-endpoint" in service.flags]


def test_free_ports_differ_from_each_other() -> None:
    assert len(set(free_ports(50))) == 50


def test_a_taken_port_is_named_with_the_flag_that_chooses_another() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port}.*--http-port"):
            check_free(LOOPBACK, port, "--http-port")
