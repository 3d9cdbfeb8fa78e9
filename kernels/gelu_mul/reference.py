"""GeGLU's gate in plain PyTorch (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch.nn import functional


def gelu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(a) = a / 2 * (1 + tanh(√(2/π) * (a + 0.044715 a³)))`, times the other half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
