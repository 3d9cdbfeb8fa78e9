"""Turns a step's queries and keys by their positions, and puts keys and values where the block tables say."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.rotary_kv_write.reference import rotary_kv_write_reference

__all__ = ["rotary_kv_write"]


def rotary_kv_write(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rotary_kv_write_reference,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns query and keys turned as `kernels.rotary` does; writes keys, turned, and values into one layer's caches.

    query (rows, heads, head_dim), keys and values (rows, kv_heads, head_dim), cos and sin (rows, head_dim). Row i goes
    to slot `slots[i]` as in `kernels.kv_write`.
    """
    rows, _, head_dim = query.shape
    if keys.shape != values.shape or (keys.shape[0], keys.shape[2]) != (rows, head_dim):
        raise ValueError(f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} differ")
    if head_dim % 2 or cos.shape != (rows, head_dim) or sin.shape != (rows, head_dim):
        raise ValueError(f"query {tuple(query.shape)} doesn't fit cos {tuple(cos.shape)} and sin {tuple(sin.shape)}")
    if keys.shape[1:] != key_cache.shape[2:] or key_cache.shape != value_cache.shape or slots.shape != (rows,):
        raise ValueError(
            f"keys {tuple(keys.shape)}, slots {tuple(slots.shape)} and cache {tuple(key_cache.shape)} differ"
        )
    return compute(query, keys, values, cos, sin, key_cache, value_cache, slots)
