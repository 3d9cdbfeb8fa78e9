import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.runtime import __version__, metrics, metrics_server
from services.runtime.metrics import (
    DetokenizerMetrics,
    GatewayMetrics,
    RuntimeMetrics,
    SchedulerMetrics,
    TokenizerMetrics,
)
from services.runtime.phase import Phase
from services.runtime.token_histogram import TokenHistogram

SERVICES: dict[str, Callable[[CollectorRegistry], Any]] = {
    "gateway": GatewayMetrics,
    "tokenizer": TokenizerMetrics,
    "detokenizer": DetokenizerMetrics,
    "scheduler": SchedulerMetrics,
}


def every_metric() -> CollectorRegistry:
    registry = metrics.new_registry()
    RuntimeMetrics(registry, service="all")
    for make in SERVICES.values():
        make(registry)
    return registry


@pytest.mark.parametrize("service", SERVICES)
def test_an_attribute_is_the_metrics_name_without_its_prefix(service: str) -> None:
    registry = CollectorRegistry()
    bound = SERVICES[service](registry)
    exposed = set()
    for family in registry.collect():
        exposed.add(family.name + ("_total" if family.type == "counter" else ""))
    assert exposed == {f"tailrace_{service}_{attribute}" for attribute in vars(bound)}


def test_every_metric_says_what_it_is_in_one_sentence() -> None:
    for family in every_metric().collect():
        if family.name.startswith("tailrace_"):
            assert family.documentation.endswith("."), family.name


def test_units_stand_last_and_only_counters_are_totals() -> None:
    for family in every_metric().collect():
        assert not family.name.endswith(("_ms", "_milliseconds", "_total", "_count", "_sum")), family.name
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_size")), family.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say() -> None:
    exposition = generate_latest(every_metric())
    done = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")


def test_known_label_values_stand_at_zero_before_the_first_event() -> None:
    registry = CollectorRegistry()
    TokenizerMetrics(registry)
    for reason in ("STOP", "LENGTH", "ABORTED", "DEADLINE", "ERROR"):
        assert registry.get_sample_value("tailrace_tokenizer_requests_total", {"reason": reason}) == 0
    GatewayMetrics(registry)
    labels = {"transport": "http", "outcome": "completed"}
    assert registry.get_sample_value("tailrace_gateway_requests_total", labels) == 0


def test_two_processes_metrics_live_side_by_side() -> None:
    one, other = metrics.new_registry(), metrics.new_registry()
    SchedulerMetrics(one).waiting.set(3)
    SchedulerMetrics(other)
    assert one.get_sample_value("tailrace_scheduler_waiting") == 3
    assert other.get_sample_value("tailrace_scheduler_waiting") == 0


def test_the_build_says_version_and_service() -> None:
    registry = CollectorRegistry()
    RuntimeMetrics(registry, service="gateway")
    assert registry.get_sample_value("tailrace_build_info", {"version": __version__, "service": "gateway"}) == 1


def test_exactly_one_phase_is_current() -> None:
    registry = CollectorRegistry()
    runtime = RuntimeMetrics(registry, service="x")
    for current in Phase:
        runtime.set_phase(current)
        values = {phase: registry.get_sample_value("tailrace_phase", {"phase": phase.value}) for phase in Phase}
        assert values == {phase: float(phase is current) for phase in Phase}


def test_metrics_are_served_over_http_until_closed() -> None:
    port, close = metrics_server.serve(every_metric(), host="127.0.0.1", port=0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            families = {family.name for family in text_string_to_metric_families(answer.read().decode())}
    finally:
        close()
    assert {"tailrace_build_info", "tailrace_scheduler_waiting", "process_cpu_seconds"} <= families
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_metrics_are_served_on_ipv6() -> None:
    port, close = metrics_server.serve(CollectorRegistry(), host="::1", port=0)
    try:
        with urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=5) as answer:
            assert answer.status == 200
    finally:
        close()


def test_a_taken_metrics_port_raises() -> None:
    port, close = metrics_server.serve(CollectorRegistry(), host="127.0.0.1", port=0)
    try:
        with pytest.raises(OSError, match="in use"):
            metrics_server.serve(CollectorRegistry(), host="127.0.0.1", port=port)
    finally:
        close()


values = st.sampled_from([0.0, 0.5, 1.0, 1.0000001, 2.0, 99.0]) | st.floats(0, 1e6)


@given(st.lists(st.tuples(values, st.integers(1, 5)), max_size=20))
def test_a_token_histogram_exposes_what_prometheus_own_would(observations: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    cheap = TokenHistogram("gap_seconds", "Gap.", buckets=(0.5, 1, 2.5), registry=ours)
    reference = Histogram("gap_seconds", "Gap.", buckets=(0.5, 1, 2.5), registry=theirs)
    for value, count in observations:
        cheap.observe(value, count)
        for _ in range(count):
            reference.observe(value)
    assert _samples(ours) == _samples(theirs)


def _samples(registry: CollectorRegistry) -> dict[tuple[str, str], Any]:
    return {
        (sample.name, sample.labels.get("le", "")): pytest.approx(sample.value)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
