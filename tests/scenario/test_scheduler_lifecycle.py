"""The lifecycle scenarios that a scheduler answers for: each one hung, leaked or crashed a well-known server."""

import random

import pytest

from services.protocol.events import ErrorCode, FinishReason
from services.runtime.errors import InvalidRequest, Overloaded, PreconditionFailed, Superseded
from services.scheduler.admission import Limits
from services.scheduler.state import SequencePhase
from services.scheduler.submission import ChoiceStart, Route
from tests.unit.scheduler.driver import ROUTE, Driver, alone

LONG_PROMPT = tuple(range(20, 80))


def chunking(**changes: int) -> Driver:
    return Driver(limits=Limits(max_running=1, max_step_tokens=16), **changes)


def reach(driver: Driver, moment: str) -> None:
    """Brings attempt 1 to a moment of its life."""
    if moment == "queued":
        driver.submit(9, max_tokens=100)
        driver.step()
    driver.submit(1, LONG_PROMPT, max_tokens=4)
    steps = {"queued": 1, "in prefill": 0, "between two chunks": 2, "in decode": 6, "at the finish": 7}[moment]
    for _ in range(steps):
        driver.step()


@pytest.mark.parametrize("moment", ["queued", "in prefill", "between two chunks", "in decode", "at the finish"])
@pytest.mark.parametrize("inside_a_step", [False, True])
def test_01_a_caller_that_leaves_is_gone_within_two_steps(moment: str, inside_a_step: bool) -> None:
    driver = chunking()
    reach(driver, moment)
    if inside_a_step and driver.core.has_work:
        driver.begin()
        driver.abort(1)
        driver.finish()
    else:
        driver.abort(1)
    for _ in range(2):
        if driver.core.has_work:
            plan = driver.step()
            assert driver.sequence(1).log.key not in {part.key for part in plan.slices}
    assert driver.sequence(1).phase is SequencePhase.ENDED
    assert driver.sequence(1).blocks == []
    end = driver.end(1)
    driver.abort(1)
    assert driver.end(1) is end
    driver.run()
    driver.release(1, 9)
    driver.assert_idle()
    assert driver.core.known.held == 0


def test_02_a_late_abort_of_a_first_attempt_does_not_touch_the_second() -> None:
    driver = Driver()
    driver.submit(1, request_id="x")
    driver.step()
    driver.submit(2, request_id="x")
    driver.abort(1)
    driver.run()
    assert driver.end(1).reason is FinishReason.ABORTED
    assert driver.end(2).reason is FinishReason.LENGTH


def test_04_an_abort_of_an_unknown_or_ended_attempt_touches_no_other() -> None:
    driver = Driver()
    driver.submit(10)
    driver.submit(2, max_tokens=1)
    driver.step()
    driver.abort(1, 2, 404)
    driver.run()
    assert driver.end(10).reason is FinishReason.LENGTH
    assert driver.end(2).reason is FinishReason.LENGTH


def test_05_cancels_at_random_moments_give_one_terminal_state_each() -> None:
    driver, chance = Driver(total_blocks=256), random.Random(5)
    for attempt_id in range(1, 1001):
        driver.submit(attempt_id, max_tokens=1 + attempt_id % 9)
        leaves_after = chance.randrange(20)
        for step in range(20):
            if step == leaves_after:
                driver.begin()
                driver.abort(attempt_id)
                driver.finish()
            elif driver.core.has_work:
                driver.step()
        assert driver.end(attempt_id).reason in (FinishReason.ABORTED, FinishReason.LENGTH)
        driver.release(attempt_id)
    driver.run()
    driver.assert_idle()


def test_06_after_500_aborts_a_request_is_answered_as_ever() -> None:
    driver = Driver()
    for attempt_id in range(1, 501):
        driver.submit(attempt_id)
        if attempt_id % 3:
            driver.step()
        driver.abort(attempt_id)
    driver.run()
    before = driver.steps
    driver.submit(501)
    driver.run()
    assert driver.ids(501) == alone(501)
    assert driver.steps - before == 9


def test_07_a_bad_one_in_ten_is_refused_alone() -> None:
    driver = Driver(context_length=64)
    for attempt_id in range(1, 11):
        if attempt_id == 5:
            with pytest.raises(InvalidRequest):
                driver.submit(attempt_id, (20,) * 64)
        else:
            driver.submit(attempt_id)
    assert len(driver.core.attempts) == driver.core.open_sequences == 9
    driver.run()
    assert all(driver.ids(attempt_id) == alone(attempt_id) for attempt_id in range(1, 11) if attempt_id != 5)


def test_08_more_than_fits_is_refused_and_nothing_live_is_evicted() -> None:
    driver = Driver(limits=Limits(max_running=4, max_waiting=4, max_held=12, max_tombstones=2))
    accepted = []
    for attempt_id in range(1, 30):
        try:
            driver.submit(attempt_id)
            accepted.append(attempt_id)
        except Overloaded:
            pass
    assert accepted == list(range(1, 9))
    driver.run()
    for attempt_id in range(30, 40):
        try:
            driver.submit(attempt_id)
            accepted.append(attempt_id)
        except Overloaded:
            pass
    assert accepted[8:] == [30, 31, 32, 33]
    driver.run()
    assert all(driver.ids(attempt_id) == alone(attempt_id) for attempt_id in accepted)
    assert set(driver.core.attempts) == set(accepted)


