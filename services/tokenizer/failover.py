"""What becomes of a request whose scheduler died: it goes on elsewhere, or on the restarted one, from where it stood.

A continuation carries the output that is here; what was not here yet is generated again. Attempts are bounded by
progress, since a request may be what kills schedulers: one that was present at two deaths in a row without a new token
is tried after all others and with no other such one, and ends at the third.

What was computed is computed again, one request after the other. So not all of a dead scheduler's requests are sent to
the first one that is there: what it can't begin soon waits here, and goes to the dead one if that is back meanwhile.
"""

from __future__ import annotations

from collections import Counter

from services.protocol.events import ErrorCode, Failure, FinishReason
from services.protocol.request import Failover as Choice
from services.runtime.error_tree import Overloaded, TailraceError, Unavailable
from services.tokenizer.book import Book
from services.tokenizer.effects import Effects, Submit
from services.tokenizer.entry import Attempt, Cut, Entry
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.timers import past

MAX_FRUITLESS = 3
"""Attempts in a row that died without a new token, after which the request ends."""

ALONE_AFTER = 2
"""Such attempts after which it is tried alone."""

RECOMPUTED_IDS_MAX = 8192
"""Ids of continuations that a scheduler may have from here and has shown no new token for: many steps' work."""

_DIED = "The scheduler that ran the request died"


class Failover:
    """The requests that wait for a scheduler to go on with. `grace_s`: how long at most."""

    def __init__(self, book: Book, schedulers: Schedulers, *, grace_s: float) -> None:
        self._book = book
        self._schedulers = schedulers
        self._grace_s = grace_s
        self._stranded: dict[Entry, None] = {}
        self._alone: Entry | None = None

    def lost(self, attempt: Attempt, now: float) -> Effects:
        """The scheduler's incarnation that had the attempt is gone."""
        entry = attempt.entry
        if attempt.abandoned or entry.completed or entry.caller_is_final:
            return []
        if not all(entry.rebuilt(choice) for choice in attempt.provides):
            # A caller may have more than is here: what it has must not be followed by something generated anew.
            return self._book.let_go(entry, Cut.LOST, now)
        if not entry.uncovered:
            return []  # it was one of several that were claimed, and gave only what has ended
        if entry.aborted_at is not None:
            return self._book.end(entry, FinishReason.ABORTED, now)
        entry.fruitless = 0 if entry.progress > attempt.progress_before else entry.fruitless + 1
        if entry.pinned.request.failover is Choice.NEVER:
            return self._give_up(entry, f"{_DIED}.", now)
        if entry.fruitless >= MAX_FRUITLESS:
            return self._give_up(entry, f"{_DIED}, {MAX_FRUITLESS} times in a row without a new token.", now)
        self._strand(entry, now)
        return []

    def refused(self, attempt: Attempt, error: TailraceError, now: float) -> Effects:
        """A scheduler refused a continuation: for now, or for good."""
        entry = attempt.entry
        if attempt.abandoned or entry.completed or entry.caller_is_final:
            return []
        if not isinstance(error, Unavailable | Overloaded):
            return self._give_up(entry, f"{_DIED}, and another refused to go on: {error.message}", now)
        self._strand(entry, now)
        return []

    def unanswered(self, attempt: Attempt, now: float) -> None:
        """Nobody knows whether a scheduler has the continuation: it is released there, and another one is made."""
        entry = attempt.entry
        if attempt.abandoned or entry.completed or entry.caller_is_final:
            return
        attempt.abandoned = True
        self._strand(entry, now)

    def resubmit(self, now: float) -> Effects:
        """Submits what waits, as far as a scheduler is there."""
        effects: Effects = []
        if not self._stranded:
            return effects
        recomputed = self._recomputed()
        for entry in sorted(self._stranded, key=lambda entry: entry.fruitless >= ALONE_AFTER):
            if entry.completed or entry.caller_is_final:
                del self._stranded[entry]
                continue
            full = [scheduler for scheduler, ids in recomputed.items() if ids >= RECOMPUTED_IDS_MAX]
            scheduler = self._schedulers.least_busy(tried=full)
            if scheduler is None or not self._may_be_tried(entry):
                self._leave_waiting(entry, now)
                continue
            attempt = self._again(entry, scheduler, now)
            recomputed[scheduler] += attempt.ids_before
            effects.append(Submit(attempt))
        return effects

    def _again(self, entry: Entry, scheduler: str, now: float) -> Attempt:
        del self._stranded[entry]
        if entry.waits_for_turn:
            entry.waits_for_turn = False
            self._wait(entry, now)
        attempt = self._book.new_attempt(entry, scheduler)
        self._schedulers.sent(scheduler, len(attempt.choices))
        return attempt

    def _leave_waiting(self, entry: Entry, now: float) -> None:
        is_anybody_there = self._schedulers.least_busy() is not None
        if entry.waits_for_turn and not is_anybody_there:
            self._wait(entry, now)
        entry.waits_for_turn = is_anybody_there

    def _recomputed(self) -> Counter[str]:
        """What each scheduler has to compute again before its continuations go on, ids."""
        recomputed: Counter[str] = Counter()
        for attempt in self._book.attempts.values():
            if attempt.counts and attempt.continues and attempt.entry.on_trial:
                recomputed[attempt.scheduler] += attempt.ids_before
        return recomputed

    def overdue(self, entry: Entry, now: float) -> Effects:
        """Ends a request that found no scheduler in time; one that waits for its turn goes on waiting."""
        if entry.completed or not past(entry.stranded_at, self._grace_s, now):
            return []
        if self._schedulers.least_busy() is not None and entry in self._stranded:
            self._wait(entry, now)
            return []
        return self._give_up(entry, f"{_DIED}, and none took its place in {self._grace_s:g} s.", now)

    def _strand(self, entry: Entry, now: float) -> None:
        self._stranded[entry] = None
        if entry.stranded_at is None:
            self._wait(entry, now)

    def _wait(self, entry: Entry, now: float) -> None:
        entry.stranded_at = now
        self._book.timers.add(now + self._grace_s, entry)

    def _may_be_tried(self, entry: Entry) -> bool:
        if entry.fruitless < ALONE_AFTER:
            return True
        if self._alone is not None and self._alone.on_trial:
            return False
        self._alone = entry
        return True

    def _give_up(self, entry: Entry, why: str, now: float) -> Effects:
        return self._book.end(entry, FinishReason.ERROR, now, Failure(ErrorCode.ENGINE_LOST, why))
