"""Greedy ids of the native engine against transformers' generate, on the real model, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.scheduler.engine.api import SamplingSpec
from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import TorchEngine, load_engine
from tests.engine_driver import Job, run

pytestmark = pytest.mark.timeout(300)  # two models and two cores, which other tests may share

NEW_TOKENS = 24
NEAR_TIE = 1e-4

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


@dataclass(frozen=True)
class Reference:
    """What transformers gave: ids, and by how much each one's logit led the second best."""

    tokens: list[int]
    margins: list[float]


class Oracle:
    """transformers on the exported folder, one prompt at a time; each is computed once."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @cache  # noqa: B019 - lives as long as the session's only oracle
    def prompt(self, number: int) -> tuple[int, ...]:
        text = PROMPTS[number]
        if number % 2 == 0:  # half of them as a chat
            chat = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        return tuple(self.tokenizer.encode(text))

    @cache  # noqa: B019 - lives as long as the session's only oracle
    def reference(self, number: int) -> Reference:
        ids = torch.tensor([self.prompt(number)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = [logits[0].topk(2).values.tolist() for logits in out.logits]
        return Reference(out.sequences[0, ids.shape[1] :].tolist(), [first - second for first, second in best])


@pytest.fixture(scope="module")
def oracle(model_directory: Path) -> Oracle:
    return Oracle(model_directory)


@pytest.fixture(scope="module")
def engine(model_directory: Path) -> TorchEngine:
    return load_engine(TorchEngineConfig(model=model_directory, dtype="fp32", device="cpu", kv_tokens=16384))


def greedy_job(oracle: Oracle, number: int) -> Job:
    spec = SamplingSpec(seed=0, temperature=0.0)
    return Job(oracle.prompt(number), spec, len(oracle.reference(number).tokens))


def assert_same_ids(number: int, got: list[int], reference: Reference) -> None:
    """Equal, or different only from a near tie on, which is printed."""
    for position, (ours, theirs) in enumerate(zip(got, reference.tokens, strict=True)):
        if ours != theirs:
            margin = reference.margins[position]
            print(f"prompt {number}, position {position}: {ours} for {theirs}, margin {margin:.2e}")
            assert margin < NEAR_TIE, f"prompt {number} differs at {position}: {got} for {reference.tokens}"
            return


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
