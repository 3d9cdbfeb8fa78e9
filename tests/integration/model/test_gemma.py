"""The real Gemma 3 270M against transformers' generate, in fp32, beyond its window of 512 positions.

Needs `make model-gemma` and is skipped without: the weights come under terms of their own, so nobody gets them unasked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import TorchEngine, load_engine
from tests.conftest import ROOT
from tests.engine_driver import run
from tests.integration.model.oracle import Oracle, assert_same_ids, greedy_job

pytestmark = pytest.mark.timeout(300)

GEMMA = ROOT / "build/model/gemma-3-270m"
PROMPTS = (
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "日本の首都は",
    "In 1969, " + "astronauts landed on the moon and came back. " * 60 + "In summary,",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    if not (GEMMA / "config.json").exists():
        pytest.skip("Gemma isn't there: run `make model-gemma`")
    return GEMMA


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder, PROMPTS)


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return load_engine(TorchEngineConfig(model=folder, dtype="fp32", device="cpu", kv_tokens=4096))


def test_one_prompt_is_longer_than_the_window(oracle: Oracle) -> None:
    assert len(oracle.prompt(len(PROMPTS) - 1)) > 512


def test_greedy_ids_equal_transformers_alone_and_in_a_mixed_batch(oracle: Oracle, engine: TorchEngine) -> None:
    alone = [greedy_job(oracle, number) for number in range(len(PROMPTS))]
    for job in alone:
        run(engine, [job])
    together = [greedy_job(oracle, number) for number in range(len(PROMPTS))]
    run(engine, together, chunk=100)
    for number in range(len(PROMPTS)):
        assert_same_ids(number, alone[number].tokens, oracle.reference(number))
        assert_same_ids(number, together[number].tokens, oracle.reference(number))
