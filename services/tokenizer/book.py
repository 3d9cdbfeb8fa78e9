"""The ledger's tables, and the one way in which anything ends and leaves them.

An entry goes when its caller's side is final and every attempt is released. An attempt is released when the scheduler
answered its Release and the in-band marker came through the route's call, or that call ended: nothing of it can follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.protocol.events import Failure, Finish, FinishReason
from services.runtime.error_tree import Superseded, TailraceError, Unavailable
from services.tokenizer.effects import (
    Effects,
    Finished,
    Forget,
    LetGo,
    Refuse,
    Released,
    SendAbort,
    SendRelease,
    Wake,
)
from services.tokenizer.entry import Attempt, Cut, Entry
from services.tokenizer.retention import Retention
from services.tokenizer.state import CallerEvent, EngineEvent
from services.tokenizer.timers import Timers

END_GRACE_S = 1.0
"""How long the engine may take to end what was aborted or is past its deadline; then we end it ourselves."""


HANDOVER_S = 10.0
"""How long what is still ours of a claimed request waits for its claimer, who goes from scheduler to scheduler."""


class Book:
    """Every open entry and every attempt that is not released. `random_bits(k)` gives k random bits."""

    def __init__(self, retention: Retention, random_bits: Callable[[int], int]) -> None:
        self.retention = retention
        self.entries: dict[Entry, None] = {}
        self.current: dict[tuple[str, str], Entry] = {}
        self.attempts: dict[int, Attempt] = {}
        self.timers = Timers()
        self.highest_number = 0
        self._random_bits = random_bits

    def enter(self, entry: Entry) -> None:
        """A new entry; from now on its id means this one."""
        self.entries[entry] = None
        self.current[entry.key] = entry
        self.retention.reserve(entry)

    def new_attempt(self, entry: Entry, scheduler: str) -> Attempt:
        """One more run of an entry's unfinished choices."""
        return self.add(
            Attempt(
                attempt_id=self._random_bits(64) or 1,
                number=self.next_number(),
                scheduler=scheduler,
                entry=entry,
                choices=entry.uncovered,
                progress_before=entry.progress,
            )
        )

    def next_number(self) -> int:
        """The next place in this process's count of attempts."""
        self.highest_number += 1
        return self.highest_number

    def add(self, attempt: Attempt) -> Attempt:
        """An attempt of an entry that is here."""
        assert attempt.attempt_id not in self.attempts
        attempt.entry.attempts.append(attempt)
        self.attempts[attempt.attempt_id] = attempt
        return attempt

    def known(self, attempt_ids: Iterable[int]) -> list[Attempt]:
        """Those of these attempts that are not released."""
        found = (self.attempts.get(attempt_id) for attempt_id in attempt_ids)
        return [attempt for attempt in found if attempt is not None]

    def at(self, scheduler: str) -> list[Attempt]:
        """A scheduler's attempts that are not released."""
        return [attempt for attempt in self.attempts.values() if attempt.scheduler == scheduler]

    # -- ends

    def refuse(self, entry: Entry, error: TailraceError, now: float) -> Effects:
        """Refuses an entry that was not accepted yet; nothing for any other."""
        if entry.accepted or entry.caller_is_final:
            return []
        entry.apply(CallerEvent.REFUSED)
        entry.finished_at = now
        if entry.aborted_at is not None:
            error = Superseded("the request was aborted before it was accepted")
        return [Refuse(entry, error)]

    def end(self, entry: Entry, reason: FinishReason, now: float, failure: Failure | None = None) -> Effects:
        """Ends every unfinished choice, and so the answer, without the engine."""
        if entry.completed:
            return []
        entry.ended_here = True
        for choice, log in enumerate(entry.log.choices):
            if log.finish is None:
                entry.log.finish(Finish(choice, reason, len(log.token_ids), error=failure))
        return [*self.complete(entry, now), Wake((entry,))]

    def complete(self, entry: Entry, now: float) -> Effects:
        """The answer is whole once all its choices have ended."""
        if entry.completed or not entry.log.all_finished:
            return []
        entry.completed_at = now
        entry.log.complete(entry.usage_now())
        return [Finished(entry)]

    def let_go(self, entry: Entry, cut: Cut, now: float) -> Effects:
        """Another tokenizer has the request, or may, or nobody has: its readers are cut, and no end is invented.

        Nothing that another one may have is touched: a Release names its sender, one that is LEFT gets none, and one
        that is CLAIMED at one scheduler may be about to be claimed at the next.
        """
        effects: Effects = []
        if not entry.completed and not entry.caller_is_final:
            effects += self._cut(entry, cut, now)
        if cut is Cut.LEFT and entry.cut is not None:
            for attempt in self.known(attempt.attempt_id for attempt in entry.attempts):
                effects += self.released(attempt, EngineEvent.LOST, now)
        return [*effects, *self.settle(entry, now)]

    def _cut(self, entry: Entry, cut: Cut, now: float) -> Effects:
        entry.cut = cut
        entry.apply(CallerEvent.TAKEN)
        entry.finished_at = entry.finished_at or now
        if cut is Cut.CLAIMED:
            entry.kept_until = now + HANDOVER_S
            self.timers.add(entry.kept_until, entry)
        if entry.accepted:
            return [LetGo(entry), Wake((entry,))]
        return [LetGo(entry), Wake((entry,)), Refuse(entry, _elsewhere(entry))]

    # -- release

    def settle(self, entry: Entry, now: float) -> Effects:
        """What follows from where both sides stand now: releases that are due, attempts and entries that can go."""
        effects: Effects = []
        for attempt in entry.attempts:
            if attempt.release_is_due:
                attempt.apply(EngineEvent.RELEASE)
                effects.append(SendRelease(attempt.scheduler, attempt.attempt_id))
            elif attempt.abort_is_due:
                attempt.aborted = True
                effects.append(SendAbort(attempt))
            if attempt.nothing_follows:
                effects += self.released(attempt, EngineEvent.RELEASED, now)
        if entry.detached and entry.completed and self.retention.closed:
            entry.apply(CallerEvent.EXPIRED)
        if not entry.forgotten and entry.caller_is_final and all(attempt.released for attempt in entry.attempts):
            effects.append(self._forget(entry))
        return effects

    def released(self, attempt: Attempt, event: EngineEvent, now: float) -> Effects:
        """Nothing remembers the attempt at its scheduler."""
        attempt.apply(event)
        attempt.released_at = now
        del self.attempts[attempt.attempt_id]
        return [Released(attempt)]

    def _forget(self, entry: Entry) -> Forget:
        entry.forgotten = True
        del self.entries[entry]
        if self.current.get(entry.key) is entry:
            del self.current[entry.key]
        self.retention.free(entry)
        self.timers.prune(len(self.entries))
        return Forget(entry)


def _elsewhere(entry: Entry) -> TailraceError:
    """What is lost is nowhere; anything else is found by asking again."""
    what = f"request {entry.request_id!r} is not here any more"
    return Superseded(what) if entry.cut is Cut.LOST else Unavailable(what, reason="CLAIMED")
