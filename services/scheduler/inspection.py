"""The scheduler's attempts as an operator sees them."""

from __future__ import annotations

from collections.abc import Iterator

from services.protocol.inspection import ChoiceView, RequestView
from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Attempt, Sequence
from services.scheduler.state import SequencePhase

_ORDER = list(SequencePhase)


def views(core: SchedulerCore, now: float) -> Iterator[RequestView]:
    """All attempts that are not released, oldest first."""
    for attempt in core.attempts.values():
        yield RequestView(
            request_id=attempt.submission.request_id,
            attempt_id=attempt.submission.attempt_id,
            engine_phase=_phase(attempt).value,
            age_ms=int((now - attempt.arrived_at) * 1000),
            choices=[_choice(sequence, core.stepped_at, now) for sequence in attempt.sequences],
        )


def _phase(attempt: Attempt) -> SequencePhase:
    """That of the sequence that has come furthest and has not ended."""
    phases = [sequence.phase for sequence in attempt.sequences if sequence.phase is not SequencePhase.ENDED]
    return max(phases, key=_ORDER.index, default=SequencePhase.ENDED)


def _choice(sequence: Sequence, stepped_at: float, now: float) -> ChoiceView:
    log = sequence.log
    runs = sequence.phase in (SequencePhase.PREFILL, SequencePhase.DECODE)
    progressed_at = max(sequence.changed_at, stepped_at) if runs else sequence.changed_at
    return ChoiceView(
        choice=log.choice,
        log_token_offset=len(log.ids),
        cursor_token_offset=log.cursor.offset if log.cursor is not None else 0,
        blocks=len(sequence.blocks),
        idle_ms=int((now - progressed_at) * 1000),
    )
