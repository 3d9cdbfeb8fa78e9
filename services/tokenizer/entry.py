"""What the ledger holds: a request with its answer so far, and the attempts that produce it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.protocol.answer import AnswerLog
from services.protocol.events import Started
from services.protocol.request import ValidRequest
from services.tokenizer.state import (
    CALLER_FINAL,
    CallerEvent,
    CallerPhase,
    EngineEvent,
    EnginePhase,
    after_caller,
    after_engine,
)


class Reader(Protocol):
    """Who reads an answer; what it has not read is beyond its cursor."""

    def mark(self) -> None:
        """The answer has something new."""

    def token_offset(self, choice: int) -> int:
        """Tokens of a choice that it has taken."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A request as it will run: prompt encoded, seed drawn, max_tokens clipped, id made."""

    request: ValidRequest
    prompt_ids: Sequence[int]


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One request in the ledger. Times are monotonic seconds; `deadline` None: no limit."""

    tenant: str
    pinned: Pinned
    started: Started
    log: AnswerLog
    opened_at: float
    deadline: float | None = None
    caller: CallerPhase = CallerPhase.OPEN
    attempts: list[Attempt] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    accepted: bool = False
    has_output: bool = False
    aborted_at: float | None = None
    progress_at: float = 0.0
    completed_at: float | None = None
    finished_at: float | None = None
    forgotten: bool = False

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
        """Whether its id is taken: somebody waits for its answer, and nobody aborted it."""
        return self.caller not in CALLER_FINAL and not self.completed and self.aborted_at is None

    @property
    def caller_is_final(self) -> bool:
        """Whether nobody will read it any more."""
        return self.caller in CALLER_FINAL

    def apply(self, event: CallerEvent) -> None:
        """Moves the caller's side on. Raises UnexpectedEvent."""
        self.caller = after_caller(self.caller, event)


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One run of an entry's choices on one scheduler.

    `epoch` is the scheduler's that accepted it, 0 while unknown. `in_call`: its sequences are, or will be, part of the
    route's current call, so that its release marker comes through it. `settled`: Submit has been answered or given up.
    """

    attempt_id: int
    number: int
    scheduler: str
    entry: Entry
    phase: EnginePhase = EnginePhase.SUBMITTING
    epoch: int = 0
    in_call: bool = False
    settled: bool = False
    release_answered_at: float | None = None
    release_epoch: int = 0
    marker_seen: bool = False
    doubted_at: float | None = None
    ended_choices: set[int] = field(default_factory=set)
    cached_prompt_tokens: int = 0
    gaps: int = 0
    ended_at: float | None = None
    released_at: float | None = None

    def apply(self, event: EngineEvent) -> None:
        """Moves the engine's side on. Raises UnexpectedEvent."""
        self.phase = after_engine(self.phase, event)

    @property
    def released(self) -> bool:
        """Whether nothing remembers it at its scheduler."""
        return self.phase is EnginePhase.RELEASED
