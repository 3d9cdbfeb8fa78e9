"""Whether a checkpoint's weights had no more than 4 bits: then storing them in 4 loses next to nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from services.scheduler.model.array_weights import Array, as_fp32, open_arrays
from services.scheduler.model.checkpoint import read_layer
from services.scheduler.model.config import ModelConfig

_GROUP, _STEPS, _ROWS = 32, 15, 64
_OFF = 0.1
"""Of a step, how far a value may lie from its place: where it and the least are rounded to bf16, by 0.06."""


def had_four_bits(folder: Path, config: ModelConfig) -> bool:
    """Whether any 32 weights that share a scale in 4 bits are among 16 evenly spaced values.

    The file's format doesn't tell: 4-bit weights are also written out as bf16 or fp32, and some have uneven values.
    Looked at are 64 outputs of each matrix in the first and the last layer. Raises UnsupportedModelError.
    """
    with open_arrays(folder) as weights:
        for number in sorted({0, len(config.layers) - 1}):
            layer = read_layer(config, weights, number)
            matrices = (layer.query, layer.key, layer.value, layer.attention_out, layer.gate, layer.up, layer.down)
            if not all(_has_even_values(matrix.weight) for matrix in matrices):
                return False
    return True


def _has_even_values(weight: Array) -> bool:
    outputs, inputs = weight.shape
    some: Array = weight[:: max(1, outputs // _ROWS)].copy()
    rows = as_fp32(some)
    groups = rows[:, : inputs // _GROUP * _GROUP].reshape(-1, _GROUP)
    least = groups.min(axis=1, initial=np.inf, keepdims=True)
    span = np.maximum(groups.max(axis=1, initial=-np.inf, keepdims=True) - least, np.finfo(np.float32).tiny)
    even = np.zeros(len(groups), dtype=bool)
    for steps in range(1, _STEPS + 1):
        places = (groups - least) / span * steps
        even |= (np.abs(places - np.rint(places)) < _OFF).all(axis=1)
    return bool(groups.size and even.all())
