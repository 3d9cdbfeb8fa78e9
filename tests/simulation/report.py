"""What a simulation tells: a failed seed in readable words, and the table of what many seeds have reached."""

from __future__ import annotations

from collections import Counter

from tests.simulation.occasions import plan_of
from tests.simulation.plan import Plan
from tests.simulation.run import run
from tests.simulation.shrinking import shrunk

LAST_LINES = 40
WIDTH = 200


def failure_report(seed: int) -> str:
    """A failed seed, made small: which promise, by which plan, the end of its story, and how to see all of it."""
    plan = plan_of(seed)
    left_out = shrunk(plan)
    result = run(plan.without(left_out), tells=True)
    again = f"python -m tests.simulation --seed {seed} --trace"
    if left_out:
        again += f" --without {','.join(map(str, sorted(left_out)))}"
    story = [line[:WIDTH] for line in result.story[-LAST_LINES:]]
    return "\n".join(
        (
            f"seed {seed}: {result.violation}",
            *plan_lines(result.plan),
            f"the last {len(story)} lines of",
            f"  {again}",
            *story,
        )
    )


def plan_lines(plan: Plan) -> list[str]:
    """A plan, one thing a line."""
    return [str(plan.shape), *(str(fault) for fault in plan.faults), *(str(caller) for caller in plan.callers)]


def table(counts: Counter[str], seeds: int) -> str:
    """How often each kind of thing happened, by what stands before the colon."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for name, count in sorted(counts.items()):
        group, _, kind = name.partition(": ")
        groups.setdefault(group if kind else "other", []).append((kind or name, count))
    lines = [f"{seeds} seeds"]
    for group, kinds in sorted(groups.items()):
        lines.append(f"\n{group}")
        lines += [f"  {kind:<44}{count:>10,}" for kind, count in kinds]
    return "\n".join(lines)
