"""Spans for OpenTelemetry, sent over OTLP; imported only by a process that is told where to send them.

They leave on a thread of the library's own, in batches. What can't be sent is retried for a moment, then dropped and
counted; a queue that is full drops its oldest. No request waits for any of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.status import Status, StatusCode

from services.runtime.clock import Clock
from services.runtime.log import Logger
from services.runtime.trace import NONE, Attributes, Kind, Span, TraceContext, Value

EXPORT_DELAY_MS = 1000
BATCH_SPANS = 128
"""Encoding holds the interpreter: a batch is small enough that the event loop doesn't feel it."""
QUEUE_SPANS = 8192
EXPORT_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0

_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_KINDS = {
    Kind.INTERNAL: api.SpanKind.INTERNAL,
    Kind.SERVER: api.SpanKind.SERVER,
    Kind.CLIENT: api.SpanKind.CLIENT,
    Kind.CONSUMER: api.SpanKind.CONSUMER,
}

_SAMPLED = api.TraceFlags(api.TraceFlags.SAMPLED)
_UNSET, _FAILED = Status(), Status(StatusCode.ERROR)

CountSpans = Callable[[str, int], None]
"""Told how many spans were "exported" or "failed"."""


class OtelTracer:
    """One process's spans, sent to `endpoint`; of traces that begin here, `sample_ratio` are recorded.

    A caller's trace is recorded where its flags say so. Spans are made whole, at their ends: the library's own, which
    may be written to from any thread at any time, cost several times as much.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        sample_ratio: float,
        resource: Mapping[str, str],
        clock: Clock,
        log: Logger,
        count: CountSpans,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._exporter = _Exporter(endpoint, log, count)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=EXPORT_DELAY_MS,
            max_export_batch_size=BATCH_SPANS,
        )
        self._sampler = TraceIdRatioBased(sample_ratio)
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("tailrace", resource.get("service.version"))
        self._ids = RandomIdGenerator()
        self._clock = clock
        self._unix_ns = unix_ns

    def door(self, name: str, caller: TraceContext | None, at: float) -> Span | None:
        """A caller's call."""
        if caller is not None:
            return self.begin(name, caller, at, kind=Kind.SERVER)
        trace_id = self._ids.generate_trace_id()
        if self._sampler.should_sample(None, trace_id, name).decision is not Decision.RECORD_AND_SAMPLE:
            return None
        root = api.SpanContext(trace_id, 0, is_remote=False, trace_flags=_SAMPLED)
        return OtelSpan(self, self._origin_ns(), name, root, at, Kind.SERVER, NONE, ())

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        at: float,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes = NONE,
        links: Sequence[TraceContext] = (),
    ) -> Span | None:
        """What this process does for another one."""
        if parent is None or not parent.flags & _SAMPLED:
            return None
        return OtelSpan(self, self._origin_ns(), name, _span_context(parent), at, kind, attributes, links)

    def new_span_id(self) -> int:
        """For a span that begins."""
        return self._ids.generate_span_id()

    def send(
        self,
        name: str,
        context: api.SpanContext,
        parent: api.SpanContext,
        kind: Kind,
        attributes: Attributes,
        events: Sequence[Event],
        links: Sequence[TraceContext],
        start_ns: int,
        end_ns: int,
        *,
        failed: bool,
    ) -> None:
        """Takes a span that is over."""
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent if parent.span_id else None,
                self._resource,
                attributes,
                events,
                [api.Link(_span_context(link)) for link in links],
                _KINDS[kind],
                status=_FAILED if failed else _UNSET,
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    async def close(self) -> None:
        """Sends what is left, for a moment; a collector that isn't there holds nobody up."""
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[None] = loop.create_future()

        def close() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]  # the library's
            with suppress(RuntimeError):  # the loop has not waited
                loop.call_soon_threadsafe(closed.set_result, None)

        threading.Thread(target=close, name="last spans", daemon=True).start()
        await asyncio.wait((closed,), timeout=0.0 if self._exporter.failing else FLUSH_TIMEOUT_S)
        if not closed.done():
            self._exporter.abandon()
            await asyncio.wait((closed,), timeout=FLUSH_TIMEOUT_S)

    def _origin_ns(self) -> int:
        """A request's moments are placed on the calendar by one look at it, so that its spans fit together."""
        return self._unix_ns() - round(self._clock.now() * 1e9)


