"""Who may do what with a request: claims, fences, reconciliation."""

import pytest

from services.protocol.events import FinishReason
from services.runtime.errors import NotFound, PreconditionFailed, Superseded
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.ownership import HeldAttempt
from services.scheduler.submission import ChoiceStart, Route
from tests.unit.scheduler.driver import ROUTE, Driver, alone
from tests.unit.scheduler.test_publisher import Reader, open_reader

NEW = Route("tokenizer-2", 9)
NEWEST = Route("tokenizer-1", 8)


def claimed_driver() -> Driver:
    """Attempt 1 of request "x", three tokens in, claimed by NEW."""
    driver = Driver()
    driver.submit(1, request_id="x", record=b"all of it", attempt_number=4)
    for _ in range(3):
        driver.step()
    driver.claim("x", NEW)
    return driver


def test_a_claim_raises_the_fence_and_gives_back_the_record() -> None:
    driver = Driver()
    driver.submit(1, request_id="x", record=b"all of it", fence=3)
    claimed = driver.claim("x", NEW)
    assert (claimed.fence, claimed.attempt_id, claimed.record) == (4, 1, b"all of it")
    assert claimed.earlier_attempt_ids == ()
    driver.core.check_integrity()


def test_a_claim_brings_its_fence_and_is_refused_where_it_is_not_the_highest() -> None:
    driver = Driver()
    driver.submit(1, request_id="x", fence=3)
    assert driver.claim("x", NEW, fence=5).fence == 5
    for fence in (4, 5):
        with pytest.raises(Superseded) as refused:
            driver.claim("x", NEWEST, fence=fence)
        assert refused.value.reason == "STALE_OWNER"
    assert driver.core.attempts[1].owner == NEW
    assert driver.claim("x", NEWEST, fence=6).fence == 6


def test_a_claim_whose_answer_was_lost_is_granted_again_and_once_it_was_overtaken_no_more() -> None:
    driver = Driver()
    driver.submit(1, request_id="x")
    assert [driver.claim("x", NEW, fence=2).fence for _ in range(2)] == [2, 2]
    driver.claim("x", NEWEST, fence=3)
    with pytest.raises(Superseded):
        driver.claim("x", NEW, fence=2)


def test_a_claim_that_names_attempts_means_their_request_whoever_has_its_label_now() -> None:
    driver = claimed_driver()
    driver.submit(2, request_id="x", record=b"another one")
    assert driver.claim("x", NEWEST, attempt_ids=frozenset({1, 77})).record == b"all of it"
    assert driver.core.attempts[2].owner == ROUTE
    driver.release(1)
    with pytest.raises(NotFound):
        driver.claim("x", NEWEST, attempt_ids=frozenset({1}))


def test_an_unknown_request_or_one_of_another_tenant_is_not_found() -> None:
    driver = Driver()
    driver.submit(1, request_id="x", tenant="other")
    for request_id in ("x", "y"):
        with pytest.raises(NotFound):
            driver.claim(request_id, NEW)


def test_a_released_request_is_not_found_and_its_label_is_free_with_any_fence() -> None:
    driver = claimed_driver()
    driver.release(1, sender=NEW)
    with pytest.raises(NotFound):
        driver.claim("x", NEWEST)
    driver.submit(2, request_id="x", fence=1)
    driver.run()
    assert driver.ids(2) == alone(2)


def test_a_label_that_is_used_again_means_the_request_that_came_last() -> None:
    driver = claimed_driver()
    driver.submit(2, request_id="x", fence=1, record=b"another one")
    assert driver.core.find("", "x", driver.now).record == b"another one"
    claimed = driver.claim("x", NEWEST)
    assert (claimed.fence, claimed.attempt_id, claimed.earlier_attempt_ids) == (2, 2, ())
    assert driver.core.attempts[1].owner == NEW
    driver.release(2)
    assert driver.claim("x", NEWEST).attempt_id == 1
    driver.core.check_integrity()


