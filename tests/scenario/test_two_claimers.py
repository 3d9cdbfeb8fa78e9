"""Two tokenizers claim one request at two schedulers at once: one of them has all of it, whatever comes when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from random import Random

from services.protocol.events import Started
from services.protocol.request import IdsPrompt, Sampling, ValidRequest
from services.runtime.error_tree import NotFound, Superseded
from services.scheduler.submission import ChoiceStart, Route
from services.tokenizer.book import HANDOVER_S
from services.tokenizer.claims import ClaimAnswer, Held, HeldAttempt, Record, remains_of
from services.tokenizer.core import Ledger
from services.tokenizer.effects import Claim, Effects, Resubscribe, SendRelease
from services.tokenizer.entry import Cut, Entry, Pinned
from services.tokenizer.retention import Retention
from tests.unit.scheduler.driver import ROUTE, Driver

STEPS = "looks", "claims at the first", "claims at the second"
REQUEST = ValidRequest(request_id="x", prompt=IdsPrompt((20, 21, 22)), n=2, sampling=Sampling(seed=7))
STARTED = Started(request_id="x", resume_token=b"token", model="m", created_unix_ms=0, prompt_tokens=3, seed=7)
RECORD = Record(Pinned(REQUEST, [20, 21, 22], REQUEST), STARTED, b"record")


class Scheduler:
    """A real core that holds a part of the request of a tokenizer that is dead."""

    def __init__(self, epoch: int, attempt_id: int, *choices: int) -> None:
        self.epoch = epoch
        self.core = Driver()
        starts = tuple(map(ChoiceStart, choices))
        self.core.submit(attempt_id, request_id="x", record=RECORD.raw, attempt_number=attempt_id, choices=starts)
        self.core.step()

    def die(self) -> None:
        """Another incarnation takes its place, which knows nothing."""
        self.epoch += 10
        self.core = Driver()

    def held(self, name: str) -> Held | None:
        """Its answer to Find."""
        try:
            held = self.core.core.find("", "x", self.core.now)
        except NotFound:
            return None
        attempts = [
            HeldAttempt(one.attempt_id, one.fence, one.attempt_number, {c: (n, ended) for c, n, ended in one.choices})
            for one in held.attempts
        ]
        return Held(
            scheduler=name, epoch=self.epoch, fence=held.fence, owner_present=False, record=RECORD, deadline_in_s=None,
            attempts=attempts,
        )  # fmt: skip


class Claimer:
    """A real ledger, whose calls are made one at a time by `step`."""

    def __init__(self, name: str, schedulers: dict[str, Scheduler]) -> None:
        self.route = Route(name, 9)
        self.schedulers = schedulers
        retention = Retention(detach_ttl_s=10.0, max_count=9, max_bytes=1 << 20)
        self.ledger = Ledger(
            model_id="m", max_open=9, engine_grace_s=20.0, retention=retention, random_bits=Random(name).getrandbits
        )
        self.now = 100.0
        self.entry: Entry | None = None
        self.resubscribed: list[str] = []
        self._steps = self._claiming()

    def look_again(self) -> None:
        """Somebody asks it for the request once more."""
        self._steps = self._claiming()

    def step(self) -> None:
        """The next of STEPS, if it still has one."""
        next(self._steps, None)

    def learn(self) -> None:
        """It reconciles with every scheduler, as it does after a marker."""
        for name, scheduler in self.schedulers.items():
            wanted = self.ledger.attempts.wanted(name)
            said = scheduler.core.reconcile(self.route, wanted.highest_number, *wanted.live_ids)
            self.perform(
                self.ledger.attempts.reconciled(name, scheduler.epoch, said.missing, self.now, stale_ids=said.stale)
            )

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.perform(self.ledger.tick(self.now))

    def perform(self, effects: Effects) -> None:
        """Releases arrive at once."""
        for effect in effects:
            if isinstance(effect, SendRelease):
                self.schedulers[effect.scheduler].core.release(effect.attempt_id, sender=self.route)
            if isinstance(effect, Resubscribe):
                self.resubscribed.append(effect.scheduler)

    def _claiming(self) -> Iterator[None]:
        helds = [scheduler.held(name) for name, scheduler in self.schedulers.items()]
        yield
        try:
            [remains] = remains_of(held for held in helds if held is not None)
            self.entry, effects = self.ledger.claims.take_over("", remains, self.now)
        except (NotFound, ValueError):
            return
        self.perform(effects)
        [claim] = (effect for effect in effects if isinstance(effect, Claim))
        for name, number in claim.places:
            self.perform(self._claim(self.entry, name, number))
            yield

    def _claim(self, entry: Entry, name: str, number: int) -> Effects:
        claims, scheduler = self.ledger.claims, self.schedulers[name]
        if entry.caller_is_final:
            return claims.gone(entry, name, self.now)
        named = frozenset(attempt.attempt_id for attempt in entry.attempts if attempt.scheduler == name)
        try:
            claimed = scheduler.core.claim("x", self.route, number, fence=entry.fence, attempt_ids=named)
        except NotFound:
            return claims.gone(entry, name, self.now)
        except Superseded:
            return claims.too_late(entry, name, self.now)
        attempts = [
            HeldAttempt(one.attempt_id, one.fence, one.attempt_number, {c: (n, ended) for c, n, ended in one.choices})
            for one in claimed.attempts
        ]
        return claims.answered(entry, name, ClaimAnswer(scheduler.epoch, claimed.fence, attempts), self.now)


def play(course: Sequence[str]) -> tuple[dict[str, Scheduler], list[Claimer]]:
    """Lets things happen in this order, and then everybody learn what has become of it."""
    schedulers = {"first": Scheduler(1, 1, 0, 1), "second": Scheduler(2, 2, 1)}
    claimers = {name: Claimer(name, schedulers) for name in ("one", "other")}
    for who in course:
        if who in schedulers:
            schedulers[who].die()
        else:
            claimers[who].step()
    for claimer in claimers.values():
        claimer.learn()
    return schedulers, list(claimers.values())


COURSES = sorted(set(permutations(("one", "other") * len(STEPS))))


def test_one_of_two_claimers_has_all_of_it_in_whatever_order_their_calls_come() -> None:
    for course in COURSES:
        schedulers, claimers = play(course)
        [winner] = [one for one in claimers if one.entry is not None and one.entry.cut is None]
        [loser] = [one for one in claimers if one is not winner]
        assert loser.entry is None or loser.entry.cut is Cut.CLAIMED, course
        for one in claimers:
            one.wait(HANDOVER_S + 1.0)
        held = {id_: attempt.owner for one in schedulers.values() for id_, attempt in one.core.core.attempts.items()}
        assert held == dict.fromkeys((1, 2), winner.route), course
        assert not len(loser.ledger), course


def test_no_two_have_a_part_each_when_a_scheduler_dies_in_the_middle_of_it() -> None:
    for course in COURSES:
        for at in range(len(course) + 1):
            for dying in ("first", "second"):
                died = (*course[:at], dying, *course[at:])
                schedulers, claimers = play(died)
                owners = {attempt.owner for one in schedulers.values() for attempt in one.core.core.attempts.values()}
                having = {one.route for one in claimers if one.entry is not None and one.entry.cut is None}
                assert len(having) <= 1, died
                assert not having or owners <= having, died


def test_what_is_still_the_loser_s_waits_for_the_winner_who_is_on_the_way_to_it() -> None:
    schedulers, [one, other] = play(("one",) * 3 + ("other",) * 2)
    assert one.entry is not None
    assert one.entry.cut is Cut.CLAIMED
    assert schedulers["second"].core.core.attempts[2].owner == one.route
    other.step()
    assert schedulers["second"].core.core.attempts[2].owner == other.route


def test_what_no_winner_comes_for_is_released_by_the_loser_after_a_while() -> None:
    schedulers, [one, _] = play(("one",) * 3 + ("other",) * 2)
    one.wait(HANDOVER_S - 1.0)
    assert schedulers["second"].core.core.attempts
    one.wait(2.0)
    assert not schedulers["second"].core.core.attempts


def test_what_still_waits_for_a_winner_who_died_on_the_way_can_be_claimed_with_the_rest_again() -> None:
    _, [one, _] = play(("one",) * 3 + ("other",) * 2)
    left = one.entry
    one.look_again()
    for _ in STEPS:
        one.step()
    assert one.entry is not None
    assert one.entry is not left
    assert one.entry.cut is None
    assert {attempt.attempt_id: attempt.settled for attempt in one.entry.attempts} == {1: True, 2: True}
    assert list(one.ledger) == [one.entry]
    assert one.resubscribed == ["second"]


def test_a_scheduler_that_says_no_ends_the_claiming() -> None:
    schedulers, [one, other] = play(("one", "other", "one", "other", "other"))
    assert schedulers["first"].core.core.attempts[1].owner == one.route
    assert schedulers["second"].core.core.attempts[2].owner == ROUTE
    assert other.entry is not None
    assert other.entry.cut is Cut.CLAIMED
    assert not len(other.ledger)
