"""The sampler's options one by one, and rows that can't be sampled."""

from __future__ import annotations

import math

import pytest
import torch

from services.scheduler.engine.api import Failed, FailureKind, Sampled, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.sampling.rules import LOGPROB_FLOOR
from tests.sampling import Sampling

GREEDY = {"seed": 0, "temperature": 0.0}
INFINITY = float("inf")


def test_greedy_takes_the_first_of_equal_bests(sampling: Sampling) -> None:
    assert sampling.token([1.0, 5.0, 5.0], SamplingSpec(**GREEDY)) == 1


@pytest.mark.parametrize("top_k", [0, -1, 6, 9_999_999])
def test_top_k_off_or_beyond_the_vocabulary_changes_nothing(sampling: Sampling, top_k: int) -> None:
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    plain = sampling.each(logits, [SamplingSpec(seed=seed) for seed in range(50)])
    assert sampling.each(logits, [SamplingSpec(seed=seed, top_k=top_k) for seed in range(50)]) == plain


def test_min_p_with_a_seed_repeats_itself(sampling: Sampling) -> None:
    spec = SamplingSpec(seed=42, min_p=0.05)
    assert sampling.token([1.0, 0.9, 0.8, 0.7], spec) == sampling.token([1.0, 0.9, 0.8, 0.7], spec)


def test_repetition_penalty_counts_the_prompt_at_the_first_token(sampling: Sampling) -> None:
    spec = SamplingSpec(**GREEDY, repetition_penalty=2.0)
    assert sampling.token([3.0, 2.0], spec) == 0
    assert sampling.token([3.0, 2.0], spec, prompt=[0]) == 1
    assert sampling.token([3.0, 2.0], spec, output=[0]) == 1


def test_repetition_penalty_makes_negative_logits_more_negative(sampling: Sampling) -> None:
    assert sampling.token([-1.0, -1.5], SamplingSpec(**GREEDY, repetition_penalty=2.0), prompt=[0]) == 1


@pytest.mark.parametrize("option", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_penalty_count_the_output_alone(sampling: Sampling, option: str) -> None:
    spec = SamplingSpec(**GREEDY, **{option: 1.5})
    assert sampling.token([3.0, 2.0], spec, prompt=[0, 0]) == 0
    assert sampling.token([3.0, 2.0], spec, output=[0]) == 1


def test_frequency_penalty_grows_with_each_repetition_and_presence_does_not(sampling: Sampling) -> None:
    logits = [3.0, 1.0]
    assert sampling.token(logits, SamplingSpec(**GREEDY, frequency_penalty=0.8), output=[0, 0]) == 0
    assert sampling.token(logits, SamplingSpec(**GREEDY, frequency_penalty=0.8), output=[0, 0, 0]) == 1
    assert sampling.token(logits, SamplingSpec(**GREEDY, presence_penalty=1.9), output=[0] * 9) == 0


def test_negative_penalties_encourage(sampling: Sampling) -> None:
    assert sampling.token([1.0, 2.0], SamplingSpec(**GREEDY, presence_penalty=-2.0), output=[0]) == 0


def test_drawn_tokens_count_at_once(sampling: Sampling) -> None:
    sampler, key = sampling.sampler(3), SequenceKey(1)
    sampler.open(key, SamplingSpec(**GREEDY, presence_penalty=10.0), (), ())
    drawn = []
    for position in range(3):
        (answer,) = sampler.sample(torch.tensor([[3.0, 2.0, 1.0]]), [Slice(key, [0], 0, [0], True, position, False)])
        assert isinstance(answer, Sampled)
        drawn.append(answer.token_id)
    assert drawn == [0, 1, 2]


def test_counting_many_distinct_tokens_keeps_them_all(sampling: Sampling) -> None:
    sampler, key = sampling.sampler(400), SequenceKey(1)
    sampler.open(key, SamplingSpec(**GREEDY, presence_penalty=10.0), (), ())
    logits = torch.arange(400).flip(0).float()[None] / 100
    drawn = set()
    for position in range(400):
        (answer,) = sampler.sample(logits.clone(), [Slice(key, [0], 0, [0], True, position, False)])
        assert isinstance(answer, Sampled)
        drawn.add(answer.token_id)
    assert drawn == set(range(400))


def test_penalties_of_one_row_leave_the_others_alone(sampling: Sampling) -> None:
    specs = [SamplingSpec(**GREEDY), SamplingSpec(**GREEDY, presence_penalty=5.0), SamplingSpec(**GREEDY)]
    answers = sampling.each(torch.tensor([[3.0, 2.0]]).repeat(3, 1), specs, output=[0])
    assert [answer.token_id for answer in answers if isinstance(answer, Sampled)] == [0, 1, 0]


def test_logit_bias_adds_to_its_ids(sampling: Sampling) -> None:
    assert sampling.token([3.0, 2.0], SamplingSpec(**GREEDY, logit_bias=((1, 5.0),))) == 1
    assert sampling.token([3.0, 2.0], SamplingSpec(**GREEDY, logit_bias=((0, -INFINITY),))) == 1


@pytest.mark.parametrize("bad_id", [-1, 2, 2**32])
def test_logit_bias_out_of_the_vocabulary_is_refused(sampling: Sampling, bad_id: int) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        sampling.sampler(2).open(SequenceKey(1), SamplingSpec(seed=0, logit_bias=((bad_id, 1.0),)), (), ())


def test_suppressed_ids_come_only_when_the_slice_allows_them(sampling: Sampling) -> None:
    spec = SamplingSpec(**GREEDY, suppressible_ids=(0, 99, 2**40))
    assert sampling.token([3.0, 2.0], spec, suppress=True) == 1
    assert sampling.token([3.0, 2.0], spec) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[math.nan] * 3, [1.0, math.nan, 2.0], [-INFINITY] * 3, [1.0, INFINITY, 0.0]])
