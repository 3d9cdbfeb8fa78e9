"""What becomes of requests whose scheduler died."""

from __future__ import annotations

from typing import Any

import pytest

from services.protocol.events import ErrorCode, Failure, FinishReason
from services.protocol.request import Failover
from services.runtime.error_tree import InvalidRequest, Overloaded, TailraceError, Unavailable
from services.tokenizer import failover
from services.tokenizer.book import END_GRACE_S
from services.tokenizer.failover import MAX_FRUITLESS
from services.tokenizer.schedulers import Schedulers
from tests.unit.tokenizer.world import GRACE_S, SCHEDULER, Caller, World


@pytest.fixture
def world() -> World:
    world = World()
    world.connect()
    return world


def accept(world: World) -> None:
    """Everything on its way arrives."""
    while world.submits:
        world.arrive_submit(world.submits[0])
    while world.answers:
        world.arrive_answer(0)
    while world.pipe:
        world.pump()


def running(world: World, tokens: int = 0, request_id: str = "r", **request: Any) -> Caller:
    """An accepted request with that many tokens."""
    caller = world.open(request_id, **request)
    assert caller is not None
    accept(world)
    for _ in range(tokens):
        for sequence in world.of(caller.entry.attempts[-1].attempt_id):
            world.generate(sequence)
    accept(world)
    return caller


def die(world: World) -> None:
    """The scheduler dies and is back at once."""
    world.restart()
    world.connect()


