"""The attempts that a scheduler holds, and the tombstones of those that it has released."""

from __future__ import annotations

from services.scheduler.admission import Tombstones
from services.scheduler.sequence import Attempt
from services.scheduler.state import AttemptEvent, AttemptPhase, SequencePhase, next_attempt_phase
from services.scheduler.submission import Route


class Attempts:
    """By id, oldest first. `held` counts their sequences, ended ones included."""

    __slots__ = ("by_id", "held", "tombstones")

    def __init__(self, tombstones: Tombstones) -> None:
        self.by_id: dict[int, Attempt] = {}
        self.tombstones = tombstones
        self.held = 0

    def phase(self, attempt_id: int) -> AttemptPhase:
        """Where it stands, known or not."""
        if attempt_id in self.by_id:
            return self.by_id[attempt_id].phase
        return AttemptPhase.RELEASED if attempt_id in self.tombstones else AttemptPhase.UNKNOWN

    def owner_of(self, attempt_id: int) -> Route | None:
        """Whose it is, or was when it was released; None for one that was never known."""
        attempt = self.by_id.get(attempt_id)
        return self.tombstones.owner_of(attempt_id) if attempt is None else attempt.owner

    def add(self, attempt: Attempt) -> None:
        """It was accepted."""
        self.by_id[attempt.submission.attempt_id] = attempt
        self.held += len(attempt.sequences)

    def release(self, attempt: Attempt, now: float) -> None:
        """Forgets it; a tombstone stays."""
        attempt.move(AttemptEvent.RELEASE)
        del self.by_id[attempt.submission.attempt_id]
        self.held -= len(attempt.sequences)
        self.tombstones.add(attempt.submission.attempt_id, now, attempt.owner)

    def bury(self, attempt_id: int, event: AttemptEvent, now: float) -> None:
        """An unknown one must not begin any more."""
        assert next_attempt_phase(self.phase(attempt_id), event) is AttemptPhase.RELEASED
        self.tombstones.add(attempt_id, now)

    def check_integrity(self) -> None:
        """Raises AssertionError when a count or a phase is wrong."""
        assert self.held == sum(len(attempt.sequences) for attempt in self.by_id.values())
        for attempt in self.by_id.values():
            still_open = sum(s.phase is not SequencePhase.ENDED for s in attempt.sequences)
            assert attempt.open_sequences == still_open
            assert (attempt.phase is AttemptPhase.ENDED) == (still_open == 0)