def test_a_look_at_what_is_held_tells_what_a_claim_would_get_and_changes_nothing() -> None:
    driver = Driver()
    driver.core.leases.open_call(ROUTE)
    two = (ChoiceStart(0), ChoiceStart(1))
    driver.submit(1, request_id="x", record=b"r", attempt_number=4, choices=two, deadline_in_s=9.0, max_tokens=3)
    driver.run()
    driver.submit(
        2, request_id="x", record=b"r", attempt_number=6, choices=(ChoiceStart(1, (7, 8)),), deadline_in_s=9.0
    )
    driver.now += 2.0
    held = driver.core.find("", "x", driver.now)
    assert (held.fence, held.owner, held.owner_present, held.record) == (1, ROUTE, True, b"r")
    assert (held.prompt_ids, held.deadline_in_s) == ((20, 21, 22), 7.0)
    assert held.attempts == (
        HeldAttempt(1, 1, 4, ((0, 3, True), (1, 3, True))),
        HeldAttempt(2, 1, 6, ((1, 2, False),)),
    )
    driver.core.leases.close_call(ROUTE, driver.now)
    assert not driver.core.find("", "x", driver.now).owner_present
    assert {attempt.owner for attempt in driver.core.attempts.values()} == {ROUTE}
    with pytest.raises(NotFound):
        driver.core.find("somebody else", "x", driver.now)


def test_tokens_go_on_in_the_new_route_from_token_0_and_in_the_old_one_no_more() -> None:
    driver = Driver()
    old, new = open_reader(driver), Reader(driver.publisher.open(NEW, 1))
    driver.submit(1, request_id="x")
    driver.step()
    old.take_all()
    driver.step()
    driver.claim("x", NEW)
    driver.run()
    old.take_all()
    new.take_all()
    assert (old.ids[1, 0], old.released, old.ends) == (driver.ids(1)[:1], [1], {})
    assert (new.ids[1, 0], new.released) == (alone(1), [])
    assert new.ends[1, 0].reason is FinishReason.LENGTH


def test_a_replay_that_is_cut_in_the_middle_by_a_claim_ends_there() -> None:
    driver = Driver()
    for attempt_id in (1, 2):
        sampling = SamplingSpec(seed=attempt_id, logprobs=5)
        driver.submit(attempt_id, request_id=f"r-{attempt_id}", max_tokens=4000, sampling=sampling)
    driver.run()
    old = open_reader(driver)
    old.take()
    driver.claim("r-1", NEW)
    old.take_all()
    assert (1, 0) not in old.ends
    assert old.ids[2, 0] == driver.ids(2)
    new = Reader(driver.publisher.open(NEW, 1))
    new.take_all()
    assert list(new.ids) == [(1, 0)]
    assert new.ids[1, 0] == driver.ids(1)


def test_an_ended_attempt_is_claimable_until_it_is_released() -> None:
    driver = Driver()
    driver.submit(1, request_id="x")
    driver.run()
    driver.claim("x", NEW)
    new = Reader(driver.publisher.open(NEW, 1))
    new.take_all()
    assert (new.ids[1, 0], new.ends[1, 0]) == (driver.ids(1), driver.end(1))
    driver.release(1, sender=NEW)
    driver.assert_idle()


def test_the_last_claimer_wins() -> None:
    driver = claimed_driver()
    assert driver.claim("x", NEWEST).fence == 3
    assert driver.core.stale([1], NEW) == [1]
    assert driver.core.stale([1], NEWEST) == []


def test_a_claim_that_is_asked_again_by_its_owner_starts_nothing_again() -> None:
    driver = claimed_driver()
    new = Reader(driver.publisher.open(NEW, 1))
    new.take_all()
    assert driver.claim("x", NEW).fence == 3
    driver.run()
    new.take_all()
    assert new.ids[1, 0] == alone(1)


def test_what_an_old_owner_sends_changes_nothing() -> None:
    driver = claimed_driver()
    driver.abort(1, sender=ROUTE)
    driver.release(1, sender=ROUTE)
    assert driver.core.stale([1, 404], ROUTE) == [1]
    for attempt_id in (1, 2):
        with pytest.raises(Superseded) as refused:
            driver.submit(attempt_id, request_id="x", fence=1, record=b"all of it")
        assert refused.value.reason == "STALE_OWNER"
    driver.reconcile(ROUTE, 100)
    driver.run()
    assert driver.ids(1) == alone(1)
    assert driver.end(1).reason is FinishReason.LENGTH


