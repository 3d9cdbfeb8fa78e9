"""Adds a layer's output to the residual stream and normalises the sum: the seam between every two layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.add_rms_norm.reference import add_rms_norm_reference

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_rms_norm_reference,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual); x and residual (rows, hidden), weight (hidden,)."""
    if x.shape != residual.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x {tuple(x.shape)}, residual {tuple(residual.shape)} and weight {tuple(weight.shape)} differ"
        )
    return compute(x, residual, weight, eps)
