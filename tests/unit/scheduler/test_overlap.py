"""While a step runs, the next one is planned and in line, and what the last one brought leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from services.protocol.events import FinishReason
from services.runtime.clock import SystemClock
from services.runtime.metrics import SchedulerMetrics, new_registry
from services.scheduler.admission import Limits
from services.scheduler.core import SchedulerCore
from services.scheduler.engine.api import Answer, SequenceKey, Slice
from services.scheduler.engine.fake import FakeConfig, FakeEngine
from services.scheduler.engine_thread import EngineThread
from services.scheduler.loop import StepLoop
from services.scheduler.publisher import Publisher
from tests.unit.scheduler.driver import ROUTE, Driver, alone, submission

WAIT_S = 60.0


class HeldEngine(FakeEngine):
    """Each step says that it has begun, and ends when it is let go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)
        self.steps: list[list[tuple[SequenceKey, int, tuple[int, ...]]]] = []

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        self.steps.append([(part.key, part.start, tuple(part.token_ids)) for part in slices])
        self.begun.release()
        assert self.let_go.acquire(timeout=WAIT_S)
        return super().step(slices)


@dataclass
class Stand:
    engine: HeldEngine
    loop: StepLoop

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.engine.begun.acquire, timeout=WAIT_S)


@asynccontextmanager
async def held_loop() -> AsyncIterator[Stand]:
    engine, thread = HeldEngine(FakeConfig(block_size=4)), EngineThread()
    core = SchedulerCore(engine.info, Limits())
    loop = StepLoop(engine, thread, core, Publisher(), SystemClock(), SchedulerMetrics(new_registry()))
    running = asyncio.create_task(loop.run())
    try:
        yield Stand(engine, loop)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        loop.close()
        engine.let_go.release(1000)
        await thread.close()


async def test_the_engine_goes_on_to_the_next_step_without_the_loop_and_the_last_one_s_tokens_leave_meanwhile() -> None:
    async with held_loop() as stand:
        engine, call = stand.engine, stand.loop.open_call(ROUTE, 1)
        stand.loop.submit(submission(1, (20, 21, 22)))
        await stand.begun()
        # The loop is blocked from here on: nothing but what is in line can begin.
        engine.let_go.release()
        assert engine.begun.acquire(timeout=WAIT_S)
        rows, changed = None, asyncio.Event()
        with stand.loop.watching(changed.set):
            while rows is None or not rows.token_ids:  # the first step's, while the second is held
                await changed.wait()
                changed.clear()
                rows = stand.loop.take(call)
        whole = alone(1)
        assert list(rows.token_ids) == whole[:1]
        assert engine.steps[1] == [(SequenceKey(1), 3, (whole[0],))]
        assert len(engine.steps) == 2


async def test_who_comes_while_a_step_runs_gets_into_the_step_in_line() -> None:
    async with held_loop() as stand:
        stand.loop.submit(submission(1, (20, 21, 22)))
        await stand.begun()
        stand.loop.submit(submission(2, (30, 31)))
        stand.loop.submit(submission(3, (40, 41)))
        stand.engine.let_go.release()
        await stand.begun()
        assert [key for key, _, _ in stand.engine.steps[1]] == [1, 2, 3]


def ahead_of(driver: Driver) -> list[SequenceKey]:
    plan = driver.look_ahead()
    assert plan is not None
    return [part.key for part in plan.slices]


def test_planned_ahead_or_not_the_output_is_the_same() -> None:
    driver = Driver(block_size=4, total_blocks=64)
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id, range(20, 20 + 5 * attempt_id), max_tokens=30)
    while driver.core.has_work:
        driver.begin()
        driver.look_ahead()
        driver.finish()
    for attempt_id in (1, 2, 3):
        assert driver.ids(attempt_id) == alone(attempt_id, range(20, 20 + 5 * attempt_id), max_tokens=30)
    driver.assert_idle()


def test_who_has_all_its_tokens_is_not_planned_again() -> None:
    driver = Driver()
    driver.submit(1, max_tokens=2)
    driver.submit(2, max_tokens=3)
    driver.begin()
    assert ahead_of(driver) == [1, 2]
    driver.finish()
    assert ahead_of(driver) == [2]


