"""Paged attention in plain PyTorch: gather a sequence's blocks, then scaled-dot-product attention.

Decodes of similar length are computed together. There the query heads that share a KV head take the place of the
query's length, so keys and values are read once for all of them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.paged_attention.plan import AttentionPlan, DecodeGroup, Prefill


def paged_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Shapes as in `paged_attention`."""
    out = torch.empty_like(query)
    for prefill in plan.prefills:
        rows = slice(prefill.first_row, prefill.first_row + prefill.rows)
        if prefill.blocks is None:
            out[rows] = _causal(query[rows], keys[rows], values[rows])
        else:
            out[rows] = _chunk(query[rows], key_cache, value_cache, prefill)
    for group in plan.decodes:
        out[group.rows] = _decode(query[group.rows], key_cache, value_cache, group)
    return out


def _causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A prefill from position 0: everything it attends to is in the step itself."""
    return _attend(query, keys, values, mask=None)


def _chunk(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, prefill: Prefill) -> torch.Tensor:
    """A prefill that continues: the cached positions, then its own."""
    assert prefill.blocks is not None
    known = prefill.first_position + prefill.rows
    keys = key_cache.index_select(0, prefill.blocks).flatten(0, 1)[:known]
    values = value_cache.index_select(0, prefill.blocks).flatten(0, 1)[:known]
    mask = torch.ones(prefill.rows, known, dtype=torch.bool, device=query.device).tril(prefill.first_position)
    return _attend(query, keys, values, mask)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended.squeeze(0).transpose(0, 1)


def _decode(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group: DecodeGroup
) -> torch.Tensor:
    sequences, width = group.blocks.shape
    _, block_size, kv_heads, head_dim = key_cache.shape
    gathered = (sequences, width * block_size, kv_heads, head_dim)
    keys = key_cache.index_select(0, group.blocks.flatten()).view(gathered).transpose(1, 2)
    values = value_cache.index_select(0, group.blocks.flatten()).view(gathered).transpose(1, 2)
    grouped = query.view(sequences, kv_heads, -1, head_dim)
    return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask).view_as(query)
