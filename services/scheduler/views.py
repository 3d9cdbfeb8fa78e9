"""The scheduler's attempts as an operator sees them."""

from __future__ import annotations

from collections.abc import Callable

from services.protocol.views import ChoiceView, Moment, RequestView, RouteKey
from services.scheduler.core import SchedulerCore
from services.scheduler.publisher import Publisher
from services.scheduler.sequence import Attempt, Sequence
from services.scheduler.state import SequencePhase

_ORDER = list(SequencePhase)


class AttemptViews:
    """Makes the views of one listing, all at one moment; without a calendar they have no moments."""

    def __init__(
        self, core: SchedulerCore, publisher: Publisher, now: float, unix_us: Callable[[float], int] | None
    ) -> None:
        self._core = core
        self._publisher = publisher
        self._now = now
        self._unix_us = unix_us

    def of(self, attempt: Attempt) -> RequestView:
        """One attempt."""
        submission, phase, owner = attempt.submission, _phase(attempt), attempt.owner
        return RequestView(
            request_id=submission.request_id,
            attempt_id=submission.attempt_id,
            tenant=submission.tenant,
            engine_phase=phase.value,
            age_ms=int((self._now - attempt.arrived_at) * 1000),
            fence=self._core.fence_of(attempt),
            route=RouteKey(
                tokenizer=owner.tokenizer,
                tokenizer_epoch=owner.epoch,
                generation=self._publisher.generation_of(owner),
            ),
            prompt_tokens=len(submission.prompt_ids),
            deadline_in_ms=None if attempt.deadline is None else round((attempt.deadline - self._now) * 1000),
            waits_for=self._core.batch.shortage if phase is SequencePhase.WAITING else "",
            moments=self._moments(attempt),
            choices=[self._choice(sequence) for sequence in attempt.sequences],
        )

    def _moments(self, attempt: Attempt) -> list[Moment]:
        """Those of the first of its sequences to get there; of its end, the last one's."""
        unix_us = self._unix_us
        if unix_us is None:
            return []
        sequences = attempt.sequences
        times = [
            ("accepted", attempt.arrived_at),
            ("admitted", min((s.admitted_at for s in sequences if s.admitted_at), default=0.0)),
            ("first token", min((s.first_token_at for s in sequences if s.first_token_at), default=0.0)),
        ]
        if not attempt.open_sequences:
            times.append(("ended", max(sequence.changed_at for sequence in sequences)))
        return [Moment(what, unix_us(moment)) for what, moment in times if moment]

    def _choice(self, sequence: Sequence) -> ChoiceView:
        log = sequence.log
        runs = sequence.phase in (SequencePhase.PREFILL, SequencePhase.DECODE)
        progressed_at = max(sequence.changed_at, self._core.stepped_at) if runs else sequence.changed_at
        return ChoiceView(
            choice=log.choice,
            log_token_offset=len(log.ids),
            cursor_token_offset=log.cursor.offset if log.cursor is not None else 0,
            blocks=len(sequence.blocks),
            idle_ms=int((self._now - progressed_at) * 1000),
            phase=sequence.phase.value,
            finish_reason=log.end.reason.name if log.end is not None else "",
            preemptions=sequence.preemptions,
        )


def _phase(attempt: Attempt) -> SequencePhase:
    """That of the sequence that has come furthest and has not ended."""
    phases = [sequence.phase for sequence in attempt.sequences if sequence.phase is not SequencePhase.ENDED]
    return max(phases, key=_ORDER.index, default=SequencePhase.ENDED)
