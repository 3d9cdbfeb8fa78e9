"""The ledger: every open request with its answer and its attempts. Events in, effects out; it has no clock and no wire.

Here is the caller's side; attempts.py has the engine's, book.py the tables and how anything leaves them.
All times are monotonic seconds, given with each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.protocol.answer import AnswerLog
from services.protocol.events import AbortOutcome, FinishReason, Started
from services.runtime.error_tree import AlreadyExists, DeadlineExceeded, Overloaded, Superseded, Unavailable
from services.tokenizer.attempts import Attempts
from services.tokenizer.book import Book
from services.tokenizer.effects import Effects, Refuse, SendAbort, Submit
from services.tokenizer.entry import Entry, Pinned
from services.tokenizer.failover import Failover
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.state import CallerEvent
from services.tokenizer.timers import past

END_GRACE_S = 1.0
"""How long the engine may take to end what was aborted or is past its deadline; then we end it ourselves."""


class Ledger:
    """Every open request of this process. `random_bits(k)` gives k random bits.

    `engine_grace_s`: how long a request whose scheduler died waits for one to go on with.
    """

    def __init__(
        self, *, model_id: str, max_open: int, engine_grace_s: float, random_bits: Callable[[int], int]
    ) -> None:
        self._model_id = model_id
        self._max_open = max_open
        self._random_bits = random_bits
        self._book = Book(random_bits)
        self.schedulers = Schedulers()
        self._failover = Failover(self._book, self.schedulers, grace_s=engine_grace_s)
        self.attempts = Attempts(self._book, self.schedulers, self._failover)

    def __len__(self) -> int:
        return len(self._book.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._book.entries)

    # -- the caller's side

    def check_room(self, tenant: str, request_id: str) -> None:
        """Raises what `open` would refuse with, before anything was spent on the request."""
        current = self._book.current.get((tenant, request_id)) if request_id else None
        if current is not None and current.live:
            raise AlreadyExists(f"request {request_id!r}")
        if len(self._book.entries) >= self._max_open:
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
        self._book.enter(entry)
        if deadline is not None:
            self._book.timers.add(deadline + END_GRACE_S, entry)
        self.schedulers.sent(scheduler, pinned.request.n)
        return entry, [Submit(self._book.new_attempt(entry, scheduler))]

    def delivered(self, entry: Entry, now: float) -> Effects:
        """The terminal event was handed to the caller's transport."""
        if entry.caller_is_final:
            return []
        entry.apply(CallerEvent.DELIVERED)
        entry.finished_at = now
        return self._book.settle(entry, now)

    def left(self, entry: Entry, now: float) -> Effects:
        """The caller will read no more."""
        if entry.caller_is_final:
            return []
        entry.apply(CallerEvent.LEFT)
        entry.finished_at = now
        effects = self._book.end(entry, FinishReason.ABORTED, now)
        if not entry.accepted:
            effects.append(Refuse(entry, Superseded("the caller left before the request was accepted")))
        return [*effects, *self._book.settle(entry, now)]

    def abort(self, tenant: str, request_id: str, now: float) -> tuple[AbortOutcome, Entry | None, Effects]:
        """Stops a request by its id; the engine's end comes back through the route, or after a grace we end it here."""
        entry = self._book.current.get((tenant, request_id))
        if entry is None:
            return AbortOutcome.NOT_FOUND, None, []
        if entry.completed or entry.caller_is_final:
            return AbortOutcome.ALREADY_FINISHED, entry, []
        if entry.aborted_at is not None:
            return AbortOutcome.ABORTING, entry, []
        entry.aborted_at = now
        self._book.timers.add(now + END_GRACE_S, entry)
        running = [attempt for attempt in entry.attempts if not attempt.released and not attempt.abandoned]
        if not running:
            return AbortOutcome.ABORTING, entry, self._book.end(entry, FinishReason.ABORTED, now)
        return AbortOutcome.ABORTING, entry, [SendAbort(attempt) for attempt in running]

    def end_all(self, now: float) -> Effects:
        """Shutting down: what is open ends with ABORTED, whole and at once."""
        effects: Effects = []
        for entry in list(self._book.entries):
            effects += self._book.refuse(entry, Unavailable("the tokenizer is shutting down"), now)
            effects += [*self._book.end(entry, FinishReason.ABORTED, now), *self._book.settle(entry, now)]
        return effects

    # -- time

    def tick(self, now: float) -> Effects:
        """Does what has become due."""
        effects: Effects = []
        for entry in self._book.timers.due(now):
            if not entry.forgotten:
                effects += self._overdue(entry, now)
        return [*effects, *self._failover.resubmit()]

    def _overdue(self, entry: Entry, now: float) -> Effects:
        effects: Effects = []
        if past(entry.deadline, END_GRACE_S, now):
            late = DeadlineExceeded("the deadline passed before a scheduler accepted it")
            effects += self._book.refuse(entry, late, now)
            effects += self._book.end(entry, FinishReason.DEADLINE, now)
        if past(entry.aborted_at, END_GRACE_S, now):
            effects += self._book.refuse(entry, Unavailable("no scheduler accepted it in time"), now)
            effects += self._book.end(entry, FinishReason.ABORTED, now)
        effects += self._failover.overdue(entry, now)
        for attempt in entry.attempts:
            effects += self.attempts.overdue(attempt, now)
        return [*effects, *self._book.settle(entry, now)]

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
