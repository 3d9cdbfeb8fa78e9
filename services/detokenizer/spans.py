"""Traced sequences as spans: from a sequence's start in a route to its finish there."""

from __future__ import annotations

from dataclasses import replace

from services.detokenizer.batch import SequenceStart, TextBatch
from services.protocol.genai import FINISH_REASONS
from services.protocol.views import RouteKey
from services.runtime.clock import Clock
from services.runtime.trace import Kind, Span, Tracer, Value


class SequenceSpans:
    """The traced sequences of one route that have not finished. It is shown every batch, before that is written."""

    def __init__(self, tracer: Tracer, clock: Clock, route: RouteKey, scheduler: str) -> None:
        self._tracer = tracer
        self._clock = clock
        self._route = route
        self._scheduler = scheduler
        self._open: dict[int, Span] = {}
        self._sequences: dict[int, list[int]] = {}

    def follow(self, batch: TextBatch) -> None:
        """Sequences began, and are told on as ours; others finished, or are forgotten without."""
        if batch.starts:
            batch.starts = [start if start.trace is None else self._begin(start) for start in batch.starts]
        for finish in batch.finishes:
            if (span := self._open.pop(finish.sequence, None)) is not None:
                span.end(
                    self._clock.now(),
                    {
                        "tailrace.finish_reason": FINISH_REASONS[finish.reason],
                        "tailrace.output_tokens": finish.token_offset,
                        "tailrace.output_characters": finish.text_offset,
                    },
                    error="" if finish.error is None else finish.error.code.name,
                )
        for attempt_id in batch.released_attempt_ids:
            self._end(self._sequences.pop(attempt_id, []), "released")

    def close(self) -> None:
        """The route has ended: what had not finished starts again in the next one."""
        self._end(list(self._open), "route ended")

    def _begin(self, start: SequenceStart) -> SequenceStart:
        """Its start, with our span where it is recorded here; otherwise with what came."""
        attributes: dict[str, Value] = {
            "tailrace.attempt.id": f"{start.attempt_id:x}",
            "tailrace.choice": start.choice,
            "tailrace.scheduler": self._scheduler,
            "tailrace.tokenizer": self._route.tokenizer,
            "tailrace.route.generation": self._route.generation,
        }
        span = self._tracer.begin(
            "detokenize", start.trace, self._clock.now(), kind=Kind.CONSUMER, attributes=attributes
        )
        if span is None:
            return start
        self._open[start.sequence] = span
        self._sequences.setdefault(start.attempt_id, []).append(start.sequence)
        return replace(start, trace=span.context)

    def _end(self, sequences: list[int], outcome: str) -> None:
        for sequence in sequences:
            if (span := self._open.pop(sequence, None)) is not None:
                span.end(self._clock.now(), {"tailrace.outcome": outcome})
