"""The write into the paged cache in plain PyTorch."""

from __future__ import annotations

import torch


def kv_write_reference(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Blocks are contiguous, so a layer's cache is a table of slots."""
    for rows, cache in ((keys, key_cache), (values, value_cache)):
        table, rows = cache.flatten(0, 1), _as_stored(rows, cache.dtype)
        if cache.dtype.itemsize == 1:  # PyTorch copies no rows of fp8, but their bytes
            table, rows = table.view(torch.uint8), rows.view(torch.uint8)
        table.index_copy_(0, slots.long(), rows)


def _as_stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In fp8 what is beyond its largest number becomes that, as hardware does it."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        rows = rows.clamp(-largest, largest)
    return rows.to(dtype)