class OtelSpan:
    """A span that goes on."""

    __slots__ = (
        "_attributes", "_events", "_kind", "_links", "_name", "_origin_ns", "_parent", "_span", "_start", "_tracer",
    )  # fmt: skip

    def __init__(
        self,
        tracer: OtelTracer,
        origin_ns: int,
        name: str,
        parent: api.SpanContext,
        start: float,
        kind: Kind,
        attributes: Attributes,
        links: Sequence[TraceContext],
    ) -> None:
        self._tracer = tracer
        self._origin_ns = origin_ns
        self._name = name
        self._parent = parent
        self._start = start
        self._kind = kind
        self._attributes: dict[str, Value] = dict(attributes)
        self._links = links
        self._events: list[Event] = []
        self._span = api.SpanContext(
            parent.trace_id, tracer.new_span_id(), is_remote=False, trace_flags=parent.trace_flags,
            trace_state=parent.trace_state,
        )  # fmt: skip

    @property
    def context(self) -> TraceContext:
        """What it is to others."""
        return _context_of(self._span)

    def named(self, name: str) -> None:
        """Its name is known now."""
        self._name = name

    def set(self, attributes: Attributes) -> None:
        """More is known of it."""
        self._attributes.update(attributes)

    def begin(
        self,
        name: str,
        at: float,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes = NONE,
        links: Sequence[TraceContext] = (),
    ) -> OtelSpan:
        """A part of it that others need to know of."""
        return OtelSpan(self._tracer, self._origin_ns, name, self._span, at, kind, attributes, links)

    def phase(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes = NONE,
        links: Sequence[TraceContext] = (),
    ) -> None:
        """A part of it that is over."""
        self.begin(name, start, attributes=attributes, links=links).end(end)

    def event(self, name: str, at: float, attributes: Attributes = NONE) -> None:
        """Something happened meanwhile."""
        self._events.append(Event(name, attributes, self._unix_ns(at)))

    def end(self, at: float, attributes: Attributes = NONE, *, error: str = "") -> None:
        """It is over."""
        self.set(attributes)
        if error:
            self._attributes["error.type"] = error
        start_ns, end_ns = self._unix_ns(self._start), self._unix_ns(at)
        self._tracer.send(
            self._name, self._span, self._parent, self._kind, self._attributes, self._events, self._links,
            start_ns, end_ns, failed=bool(error),
        )  # fmt: skip

    def _unix_ns(self, moment: float) -> int:
        return self._origin_ns + round(moment * 1e9)


class _Exporter(SpanExporter):
    """The library's exporter, whose failures are one line where they begin and one where they end."""

    def __init__(self, endpoint: str, log: Logger, count: CountSpans) -> None:
        self.failing = False
        self._endpoint = endpoint
        self._log = log
        self._count = count
        self._otlp = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._complaint = _Complaint()
        logging.getLogger(_EXPORTER_LOG).addFilter(self._complaint)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends them, on the library's thread."""
        result = self._otlp.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        self._count("failed" if failed else "exported", len(spans))
        if failed and not self.failing:
            self._log.warning("spans are lost", endpoint=self._endpoint, why=self._complaint.text)
        elif self.failing and not failed:
            self._log.info("spans are taken again", endpoint=self._endpoint)
        self.failing = failed
        return result

    def abandon(self) -> None:
        """Waits for nothing any more."""
        self._otlp.shutdown()

    def shutdown(self) -> None:
        """The last batch has gone, or has been given up."""
        self._otlp.shutdown()
        logging.getLogger(_EXPORTER_LOG).removeFilter(self._complaint)


class _Complaint(logging.Filter):
    """Keeps what the library said last instead of its being logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """No line."""
        self.text = record.getMessage()
        return False


def _span_context(context: TraceContext) -> api.SpanContext:
    return api.SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=api.TraceFlags(context.flags),
        trace_state=api.TraceState.from_header([context.state]) if context.state else None,
    )


def _context_of(span: api.SpanContext) -> TraceContext:
    return TraceContext(
        api.format_trace_id(span.trace_id),
        api.format_span_id(span.span_id),
        int(span.trace_flags),
        span.trace_state.to_header(),
    )
