"""A traced request as spans: the request with its phases, and within it every attempt at a scheduler.

Phases are told once they are over, from the times that the ledger keeps, and follow each other without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.protocol.genai import FINISH_REASONS, TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN, failure_of
from services.runtime.error_tree import TailraceError
from services.runtime.trace import Kind, Span, TraceContext, Tracer, Value
from services.tokenizer.entry import Attempt, Entry


class RequestSpans:
    """What one tokenizer tells of its requests. Every method does nothing for one that isn't traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def opened(self, entry: Entry, *, arrived_at: float, encoding_at: float) -> None:
        """It came, was looked for elsewhere, and was encoded."""
        span = self._begin(entry, arrived_at)
        if span is not None:
            span.phase("look up", arrived_at, encoding_at)
            span.phase("encode", encoding_at, entry.opened_at, {"tailrace.prompt_tokens": len(entry.pinned.prompt_ids)})

    def claimed(self, entry: Entry) -> None:
        """It is being taken over from another tokenizer, whose spans of it may never be told."""
        if entry.span is None:
            self._begin(entry, entry.opened_at)

    def attached(self, entry: Entry, trace: TraceContext | None, since: float, now: float) -> None:
        """One more call reads its answer: told in that call's trace, with a link to the request."""
        links = () if entry.span is None else (entry.span.context,)
        span = self._tracer.begin("attach", trace, since, kind=Kind.SERVER, attributes=_names_of(entry), links=links)
        if span is not None:
            span.end(now)

    def submitted(self, attempt: Attempt, now: float) -> None:
        """An attempt is on its way; one that continues another is linked to it."""
        entry = attempt.entry
        if entry.span is None:
            return
        before = [other.span.context for other in entry.attempts if other.span is not None]
        attempt.span = entry.span.begin(
            "attempt",
            now,
            kind=Kind.CLIENT,
            links=before[-1:],
            attributes={
                "tailrace.attempt.id": f"{attempt.attempt_id:x}",
                "tailrace.attempt.number": len(entry.attempts),
                "tailrace.attempt.choices": len(attempt.choices),
                "tailrace.attempt.continues_tokens": sum(len(log.token_ids) for log in entry.log.choices),
                "server.address": attempt.scheduler,
            },
        )

    def released(self, attempt: Attempt, now: float) -> None:
        """Nothing of an attempt follows: its engine ended it, or it was released before that, or lost."""
        if attempt.span is None:
            return
        lost = attempt.ended_at is None and attempt.release_answered_at is None
        outcome = "ended" if attempt.ended_at is not None else "lost" if lost else "released"
        end = now if attempt.ended_at is None else attempt.ended_at
        attempt.span.end(end, {"tailrace.attempt.outcome": outcome}, error="ATTEMPT_LOST" if lost else "")

    def refused(self, entry: Entry, error: TailraceError) -> None:
        """It was not accepted."""
        if entry.span is not None:
            entry.span.set({"error.type": error.reason})

    def finished(self, entry: Entry) -> None:
        """Its answer is whole."""
        if entry.span is None:
            return
        sources = [source for attempt in entry.attempts for source in attempt.sources]
        for name, start, end in until_whole(entry):
            entry.span.phase(name, start, end, links=sources if name == "stream" else ())

    def forgotten(self, entry: Entry, now: float) -> None:
        """Nothing remembers it."""
        if entry.span is None:
            return
        for name, start, end in after_whole(entry, now):
            entry.span.phase(name, start, end)
        entry.span.end(now, _outcome_of(entry), error=failure_of(entry.log))

    def _begin(self, entry: Entry, at: float) -> Span | None:
        entry.span = self._tracer.begin("request", entry.trace, at, kind=Kind.SERVER, attributes=_names_of(entry))
        return entry.span


def until_whole(entry: Entry) -> Iterator[tuple[str, float, float]]:
    """The phases from its entry in the ledger to its whole answer: those that it came through."""
    whole_at = entry.completed_at
    assert whole_at is not None
    first_at = whole_at if entry.first_output_at is None else entry.first_output_at
    # Its first output may be what proves that it was accepted.
    accepted_at = first_at if entry.accepted_at is None else min(entry.accepted_at, first_at)
    yield "claim" if entry.held else "submit", entry.opened_at, accepted_at
    yield "wait", accepted_at, first_at
    if entry.first_output_at is not None:
        yield "stream", first_at, whole_at


def after_whole(entry: Entry, now: float) -> Iterator[tuple[str, float, float]]:
    """The phases from there to nothing being remembered; of a cut or refused one, what is left of its time here."""
    if entry.completed_at is None:
        return
    delivered_at = max(entry.completed_at, entry.finished_at or 0.0)
    yield "deliver", entry.completed_at, delivered_at
    yield "release", delivered_at, now


def _names_of(entry: Entry) -> dict[str, Value]:
    return {"tailrace.request.id": entry.request_id, "tailrace.tenant": entry.tenant}


def _outcome_of(entry: Entry) -> dict[str, Value]:
    """What operators ask of it; usage under the conventions' names is told at the caller's door alone, once."""
    attributes: dict[str, Value] = {"tailrace.attempts": len(entry.attempts)}
    if entry.cut is not None:
        attributes["tailrace.cut"] = entry.cut.name
    if (first_at := entry.first_output_at) is not None:
        attributes[TIME_TO_FIRST_TOKEN] = first_at - entry.opened_at
    finishes = [log.finish for log in entry.log.choices if log.finish is not None]
    attributes["tailrace.finish_reasons"] = [FINISH_REASONS[finish.reason] for finish in finishes]
    if (usage := entry.log.usage) is not None:
        attributes["tailrace.prompt_tokens"] = usage.prompt_tokens
        attributes["tailrace.cached_tokens"] = usage.cached_prompt_tokens
        attributes["tailrace.output_tokens"] = usage.output_tokens
    tokens = len(entry.log.choices[0].token_ids)
    if first_at is not None and entry.completed_at is not None and tokens > 1:
        attributes[TIME_PER_OUTPUT_TOKEN] = (entry.completed_at - first_at) / (tokens - 1)
    return attributes
