"""Changes to a row's logits before anything is drawn: penalties, bias, ids that must not come yet.

In this order: repetition penalty over prompt and output (positive logits are divided, negative ones multiplied: Keskar
et al. 2019, arXiv 1909.05858), frequency and presence penalty over the output alone, logit bias, what a constraint
forbids, suppression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.scheduler.engine.api import Guide, GuideLost, SamplingSpec
from services.scheduler.engine.sampling.rules import check_bias, is_penalised
from services.scheduler.engine.sampling.token_counts import TokenCounts

Tensor = torch.Tensor


@dataclass(slots=True)
class Adjustment:
    """What one sequence's options do to its logits; `counts` is None without penalties. `lost`: why its guide is."""

    spec: SamplingSpec
    counts: TokenCounts | None
    guide: Guide | None
    bias: tuple[Tensor, Tensor] | None
    suppressible: Tensor | None
    lost: str = ""

    @property
    def always(self) -> bool:
        """Whether it changes every row, not only those that suppress."""
        return self.counts is not None or self.bias is not None or self.guide is not None


def adjustment(
    spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int, device: torch.device
) -> Adjustment | None:
    """Prepares a sequence's adjustment, if it has one; raises ValueError for a bias on an id out of the vocabulary."""
    check_bias(spec, vocab_size)
    counted = prompt_ids if spec.repetition_penalty != 1 else ()
    counts = TokenCounts(counted, output_ids) if is_penalised(spec) else None
    bias = None
    if spec.logit_bias:
        ids, values = zip(*spec.logit_bias, strict=True)
        bias = (torch.tensor(ids, device=device), torch.tensor(values, dtype=torch.float32, device=device))
    known = [token for token in spec.suppressible_ids if 0 <= token < vocab_size]
    suppressible = torch.tensor(known, device=device) if known else None
    guide = spec.constraint.start(output_ids) if spec.constraint is not None else None
    if counts is None and guide is None and bias is None and suppressible is None:
        return None
    return Adjustment(spec, counts, guide, bias, suppressible)


def adjust(logits: Tensor, rows: Sequence[tuple[int, Adjustment, bool]]) -> None:
    """Applies adjustments to logits (rows, vocab_size), fp32, in place: (row, adjustment, suppress) each."""
    _penalize(logits, [(row, change.spec, change.counts) for row, change, _ in rows if change.counts is not None])
    for row, change, suppress in rows:
        if change.bias is not None:
            logits[row].index_add_(0, *change.bias)
        if change.guide is not None:
            logits[row].masked_fill_(_forbidden(change, suppress, logits.shape[1]).to(logits.device), float("-inf"))
        elif suppress and change.suppressible is not None:
            logits[row].index_fill_(0, change.suppressible, float("-inf"))


def _forbidden(change: Adjustment, suppress: bool, vocab_size: int) -> Tensor:
    """What the constraint rules out, and the suppressed ids unless nothing else is left; (vocab_size,) bool."""
    assert change.guide is not None
    try:
        mask = np.frombuffer(change.guide.allowed(), dtype=np.uint8)
    except GuideLost as lost:
        change.lost = str(lost)
        return torch.ones(vocab_size, dtype=torch.bool)
    allowed = torch.from_numpy(np.unpackbits(mask, count=vocab_size, bitorder="little")).bool()
    if suppress and change.suppressible is not None:
        rest = allowed.index_fill(0, change.suppressible.cpu(), False)
        allowed = rest if rest.any() else allowed
    return ~allowed


def _penalize(logits: Tensor, rows: Sequence[tuple[int, SamplingSpec, TokenCounts]]) -> None:
    """One gather and one scatter for the whole batch; ids are distinct within a row, so no place is written twice."""
    if not rows:
        return
    parts = [counts.arrays() for _, _, counts in rows]
    options = [
        (row, spec.repetition_penalty, spec.frequency_penalty, spec.presence_penalty, len(ids))
        for (row, spec, _), (ids, _) in zip(rows, parts, strict=True)
    ]
    row, repetition, frequency, presence, sizes = torch.tensor(options, dtype=torch.float64).unbind(1)
    each = torch.stack((repetition, frequency, presence)).float().repeat_interleave(sizes.long(), dim=1)
    repetition, frequency, presence = each.to(logits.device)
    ids = torch.from_numpy(np.concatenate([ids for ids, _ in parts]))
    places = (row.long().repeat_interleave(sizes.long()) * logits.shape[1] + ids).to(logits.device)
    counts = torch.from_numpy(np.concatenate([counts for _, counts in parts])).to(logits.device)
    values = logits.view(-1)[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits.view(-1)[places] = values - frequency * counts - presence * (counts > 0)
