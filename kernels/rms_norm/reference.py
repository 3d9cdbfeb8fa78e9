"""RMSNorm in plain PyTorch (Zhang and Sennrich 2019, arXiv 1910.07467), rounding where the models round."""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * round(x * rsqrt(mean(x²) + eps))`, rounding to the weight's dtype: not at all for one of 32 bits."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)
