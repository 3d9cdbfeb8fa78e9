"""Two tokenizers, each with two epochs, in any order of everything that they can do to each other."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.runtime.errors import NotFound, Overloaded, PreconditionFailed, Superseded
from services.scheduler.admission import Limits
from services.scheduler.call import Call
from services.scheduler.submission import Route
from tests.unit.scheduler.driver import Driver

GRACE_S = 10.0
OWNERS = [Route(name, epoch) for name in ("one", "two") for epoch in (1, 2)]
LABELS = ["x", "y"]

owners = st.sampled_from(OWNERS)
labels = st.sampled_from(LABELS)
attempt_ids = st.integers(1, 12)


class TwoTokenizers(RuleBasedStateMachine):
    """The model remembers of each attempt whose it must be; the core must agree after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(
            block_size=4, total_blocks=24, limits=Limits(max_running=4, max_step_tokens=8, lease_grace_s=GRACE_S)
        )
        self.owner: dict[int, Route] = {}
        self.was: dict[int, Route] = {}
        self.label: dict[int, str] = {}
        self.fence: dict[str, int] = {}
        self.alive_at: dict[Route, float] = {}
        self.calls: dict[Route, list[Call]] = {owner: [] for owner in OWNERS}
        self.generations = 0
        self.inside_a_step = False

    @rule(attempt_id=attempt_ids, owner=owners, label=labels, fence=st.integers(1, 4), tokens=st.integers(1, 30))
    def submit(self, attempt_id: int, owner: Route, label: str, fence: int, tokens: int) -> None:
        known, stale = attempt_id in self.owner, fence < self.fence.get(label, 0)
        if known and self.label[attempt_id] != label:
            return  # an id is random: two requests never share one
        try:
            self.driver.submit(
                attempt_id, route=owner, request_id=label, fence=fence, max_tokens=tokens, attempt_number=attempt_id
            )
        except (PreconditionFailed, Overloaded):
            assert not known
        except Superseded:
            assert stale
        else:
            assert not stale
            if not known:
                self._own(attempt_id, owner, label)
                self.fence[label] = max(self.fence.get(label, 0), fence)

    @rule(owner=owners, label=labels, number=st.integers(1, 12))
    def claim(self, owner: Route, label: str, number: int) -> None:
        claimable = {attempt_id for attempt_id, of in self.label.items() if of == label}
        try:
            claimed = self.driver.claim(label, owner, number)
        except NotFound:
            assert not claimable
            return
        assert {claimed.attempt_id, *claimed.earlier_attempt_ids} == claimable
        assert claimed.fence == self.fence[label] + 1
        self.fence[label] = claimed.fence
        for attempt_id in claimable:
            if self.owner[attempt_id] != owner:
                self._own(attempt_id, owner, label)

    @rule(attempt_id=attempt_ids, sender=owners)
    def abort(self, attempt_id: int, sender: Route) -> None:
        before = self._ends(attempt_id)
        self.driver.abort(attempt_id, sender=sender)
        if (self.owner | self.was).get(attempt_id, sender) != sender:
            assert self._ends(attempt_id) == before
            assert self.driver.core.stale([attempt_id], sender) == [attempt_id]

    @rule(attempt_id=attempt_ids, sender=owners)
    def release(self, attempt_id: int, sender: Route) -> None:
        self.driver.release(attempt_id, sender=sender)
        if self.owner.get(attempt_id) == sender:
            self._forget(attempt_id)

    @rule(owner=owners, highest=st.integers(0, 12), live=st.frozensets(attempt_ids, max_size=4))
    def reconcile(self, owner: Route, highest: int, live: frozenset[int]) -> None:
        numbers = {attempt_id: attempt.number for attempt_id, attempt in self.driver.core.attempts.items()}
        own = {attempt_id for attempt_id, of in self.owner.items() if of == owner}
        reconciled = self.driver.reconcile(owner, highest, *live)
        assert set(reconciled.released) == {a for a in own - live if numbers[a] <= highest}
        known = self.was | self.owner
        assert set(reconciled.stale) == {one for one in live if known.get(one, owner) != owner}
        assert set(reconciled.missing) == live - set(self.owner) - set(reconciled.stale)
        for attempt_id in reconciled.released:
            self._forget(attempt_id)

    @rule(owner=owners)
    def open_call(self, owner: Route) -> None:
        self.generations += 1
        self.driver.core.leases.open_call(owner)
        self.calls[owner].append(self.driver.publisher.open(owner, self.generations))

    @rule(owner=owners)
    def close_call(self, owner: Route) -> None:
        if self.calls[owner]:
            self.driver.publisher.close(self.calls[owner].pop())
            self.driver.core.leases.close_call(owner, self.driver.now)
            self.alive_at[owner] = self.driver.now

    @rule(owner=owners)
    def read(self, owner: Route) -> None:
        if self.calls[owner]:
            call = self.calls[owner][-1]
            if call.superseded:
                return  # the newer one has been closed; this one has nothing to give
            rows = call.take()
            started = [log.attempt_id for _, log in rows.starts] if rows is not None else []
            assert all(self.owner[attempt_id] == owner for attempt_id in started)

    @rule(seconds=st.floats(0.0, 1.2 * GRACE_S))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds
        self.driver.expire()
        for attempt_id, owner in list(self.owner.items()):
            if not self.calls[owner] and self.alive_at[owner] + GRACE_S <= self.driver.now:
                self._forget(attempt_id)

    @precondition(lambda self: not self.inside_a_step and self.driver.core.has_work)
    @rule()
    def begin_step(self) -> None:
        self.driver.begin()
        self.inside_a_step = True

    @precondition(lambda self: self.inside_a_step)
    @rule()
    def finish_step(self) -> None:
        self.driver.finish()
        self.inside_a_step = False

    @invariant()
    def the_core_holds_what_it_must_for_whom_it_must(self) -> None:
        held = {attempt_id: attempt.owner for attempt_id, attempt in self.driver.core.attempts.items()}
        assert held == self.owner
        self.driver.core.check_integrity()

    def teardown(self) -> None:
        if self.inside_a_step:
            self.driver.finish()
        for owner in OWNERS:
            while self.calls[owner]:
                self.close_call(owner)
        self.driver.now += GRACE_S
        self.driver.expire()
        self.driver.run()
        self.driver.assert_idle()
        assert self.driver.core.known.held == self.driver.publisher.log_sequences == 0
        assert len(self.driver.core._ownership) == len(self.driver.core._ownership.leases) == 0

    def _own(self, attempt_id: int, owner: Route, label: str) -> None:
        self.owner[attempt_id], self.label[attempt_id] = owner, label
        self.alive_at[owner] = self.driver.now

    def _forget(self, attempt_id: int) -> None:
        self.was[attempt_id] = self.owner.pop(attempt_id)
        label = self.label.pop(attempt_id)
        if label not in self.label.values():
            del self.fence[label]

    def _ends(self, attempt_id: int) -> list[object]:
        attempt = self.driver.core.attempts.get(attempt_id)
        return [] if attempt is None else [(s.phase, s.log.end) for s in attempt.sequences]


TestTwoTokenizers = TwoTokenizers.TestCase
TestTwoTokenizers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
