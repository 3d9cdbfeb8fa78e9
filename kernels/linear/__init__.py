"""A linear layer, made once from its weight, so that an implementation can pack or quantise it beforehand."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.linear.reference import linear_reference

__all__ = ["Linear", "make_linear"]

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Maps (rows, columns in) to (rows, columns out)."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Returns `x -> x @ weightᵀ + bias` for weight (out, in) and bias (out,) or none."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"weight {tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)} don't fit"
        )
    return linear_reference(weight, bias)
