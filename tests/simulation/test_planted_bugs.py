"""Whoever writes one of these bugs hears of it: within a few seeds of a story in which it does harm."""

from __future__ import annotations

import pytest

from tests.simulation.planted import BUGS, Bug
from tests.simulation.run import run
from tests.simulation.story import read_story
from tests.simulation.substitutes import substituted

SEEDS = 10


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_the_simulation_finds_it(bug: Bug) -> None:
    plans = map(read_story(bug.story).plan, range(SEEDS))
    with substituted():
        with bug.planted():
            found = next((plan for plan in plans if run(plan).violation is not None), None)
        assert found is not None
        assert run(found).violation is None, "without the bug no promise is broken"
