"""The sampling kernels against their definition in PyTorch: the same numbers, the same floors, the same ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.sampling.on_device import add_bias, best_of, draw_on_device, penalise
from kernels.sampling.options import Bias, DrawOptions, Penalties
from kernels.sampling.randomness import keys, uniform
from kernels.sampling.reference import draw_reference
from tests.kernels.accuracy import DTYPES, poisoned
from tests.kernels.exponentials_kernel import exponentials_kernel

VOCAB_SIZE = 333  # beyond one tile of 256 and no multiple of anything


def bits(words: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 words, as int32."""
    return (words - ((words >> 31) << 32)).to(torch.int32)


def draw_both(logits: torch.Tensor, *, seed: int = 1, capacity: int = 64, **options: float) -> tuple[Any, Any]:
    """Ids by the definition and by the kernels, every row with the same options and a key of its own."""
    rows, device = len(logits), logits.device
    row_keys = keys([seed] * rows, [0] * rows, range(rows))
    ones = torch.ones(rows, device=device)
    draws = DrawOptions(
        temperature=ones * options.get("temperature", 1.0),
        top_k=(ones * options.get("top_k", 0)).int(),
        top_p=ones * options.get("top_p", 1.0),
        min_p=ones * options.get("min_p", 0.0),
        keys=bits(row_keys).to(device),
    )
    nothing = torch.zeros(1, logits.shape[1], dtype=torch.int32, device=device)
    with poisoned():
        got = draw_on_device(logits, best_of(logits), draws, nothing, -ones.int(), truncates=True, capacity=capacity)
    columns = (draws.temperature, draws.top_k.long(), draws.top_p, draws.min_p, row_keys)
    expected = draw_reference(logits.cpu().clone(), logits.amax(1).cpu(), *(column.cpu() for column in columns))
    return got.tolist(), expected.tolist()


def test_the_kernels_random_numbers_are_those_of_the_definition(device: torch.device) -> None:
    (row_keys,) = keys([0xFEDCBA9876543210], [7], [123456])
    out = torch.empty(1024, device=device)
    exponentials_kernel[(1,)](out, *row_keys.tolist(), SIZE=1024)
    torch.testing.assert_close(out.cpu(), -uniform(row_keys, torch.arange(1024)).log(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 255, 5000])
def test_best_is_the_first_of_the_largest(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(3, columns, device=device).to(dtype)
    logits[0] = 2.0
    logits[1, columns // 2 :] = 9.0
    with poisoned():
        best = best_of(logits)
    assert best.logits.tolist() == logits.float().amax(1).tolist()
    assert best.ids.tolist() == logits.float().argmax(1).tolist()
    torch.testing.assert_close(best.log_totals, logits.float().logsumexp(1), rtol=1e-5, atol=1e-5)


def test_rows_that_are_no_distribution_are_told(device: torch.device) -> None:
    infinity = float("inf")
    rows = [[1.0, float("nan"), 2.0], [1.0, infinity, 0.0], [-infinity] * 3, [-infinity, 0.5, -infinity]]
    best = best_of(torch.tensor(rows, device=device)).logits.tolist()
    assert best[0] != best[0] and best[1] != best[1]
    assert best[2:] == [-infinity, 0.5]


MORE: list[dict[str, float]] = [
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 40, "temperature": 2.0},
    {"top_k": 200, "temperature": 5.0},
    {"top_p": 0.5},
    {"top_p": 0.9, "top_k": 20},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 9999},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_p": 0.95, "top_k": 30},
        {"top_p": 0.999, "temperature": 5.0},  # nearly flat: reaches beyond the candidates
        *(pytest.param(options, marks=pytest.mark.slow) for options in MORE),
    ],
    ids=str,
)
def test_ids_are_those_of_the_definition(options: dict[str, float], device: torch.device) -> None:
    got, expected = draw_both(torch.randn(2, VOCAB_SIZE, device=device) * 3, **options)
    assert got == expected


def test_the_tail_runs_as_one_candidate_and_then_within_itself(device: torch.device) -> None:
    # One id with half the weight; the rest share the other half, each far below the head's floor.
    logits = torch.full((6, 9000), -9.1, device=device)
    logits[:, 4321] = 0.0
    got, expected = draw_both(logits)
    assert got == expected
    assert any(token != 4321 for token in got)


def test_ties_at_the_floor_stay(device: torch.device) -> None:
    got, expected = draw_both(torch.zeros(4, 6, device=device), seed=3, top_k=2)
    assert got == expected
    assert not {0, 1}.issuperset(got)


def test_a_temperature_of_zero_is_greedy(device: torch.device) -> None:
    logits = torch.randn(4, VOCAB_SIZE, device=device)
    rows = torch.ones(4, device=device)
    options = DrawOptions(
        temperature=rows * 0,
        top_k=rows.int() * 5,
        top_p=rows * 0.5,
        min_p=rows * 0,
        keys=torch.zeros(4, 2, dtype=torch.int32, device=device),
    )
    counts = torch.zeros(2, VOCAB_SIZE, dtype=torch.int32, device=device)
    count_rows = torch.tensor([-1, 1, -1, 0], dtype=torch.int32, device=device)
    tokens = draw_on_device(logits, best_of(logits), options, counts, count_rows, truncates=True)
    assert tokens.tolist() == logits.argmax(1).tolist()
    assert counts.nonzero().tolist() == [[0, tokens[3].item()], [1, tokens[1].item()]]  # each in its own row, once


def test_penalties_masks_and_bias_change_their_own_rows(device: torch.device) -> None:
    logits = torch.randn(4, VOCAB_SIZE, device=device)
    counts = torch.zeros(2, VOCAB_SIZE, dtype=torch.int32, device=device)
    counts[1, 5], counts[1, 300], counts[1, 301] = 3, 1 << 30, (1 << 30) + 2
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool, device=device)
    allowed[[0, 31, 32, 332]] = True
    words = torch.zeros(1, 11 * 32, dtype=torch.int64, device=device)
    words[0, :VOCAB_SIZE] = allowed.long()
    masks = bits((words.view(1, 11, 32) << torch.arange(32, device=device)).sum(2))

    expected = logits.clone()
    x = expected[2, [5, 300, 301]]
    x = torch.where(x > 0, x / 1.5, x * 1.5)
    times = torch.tensor([3.0, 0, 2], device=device)
    expected[2, [5, 300, 301]] = x - 0.25 * times - 0.5 * (times > 0)
    expected[3, ~allowed] = float("-inf")
    expected[0, 7] += 2.5
    expected[2, 5] = float("-inf")

    factors = torch.ones(2, device=device)
    penalise(
        logits,
        Penalties(
            rows=torch.tensor([2, 3], dtype=torch.int32, device=device),
            counts=counts,
            count_rows=torch.tensor([1, -1], dtype=torch.int32, device=device),
            repetition=factors * 1.5,
            frequency=factors * 0.25,
            presence=factors * 0.5,
            masks=masks,
            mask_rows=torch.tensor([-1, 0], dtype=torch.int32, device=device),
        ),
    )
    places = torch.tensor([[0, 2], [7, 5]], dtype=torch.int32, device=device)
    add_bias(logits, Bias(places[0], places[1], torch.tensor([2.5, float("-inf")], device=device)))
    torch.testing.assert_close(logits, expected)
