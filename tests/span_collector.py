"""A collector for spans on loopback: what a process sends over OTLP, as its receiver reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Told:
    """One span; times in nanoseconds since 1970."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    state: str
    attributes: dict[str, Any]
    links: tuple[str, ...]
    events: tuple[str, ...]
    failed: bool

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """All spans that came, in order; `address` for `tracing_endpoint`."""

    endpoint: str = ""
    spans: list[Told] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  # the contract's name
        """Takes some."""
        self.raw.append(request.SerializeToString())
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            self.spans += [_told(service, span) for scope in resource.scope_spans for span in scope.spans]
        self._news.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait(self, enough: Callable[[list[Told]], Any]) -> list[Told]:
        """The spans so far, once `enough` of them is true; fails with what there is."""
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while not enough(self.spans):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"only these came: {[(span.service, span.name) for span in self.spans]}") from None
        return list(self.spans)


@asynccontextmanager
async def span_collector(port: int = 0) -> AsyncIterator[Collector]:
    """A collector that listens."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


def as_tree(spans: list[Told]) -> str:
    """A trace for people: each span below its parent, with when it began and how long it took."""
    ids = {span.span_id for span in spans}
    names = {span.span_id: f"{span.service.removeprefix('tailrace-')} {span.name}" for span in spans}
    zero = min(span.start_ns for span in spans)

    def lines(parent: str, depth: int) -> list[str]:
        children = [s for s in spans if s.parent_id == parent or (not parent and s.parent_id not in ids)]
        return [
            line
            for span in sorted(children, key=lambda span: (span.start_ns, span.end_ns))
            for line in (_line(span, depth, zero, names), *lines(span.span_id, depth + 1))
        ]

    return "\n".join(lines("", 0))


def _line(span: Told, depth: int, zero: int, names: dict[str, str]) -> str:
    links = "".join(f"  ⇠ {names.get(link, link)}" for link in span.links)
    what = f"{'  ' * depth}{span.service.removeprefix('tailrace-')}: {span.name}"
    return f"{what:<44}{(span.start_ns - zero) / 1e6:9.1f} ms {span.ns / 1e6:9.1f} ms{links}"


def _told(service: str, span: trace_pb2.Span) -> Told:
    return Told(
        service=service,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        state=span.trace_state,
        attributes=_attributes(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
        events=tuple(event.name for event in span.events),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
