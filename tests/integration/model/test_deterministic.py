"""`deterministic`: the same bits whatever else is computed, over the real core and the engines that compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.admission import Limits
from services.scheduler.engine.api import Engine, Logprobs, SamplingSpec
from services.scheduler.engine.cpu_engine import CpuEngineConfig, load_cpu_engine
from services.scheduler.submission import ChoiceStart
from tests.integration.model.small_models import load_small_engine, save_small_model
from tests.unit.scheduler.driver import Driver

PROMPT = [(7 * i + 3) % 90 for i in range(41)]
Answer = tuple[list[int], list[Logprobs]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_small_model(path, num_key_value_heads=2, hidden_size=64, intermediate_size=96)
    return path


@pytest.fixture(params=["torch", "cpu-fp32", "cpu-int8", "cpu-int4"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    if request.param == "torch":
        return load_small_engine(folder, deterministic=True)
    settings: dict[str, Any] = {"kv_tokens": 512, "block_size": 4}
    return load_cpu_engine(CpuEngineConfig(model=folder, weights_format=request.param[4:], **settings))


def driver_of(engine: Engine, *, step: int = 64, cache: bool = True) -> Driver:
    return Driver(engine=engine, limits=Limits(max_running=8, max_step_tokens=step, prefix_cache=cache))


def submit(driver: Driver, attempt_id: int, *, prompt: Sequence[int] = PROMPT, **changes: Any) -> None:
    sampling = SamplingSpec(seed=42, temperature=0.9, top_p=0.95, logprobs=3)
    driver.submit(attempt_id, prompt, ignore_eos=True, **{"sampling": sampling, "max_tokens": 24, **changes})


def answer(driver: Driver, attempt_id: int) -> Answer:
    driver.run()
    logprobs = driver.logs[attempt_id, 0].logprobs
    assert logprobs is not None
    return driver.ids(attempt_id), logprobs


def alone(engine: Engine) -> Answer:
    driver = driver_of(engine)
    submit(driver, 1)
    return answer(driver, 1)


def test_20_neighbours_change_no_bit(engine: Engine) -> None:
    expected = alone(engine)
    driver = driver_of(engine)
    for attempt_id in range(1, 6):
        submit(driver, attempt_id, prompt=PROMPT if attempt_id == 3 else PROMPT[attempt_id:])
        driver.step()
    assert answer(driver, 3) == expected


@pytest.mark.parametrize("step", [8, 13, 40])
def test_20_chunks_change_no_bit(engine: Engine, step: int) -> None:
    expected = alone(engine)
    driver = driver_of(engine, step=step)
    submit(driver, 1)
    assert answer(driver, 1) == expected


def test_20_a_prefix_hit_changes_no_bit(engine: Engine) -> None:
    expected = alone(engine)
    driver = driver_of(engine)
    for attempt_id in (1, 2):
        submit(driver, attempt_id)
        assert answer(driver, attempt_id) == expected
    assert driver.cached(2) == 40


@pytest.mark.parametrize("known", [1, 9, 23])
def test_20_a_failover_changes_no_bit(engine: Engine, known: int) -> None:
    ids, logprobs = alone(engine)
    driver = driver_of(engine, cache=False)
    submit(driver, 1, choices=(ChoiceStart(0, tuple(ids[:known]), tuple(logprobs[:known])),))
    assert answer(driver, 1) == (ids, logprobs)


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSpec(seed=1, temperature=0.0),
        SamplingSpec(seed=1, temperature=0.0, logprobs=2),
        SamplingSpec(seed=2, temperature=0.4, top_k=4, logprobs=2),
        SamplingSpec(seed=3, temperature=0.0, frequency_penalty=0.02, presence_penalty=0.02, logprobs=2),
    ],
    ids=["greedy", "greedy with logprobs", "drawn", "penalised"],
)
def test_20_guesses_change_no_bit(folder: Path, stored: str, sampling: SamplingSpec) -> None:
    found = []
    for drafts in (0, 2, 7):
        settings: dict[str, Any] = {"kv_tokens": 1024, "block_size": 16, "draft_tokens": drafts}
        driver = driver_of(load_cpu_engine(CpuEngineConfig(model=folder, weights_format=stored, **settings)))
        accepted = 0
        for together in ((1,), (2, 3)):
            for attempt_id in together:
                submit(driver, attempt_id, prompt=PROMPT[attempt_id:], sampling=sampling, max_tokens=90)
            accepted += run_ahead(driver)
        assert bool(accepted) == bool(drafts)
        logs = [driver.logs[attempt_id, 0] for attempt_id in (1, 2, 3)]
        found.append([(log.ids.tolist(), log.logprobs) for log in logs])
    assert found[0] == found[1] == found[2]


def run_ahead(driver: Driver) -> int:
    """Runs to the end, every step planned while the one before is in flight; returns how many guesses were right."""
    accepted = 0
    while driver.core.has_work:
        step = driver.begin()
        driver.look_ahead()
        driver.finish()
        accepted += step.accepted
    driver.core.check_integrity()
    return accepted


def test_13_a_tiny_pool_gives_the_same_bits_as_a_large_one(folder: Path) -> None:
    large, tiny = (load_small_engine(folder, deterministic=True, kv_tokens=tokens) for tokens in (512, 100))
    assert run_six(large, preempted=False) == run_six(tiny, preempted=True)


def run_six(engine: Engine, *, preempted: bool) -> list[Answer]:
    driver = driver_of(engine)
    for attempt_id in range(1, 7):
        submit(driver, attempt_id, prompt=PROMPT[attempt_id * 3 :])
    driver.run()
    assert preempted == any(driver.sequence(attempt_id).preemptions for attempt_id in range(1, 7))
    return [answer(driver, attempt_id) for attempt_id in range(1, 7)]
