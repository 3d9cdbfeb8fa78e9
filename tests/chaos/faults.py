"""What is done to the processes, and what each of it cost the callers."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from tests.chaos.callers import Answer
from tests.chaos.fault import Fault, Kind
from tests.chaos.fleet import Fleet
from tests.chaos.plan import Plan

GAP_S = (0.3, 2.0)
"""Between a fault's end and the next one."""
FLOW_TIMEOUT_S = 60.0
POLL_S = 0.05


async def strike(fleet: Fleet, service: str, kind: Kind, stop_s: float, rng: random.Random) -> Fault:
    """Does it to one process of the service, and returns when all are ready again. Raises TimeoutError."""
    number = rng.randrange(len(fleet.members[service]))
    member = fleet.members[service][number]
    at = time.perf_counter()
    if kind is Kind.KILL:
        await member.kill()
        await member.start()
    else:
        member.send(signal.SIGSTOP)
        await asyncio.sleep(stop_s)
        member.send(signal.SIGCONT)
    await fleet.wait_ready()
    return Fault(service, number, kind, at, time.perf_counter())


async def strike_all(
    fleet: Fleet, answers: Sequence[Answer], plan: Plan, rng: random.Random, show: Callable[[str], None]
) -> list[Fault]:
    """Strikes one process of each service in each way, in a random order, at random moments.

    Each time every open answer goes on before the next blow, so that a pause has one cause.
    """
    blows = [(service, kind) for service in plan.services for kind in plan.kinds]
    rng.shuffle(blows)
    faults = []
    for service, kind in blows:
        await asyncio.sleep(rng.uniform(*GAP_S))
        show(f"SIG{kind.name} {service}")
        fault = await strike(fleet, service, kind, rng.uniform(*plan.stop_s), rng)
        faults.append(fault)
        await _until_all_flow(answers, fault.healed_at)
    return faults


async def _until_all_flow(answers: Sequence[Answer], since: float) -> None:
    """Until each open answer has got something since then, or for a while at most: the report shows who didn't."""
    try:
        async with asyncio.timeout(FLOW_TIMEOUT_S):
            while any(not answer.over and answer.moments[-1] < since for answer in answers):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        pass


def pauses(faults: Sequence[Fault], answers: Iterable[Answer]) -> list[tuple[Fault, list[float]]]:
    """For each fault the longest silence, seconds, that each caller with an open answer heard until the next one."""
    ends = [*(fault.at for fault in faults[1:]), float("inf")]
    answers = list(answers)
    return [
        (fault, [pause for answer in answers if (pause := _silence(answer.moments, fault.at, end)) is not None])
        for fault, end in zip(faults, ends, strict=True)
    ]


def _silence(moments: Sequence[float], at: float, until: float) -> float | None:
    """The longest gap that ends after `at` and before `until`; None for an answer that was not open at `at`."""
    if not moments or not moments[0] <= at < moments[-1]:
        return None
    return max((after - before for before, after in pairwise(moments) if at < after <= until), default=None)
