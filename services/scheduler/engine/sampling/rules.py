"""What all samplers keep to, whatever they compute with."""

from __future__ import annotations

from services.scheduler.engine.api import SamplingSpec

GREEDY_BELOW = 1e-4
"""Temperatures from here down take the best."""
LOGPROB_FLOOR = -1e30
"""Instead of minus infinity, which neither JSON nor a caller's sum can take."""
NOT_FINITE = "the model's logits aren't finite numbers"
NOTHING_LEFT = "logit_bias, constraint and suppressed ids leave no token to draw"


def check_bias(spec: SamplingSpec, vocab_size: int) -> None:
    """Raises ValueError for a bias on an id out of the vocabulary."""
    for token, _ in spec.logit_bias:
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias on id {token}; the vocabulary has {vocab_size}")


def is_penalised(spec: SamplingSpec) -> bool:
    """Whether its tokens have to be counted."""
    return spec.repetition_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0
