"""Residual addition and RMSNorm in plain PyTorch, one after the other."""

from __future__ import annotations

import torch

from kernels.rms_norm.reference import rms_norm_reference


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is rounded to the stream's dtype before it is normalised, as it is when it is kept."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
