"""Taking over requests whose tokenizer died: what schedulers hold of one, and how it becomes an entry here.

1. `remains_of` puts together what the schedulers answered to Find. Nothing has been changed by then.
2. `Claims.take_over` enters the request, detached, with the attempts that hold it; so what a claimed attempt sends
   before Claim is answered finds its place. The route delivers each from token 0.
3. `Claims.answered`, `gone` and `too_late` say what came of it at each scheduler, one after another. All claimers go
   through them in one order and with one fence each; so of two the one who loses does so before the other can. The last
   claimer wins: who loses an attempt lets the request go.

Events in, effects out, as in core.py. All times are monotonic seconds, given with each event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.protocol.answer import AnswerLog
from services.protocol.events import Started
from services.runtime.error_tree import NotFound
from services.runtime.trace import TraceContext
from services.tokenizer.attempts import Attempts
from services.tokenizer.book import END_GRACE_S, Book
from services.tokenizer.effects import Claim, Effects, SendRelease
from services.tokenizer.entry import Attempt, Cut, Entry, Pinned
from services.tokenizer.state import CallerPhase

CLAIMED_GRACE_S = 30.0
"""How long a claimed request waits for the caller for whom it was claimed."""


@dataclass(frozen=True, slots=True)
class Record:
    """What its tokenizer left of a request; `raw` is handed on with every later Submit."""

    pinned: Pinned
    started: Started
    raw: bytes
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    """An attempt that a scheduler holds, as it was submitted; choice → (output tokens, whether it has ended)."""

    attempt_id: int
    fence: int
    number: int
    choices: Mapping[int, tuple[int, bool]]

    @property
    def rank(self) -> tuple[int, int]:
        """The higher, the later."""
        return self.fence, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one scheduler holds of a request. `deadline_in_s`: what is left of its time, None for no limit."""

    scheduler: str
    epoch: int
    fence: int
    owner_present: bool
    record: Record
    deadline_in_s: float | None
    attempts: Sequence[HeldAttempt]


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """A scheduler gave the request to us: these are its attempts there."""

    epoch: int
    fence: int
    attempts: Sequence[HeldAttempt]


@dataclass(frozen=True, slots=True)
class Remains:
    """All that schedulers hold of one request."""

    helds: Sequence[Held]

    @property
    def record(self) -> Record:
        """The same at all of them."""
        return self.helds[0].record

    @property
    def owner_present(self) -> bool:
        """Whether the tokenizer that has it is connected to any of them."""
        return any(held.owner_present for held in self.helds)

    @property
    def choices(self) -> Mapping[int, tuple[int, bool]]:
        """Choice → (output tokens, whether it has ended), as the latest attempt has it that runs it."""
        attempts = sorted((a for held in self.helds for a in held.attempts), key=lambda a: a.rank)
        return {choice: state for attempt in attempts for choice, state in attempt.choices.items()}

    @property
    def whole(self) -> bool:
        """Whether nothing is missing. Choices that ended on a scheduler that is dead are nowhere."""
        return len(self.choices) == self.record.pinned.request.n

    @property
    def ended(self) -> bool:
        """Whether the engine has ended all of it."""
        return all(ended for _, ended in self.choices.values())


def remains_of(helds: Iterable[Held]) -> list[Remains]:
    """The requests of which something is held, the newest first: a label may have been used for several."""
    by_record: dict[bytes, list[Held]] = {}
    for held in helds:
        by_record.setdefault(held.record.raw, []).append(held)
    found = [Remains(held) for held in by_record.values()]
    return sorted(found, key=lambda remains: remains.record.started.created_unix_ms, reverse=True)


