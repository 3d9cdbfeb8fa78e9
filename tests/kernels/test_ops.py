"""Each operation against the formula in its docstring, or against PyTorch's own, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.add_rms_norm import add_rms_norm
from kernels.gelu_mul import gelu_mul
from kernels.kv_write import kv_write
from kernels.linear import make_linear
from kernels.ops import reference_ops
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary_kv_write import rotary_kv_write
from kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (3, 33), (17, 576)])
def test_rms_norm_equals_the_llama_models(rows: int, hidden: int, dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(hidden, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(rows, hidden, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_by_a_weight_of_32_bits_rounds_once_as_the_gemma_models_do(dtype: torch.dtype) -> None:
    norm = Gemma3RMSNorm(32, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 32, dtype=dtype)
    assert torch.equal(rms_norm(x, 1.0 + norm.weight.float(), 1e-6), norm(x))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_gives_the_norm_of_the_sum_and_the_sum(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 24, dtype=dtype), torch.randn(5, 24, dtype=dtype), torch.randn(24, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_equals_the_llama_models(dtype: torch.dtype) -> None:
    rows, heads, head_dim = 7, 3, 10
    x, angles = torch.randn(rows, heads, head_dim, dtype=dtype), torch.rand(rows, head_dim // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    twice = (torch.cat((cos, cos), 1)[None], torch.cat((sin, sin), 1)[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *twice)
    got = rotary(x, torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))
    rounding = 8 * torch.finfo(dtype).eps  # theirs rounds both products before the sum, ours may not
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=0, atol=rounding)


def test_rotary_keeps_lengths_and_angle_zero_changes_nothing() -> None:
    x, angles = torch.randn(4, 2, 8), torch.rand(4, 4)
    turned = rotary(x, torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotary(x, torch.ones(4, 8), torch.zeros(4, 8)), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (6, 35)])
def test_silu_mul_gates_the_second_half(rows: int, inner: int, dtype: torch.dtype) -> None:
    gate, up = torch.randn(rows, inner, dtype=dtype), torch.randn(rows, inner, dtype=dtype)
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), 1)), functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul_gates_the_second_half(dtype: torch.dtype) -> None:
    gate, up = torch.randn(6, 35, dtype=dtype), torch.randn(6, 35, dtype=dtype)
    wide = gate.double()
    expected = wide / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))) * up.double()
    torch.testing.assert_close(gelu_mul(torch.cat((gate, up), 1)).double(), expected, rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_a_product_with_the_transposed_weight(biased: bool) -> None:
    weight, x = torch.randn(5, 3), torch.randn(4, 3)
    bias = torch.randn(5) if biased else None
    expected = x @ weight.T + (bias if bias is not None else 0)
    torch.testing.assert_close(make_linear(weight, bias)(x), expected)


def test_kv_write_fills_its_slots_and_no_other() -> None:
    key_cache, value_cache = torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 5)
    keys, values, slots = torch.randn(3, 2, 5), torch.randn(3, 2, 5), torch.tensor([9, 0, 6])
    kv_write(keys, values, key_cache, value_cache, slots)
    for cache, written in ((key_cache, keys), (value_cache, values)):
        for row, slot in enumerate(slots.tolist()):
            assert torch.equal(cache[slot // 4, slot % 4], written[row])
        assert cache.flatten(2).any(2).sum() == 3


def test_rotary_kv_write_turns_both_and_writes_turned_keys() -> None:
    query, keys, values = torch.randn(2, 4, 6), torch.randn(2, 2, 6), torch.randn(2, 2, 6)
    cos, sin, slots = torch.randn(2, 6), torch.randn(2, 6), torch.tensor([5, 2])
    key_cache, value_cache = torch.zeros(2, 2, 4, 2, 6)
    turned = rotary_kv_write(query, keys, values, cos, sin, key_cache, value_cache, slots)
    torch.testing.assert_close(turned, (rotary(query, cos, sin), rotary(keys, cos, sin)))
    assert torch.equal(key_cache.flatten(0, 1)[slots], turned[1])
    assert torch.equal(value_cache.flatten(0, 1)[slots], values)


MISFITS: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: rms_norm(torch.ones(2, 4), torch.ones(3), 1e-5),
    "add_rms_norm": lambda: add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), 1e-5),
    "rotary": lambda: rotary(torch.ones(2, 1, 4), torch.ones(2, 2), torch.ones(2, 2)),
    "silu_mul": lambda: silu_mul(torch.ones(2, 3)),
    "gelu_mul": lambda: gelu_mul(torch.ones(2, 3)),
    "rotary_kv_write": lambda: rotary_kv_write(*torch.ones(3, 2, 1, 4), *torch.ones(5, 2, 4)),
    "linear": lambda: make_linear(torch.ones(2, 3), torch.ones(3)),
    "kv_write": lambda: kv_write(
        torch.ones(2, 1, 4), torch.ones(2, 1, 4), torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4), torch.arange(3)
    ),
}


@pytest.mark.parametrize("op", MISFITS)
def test_shapes_that_do_not_fit_are_refused(op: str) -> None:
    with pytest.raises(ValueError):
        MISFITS[op]()


def test_the_reference_operations_name_themselves() -> None:
    assert reference_ops().name == "torch"