def test_a_row_that_is_no_distribution_fails_alone(sampling: Sampling, row: list[float], temperature: float) -> None:
    specs = [SamplingSpec(seed=0, temperature=temperature, logprobs=1, presence_penalty=1.0) for _ in range(3)]
    first, bad, last = sampling.each(torch.tensor([[3.0, 2.0, 1.0], row, [-9.0, 2.0, 30.0]]), specs)
    assert isinstance(bad, Failed)
    assert bad.kind is FailureKind.BAD_OUTPUT
    assert isinstance(first, Sampled)
    assert isinstance(last, Sampled)
    assert last.token_id == 2


def test_bias_that_forbids_everything_is_a_failure_and_not_a_token(sampling: Sampling) -> None:
    spec = SamplingSpec(seed=0, logit_bias=((0, -INFINITY), (1, -INFINITY)))
    (answer,) = sampling.each(torch.tensor([[1.0, 2.0]]), [spec])
    assert isinstance(answer, Failed)
    assert answer.kind is FailureKind.BAD_OUTPUT


def test_logprobs_are_those_of_the_model_whatever_changes_the_draw(sampling: Sampling) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, -1.0]])
    spec = SamplingSpec(seed=0, temperature=0.3, top_k=1, presence_penalty=1.0, logit_bias=((0, -100.0),), logprobs=2)
    (answer,) = sampling.each(logits, [spec], output=[0])
    assert isinstance(answer, Sampled)
    assert answer.logprobs is not None
    expected = logits[0].log_softmax(0)
    assert answer.token_id == 1
    assert answer.logprobs.logprob == pytest.approx(expected[1].item())
    assert answer.logprobs.top_ids == (0, 1)
    assert answer.logprobs.top_logprobs == pytest.approx(expected[:2].tolist())


def test_zero_alternatives_still_give_the_tokens_own_logprob(sampling: Sampling) -> None:
    (answer,) = sampling.each(torch.tensor([[1.0, 1.0]]), [SamplingSpec(**GREEDY, logprobs=0)])
    assert isinstance(answer, Sampled)
    assert answer.logprobs is not None
    assert answer.logprobs.logprob == pytest.approx(math.log(0.5))
    assert answer.logprobs.top_ids == ()


def test_impossible_ids_have_a_finite_logprob(sampling: Sampling) -> None:
    (answer,) = sampling.each(torch.tensor([[1.0, -INFINITY]]), [SamplingSpec(**GREEDY, logprobs=9)])
    assert isinstance(answer, Sampled)
    assert answer.logprobs is not None
    assert answer.logprobs.top_logprobs == (0.0, pytest.approx(LOGPROB_FLOOR))


def test_only_those_who_ask_get_logprobs(sampling: Sampling) -> None:
    specs = [SamplingSpec(seed=0), SamplingSpec(seed=0, logprobs=1), SamplingSpec(seed=0)]
    answers = sampling.each(torch.zeros(3, 5), specs)
    assert [isinstance(a, Sampled) and a.logprobs is not None for a in answers] == [False, True, False]


def test_an_empty_batch_gives_no_answers(sampling: Sampling) -> None:
    assert sampling.sampler(5).sample(torch.empty(0, 5), []) == []
