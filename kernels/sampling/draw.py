"""Draws one id per row from weights, by a race of exponential clocks that ends the same in any batch and any kernel.

Candidate i with weight w_i finishes at E_i / w_i, where E_i = -ln u_i is its own exponential number; the first to
finish wins, with probability w_i / Σ w (the Gumbel-max trick without its second logarithm). Because each candidate has
its own number, a last-bit difference in the logits changes the winner only in a photo finish; inverting a cumulative
sum, it would shift every id behind it.

A vocabulary's long tail, the ids with w_i < 2^-12 of the best, runs as one candidate with the sum of its weights (the
minimum of exponentials is exponential); only when it wins is the race within it run. Its number is that of id 2^32 - 1.
"""

from __future__ import annotations

import torch

from kernels.sampling.randomness import uniform

Tensor = torch.Tensor

HEAD_WEIGHT = 2.0**-12
_TAIL_ID = 0xFFFFFFFF


def draw(weights: Tensor, row_keys: Tensor) -> Tensor:
    """One id per row, (rows,) int64, from weights (rows, vocab_size) whose best is 1 in every row; 0 is never drawn."""
    head = weights >= HEAD_WEIGHT
    rows, ids = head.nonzero(as_tuple=True)
    pace = weights[rows, ids] / _exponential(row_keys[rows], ids)
    best = pace.new_zeros(len(weights)).scatter_reduce_(0, rows, pace, "amax")
    winners = (pace == best[rows]).nonzero().squeeze(1)
    drawn = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    drawn[rows[winners]] = ids[winners]

    tail = weights.masked_fill(head, 0.0).sum(1)
    tail_pace = tail / _exponential(row_keys, torch.tensor(_TAIL_ID, device=weights.device))
    for row in (tail_pace > best).nonzero().squeeze(1).tolist():
        drawn[row] = _draw_from_tail(weights[row], row_keys[row])
    return drawn


def _draw_from_tail(weights: Tensor, key: Tensor) -> Tensor:
    ids = ((weights > 0) & (weights < HEAD_WEIGHT)).nonzero().squeeze(1)
    return ids[(weights[ids] / _exponential(key, ids)).argmax()]


def _exponential(row_keys: Tensor, ids: Tensor) -> Tensor:
    return -uniform(row_keys, ids).log()
