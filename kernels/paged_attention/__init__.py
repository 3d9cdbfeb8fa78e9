"""Causal attention over keys and values that lie in blocks, for a step that mixes prefills and decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.paged_attention.plan import AttentionPlan, Span, plan_attention
from kernels.paged_attention.reference import Scores, paged_attention_reference

__all__ = ["AttentionPlan", "Scores", "Span", "paged_attention", "plan_attention"]


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    compute: Callable[..., torch.Tensor] = paged_attention_reference,
) -> torch.Tensor:
    """Returns (rows, heads, head_dim): each row attends to its sequence's positions up to its own.

    `query` is (rows, heads, head_dim). `keys` and `values` (rows, kv_heads, head_dim) are the step's own, already in
    the caches of a layer (blocks, block_size, kv_heads, head_dim). Query head h reads KV head h // (heads / kv_heads).

    The score of a pair is s = `scale` * query · key, by default with scale head_dim^-½; with `softcap` it becomes
    softcap * tanh(s / softcap). With `window` a row sees so many positions, its own included, and none before.

    `plan` is the one that `compute` asks for: by `plan_attention` for the reference.
    """
    rows, heads, head_dim = query.shape
    if keys.shape != values.shape or keys.shape[0] != rows or keys.shape[2] != head_dim or heads % keys.shape[1]:
        raise ValueError(f"query {tuple(query.shape)} doesn't fit keys {tuple(keys.shape)}")
    if key_cache.shape != value_cache.shape or key_cache.shape[2:] != keys.shape[1:]:
        raise ValueError(f"keys {tuple(keys.shape)} don't fit the cache {tuple(key_cache.shape)}")
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"window is {window} and softcap {softcap}; each must be positive or None")
    scores = Scores(head_dim**-0.5 if scale is None else scale, window, softcap)
    return compute(query, keys, values, key_cache, value_cache, plan, scores)
