"""The step library's attention, in every instruction set that is here, against attention written out in full."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.cpu import Format, load_library
from kernels.cpu.library import CAttentionSizes, check
from tests.kernels.cpu.instruction_sets import SETS
from tests.kernels.test_paged_attention import full_attention
from tests.step_library import needs_step_library

pytestmark = [needs_step_library, pytest.mark.parametrize("kernels", SETS)]

SIZES = [field[0] for field in CAttentionSizes._fields_]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`rows` positions at the end of `known` attend."""

    known: int
    rows: int
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


CASES = {
    "the first token": Case(known=1, rows=1),
    "one token behind many": Case(known=1337, rows=1),
    "a whole prompt": Case(known=75, rows=75),
    "a chunk behind a prefix": Case(known=300, rows=53),
    "one row of all positions in a block": Case(known=64, rows=1),
    "three queries share a key": Case(known=130, rows=20, heads=9, kv_heads=3),
    "all queries share a key, one token": Case(known=97, rows=1, heads=8, kv_heads=1),
    "a window inside a block": Case(known=40, rows=40, window=5),
    "a window over blocks": Case(known=333, rows=60, window=100),
    "a window, one token": Case(known=333, rows=1, heads=9, kv_heads=3, window=64),
    "a window wider than all": Case(known=50, rows=50, window=1000),
    "capped scores": Case(known=140, rows=30, soft_cap=5.0),
    "capped scores in a window": Case(known=140, rows=1, heads=8, kv_heads=2, soft_cap=5.0, window=33),
    "odd head, odd blocks": Case(known=71, rows=13, heads=6, kv_heads=2, head_dim=42, block_size=3),
    "the widest head": Case(known=90, rows=7, heads=2, kv_heads=1, head_dim=256, block_size=32),
    "blocks longer than a chunk": Case(known=250, rows=9, block_size=100),
}


def tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(case.rows, case.heads, case.head_dim)
    keys, values = (torch.randn(case.known, case.kv_heads, case.head_dim) for _ in range(2))
    return query, keys, values


def attention(
    kernels: str, stored: Format, case: Case, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    fields = {name: getattr(case, name) for name in SIZES}
    out = torch.empty_like(query)
    pointers = [part.data_ptr() for part in (query, keys, values, out)]
    sizes = ctypes.byref(CAttentionSizes(**fields))
    check(load_library().tailrace_attention(kernels.encode(), stored, sizes, *pointers))
    return out


def reference(case: Case, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = {"scale": case.scale, "window": case.window or None, "softcap": case.soft_cap or None}
    return full_attention(query, keys, values, **scores)


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_pytorch(kernels: str, name: str) -> None:
    case = CASES[name]
    query, keys, values = tensors(case)
    expected = reference(case, query, keys, values)
    torch.testing.assert_close(
        attention(kernels, Format.FP32, case, query, keys, values), expected, rtol=1e-4, atol=1e-5
    )


def eight_bits(heads: torch.Tensor) -> torch.Tensor:
    """Multiples of a 127th of the largest magnitude of each token and head.

    With the library's own operations in fp32: others round a number on the edge between two to the other side, and so
    does `127 / largest`, which PyTorch computes as 127 times a reciprocal.
    """
    largest = heads.abs().amax(-1, keepdim=True)
    units = torch.full_like(largest, 127).div(largest)
    return (heads * units).round() * (largest / 127)


@pytest.mark.parametrize("name", CASES)
def test_int8_attention_is_that_of_rounded_keys_and_values(kernels: str, name: str) -> None:
    # Queries and weights keep 16 bits: what differs from the rounded keys and values is 2^-16 of the largest of each.
    case = CASES[name]
    query, keys, values = tensors(case)
    expected = reference(case, query, eight_bits(keys), eight_bits(values))
    torch.testing.assert_close(attention(kernels, Format.INT8, case, query, keys, values), expected, rtol=0, atol=5e-4)


def test_the_longest_block_adds_up_where_all_of_it_counts_alike(kernels: str) -> None:
    case = Case(known=512, rows=1, block_size=512)
    query, keys, values = torch.zeros(1, 4, 64), torch.randn(512, 4, 64), torch.ones(512, 4, 64)
    got = attention(kernels, Format.INT8, case, query, keys, values)
    torch.testing.assert_close(got, torch.ones_like(got), rtol=0, atol=1e-4)


@pytest.mark.parametrize("stored", [Format.FP32, Format.INT8])
def test_a_row_gets_the_same_bits_alone_and_in_a_chunk(kernels: str, stored: Format) -> None:
    case = Case(known=170, rows=40, heads=9, kv_heads=3, window=70)
    query, keys, values = tensors(case)
    together = attention(kernels, stored, case, query, keys, values)
    for row in (0, 17, 39):
        known = case.known - case.rows + row + 1
        alone = replace(case, known=known, rows=1)
        parts = (query[row : row + 1].clone(), keys[:known].clone(), values[:known].clone())
        got = attention(kernels, stored, alone, *parts)
        assert torch.equal(got[0], together[row])


@pytest.mark.parametrize("stored", [Format.BF16, Format.INT4])
def test_keys_and_values_have_no_other_format(kernels: str, stored: Format) -> None:
    case = Case(known=2, rows=1)
    with pytest.raises(ValueError, match="keys and values must be fp32 or int8"):
        attention(kernels, stored, case, *tensors(case))
