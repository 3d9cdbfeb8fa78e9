"""What the core decided, for its shell to carry out, and what it tells of its load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.sequence import Attempt
from services.scheduler.sequence import Sequence as EndedSequence
from services.scheduler.submission import Route
from services.scheduler.token_log import TokenLog


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt was accepted; its logs may hold the output so far."""

    route: Route
    logs: Sequence[TokenLog]


@dataclass(frozen=True, slots=True)
class Progressed:
    """These logs have more ids, or an end."""

    logs: Sequence[TokenLog]


@dataclass(frozen=True, slots=True)
class Released:
    """An attempt was forgotten. `route` and `attempt` None: it was not known here, so nobody knows whose it was."""

    attempt_id: int
    route: Route | None
    logs: Sequence[TokenLog] = ()
    attempt: Attempt | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Moved:
    """An attempt was claimed: its logs leave one route and start at token 0 in another."""

    attempt_id: int
    old: Route
    new: Route
    logs: Sequence[TokenLog]


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Nothing was heard of an owner for too long; its attempts are released by the effects that follow."""

    owner: Route
    attempt_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """Sequences ended, each for good."""

    sequences: Sequence[EndedSequence]


Effect = Opened | Progressed | Released | Moved | LeaseEnded | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the scheduler is: sequences, and KV blocks of `block_size` tokens. `draining`: it takes nothing new."""

    waiting_sequences: int
    running_sequences: int
    free_blocks: int
    cached_blocks: int
    total_blocks: int
    block_size: int
    draining: bool = False
