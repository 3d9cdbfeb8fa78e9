"""How likely ids were, of one row of logits at a time, in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from services.scheduler.engine.api import Logprobs, PromptLogprobs, Slice
from services.scheduler.engine.sampling.rules import LOGPROB_FLOOR
from services.scheduler.engine.sampling.token_counts import FloatArray


def logprobs_of(logits: FloatArray) -> FloatArray:
    """Natural logarithms (vocab_size,), finite whatever the logits."""
    with np.errstate(invalid="ignore"):  # a row without anything finite has none
        shifted = logits - logits.max()
        logprobs: FloatArray = shifted - np.log(np.exp(shifted).sum())
    np.nan_to_num(logprobs, copy=False, nan=LOGPROB_FLOOR)
    return np.maximum(logprobs, LOGPROB_FLOOR, out=logprobs)


def told(logprobs: FloatArray, token: int, alternatives: int) -> Logprobs:
    """Of `token`, and of as many of the likeliest ids as there are."""
    count = min(alternatives, len(logprobs))
    ids = np.argpartition(logprobs, len(logprobs) - count)[-count:] if count else np.empty(0, dtype=np.intp)
    ids = ids[np.lexsort((ids, -logprobs[ids]))]
    return Logprobs(float(logprobs[token]), tuple(ids.tolist()), tuple(logprobs[ids].tolist()))


def score_prompts(logits: Iterable[FloatArray], slices: Sequence[Slice]) -> list[PromptLogprobs]:
    """Of every slice's `scored_ids`, from a row of logits for each, in the same order."""
    rows = iter(logits)
    return [
        PromptLogprobs(
            s.key, s.start + 1, [told(logprobs_of(next(rows)), token, s.scored_top) for token in s.scored_ids]
        )
        for s in slices
    ]
