"""GeGLU's gate in Triton: the gated kernel of `silu_mul` with its other activation."""

from __future__ import annotations

import torch

from kernels.silu_mul.kernel import gate_mul


def gelu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Shapes as in `gelu_mul`; fp32, bf16 and fp16, with contiguous columns."""
    return gate_mul(gate_up, gelu=True)
