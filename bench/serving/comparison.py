"""The same loads on several systems in turn, round by round, so that a busy moment meets all of them alike."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.serving.drive import drive
from bench.serving.figures import Figures, Objective, figures_of
from bench.serving.loads import Maker
from bench.serving.memory import Peak, watched
from bench.serving.prompts import Prompts
from bench.serving.targets import Target


@dataclass
class System:
    """One of those that are compared."""

    name: str
    weights: str
    target: Target
    pids: Sequence[int]
    weight_bits: float | None = None
    """Of one weight as it is stored; None where that isn't known."""
    peak: Peak = field(default_factory=Peak)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. Everything that is random follows from `seed`; prompts differ from run to run."""

    loads: Mapping[str, Maker]
    rounds: int
    objective: Objective
    seed: int = 1


Results = dict[tuple[str, str], list[Figures]]
"""By system and load, one for each round; a load that a system refuses has none."""


async def compare(
    systems: list[System],
    plan: Plan,
    prompts: Callable[[int], Prompts],
    on_run: Callable[[str, str], None],
    on_failure: Callable[[str], None],
) -> Results:
    """Runs everything; `prompts(seed)` makes the texts. The order of the systems changes from round to round."""
    results: Results = {}
    refused: set[tuple[str, str]] = set()
    for number in range(plan.rounds):
        for load in plan.loads:
            turn = number % len(systems)
            for index, system in enumerate(systems[turn:] + systems[:turn]):
                key = (system.name, load)
                if key in refused:
                    continue
                on_run(*key)
                try:
                    figures = await _once(system, load, plan, number * len(systems) + index, prompts)
                except* (OSError, NotImplementedError) as failed:  # the others go on
                    refused.add(key)
                    on_failure(f"{system.name}, {load}: {failed.exceptions[0]!r}")
                else:
                    results.setdefault(key, []).append(figures)
    return results


async def _once(system: System, name: str, plan: Plan, number: int, prompts: Callable[[int], Prompts]) -> Figures:
    # Texts of its own for each run: no prefix cache must know them yet, and two of the systems may share a server.
    seed = zlib.crc32(f"{plan.seed} {number} {name}".encode())
    load = plan.loads[name](prompts(seed), random.Random(seed))
    async with watched(system.pids, system.peak):
        answers = await drive(system.target, load, random.Random(seed), lambda: None)
    return figures_of(answers, plan.objective)
