"""A linear layer in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional


def linear_reference(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The weight is kept as it is."""
    return partial(functional.linear, weight=weight, bias=bias)
