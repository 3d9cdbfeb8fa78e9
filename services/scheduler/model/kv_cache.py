"""The tensors that hold keys and values in blocks; who owns which block is the scheduler's business."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from services.scheduler.model.config import Described


class KvCache:
    """`keys` and `values`: (layers, blocks, block_size, kv_heads, head_dim); memory is touched at its first use."""

    def __init__(
        self, config: Described, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (len(config.layers), blocks, block_size, config.kv_heads, config.head_dim)
        self.block_size = block_size
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks that a sequence begins and doesn't fill at once.

        Attention masks the places beyond a sequence's end but still multiplies what lies there by 0, and 0 * NaN is
        NaN: without this a former owner's broken numbers would break its successor.
        """
        if blocks:
            index = torch.tensor(blocks, device=self.keys.device)
            self.keys.index_fill_(1, index, 0)
            self.values.index_fill_(1, index, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU from numpy, which leaves the zeroing to the system: torch writes every page at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def token_bytes(config: Described, dtype: torch.dtype) -> int:
    """What one token's keys and values take, in bytes."""
    return 2 * len(config.layers) * config.kv_heads * config.head_dim * dtype.itemsize
