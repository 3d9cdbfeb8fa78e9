"""The Triton attention against attention written out in full in float64, in one launch for any mix of lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels.paged_attention import Span, paged_attention
from kernels.paged_attention.kernel import paged_attention_triton
from kernels.paged_attention.tables import Tables, choose_splits, plan_tables
from tests.kernels.accuracy import DTYPES, assert_close, poisoned
from tests.kernels.test_paged_attention import full_attention

BLOCKS = 64


@dataclass(frozen=True)
class Step:
    """A step's query and caches, and what it means in full: each sequence's rows over all its keys and values."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    spans: list[Span]
    whole: list[tuple[torch.Tensor, torch.Tensor]]

    def run(self, splits: int | None = None, **scores: Any) -> torch.Tensor:
        plan = plan_tables(self.spans, self.key_cache.shape[1], self.query.device)
        plan = plan if splits is None else replace(plan, splits=splits)
        step = self.query.new_empty(len(self.query), *self.key_cache.shape[2:])  # read from the caches, not from here
        caches = self.key_cache, self.value_cache
        with poisoned():
            return paged_attention(self.query, step, step, *caches, plan, **scores, compute=paged_attention_triton)

    def expected(self, **scores: Any) -> torch.Tensor:
        ends = torch.tensor([0, *[span.length for span in self.spans]]).cumsum(0).tolist()
        parts = [
            full_attention(self.query[first:end].double(), keys, values, **scores)
            for (first, end), (keys, values) in zip(pairwise(ends), self.whole, strict=True)
        ]
        return torch.cat(parts) if parts else torch.empty_like(self.query, dtype=torch.float64)


def make_step(
    lengths: list[tuple[int, int]],
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 4,
) -> Step:
    """Sequences of (cached, new) positions in scattered blocks; whatever else the caches hold is NaN."""
    free = torch.randperm(BLOCKS).tolist()
    shape = BLOCKS, block_size, kv_heads, head_dim
    key_cache, value_cache = torch.full((2, *shape), float("nan"), device=device).to(cache_dtype or dtype)
    spans, whole = [], []
    for start, length in lengths:
        known = start + length
        table = [free.pop() for _ in range(-(-known // block_size))]
        spans.append(Span(start, length, table))
        pair = []
        for cache in (key_cache, value_cache):
            rows = torch.randn(known, kv_heads, head_dim, device=device).to(cache.dtype)
            for position in range(known):
                cache[table[position // block_size], position % block_size] = rows[position]
            pair.append(rows.double())
        whole.append((pair[0], pair[1]))
    query = torch.randn(sum(length for _, length in lengths), heads, head_dim, dtype=dtype, device=device)
    return Step(query, key_cache, value_cache, spans, whole)


DECODES = [(0, 1), (1, 1), (36, 1), (7, 1)]
PREFILLS = [(0, 2), (0, 37), (5, 4), (31, 9)]
MIXED = [(0, 5), (7, 1), (6, 3), (0, 1), (40, 1), (0, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[], DECODES, PREFILLS, MIXED], ids=["empty", "decodes", "prefills", "mixed"])
def test_equals_attention_in_full(lengths: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
    step = make_step(lengths, device, dtype=dtype)
    assert_close(step.run(), step.expected(), roundings=4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(1, 1, 64, 16), (4, 4, 80, 16), (6, 2, 96, 8), (3, 1, 128, 5), (20, 1, 64, 16), (2, 1, 192, 16), (2, 2, 256, 16)],
)
def test_any_grouping_of_heads_and_any_head_size(
    heads: int, kv_heads: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    step = make_step([(21, 1), (0, 6), (18, 3)], device, dtype=torch.float16, **shape)
    assert_close(step.run(), step.expected(), roundings=4)


@pytest.mark.parametrize("window", [1, 7, 32, 100])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_windows_and_soft_caps(window: int, softcap: float | None, device: torch.device) -> None:
    step = make_step(MIXED, device)
    scores = {"window": window, "softcap": softcap, "scale": 0.9}
    assert_close(step.run(splits=2, **scores), step.expected(**scores), roundings=8)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_parts_of_a_long_sequence_join_to_the_whole(splits: int, device: torch.device) -> None:
    # Eight parts of one position leave seven empty.
    step = make_step([(0, 1), (700, 1), (130, 1)], device, head_dim=64, block_size=16)
    assert_close(step.run(splits=splits), step.expected(), roundings=4)


def test_a_long_prompt_in_chunks_of_one_launch(device: torch.device) -> None:
    step = make_step([(300, 70), (0, 130)], device, heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    assert_close(step.run(), step.expected(), roundings=4)


def test_an_fp8_cache_is_read_as_what_it_holds(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("fp8 starts with sm_89")
    step = make_step(MIXED, device, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    assert_close(step.run(), step.expected(), roundings=4)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_sequence_without_positions_gives_zeros(splits: int, device: torch.device) -> None:
    # A row that only fills a batch up to its bucket.
    step = make_step([(3, 1), (5, 1)], device)
    plan = plan_tables(step.spans, 4, device)
    assert plan.decodes is not None
    lengths = torch.tensor([4, 0], dtype=torch.int32, device=device)
    decodes = Tables(plan.decodes.first_rows, lengths, plan.decodes.blocks)
    keys = step.query.new_empty(2, 2, 16)
    with poisoned():
        got = paged_attention(
            step.query,
            keys,
            keys,
            step.key_cache,
            step.value_cache,
            replace(plan, decodes=decodes, splits=splits),
            compute=paged_attention_triton,
        )
    assert_close(got[:1], step.expected()[:1], roundings=4)
    assert (got[1] == 0).all()


def test_few_long_sequences_are_split_and_many_or_short_ones_are_not() -> None:
    cpu = torch.device("cpu")  # where 8 programs are said to fill the device
    assert choose_splits(1, 4096, cpu) == 8
    assert choose_splits(3, 4096, cpu) == 4
    assert choose_splits(1, 600, cpu) == 2
    assert choose_splits(1, 255, cpu) == choose_splits(8, 100_000, cpu) == choose_splits(0, 1, cpu) == 1