def test_a_sender_that_does_not_say_who_it_is_is_believed() -> None:
    driver = claimed_driver()
    driver.abort(1)
    driver.run()
    assert driver.end(1).reason is FinishReason.ABORTED


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_the_current_attempt_is_the_newest_fence_s_and_then_the_highest_number_s(order: tuple[int, ...]) -> None:
    driver = Driver()
    fences = {1: 1, 2: 2, 3: 2}
    for attempt_id in order:
        try:
            driver.submit(attempt_id, request_id="x", fence=fences[attempt_id], attempt_number=attempt_id)
        except Superseded:
            assert fences[attempt_id] == 1
    claimed = driver.claim("x", NEW)
    assert claimed.attempt_id == 3
    assert set(claimed.earlier_attempt_ids) == set(driver.core.attempts) - {3}
    assert all(attempt.owner == NEW for attempt in driver.core.attempts.values())


def test_all_choices_of_all_attempts_move() -> None:
    driver = Driver()
    driver.submit(1, request_id="x", choices=(ChoiceStart(0), ChoiceStart(1)), attempt_number=1)
    driver.run()
    driver.submit(2, request_id="x", choices=(ChoiceStart(1),), attempt_number=2)
    driver.claim("x", NEW)
    driver.run()
    new = Reader(driver.publisher.open(NEW, 1))
    new.take_all()
    assert set(new.ends) == {(1, 0), (1, 1), (2, 1)}


def test_a_claim_inside_a_step_loses_no_token() -> None:
    driver = Driver()
    new = Reader(driver.publisher.open(NEW, 1))
    driver.submit(1, request_id="x")
    driver.step()
    driver.begin()
    driver.claim("x", NEW)
    driver.finish()
    driver.run()
    new.take_all()
    assert new.ids[1, 0] == alone(1)


def test_reconcile_releases_what_is_not_live_and_says_what_is_missing() -> None:
    driver = Driver()
    reader = open_reader(driver)
    for attempt_id in (1, 2, 3, 4):
        driver.submit(attempt_id, request_id=f"r-{attempt_id}", attempt_number=attempt_id)
    reconciled = driver.reconcile(ROUTE, 3, 2, 77)
    assert (reconciled.released, reconciled.missing, reconciled.stale) == ((1, 3), (77,), ())
    reader.take_all()
    assert reader.released == [1, 3]
    assert set(driver.core.attempts) == {2, 4}
    driver.run()
    driver.core.check_integrity()


def test_what_was_called_missing_can_not_begin_late() -> None:
    driver = Driver()
    driver.reconcile(ROUTE, 1, 1)
    with pytest.raises(PreconditionFailed):
        driver.submit(1, attempt_number=1)


def test_reconcile_touches_no_other_epoch_and_calls_what_was_claimed_stale() -> None:
    driver = claimed_driver()
    driver.submit(2, request_id="y", route=NEWEST, attempt_number=1)
    assert driver.reconcile(ROUTE, 100, 1).stale == (1,)
    assert set(driver.core.attempts) == {1, 2}


def test_what_was_claimed_and_released_since_is_stale_and_not_missing_to_its_first_owner() -> None:
    driver = claimed_driver()
    driver.release(1, sender=NEW)
    reconciled = driver.reconcile(ROUTE, 100, 1, 77)
    assert (reconciled.stale, reconciled.missing) == ((1,), (77,))
    assert driver.reconcile(NEW, 100, 1).missing == (1,)
    assert driver.core.stale([1], ROUTE) == [1]


def test_a_claimed_attempt_is_judged_by_the_claimer_s_count() -> None:
    driver = Driver()
    driver.submit(1, request_id="x", attempt_number=90)
    driver.claim("x", NEW, attempt_number=5)
    assert driver.reconcile(NEW, 4).released == ()
    assert driver.reconcile(NEW, 5).released == (1,)
    driver.run()
    driver.assert_idle()
