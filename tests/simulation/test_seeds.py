"""Whatever goes wrong, every promise is kept: 300 plans here, 10,000 in `make sim`."""

from __future__ import annotations

import os

import pytest

from tests.simulation.command import run_chunks
from tests.simulation.report import failure_report
from tests.simulation.substitutes import substituted

SEEDS = range(300)


@pytest.mark.timeout(600)  # a fifth of it on two cores of its own
def test_every_promise_is_kept_whatever_goes_wrong() -> None:
    failures: dict[int, str] = {}
    for _, _, failed in run_chunks(SEEDS, os.cpu_count() or 1):
        failures |= failed
    if failures:
        with substituted():
            pytest.fail(f"{len(failures)} seeds broke a promise: {sorted(failures)}\n{failure_report(min(failures))}")
