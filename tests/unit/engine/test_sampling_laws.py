"""What is drawn follows the distribution, and depends on (seed, choice, position) alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling.draw import draw
from kernels.sampling.randomness import keys, uniform
from services.scheduler.engine.api import Sampled, SamplingSpec
from tests.sampling import Sampling

DRAWS = 4000
LOGITS = (2.0, 1.5, 1.0, 0.0, -1.0, -3.0)


def assert_follows(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Every share within five standard deviations; impossible ids never."""
    bound = 5 * (expected * (1 - expected) / DRAWS).sqrt() + 1e-9
    assert ((got - expected).abs() <= bound).all(), (got, expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_a_temperature(sampling: Sampling, temperature: float) -> None:
    expected = (torch.tensor(LOGITS) / temperature).softmax(0)
    assert_follows(sampling.frequencies(LOGITS, DRAWS, temperature=temperature), expected)


def test_top_k_keeps_the_k_best(sampling: Sampling) -> None:
    expected = torch.tensor(LOGITS[:3]).softmax(0)
    assert_follows(sampling.frequencies(LOGITS, DRAWS, top_k=3), torch.cat((expected, torch.zeros(3))))


def test_top_p_keeps_the_smallest_set_that_reaches_p(sampling: Sampling) -> None:
    probabilities = torch.tensor(LOGITS).softmax(0)
    assert probabilities[:2].sum() < 0.75 < probabilities[:3].sum()
    kept = probabilities[:3] / probabilities[:3].sum()
    assert_follows(sampling.frequencies(LOGITS, DRAWS, top_p=0.75), torch.cat((kept, torch.zeros(3))))


def test_top_p_counts_among_what_top_k_left(sampling: Sampling) -> None:
    # Alone the best id has 0.47 of the probability, among the best two 0.62.
    assert sampling.frequencies(LOGITS, 200, top_k=2, top_p=0.6)[0] == 1


def test_min_p_is_relative_to_the_best(sampling: Sampling) -> None:
    kept = torch.tensor(LOGITS[:3]).softmax(0)
    assert_follows(sampling.frequencies(LOGITS, DRAWS, min_p=0.3), torch.cat((kept, torch.zeros(3))))


def test_tiny_top_p_and_min_p_1_keep_the_best(sampling: Sampling) -> None:
    assert sampling.frequencies(LOGITS, 100, top_p=1e-6)[0] == 1
    assert sampling.frequencies(LOGITS, 100, min_p=1.0)[0] == 1


def test_the_long_tail_is_drawn_as_often_as_it_weighs(sampling: Sampling) -> None:
    # One id with 0.8; 2,000 ids share 0.2, each far below the head's floor.
    logits = [0.0] + [math.log(0.25 / 2000)] * 2000
    shares = sampling.frequencies(logits, DRAWS)
    assert abs(shares[0] - 0.8) < 5 * (0.16 / DRAWS) ** 0.5
    assert (shares[1:] > 0).sum() > 500


def test_top_p_over_a_flat_distribution_looks_beyond_the_first_candidates(sampling: Sampling) -> None:
    shares = sampling.frequencies([0.0] * 1500 + [-9.0] * 1500, 1000, top_p=0.9)
    assert shares[1500:].sum() == 0
    shares = sampling.frequencies([-i / 3000 for i in range(3000)], 1000, top_p=0.5)
    assert 0 < shares.nonzero().max() < 1500


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(1, 20))
@settings(max_examples=50)
def test_neighbours_never_change_a_draw(sampling: Sampling, seed: int, position: int, neighbours: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(neighbours + 1, 300, generator=generator) * 3
    mine = SamplingSpec(seed=seed, temperature=0.9)
    others = [SamplingSpec(seed=n, top_k=5 * (n % 2), temperature=0.5 + n, top_p=0.7) for n in range(neighbours)]
    alone = sampling.each(logits[:1], [mine], position=position)[0]
    mixed = sampling.each(logits, [mine, *others], position=position)[0]
    last = sampling.each(logits.flip(0), [*others, mine], position=position)[-1]
    assert isinstance(alone, Sampled)
    assert isinstance(mixed, Sampled)
    assert isinstance(last, Sampled)
    assert alone.token_id == mixed.token_id == last.token_id


def test_seed_choice_and_position_each_change_the_numbers() -> None:
    numbers = uniform(keys([1, 2, 1, 1, 1 << 32], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0])[:, None, :], torch.arange(50))
    assert len({tuple(row.tolist()) for row in numbers}) == 5


def test_numbers_are_uniform_and_strictly_between_0_and_1() -> None:
    numbers = uniform(keys([3] * 200, [0] * 200, list(range(200)))[:, None, :], torch.arange(500)).flatten()
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = numbers.histc(50, 0, 1)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_squared < 100  # 49 degrees of freedom: 1e-5 of all seeds exceed it


def test_neighbouring_positions_and_ids_are_uncorrelated() -> None:
    numbers = uniform(keys([3] * 300, [0] * 300, list(range(300)))[:, None, :], torch.arange(300))
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 0.02


def test_the_documented_hash_is_the_one_computed() -> None:
    # A GPU kernel has to give these very numbers.
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD % 2**32
        x ^= x >> 15
        x = x * 0x735A2D97 % 2**32
        return x ^ x >> 15

    seed, choice, position, token_id = 0x0123456789ABCDEF, 3, 17, 4242
    a = mix((seed % 2**32) ^ 0x243F6A88)
    d = mix((position + mix((choice + mix(((seed >> 32) + a) % 2**32)) % 2**32)) % 2**32)
    k0, k1 = d, mix((d + a + 0x85A308D3) % 2**32)
    expected = ((mix(mix((token_id * 0x9E3779B1 + k0) % 2**32) ^ k1) >> 9) + 0.5) / 2**23
    row_keys = keys([seed], [choice], [position])
    assert row_keys.tolist() == [[k0, k1]]
    assert uniform(row_keys, torch.tensor([token_id])).item() == expected


def test_ids_without_weight_are_never_drawn() -> None:
    weights = torch.zeros(500, 40)
    weights[:, 7], weights[:, 9] = 1.0, 1e-6
    drawn = draw(weights, keys(list(range(500)), [0] * 500, [0] * 500))
    assert set(drawn.tolist()) <= {7, 9}


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 0.0])
def test_tiny_temperatures_are_greedy_and_do_not_overflow(sampling: Sampling, temperature: float) -> None:
    logits = [1.0, 3.0, 3.001, -200.0, 88.0, 87.9]
    for seed in range(20):
        assert sampling.token(logits, SamplingSpec(seed=seed, temperature=temperature)) == 4
