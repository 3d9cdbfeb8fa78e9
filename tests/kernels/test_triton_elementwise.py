"""The element-wise Triton kernels against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.add_rms_norm.kernel import add_rms_norm_triton
from kernels.gelu_mul import gelu_mul
from kernels.gelu_mul.kernel import gelu_mul_triton
from kernels.rms_norm import rms_norm
from kernels.rms_norm.kernel import COLUMNS_MAX, rms_norm_triton
from kernels.rotary_kv_write import rotary_kv_write
from kernels.rotary_kv_write.kernel import rotary_kv_write_triton
from kernels.rotary_kv_write.reference import rotary_kv_write_reference
from kernels.silu_mul import silu_mul
from kernels.silu_mul.kernel import silu_mul_triton
from tests.kernels.accuracy import DTYPES, assert_close, poisoned

SHAPES = [(0, 8), (1, 1), (1, 64), (3, 33), (5, 1000), (2, 2049)]
EPS = 1e-5

all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
odd_shapes = pytest.mark.parametrize(("rows", "columns"), SHAPES)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@all_dtypes
@odd_shapes
def test_rms_norm(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(rows, columns + 3, dtype=dtype, device=device)[:, 1 : columns + 1]  # rows don't lie side by side
    weight = torch.randn(columns, dtype=dtype, device=device)
    with poisoned():
        got = rms_norm(x, weight, EPS, compute=rms_norm_triton)
    assert_close(got, normed(x.double(), weight), roundings=2)


@all_dtypes
def test_norms_by_a_weight_of_32_bits_round_once(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, 3, 33, dtype=dtype, device=device)
    weight = torch.randn(33, device=device)
    assert_close(rms_norm(x, weight, EPS, compute=rms_norm_triton), normed(x.double(), weight), roundings=1)
    got, total = add_rms_norm(x, residual, weight, EPS, compute=add_rms_norm_triton)
    assert_close(got, normed(total.double(), weight), roundings=1)


def test_rms_norm_of_zeros_and_of_huge_rows(device: torch.device) -> None:
    x = torch.tensor([[0.0] * 7, [3e4] * 7], dtype=torch.float16, device=device)  # whose squares fp16 can't hold
    with poisoned():
        got = rms_norm(x, torch.ones(7, dtype=torch.float16, device=device), EPS, compute=rms_norm_triton)
    assert got.tolist() == [[0.0] * 7, [1.0] * 7]


def test_rows_beyond_the_kernels_width_are_refused(device: torch.device) -> None:
    x = torch.zeros(1, COLUMNS_MAX + 1, device=device)
    with pytest.raises(ValueError, match="up to 32768"):
        rms_norm(x, x[0], EPS, compute=rms_norm_triton)


@all_dtypes
@odd_shapes
def test_add_rms_norm(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, rows, columns, dtype=dtype, device=device)
    weight = torch.randn(columns, dtype=dtype, device=device)
    with poisoned():
        got, total = add_rms_norm(x, residual, weight, EPS, compute=add_rms_norm_triton)
    assert_close(total, x.double() + residual.double(), roundings=1)
    assert_close(got, normed(total.double(), weight), roundings=2)


@all_dtypes
@odd_shapes
def test_silu_mul(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    gate, up = torch.randn(2, rows, columns, dtype=dtype, device=device) * 4
    with poisoned():
        got = silu_mul(torch.cat((gate, up), 1), compute=silu_mul_triton)
    assert_close(got, gate.double() / (1 + (-gate.double()).exp()) * up.double(), roundings=3)


@all_dtypes
@odd_shapes
def test_gelu_mul(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    gate, up = torch.randn(2, rows, columns, dtype=dtype, device=device) * 2
    with poisoned():
        got = gelu_mul(torch.cat((gate, up), 1), compute=gelu_mul_triton)
    wide = gate.double()
    gelu = wide / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert_close(got, gelu * up.double(), roundings=4)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, which the interpreter computes with
def test_gates_far_from_zero_neither_overflow_nor_leak(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=device)
    for op, kernel in ((silu_mul, silu_mul_triton), (gelu_mul, gelu_mul_triton)):
        assert op(gate_up, compute=kernel).tolist() == [[0.0, 3e4]]


@all_dtypes
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim"),
    [(0, 2, 1, 8), (1, 1, 1, 2), (3, 4, 4, 10), (5, 9, 3, 64), (2, 71, 1, 96)],
)
def test_rotary_kv_write(
    rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    joined = torch.randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    query, keys, values = joined[:, :heads], joined[:, heads:-kv_heads], joined[:, -kv_heads:]
    cos, sin = torch.randn(2, rows, head_dim, dtype=dtype, device=device)
    key_cache, value_cache = torch.full((2, 4, 3, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    slots = torch.randperm(12, device=device)[:rows]
    if rows > 2:
        slots[1] = -1  # a row that only pads the batch
    with poisoned():
        turned, turned_keys = rotary_kv_write(
            query, keys, values, cos, sin, key_cache, value_cache, slots, compute=rotary_kv_write_triton
        )
    for got, x in ((turned, query.double()), (turned_keys, keys.double())):
        terms = x * cos.double()[:, None], x.roll(head_dim // 2, dims=-1) * sin.double()[:, None]
        assert_close(got, terms[0] + terms[1], roundings=2, size=terms[0].abs())
    stored = slots[slots >= 0]
    for cache, written in ((key_cache.flatten(0, 1), turned_keys), (value_cache.flatten(0, 1), values)):
        assert torch.equal(cache[stored], written[slots >= 0])
        untouched = torch.ones(12, dtype=torch.bool, device=device)
        untouched[stored] = False
        assert (cache[untouched] == 7).all()


def test_an_fp8_cache_holds_what_fp8_can_say(device: torch.device) -> None:
    # Only values that e4m3 holds exactly: the interpreter loses the carry when it rounds to it.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("fp8 starts with sm_89")
    keys = torch.tensor([0.0, 1.0, -1.5, 0.875, 240.0, 448.0, -0.015625, 2.0], device=device).to(torch.bfloat16)
    caches = torch.zeros(2, 1, 2, 1, 8, device=device).to(torch.float8_e4m3fn)
    keys, one = keys.view(1, 1, 8), torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    slot = torch.tensor([1], device=device)
    rotary_kv_write(keys, keys, -keys, one, 0 * one, caches[0], caches[1], slot, compute=rotary_kv_write_triton)
    assert torch.equal(caches[0, 0, 1].float(), keys[0].float())
    assert torch.equal(caches[1, 0, 1].float(), -keys[0].float())
    assert (caches[:, 0, 0].float() == 0).all()


@pytest.mark.parametrize("write", [rotary_kv_write_triton, rotary_kv_write_reference])
def test_what_is_too_large_for_fp8_becomes_its_largest(
    write: Callable[..., tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("fp8 starts with sm_89")
    values = torch.tensor([470.0, -1000.0, float("inf"), 3e38, 0.5, 1.0, -449.0, 448.0], device=device)
    caches = torch.zeros(2, 1, 1, 1, 8, device=device).to(torch.float8_e4m3fn)
    one, slot = torch.ones(1, 8, device=device), torch.tensor([0], device=device)
    keys = 500 * one.view(1, 1, 8)
    rotary_kv_write(keys, keys, values.view(1, 1, 8), one, 0 * one, caches[0], caches[1], slot, compute=write)
    assert caches[0].flatten().tolist() == [448.0] * 8
    assert caches[1].flatten().tolist() == [448.0, -448.0, 448.0, 448.0, 0.5, 1.0, -448.0, 448.0]