def failure(caller: Caller) -> Failure:
    """What the request ended with."""
    finish = caller.entry.log.choices[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR
    assert finish.error is not None
    return finish.error


def test_a_continuation_carries_what_is_here_and_the_rest_follows(world: World) -> None:
    caller = running(world, tokens=3)
    die(world)
    accept(world)
    [sequence] = world.running()
    assert sequence.ids == [100, 101, 102]
    world.generate(sequence)
    world.end(sequence, FinishReason.STOP)
    accept(world)
    assert caller.entry.log.choices[0].token_ids == [100, 101, 102, 103]
    assert caller.entry.log.usage is not None
    assert caller.entry.log.usage.output_tokens == 4
    assert not world.spoiled


def test_a_choice_that_has_ended_is_not_run_again(world: World) -> None:
    caller = running(world, tokens=2, n=3)
    world.end(world.running()[1], FinishReason.STOP)
    accept(world)
    die(world)
    accept(world)
    assert caller.entry.attempts[-1].choices == (0, 2)
    for sequence in world.running():
        world.end(sequence, FinishReason.LENGTH)
    accept(world)
    assert caller.entry.completed
    world.settle()
    assert caller.forgotten == 1


def test_a_request_that_wants_no_failover_ends_with_engine_lost(world: World) -> None:
    caller = running(world, tokens=1, failover=Failover.NEVER)
    die(world)
    assert failure(caller).code is ErrorCode.ENGINE_LOST
    assert not world.submits


def test_a_dead_scheduler_is_waited_for_within_the_grace(world: World) -> None:
    caller = running(world, tokens=1)
    world.cut()
    world.perform(world.attempts.scheduler_lost(SCHEDULER, world.now))
    world.pass_time(GRACE_S - 0.1)
    assert not caller.entry.completed
    world.pass_time(0.2)
    assert failure(caller).code is ErrorCode.ENGINE_LOST
    world.settle()
    assert caller.forgotten == 1


def test_another_scheduler_takes_over_at_once_when_one_is_open(world: World) -> None:
    caller = running(world, tokens=1)
    world.cut()
    world.perform(world.attempts.route_opened("other", 9, world.now))
    world.perform(world.attempts.scheduler_lost(SCHEDULER, world.now))
    assert [attempt.scheduler for attempt in world.submits] == ["other"]
    assert caller.entry.attempts[-1].scheduler == "other"


def test_three_deaths_in_a_row_without_a_token_end_the_request(world: World) -> None:
    caller = running(world, tokens=1)
    for _ in range(MAX_FRUITLESS):
        assert not caller.entry.completed
        die(world)
        accept(world)
    assert not caller.entry.completed, "the first death came after a token"
    die(world)
    assert failure(caller).code is ErrorCode.ENGINE_LOST


def test_a_token_between_deaths_starts_the_count_anew(world: World) -> None:
    caller = running(world)
    for _ in range(3 * MAX_FRUITLESS):
        die(world)
        accept(world)
        if caller.entry.fruitless == MAX_FRUITLESS - 1:
            world.generate(world.running()[0])
            accept(world)
    assert not caller.entry.completed


def test_those_present_at_two_deaths_are_tried_one_at_a_time_and_after_the_others(world: World) -> None:
    first, second = running(world, request_id="a"), running(world, request_id="b")
    die(world)
    accept(world)
    other = running(world, request_id="c")
    die(world)
    assert [attempt.entry for attempt in world.submits] == [other.entry, first.entry]
    accept(world)
    world.pass_time(1.0)
    assert not world.submits, "the second waits until the first has shown a token"
    world.generate(world.of(first.entry.attempts[-1].attempt_id)[0])
    accept(world)
    world.pass_time(0.1)
    assert [attempt.entry for attempt in world.submits] == [second.entry]


def test_one_that_kills_schedulers_ends_alone_and_the_others_complete(world: World) -> None:
    deadly, good = running(world, request_id="deadly"), running(world, request_id="good")
    for _ in range(20):
        accept(world)
        if world.of(deadly.entry.attempts[-1].attempt_id):
            die(world)
            continue
        for sequence in world.running():
            world.end(sequence, FinishReason.STOP)
        accept(world)
        world.pass_time(0.1)
    assert failure(deadly).code is ErrorCode.ENGINE_LOST
    finish = good.entry.log.choices[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.STOP


@pytest.mark.parametrize("error", [Overloaded("full", 1.0), Unavailable("draining")])
def test_a_continuation_that_is_refused_for_now_is_tried_again(world: World, error: TailraceError) -> None:
    caller = running(world, tokens=1)
    die(world)
    [attempt] = world.submits
    world.submits.clear()
    world.perform(world.attempts.submit_refused(attempt.attempt_id, error, world.now))
    assert not caller.entry.completed
    world.pass_time(0.1)
    accept(world)
    assert [sequence.ids for sequence in world.running()] == [[100]]


def test_a_continuation_that_is_refused_for_good_ends_the_request(world: World) -> None:
    caller = running(world, tokens=1)
    die(world)
    [attempt] = world.submits
    refusal = InvalidRequest("prompt_ids", "are too many")
    world.perform(world.attempts.submit_refused(attempt.attempt_id, refusal, world.now))
    assert failure(caller).code is ErrorCode.ENGINE_LOST


def test_a_continuation_that_nobody_answered_is_released_and_never_writes_beside_its_successor(world: World) -> None:
    caller = running(world, tokens=1)
    die(world)
    [lost] = world.submits
    world.arrive_submit(lost, answered=False)
    held = list(world.pipe)
    world.pipe.clear()
    world.arrive_answer(0)
    assert list(world.releases) == [lost.attempt_id]
    world.pass_time(0.1)
    [successor] = world.submits
    world.pipe.extend(held)
    world.generate(world.of(lost.attempt_id)[0])
    while world.pipe:
        world.pump()
    assert caller.entry.log.choices[0].token_ids == [100]
    world.arrive_release(lost.attempt_id)
    accept(world)
    assert lost.released
    assert not successor.released
    world.settle()
    assert caller.forgotten == 1
    assert not world.spoiled


def test_an_abort_between_two_schedulers_ends_the_request_at_once(world: World) -> None:
    caller = running(world, tokens=1)
    world.restart()
    world.perform(world.attempts.scheduler_lost(SCHEDULER, world.now))
    world.abort("r")
    finish = caller.entry.log.choices[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.ABORTED
    world.connect()
    assert not world.submits


def test_a_caller_that_leaves_between_two_schedulers_leaves_nothing(world: World) -> None:
    caller = running(world, tokens=1)
    world.restart()
    world.perform(world.attempts.scheduler_lost(SCHEDULER, world.now))
    world.leave(caller)
    assert caller.forgotten == 1
    world.connect()
    assert not world.submits


def test_the_deadline_goes_on_between_two_schedulers(world: World) -> None:
    caller = running(world, tokens=1, timeout_s=5.0)
    world.restart()
    world.perform(world.attempts.scheduler_lost(SCHEDULER, world.now))
    world.pass_time(5.0 + END_GRACE_S)
    finish = caller.entry.log.choices[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.DEADLINE


def test_what_a_scheduler_should_have_and_has_not_is_continued(world: World) -> None:
    caller = running(world, tokens=1)
    world.sequences.clear()
    world.reconcile()
    world.arrive_answer(0)
    assert caller.entry.attempts[0].released
    assert [attempt.entry for attempt in world.submits] == [caller.entry]


def test_a_submit_on_its_way_is_not_judged_missing(world: World) -> None:
    running(world, request_id="a")
    coming = world.open("b")
    assert coming is not None
    later = running_beside(world, "c")
    wanted = world.attempts.wanted(SCHEDULER)
    assert wanted.highest_number == 1
    assert len(wanted.live_ids) == 1
    accept(world)
    assert len(world.attempts.wanted(SCHEDULER).live_ids) == 3
    world.leave(later)
    assert len(world.attempts.wanted(SCHEDULER).live_ids) == 2


def running_beside(world: World, request_id: str) -> Caller:
    """An accepted request, while others' Submits are still on their way."""
    caller = world.open(request_id)
    assert caller is not None
    world.arrive_submit(caller.entry.attempts[0])
    world.arrive_answer(0)
    return caller


def test_a_scheduler_that_drains_is_not_chosen_and_one_where_it_was_tried_neither() -> None:
    schedulers = Schedulers()
    schedulers.opened("a", 1)
    schedulers.opened("b", 2)
    schedulers.loaded("a", 0, draining=True)
    schedulers.loaded("b", 9, draining=False)
    assert schedulers.least_busy() == "b"
    assert schedulers.least_busy(tried={"b"}) is None
    schedulers.closed("a")
    schedulers.opened("a", 3)  # restarted
    assert schedulers.least_busy() == "a"


def test_a_new_request_that_meets_a_draining_scheduler_is_tried_at_another_one(world: World) -> None:
    world.ledger.schedulers.opened("another", 9)
    caller = world.open()
    assert caller is not None
    first = world.submits.pop()
    refused = Unavailable("it drains", reason="DRAINING")
    world.perform(world.attempts.submit_refused(first.attempt_id, refused, world.now))
    assert caller.answers == []
    [second] = world.submits
    assert second.scheduler == "another"
    world.perform(world.attempts.submit_refused(second.attempt_id, refused, world.now))
    assert caller.answers == ["Unavailable"]
    world.submits.clear()
    world.settle()
    assert caller.forgotten == 1


def test_the_least_busy_scheduler_is_chosen_and_what_was_sent_counts_until_it_tells_again() -> None:
    schedulers = Schedulers()
    assert schedulers.least_busy() is None
    schedulers.opened("a", 1)
    schedulers.opened("b", 2)
    schedulers.loaded("a", 5)
    schedulers.loaded("b", 3)
    assert schedulers.least_busy() == "b"
    schedulers.sent("b", 3)
    assert schedulers.least_busy() == "a"
    schedulers.loaded("b", 4)
    assert schedulers.least_busy() == "b"
    schedulers.closed("b")
    assert schedulers.least_busy() == "a"


def test_a_scheduler_that_only_is_silent_is_given_up_where_another_is_there_and_waited_for_otherwise(
    world: World,
) -> None:
    caller = running(world, tokens=1)
    world.cut()
    world.perform(world.attempts.scheduler_silent(SCHEDULER, world.now))
    assert not caller.entry.attempts[0].released
    world.perform(world.attempts.route_opened("other", 9, world.now))
    world.perform(world.attempts.scheduler_silent(SCHEDULER, world.now))
    assert [attempt.scheduler for attempt in world.submits] == ["other"]


def test_a_scheduler_that_was_given_up_and_wakes_writes_into_nothing_and_is_told_to_forget(world: World) -> None:
    caller = running(world, tokens=1)
    world.cut()
    world.perform(world.attempts.route_opened("other", 9, world.now))
    world.perform(world.attempts.scheduler_silent(SCHEDULER, world.now))
    first = caller.entry.attempts[0]
    world.generate(world.of(first.attempt_id)[0])
    world.connect()
    while world.pipe:
        world.pump()
    assert caller.entry.log.choices[0].token_ids == [100]
    assert list(world.releases) == [first.attempt_id]


def test_what_a_scheduler_can_not_compute_again_soon_waits_for_whoever_has_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "RECOMPUTED_IDS_MAX", 8)
    callers = [running(world, tokens=3, request_id=f"r{number}") for number in range(6)]
    world.ledger.schedulers.opened("other", 7)
    world.ledger.schedulers.closed(SCHEDULER)
    world.perform(world.attempts.scheduler_lost(SCHEDULER, world.now))
    # Two prompts of 2 ids and their 3 tokens each are more than it may have.
    assert [submit.scheduler for submit in world.submits] == ["other"] * 2
    world.ledger.schedulers.opened(SCHEDULER, 9)
    world.perform(world.ledger.tick(world.now))
    assert [submit.scheduler for submit in world.submits] == ["other"] * 2 + [SCHEDULER] * 2
    waiting = [caller for caller in callers if caller.entry.waits_for_turn]
    world.pass_time(2 * GRACE_S)
    assert len(waiting) == 2
    assert not any(caller.entry.completed for caller in waiting)


def test_what_waits_for_its_turn_goes_as_soon_as_another_one_has_shown_a_new_token(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "RECOMPUTED_IDS_MAX", 1)
    for number in range(3):
        running(world, tokens=3, request_id=f"r{number}")
    die(world)
    for _ in range(3):
        assert len(world.submits) == 1
        accept(world)
        world.generate(world.running()[-1])
        accept(world)
        world.perform(world.ledger.tick(world.now))
    assert not world.submits
