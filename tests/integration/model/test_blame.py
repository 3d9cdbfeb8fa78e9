"""What is raised while a step draws belongs to one sequence: its neighbours have drawn, and must not once more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.protocol.events import ErrorCode
from services.scheduler.engine.api import Engine, SamplingSpec
from tests.integration.model.small_models import load_small_cpu_engine, load_small_engine, save_small_model
from tests.step_library import needs_step_library
from tests.unit.scheduler.driver import Driver


class Counting:
    """Allows one id at a time: 10 more than there were ids."""

    def __init__(self, came: int) -> None:
        self.came = came

    def allowed(self) -> bytes:
        return (1 << 10 + self.came).to_bytes(16, "little")

    def accept(self, token_id: int) -> None:
        self.came += 1


class Counted:
    """Starts guides that count, or, after two ids, raise what no guide should."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def start(self, output_ids: Sequence[int]) -> Counting:
        return Counting(len(output_ids)) if self._error is None else Breaking(len(output_ids), self._error)


class Breaking(Counting):
    def __init__(self, came: int, error: Exception) -> None:
        super().__init__(came)
        self._error = error

    def allowed(self) -> bytes:
        if self.came == 2:
            raise self._error
        return super().allowed()


@pytest.mark.parametrize("name", [pytest.param("cpu", marks=needs_step_library), "torch", "torch, deterministic"])
def test_what_is_raised_over_one_sequence_makes_no_neighbour_draw_twice(tmp_path: Path, name: str) -> None:
    save_small_model(tmp_path)
    driver = Driver(engine=_engine(tmp_path, name))
    for attempt_id, error in ((1, None), (2, MemoryError()), (3, None)):
        driver.submit(attempt_id, sampling=SamplingSpec(seed=1, constraint=Counted(error)), ignore_eos=True)
    driver.run()
    failure = driver.end(2).error
    assert failure is not None
    assert failure.code is ErrorCode.OUT_OF_MEMORY
    assert driver.ids(1) == driver.ids(3) == list(range(10, 18))
    assert driver.ids(2) == [10, 11]


def _engine(folder: Path, name: str) -> Engine:
    if name == "cpu":
        return load_small_cpu_engine(folder)
    return load_small_engine(folder, deterministic=name != "torch")
