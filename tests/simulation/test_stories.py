"""The stories in tests/simulation/stories, each told with several seeds: the small chances differ, the end does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.run import run
from tests.simulation.story import Unreadable, read_story, stories
from tests.simulation.substitutes import substituted

SEEDS = 3


@pytest.mark.parametrize("path", stories(), ids=lambda path: path.stem)
def test_it_ends_as_it_is_told(path: Path) -> None:
    story = read_story(path.read_text())
    assert story.endings
    with substituted():
        for seed in range(SEEDS):
            result = run(story.plan(seed))
            wrongs = story.wrongs(result.callers)
            if result.violation or wrongs:
                told = "\n".join(run(story.plan(seed), tells=True).story)
                pytest.fail(f"seed {seed}: {result.violation or wrongs}\n{told}")


@pytest.mark.parametrize("line", ["alice sleeps", "0.5 alice asks gateway-1 for 3 tokens loudly", "with 2 kettles"])
def test_a_line_that_nobody_understands_is_named(line: str) -> None:
    with pytest.raises(Unreadable):
        read_story(line)
