"""SwiGLU's gate in plain PyTorch (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(a) = a / (1 + exp(-a))`, times the other half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
