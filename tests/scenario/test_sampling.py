"""The engine scenarios about drawing a token: overflow, options that mean nothing, nothing left to draw."""

import math

import pytest
import torch

from gateway.openai.parameters import COMMON, read_parameters
from services.protocol.model_card import ModelCard
from services.protocol.parse import parse_generate
from services.runtime.errors import InvalidRequest
from services.scheduler.engine.api import Failed, FailureKind, Sampled, SamplingSpec
from tailrace.v1.common_pb2 import SamplingParams
from tailrace.v1.generation_pb2 import GenerateRequest, GenerationOptions
from tests.sampling import Sampling

VOCAB_SIZE = 50
CARD = ModelCard(model_id="m", vocab_size=VOCAB_SIZE, context_length=64, eos_token_ids=(2,), tokenizer_digest=bytes(32))


def rows_of(seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(20, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def drawn(sampling: Sampling, rows: torch.Tensor, *, prompt: tuple[int, ...] = (), **options: object) -> list[int]:
    specs = [SamplingSpec(seed=number, **options) for number in range(len(rows))]
    answers = sampling.each(rows, specs, prompt=prompt)
    assert all(isinstance(answer, Sampled) for answer in answers), answers
    return [answer.token_id for answer in answers if isinstance(answer, Sampled)]


def refused(sampling: SamplingParams) -> str:
    with pytest.raises(InvalidRequest) as error:
        parse_generate(GenerateRequest(text="a", options=GenerationOptions(sampling=sampling)), CARD)
    return error.value.field


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("scale", [3.0, 1e4])
def test_02_tiny_temperatures_neither_overflow_nor_differ_from_greedy(
    sampling: Sampling, temperature: float, scale: float
) -> None:
    rows = rows_of(1, scale)
    assert (
        drawn(sampling, rows, temperature=temperature)
        == rows.argmax(1).tolist()
        == drawn(sampling, rows, temperature=0.0)
    )


def test_03_at_the_first_token_the_prompt_counts_for_repetition_and_not_for_presence_and_frequency(
    sampling: Sampling,
) -> None:
    logits, prompt = [1.0, 2.0, 1.5], (1,)
    assert sampling.token(logits, SamplingSpec(seed=0, temperature=0.0, repetition_penalty=2.0), prompt=prompt) == 2
    for option in ("presence_penalty", "frequency_penalty"):
        assert sampling.token(logits, SamplingSpec(seed=0, temperature=0.0, **{option: 2.0}), prompt=prompt) == 1
        assert sampling.token(logits, SamplingSpec(seed=0, temperature=0.0, **{option: 2.0}), output=(1,)) == 2


def test_04_top_k_of_nothing_or_of_more_than_there_is_keeps_all(sampling: Sampling) -> None:
    rows = rows_of(2)
    assert (
        drawn(sampling, rows, top_k=0)
        == drawn(sampling, rows, top_k=VOCAB_SIZE)
        == drawn(sampling, rows, top_k=10 * VOCAB_SIZE)
    )
    for top_k in (0, -1):
        request = GenerateRequest(text="a", options=GenerationOptions(sampling=SamplingParams(top_k=top_k)))
        assert parse_generate(request, CARD).sampling.top_k == 0


def test_04_min_p_with_a_seed_repeats_itself_and_leaves_the_unlikely_out(sampling: Sampling) -> None:
    rows = rows_of(3)
    first = drawn(sampling, rows, min_p=0.2)
    assert first == drawn(sampling, rows, min_p=0.2)
    shares = rows.softmax(1)
    assert all(shares[row, one] >= 0.2 * shares[row].max() for row, one in enumerate(first))


def test_04_a_repetition_penalty_of_0_is_refused() -> None:
    assert refused(SamplingParams(repetition_penalty=0.0)) == "options.sampling.repetition_penalty"


def test_06_a_bias_out_of_the_vocabulary_or_beyond_numbers_is_refused() -> None:
    assert refused(SamplingParams(logit_bias={VOCAB_SIZE: 1.0})) == "options.sampling.logit_bias"
    assert refused(SamplingParams(logit_bias={3: -math.inf})) == "options.sampling.logit_bias[3]"


def test_06_a_bias_on_something_that_is_no_id_is_refused() -> None:
    with pytest.raises(InvalidRequest) as error:
        read_parameters({"logit_bias": {"dog": 1.0}}, COMMON, frozenset())
    assert error.value.field.startswith("logit_bias")


def test_06_a_bias_that_leaves_nothing_is_a_typed_error_and_no_token(sampling: Sampling) -> None:
    everything = tuple((one, -math.inf) for one in range(VOCAB_SIZE))
    bad, good = sampling.each(rows_of(4)[:2], [SamplingSpec(seed=0, logit_bias=everything), SamplingSpec(seed=1)])
    assert isinstance(bad, Failed)
    assert bad.kind is FailureKind.BAD_OUTPUT
    assert isinstance(good, Sampled)