class Claims:
    """The requests that are being taken over."""

    def __init__(self, book: Book, attempts: Attempts) -> None:
        self._book = book
        self._attempts = attempts

    def take_over(self, tenant: str, remains: Remains, now: float) -> tuple[Entry, Effects]:
        """Enters what another tokenizer had, and has it claimed wherever it is held.

        Raises NotFound when something is missing, or when it was ours and is being forgotten; but not for what waits
        here for whoever claimed the rest from us: that one may have died. It is not refused for load: it was admitted
        once.
        """
        ids = [attempt.attempt_id for held in remains.helds for attempt in held.attempts]
        ours = self._book.known(ids)
        if not remains.whole or not all(attempt.entry.is_handed_over for attempt in ours):
            raise NotFound(f"request {remains.record.started.request_id!r}")
        effects = [effect for attempt in ours for effect in self._attempts.hand_back(attempt, now)]
        entry = self._entry(tenant, remains, now)
        self._book.enter(entry)
        self._book.timers.add(now + CLAIMED_GRACE_S, entry)
        if entry.deadline is not None:
            self._book.timers.add(entry.deadline + END_GRACE_S, entry)
        places = []
        for held in sorted(remains.helds, key=lambda held: held.epoch):
            number = self._book.next_number()
            for attempt in held.attempts:
                self._adopt(entry, held.scheduler, held.epoch, number, attempt)
            places.append((held.scheduler, number))
        _divide(entry)
        return entry, [*effects, Claim(entry, places)]

    def wanted(self, entry: Entry, scheduler: str) -> bool:
        """Whether the claim is to be sent, or sent again."""
        return bool(self._pending(entry, scheduler))

    def answered(self, entry: Entry, scheduler: str, answer: ClaimAnswer, now: float) -> Effects:
        """The scheduler gave it to us, with attempts that may have changed since it was asked what it holds."""
        entry.fence = max(entry.fence, answer.fence)
        pending = {attempt.attempt_id: attempt for attempt in self._pending(entry, scheduler)}
        number = max((attempt.number for attempt in pending.values()), default=0)
        effects: Effects = []
        for held in answer.attempts:
            attempt = pending.pop(held.attempt_id, None)
            if attempt is None and not self._book.known((held.attempt_id,)):
                if entry.caller_is_final:
                    effects.append(SendRelease(scheduler, held.attempt_id))
                else:
                    attempt = self._adopt(entry, scheduler, answer.epoch, number, held)
            if attempt is not None:
                attempt.settled = True
                effects += self._attempts.accepted(attempt, answer.epoch)
        _divide(entry)
        for attempt in pending.values():
            attempt.settled = True
            effects += self._attempts.lose(attempt, now)
        return [*effects, *self._attempts.unpark(scheduler), *self._book.settle(entry, now)]

    def gone(self, entry: Entry, scheduler: str, now: float) -> Effects:
        """The scheduler has nothing of it any more, or was not asked since nobody wants it any more."""
        effects: Effects = []
        for attempt in self._pending(entry, scheduler):
            attempt.settled = True
            effects += self._attempts.lose(attempt, now)
        return [*effects, *self._attempts.unpark(scheduler), *self._book.settle(entry, now)]

    def too_late(self, entry: Entry, scheduler: str, now: float) -> Effects:
        """Another claimer has it there, and comes to the schedulers after it too."""
        effects = self._attempts.stale([attempt.attempt_id for attempt in self._pending(entry, scheduler)], now)
        return [*effects, *self._book.let_go(entry, Cut.CLAIMED, now), *self._attempts.unpark(scheduler)]

    def _pending(self, entry: Entry, scheduler: str) -> list[Attempt]:
        return [attempt for attempt in entry.attempts if attempt.claiming and attempt.scheduler == scheduler]

    def _entry(self, tenant: str, remains: Remains, now: float) -> Entry:
        record, choices = remains.record, remains.choices
        left_s = min((held.deadline_in_s for held in remains.helds if held.deadline_in_s is not None), default=None)
        n = record.pinned.request.n
        return Entry(
            tenant=tenant,
            pinned=record.pinned,
            started=record.started,
            log=AnswerLog(n),
            opened_at=now,
            deadline=None if left_s is None else now + left_s,
            fence=max(held.fence for held in remains.helds) + 1,
            record=record.raw,
            held=tuple(choices[choice][0] for choice in range(n)),
            caller=CallerPhase.DETACHED,
            progress_at=now,
            kept_until=now + CLAIMED_GRACE_S,
            trace=record.trace,
        )

    def _adopt(self, entry: Entry, scheduler: str, epoch: int, number: int, held: HeldAttempt) -> Attempt:
        return self._book.add(
            Attempt(
                attempt_id=held.attempt_id,
                number=number,
                scheduler=scheduler,
                entry=entry,
                choices=tuple(held.choices),
                progress_before=0,
                claimed=True,
                rank=held.rank,
                epoch=epoch,
            )
        )


def _divide(entry: Entry) -> None:
    """Each choice counts in the latest of the claimed attempts that runs it; one that gives none is not needed."""
    claimed = sorted((attempt for attempt in entry.attempts if attempt.claimed), key=lambda attempt: attempt.rank)
    last = {choice: attempt for attempt in claimed for choice in attempt.choices}
    for attempt in claimed:
        attempt.passed_over = frozenset(choice for choice in attempt.choices if last[choice] is not attempt)
        attempt.abandoned = not attempt.provides
