"""A caller's call as a span: from its arrival at whichever door it came through, to its end on the caller's side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from services.protocol.answer import AnswerLog
from services.protocol.events import Started
from services.protocol.genai import (
    NAME_CHARS_MAX,
    TIME_TO_FIRST_CHUNK,
    answer_attributes,
    failure_of,
    operation_of,
    request_attributes,
    started_attributes,
)
from services.runtime.clock import Clock
from services.runtime.trace import Span, TraceContext, Tracer, Value, context_of
from tailrace.v1 import generation_pb2

CallPb = generation_pb2.GenerateRequest | generation_pb2.ChatRequest | generation_pb2.ResumeRequest
Batch = TypeVar("Batch")

RESUME = "resume"


class CallSpan:
    """One call. Where it is not recorded, all of this does nothing, and `context` is the caller's own."""

    __slots__ = ("_arrived_at", "_clock", "_first_at", "_operation", "_span", "_started", "_started_at", "context")

    def __init__(self, tracer: Tracer, clock: Clock, call: CallPb, caller: TraceContext | None, transport: str) -> None:
        self._clock = clock
        self._arrived_at = clock.now()
        self._operation = RESUME if isinstance(call, generation_pb2.ResumeRequest) else operation_of(call)
        self._span: Span | None = tracer.door(self._operation, caller, self._arrived_at)
        self._started: Started | None = None
        self._started_at = self._first_at = 0.0
        self.context = context_of(self._span, caller)
        if self._span is not None:
            self._span.set(_of_call(call, transport))

    def accepted(self, started: Started) -> None:
        """The first event is there, and with it the model's name."""
        if self._span is not None:
            self._started, self._started_at = started, self._clock.now()
            self._span.named(f"{self._operation} {started.model}")

    def noting(self, batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
        """The same batches; of a call that is recorded, it is noted when the first one comes."""
        return batches if self._span is None else self._noting(batches)

    async def _noting(self, batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
        async for batch in batches:
            self._first_at = self._first_at or self._clock.now()
            yield batch

    def ended(self, outcome: str, log: AnswerLog | None = None, *, error: str = "") -> None:
        """The caller's side is over: completed, refused, cancelled or failed, as the metrics count it."""
        if self._span is None:
            return
        now = self._clock.now()
        attributes: dict[str, Value] = {"tailrace.outcome": outcome}
        if self._started is not None:
            attributes |= started_attributes(self._started)
            self._tell_phases(self._span, now)
        if log is not None:
            attributes |= answer_attributes(log)
            error = error or failure_of(log)
        if self._first_at:
            attributes[TIME_TO_FIRST_CHUNK] = self._first_at - self._arrived_at
        self._span.end(now, attributes, error=error)

    def _tell_phases(self, span: Span, now: float) -> None:
        first_at = self._first_at or now
        span.phase("open", self._arrived_at, self._started_at)
        span.phase("wait", self._started_at, first_at)
        if self._first_at:
            span.phase("write", first_at, now)


def _of_call(call: CallPb, transport: str) -> dict[str, Value]:
    attributes: dict[str, Value] = {"tailrace.transport": transport}
    if not isinstance(call, generation_pb2.ResumeRequest):
        attributes |= request_attributes(call)
    if call.request_id:
        attributes["tailrace.request.id"] = call.request_id[:NAME_CHARS_MAX]
    return attributes
