from __future__ import annotations

import pytest

from services.protocol.events import FinishReason
from services.tokenizer.attempts import ASK_AGAIN_S, EPOCH_GRACE_S, MARKER_GRACE_S
from services.tokenizer.entry import Cut
from services.tokenizer.state import CallerPhase, EnginePhase
from tests.unit.tokenizer.world import SCHEDULER, Caller, World


@pytest.fixture
def world() -> World:
    world = World()
    world.connect()
    return world


def opened(world: World, timeout_s: float | None = None) -> Caller:
    caller = world.open(timeout_s=timeout_s)
    assert caller is not None
    return caller


def running(world: World) -> Caller:
    caller = opened(world)
    world.arrive_submit(world.submits[0])
    world.arrive_answer(0)
    while world.pipe:
        world.pump()
    return caller


def test_release_waits_until_the_caller_has_its_end(world: World) -> None:
    caller = running(world)
    [sequence] = world.running()
    world.generate(sequence)
    world.end(sequence, FinishReason.STOP)
    while world.pipe:
        world.pump()
    assert caller.entry.attempts[0].phase is EnginePhase.ENDED
    assert not world.releases
    world.deliver(caller)
    assert caller.entry.caller is CallerPhase.FINISHED
    assert list(world.releases) == [caller.entry.attempts[0].attempt_id]


def test_an_attempt_is_released_by_the_answer_and_the_marker_together(world: World) -> None:
    caller = running(world)
    world.leave(caller)
    attempt = caller.entry.attempts[0]
    world.arrive_release(attempt.attempt_id)
    world.arrive_answer(0)
    assert attempt.phase is EnginePhase.RELEASING
    world.pump()
    assert attempt.released
    assert caller.forgotten == 1


def test_the_end_of_the_call_stands_in_for_its_marker(world: World) -> None:
    caller = running(world)
    world.leave(caller)
    world.arrive_release(caller.entry.attempts[0].attempt_id)
    world.arrive_answer(0)
    world.cut()
    assert caller.forgotten == 1


def test_a_marker_that_never_comes_is_not_waited_for_for_ever(world: World) -> None:
    caller = running(world)
    world.leave(caller)
    world.arrive_release(caller.entry.attempts[0].attempt_id)
    world.arrive_answer(0)
    world.pipe.clear()
    world.pass_time(MARKER_GRACE_S - 0.1)
    assert caller.forgotten == 0
    world.pass_time(0.2)
    assert caller.forgotten == 1


def test_a_release_that_overtakes_submit_keeps_it_out(world: World) -> None:
    caller = opened(world)
    world.leave(caller)
    world.arrive_release(caller.entry.attempts[0].attempt_id)
    world.arrive_submit(world.submits[0])
    while world.answers:
        world.arrive_answer(0)
    assert caller.forgotten == 1
    assert world.sequences == {}


def test_a_release_that_a_dead_scheduler_answered_is_repeated_to_the_one_that_accepted(world: World) -> None:
    caller = opened(world)
    world.leave(caller)
    world.arrive_release(caller.entry.attempts[0].attempt_id)
    world.arrive_answer(0)
    world.restart()
    world.arrive_submit(world.submits[0])
    world.connect()
    world.arrive_answer(0)
    assert list(world.releases) == [caller.entry.attempts[0].attempt_id]
    world.settle()
    assert world.sequences == {}
    assert caller.forgotten == 1


def test_a_submit_that_nobody_answered_is_refused_and_buried(world: World) -> None:
    caller = opened(world)
    world.cut()
    world.arrive_submit(world.submits[0], answered=False)
    world.arrive_answer(0)
    assert caller.answers == ["Unavailable"]
    assert list(world.releases) == [caller.entry.attempts[0].attempt_id]
    world.settle()
    assert world.sequences == {}


def test_an_attempt_of_an_epoch_that_is_not_the_routes_is_lost_after_a_grace(world: World) -> None:
    caller = opened(world)
    attempt = caller.entry.attempts[0]
    world.perform(world.ledger.attempts.submit_answered(attempt.attempt_id, 999, world.now))
    world.pass_time(EPOCH_GRACE_S - 0.1)
    assert not attempt.released
    world.pass_time(0.2)
    assert attempt.released
    assert len(caller.entry.attempts) == 2


def test_a_scheduler_that_is_given_up_loses_what_it_had_and_not_what_is_on_its_way(world: World) -> None:
    had = running(world)
    coming = world.open("other")
    assert coming is not None
    world.cut()
    world.perform(world.ledger.attempts.scheduler_lost(SCHEDULER, world.now))
    assert had.entry.attempts[0].released
    assert had.entry.stranded_at == world.now
    assert not coming.entry.attempts[0].released


def test_an_attempt_that_its_scheduler_forgot_unasked_is_lost_once_that_is_known(world: World) -> None:
    caller = running(world)
    world.arrive_release(caller.entry.attempts[0].attempt_id)
    world.answers.clear()
    world.pump()
    assert not caller.entry.attempts[0].released
    world.answers.clear()  # the question is lost
    world.pass_time(ASK_AGAIN_S)
    world.arrive_answer(0)
    assert caller.entry.attempts[0].released
    assert caller.entry.stranded_at == world.now


def test_a_deadline_that_passes_before_acceptance_is_a_refusal(world: World) -> None:
    caller = opened(world, timeout_s=0.5)
    world.pass_time(1.6)
    assert caller.answers == ["DeadlineExceeded"]
    world.settle()
    assert caller.forgotten == 1


def test_an_abort_before_acceptance_is_told_to_the_opener(world: World) -> None:
    caller = opened(world)
    world.abort("r")
    world.arrive_abort(world.aborts[0])
    world.arrive_submit(world.submits[0])
    world.arrive_answer(0)
    assert caller.answers == ["Superseded"]
    assert caller.forgotten == 1


def test_stopping_leaves_what_is_open_at_its_scheduler_and_refuses_what_was_not_accepted(world: World) -> None:
    accepted, coming = running(world), world.open("other")
    assert coming is not None
    world.perform(world.ledger.leave_all(world.now))
    assert accepted.entry.cut is Cut.LEFT
    assert accepted.entry.log.choices[0].finish is None
    assert accepted.forgotten == 1
    assert coming.answers == ["Unavailable"]
    assert list(world.releases) == [coming.entry.attempts[0].attempt_id]
    assert len(world.running()) == 1


def test_stopping_lets_a_whole_answer_be_read_to_its_end(world: World) -> None:
    caller = running(world)
    world.end(world.running()[0], FinishReason.STOP)
    while world.pipe:
        world.pump()
    world.perform(world.ledger.leave_all(world.now))
    assert caller.entry.cut is None
    assert not caller.forgotten
    world.deliver(caller)
    assert list(world.releases) == [caller.entry.attempts[0].attempt_id]
