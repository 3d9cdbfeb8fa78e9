"""Whose a request is: its fence, its attempts here, and the lease that keeps them.

A fence is known while any attempt of its request is held. A caller may use its label again afterwards, even before all
of the former request is released: the record, which is the same in all attempts of a request, tells the two apart. The
one that came last is the label's current one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.runtime.error_tree import NotFound, Superseded
from services.scheduler.leases import Leases
from services.scheduler.sequence import Attempt
from services.scheduler.state import AttemptEvent, SequencePhase
from services.scheduler.submission import Route, Submission

STALE_OWNER = "STALE_OWNER"
"""The reason of a refusal: the request was claimed from whoever sent this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who wants a request. `fence`: the one it is to have, 0 for the next one; `attempt_ids`: some of it, or none."""

    tenant: str
    request_id: str
    owner: Route
    attempt_number: int
    fence: int = 0
    attempt_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claimer gets: its fence, the record, and the attempts, oldest first; the last one is the current one."""

    fence: int
    record: bytes
    attempts: tuple[HeldAttempt, ...]

    @property
    def attempt_id(self) -> int:
        """The current attempt."""
        return self.attempts[-1].attempt_id

    @property
    def earlier_attempt_ids(self) -> tuple[int, ...]:
        """Those before it."""
        return tuple(attempt.attempt_id for attempt in self.attempts[:-1])


