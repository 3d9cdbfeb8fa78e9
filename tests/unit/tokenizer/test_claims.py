"""A request whose tokenizer died, at another one: what is rebuilt, what is refused, and who lets go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.protocol.answer import AnswerCursor
from services.protocol.events import FinishReason
from services.runtime.error_tree import NotFound, Superseded
from services.tokenizer.assembler import TextBatch, TextStart
from services.tokenizer.claims import CLAIMED_GRACE_S, ClaimAnswer, Held, HeldAttempt, Record, Remains, remains_of
from services.tokenizer.effects import Claim, Effects, Resubscribe, SendRelease, Submit
from services.tokenizer.entry import Cut, Entry
from services.tokenizer.state import CallerPhase, EnginePhase
from tests.unit.tokenizer.world import SCHEDULER, Caller, World


class Pair:
    """A scheduler with one request of a tokenizer that is dead, and one that claims it."""

    def __init__(self, tokens: int = 3, **request: Any) -> None:
        self.dead, self.world = World(), World(seed=6)
        self.dead.connect()
        first = self.dead.open(**request)
        assert first is not None
        self.first: Caller = first
        self.arrive(self.dead)
        for _ in range(tokens):
            for sequence in self.dead.running():
                self.dead.generate(sequence)
        self.arrive(self.dead)
        self.world.sequences = self.dead.sequences
        self.world.epoch = self.dead.epoch
        self.caller: Caller | None = None

    def arrive(self, world: World) -> None:
        """Everything on its way arrives."""
        while world.submits:
            world.arrive_submit(world.submits[0])
        while world.answers:
            world.arrive_answer(0)
        while world.pipe:
            world.pump()

    def attempts(self) -> list[HeldAttempt]:
        """What the scheduler holds."""
        ids = dict.fromkeys(attempt_id for attempt_id, _ in self.world.sequences)
        return [
            HeldAttempt(
                attempt_id, 1, number,
                {s.choice: (len(s.ids), s.reason is not None) for s in self.world.of(attempt_id)},
            )
            for number, attempt_id in enumerate(ids, 1)
        ]  # fmt: skip

    def held(self, **changes: Any) -> Held:
        """Its answer to Find."""
        entry = self.first.entry
        fields: dict[str, Any] = {
            "scheduler": SCHEDULER,
            "epoch": self.world.epoch,
            "fence": 1,
            "owner_present": False,
            "record": Record(entry.pinned, entry.started, b"record"),
            "deadline_in_s": None,
            "attempts": self.attempts(),
        }
        return Held(**(fields | changes))

    def take_over(self, *helds: Held) -> tuple[Entry, Effects]:
        """The claim's first half, before anything is sent."""
        entry, effects = self.world.ledger.claims.take_over("t", Remains(helds or (self.held(),)), self.world.now)
        self.caller = self.world.callers[entry] = Caller(entry, AnswerCursor(entry.log))
        self.world.perform(effects)
        return entry, effects

    def answer(self, entry: Entry, fence: int = 2, attempts: list[HeldAttempt] | None = None) -> None:
        """Claim is answered."""
        answer = ClaimAnswer(self.world.epoch, fence, self.attempts() if attempts is None else attempts)
        self.world.perform(self.world.ledger.claims.answered(entry, SCHEDULER, answer, self.world.now))

    def attach(self, entry: Entry) -> None:
        """The caller is there."""
        assert self.caller is not None
        entry.readers.append(self.caller)
        self.world.ledger.attach(entry)


def test_what_comes_before_the_claim_is_answered_finds_its_place_and_proves_the_claim() -> None:
    pair = Pair()
    entry, effects = pair.take_over()
    assert [type(effect) for effect in effects] == [Claim]
    pair.world.connect()
    pair.arrive(pair.world)
    assert entry.log.choices[0].token_ids == pair.first.entry.log.choices[0].token_ids
    assert entry.log.choices[0].text_from(0) == pair.first.entry.log.choices[0].text_from(0)
    assert pair.world.callers[entry].answers == ["accepted"]
    pair.answer(entry, fence=7)
    assert entry.fence == 7
    assert not pair.world.releases


def test_a_claimed_request_goes_on_to_its_end_and_leaves_nothing() -> None:
    pair = Pair(n=2)
    entry, _ = pair.take_over()
    pair.answer(entry)
    pair.world.connect()
    pair.attach(entry)
    pair.world.settle()
    assert pair.world.callers[entry].forgotten == 1
    assert entry.log.usage is not None
    assert entry.log.usage.output_tokens == 6
    assert not len(pair.world.ledger)


def test_a_choice_that_ended_on_a_dead_scheduler_is_nowhere_and_nothing_is_claimed() -> None:
    pair = Pair(n=2)
    attempt_id = pair.attempts()[0].attempt_id
    del pair.world.sequences[attempt_id, 0]
    with pytest.raises(NotFound):
        pair.take_over()
    assert not len(pair.world.ledger)


def test_what_is_gone_when_it_is_claimed_is_cut_and_not_generated_anew() -> None:
    pair = Pair()
    entry, _ = pair.take_over()
    pair.answer(entry, attempts=[])
    assert entry.cut is Cut.LOST
    assert pair.world.callers[entry].answers == ["Superseded"]
    assert pair.world.callers[entry].forgotten == 1
    assert not pair.world.submits


def test_a_scheduler_that_dies_before_the_answer_is_rebuilt_cuts_it_and_after_that_is_continued() -> None:
    early, late = Pair(), Pair()
    early_entry, _ = early.take_over()
    early.answer(early_entry)
    early.world.restart()
    early.world.connect()
    assert early_entry.cut is Cut.LOST
    assert not early.world.submits

    entry, _ = late.take_over()
    late.answer(entry, fence=5)
    late.world.connect()
    late.arrive(late.world)
    late.attach(entry)
    late.world.restart()
    late.world.connect()
    [submit] = late.world.submits
    assert submit.choices == (0,)
    assert (entry.fence, entry.record) == (5, b"record")


