"""What the ledger wants done. It decides; the shell around it performs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.runtime.error_tree import TailraceError
from services.tokenizer.entry import Attempt, Entry


@dataclass(frozen=True, slots=True)
class Submit:
    """Send this attempt to its scheduler, and tell the ledger what came of it."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim this entry at one scheduler after the other, until it answers; tell the claims what came of each.

    `places`: the schedulers in this order, each with the attempt number of the claim there.
    """

    entry: Entry
    places: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Reconcile:
    """Ask a scheduler what became of attempts that it says it has released without being told; tell the attempts."""

    scheduler: str


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Have the scheduler stop an attempt; repeat until it answers."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Have the scheduler stop and forget an attempt; repeat until it answers, and tell the ledger."""

    scheduler: str
    attempt_id: int


@dataclass(frozen=True, slots=True)
class Accept:
    """The request is accepted: its opener may be answered."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is refused: its opener gets this error."""

    entry: Entry
    error: TailraceError


@dataclass(frozen=True, slots=True)
class Wake:
    """These entries have something new for their readers."""

    entries: Collection[Entry]


@dataclass(frozen=True, slots=True)
class Progressed:
    """New output came: seconds from acceptance for each first output, and since → how many for the others."""

    to_first_s: Sequence[float]
    between_s: Mapping[float, int]


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is whole, for whatever reason."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Unacceptable:
    """Two accounts of one output differed; counted and logged."""

    entry: Entry
    why: str


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing remembers the attempt at its scheduler: drop what is still to be sent about it."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class LetGo:
    """The entry is no longer ours, and its readers are cut: see `entry.cut`. Counted and logged."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Forget:
    """The entry is gone from the ledger; nothing of it is remembered anywhere."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Resubscribe:
    """The route's call broke its protocol: end it and open the next."""

    scheduler: str
    why: str


Effect = (
    Submit
    | Claim
    | Reconcile
    | SendAbort
    | SendRelease
    | Accept
    | Refuse
    | Wake
    | Progressed
    | Finished
    | Unacceptable
    | Released
    | LetGo
    | Forget
    | Resubscribe
)
Effects = list[Effect]