def test_09_when_a_tokenizer_is_killed_what_is_claimed_goes_on_and_the_rest_ends_with_its_lease() -> None:
    driver, survivor = Driver(limits=Limits(lease_grace_s=60.0)), Route("tokenizer-2", 1)
    driver.core.leases.open_call(ROUTE)
    driver.core.leases.open_call(survivor)
    driver.submit(1, request_id="claimed", max_tokens=30)
    driver.submit(2, request_id="forgotten", max_tokens=30)
    driver.step()
    driver.core.leases.close_call(ROUTE, driver.now)
    driver.claim("claimed", survivor)
    driver.now += 60.0
    driver.run()
    assert set(driver.core.attempts) == {1}
    assert driver.ids(1) == alone(1, max_tokens=30)
    driver.release(1, sender=survivor)
    driver.assert_idle()


def test_09_a_tokenizer_that_was_stopped_and_wakes_up_after_the_claim_changes_nothing() -> None:
    driver, survivor = Driver(), Route("tokenizer-2", 1)
    driver.submit(1, request_id="x", max_tokens=30)
    driver.step()
    driver.claim("x", survivor)
    driver.abort(1, sender=ROUTE)
    driver.release(1, sender=ROUTE)
    with pytest.raises(Superseded):
        driver.submit(2, request_id="x")
    driver.run()
    assert driver.ids(1) == alone(1, max_tokens=30)


def test_11_a_continuation_never_differs_from_what_was_already_sent() -> None:
    whole = alone(1, max_tokens=30)
    for seen in (1, 7, 29):
        driver = Driver()
        driver.submit(1, choices=(ChoiceStart(0, tuple(whole[:seen])),), max_tokens=30)
        driver.run()
        assert driver.ids(1) == whole


def test_13_a_request_that_dies_in_the_middle_has_one_typed_end() -> None:
    driver = Driver()
    driver.submit(1, max_tokens=100)
    for _ in range(3):
        driver.step()
    driver.begin()
    del driver.fake._sequences[driver.sequence(1).log.key], driver.fake._streams[driver.sequence(1).log.key]
    driver.finish()
    error = driver.end(1).error
    assert error is not None
    assert (driver.end(1).token_offset, error.code) == (3, ErrorCode.INTERNAL)
    driver.run()
    driver.assert_idle()


def test_14_three_choices_have_each_their_own_output_and_end() -> None:
    driver = Driver(eos_after=lambda prompt, spec: 2 if spec.choice == 1 else None)
    driver.submit(1, choices=tuple(ChoiceStart(choice) for choice in range(3)))
    driver.run()
    assert [driver.end(1, choice).token_offset for choice in range(3)] == [8, 3, 8]
    assert driver.ids(1, 0) != driver.ids(1, 2)


def test_15_a_limit_counts_per_choice() -> None:
    driver = Driver(eos_after=lambda prompt, spec: 59 if spec.choice == 0 else 69)
    driver.submit(1, choices=(ChoiceStart(0), ChoiceStart(1)), max_tokens=100)
    driver.run()
    assert [driver.end(1, choice).token_offset for choice in (0, 1)] == [60, 70]
    assert [driver.end(1, choice).reason for choice in (0, 1)] == [FinishReason.STOP] * 2


def test_16_one_running_one_queued_and_twelve_at_once_are_all_answered_at_once() -> None:
    driver = Driver(limits=Limits(max_running=1, max_waiting=1))
    driver.submit(1)
    driver.submit(2)
    for attempt_id in range(3, 13):
        with pytest.raises(Overloaded) as refused:
            driver.submit(attempt_id)
        assert refused.value.retry_after_s > 0


def test_19_a_deadline_in_the_queue_is_not_told_as_length() -> None:
    driver = chunking()
    driver.submit(1, max_tokens=1000)
    driver.step()
    driver.submit(2, deadline_in_s=0.2)
    driver.now += 0.2
    driver.step()
    assert driver.end(2).reason is FinishReason.DEADLINE
    assert driver.logs[1, 0].end is None


def test_25_after_all_were_aborted_waiting_and_running_read_0() -> None:
    driver = Driver(limits=Limits(max_running=4))
    for attempt_id in range(1, 20):
        driver.submit(attempt_id)
    driver.step()
    driver.abort(*range(1, 20))
    load = driver.core.load()
    assert (load.waiting_sequences, load.running_sequences) == (0, 0)
    driver.run()
    driver.assert_idle()


def test_a_submit_that_comes_after_its_release_starts_nothing() -> None:
    driver = Driver()
    driver.release(1)
    with pytest.raises(PreconditionFailed):
        driver.submit(1)
    assert not driver.core.has_work
