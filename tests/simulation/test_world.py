"""The simulated world's own promises: what a kill, a pause and a cut are."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.simulation.network import Network, Wire
from tests.simulation.process import Process
from tests.simulation.world import Violation, World


@pytest.fixture
def world() -> World:
    return World(1)


def process_in(world: World) -> Process:
    return Process(world, Network(world, window=4), "sleeper")


def test_a_killed_process_does_nothing_more_not_even_its_finally(world: World) -> None:
    done: list[str] = []

    async def main() -> None:
        try:
            await asyncio.sleep(1)
            done.append("slept")
        finally:
            done.append("finally")

    process = process_in(world)
    process.start(main)
    world.at(0.5, process.kill)
    world.run(until=10)
    assert done == []
    assert not process.alive
    world.stop()
    process.bury()


def test_a_paused_process_wakes_with_its_old_state_and_sees_that_time_has_passed(world: World) -> None:
    woken_after: list[float] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        await asyncio.sleep(1)
        woken_after.append(clock() - started)

    process = process_in(world)
    process.start(main)
    world.at(0.5, process.pause)
    world.at(7.0, process.resume)
    world.run(until=6.9)
    assert woken_after == []
    world.run(until=10)
    assert woken_after == [pytest.approx(7.0)]


def test_what_is_sent_arrives_in_order_and_nothing_after_the_cut(world: World) -> None:
    process = process_in(world)
    process.start(lambda: asyncio.sleep(100))
    wire = Wire(process.network, process.loop, "elsewhere", None)  # type: ignore[arg-type]  # lanes alone
    arrived: list[int] = []
    for number in range(10):
        world.at(number * 0.01, partial(wire.there.send, partial(arrived.append, number)))
    world.at(0.055, lambda: wire.there.cut(world.now))
    world.run(until=1)
    assert arrived == list(range(6))
    world.stop()
    process.bury()


def test_a_block_holds_up_what_is_sent_and_loses_nothing(world: World) -> None:
    network = Network(world, window=4)
    network.block("a", "b", 3.0)
    assert network.arrival("a", "b") >= 3.0
    assert network.arrival("b", "a") >= 3.0
    assert network.arrival("a", "c") < 0.01


def test_an_error_that_nobody_catches_is_a_violation(world: World) -> None:
    async def main() -> None:
        raise RuntimeError("boom")

    process = process_in(world)
    process.start(main)
    with pytest.raises(Violation, match="boom"):
        world.run(until=1)
