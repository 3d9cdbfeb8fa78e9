"""A scheduler that is being stopped."""

import pytest

from services.runtime.errors import Unavailable
from tests.unit.scheduler.driver import Driver, alone


def test_a_draining_core_takes_nothing_new_and_goes_on_with_what_it_has() -> None:
    driver = Driver()
    driver.submit(1)
    driver.step()
    assert not driver.core.load().draining
    driver.core.drain()
    assert driver.core.load().draining
    with pytest.raises(Unavailable) as refused:
        driver.submit(2)
    assert refused.value.reason == "DRAINING"
    driver.submit(1)  # a retry of what was accepted is answered as before
    driver.run()
    assert driver.ids(1) == alone(1)
