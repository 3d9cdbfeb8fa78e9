"""A traced attempt as spans: the attempt, and of each of its sequences how long it was queued, prefilled and decoded.

They are told when a sequence has ended, from the times that the step loop keeps. The attempt itself begins when it is
accepted, for its detokenizer is told of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.protocol.genai import FINISH_REASONS
from services.runtime.trace import Kind, Span, Tracer, Value
from services.scheduler.core import SchedulerCore
from services.scheduler.effects import Effect, Ended, Moved, Opened
from services.scheduler.sequence import Attempt, Sequence


class AttemptSpans:
    """The attempts of one scheduler that are traced and have not ended."""

    def __init__(self, tracer: Tracer, core: SchedulerCore) -> None:
        self._tracer = tracer
        self._core = core
        self._open: dict[int, Span] = {}

    def follow(self, effects: Iterable[Effect], now: float) -> None:
        """What the core decided, before anybody is sent it."""
        for effect in effects:
            if isinstance(effect, Opened):
                self._begin(effect, now)
            elif self._open and isinstance(effect, Ended):
                self._ended(effect.sequences)
            elif self._open and isinstance(effect, Moved) and (span := self._open.get(effect.attempt_id)):
                span.event("claimed", now, {"tailrace.tokenizer": effect.new.tokenizer})

    def close(self, now: float) -> None:
        """The process stops: what is open goes on elsewhere."""
        for span in self._open.values():
            span.end(now, {"tailrace.attempt.outcome": "left"})
        self._open.clear()

    def _begin(self, opened: Opened, now: float) -> None:
        """Where it is not recorded here, its logs hand on what came."""
        attempt = self._core.attempts[opened.logs[0].attempt_id]
        submission = attempt.submission
        span = self._tracer.begin(
            "scheduler attempt",
            submission.trace,
            attempt.arrived_at,
            kind=Kind.SERVER,
            attributes={
                "tailrace.attempt.id": f"{submission.attempt_id:x}",
                "tailrace.request.id": submission.request_id,
                "tailrace.tenant": submission.tenant,
                "tailrace.tokenizer": attempt.owner.tokenizer,
                "tailrace.fence": submission.fence,
                "tailrace.priority": submission.priority,
                "tailrace.prompt_tokens": len(submission.prompt_ids),
            },
        )
        if span is None:
            return
        self._open[submission.attempt_id] = span
        for log in opened.logs:
            log.trace = span.context

    def _ended(self, sequences: Iterable[Sequence]) -> None:
        """Several of an attempt may end in one step; it has ended with the last of them."""
        attempts: dict[Attempt, None] = {}
        for sequence in sequences:
            if (span := self._open.get(sequence.attempt.submission.attempt_id)) is not None:
                attributes = self._of(sequence)
                for name, start, end in phases(sequence):
                    span.phase(name, start, end, attributes[name])
                attempts[sequence.attempt] = None
        for attempt in attempts:
            if not attempt.open_sequences:
                span = self._open.pop(attempt.submission.attempt_id)
                ended_at = max(sequence.changed_at for sequence in attempt.sequences)
                span.end(ended_at, _of_attempt(attempt), error=_failure(attempt))

    def _of(self, sequence: Sequence) -> dict[str, dict[str, Value]]:
        """What is told of each phase. Preempted and computed again, a sequence is still decoding."""
        log = sequence.log
        choice: dict[str, Value] = {"tailrace.choice": log.choice}
        blocks = -(-sequence.length // self._core.cache.block_size)
        return {
            "queued": choice,
            "prefill": {**choice, "tailrace.cached_tokens": log.cached_prompt_tokens},
            "decode": {
                **choice,
                "tailrace.output_tokens": len(log.ids),
                "tailrace.blocks": blocks,
                "tailrace.preemptions": sequence.preemptions,
            },
        }


def phases(sequence: Sequence) -> Iterator[tuple[str, float, float]]:
    """Of a sequence that has ended, the phases that it came to, one after the other."""
    arrived_at, ended_at = sequence.attempt.arrived_at, sequence.changed_at
    admitted_at = sequence.admitted_at or ended_at
    first_token_at = sequence.first_token_at or ended_at
    yield "queued", arrived_at, admitted_at
    if sequence.admitted_at:
        yield "prefill", admitted_at, first_token_at
    if sequence.first_token_at:
        yield "decode", first_token_at, ended_at


def _of_attempt(attempt: Attempt) -> dict[str, Value]:
    ends = [sequence.log.end for sequence in attempt.sequences if sequence.log.end is not None]
    return {
        "tailrace.attempt.outcome": "ended",
        "tailrace.finish_reasons": [FINISH_REASONS[end.reason] for end in ends],
        "tailrace.output_tokens": sum(len(sequence.log.ids) for sequence in attempt.sequences),
        "tailrace.cached_tokens": max(sequence.log.cached_prompt_tokens for sequence in attempt.sequences),
        "tailrace.preemptions": sum(sequence.preemptions for sequence in attempt.sequences),
    }


def _failure(attempt: Attempt) -> str:
    ends = (sequence.log.end for sequence in attempt.sequences)
    return next((end.error.code.name for end in ends if end is not None and end.error is not None), "")
