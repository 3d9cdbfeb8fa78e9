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
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from services.runtime.clock import Clock
from services.runtime.log import Logger
from services.runtime.trace import NONE, Attributes, Kind, Span, TraceContext

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

CountSpans = Callable[[str, int], None]
"""Told how many spans were "exported" or "failed"."""


class OtelTracer:
    """One process's spans, sent to `endpoint`; of traces that begin here, `sample_ratio` are recorded."""

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
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(dict(resource)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=QUEUE_SPANS,
                schedule_delay_millis=EXPORT_DELAY_MS,
                max_export_batch_size=BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("tailrace", resource.get("service.version"))
        self._clock = clock
        self._unix_ns = unix_ns

    def door(self, name: str, caller: TraceContext | None, at: float) -> Span | None:
        """A caller's call."""
        return self._begun(name, caller, at, Kind.SERVER, NONE, ())

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
        return None if parent is None else self._begun(name, parent, at, kind, attributes, links)

    async def close(self) -> None:
        """Sends what is left, for a moment; a collector that isn't there holds nobody up."""
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[None] = loop.create_future()

        def close() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has not waited
                loop.call_soon_threadsafe(closed.set_result, None)

        threading.Thread(target=close, name="last spans", daemon=True).start()
        await asyncio.wait((closed,), timeout=0.0 if self._exporter.failing else FLUSH_TIMEOUT_S)
        if not closed.done():
            self._exporter.abandon()
            await asyncio.wait((closed,), timeout=FLUSH_TIMEOUT_S)

    def _begun(
        self,
        name: str,
        parent: TraceContext | None,
        at: float,
        kind: Kind,
        attributes: Attributes,
        links: Sequence[TraceContext],
    ) -> Span | None:
        # A request's moments are placed on the calendar by one look at it, so that its spans fit together.
        origin_ns = self._unix_ns() - round(self._clock.now() * 1e9)
        begun = OtelSpan(self._tracer, origin_ns, name, _as_parent(parent), at, kind, attributes, links)
        return begun if begun.recorded else None


class OtelSpan:
    """A span that goes on."""

    __slots__ = ("_origin_ns", "_span", "_tracer")

    def __init__(
        self,
        tracer: api.Tracer,
        origin_ns: int,
        name: str,
        parent: api.Span,
        at: float,
        kind: Kind,
        attributes: Attributes,
        links: Sequence[TraceContext],
    ) -> None:
        self._tracer = tracer
        self._origin_ns = origin_ns
        self._span = tracer.start_span(
            name,
            api.set_span_in_context(parent, Context()),
            _KINDS[kind],
            attributes,
            [api.Link(_span_context(link)) for link in links],
            self._unix_ns(at),
        )

    @property
    def context(self) -> TraceContext:
        """What it is to others."""
        return _context_of(self._span.get_span_context())

    @property
    def recorded(self) -> bool:
        """Whether anybody will see it."""
        return self._span.is_recording()

    def named(self, name: str) -> None:
        """Its name is known now."""
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """More is known of it."""
        self._span.set_attributes(attributes)

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
        self._span.add_event(name, attributes, self._unix_ns(at))

    def end(self, at: float, attributes: Attributes = NONE, *, error: str = "") -> None:
        """It is over."""
        self.set(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(api.StatusCode.ERROR)
        self._span.end(self._unix_ns(at))

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


def _as_parent(context: TraceContext | None) -> api.Span:
    return api.INVALID_SPAN if context is None else api.NonRecordingSpan(_span_context(context))


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
