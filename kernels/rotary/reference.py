"""Rotary embedding in plain PyTorch (Su et al. 2021, arXiv 2104.09864)."""

from __future__ import annotations

import torch


def rotary_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Two products and a sum per value; the sign of the exchanged half lies in `sin`."""
    exchanged = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos.unsqueeze(1), exchanged, sin.unsqueeze(1))
