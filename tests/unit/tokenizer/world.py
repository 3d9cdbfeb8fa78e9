"""What surrounds the ledger, as a model: one scheduler, the pipe from it, unary calls that may be lost, and callers.

Nothing here is clever: messages in the pipe keep their order until it is cut; unary calls arrive in any order, or take
effect and lose their answer. The ledger and the assembler under test are the real ones.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.protocol.answer import AnswerCursor
from services.protocol.events import Completed, Delta, Finish, FinishReason, StopText
from services.protocol.request import IdsPrompt, Sampling, ValidRequest
from services.runtime.error_tree import AlreadyExists, NotFound, Overloaded, PreconditionFailed, Unavailable
from services.tokenizer.assembler import EngineEnd, RouteCall, TextBatch, TextFinish, TextStart
from services.tokenizer.core import Ledger
from services.tokenizer.effects import (
    Accept,
    Effects,
    Finished,
    Forget,
    Reconcile,
    Refuse,
    Released,
    Resubscribe,
    SendAbort,
    SendRelease,
    Submit,
    Unacceptable,
    Wake,
)
from services.tokenizer.entry import Attempt, Entry, Pinned
from services.tokenizer.retention import Retention

SCHEDULER = "s"
GRACE_S = 20.0
TTL_S = 10.0


@dataclass(eq=False)
class Sequence:
    """One choice at the scheduler."""

    attempt_id: int
    choice: int
    ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stopped_at: int | None = None
    """Where the detokenizer found a stop text, in tokens."""


@dataclass(eq=False)
class Caller:
    """Who opened a request, and all that it was told; a Reader of it. `final`: it reads no more."""

    entry: Entry
    cursor: AnswerCursor
    answers: list[str] = field(default_factory=list)
    events: list[Delta | Finish | Completed] = field(default_factory=list)
    final: bool = False
    forgotten: int = 0

    def read(self) -> None:
        """Takes what is new."""
        self.events += self.cursor.take()

    def mark(self) -> None:
        """The answer has something new."""
        self.read()

    def token_offset(self, choice: int) -> int:
        """Tokens of a choice that it has taken."""
        return self.cursor.offsets()[choice][0]

    def lose(self, count: int) -> dict[int, tuple[int, int]]:
        """Of what it was told only the first events arrived; returns where it stands then."""
        # A resumed stream tells every end again.
        self.events = [event for event in self.events[:count] if isinstance(event, Delta)]
        return {event.choice: (event.next_token_offset, event.next_text_offset) for event in self.events}


class World:
    """The ledger in its surroundings. `refuses` makes the scheduler full."""

    def __init__(self, max_open: int = 50, seed: int = 5) -> None:
        self.now = 100.0
        self.retention = Retention(detach_ttl_s=TTL_S, max_count=max_open, max_bytes=1 << 20)
        self.ledger = Ledger(
            model_id="m",
            max_open=max_open,
            engine_grace_s=GRACE_S,
            retention=self.retention,
            random_bits=random.Random(seed).getrandbits,
        )
        self.attempts = self.ledger.attempts
        self.epoch = 1
        self.refuses = False
        self.sequences: dict[tuple[int, int], Sequence] = {}
        self.tombstones: set[int] = set()
        self.route: RouteCall | None = None
        self.pipe: deque[TextBatch] = deque()
        self.numbers: dict[tuple[int, int], int] = {}
        self.submits: list[Attempt] = []
        self.aborts: list[int] = []
        self.releases: dict[int, None] = {}
        self.answers: list[Callable[[], Effects]] = []
        self.callers: dict[Entry, Caller] = {}
        self.finished: list[Entry] = []
        self.spoiled: list[Entry] = []

    # -- callers

    def open(
        self, request_id: str = "r", n: int = 1, timeout_s: float | None = None, prompt_tokens: int = 2, **options: Any
    ) -> Caller | None:
        """A request with these fields; None when the ledger refuses it."""
        prompt_ids = list(range(1, prompt_tokens + 1))
        request = ValidRequest(
            request_id=request_id, prompt=IdsPrompt(tuple(prompt_ids)), n=n, sampling=Sampling(seed=7), **options
        )
        try:
            entry, effects = self.ledger.open(
                Pinned(request, prompt_ids, request),
                tenant="t",
                scheduler=SCHEDULER,
                deadline=None if timeout_s is None else self.now + timeout_s,
                now=self.now,
                unix_ms=0,
            )
        except (AlreadyExists, Overloaded):
            return None
        caller = self.callers[entry] = Caller(entry, AnswerCursor(entry.log))
        entry.readers.append(caller)
        self.perform(effects)
        return caller

    def leave(self, caller: Caller) -> None:
        """The caller goes away."""
        caller.final = True
        caller.entry.drop(caller)
        self.perform(self.ledger.left(caller.entry, self.now))

    def come_back(self, caller: Caller, count: int) -> bool:
        """A caller who had left resumes, with the first events alone; False when its request is not found."""
        entry = caller.entry
        try:
            found = self.ledger.resumable(entry.tenant, entry.request_id, entry.started.resume_token)
        except NotFound:
            return False
        assert found is entry
        caller.cursor = AnswerCursor(entry.log, offsets=caller.lose(count))
        caller.final = False
        entry.readers.append(caller)
        self.ledger.attach(entry)
        caller.read()
        return True

    def deliver(self, caller: Caller) -> None:
        """The caller has its terminal event, if there is one."""
        caller.read()
        if caller.cursor.done:
            caller.final = True
            caller.entry.drop(caller)
            self.perform(self.ledger.delivered(caller.entry, self.now))

    def abort(self, request_id: str) -> None:
        """Somebody aborts by id."""
        self.perform(self.ledger.abort("t", request_id, self.now)[2])

    def pass_time(self, seconds: float) -> None:
        """Time goes on, and the ledger looks at it."""
        self.now += seconds
        self.perform(self.ledger.tick(self.now))

    # -- the scheduler and its pipe

    def arrive_submit(self, attempt: Attempt, *, answered: bool = True) -> None:
        """Submit reaches the scheduler; its answer may be lost, which the tokenizer takes for a failure."""
        self.submits.remove(attempt)
        attempt_id, epoch = attempt.attempt_id, self.epoch
        if not answered:
            self._accept(attempt)
            self.answers.append(lambda: self.attempts.submit_failed(attempt_id, Unavailable("no answer"), self.now))
        elif self._accept(attempt):
            self.answers.append(lambda: self.attempts.submit_answered(attempt_id, epoch, self.now))
        else:
            self.answers.append(lambda: self.attempts.submit_refused(attempt_id, PreconditionFailed("no"), self.now))

    def arrive_abort(self, attempt_id: int) -> None:
        """Abort reaches the scheduler."""
        self.aborts.remove(attempt_id)
        mine = self.of(attempt_id)
        if not mine:
            self.tombstones.add(attempt_id)
        for sequence in mine:
            self.end(sequence, FinishReason.ABORTED)

    def arrive_release(self, attempt_id: int, *, answered: bool = True) -> None:
        """Release reaches the scheduler; without an answer it will be sent again."""
        self.tombstones.add(attempt_id)
        for sequence in self.of(attempt_id):
            del self.sequences[attempt_id, sequence.choice]
        self._put(TextBatch(released_attempt_ids=[attempt_id]))
        if answered:
            self.releases.pop(attempt_id, None)
            epoch = self.epoch
            self.answers.append(lambda: self.attempts.release_answered([attempt_id], epoch, self.now))

    def arrive_answer(self, index: int) -> None:
        """An answer comes back."""
        self.perform(self.answers.pop(index)())

    def of(self, attempt_id: int) -> list[Sequence]:
        """The scheduler's sequences of an attempt."""
        return [sequence for (owner, _), sequence in self.sequences.items() if owner == attempt_id]

    def running(self) -> list[Sequence]:
        """Sequences that the engine works on."""
        return [sequence for sequence in self.sequences.values() if sequence.reason is None]

    def generate(self, sequence: Sequence) -> None:
        """One more token."""
        sequence.ids.append(100 + len(sequence.ids))
        if sequence.stopped_at is None:
            self._put_rows(sequence, len(sequence.ids) - 1)

    def stop_text(self, sequence: Sequence) -> None:
        """The detokenizer finds a stop text; the engine knows nothing of it."""
        if sequence.stopped_at is None and sequence.ids and sequence.reason is None:
            sequence.stopped_at = len(sequence.ids)
            self._put_end(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The engine ends a sequence."""
        if sequence.reason is None:
            sequence.reason = reason
            self._put_end(sequence)

    def resend(self, sequence: Sequence) -> None:
        """The pipe repeats what it has said of a sequence."""
        self._put_rows(sequence, 0)
        self._put_end(sequence)

    def reconcile(self) -> None:
        """Both sides compare; the answer comes back whenever it does."""
        wanted, epoch = self.attempts.wanted(SCHEDULER), self.epoch
        held = {attempt_id for attempt_id, _ in self.sequences}
        missing = [attempt_id for attempt_id in wanted.live_ids if attempt_id not in held]
        self.tombstones.update(missing)
        self.answers.append(lambda: self.attempts.reconciled(SCHEDULER, epoch, missing, self.now))

    def pump(self) -> None:
        """The next message of the pipe arrives."""
        if self.route is not None and self.pipe:
            self.perform(self.route.apply(self.pipe.popleft(), self.now))

    def cut(self) -> None:
        """The route's call is lost, with whatever was in it."""
        if self.route is not None:
            self.route = None
            self.pipe.clear()
            self.perform(self.attempts.route_lost(SCHEDULER, self.now))

    def connect(self) -> None:
        """A new call of the route: every sequence from token 0."""
        self.cut()
        self.route = RouteCall(self.attempts, SCHEDULER, self.epoch)
        self.numbers = {}
        self.perform(self.attempts.route_opened(SCHEDULER, self.epoch, self.now))
        for sequence in self.sequences.values():
            self._start(sequence)
            self.resend(sequence)

    def restart(self) -> None:
        """The scheduler dies and comes back with nothing."""
        self.cut()
        self.epoch += 1
        self.sequences.clear()
        self.tombstones.clear()

    # -- effects

    def perform(self, effects: Effects) -> None:  # noqa: C901  # one case per effect
        """Does what the ledger wants."""
        for effect in effects:
            match effect:
                case Submit(attempt):
                    self.submits.append(attempt)
                case Reconcile():
                    self.reconcile()
                case SendAbort(attempt):
                    self.aborts.append(attempt.attempt_id)
                case SendRelease(_, attempt_id):
                    self.releases[attempt_id] = None
                case Accept(entry):
                    self.callers[entry].answers.append("accepted")
                case Refuse(entry, error):
                    self.callers[entry].answers.append(type(error).__name__)
                    self.callers[entry].final = True
                    entry.drop(self.callers[entry])
                case Wake(entries):
                    for entry in entries:
                        for reader in entry.readers:
                            reader.mark()
                case Finished(entry):
                    self.finished.append(entry)
                case Unacceptable(entry):
                    self.spoiled.append(entry)
                case Released(attempt):
                    self.releases.pop(attempt.attempt_id, None)
                case Forget(entry):
                    self.callers[entry].forgotten += 1
                case Resubscribe():
                    self.cut()
                    return
                case _:
                    pass

    def settle(self) -> None:  # noqa: C901  # a list of what arrives
        """Everything arrives, every caller gets its end or leaves, time passes: the world becomes quiet."""
        self.connect()
        for _ in range(200):
            for attempt in list(self.submits):
                self.arrive_submit(attempt)
            for attempt_id in list(self.aborts):
                self.arrive_abort(attempt_id)
            for attempt_id in list(self.releases):
                self.arrive_release(attempt_id)
            while self.answers:
                self.arrive_answer(0)
            while self.pipe and self.route is not None:
                self.pump()
            if self.route is None:
                self.connect()
            for caller in [caller for caller in self.callers.values() if not caller.final]:
                self.deliver(caller)
            if self._quiet():
                return
            for sequence in self.running():
                self.end(sequence, FinishReason.LENGTH)
            self.pass_time(0.5)

    def _quiet(self) -> bool:
        return not (len(self.ledger) or self.submits or self.releases or self.answers or self.sequences)

    def _accept(self, attempt: Attempt) -> bool:
        if attempt.attempt_id in self.tombstones or self.refuses:
            return False
        for choice in attempt.choices:
            key = attempt.attempt_id, choice
            if key not in self.sequences:
                self.sequences[key] = Sequence(*key, list(attempt.entry.log.choices[choice].token_ids))
                self._start(self.sequences[key])
                self._put_rows(self.sequences[key], 0)
        return True

    def _start(self, sequence: Sequence) -> None:
        key = sequence.attempt_id, sequence.choice
        if self.route is not None:
            self.numbers[key] = len(self.numbers) + 1
            self._put(TextBatch(starts=[TextStart(self.numbers[key], *key)]))

    def _put(self, batch: TextBatch) -> None:
        if self.route is not None:
            self.pipe.append(batch)

    def _put_rows(self, sequence: Sequence, at: int) -> None:
        ids = sequence.ids[at : sequence.stopped_at]
        if ids and self.route is not None:
            self._put(
                TextBatch(
                    sequences=[self.numbers[sequence.attempt_id, sequence.choice]],
                    token_offsets=[at],
                    token_counts=[len(ids)],
                    token_ids=ids,
                    text_offsets=[2 * at],
                    texts=["".join(text_of(ids))],
                )
            )

    def _put_end(self, sequence: Sequence) -> None:
        if self.route is None:
            return
        number = self.numbers[sequence.attempt_id, sequence.choice]
        finishes: list[TextFinish] = []
        at = sequence.stopped_at
        if at is not None:
            finishes = [TextFinish(number, at, 2 * at, FinishReason.STOP, StopText("x"))]
        elif sequence.reason is not None:
            at = len(sequence.ids)
            finishes = [TextFinish(number, at, 2 * at, sequence.reason)]
        ends = [EngineEnd(number, 1)] if sequence.reason is not None else []
        if finishes or ends:
            self._put(TextBatch(finishes=finishes, engine_ends=ends))


def text_of(ids: list[int]) -> Iterator[str]:
    """Two characters a token."""
    return (chr(ord("a") + token_id % 26) + "é" for token_id in ids)
