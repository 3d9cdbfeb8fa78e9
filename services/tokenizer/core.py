"""The ledger: every open request with its answer and its attempts. Events in, effects out; it has no clock and no wire.

Here is the caller's side; attempts.py has the engine's, book.py the tables and how anything leaves them.
All times are monotonic seconds, given with each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hmac import compare_digest

from services.protocol.answer import AnswerLog
from services.protocol.events import AbortOutcome, FinishReason, Started
from services.protocol.request import ValidRequest
from services.runtime.error_tree import AlreadyExists, DeadlineExceeded, NotFound, Overloaded, Superseded, Unavailable
from services.tokenizer.attempts import Attempts
from services.tokenizer.book import END_GRACE_S, Book
from services.tokenizer.claims import Claims
from services.tokenizer.effects import Effects, Refuse, SendAbort, Submit
from services.tokenizer.entry import Cut, Entry, Pinned
from services.tokenizer.failover import Failover
from services.tokenizer.retention import Retention
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.state import CallerEvent, CallerPhase
from services.tokenizer.timers import past


class Ledger:
    """Every open request of this process. `random_bits(k)` gives k random bits.

    `engine_grace_s`: how long a request whose scheduler died waits for one to go on with.
    """

    def __init__(
        self,
        *,
        model_id: str,
        max_open: int,
        engine_grace_s: float,
        retention: Retention,
        random_bits: Callable[[int], int],
    ) -> None:
        self._model_id = model_id
        self._max_open = max_open
        self._random_bits = random_bits
        self.retention = retention
        self._book = Book(retention, random_bits)
        self.schedulers = Schedulers()
        self._failover = Failover(self._book, self.schedulers, grace_s=engine_grace_s)
        self.attempts = Attempts(self._book, self.schedulers, self._failover)
        self.claims = Claims(self._book, self.attempts)

    def __len__(self) -> int:
        return len(self._book.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._book.entries)

    # -- the caller's side

    def find(self, tenant: str, request: ValidRequest) -> Entry | None:
        """The request that is asked for once more, if it is here: same id, same content. Raises AlreadyExists."""
        current = self._book.current.get((tenant, request.request_id)) if request.request_id else None
        if current is None or not current.live:
            return None
        if current.pinned.asked != request:
            raise AlreadyExists(f"request {request.request_id!r} with other content")
        return current

    def check_room(self, request: ValidRequest) -> None:
        """Raises Overloaded as `open` would, before anything was spent on the request."""
        if len(self) >= self._max_open:
            raise Overloaded(f"{self._max_open} requests are open here, which is the limit", reason="LEDGER_FULL")
        self.retention.check(request)

    def open(
        self, pinned: Pinned, *, tenant: str, scheduler: str, deadline: float | None, now: float, unix_ms: int
    ) -> tuple[Entry, Effects]:
        """Enters a request and has it submitted. Raises AlreadyExists or Overloaded, and then nothing was entered."""
        if self.find(tenant, pinned.asked) is not None:
            raise AlreadyExists(f"request {pinned.request.request_id!r}")
        self.check_room(pinned.request)
        self.retention.check(pinned.request, pinned.request.stopping.max_tokens or 1, len(pinned.prompt_ids))
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

    def resumable(self, tenant: str, request_id: str, resume_token: bytes) -> Entry:
        """The request whose caller comes back. Raises NotFound, the same for an unknown id and a wrong token."""
        entry = self._book.current.get((tenant, request_id))
        expected = b"" if entry is None else entry.started.resume_token
        if not compare_digest(resume_token, expected) or entry is None or entry.caller_is_final:
            raise NotFound(f"request {request_id!r} with this resume token")
        return entry

    def live(self, tenant: str, request_id: str) -> Entry | None:
        """The request with this id that somebody reads or may read here."""
        entry = self._book.current.get((tenant, request_id))
        return None if entry is None or entry.caller_is_final else entry

    def attach(self, entry: Entry) -> None:
        """One more reads it."""
        if entry.detached:
            entry.apply(CallerEvent.ATTACH)
            entry.kept_until = None

    def delivered(self, entry: Entry, now: float) -> Effects:
        """The terminal event was handed to a caller's transport."""
        if entry.finished_at is None:
            entry.finished_at = now
        return self.left(entry, now)

    def left(self, entry: Entry, now: float) -> Effects:
        """A caller will read no more; what follows once no other does."""
        if entry.readers or entry.caller is not CallerPhase.OPEN:
            return []
        until = self.retention.keeps_until(entry, now) if entry.accepted and entry.aborted_at is None else None
        if until is not None:
            entry.apply(CallerEvent.DETACH)
            self._keep(entry, until)
            return self._book.settle(entry, now)
        if entry.finished_at is not None:
            entry.apply(CallerEvent.DELIVERED)
            return self._book.settle(entry, now)
        return self._gone(entry, CallerEvent.LEFT, now)

    def keep_nothing(self, now: float) -> Effects:
        """Draining: finished answers that are only kept go now, and later ones at their ends."""
        self.retention.closed = True
        return [effect for entry in list(self) for effect in self._book.settle(entry, now)]

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
        if entry.detached:
            return AbortOutcome.ABORTING, entry, self._gone(entry, CallerEvent.EXPIRED, now)
        self._book.timers.add(now + END_GRACE_S, entry)
        running = [attempt for attempt in entry.attempts if not attempt.released and not attempt.abandoned]
        if not running:
            return AbortOutcome.ABORTING, entry, self._book.end(entry, FinishReason.ABORTED, now)
        return AbortOutcome.ABORTING, entry, [SendAbort(attempt) for attempt in running]

    def drop(self, entry: Entry, now: float) -> Effects:
        """Nobody is to come back for a detached request."""
        return self._gone(entry, CallerEvent.EXPIRED, now) if entry.detached else []

    def leave_all(self, now: float) -> Effects:
        """Stopping: what is open is left at its schedulers for another tokenizer; whole answers are still read here."""
        effects = self.keep_nothing(now)
        for entry in list(self):
            if not entry.held:
                effects += self._book.refuse(entry, Unavailable("the tokenizer is shutting down"), now)
            effects += self._book.let_go(entry, Cut.LEFT, now)
        return effects

    def _keep(self, entry: Entry, until: float) -> None:
        entry.kept_until = until
        self._book.timers.add(until, entry)

    def _gone(self, entry: Entry, event: CallerEvent, now: float) -> Effects:
        entry.apply(event)
        entry.finished_at = entry.finished_at or now
        effects = self._book.end(entry, FinishReason.ABORTED, now)
        if not entry.accepted:
            effects.append(Refuse(entry, Superseded("the caller left before the request was accepted")))
        return [*effects, *self._book.settle(entry, now)]

    # -- time

    def tick(self, now: float) -> Effects:
        """Does what has become due."""
        effects: Effects = []
        for entry in self._book.timers.due(now):
            if not entry.forgotten:
                effects += self._overdue(entry, now)
        return [*effects, *self._failover.resubmit(now)]

    def _overdue(self, entry: Entry, now: float) -> Effects:
        effects: Effects = []
        if past(entry.deadline, END_GRACE_S, now):
            late = DeadlineExceeded("the deadline passed before a scheduler accepted it")
            effects += self._book.refuse(entry, late, now)
            effects += self._book.end(entry, FinishReason.DEADLINE, now)
        if past(entry.aborted_at, END_GRACE_S, now):
            effects += self._book.refuse(entry, Unavailable("no scheduler accepted it in time"), now)
            effects += self._book.end(entry, FinishReason.ABORTED, now)
        if entry.detached and past(entry.kept_until, 0.0, now):
            effects += self._expired(entry, now)
        if entry.is_handed_over and past(entry.kept_until, 0.0, now):
            entry.kept_until = None
        effects += self._failover.overdue(entry, now)
        for attempt in entry.attempts:
            effects += self.attempts.overdue(attempt, now)
        return [*effects, *self._book.settle(entry, now)]

    def _expired(self, entry: Entry, now: float) -> Effects:
        """Nobody came back in time. An answer that became whole meanwhile may have a time of its own."""
        until = self.retention.goes_on_until(entry, now)
        if until is None:
            return self._gone(entry, CallerEvent.EXPIRED, now)
        self._keep(entry, until)
        return []

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
