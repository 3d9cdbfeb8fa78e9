"""The whole draw in plain PyTorch: temperature, truncation, race."""

from __future__ import annotations

import torch

from kernels.sampling.draw import draw
from kernels.sampling.truncation import truncate

Tensor = torch.Tensor


def draw_reference(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    row_keys: Tensor,
    *,
    truncates: bool = True,
) -> Tensor:
    """One id per row, int64, of logits (rows, vocab_size) with their largest; `logits` become the weights.

    Parameters are (rows,), 0 / 1 / 0 for a truncation that is off; `row_keys` (rows, 2) by `randomness.keys`.
    `truncates` says whether any row asks for one.
    """
    weights = logits.sub_(best.unsqueeze(1)).div_(temperature.unsqueeze(1)).exp_()
    if truncates:
        truncate(weights, top_k, top_p, min_p)
    return draw(weights, row_keys)
