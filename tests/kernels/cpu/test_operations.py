"""The step library's operations, in every instruction set that is here, against the references in plain PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.cpu import Activation, Format, load_library
from kernels.cpu.library import check
from kernels.gelu_mul.reference import gelu_mul_reference
from kernels.rms_norm.reference import rms_norm_reference
from kernels.silu_mul.reference import silu_mul_reference
from tests.kernels.cpu.instruction_sets import SETS
from tests.step_library import needs_step_library

GROUP = 32

pytestmark = [needs_step_library, pytest.mark.parametrize("kernels", SETS)]


def pointer(x: torch.Tensor) -> int:
    assert x.is_contiguous()
    return x.data_ptr()


def product(kernels: str, stored: Format, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (rows, inputs), outputs = x.shape, len(weight)
    out = torch.empty(rows, outputs)
    arguments = (pointer(x), rows, pointer(weight), inputs, outputs, pointer(out), 1)
    check(load_library().tailrace_product(kernels.encode(), stored, *arguments))
    return out


SHAPES = [(1, 32, 16), (2, 33, 5), (5, 7, 70), (6, 576, 40), (13, 200, 96), (50, 48, 31)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_the_exact_product_is_that_of_pytorch(kernels: str, rows: int, inputs: int, outputs: int) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(product(kernels, Format.FP32, x, weight), expected, rtol=1e-5, atol=1e-4)


def quantised(weight: torch.Tensor) -> torch.Tensor:
    """What int8 makes of a weight: per output and group of 32 inputs, multiples of a bf16 scale, rounded up to it."""
    outputs, inputs = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    exact = groups.abs().amax(2, keepdim=True) / 127
    scale = exact.bfloat16().float()
    scale = torch.where(scale < exact, (scale.view(torch.int32) + 0x10000).view(torch.float32), scale)
    rounded = (groups / scale.where(scale > 0, 1.0)).round().clamp(-127, 127) * scale
    return rounded.view(outputs, -1)[:, :inputs]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_the_int8_product_is_that_of_the_rounded_weights(kernels: str, rows: int, inputs: int, outputs: int) -> None:
    # Inputs keep 16 bits, so what differs from the product with rounded weights is 2^-16 of a group's largest input.
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    expected = (x.double() @ quantised(weight).double().T).float()
    torch.testing.assert_close(product(kernels, Format.INT8, x, weight), expected, rtol=1e-4, atol=5e-3)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_the_bf16_product_has_the_bits_of_the_exact_one(kernels: str, rows: int, inputs: int, outputs: int) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    rounded = product(kernels, Format.FP32, x, weight.bfloat16().float())
    assert torch.equal(product(kernels, Format.BF16, x, weight), rounded)


def packed(kernels: str, stored: Format, weight: torch.Tensor) -> torch.Tensor:
    """What a format makes of a weight: its product with the identity, each of whose rows is exact in 8 bits.

    Packed once more it may become another: int4 looks for the best of several units.
    """
    return product(kernels, stored, torch.eye(weight.shape[1]), weight).T.contiguous()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_the_int4_product_is_that_of_the_packed_weights(kernels: str, rows: int, inputs: int, outputs: int) -> None:
    # Inputs have 8 bits, from the least to the largest of a group: half of a 254th of that is the most an input is off.
    x, unpacked = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    weight = packed(kernels, Format.INT4, unpacked)
    groups = torch.nn.functional.pad(x, (0, -inputs % GROUP)).view(rows, -1, GROUP)
    half = (groups.amax(2) - groups.amin(2)) / 254 / 2
    bound = half.repeat_interleave(GROUP, 1)[:, :inputs] @ weight.abs().T
    off = product(kernels, Format.INT4, x, unpacked) - (x.double() @ weight.double().T).float()
    assert (off.abs() <= 1.01 * bound + 1e-5).all()
    assert off.norm() < 0.4 * bound.norm(), "errors have either sign, and don't add up"


def test_int4_inputs_take_no_harm_from_a_lone_large_one(kernels: str) -> None:
    # Beside 1 on one side alone, others keep twice as many steps as beside 1 and -1.
    x, unpacked = torch.rand(16, 32) * 0.01, torch.randn(40, 32)
    weight = packed(kernels, Format.INT4, unpacked)
    x[:, 5] = 1
    lone = (product(kernels, Format.INT4, x, unpacked) - x @ weight.T).norm()
    x[:, 6] = -1
    both = (product(kernels, Format.INT4, x, unpacked) - x @ weight.T).norm()
    assert lone < 0.7 * both


def rounded_evenly(weight: torch.Tensor) -> torch.Tensor:
    """16 equally distant values from the least to the largest of each group of 32."""
    groups = weight.view(len(weight), -1, GROUP)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (most - least) / 15
    return (((groups - least) / step).round() * step + least).view_as(weight)


def test_int4_is_closer_than_even_rounding(kernels: str) -> None:
    weight = torch.randn(64, 320) + 0.3
    ours, even = ((got - weight).norm() for got in (packed(kernels, Format.INT4, weight), rounded_evenly(weight)))
    assert ours < 0.97 * even


def rounded_around_zero(weight: torch.Tensor) -> torch.Tensor:
    """Q4_0: multiples from -8 to 7 of an eighth of the weight with the largest magnitude, per group of 32."""
    groups = weight.view(len(weight), -1, GROUP)
    unit = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    return ((groups / unit).round().clamp(-8, 7) * unit).view_as(weight)


@pytest.mark.parametrize("rounded", [rounded_evenly, rounded_around_zero])
def test_weights_that_came_from_4_bits_stay_what_they_were(
    kernels: str, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    weight = rounded(torch.randn(64, 320) + 0.3)
    assert (packed(kernels, Format.INT4, weight) - weight).norm() < 0.006 * weight.norm()


@pytest.mark.parametrize("stored", Format)
def test_weights_of_one_value_are_found_again(kernels: str, stored: Format) -> None:
    weight = torch.tensor([[0.0], [1e-20], [-0.3], [7e4]]).expand(4, 64).contiguous()
    torch.testing.assert_close(packed(kernels, stored, weight), weight, rtol=2**-8, atol=1e-20)


@pytest.mark.parametrize("stored", Format)
@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_broken_weight_breaks_its_own_column_alone(kernels: str, stored: Format, broken: float) -> None:
    x, weight = torch.randn(3, 64), torch.randn(16, 64)
    whole = product(kernels, stored, x, weight)
    weight[5, 40] = broken
    got = product(kernels, stored, x, weight)
    assert not got[:, 5].isfinite().any()
    assert torch.equal(got[:, torch.arange(16) != 5], whole[:, torch.arange(16) != 5])


@pytest.mark.parametrize("stored", Format)
def test_a_row_gives_the_same_bits_beside_any_others(kernels: str, stored: Format) -> None:
    x, weight = torch.randn(17, 96), torch.randn(40, 96)
    together = product(kernels, stored, x, weight)
    for row in range(17):
        assert torch.equal(product(kernels, stored, x[row : row + 1].clone(), weight)[0], together[row])


@pytest.mark.parametrize("stored", Format)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_number_breaks_its_own_row_alone(kernels: str, stored: Format, broken: float) -> None:
    x, weight = torch.randn(7, 64), torch.randn(16, 64)
    whole = product(kernels, stored, x, weight)
    x[3, 40] = broken
    got = product(kernels, stored, x, weight)
    assert not got[3].isfinite().any()
    assert torch.equal(got[torch.arange(7) != 3], whole[torch.arange(7) != 3])


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 33), (2, 576)])
def test_rms_norm_is_the_references(kernels: str, rows: int, columns: int) -> None:
    x, weight, out = torch.randn(rows, columns) * 3, torch.randn(columns), torch.empty(rows, columns)
    arguments = (pointer(x), pointer(weight), 1e-5, rows, columns, pointer(out))
    check(load_library().tailrace_rms_norm(kernels.encode(), *arguments))
    torch.testing.assert_close(out, rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("count", [1, 40, 333])
def test_the_gate_is_the_references(kernels: str, activation: Activation, count: int) -> None:
    gate, up, out = torch.randn(count) * 20, torch.randn(count), torch.empty(count)
    gate[0] = -200.0
    arguments = (activation, pointer(gate), pointer(up), count, pointer(out))
    check(load_library().tailrace_gate(kernels.encode(), *arguments))
    reference = silu_mul_reference if activation is Activation.SILU else gelu_mul_reference
    torch.testing.assert_close(out, reference(torch.cat((gate, up))[None])[0], rtol=1e-5, atol=1e-6)


def largest(kernels: str, x: torch.Tensor) -> tuple[int, float]:
    where, value = ctypes.c_int32(), ctypes.c_float()
    call = load_library().tailrace_largest
    check(call(kernels.encode(), pointer(x), len(x), ctypes.addressof(where), ctypes.addressof(value)))
    return where.value, value.value


@pytest.mark.parametrize("count", [1, 7, 8, 9, 31, 32, 1001])
def test_the_first_of_the_largest_is_found(kernels: str, count: int) -> None:
    x = torch.randint(0, 5, (count,)).float()  # with many ties
    where, value = largest(kernels, x)
    assert (where, value) == (int(np.argmax(x.numpy())), x.max().item())


@pytest.mark.parametrize("at", [0, 5, 36])
def test_the_largest_of_a_broken_row_is_no_number(kernels: str, at: int) -> None:
    x = torch.randn(37)
    x[at] = float("nan")
    assert largest(kernels, x)[1] != largest(kernels, x)[1]
