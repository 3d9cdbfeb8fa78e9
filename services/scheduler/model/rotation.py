"""Cosines and sines of rotary positions, on a device of PyTorch."""

from __future__ import annotations

import torch

from services.scheduler.model.config import Rope
from services.scheduler.model.rope import scaled

Tensor = torch.Tensor


class Rotation:
    """One `Rope` on one device."""

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> None:
        turns, self._gain = scaled(_frequencies(rope.theta, head_dim).numpy(), rope, max_positions)
        self._frequencies = torch.from_numpy(turns).to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines twice, and negated sines then sines, each (rows, head_dim): the form `kernels.rotary` asks for."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._gain, angles.sin() * self._gain
        return torch.cat((cos, cos), dim=1).to(dtype), torch.cat((-sin, sin), dim=1).to(dtype)


def _frequencies(theta: float, head_dim: int) -> Tensor:
    """As `rope.frequencies`, by PyTorch's power: transformers' own bits, of which numpy's may miss the last."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponents)
