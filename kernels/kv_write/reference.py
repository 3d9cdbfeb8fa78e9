"""The write into the paged cache in plain PyTorch."""

from __future__ import annotations

import torch


def kv_write_reference(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Blocks are contiguous, so a layer's cache is a table of slots."""
    key_cache.flatten(0, 1).index_copy_(0, slots.long(), keys.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots.long(), values.to(value_cache.dtype))
