"""What happens to attempts at their schedulers: answers to Submit and Release, output, ends, lost incarnations.

Events in, effects out, as in core.py. All times are monotonic seconds, given with each event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.protocol.events import ErrorCode, Failure, Finish, FinishReason
from services.runtime.error_tree import TailraceError, Unavailable
from services.tokenizer.book import Book
from services.tokenizer.effects import (
    Accept,
    Effects,
    Reconcile,
    Resubscribe,
    SendRelease,
    Submit,
    Unacceptable,
    Wake,
)
from services.tokenizer.entry import Attempt, Cut
from services.tokenizer.failover import Failover
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.state import EngineEvent, EnginePhase
from services.tokenizer.timers import past

MARKER_GRACE_S = 10.0
"""How long a release marker may take after Release was answered; then the attempt counts as released without it."""

EPOCH_GRACE_S = 3.0
"""How long an attempt's epoch and its route's may differ: one of the two is old, and by then it is known which."""


ASK_AGAIN_S = 1.0
"""After which a scheduler is asked again what became of an attempt that it released without being told."""

STALE_OWNER = "STALE_OWNER"
"""With this reason a scheduler refuses what comes from a tokenizer from whom the request was claimed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a scheduler should hold of us: attempts up to a number, and which of them are live."""

    highest_number: int
    live_ids: tuple[int, ...]


class Attempts:
    """Every attempt that is not released, and what becomes of it."""

    def __init__(self, book: Book, schedulers: Schedulers, failover: Failover) -> None:
        self._book = book
        self._schedulers = schedulers
        self._failover = failover
        self._parked: dict[str, set[int]] = {}

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._book.attempts.values())

    def get(self, attempt_id: int) -> Attempt | None:
        """An attempt that is not released."""
        return self._book.attempts.get(attempt_id)

    # -- Submit and Release

    def submit_answered(self, attempt_id: int, epoch: int, now: float) -> Effects:
        """The scheduler has the attempt."""
        attempt = self._book.attempts.get(attempt_id)
        if attempt is None:
            return []
        attempt.settled = True
        effects = self.accepted(attempt, epoch)
        if self._in_doubt(attempt):
            attempt.doubted_at = now
            self._book.timers.add(now + EPOCH_GRACE_S, attempt.entry)
        return [*effects, *self._book.settle(attempt.entry, now)]

    def submit_refused(self, attempt_id: int, error: TailraceError, now: float) -> Effects:
        """The scheduler does not have the attempt, and said why."""
        attempt = self._book.attempts.get(attempt_id)
        if attempt is None:
            return []
        attempt.settled = True
        if attempt.phase not in (EnginePhase.SUBMITTING, EnginePhase.RELEASING):
            return []
        if attempt.epoch and not attempt.abandoned:
            return [*self._book.refuse(attempt.entry, error, now), *self._book.settle(attempt.entry, now)]
        return [*self._refused(attempt, error, now), *self._book.settle(attempt.entry, now)]

    def _refused(self, attempt: Attempt, error: TailraceError, now: float) -> Effects:
        effects = self._book.released(attempt, EngineEvent.REFUSED, now)
        entry = attempt.entry
        if error.reason == STALE_OWNER and entry.accepted:
            return [*effects, *self._book.let_go(entry, Cut.CLAIMED, now)]
        if attempt.abandoned:
            return effects
        if isinstance(error, Unavailable) and (elsewhere := self._submit_elsewhere(attempt)):
            return [*effects, *elsewhere]
        return [*effects, *self._book.refuse(entry, error, now), *self._failover.refused(attempt, error, now)]

    def _submit_elsewhere(self, attempt: Attempt) -> Effects:
        """Another attempt where a request that was not accepted yet has not been tried; nothing where there is nowhere.

        Nobody waits for an answer yet that this one could have begun.
        """
        entry = attempt.entry
        if entry.accepted or entry.caller_is_final or attempt.abandoned:
            return []
        other = self._schedulers.least_busy(tried={attempt.scheduler for attempt in entry.attempts})
        if other is None:
            return []
        attempt.abandoned = True
        return [Submit(self._book.new_attempt(entry, other))]

    def submit_failed(self, attempt_id: int, error: TailraceError, now: float) -> Effects:
        """Nobody knows whether the scheduler has the attempt: Release keeps a late Submit out."""
        attempt = self._book.attempts.get(attempt_id)
        if attempt is None:
            return []
        attempt.settled = True
        if attempt.epoch or attempt.abandoned:
            return self._book.settle(attempt.entry, now)
        effects = self._leave(attempt, now) or self._book.refuse(attempt.entry, error, now)
        return [*effects, *self._book.settle(attempt.entry, now)]

    def _leave(self, attempt: Attempt, now: float) -> Effects:
        """What is on its way goes elsewhere: a continuation as soon as may be, a new request where there is another."""
        if attempt.entry.accepted:
            self._failover.unanswered(attempt, now)
            return []
        return self._submit_elsewhere(attempt)

    def release_answered(self, attempt_ids: Iterable[int], epoch: int, now: float) -> Effects:
        """The scheduler forgot these attempts, or left tombstones for them."""
        effects: Effects = []
        for attempt in self._book.known(attempt_ids):
            attempt.release_answered_at, attempt.release_epoch = now, epoch
            if attempt.epoch not in (0, epoch):
                effects += self.lose(attempt, now)
                continue
            self._book.timers.add(now + MARKER_GRACE_S, attempt.entry)
            effects += self._book.settle(attempt.entry, now)
        return effects

    # -- what the routes bring; see also assembler.py

    def accepted(self, attempt: Attempt, epoch: int) -> Effects:
        """An answer or an event proves that the scheduler has the attempt."""
        if attempt.phase is EnginePhase.SUBMITTING or attempt.epoch == 0:
            attempt.epoch = epoch
            attempt.in_call = self._schedulers.epoch(attempt.scheduler) != 0
        attempt.apply(EngineEvent.ACCEPTED)
        effects = self._release_again(attempt)
        entry = attempt.entry
        if not attempt.abandoned:
            entry.stranded_at = None
        on_their_way = any(attempt.phase is EnginePhase.SUBMITTING for attempt in entry.attempts)
        if entry.accepted or entry.caller_is_final or on_their_way:
            return effects
        entry.accepted = True
        return [*effects, Accept(entry)]

    def _release_again(self, attempt: Attempt) -> Effects:
        """A Release that another incarnation answered, before this one accepted the attempt, has released nothing."""
        if attempt.release_answered_at is None or attempt.release_epoch == attempt.epoch:
            return []
        attempt.release_answered_at = None
        return [SendRelease(attempt.scheduler, attempt.attempt_id)]

    def finish(self, attempt: Attempt, finish: Finish, now: float) -> Effects:
        """A choice of an unfinished answer ended, as the detokenizer judged it.

        Raises IntegrityError when it had ended otherwise.
        """
        entry = attempt.entry
        if not entry.log.finish(finish):
            return []
        return [*self._book.complete(entry, now), Wake((entry,)), *self._book.settle(entry, now)]

    def engine_ended(self, attempt: Attempt, choice: int, cached_prompt_tokens: int, now: float) -> Effects:
        """The engine ended a choice: its KV blocks are free."""
        if attempt.released:
            return []
        attempt.ended_choices.add(choice)
        attempt.cached_prompt_tokens[choice] = cached_prompt_tokens
        if len(attempt.ended_choices) < len(attempt.choices) or attempt.ended_at is not None:
            return []
        attempt.ended_at = now
        attempt.apply(EngineEvent.ENDED)
        return []

    def marker_seen(self, attempt: Attempt, now: float) -> Effects:
        """The scheduler has forgotten the attempt, or given it to another: nothing of it follows in this call."""
        attempt.marker_seen = True
        if attempt.phase is EnginePhase.RELEASING:
            return self._book.settle(attempt.entry, now)
        return self._ask(attempt, now)

    def _ask(self, attempt: Attempt, now: float) -> Effects:
        """It did so without being told. Whether the attempt is lost or somebody else's, Reconcile's answer says."""
        self._book.timers.add(now + ASK_AGAIN_S, attempt.entry)
        return [Reconcile(attempt.scheduler)]

    def stale(self, attempt_ids: Iterable[int], now: float) -> Effects:
        """Another tokenizer has claimed these: their requests are not ours any more, and nothing is done to them."""
        effects: Effects = []
        for attempt in self._book.known(attempt_ids):
            effects += self._book.released(attempt, EngineEvent.LOST, now)
            if not attempt.abandoned:
                effects += self._book.let_go(attempt.entry, Cut.CLAIMED, now)
            effects += self._book.settle(attempt.entry, now)
        return effects

    def unknown(self, scheduler: str, attempt_id: int) -> Effects:
        """A sequence began of an attempt that nobody here remembers: its scheduler is told to forget it.

        Unless something is being claimed there, of which the scheduler may have more than it said at first.
        """
        if any(attempt.claiming for attempt in self._book.at(scheduler)):
            self._parked.setdefault(scheduler, set()).add(attempt_id)
            return []
        return [SendRelease(scheduler, attempt_id)]

    def hand_back(self, attempt: Attempt, now: float) -> Effects:
        """What waited here for its claimer is claimed for another entry, which reads it from its beginning."""
        self._parked.setdefault(attempt.scheduler, set()).add(attempt.attempt_id)
        return [*self._book.released(attempt, EngineEvent.LOST, now), *self._book.settle(attempt.entry, now)]

    def unpark(self, scheduler: str) -> Effects:
        """A claim was answered: what was unknown until then is read from its beginning, or not wanted by anybody."""
        if any(attempt.claiming for attempt in self._book.at(scheduler)):
            return []
        parked = self._parked.pop(scheduler, set())
        known = {attempt.attempt_id for attempt in self._book.known(parked)}
        releases: Effects = [SendRelease(scheduler, attempt_id) for attempt_id in parked - known]
        return [*releases, Resubscribe(scheduler, "a claim brought what had begun before")] if known else releases

    def spoiled(self, attempt: Attempt, why: str, now: float) -> Effects:
        """Two accounts of the attempt's output differ: nothing more of it may be sent."""
        entry = attempt.entry
        failure = Failure(ErrorCode.INTEGRITY, "Two accounts of the output differed.")
        return [
            Unacceptable(entry, why),
            *self._book.end(entry, FinishReason.ERROR, now, failure),
            *self._book.settle(entry, now),
        ]

    def route_opened(self, scheduler: str, epoch: int, now: float) -> Effects:
        """A call to the scheduler's current incarnation is up; what another one had is lost."""
        self._schedulers.opened(scheduler, epoch)
        return [*self.scheduler_seen(scheduler, epoch, now), *self._failover.resubmit(now)]

    def route_lost(self, scheduler: str, now: float) -> Effects:
        """The call is over: no marker comes through it any more, and the next one starts from token 0."""
        self._schedulers.closed(scheduler)
        self._parked.pop(scheduler, None)
        effects: Effects = []
        for attempt in self._book.at(scheduler):
            attempt.in_call = False
            effects += self._book.settle(attempt.entry, now)
        return effects

    def scheduler_seen(self, scheduler: str, epoch: int, now: float) -> Effects:
        """The scheduler told its epoch: attempts that another one accepted are lost."""
        lost = [attempt for attempt in self._book.at(scheduler) if attempt.epoch not in (0, epoch)]
        return [effect for attempt in lost for effect in self.lose(attempt, now)]

    def scheduler_lost(self, scheduler: str, now: float) -> Effects:
        """It is given up: everything it had accepted is lost, and what is on its way to it goes elsewhere."""
        effects: Effects = []
        for attempt in self._book.at(scheduler):
            if attempt.epoch or attempt.settled:
                effects += self.lose(attempt, now)
            elif not attempt.claimed and self._schedulers.least_busy() is not None:
                effects += [*self._leave(attempt, now), *self._book.settle(attempt.entry, now)]
        return [*effects, *self._failover.resubmit(now)]

    def scheduler_silent(self, scheduler: str, now: float) -> Effects:
        """The scheduler answers nobody, but may be back with all that it knew: given up only where another is there."""
        return self.scheduler_lost(scheduler, now) if self._schedulers.other_than(scheduler) else []

    def loaded(self, scheduler: str, sequences: int, *, draining: bool) -> None:
        """The scheduler told how many sequences wait and run there, and whether it takes more."""
        self._schedulers.loaded(scheduler, sequences, draining=draining)

    def wanted(self, scheduler: str) -> Wanted:
        """What to reconcile with. Attempts from the first unanswered Submit on are not judged: it may be on its way."""
        mine = self._book.at(scheduler)
        on_their_way = (attempt.number for attempt in mine if attempt.phase is EnginePhase.SUBMITTING)
        highest = min(on_their_way, default=self._book.highest_number + 1) - 1
        live = (a for a in mine if a.number <= highest and a.phase is not EnginePhase.RELEASING)
        return Wanted(highest, tuple(attempt.attempt_id for attempt in live))

    def reconciled(
        self, scheduler: str, epoch: int, missing_ids: Iterable[int], now: float, *, stale_ids: Iterable[int] = ()
    ) -> Effects:
        """The scheduler said which of the wanted attempts it does not have, or has for somebody else."""
        effects = [*self.scheduler_seen(scheduler, epoch, now), *self.stale(stale_ids, now)]
        for attempt in self._book.known(missing_ids):
            if attempt.phase is not EnginePhase.RELEASING:
                effects += self.lose(attempt, now)
        return [*effects, *self._failover.resubmit(now)]

    def overdue(self, attempt: Attempt, now: float) -> Effects:
        """Stops waiting for what should have come by now."""
        if past(attempt.release_answered_at, MARKER_GRACE_S, now):
            attempt.in_call = False
        if past(attempt.doubted_at, EPOCH_GRACE_S, now) and self._in_doubt(attempt):
            return self.lose(attempt, now)
        if attempt.marker_seen and attempt.counts:
            return self._ask(attempt, now)
        return []

    def _in_doubt(self, attempt: Attempt) -> bool:
        """Whether its epoch and the route's differ: one of the two is old."""
        current = self._schedulers.epoch(attempt.scheduler)
        return bool(current and attempt.epoch and attempt.epoch != current)

    def lose(self, attempt: Attempt, now: float) -> Effects:
        """The scheduler's incarnation that had the attempt is gone, or has forgotten it."""
        if attempt.released:
            return []
        entry = attempt.entry
        effects = self._book.released(attempt, EngineEvent.LOST, now)
        effects += self._failover.lost(attempt, now)
        return [*effects, *self._book.settle(entry, now)]
