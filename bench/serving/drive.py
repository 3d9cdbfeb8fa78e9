"""Puts a load on a target."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

from bench.serving.loads import Ask, Load
from bench.serving.targets import Heard, Target


async def drive(target: Target, load: Load, rng: random.Random, on_answer: Callable[[], None]) -> list[Heard]:
    """All answers, in the order in which they ended. Raises what the target raises."""
    heard: list[Heard] = []

    async def ask(one: Ask) -> None:
        heard.append(await target.ask(one))
        on_answer()

    async with asyncio.TaskGroup() as tasks:
        if load.streams:
            asks = iter(load.asks)
            for _ in range(load.streams):
                tasks.create_task(_one_after_another(asks, ask))
        else:
            await _at_random_moments(load.asks, load.per_s, rng, lambda one: tasks.create_task(ask(one)))
    return heard


async def _one_after_another(asks: Iterator[Ask], ask: Callable[[Ask], Awaitable[None]]) -> None:
    for one in asks:  # shared by all streams: whoever is free takes the next
        await ask(one)


async def _at_random_moments(
    asks: Sequence[Ask], per_s: float, rng: random.Random, start: Callable[[Ask], object]
) -> None:
    for one in asks:
        start(one)
        await asyncio.sleep(rng.expovariate(per_s))
