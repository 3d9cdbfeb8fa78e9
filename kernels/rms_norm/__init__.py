"""RMSNorm: scales each row to unit root mean square, then by a weight per column."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, compute: Callable[..., torch.Tensor] = rms_norm_reference
) -> torch.Tensor:
    """Returns `weight * x / sqrt(mean(x²) + eps)` for x (rows, hidden) and weight (hidden,); computed in fp32.

    The weight has x's dtype, or more bits, as Gemma's: the normalised row is rounded to the weight's dtype before it is
    weighed, then to x's.
    `compute` is the reference or a kernel, here and in all operations.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight is {tuple(weight.shape)} for rows of {x.shape[-1]}")
    return compute(x, weight, eps)
