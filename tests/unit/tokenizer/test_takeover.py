"""Whether a request is known elsewhere: what some schedulers say counts, though another says nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from services.runtime.clock import SystemClock
from services.runtime.error_tree import Unavailable
from services.tokenizer.claims import Held
from services.tokenizer.entry import Entry
from services.tokenizer.takeover import DUPLICATE_LOOK_S, TakeOver
from tests.unit.tokenizer.test_claims import Pair
from tests.unit.tokenizer.world import SCHEDULER


class Link:
    """One scheduler, which holds something or says nothing at all."""

    live = True

    def __init__(self, held: Held | None = None, *, silent: bool = False) -> None:
        self.held = held
        self.silent = silent

    async def find(self, tenant: str, request_id: str, timeout_s: float = 60.0) -> Held | None:
        if self.silent:
            await asyncio.sleep(timeout_s)
            raise Unavailable("the scheduler can't be asked")
        return self.held


async def accepted(entry: Entry) -> None:
    """At once."""


async def test_a_silent_scheduler_does_not_hide_the_request_that_another_one_holds() -> None:
    pair = Pair()
    links: Any = {SCHEDULER: Link(pair.held()), "silent": Link(silent=True)}
    world = pair.world
    takeover = TakeOver(world.ledger, links, SystemClock(), perform=lambda _: None, until_accepted=accepted)
    asked = pair.first.entry.pinned.asked
    async with asyncio.timeout(DUPLICATE_LOOK_S + 5):
        entry = await takeover.same("t", asked, from_present=True)
    assert entry is not None
    assert entry.started == pair.first.entry.started
