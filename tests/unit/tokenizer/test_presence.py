"""When a scheduler is given up, and when it is only slow, or was only cut off."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from services.protocol.sender import SUSPECT_S
from services.tokenizer.presence import ANSWER_S, REFUSED_ALONE_S, REFUSED_S, Presence
from tests.unit.tokenizer.world import SCHEDULER, World

OTHER = "other"


class Scheduler:
    """One that answers, refuses or stands still, as it is told; the clock is the test's."""

    def __init__(self, *, others: bool = True) -> None:
        self.world = World()
        self.world.connect()
        if others:
            self.world.ledger.schedulers.opened(OTHER, 9)
        self.caller = self.world.open("r")
        self.world.arrive_submit(self.world.submits[0])
        self.world.arrive_answer(0)
        self.code: grpc.StatusCode | None = None
        self.presence = Presence(
            SCHEDULER, ask=self._ask, attempts=self.world.attempts, perform=self.world.perform, clock=self
        )

    def now(self) -> float:
        return self.world.now

    def unix_ms(self) -> int:
        return 0

    @property
    def given_up(self) -> bool:
        """Whether the request goes on elsewhere, or waits for somewhere."""
        assert self.caller is not None
        return self.caller.entry.attempts[0].released

    async def look_after(self, seconds: float) -> None:
        """Nothing comes for so long; then its tokenizer looks."""
        self.world.now += seconds
        await self.presence.look()

    async def _ask(self, timeout_s: float) -> int:
        if self.code is None:
            return self.world.epoch
        if self.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.world.now += timeout_s
        raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata())


async def test_one_that_stands_still_is_left_for_another_after_one_question() -> None:
    scheduler = Scheduler()
    scheduler.code = grpc.StatusCode.DEADLINE_EXCEEDED
    await scheduler.look_after(SUSPECT_S)
    assert scheduler.given_up


async def test_one_that_answers_is_kept_however_often_its_route_ends() -> None:
    scheduler = Scheduler()
    for _ in range(10):
        await scheduler.look_after(SUSPECT_S + ANSWER_S)
    assert not scheduler.given_up


async def test_one_that_was_heard_a_moment_ago_is_kept_though_it_owes_an_answer() -> None:
    scheduler = Scheduler()
    scheduler.code = grpc.StatusCode.DEADLINE_EXCEEDED
    for _ in range(10):
        scheduler.presence.heard()
        await scheduler.look_after(SUSPECT_S - ANSWER_S - 0.1)
    assert not scheduler.given_up


async def test_one_that_stands_still_is_waited_for_where_there_is_no_other() -> None:
    scheduler = Scheduler(others=False)
    scheduler.code = grpc.StatusCode.DEADLINE_EXCEEDED
    for _ in range(10):
        await scheduler.look_after(SUSPECT_S)
    assert not scheduler.given_up


@pytest.mark.parametrize(("others", "after_s"), [(True, REFUSED_S), (False, REFUSED_ALONE_S)])
async def test_one_that_refuses_is_left_sooner_where_there_is_another(others: bool, after_s: float) -> None:
    scheduler = Scheduler(others=others)
    scheduler.code = grpc.StatusCode.UNAVAILABLE
    await scheduler.look_after(0.0)
    await scheduler.look_after(after_s - 0.01)
    assert not scheduler.given_up, "it may have been a cut"
    await scheduler.look_after(0.02)
    assert scheduler.given_up


async def test_a_cut_that_is_over_before_the_second_question_costs_nothing() -> None:
    scheduler = Scheduler()
    for _ in range(5):
        scheduler.code = grpc.StatusCode.UNAVAILABLE
        await scheduler.look_after(REFUSED_S)
        scheduler.code = None
        await scheduler.look_after(REFUSED_S)
    assert not scheduler.given_up
