"""What the ledger holds: a request with its answer so far, and the attempts that produce it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from services.protocol.answer import AnswerLog
from services.protocol.events import Started, TokenInfo, Usage
from services.protocol.request import ValidRequest
from services.runtime.trace import Span, TraceContext, context_of
from services.tokenizer.state import (
    CALLER_FINAL,
    CallerEvent,
    CallerPhase,
    EngineEvent,
    EnginePhase,
    after_caller,
    after_engine,
)


class Cut(Enum):
    """Why nothing more is sent of an answer that has not ended; the values are the contract's."""

    CLAIMED = 1
    """Another tokenizer has claimed the request."""
    LEFT = 2
    """This process stops and leaves the request at its scheduler, for another one to claim."""
    LOST = 3
    """What the scheduler held is gone before it was rebuilt here."""


class Reader(Protocol):
    """Who reads an answer; what it has not read is beyond its cursor."""

    def mark(self) -> None:
        """The answer has something new."""

    def token_offset(self, choice: int) -> int:
        """Tokens of a choice that it has taken."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A request as it will run: prompt encoded, seed drawn, max_tokens clipped, id made. `asked`: as it came."""

    request: ValidRequest
    prompt_ids: Sequence[int]
    asked: ValidRequest


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One request in the ledger. Times are monotonic seconds; `deadline` None: no limit.

    `stranded_at`: since when no scheduler has it, though one had; `waits_for_turn`: one is there, and has enough to do;
    `fruitless`: attempts in a row that died without a new token. `kept_until`: until when it stays though nobody reads
    it, or for whoever claimed it. `finished_at`: since when a caller has its end. `record`: what is left at schedulers
    for a claimer. `held`: of a claimed one, tokens per choice that its schedulers hold, so that callers may have as
    many; until its log has them it must not be generated anew. `ended_here`: its end is ours, and not what its
    scheduler and detokenizer would tell again. `trace`: the call that opened it; `span`: what is told of it here, where
    it is traced.
    """

    tenant: str
    pinned: Pinned
    started: Started
    log: AnswerLog
    opened_at: float
    deadline: float | None = None
    fence: int = 1
    record: bytes = b""
    held: tuple[int, ...] = ()
    cut: Cut | None = None
    ended_here: bool = False
    caller: CallerPhase = CallerPhase.OPEN
    attempts: list[Attempt] = field(default_factory=list)
    prompt_infos: tuple[TokenInfo, ...] = ()
    readers: list[Reader] = field(default_factory=list)
    accepted: bool = False
    accepted_at: float | None = None
    has_output: bool = False
    first_output_at: float | None = None
    aborted_at: float | None = None
    stranded_at: float | None = None
    waits_for_turn: bool = False
    fruitless: int = 0
    progress_at: float = 0.0
    completed_at: float | None = None
    finished_at: float | None = None
    kept_until: float | None = None
    forgotten: bool = False
    trace: TraceContext | None = None
    span: Span | None = None

    @property
    def request_id(self) -> str:
        """The caller's label, or the one that was made."""
        return self.pinned.request.request_id

    @property
    def key(self) -> tuple[str, str]:
        """What no two live requests share."""
        return self.tenant, self.request_id

    @property
    def completed(self) -> bool:
        """Whether its answer is whole."""
        return self.log.usage is not None

    @property
    def live(self) -> bool:
        """Whether its id is taken: somebody waits for its answer or may come back for it, and nobody aborted it."""
        if self.caller_is_final or self.aborted_at is not None:
            return False
        return not self.completed or self.detached or self.pinned.request.retain_ms > 0

    @property
    def detached(self) -> bool:
        """Whether nobody reads it now, and somebody may come back."""
        return self.caller is CallerPhase.DETACHED

    @property
    def caller_is_final(self) -> bool:
        """Whether nobody will read it any more."""
        return self.caller in CALLER_FINAL

    @property
    def is_handed_over(self) -> bool:
        """Whether another tokenizer has claimed it, and may be about to claim more of it."""
        return self.cut is Cut.CLAIMED and self.kept_until is not None

    @property
    def progress(self) -> int:
        """Grows with everything that its answer gets: tokens and ends."""
        return sum(len(log.token_ids) + (log.finish is not None) for log in self.log.choices)

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Choices that have not ended and that no attempt runs."""
        covered = {choice for attempt in self.attempts if attempt.counts for choice in attempt.provides}
        unfinished = (choice for choice, log in enumerate(self.log.choices) if log.finish is None)
        return tuple(choice for choice in unfinished if choice not in covered)

    def rebuilt(self, choice: int) -> bool:
        """Whether its log has all of a choice that any caller may have."""
        log = self.log.choices[choice]
        return not self.held or log.finish is not None or len(log.token_ids) >= self.held[choice]

    @property
    def on_trial(self) -> bool:
        """Whether its latest attempt is still to show a new token."""
        attempt = self.attempts[-1]
        return not (attempt.released or self.completed or self.progress > attempt.progress_before)

    def usage_now(self) -> Usage:
        """The prompt once, the output over all choices."""
        finishes = [log.finish for log in self.log.choices if log.finish is not None]
        return Usage(
            prompt_tokens=len(self.pinned.prompt_ids),
            cached_prompt_tokens=self._cached_prompt_tokens(),
            output_tokens=sum(finish.output_tokens for finish in finishes),
            prompt=self.prompt_infos,
        )

    def _cached_prompt_tokens(self) -> int:
        """What was cached before this request: a choice finds what another one computed, a continuation what it had."""
        told = (attempt.cached_prompt_tokens.values() for attempt in self.attempts)
        return next((min(cached) for cached in told if cached), 0)

    def drop(self, reader: Reader) -> None:
        """A reader has gone; it may have been dropped before."""
        if reader in self.readers:
            self.readers.remove(reader)

    def apply(self, event: CallerEvent) -> None:
        """Moves the caller's side on. Raises UnexpectedEvent."""
        self.caller = after_caller(self.caller, event)


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One run of an entry's unfinished choices on one scheduler.

    `abandoned`: whether it runs is not known, and another attempt took its place. `progress_before`: the entry's.
    `cached_prompt_tokens`: per choice, once its prompt was computed.
    `epoch` is the scheduler's that accepted it, 0 while unknown. `in_call`: its sequences are, or will be, part of the
    route's current call, so that its release marker comes through it. `settled`: Submit, or Claim, has been answered or
    given up. `claimed`: another tokenizer submitted it, with this `rank` (its fence and number there); `passed_over`:
    its choices that a later one of that request runs. `sources`: the detokenizers' spans that
    its text comes from, where it is traced.
    """

    attempt_id: int
    number: int
    scheduler: str
    entry: Entry
    choices: tuple[int, ...]
    progress_before: int
    claimed: bool = False
    rank: tuple[int, int] = (0, 0)
    passed_over: frozenset[int] = frozenset()
    abandoned: bool = False
    aborted: bool = False
    phase: EnginePhase = EnginePhase.SUBMITTING
    epoch: int = 0
    in_call: bool = False
    settled: bool = False
    release_answered_at: float | None = None
    release_epoch: int = 0
    marker_seen: bool = False
    doubted_at: float | None = None
    ended_choices: set[int] = field(default_factory=set)
    cached_prompt_tokens: dict[int, int] = field(default_factory=dict)
    gaps: int = 0
    ended_at: float | None = None
    released_at: float | None = None
    span: Span | None = None
    sources: list[TraceContext] = field(default_factory=list)

    @property
    def trace(self) -> TraceContext | None:
        """What its scheduler is told of the trace."""
        return context_of(self.span, context_of(self.entry.span, self.entry.trace))

    def apply(self, event: EngineEvent) -> None:
        """Moves the engine's side on. Raises UnexpectedEvent."""
        self.phase = after_engine(self.phase, event)

    @property
    def provides(self) -> tuple[int, ...]:
        """Its choices whose output counts."""
        return tuple(choice for choice in self.choices if choice not in self.passed_over)

    @property
    def counts(self) -> bool:
        """Whether its output is waited for."""
        return not self.abandoned and self.phase not in (EnginePhase.RELEASING, EnginePhase.RELEASED)

    @property
    def continues(self) -> bool:
        """Whether it goes on with what an earlier one began."""
        return self is not self.entry.attempts[0] and not self.claimed

    @property
    def ids_before(self) -> int:
        """What is computed before its first new token, ids: the prompt and the output so far, for each choice."""
        prompt = len(self.entry.pinned.prompt_ids)
        return sum(prompt + len(self.entry.log.choices[choice].token_ids) for choice in self.choices)

    @property
    def claiming(self) -> bool:
        """Whether its Claim has not been answered."""
        return self.claimed and not self.settled and not self.released

    @property
    def release_is_due(self) -> bool:
        """Once nobody reads. A whole answer that is only kept is kept here alone.

        Until its caller has it, a whole answer stays at the scheduler too: another tokenizer can rebuild it from there.
        What a claimer has at one scheduler, and may come for at this one, waits for it.
        """
        entry = self.entry
        if self.phase in (EnginePhase.RELEASING, EnginePhase.RELEASED) or entry.is_handed_over:
            return False
        if entry.caller_is_final or (entry.completed and (entry.detached or entry.ended_here)):
            return True
        # What is not known to be ours can't be released by us.
        return self.abandoned and not self.claiming

    @property
    def abort_is_due(self) -> bool:
        """Where the answer is whole but the engine still works on it: it ended at a stop text."""
        return self.entry.completed and not self.aborted and self.phase is EnginePhase.RUNNING

    @property
    def nothing_follows(self) -> bool:
        """Whether its scheduler forgot it, and neither a late Submit nor the route's call can bring it back."""
        if self.phase is not EnginePhase.RELEASING or self.release_answered_at is None or not self.settled:
            return False
        return self.marker_seen or not self.in_call

    @property
    def released(self) -> bool:
        """Whether nothing remembers it at its scheduler."""
        return self.phase is EnginePhase.RELEASED
