"""Rotary position embedding: turns each pair of a head's values by an angle that grows with the position."""

from __future__ import annotations

import torch

from kernels.rotary.reference import rotary_reference

__all__ = ["rotary"]


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x turned: x (rows, heads, head_dim), cos and sin (rows, head_dim), of x's dtype.

    Value j is paired with value j + head_dim / 2. `cos` holds each cosine twice, `sin` the negated sines, then the
    sines: out = x * cos + (x with its halves exchanged) * sin.
    """
    rows, _, head_dim = x.shape
    if head_dim % 2 or cos.shape != (rows, head_dim) or sin.shape != (rows, head_dim):
        raise ValueError(f"x {tuple(x.shape)} doesn't fit cos {tuple(cos.shape)} and sin {tuple(sin.shape)}")
    return rotary_reference(x, cos, sin)
