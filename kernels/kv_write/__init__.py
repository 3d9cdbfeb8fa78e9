"""Puts a step's keys and values where the block tables say."""

from __future__ import annotations

import torch

from kernels.kv_write.reference import kv_write_reference

__all__ = ["kv_write"]


def kv_write(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes row i of keys and values (rows, kv_heads, head_dim) into slot `slots[i]` of one layer's cache, in place.

    Caches are (blocks, block_size, kv_heads, head_dim); a slot is block * block_size + the place within the block.
    """
    if keys.shape != values.shape or keys.shape[1:] != key_cache.shape[2:] or slots.shape != keys.shape[:1]:
        raise ValueError(
            f"keys {tuple(keys.shape)}, slots {tuple(slots.shape)} and cache {tuple(key_cache.shape)} differ"
        )
    kv_write_reference(keys, values, key_cache, value_cache, slots)
