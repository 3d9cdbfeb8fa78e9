"""The draw in numpy is the one that PyTorch's reference defines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.sampling.draw import HEAD_WEIGHT as HEAD_WEIGHT_REFERENCE
from kernels.sampling.host import HEAD_WEIGHT, draw_row, row_key, uniform
from kernels.sampling.randomness import keys
from kernels.sampling.randomness import uniform as uniform_reference
from kernels.sampling.reference import draw_reference

ROWS, VOCAB_SIZE = 60, 3000


def test_random_numbers_are_the_same_to_the_bit() -> None:
    ids = np.array([0, 1, 4242, 2**31, 2**32 - 1], dtype=np.uint32)
    for seed, choice, position in [(0, 0, 0), (0x0123456789ABCDEF, 3, 17), (2**64 - 1, 2**31, 2**20), (-5, 1, 2)]:
        key = row_key(seed, choice, position)
        expected = keys([seed], [choice], [position])
        assert list(key) == expected[0].tolist()
        numbers = uniform_reference(expected, torch.from_numpy(ids.astype(np.int64)))
        assert uniform(key, ids).tolist() == numbers.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 5.0},
        {"top_k": 7},
        {"top_k": 2500, "temperature": 3.0},
        {"top_p": 0.9},
        {"top_p": 0.99, "temperature": 5.0},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.02, "temperature": 2.0},
        {"top_k": 2000, "top_p": 0.999, "min_p": 1e-5, "temperature": 4.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.02, 3.0])
def test_ids_are_those_of_the_reference(options: dict[str, float], spread: float) -> None:
    assert HEAD_WEIGHT == HEAD_WEIGHT_REFERENCE
    generator = np.random.default_rng(11)
    logits = (spread * generator.standard_normal((ROWS, VOCAB_SIZE))).astype(np.float32)
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    columns = {name: torch.full((ROWS,), value) for name, value in chosen.items()}
    best = torch.from_numpy(logits.max(1))
    row_keys = keys(range(ROWS), [1] * ROWS, [2] * ROWS)
    expected = draw_reference(torch.from_numpy(logits.copy()), best, **columns, row_keys=row_keys)
    drawn = [draw_row(row.copy(), row_key(seed, 1, 2), **chosen) for seed, row in enumerate(logits)]
    assert drawn == expected.tolist()
    assert len(set(drawn)) > 1
