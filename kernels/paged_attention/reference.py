"""Paged attention in plain PyTorch: gather a sequence's blocks, then scaled-dot-product attention.

Decodes of similar length are computed together. There the query heads that share a KV head take the place of the
query's length, so keys and values are read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.paged_attention.plan import AttentionPlan, DecodeGroup, Prefill

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer scores a pair, and how many positions it sees; see `paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def paged_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scores: Scores,
) -> Tensor:
    """Shapes as in `paged_attention`."""
    out = torch.empty_like(query)
    for prefill in plan.prefills:
        rows = slice(prefill.first_row, prefill.first_row + prefill.rows)
        if prefill.blocks is None:
            out[rows] = _causal(query[rows], keys[rows], values[rows], scores)
        else:
            out[rows] = _chunk(query[rows], key_cache, value_cache, prefill, scores)
    for group in plan.decodes:
        out[group.rows] = _decode(query[group.rows], key_cache, value_cache, group, scores)
    return out


def _causal(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """A prefill from position 0: everything it attends to is in the step itself."""
    rows = len(query)
    if scores.softcap is None and (scores.window is None or scores.window >= rows):
        return _by_rows(query, keys, values, None, scores)
    return _by_rows(query, keys, values, _seen(rows, rows, scores.window, query.device), scores)


def _chunk(query: Tensor, key_cache: Tensor, value_cache: Tensor, prefill: Prefill, scores: Scores) -> Tensor:
    """A prefill that continues: the cached positions, then its own."""
    assert prefill.blocks is not None
    known = prefill.first_position + prefill.rows
    keys = key_cache.index_select(0, prefill.blocks).flatten(0, 1)[:known]
    values = value_cache.index_select(0, prefill.blocks).flatten(0, 1)[:known]
    return _by_rows(query, keys, values, _seen(prefill.rows, known, scores.window, query.device), scores)


def _seen(rows: int, known: int, window: int | None, device: torch.device) -> Tensor:
    """Which of `known` positions each of the last `rows` sees."""
    seen = torch.ones(rows, known, dtype=torch.bool, device=device).tril(known - rows)
    return seen if window is None else seen.triu(known - rows - window + 1)


def _by_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """One sequence: query (rows, heads, head_dim), keys and values (known, kv_heads, head_dim)."""
    query, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys, values))
    return _attend(query, keys, values, mask, scores).squeeze(0).transpose(0, 1)


def _decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scores: Scores) -> Tensor:
    sequences, width = group.blocks.shape
    _, block_size, kv_heads, head_dim = key_cache.shape
    gathered = (sequences, width * block_size, kv_heads, head_dim)
    keys = key_cache.index_select(0, group.blocks.flatten()).view(gathered).transpose(1, 2)
    values = value_cache.index_select(0, group.blocks.flatten()).view(gathered).transpose(1, 2)
    mask = group.mask
    if scores.window is not None:
        lengths = mask.sum(-1, keepdim=True)
        mask = mask & (torch.arange(mask.shape[-1], device=mask.device) >= lengths - scores.window)
    grouped = query.view(sequences, kv_heads, -1, head_dim)
    return _attend(grouped, keys, values, mask, scores).view_as(query)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """(batch, heads, rows, head_dim); without a mask each row sees those up to its own."""
    shared = query.shape[1] != keys.shape[1]
    if scores.softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=shared
        )
    assert mask is not None
    if shared:
        keys, values = (part.repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for part in (keys, values))
    products = (query @ keys.transpose(-1, -2)).float() * scores.scale
    capped = (products / scores.softcap).tanh() * scores.softcap
    weights = capped.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.to(values.dtype) @ values
