"""Tracing of one process: what is loaded, what is recorded, and a collector that isn't there."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from services.runtime.clock import SystemClock
from services.runtime.log import get_logger
from services.runtime.otel import OtelTracer
from services.runtime.trace import Kind, TraceContext
from tests.span_collector import span_collector

CALLER = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "vendor=1")
UNSAMPLED = TraceContext(CALLER.trace_id, CALLER.span_id, 0)

RUN_ONCE = """
import asyncio, sys
{before}
from gateway.app import Gateway
from gateway.config import Config
from services.runtime import log
from services.runtime.process import run_async

config = Config(port=0, admin_port=0, metrics_port=0, http_port=0, {options})
log.configure(form="text", level="info")

async def main():
    stop = asyncio.Event()
    return await run_async("gateway", config, lambda runtime: Gateway(runtime, config), stop=stop,
                           on_ports=lambda _: stop.set())

print(asyncio.run(main()), *sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""
EVERY_SERVICE = "import services.detokenizer.__main__, services.scheduler.__main__, services.tokenizer.__main__"


def run_once(*, before: str, options: str = "") -> tuple[str, str]:
    """A process that starts and stops: its exit code with what it has loaded of OpenTelemetry, and what it said."""
    script = RUN_ONCE.format(options=options, before=before)
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return child.stdout.strip(), child.stderr


@dataclass
class Counted:
    spans: dict[str, int] = field(default_factory=dict)

    def __call__(self, outcome: str, spans: int) -> None:
        self.spans[outcome] = self.spans.get(outcome, 0) + spans


@asynccontextmanager
async def tracing(endpoint: str, counted: Counted, *, sample_ratio: float = 1.0) -> AsyncIterator[OtelTracer]:
    tracer = OtelTracer(
        endpoint=endpoint,
        sample_ratio=sample_ratio,
        resource={"service.name": "here"},
        clock=SystemClock(),
        log=get_logger("here"),
        count=counted,
    )
    try:
        yield tracer
    finally:
        await tracer.close()


def test_a_process_without_an_endpoint_loads_nothing_of_opentelemetry() -> None:
    assert run_once(before=EVERY_SERVICE)[0] == "0"


def test_without_the_packages_an_endpoint_is_a_bad_configuration_that_names_them() -> None:
    hidden = 'sys.modules["opentelemetry"] = None'
    out, said = run_once(before=hidden, options='tracing_endpoint="http://127.0.0.1:1"')
    assert out.startswith("2")
    assert "tailrace[tracing]" in said


async def test_spans_of_a_recorded_caller_carry_its_trace_and_the_unsampled_are_not_made() -> None:
    counted, now = Counted(), time.monotonic()
    async with span_collector() as collector:
        async with tracing(collector.endpoint, counted, sample_ratio=0.0) as tracer:
            span = tracer.door("chat", CALLER, now)
            assert span is not None
            child = span.begin("attempt", now + 1, kind=Kind.CLIENT, links=[CALLER])
            span.phase("open", now, now + 0.5, {"n": 1})
            child.event("claimed", now + 1.5)
            child.end(now + 2, {"tokens": 3}, error="LOST")
            span.end(now + 3)
            assert tracer.door("chat", UNSAMPLED, now) is None
            assert tracer.door("chat", None, now) is None, "the ratio decides where a trace begins here"
            assert tracer.begin("request", None, now) is None
            assert tracer.begin("request", UNSAMPLED, now) is None
        told = {span.name: span for span in collector.spans}
    assert counted.spans == {"exported": 3}
    root, attempt, phase = told["chat"], told["attempt"], told["open"]
    assert (root.trace_id, root.parent_id, root.kind, root.state) == (
        CALLER.trace_id,
        CALLER.span_id,
        "SERVER",
        "vendor=1",
    )
    assert attempt.parent_id == phase.parent_id == root.span_id
    assert (attempt.links, attempt.events, attempt.failed) == ((CALLER.span_id,), ("claimed",), True)
    assert attempt.attributes == {"tokens": 3, "error.type": "LOST"}
    assert (phase.ns, attempt.ns, root.ns) == (500_000_000, 1_000_000_000, 3_000_000_000)
    assert abs(root.start_ns - time.time_ns()) < 60e9


async def test_a_collector_that_is_not_there_costs_one_line_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted, now = Counted(), time.monotonic()
    with caplog.at_level(logging.INFO):
        async with tracing("http://127.0.0.1:1", counted) as tracer:
            for _ in range(300):
                span = tracer.door("chat", None, now)
                assert span is not None
                span.end(now)
            leaving = time.monotonic()
        assert time.monotonic() - leaving < 10
    assert "exported" not in counted.spans
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["spans are lost"] * len(lines)
    assert len(lines) <= 1


async def test_spans_are_taken_again_once_the_collector_is_back(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    async with span_collector() as gone:
        endpoint = gone.endpoint
    with caplog.at_level(logging.INFO):
        async with tracing(endpoint, counted) as tracer:
            await _end_one(tracer)
            async with asyncio.timeout(20):
                while not counted.spans:  # noqa: ASYNC110  # the library's thread has no event for us
                    await asyncio.sleep(0.05)
            assert counted.spans == {"failed": 1}
            async with span_collector(int(endpoint.rpartition(":")[2])) as back:
                await _end_one(tracer)
                await back.wait(lambda spans: spans)
                async with asyncio.timeout(20):
                    while len(caplog.records) < 2:  # noqa: ASYNC110  # said by the library's thread, after the answer
                        await asyncio.sleep(0.05)
    assert [record.getMessage() for record in caplog.records] == ["spans are lost", "spans are taken again"]


async def _end_one(tracer: OtelTracer) -> None:
    span = tracer.door("chat", None, time.monotonic())
    assert span is not None
    span.end(time.monotonic())