@dataclass(frozen=True, slots=True)
class Held:
    """What a claimer would get: `deadline_in_s` is what is left, None for no limit; attempts oldest first."""

    fence: int
    owner: Route
    owner_present: bool
    record: bytes
    prompt_ids: tuple[int, ...]
    deadline_in_s: float | None
    attempts: tuple[HeldAttempt, ...]


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    """One attempt as it was submitted, and per choice: (number, output tokens, whether it has ended)."""

    attempt_id: int
    fence: int
    attempt_number: int
    choices: tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The difference between what an owner believes and what is held: attempt ids."""

    released: tuple[int, ...]
    missing: tuple[int, ...]
    stale: tuple[int, ...]


Label = tuple[str, str]
"""Tenant and request_id."""


@dataclass(slots=True, eq=False)
class _Request:
    """One request: its record, its highest known fence, and its attempts in the order in which they came."""

    record: bytes
    fence: int = 0
    attempts: list[Attempt] = field(default_factory=list)

    def in_order(self) -> list[Attempt]:
        """Oldest first; last the one that its newest owner submitted last. Submits may overtake each other."""
        return sorted(self.attempts, key=lambda a: (a.submission.fence, a.submission.attempt_number))


class Ownership:
    """All requests of which something is held, and all leases."""

    __slots__ = ("_requests", "leases")

    def __init__(self, lease_grace_s: float) -> None:
        self._requests: dict[Label, list[_Request]] = {}
        self.leases = Leases(lease_grace_s)

    def __len__(self) -> int:
        return len(self._requests)

    def check_fence(self, submission: Submission) -> None:
        """Raises Superseded for a Submit by an owner from whom the request was claimed."""
        request = self._request_of(submission)
        if request is not None and submission.fence < request.fence:
            message = f"the request is owned under fence {request.fence}, and this came with {submission.fence}"
            raise Superseded(message, reason=STALE_OWNER)

    def fence_of(self, submission: Submission) -> int:
        """The highest fence known of its request; its own when nothing of it is held any more."""
        request = self._request_of(submission)
        return request.fence if request is not None else submission.fence

    def add(self, attempt: Attempt, now: float) -> None:
        """It was accepted."""
        submission = attempt.submission
        request = self._request_of(submission)
        if request is None:
            request = _Request(submission.record)
            self._requests.setdefault(_label(submission), []).append(request)
        request.fence = max(request.fence, submission.fence)
        request.attempts.append(attempt)
        self.leases.add(attempt.owner, submission.attempt_id, now)

    def remove(self, attempt: Attempt) -> None:
        """It is being released."""
        request = self._request_of(attempt.submission)
        assert request is not None
        request.attempts.remove(attempt)
        if not request.attempts:
            self._drop(_label(attempt.submission), request)
        self.leases.remove(attempt.owner, attempt.submission.attempt_id)

    def find(self, tenant: str, request_id: str, now: float) -> Held:
        """What is held of a request. Raises NotFound."""
        request = self._current(tenant, request_id)
        attempts = request.in_order()
        current = attempts[-1]
        return Held(
            fence=request.fence,
            owner=current.owner,
            owner_present=self.leases.is_held(current.owner),
            record=request.record,
            prompt_ids=current.submission.prompt_ids,
            deadline_in_s=None if current.deadline is None else current.deadline - now,
            attempts=tuple(_held(attempt) for attempt in attempts),
        )

    def claim(self, claim: Claim, now: float) -> tuple[Claimed, list[tuple[Attempt, Route]]]:
        """Gives a request to its claimer; returns besides which attempts moved, each with whose it was.

        Raises NotFound, and Superseded for a claimer who came too late.
        """
        request = self._meant(claim)
        request.fence = _granted(request, claim)
        moved = [(attempt, attempt.owner) for attempt in request.attempts if attempt.owner != claim.owner]
        for attempt in request.attempts:
            attempt.number = claim.attempt_number
        for attempt, _ in moved:
            self._give(attempt, claim.owner, now)
        return Claimed(request.fence, request.record, tuple(_held(attempt) for attempt in request.in_order())), moved

    def check_integrity(self, attempts: Iterable[Attempt]) -> None:
        """Raises AssertionError when an attempt is in no request or lease, or in a wrong one."""
        held = {attempt.submission.attempt_id: attempt.owner for attempt in attempts}
        self.leases.check_integrity(held)
        listed = [attempt for requests in self._requests.values() for one in requests for attempt in one.attempts]
        assert sorted(attempt.submission.attempt_id for attempt in listed) == sorted(held)
        for label, requests in self._requests.items():
            assert requests
            assert len({request.record for request in requests}) == len(requests)
            for request in requests:
                assert request.attempts
                assert request.fence >= max(attempt.submission.fence for attempt in request.attempts)
                assert all(label == _label(a.submission) for a in request.attempts)
                assert all(request.record == a.submission.record for a in request.attempts)

    def _request_of(self, submission: Submission) -> _Request | None:
        requests = self._requests.get(_label(submission), ())
        return next((request for request in requests if request.record == submission.record), None)

    def _current(self, tenant: str, request_id: str) -> _Request:
        try:
            return self._requests[tenant, request_id][-1]
        except KeyError:
            raise NotFound(f"request {request_id}") from None

    def _meant(self, claim: Claim) -> _Request:
        if not claim.attempt_ids:
            return self._current(claim.tenant, claim.request_id)
        for request in self._requests.get((claim.tenant, claim.request_id), ()):
            if any(attempt.submission.attempt_id in claim.attempt_ids for attempt in request.attempts):
                return request
        raise NotFound(f"request {claim.request_id}")

    def _drop(self, label: Label, request: _Request) -> None:
        self._requests[label].remove(request)
        if not self._requests[label]:
            del self._requests[label]

    def _give(self, attempt: Attempt, owner: Route, now: float) -> None:
        attempt.move(AttemptEvent.CLAIM)
        attempt_id = attempt.submission.attempt_id
        self.leases.remove(attempt.owner, attempt_id)
        attempt.owner = owner
        self.leases.add(owner, attempt_id, now)
        for sequence in attempt.sequences:
            sequence.log.route = owner


def _granted(request: _Request, claim: Claim) -> int:
    """The fence that a claim gets. A claim may come twice, when its answer was lost: then it has been granted."""
    if not claim.fence:
        return request.fence + 1
    has_it = claim.fence == request.fence and any(attempt.owner == claim.owner for attempt in request.attempts)
    if claim.fence <= request.fence and not has_it:
        message = f"the request is owned under fence {request.fence}, and {claim.fence} was asked for"
        raise Superseded(message, reason=STALE_OWNER)
    return claim.fence


def _label(submission: Submission) -> Label:
    return submission.tenant, submission.request_id


def _held(attempt: Attempt) -> HeldAttempt:
    submission = attempt.submission
    choices = tuple((s.log.choice, len(s.log.ids), s.phase is SequencePhase.ENDED) for s in attempt.sequences)
    return HeldAttempt(submission.attempt_id, submission.fence, submission.attempt_number, choices)
