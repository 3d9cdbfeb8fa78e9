"""Greedy ids of the native engine against transformers' generate, on the real model, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import TorchEngine, load_engine
from tests.engine_driver import run
from tests.integration.model.oracle import Oracle, assert_same_ids, greedy_job

pytestmark = pytest.mark.timeout(300)  # two models and two cores, which other tests may share

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Translate to German: The weather is nice today.",
    "Once upon a time, in a village by a river, there lived",
    "Explain photosynthesis to a child of five.",
    '{"name": "Ada", "born": 1815, "died":',
    "Le petit prince dit:",
    "日本の首都は",
    "Привет! Как дела?",
    "The quick brown fox " * 20,
    "A",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    "Why is the sky blue? Answer in one sentence.",
    "List three primes greater than 100.",
    "<html>\n  <body>\n    <h1>",
    "I feel sad today 😢. What should I do?",
    "In 1969, " + "astronauts landed on the moon and came back. " * 12 + "In summary,",
    "Q: 17 + 25 = ?\nA:",
)


@pytest.fixture(scope="module")
def oracle(model_directory: Path) -> Oracle:
    return Oracle(model_directory, PROMPTS)


@pytest.fixture(scope="module")
def engine(model_directory: Path) -> TorchEngine:
    return load_engine(TorchEngineConfig(model=model_directory, dtype="fp32", device="cpu", kv_tokens=16384))


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_greedy_ids_equal_transformers_alone(oracle: Oracle, engine: TorchEngine, number: int) -> None:
    job = greedy_job(oracle, number)
    run(engine, [job])
    assert_same_ids(number, job.tokens, oracle.reference(number))


def test_greedy_ids_equal_transformers_in_a_mixed_batch_of_16(oracle: Oracle, engine: TorchEngine) -> None:
    # Chunks of 48 keep prefills among decodes; the last four join as others leave.
    jobs = [greedy_job(oracle, number) for number in range(len(PROMPTS))]
    run(engine, jobs, batch=16, chunk=48)
    for number, job in enumerate(jobs):
        assert_same_ids(number, job.tokens, oracle.reference(number))


def test_the_model_answers_sensibly(oracle: Oracle, engine: TorchEngine) -> None:
    job = greedy_job(oracle, 0)
    run(engine, [job])
    assert "Paris" in oracle.tokenizer.decode(job.tokens)
