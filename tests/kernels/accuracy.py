"""How far a kernel's result may lie from the exact one, by the dtype that it is rounded to.

A bound is relative to the exact value or, where that is smaller, to the root mean square of its row: in a sum that
cancels, the terms decide the error. It is never less than what rounding costs among the subnormal numbers, whose
spacing no longer shrinks. One rounding to 16 bits costs half a unit in the last place on a GPU; Triton's interpreter
cuts bf16 off instead of rounding it, which costs a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

UNIT = {torch.float32: 2.0**-21, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
DTYPES = list(UNIT)


def assert_close(got: torch.Tensor, exact: torch.Tensor, *, roundings: int, size: torch.Tensor | float = 0.0) -> None:
    """Every value of `got` is finite and within so many roundings of `exact`, which is float64.

    `size` is what the terms of a sum weigh where the row's mean could be far below.
    """
    assert got.shape == exact.shape
    assert got.isfinite().all(), "a place that wasn't written, or a broken number"
    mean = exact.square().mean(-1, keepdim=True).sqrt()
    size = exact.abs().maximum(mean).maximum(torch.as_tensor(size, dtype=torch.float64, device=exact.device))
    size = size.clamp(min=torch.finfo(got.dtype).smallest_normal)
    excess = (got.double() - exact).abs() - roundings * UNIT[got.dtype] * size
    assert (excess <= 0).all(), f"{excess.max().item():.2e} beyond the bound for {got.dtype}"


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, all memory that PyTorch hands out holds NaN until somebody writes it: a place left out shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
