"""Rotary frequencies: how fast each pair of a head turns, with the long-context scalings.

Sources: RoPE, Su et al. 2021 (arXiv 2104.09864); linear position interpolation, Chen et al. 2023 (arXiv 2306.15595);
YaRN, Peng et al. 2023 (arXiv 2309.00071); the Llama 3.1 scaling as published with the model's reference code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from services.scheduler.model.config import Rope

Tensor = torch.Tensor


class Rotation:
    """One `Rope` on one device."""

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> None:
        turns, self._gain = scaled_frequencies(rope.theta, head_dim, rope.scaling, max_positions)
        self._frequencies = turns.to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines twice, and negated sines then sines, each (rows, head_dim): the form `kernels.rotary` asks for."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._gain, angles.sin() * self._gain
        return torch.cat((cos, cos), dim=1).to(dtype), torch.cat((-sin, sin), dim=1).to(dtype)


def frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Unscaled angle per position of each pair, fp32, shape (head_dim / 2,)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponents)


def scaled_frequencies(
    theta: float, head_dim: int, scaling: Mapping[str, Any] | None, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Frequencies under a scaling, and the factor by which cosine and sine grow (1 but for YaRN).

    `scaling` was checked by the model's configuration: `rope_type` is linear, llama3 or yarn, or there is none.
    """
    plain = frequencies(theta, head_dim)
    if scaling is None:
        return plain, 1.0
    if scaling["rope_type"] == "linear":
        return plain / float(scaling["factor"]), 1.0
    if scaling["rope_type"] == "llama3":
        return plain / llama3_divisors(theta, head_dim, scaling), 1.0
    return _yarn(theta, head_dim, scaling, max_positions)


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    """By what Llama 3.1 divides each frequency: 1 for fast pairs, `factor` for slow ones, a smooth step between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies(theta, head_dim) / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / ((1 - smooth) / factor + smooth)


def _yarn(theta: float, head_dim: int, scaling: Mapping[str, Any], max_positions: int) -> tuple[torch.Tensor, float]:
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    factor = float(scaling["factor"])
    fast = _pair_with_turns(float(scaling.get("beta_fast") or 32.0), theta, head_dim, original)
    slow = _pair_with_turns(float(scaling.get("beta_slow") or 1.0), theta, head_dim, original)
    if scaling.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - first) / max(last - first, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    plain = frequencies(theta, head_dim)
    blended = plain / factor * interpolated + plain * (1 - interpolated)
    attention_factor = scaling.get("attention_factor")
    return blended, float(attention_factor if attention_factor is not None else 0.1 * math.log(factor) + 1.0)


def _pair_with_turns(turns: float, theta: float, head_dim: int, positions: int) -> float:
    """Which pair makes so many full turns within `positions`."""
    return head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
