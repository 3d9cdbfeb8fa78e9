"""Of a plan that breaks a promise, the parts that are needed for it."""

from __future__ import annotations

from tests.simulation.plan import Plan
from tests.simulation.run import run


def shrunk(plan: Plan, *, most_runs: int = 60) -> frozenset[int]:
    """Which parts can be left out, one after the other, with some promise still broken; see Plan.without."""
    left_out: frozenset[int] = frozenset()
    for part in list(range(len(plan.faults) + len(plan.callers)))[:most_runs]:
        tried = left_out | {part}
        if run(plan.without(tried)).violation is not None:
            left_out = tried
    return left_out
