"""How likely a prompt's own ids were, from logits of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.scheduler.engine.api import Logprobs, PromptLogprobs, Slice
from services.scheduler.engine.sampling.rules import LOGPROB_FLOOR


def score_prompts(logits: torch.Tensor, slices: Sequence[Slice]) -> list[PromptLogprobs]:
    """Of every slice's `scored_ids`, from logits (scored ids, vocab_size) in the same order."""
    scores, row = [], 0
    for s in slices:
        end = row + len(s.scored_ids)
        rows = zip(logits[row:end], s.scored_ids, strict=True)
        scores.append(PromptLogprobs(s.key, s.start + 1, [_score(one, token, s.scored_top) for one, token in rows]))
        row = end
    return scores


def _score(logits: torch.Tensor, token: int, alternatives: int) -> Logprobs:
    """By itself: all at once would take the logits' memory again, and a row's sum must not depend on its neighbours."""
    logprobs = logits.float().log_softmax(0).nan_to_num(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    values, ids = logprobs.topk(min(alternatives, len(logprobs)))
    return Logprobs(logprobs[token].item(), tuple(ids.tolist()), tuple(values.tolist()))
