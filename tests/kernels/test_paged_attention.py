"""Paged attention against attention written out in full, for steps that mix prefills, chunks and decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_write import kv_write
from kernels.paged_attention import Span, paged_attention, plan_attention

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS = 4, 64


def full_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The last rows of a sequence: query (rows, heads, dim) over all its keys (known, kv_heads, dim)."""
    rows, heads, head_dim = query.shape
    known = len(keys)
    keys, values = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    before = torch.arange(known - rows, known)[:, None] - torch.arange(known)[None, :]
    unseen = (before < 0) | (before >= (window or known))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), values)


def check(lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int = 8, **scores: Any) -> None:
    """Runs one step over sequences of (cached, new) positions, whose blocks are scattered and hold NaN elsewhere."""
    torch.manual_seed(1)
    free = torch.randperm(BLOCKS).tolist()
    key_cache, value_cache = torch.full((2, BLOCKS, BLOCK_SIZE, kv_heads, head_dim), float("nan"))
    spans, step, whole = [], [], []
    for start, length in lengths:
        table = [free.pop() for _ in range(-(-(start + length) // BLOCK_SIZE))]
        key_cache[table] = value_cache[table] = 0  # the engine clears what a sequence begins
        keys, values = torch.randn(2, start + length, kv_heads, head_dim)
        if start:
            slots = plan_attention([Span(0, start, table)], BLOCK_SIZE, CPU).slots
            kv_write(keys[:start], values[:start], key_cache, value_cache, slots)
        spans.append(Span(start, length, table))
        step.append((keys[start:], values[start:]))
        whole.append((keys, values))
    query = torch.randn(sum(length for _, length in lengths), heads, head_dim)
    plan = plan_attention(spans, BLOCK_SIZE, CPU)
    keys, values = (torch.cat([pair[part] for pair in step]) for part in (0, 1))
    kv_write(keys, values, key_cache, value_cache, plan.slots)
    got = paged_attention(query, keys, values, key_cache, value_cache, plan, **scores)
    row = 0
    for (_, length), pair in zip(lengths, whole, strict=True):
        torch.testing.assert_close(got[row : row + length], full_attention(query[row : row + length], *pair, **scores))
        row += length


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(0, 9)],
        [(9, 1)],
        [(3, 1), (4, 1), (5, 1)],
        [(4, 4), (5, 6), (8, 1)],
        [(0, 5), (7, 1), (6, 3), (0, 1), (15, 1)],
    ],
)
def test_equals_attention_in_full(lengths: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    check(lengths, heads, kv_heads)


MIXED = [(0, 9), (7, 1), (6, 3), (0, 1), (15, 1)]


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    check(MIXED, heads=4, kv_heads=2, window=window)


@pytest.mark.parametrize("window", [None, 5])
def test_softcap_bounds_the_scores(window: int | None) -> None:
    check(MIXED, heads=4, kv_heads=2, scale=1.7, softcap=0.8, window=window)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=6))
@settings(max_examples=40)
def test_any_mix_equals_attention_in_full(lengths: list[tuple[int, int]]) -> None:
    check(lengths, heads=4, kv_heads=2)


def test_decodes_of_very_different_lengths_are_grouped_apart() -> None:
    # One group would pad 31 short sequences up to a long one.
    tables = [range(200)] + [range(2)] * 31
    spans = [Span(start, 1, table) for start, table in zip([799] + [5] * 31, tables, strict=True)]
    plan = plan_attention(spans, BLOCK_SIZE, CPU)
    assert [group.blocks.shape for group in plan.decodes] == [(1, 200), (31, 2)]


def test_decodes_of_similar_lengths_share_a_group() -> None:
    spans = [Span(4 * n, 1, range(n + 1)) for n in range(8)]
    plan = plan_attention(spans, BLOCK_SIZE, CPU)
    assert [group.blocks.shape for group in plan.decodes] == [(8, 8)]


@pytest.mark.parametrize("scores", [{"window": 0}, {"softcap": 0.0}])
def test_senseless_scores_are_refused(scores: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive or None"):
        check([(0, 1)], heads=1, kv_heads=1, **scores)


def test_heads_that_do_not_divide_are_refused() -> None:
    plan = plan_attention([Span(0, 1, [0])], BLOCK_SIZE, CPU)
    cache = torch.zeros(1, BLOCK_SIZE, 2, 8)
    with pytest.raises(ValueError, match="doesn't fit"):
        paged_attention(torch.ones(1, 3, 8), torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache, cache, plan)
