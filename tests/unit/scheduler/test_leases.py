"""How long attempts outlive their tokenizer."""

import pytest

from services.runtime.errors import PreconditionFailed
from services.scheduler.admission import Limits
from services.scheduler.effects import LeaseEnded
from services.scheduler.submission import Route
from tests.unit.scheduler.driver import ROUTE, Driver, alone

GRACE_S = 60.0
RESTARTED = Route(ROUTE.tokenizer, ROUTE.epoch + 1)


def driver_with_grace() -> Driver:
    return Driver(limits=Limits(lease_grace_s=GRACE_S, queue_timeout_s=1e9))


def test_attempts_of_a_tokenizer_that_never_opened_a_call_live_for_the_grace_from_their_submit_on() -> None:
    driver = driver_with_grace()
    driver.submit(1)
    assert driver.core.next_deadline == driver.now + GRACE_S
    driver.now += GRACE_S - 0.1
    assert driver.expire() == []
    driver.now += 0.1
    effects = driver.expire()
    assert LeaseEnded(ROUTE, (1,)) in effects
    driver.run()
    driver.assert_idle()
    assert driver.core.attempts == {}
    with pytest.raises(PreconditionFailed):
        driver.submit(1)


def test_an_open_call_keeps_everything_for_any_time() -> None:
    driver = driver_with_grace()
    driver.core.leases.open_call(ROUTE)
    driver.submit(1)
    driver.now += 100 * GRACE_S
    assert driver.core.leases.next_expiry is None
    driver.run()
    assert driver.ids(1) == alone(1)


def test_the_grace_begins_with_the_end_of_the_last_call_and_a_new_call_in_time_ends_it() -> None:
    driver = driver_with_grace()
    driver.core.leases.open_call(ROUTE)
    driver.core.leases.open_call(ROUTE)
    driver.submit(1, max_tokens=1000)
    driver.core.leases.close_call(ROUTE, driver.now)
    driver.now += 2 * GRACE_S
    driver.expire()
    assert 1 in driver.core.attempts
    driver.core.leases.close_call(ROUTE, driver.now)
    driver.now += GRACE_S - 1
    driver.core.leases.open_call(ROUTE)
    driver.now += GRACE_S
    driver.expire()
    assert 1 in driver.core.attempts
    driver.core.check_integrity()


def test_a_lease_that_ends_inside_a_step_gives_back_every_block_when_it_is_applied() -> None:
    driver = driver_with_grace()
    driver.submit(1, max_tokens=100)
    driver.step()
    driver.begin()
    driver.now += GRACE_S
    driver.expire()
    driver.finish()
    driver.run()
    driver.assert_idle()


def test_a_newer_epoch_ends_nothing_of_the_older_before_its_grace() -> None:
    driver = driver_with_grace()
    driver.submit(1, max_tokens=1000)
    driver.now += GRACE_S / 2
    driver.core.leases.open_call(RESTARTED)
    driver.submit(2, route=RESTARTED, max_tokens=1000)
    driver.expire()
    assert set(driver.core.attempts) == {1, 2}
    driver.now += GRACE_S / 2
    driver.expire()
    assert set(driver.core.attempts) == {2}


def test_what_was_claimed_lives_by_its_new_owner_s_lease() -> None:
    driver = driver_with_grace()
    driver.submit(1, request_id="x", max_tokens=1000)
    driver.submit(2, request_id="y", max_tokens=1000)
    driver.core.leases.open_call(RESTARTED)
    driver.claim("x", RESTARTED)
    driver.now += GRACE_S
    driver.expire()
    assert set(driver.core.attempts) == {1}
    driver.core.leases.close_call(RESTARTED, driver.now)
    driver.now += GRACE_S
    driver.expire()
    assert driver.core.attempts == {}


def test_a_lease_without_attempts_and_calls_is_forgotten() -> None:
    driver = driver_with_grace()
    driver.core.leases.open_call(ROUTE)
    driver.core.leases.close_call(ROUTE, driver.now)
    driver.submit(1)
    driver.release(1)
    assert len(driver.core._ownership.leases) == len(driver.core._ownership) == 0
    assert driver.core.leases.next_expiry is None