def test_who_stops_was_planned_for_one_more_step_which_computes_nothing_for_it() -> None:
    driver = Driver(block_size=4, total_blocks=32, eos_after=lambda prompt, spec: 1 if prompt[0] == 20 else None)
    driver.submit(1, (20, 21, 22), max_tokens=9)
    driver.submit(2, (30, 31, 32), max_tokens=9)
    driver.step()
    driver.begin()
    plan = driver.look_ahead()
    assert plan is not None
    assert [part.key for part in plan.slices] == [1, 2]
    driver.finish()  # draws the end of the first
    assert driver.end(1).reason is FinishReason.STOP
    driver.core.check_integrity()
    computed = driver.fake.computed_tokens
    driver.begin()
    driver.finish()
    assert driver.fake.computed_tokens == computed + 1
    assert (plan.samples, plan.drawn) == (2, 1)
    driver.run()
    driver.assert_idle()


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_a_stop_below_the_minimum_is_held_back_in_steps_planned_ahead_too(min_tokens: int) -> None:
    driver = Driver(eos_after=lambda prompt, spec: 0)
    driver.submit(1, max_tokens=9, min_tokens=min_tokens)
    while driver.core.has_work:
        driver.begin()
        driver.look_ahead()
        driver.finish()
    assert driver.end(1).reason is FinishReason.STOP
    assert driver.end(1).token_offset == min_tokens + 1


def test_a_failure_ends_one_and_the_step_in_line_goes_on_with_the_others() -> None:
    driver = Driver(bad_output_id=99)
    driver.submit(1, (20, 99))
    driver.submit(2, (30, 31), max_tokens=4)
    driver.begin()
    assert ahead_of(driver) == [1, 2]
    driver.run()
    assert driver.end(1).reason is FinishReason.ERROR
    assert driver.ids(2) == alone(2, (30, 31), max_tokens=4)
    driver.assert_idle()


def test_without_a_free_block_nothing_is_planned_ahead_for_somebody_must_give_way_first() -> None:
    driver = Driver(block_size=4, total_blocks=4)
    driver.submit(1, range(20, 27), max_tokens=8)
    driver.submit(2, range(40, 44), max_tokens=8)
    preempted = waited = 0
    while driver.core.has_work:
        driver.begin()
        waited += driver.look_ahead() is None
        driver.finish()
        driver.core.check_integrity()
        preempted = driver.core.batch.preemptions
    assert preempted
    assert waited
    assert driver.ids(1) == alone(1, range(20, 27), max_tokens=8)
    assert driver.ids(2) == alone(2, range(40, 44), max_tokens=8)


def test_an_abort_with_two_steps_in_flight_ends_with_the_first_of_them() -> None:
    driver = Driver(block_size=4, total_blocks=32)
    driver.submit(1, max_tokens=9)
    driver.submit(2, (40, 41), max_tokens=9)
    driver.step()
    driver.begin()
    assert ahead_of(driver) == [1, 2]
    driver.abort(1)
    driver.finish()
    assert driver.end(1).reason is FinishReason.ABORTED
    assert driver.end(1).token_offset == len(driver.ids(1)) == 1
    driver.core.check_integrity()
    driver.submit(3, range(50, 60), max_tokens=9)  # gets the blocks that the second one still writes into
    driver.run()
    assert driver.ids(3) == alone(3, range(50, 60), max_tokens=9)
    driver.assert_idle()


def test_who_leaves_holds_its_blocks_until_its_step_is_over_and_nobody_is_given_them_before() -> None:
    driver = Driver(block_size=4, total_blocks=4)
    driver.submit(1, range(20, 33), max_tokens=3)
    driver.begin()
    driver.submit(2, range(40, 53), max_tokens=3)
    driver.abort(1)
    assert driver.look_ahead() is None
    driver.finish()
    driver.run()
    assert driver.ids(2) == alone(2, range(40, 53), max_tokens=3)
    driver.assert_idle()
