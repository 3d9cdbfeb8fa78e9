"""Whatever goes wrong, every promise is kept: 300 plans here, 10,000 in `make sim`."""

from __future__ import annotations

import pytest

from tests.simulation.command import run_seeds
from tests.simulation.report import failure_report
from tests.simulation.substitutes import substituted

SEEDS = 300
CHUNK = 25


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_promise_is_kept_whatever_goes_wrong(first: int) -> None:
    _, _, failures = run_seeds(range(first, first + CHUNK))
    if failures:
        with substituted():
            pytest.fail(f"{len(failures)} seeds broke a promise: {sorted(failures)}\n{failure_report(min(failures))}")
