"""The gate of Llama's feed-forward layer: silu(gate) * up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.silu_mul.reference import silu_mul_reference

__all__ = ["silu_mul"]


def silu_mul(
    gate_up: torch.Tensor, *, compute: Callable[[torch.Tensor], torch.Tensor] = silu_mul_reference
) -> torch.Tensor:
    """Returns (rows, n) from the joined product (rows, 2 n): the gates first, then the values that they let through."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up can't be halves of {gate_up.shape[-1]} columns")
    return compute(gate_up)
