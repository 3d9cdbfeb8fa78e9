"""Whoever writes one of these bugs hears of it: within a few seeds of a story in which it does harm."""

from __future__ import annotations

import pytest

from tests.simulation.plan import Plan
from tests.simulation.planted import BUGS, Bug
from tests.simulation.run import run
from tests.simulation.story import Story, read_story
from tests.simulation.substitutes import substituted

SEEDS = 10


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_the_simulation_finds_it(bug: Bug) -> None:
    story = read_story(bug.story)
    with substituted():
        with bug.planted():
            found = next((plan for plan in map(story.plan, range(SEEDS)) if _harm(story, plan)), None)
        assert found is not None
        assert not _harm(story, found), "without the bug no promise is broken"


def _harm(story: Story, plan: Plan) -> str:
    result = run(plan)
    return result.violation or "".join(story.wrongs(result.callers))
