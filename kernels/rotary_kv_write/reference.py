"""Rotary embedding and the write into the paged cache in plain PyTorch, one after the other."""

from __future__ import annotations

import torch

from kernels.kv_write.reference import kv_write_reference
from kernels.rotary.reference import rotary_reference


def rotary_kv_write_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache may hold a narrower dtype than the step's."""
    turned = rotary_reference(keys, cos, sin)
    kv_write_reference(turned, values, key_cache, value_cache, slots)
    return rotary_reference(query, cos, sin), turned
