"""Whose a request is: its fence, its attempts here, and the lease that keeps them.

A fence is known while any attempt of its request is held. A caller may use its label again afterwards, so a request of
which nothing is left must not refuse the next one of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.runtime.error_tree import NotFound, Superseded
from services.scheduler.leases import Leases
from services.scheduler.sequence import Attempt
from services.scheduler.state import AttemptEvent
from services.scheduler.submission import Route, Submission


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claimer gets: its fence, the current attempt with its record, and the earlier ones, oldest first."""

    fence: int
    attempt_id: int
    record: bytes
    earlier_attempt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The difference between what an owner believes and what is held: attempt ids."""

    released: tuple[int, ...]
    missing: tuple[int, ...]
    stale: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Request:
    """One (tenant, request_id): its highest known fence, and its attempts in the order in which they came."""

    fence: int = 0
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def current(self) -> Attempt:
        """The one that its newest owner submitted last. Submits may overtake each other, so arrival decides last."""
        rank = {id(attempt): place for place, attempt in enumerate(self.attempts)}
        return max(self.attempts, key=lambda a: (a.submission.fence, a.submission.attempt_number, rank[id(a)]))


class Ownership:
    """All requests of which something is held, and all leases."""

    __slots__ = ("_requests", "leases")

    def __init__(self, lease_grace_s: float) -> None:
        self._requests: dict[tuple[str, str], _Request] = {}
        self.leases = Leases(lease_grace_s)

    def __len__(self) -> int:
        return len(self._requests)

    def check_fence(self, submission: Submission) -> None:
        """Raises Superseded for a Submit by an owner from whom the request was claimed."""
        request = self._requests.get((submission.tenant, submission.request_id))
        if request is not None and submission.fence < request.fence:
            message = f"the request is owned under fence {request.fence}, and this came with {submission.fence}"
            raise Superseded(message, reason="STALE_OWNER")

    def add(self, attempt: Attempt, now: float) -> None:
        """It was accepted."""
        submission = attempt.submission
        request = self._requests.setdefault((submission.tenant, submission.request_id), _Request())
        request.fence = max(request.fence, submission.fence)
        request.attempts.append(attempt)
        self.leases.add(attempt.owner, submission.attempt_id, now)

    def remove(self, attempt: Attempt) -> None:
        """It is being released."""
        submission = attempt.submission
        label = (submission.tenant, submission.request_id)
        request = self._requests[label]
        request.attempts.remove(attempt)
        if not request.attempts:
            del self._requests[label]
        self.leases.remove(attempt.owner, submission.attempt_id)

    def claim(
        self, tenant: str, request_id: str, owner: Route, attempt_number: int, now: float
    ) -> tuple[Claimed, list[tuple[Attempt, Route]]]:
        """Gives a request to `owner`; returns besides which attempts moved, each with whose it was. Raises NotFound."""
        request = self._requests.get((tenant, request_id))
        if request is None:
            raise NotFound(f"request {request_id}")
        request.fence += 1
        moved = [(attempt, attempt.owner) for attempt in request.attempts if attempt.owner != owner]
        for attempt in request.attempts:
            attempt.number = attempt_number
        for attempt, _ in moved:
            self._give(attempt, owner, now)
        current = request.current
        earlier = tuple(a.submission.attempt_id for a in request.attempts if a is not current)
        submission = current.submission
        return Claimed(request.fence, submission.attempt_id, submission.record, earlier), moved

    def check_integrity(self, attempts: Iterable[Attempt]) -> None:
        """Raises AssertionError when an attempt is in no request or lease, or in a wrong one."""
        held = {attempt.submission.attempt_id: attempt.owner for attempt in attempts}
        self.leases.check_integrity(held)
        listed = [a.submission.attempt_id for request in self._requests.values() for a in request.attempts]
        assert sorted(listed) == sorted(held)
        for label, request in self._requests.items():
            assert request.attempts
            assert request.fence >= max(attempt.submission.fence for attempt in request.attempts)
            assert all(label == (a.submission.tenant, a.submission.request_id) for a in request.attempts)

    def _give(self, attempt: Attempt, owner: Route, now: float) -> None:
        attempt.move(AttemptEvent.CLAIM)
        attempt_id = attempt.submission.attempt_id
        self.leases.remove(attempt.owner, attempt_id)
        attempt.owner = owner
        self.leases.add(owner, attempt_id, now)
        for sequence in attempt.sequences:
            sequence.log.route = owner
