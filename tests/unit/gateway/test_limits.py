from __future__ import annotations

import asyncio

import pytest

from gateway.limits import Limits
from services.runtime.errors import Overloaded, Unavailable


async def test_beyond_the_limit_a_request_is_refused_with_a_retry_hint() -> None:
    limits = Limits(open_max=2)
    limits.acquire("")
    limits.acquire("")
    with pytest.raises(Overloaded) as refused:
        limits.acquire("")
    assert refused.value.retry_after_s > 0
    limits.release("")
    limits.acquire("")


async def test_a_tenant_at_its_limit_does_not_touch_another() -> None:
    limits = Limits(open_max=10, tenant_max={"small": 1}.get)
    limits.acquire("small")
    with pytest.raises(Overloaded, match="its limit"):
        limits.acquire("small")
    limits.acquire("other")


async def test_a_permit_comes_back_when_opening_fails() -> None:
    limits = Limits(open_max=1)
    with pytest.raises(ValueError, match="no"), limits.held_unless_it_raises(""):
        raise ValueError("no")
    assert limits.open == 0
    with limits.held_unless_it_raises(""):
        pass
    assert limits.open == 1


async def test_draining_refuses_new_requests_and_waits_for_the_open_ones() -> None:
    limits = Limits(open_max=2)
    limits.acquire("")
    limits.refuse_new()
    with pytest.raises(Unavailable, match="draining"):
        limits.acquire("")
    waiting = asyncio.create_task(limits.wait_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    limits.release("")
    await asyncio.wait_for(waiting, 10)
