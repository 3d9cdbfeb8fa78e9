"""The compose file, the images and Prometheus's configuration say what the processes understand."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config as GatewayConfig
from services.detokenizer.config import Config as DetokenizerConfig
from services.runtime.config import ProcessConfig, load
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import Config as TokenizerConfig
from tests.architecture.source import text_of

CONFIGS: dict[str, type[ProcessConfig]] = {
    "gateway": GatewayConfig,
    "tokenizer": TokenizerConfig,
    "detokenizer": DetokenizerConfig,
    "scheduler": SchedulerConfig,
}
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


def compose_services() -> dict[str, Any]:
    """The compose file's services, with every variable at its default."""
    services = yaml.safe_load(VARIABLE.sub(r"\1", text_of(Path("docker-compose.yml"))))["services"]
    assert isinstance(services, dict)
    return services


def image_environment() -> dict[str, str]:
    """The TAILRACE_ variables that the Dockerfile gives to every image."""
    return dict(re.findall(r"(TAILRACE_[A-Z]+_HOST)=(\S+)", text_of(Path("Dockerfile"))))


def config_in_compose(service: str) -> ProcessConfig:
    environ = image_environment() | compose_services()[service]["environment"]
    return load(CONFIGS[service], prog=service, argv=[], environ=environ)


@pytest.mark.parametrize("service", CONFIGS)
def test_a_container_starts_with_a_configuration_that_its_process_accepts(service: str) -> None:
    assert config_in_compose(service).host == "0.0.0.0"


@pytest.mark.parametrize("service", CONFIGS)
def test_with_tracing_a_container_sends_its_spans_to_the_collector_beside_it(service: str) -> None:
    tracing = yaml.safe_load(VARIABLE.sub(r"\1", text_of(Path("deploy/docker-compose.tracing.yml"))))
    environ = compose_services()[service]["environment"] | tracing["services"][service]["environment"]
    assert load(CONFIGS[service], prog=service, argv=[], environ=environ).tracing_endpoint == "http://jaeger:4317"


@pytest.mark.parametrize("service", CONFIGS)
def test_a_container_is_not_killed_before_its_drain_bound(service: str) -> None:
    grace = compose_services()[service]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > config_in_compose(service).drain_timeout_s


@pytest.mark.parametrize("service", CONFIGS)
def test_the_health_check_asks_the_port_that_the_process_serves(service: str) -> None:
    stage = "scheduler-cpu" if service == "scheduler" else "base"
    in_image = re.search(rf" AS {stage}\n.*?TAILRACE_HEALTH_ADDRESS=(\S+)", text_of(Path("Dockerfile")), re.DOTALL)
    assert in_image is not None
    address = compose_services()[service]["environment"].get("TAILRACE_HEALTH_ADDRESS", in_image[1])
    assert address == f"127.0.0.1:{config_in_compose(service).port}"


@pytest.mark.parametrize("service", CONFIGS)
def test_a_container_calls_its_peers_by_name_and_by_the_port_they_serve(service: str) -> None:
    config = config_in_compose(service)
    for field in fields(config):
        peer = field.name.removesuffix("s")
        if peer in CONFIGS:
            assert getattr(config, field.name) == (f"{peer}:{config_in_compose(peer).port}",)


def test_only_the_gateway_and_what_shows_metrics_are_published() -> None:
    published = {name for name, service in compose_services().items() if "ports" in service}
    assert published == {"gateway", "prometheus", "grafana"}


def test_prometheus_scrapes_the_metrics_port_of_every_service() -> None:
    jobs = yaml.safe_load(text_of(Path("deploy/prometheus/prometheus.yml")))["scrape_configs"]
    scraped = {(name, found["port"]) for job in jobs for found in job["dns_sd_configs"] for name in found["names"]}
    assert scraped == {(service, config_in_compose(service).metrics_port) for service in CONFIGS}
