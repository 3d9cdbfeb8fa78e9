"""How long an owner's attempts live on without it: one lease per tokenizer and epoch.

In HELD at least one call shows that the owner lives. In GRACE nothing does; a Submit or a Claim is a sign too, from
which its grace counts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.scheduler.state import LeaseEvent, LeasePhase, next_lease_phase
from services.scheduler.submission import Route


@dataclass(slots=True, eq=False)
class Lease:
    """One owner's: the calls that hold it, and the ids of the attempts that live by it, oldest first."""

    phase: LeasePhase = LeasePhase.ABSENT
    calls: int = 0
    attempts: dict[int, None] = field(default_factory=dict)

    def move(self, event: LeaseEvent) -> None:
        """Goes on to the next phase."""
        self.phase = next_lease_phase(self.phase, event)


class Leases:
    """All leases that are not absent. `grace_s` is the same for all, so the first to enter it is the first to end."""

    __slots__ = ("_by_owner", "_grace_s", "_over_at")

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._by_owner: dict[Route, Lease] = {}
        self._over_at: dict[Route, float] = {}

    def __len__(self) -> int:
        return len(self._by_owner)

    @property
    def next_expiry(self) -> float | None:
        """When the first grace is over; None without one."""
        return next(iter(self._over_at.values()), None)

    def attempts_of(self, owner: Route) -> tuple[int, ...]:
        """The attempts that live by an owner's lease, oldest first."""
        lease = self._by_owner.get(owner)
        return tuple(lease.attempts) if lease is not None else ()

    def is_held(self, owner: Route) -> bool:
        """Whether a call shows that the owner lives."""
        lease = self._by_owner.get(owner)
        return lease is not None and lease.phase is LeasePhase.HELD

    def open_call(self, owner: Route) -> None:
        """A call began that shows that its owner lives."""
        lease = self._by_owner.setdefault(owner, Lease())
        lease.calls += 1
        lease.move(LeaseEvent.CALL_OPENED)
        self._over_at.pop(owner, None)

    def close_call(self, owner: Route, now: float) -> None:
        """It is over."""
        lease = self._by_owner[owner]
        lease.calls -= 1
        if lease.calls:
            return
        lease.move(LeaseEvent.LAST_CALL_CLOSED)
        self._start_grace(owner, now)
        self._drop_empty(owner, lease)

    def add(self, owner: Route, attempt_id: int, now: float) -> None:
        """An attempt is the owner's from now on."""
        lease = self._by_owner.setdefault(owner, Lease())
        lease.attempts[attempt_id] = None
        lease.move(LeaseEvent.ATTEMPT_ADDED)
        if lease.phase is LeasePhase.GRACE:
            self._start_grace(owner, now)

    def remove(self, owner: Route, attempt_id: int) -> None:
        """An attempt is the owner's no more: released, or claimed by another."""
        lease = self._by_owner[owner]
        del lease.attempts[attempt_id]
        self._drop_empty(owner, lease)

    def take_expired(self, now: float) -> list[tuple[Route, tuple[int, ...]]]:
        """The owners whose grace is over, each with its attempts, which must be released."""
        expired: list[tuple[Route, tuple[int, ...]]] = []
        while self._over_at:
            owner, over_at = next(iter(self._over_at.items()))
            if over_at > now:
                break
            del self._over_at[owner]
            expired.append((owner, self.attempts_of(owner)))
        return expired

    def check_integrity(self, owners: Mapping[int, Route]) -> None:
        """Raises AssertionError unless every attempt is in its owner's lease, and every lease has a reason to be."""
        listed = {attempt_id: owner for owner, lease in self._by_owner.items() for attempt_id in lease.attempts}
        assert listed == dict(owners)
        for owner, lease in self._by_owner.items():
            assert lease.calls or lease.attempts
            assert (lease.phase is LeasePhase.HELD) == bool(lease.calls)
            assert (lease.phase is LeasePhase.GRACE) == (owner in self._over_at)
        assert _rises(self._over_at.values())

    def _start_grace(self, owner: Route, now: float) -> None:
        self._over_at.pop(owner, None)
        self._over_at[owner] = now + self._grace_s

    def _drop_empty(self, owner: Route, lease: Lease) -> None:
        if lease.phase is LeasePhase.GRACE and not lease.attempts:
            lease.move(LeaseEvent.LAST_ATTEMPT_GONE)
            del self._by_owner[owner]
            self._over_at.pop(owner, None)


def _rises(moments: Iterable[float]) -> bool:
    listed = list(moments)
    return listed == sorted(listed)
