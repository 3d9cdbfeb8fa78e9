"""Cuts a row's weights down to its best candidates: top-k, then top-p among those, and min-p.

All see the distribution after temperature; top-p counts probability among what top-k left, min-p is relative to the
best. Each filter comes down to a floor, the smallest weight that stays; what equals the floor stays too. No row is
sorted whole: its 64 best decide nearly always, and more are looked at only while they don't.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_WIDTHS = (64, 1024)


def truncate(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Zeroes what is cut, in place: weights (rows, vocab_size) with best 1; parameters (rows,), 0 / 1 / 0 for off."""
    floors = min_p.clone()
    vocab_size = weights.shape[1]
    kept_at_most = top_k.where(top_k > 0, vocab_size).clamp(max=vocab_size)
    open_rows = ((kept_at_most < vocab_size) | (top_p < 1)).nonzero().squeeze(1)
    for width in (*(width for width in _WIDTHS if width < vocab_size), vocab_size):
        if not len(open_rows):
            break
        floor, decided = _floor(weights[open_rows], kept_at_most[open_rows], top_p[open_rows], width)
        floors[open_rows[decided]] = floors[open_rows[decided]].maximum(floor[decided])
        open_rows = open_rows[~decided]
    weights.masked_fill_(weights < floors.unsqueeze(1), 0.0)


def _floor(weights: Tensor, kept_at_most: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The smallest weight that stays, as seen among the `width` best, and whether those were enough to tell."""
    best = weights.topk(width, dim=1).values
    within_k = torch.arange(width, device=weights.device) < kept_at_most.unsqueeze(1)
    best = best * within_k
    whole_k = kept_at_most <= width
    total = torch.where(whole_k, best.sum(1), weights.sum(1))
    before = best.cumsum(1) - best
    kept = within_k & ((before < (top_p * total).unsqueeze(1)) | (top_p == 1).unsqueeze(1))
    last = kept.sum(1).clamp(min=1) - 1
    limited_by_p = (kept_at_most == weights.shape[1]) & (last < width - 1)
    return best.gather(1, last.unsqueeze(1)).squeeze(1), whole_k | limited_by_p
