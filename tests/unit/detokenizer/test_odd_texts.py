"""Adversarial outputs: four times as many tokens take about four times as long, and no more memory."""

from __future__ import annotations

import pytest

from bench.odd_texts import OddText, cpu_us, odd_texts, peak_bytes
from tests.unit.detokenizer.small_tokenizers import byte_level, vocabulary_of

SMALL, LARGE = 1_100, 4_400
LINEAR_AT_MOST = 2.5
"""Quadratic time would make a token four times as dear."""
FLAT_WITHIN = 1.1
"""The automaton of a thousand stops' letters is a megabyte, which is reached in any order."""
VOCABULARY = vocabulary_of(byte_level())
CASES = odd_texts(VOCABULARY, lambda text: byte_level().encode(text, add_special_tokens=False).ids)
EACH = pytest.mark.parametrize("odd", CASES, ids=[odd.name for odd in CASES])


@EACH
def test_a_token_costs_the_same_late_as_early(odd: OddText) -> None:
    """The quickest of several tries, taken in turn, so that a busy machine slows both sizes."""
    tries = [[cpu_us(VOCABULARY, odd, size) for size in (SMALL, LARGE)] for _ in range(3)]
    small, large = map(min, zip(*tries, strict=True))
    assert large < LINEAR_AT_MOST * small


@EACH
def test_memory_does_not_grow_with_the_length(odd: OddText) -> None:
    assert peak_bytes(VOCABULARY, odd, LARGE) < FLAT_WITHIN * peak_bytes(VOCABULARY, odd, SMALL) + 4096
