"""The ledger: every open request with its answer and its attempts. Events in, effects out; it has no clock and no wire.

An entry goes when its caller's side is final and every attempt is released. An attempt is released when the scheduler
answered its Release and the in-band marker came through the route's call, or that call ended: nothing of it can follow.
All times are monotonic seconds, given with each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from services.protocol.answer import AnswerLog
from services.protocol.events import AbortOutcome, ErrorCode, Failure, Finish, FinishReason, Started
from services.runtime.error_tree import (
    AlreadyExists,
    DeadlineExceeded,
    Overloaded,
    Superseded,
    TailraceError,
    Unavailable,
)
from services.tokenizer.effects import (
    Accept,
    Effects,
    Finished,
    Forget,
    Refuse,
    Released,
    SendAbort,
    SendRelease,
    Submit,
    Unacceptable,
    Wake,
)
from services.tokenizer.entry import Attempt, Entry, Pinned
from services.tokenizer.state import CallerEvent, EngineEvent, EnginePhase
from services.tokenizer.timers import Timers

END_GRACE_S = 1.0
"""How long the engine may take to end what was aborted or is past its deadline; then we end it ourselves."""

MARKER_GRACE_S = 10.0
"""How long a release marker may take after Release was answered; then the attempt counts as released without it."""

EPOCH_GRACE_S = 3.0
"""How long an attempt's epoch and its route's may differ: one of the two is old, and by then it is known which."""


class Ledger:
    """Every open request of this process. `random_bits(k)` gives k random bits."""

    def __init__(self, *, model_id: str, max_open: int, random_bits: Callable[[int], int]) -> None:
        self._model_id = model_id
        self._max_open = max_open
        self._random_bits = random_bits
        self._entries: dict[Entry, None] = {}
        self._current: dict[tuple[str, str], Entry] = {}
        self._attempts: dict[int, Attempt] = {}
        self._epochs: dict[str, int] = {}
        self._numbers = 0
        self._timers = Timers()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def attempts(self) -> Iterable[Attempt]:
        """Every attempt that is not released."""
        return self._attempts.values()

    def attempt(self, attempt_id: int) -> Attempt | None:
        """An attempt that is not released."""
        return self._attempts.get(attempt_id)

    # -- the caller's side

    def check_room(self, tenant: str, request_id: str) -> None:
        """Raises what `open` would refuse with, before anything was spent on the request."""
        current = self._current.get((tenant, request_id)) if request_id else None
        if current is not None and current.live:
            raise AlreadyExists(f"request {request_id!r}")
        if len(self._entries) >= self._max_open:
            raise Overloaded(f"{self._max_open} requests are open here, which is the limit", reason="LEDGER_FULL")

    def open(
        self, pinned: Pinned, *, tenant: str, scheduler: str, deadline: float | None, now: float, unix_ms: int
    ) -> tuple[Entry, Effects]:
        """Enters a request and has it submitted. Raises AlreadyExists or Overloaded, and then nothing was entered."""
        self.check_room(tenant, pinned.request.request_id)
        entry = Entry(
            tenant=tenant,
            pinned=pinned,
            started=self._started(pinned, unix_ms),
            log=AnswerLog(pinned.request.n),
            opened_at=now,
            deadline=deadline,
            progress_at=now,
        )
        self._entries[entry] = None
        self._current[entry.key] = entry
        if deadline is not None:
            self._timers.add(deadline + END_GRACE_S, entry)
        return entry, [Submit(self._new_attempt(entry, scheduler))]

    def delivered(self, entry: Entry, now: float) -> Effects:
        """The terminal event was handed to the caller's transport."""
        if entry.caller_is_final:
            return []
        entry.apply(CallerEvent.DELIVERED)
        entry.finished_at = now
        return self._settle(entry, now)

    def left(self, entry: Entry, now: float) -> Effects:
        """The caller will read no more."""
        if entry.caller_is_final:
            return []
        entry.apply(CallerEvent.LEFT)
        entry.finished_at = now
        effects = self._end(entry, FinishReason.ABORTED, now)
        if not entry.accepted:
            effects.append(Refuse(entry, Superseded("the caller left before the request was accepted")))
        return [*effects, *self._settle(entry, now)]

    def abort(self, tenant: str, request_id: str, now: float) -> tuple[AbortOutcome, Entry | None, Effects]:
        """Stops a request by its id; the engine's end comes back through the route, or after a grace we end it here."""
        entry = self._current.get((tenant, request_id))
        if entry is None:
            return AbortOutcome.NOT_FOUND, None, []
        if entry.completed or entry.caller_is_final:
            return AbortOutcome.ALREADY_FINISHED, entry, []
        if entry.aborted_at is not None:
            return AbortOutcome.ABORTING, entry, []
        entry.aborted_at = now
        self._timers.add(now + END_GRACE_S, entry)
        return AbortOutcome.ABORTING, entry, [SendAbort(attempt) for attempt in entry.attempts if not attempt.released]

    def end_all(self, now: float) -> Effects:
        """Shutting down: what is open ends with ABORTED, whole and at once."""
        effects: Effects = []
        for entry in list(self._entries):
            effects += self._refuse(entry, Unavailable("the tokenizer is shutting down"), now)
            effects += [*self._end(entry, FinishReason.ABORTED, now), *self._settle(entry, now)]
        return effects

    # -- Submit and Release

    def submit_answered(self, attempt_id: int, epoch: int, now: float) -> Effects:
        """The scheduler has the attempt."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return []
        attempt.settled = True
        effects = self.accepted(attempt, epoch)
        if self._in_doubt(attempt):
            attempt.doubted_at = now
            self._timers.add(now + EPOCH_GRACE_S, attempt.entry)
        return [*effects, *self._settle(attempt.entry, now)]

    def submit_refused(self, attempt_id: int, error: TailraceError, now: float) -> Effects:
        """The scheduler does not have the attempt, and said why."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return []
        attempt.settled = True
        if attempt.phase not in (EnginePhase.SUBMITTING, EnginePhase.RELEASING):
            return []
        effects = self._refuse(attempt.entry, error, now)
        if attempt.epoch == 0:
            effects += self._released(attempt, EngineEvent.REFUSED, now)
        return [*effects, *self._settle(attempt.entry, now)]

    def submit_failed(self, attempt_id: int, error: TailraceError, now: float) -> Effects:
        """Nobody knows whether the scheduler has the attempt: Release keeps a late Submit out."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return []
        attempt.settled = True
        effects = [] if attempt.epoch else self._refuse(attempt.entry, error, now)
        return [*effects, *self._settle(attempt.entry, now)]

    def release_answered(self, attempt_ids: Iterable[int], epoch: int, now: float) -> Effects:
        """The scheduler forgot these attempts, or left tombstones for them."""
        effects: Effects = []
        for attempt in self._known(attempt_ids):
            attempt.release_answered_at, attempt.release_epoch = now, epoch
            if attempt.epoch not in (0, epoch):
                effects += self._lose(attempt, now)
                continue
            self._timers.add(now + MARKER_GRACE_S, attempt.entry)
            effects += self._settle(attempt.entry, now)
        return effects

    # -- what the routes bring; see also assembler.py

    def accepted(self, attempt: Attempt, epoch: int) -> Effects:
        """An answer or an event proves that the scheduler has the attempt."""
        if attempt.epoch == 0:
            attempt.epoch = epoch
            attempt.in_call = self._epochs.get(attempt.scheduler, 0) != 0
        attempt.apply(EngineEvent.ACCEPTED)
        effects = self._release_again(attempt)
        entry = attempt.entry
        if entry.accepted or entry.caller_is_final:
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
        return [*self._complete(entry, now), Wake((entry,)), *self._settle(entry, now)]

    def engine_ended(self, attempt: Attempt, choice: int, cached_prompt_tokens: int, now: float) -> Effects:
        """The engine ended a choice: its KV blocks are free."""
        if attempt.released:
            return []
        attempt.ended_choices.add(choice)
        attempt.cached_prompt_tokens = max(attempt.cached_prompt_tokens, cached_prompt_tokens)
        if len(attempt.ended_choices) < len(attempt.entry.log.choices) or attempt.ended_at is not None:
            return []
        attempt.ended_at = now
        attempt.apply(EngineEvent.ENDED)
        return []

    def marker_seen(self, attempt: Attempt, now: float) -> Effects:
        """The scheduler has forgotten the attempt: nothing of it follows, in this call or another."""
        attempt.marker_seen = True
        if attempt.phase is not EnginePhase.RELEASING:
            return self._lose(attempt, now)  # it did so without being told
        return self._settle(attempt.entry, now)

    def spoiled(self, attempt: Attempt, why: str, now: float) -> Effects:
        """Two accounts of the attempt's output differ: nothing more of it may be sent."""
        entry = attempt.entry
        failure = Failure(ErrorCode.INTEGRITY, "Two accounts of the output differed.")
        return [
            Unacceptable(entry, why),
            *self._end(entry, FinishReason.ERROR, now, failure),
            *self._settle(entry, now),
        ]

    def route_opened(self, scheduler: str, epoch: int, now: float) -> Effects:
        """A call to the scheduler's current incarnation is up; what another one had is lost."""
        self._epochs[scheduler] = epoch
        return self.scheduler_seen(scheduler, epoch, now)

    def route_lost(self, scheduler: str, now: float) -> Effects:
        """The call is over: no marker comes through it any more, and the next one starts from token 0."""
        self._epochs[scheduler] = 0
        effects: Effects = []
        for attempt in self._at(scheduler):
            attempt.in_call = False
            effects += self._settle(attempt.entry, now)
        return effects

    def scheduler_seen(self, scheduler: str, epoch: int, now: float) -> Effects:
        """The scheduler told its epoch: attempts that another one accepted are lost."""
        lost = [attempt for attempt in self._at(scheduler) if attempt.epoch not in (0, epoch)]
        return [effect for attempt in lost for effect in self._lose(attempt, now)]

    def scheduler_lost(self, scheduler: str, now: float) -> Effects:
        """The scheduler is given up: everything it had accepted is lost."""
        lost = [attempt for attempt in self._at(scheduler) if attempt.epoch or attempt.settled]
        return [effect for attempt in lost for effect in self._lose(attempt, now)]

    # -- time

    def tick(self, now: float) -> Effects:
        """Does what has become due."""
        effects: Effects = []
        for entry in self._timers.due(now):
            if not entry.forgotten:
                effects += self._overdue(entry, now)
        return effects

    def _overdue(self, entry: Entry, now: float) -> Effects:
        effects: Effects = []
        if _past(entry.deadline, END_GRACE_S, now):
            effects += self._refuse(entry, DeadlineExceeded("the deadline passed before a scheduler accepted it"), now)
            effects += self._end(entry, FinishReason.DEADLINE, now)
        if _past(entry.aborted_at, END_GRACE_S, now):
            effects += self._refuse(entry, Unavailable("no scheduler accepted it in time"), now)
            effects += self._end(entry, FinishReason.ABORTED, now)
        for attempt in entry.attempts:
            if _past(attempt.doubted_at, EPOCH_GRACE_S, now) and self._in_doubt(attempt):
                effects += self._lose(attempt, now)
            if _past(attempt.release_answered_at, MARKER_GRACE_S, now):
                attempt.in_call = False
        return [*effects, *self._settle(entry, now)]

    def _in_doubt(self, attempt: Attempt) -> bool:
        """Whether its epoch and the route's differ: one of the two is old."""
        current = self._epochs.get(attempt.scheduler, 0)
        return bool(current and attempt.epoch and attempt.epoch != current)

    # -- ends

    def _refuse(self, entry: Entry, error: TailraceError, now: float) -> Effects:
        if entry.accepted or entry.caller_is_final:
            return []
        entry.apply(CallerEvent.REFUSED)
        entry.finished_at = now
        if entry.aborted_at is not None:
            error = Superseded("the request was aborted before it was accepted")
        return [Refuse(entry, error)]

    def _lose(self, attempt: Attempt, now: float) -> Effects:
        """The scheduler's incarnation that had the attempt is gone."""
        if attempt.released:
            return []
        entry = attempt.entry
        failure = Failure(ErrorCode.ENGINE_LOST, "The scheduler that ran the request died.")
        effects = self._released(attempt, EngineEvent.LOST, now)
        effects += self._end(entry, FinishReason.ERROR, now, failure)
        return [*effects, *self._settle(entry, now)]

    def _end(self, entry: Entry, reason: FinishReason, now: float, failure: Failure | None = None) -> Effects:
        """Ends every unfinished choice, and so the answer, without the engine."""
        if entry.completed:
            return []
        for choice, log in enumerate(entry.log.choices):
            if log.finish is None:
                entry.log.finish(Finish(choice, reason, len(log.token_ids), error=failure))
        return [*self._complete(entry, now), Wake((entry,))]

    def _complete(self, entry: Entry, now: float) -> Effects:
        if entry.completed or not entry.log.all_finished:
            return []
        entry.completed_at = now
        entry.log.complete(entry.usage_now())
        return [Finished(entry)]

    # -- release

    def _settle(self, entry: Entry, now: float) -> Effects:
        """What follows from where both sides stand now: releases that are due, attempts and entries that can go."""
        effects: Effects = []
        for attempt in entry.attempts:
            if attempt.release_is_due:
                attempt.apply(EngineEvent.RELEASE)
                effects.append(SendRelease(attempt.scheduler, attempt.attempt_id))
            if attempt.nothing_follows:
                effects += self._released(attempt, EngineEvent.RELEASED, now)
        if not entry.forgotten and entry.caller_is_final and all(attempt.released for attempt in entry.attempts):
            effects.append(self._forget(entry))
        return effects

    def _released(self, attempt: Attempt, event: EngineEvent, now: float) -> Effects:
        attempt.apply(event)
        attempt.released_at = now
        del self._attempts[attempt.attempt_id]
        return [Released(attempt)]

    def _forget(self, entry: Entry) -> Forget:
        entry.forgotten = True
        del self._entries[entry]
        if self._current.get(entry.key) is entry:
            del self._current[entry.key]
        self._timers.prune(len(self._entries))
        return Forget(entry)

    # -- making

    def _started(self, pinned: Pinned, unix_ms: int) -> Started:
        seed = pinned.request.sampling.seed
        assert seed is not None
        return Started(
            request_id=pinned.request.request_id,
            resume_token=self._random_bits(128).to_bytes(16, "big"),
            model=self._model_id,
            created_unix_ms=unix_ms,
            prompt_tokens=len(pinned.prompt_ids),
            seed=seed,
        )

    def _new_attempt(self, entry: Entry, scheduler: str) -> Attempt:
        self._numbers += 1
        attempt_id = self._random_bits(64) or 1
        attempt = Attempt(attempt_id=attempt_id, number=self._numbers, scheduler=scheduler, entry=entry)
        entry.attempts.append(attempt)
        self._attempts[attempt_id] = attempt
        return attempt

    def _known(self, attempt_ids: Iterable[int]) -> list[Attempt]:
        found = (self._attempts.get(attempt_id) for attempt_id in attempt_ids)
        return [attempt for attempt in found if attempt is not None]

    def _at(self, scheduler: str) -> list[Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.scheduler == scheduler]


def _past(moment: float | None, grace_s: float, now: float) -> bool:
    return moment is not None and now >= moment + grace_s
