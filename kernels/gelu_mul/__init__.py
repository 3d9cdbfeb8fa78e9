"""The gate of Gemma's feed-forward layer: gelu(gate) * up, with gelu in its tanh form."""

from __future__ import annotations

import torch

from kernels.gelu_mul.reference import gelu_mul_reference

__all__ = ["gelu_mul"]


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns (rows, n) from the joined product (rows, 2 n): the gates first, then the values that they let through."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up can't be halves of {gate_up.shape[-1]} columns")
    return gelu_mul_reference(gate_up)
