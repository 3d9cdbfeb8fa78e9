"""Scenario 9: a prompt's logprobs are the same with a prefix hit, over chunks, preemptions and neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.admission import Limits
from services.scheduler.engine.api import Engine, Logprobs, SamplingSpec
from services.scheduler.engine.cpu_engine import CpuEngineConfig, load_cpu_engine
from services.scheduler.submission import ChoiceStart
from tests.integration.model.small_models import VOCAB_SIZE, engine_logprobs, load_small_engine, save_small_model
from tests.unit.scheduler.driver import Driver

PROMPT = [(5 * i + 3) % 80 for i in range(23)]
SCORED = SamplingSpec(seed=1, prompt_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_small_model(path, num_key_value_heads=2)
    return path


@pytest.fixture(params=["torch", "cpu"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    if request.param == "torch":
        return load_small_engine(folder, deterministic=True)
    return load_cpu_engine(CpuEngineConfig(model=folder, weights_format="fp32", kv_tokens=512, block_size=4))


def driver_of(engine: Engine | None = None, **limits: Any) -> Driver:
    return Driver(engine=engine, limits=Limits(**{"max_running": 4, "max_step_tokens": 64, **limits}), block_size=4)


def scores(driver: Driver, attempt_id: int) -> Sequence[Logprobs]:
    prompt = driver.logs[attempt_id, 0].prompt
    assert prompt is not None
    assert not prompt.missing
    return prompt.logprobs


@pytest.mark.parametrize("length", [3, 4, 5, 8, 23])
def test_09_equal_at_any_length_twice_with_a_prefix_hit(engine: Engine, length: int) -> None:
    driver = driver_of(engine)
    found = []
    for attempt_id in (1, 2, 3):
        sampling = SCORED if attempt_id != 2 else SamplingSpec(seed=1)
        driver.submit(attempt_id, PROMPT[:length], sampling=sampling, max_tokens=2)
        driver.run()
        found.append(driver.logs[attempt_id, 0])
    assert scores(driver, 1) == scores(driver, 3)
    assert len(scores(driver, 1)) == length - 1
    assert found[1].cached_prompt_tokens == (length - 1) // 4 * 4
    assert found[2].cached_prompt_tokens == 0
    assert found[0].ids == found[1].ids == found[2].ids


def test_they_are_what_the_model_gives_after_each_beginning(folder: Path) -> None:
    engine = load_small_engine(folder)
    driver = driver_of(engine)
    driver.submit(1, PROMPT, sampling=SamplingSpec(seed=1, prompt_logprobs=VOCAB_SIZE), max_tokens=1)
    driver.run()
    expected = engine_logprobs(load_small_engine(folder), PROMPT, [1] * len(PROMPT))
    for position, one in enumerate(scores(driver, 1)):
        assert one.logprob == pytest.approx(expected[position, PROMPT[position + 1]].item(), abs=1e-4)
        top = dict(zip(one.top_ids, one.top_logprobs, strict=True))
        assert [top[token] for token in range(VOCAB_SIZE)] == pytest.approx(expected[position].tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [4, 7, 13])
def test_09_chunks_and_neighbours_change_nothing(engine: Engine, budget: int) -> None:
    quiet = driver_of(engine)
    quiet.submit(1, PROMPT, sampling=SCORED, max_tokens=4)
    quiet.run()
    driver = driver_of(engine, max_step_tokens=budget)
    driver.submit(1, PROMPT[2:], max_tokens=12)
    driver.step()
    driver.submit(2, PROMPT, sampling=SCORED, max_tokens=4)
    driver.run()
    assert scores(driver, 2) == scores(quiet, 1)


def test_a_preemption_in_the_middle_doubles_and_misses_none() -> None:
    driver = Driver(block_size=4, total_blocks=14, limits=Limits(max_running=2, max_step_tokens=4))
    driver.submit(1, range(20, 28), max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.submit(2, range(60, 96), sampling=SCORED, max_tokens=4)
    driver.run()
    assert driver.sequence(2).preemptions > 0
    quiet = Driver(block_size=4)
    quiet.submit(2, range(60, 96), sampling=SCORED, max_tokens=4)
    quiet.run()
    assert scores(driver, 2) == scores(quiet, 2)


def test_of_several_choices_the_first_tells_them_and_the_rest_share_its_blocks() -> None:
    driver = driver_of()
    driver.submit(1, range(20, 41), sampling=SCORED, choices=(ChoiceStart(0), ChoiceStart(1)))
    driver.run()
    assert len(scores(driver, 1)) == 20
    assert driver.logs[1, 1].prompt is None
    driver.assert_idle()
