"""Rotary frequencies: how fast each pair of a head turns, with the long-context scalings.

Sources: RoPE, Su et al. 2021 (arXiv 2104.09864); linear position interpolation, Chen et al. 2023 (arXiv 2306.15595);
YaRN, Peng et al. 2023 (arXiv 2309.00071); the Llama 3.1 scaling as published with the model's reference code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from services.scheduler.model.config import Rope

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


def frequencies(theta: float, head_dim: int) -> FloatArray:
    """Unscaled angle per position of each pair, fp32, shape (head_dim / 2,)."""
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    turns: FloatArray = np.float32(1.0) / np.power(np.float32(theta), exponents)
    return turns


def scaled(plain: FloatArray, rope: Rope, max_positions: int) -> tuple[FloatArray, float]:
    """Frequencies under a rope's scaling, and the factor by which cosine and sine grow (1 but for YaRN).

    The scaling was checked by the model's configuration: `rope_type` is linear, llama3 or yarn, or there is none.
    """
    scaling = rope.scaling
    if scaling is None:
        return plain, 1.0
    if scaling["rope_type"] == "linear":
        return plain / np.float32(scaling["factor"]), 1.0
    if scaling["rope_type"] == "llama3":
        return plain / llama3_divisors(plain, scaling), 1.0
    return _yarn(plain, rope.theta, scaling, max_positions)


def llama3_divisors(plain: FloatArray, scaling: Mapping[str, Any]) -> FloatArray:
    """By what Llama 3.1 divides each frequency: 1 for fast pairs, `factor` for slow ones, a smooth step between."""
    factor = np.float32(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = np.float32(scaling["original_max_position_embeddings"]) * plain / np.float32(2 * math.pi)
    smooth = ((turns - np.float32(low)) / np.float32(high - low)).clip(0.0, 1.0)
    divisors: FloatArray = np.float32(1.0) / ((1 - smooth) / factor + smooth)
    return divisors


def _yarn(plain: FloatArray, theta: float, scaling: Mapping[str, Any], max_positions: int) -> tuple[FloatArray, float]:
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    factor, pairs = float(scaling["factor"]), len(plain)
    fast = _pair_with_turns(float(scaling.get("beta_fast") or 32.0), theta, 2 * pairs, original)
    slow = _pair_with_turns(float(scaling.get("beta_slow") or 1.0), theta, 2 * pairs, original)
    if scaling.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, 2 * pairs - 1)
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(first)) / np.float32(max(last - first, 0.001))
    interpolated = ramp.clip(0.0, 1.0)
    blended = plain / np.float32(factor) * interpolated + plain * (1 - interpolated)
    attention_factor = scaling.get("attention_factor")
    return blended, float(attention_factor if attention_factor is not None else 0.1 * math.log(factor) + 1.0)


def _pair_with_turns(turns: float, theta: float, head_dim: int, positions: int) -> float:
    """Which pair makes so many full turns within `positions`."""
    return head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