def test_who_loses_an_attempt_to_another_claimer_lets_go_and_releases_nothing() -> None:
    pair = Pair()
    attempt = pair.first.entry.attempts[0]
    assert pair.dead.route is not None
    pair.dead.perform(pair.dead.route.apply(TextBatch(released_attempt_ids=[attempt.attempt_id]), pair.dead.now))
    assert pair.first.entry.cut is None  # until the scheduler says whose it is
    reconciled = pair.dead.attempts.reconciled(
        SCHEDULER, pair.dead.epoch, (), pair.dead.now, stale_ids=[attempt.attempt_id]
    )
    pair.dead.perform(reconciled)
    assert pair.first.entry.cut is Cut.CLAIMED
    assert pair.first.entry.caller is CallerPhase.GONE
    assert pair.first.entry.log.choices[0].finish is None
    assert pair.first.forgotten == 1
    assert not pair.dead.releases
    assert not pair.dead.aborts


def test_a_continuation_that_is_refused_as_stale_lets_go() -> None:
    pair = Pair()
    pair.dead.perform(pair.dead.attempts.scheduler_lost(SCHEDULER, pair.dead.now))
    [submit] = pair.dead.submits
    error = Superseded("it is owned under fence 2", reason="STALE_OWNER")
    pair.dead.perform(pair.dead.attempts.submit_refused(submit.attempt_id, error, pair.dead.now))
    assert pair.first.entry.cut is Cut.CLAIMED
    assert pair.first.forgotten == 1


def test_an_attempt_that_came_after_the_look_is_read_from_its_beginning_once_the_claim_names_it() -> None:
    pair = Pair()
    entry, _ = pair.take_over()
    later = HeldAttempt(4242, 1, 9, {0: (3, False)})
    assert pair.world.ledger.attempts.unknown(SCHEDULER, 4242) == []
    assert pair.world.ledger.attempts.unknown(SCHEDULER, 777) == []
    answer = ClaimAnswer(pair.world.epoch, 2, [*pair.attempts(), later])
    effects = pair.world.ledger.claims.answered(entry, SCHEDULER, answer, pair.world.now)
    assert SendRelease(SCHEDULER, 777) in effects
    assert any(isinstance(effect, Resubscribe) for effect in effects)
    first, second = entry.attempts
    assert (first.abandoned, second.provides) == (True, (0,))
    assert SendRelease(SCHEDULER, first.attempt_id) in effects
    assert pair.world.ledger.attempts.unknown(SCHEDULER, 777) == [SendRelease(SCHEDULER, 777)]


def test_of_two_attempts_each_choice_counts_where_it_was_last_run() -> None:
    pair = Pair(n=2)
    [older] = pair.attempts()
    newer = HeldAttempt(99, 1, older.number + 1, {1: (3, False)})
    entry, effects = pair.take_over(replace(pair.held(scheduler="s2", epoch=2), attempts=[newer]), pair.held())
    assert [effect.places for effect in effects if isinstance(effect, Claim)] == [[(SCHEDULER, 1), ("s2", 2)]]
    assert [attempt.provides for attempt in entry.attempts] == [(0,), (1,)]
    assert not any(attempt.abandoned for attempt in entry.attempts)
    pair.world.connect()
    pair.arrive(pair.world)
    assert len(entry.log.choices[0].token_ids) == 3
    assert not entry.log.choices[1].token_ids
    assert not entry.accepted  # not all of it is ours yet


def test_a_claimed_request_for_which_nobody_comes_is_released_after_its_grace() -> None:
    pair = Pair()
    entry, _ = pair.take_over()
    pair.answer(entry)
    pair.world.connect()
    pair.arrive(pair.world)
    pair.world.pass_time(CLAIMED_GRACE_S)
    assert list(pair.world.releases) == [entry.attempts[0].attempt_id]
    pair.world.settle()
    assert pair.world.callers[entry].forgotten == 1


def test_what_was_ours_and_is_being_forgotten_is_not_claimed_back() -> None:
    pair = Pair()
    remains = Remains((pair.held(),))
    pair.dead.leave(pair.first)
    assert pair.first.entry.attempts[0].phase is EnginePhase.RELEASING
    with pytest.raises(NotFound):
        pair.dead.ledger.claims.take_over("t", remains, pair.dead.now)


def test_a_label_that_was_used_twice_means_the_later_request() -> None:
    pair = Pair()
    entry = pair.first.entry
    started = replace(entry.started, created_unix_ms=entry.started.created_unix_ms + 1)
    later = pair.held(record=Record(entry.pinned, started, b"another record"), scheduler="s2")
    assert [found.record.raw for found in remains_of([pair.held(), later])] == [b"another record", b"record"]


def test_the_deadline_goes_on_where_it_stood() -> None:
    pair = Pair()
    entry, _ = pair.take_over(pair.held(deadline_in_s=2.0))
    pair.answer(entry)
    pair.world.connect()
    pair.arrive(pair.world)
    pair.attach(entry)
    pair.world.pass_time(3.1)
    finish = entry.log.choices[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.DEADLINE


def test_a_start_of_what_nobody_claims_is_told_to_be_forgotten() -> None:
    pair = Pair()
    pair.world.connect()
    assert pair.world.route is not None
    effects = pair.world.route.apply(TextBatch(starts=[TextStart(50, 4242, 0)]), 1.0)
    assert effects == [SendRelease(SCHEDULER, 4242)]
    assert not any(isinstance(effect, Submit) for effect in effects)
