"""FlashAttention and FlashInfer on the same work, where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Runs = dict[str, Callable[[], object]]

_FLASH_BLOCK = 256  # FlashAttention's paged cache wants whole blocks of so many positions
_WORKSPACE_BYTES = 256 * 2**20


def decodes(query: Tensor, caches: Tensor, blocks: Tensor, positions: int) -> Runs:
    """One row for each of query's sequences, all with so many positions, in these blocks of both caches."""
    runs: Runs = {}
    if (flash := _found("flash_attn")) is not None and positions % _FLASH_BLOCK == 0:
        runs["FlashAttention"] = _flash_decode(flash, query, caches, positions)
    if (infer := _found("flashinfer")) is not None:
        runs["FlashInfer"] = _flashinfer_decode(infer, query, caches, blocks, positions)
    return runs


def prefills(query: Tensor, keys: Tensor, values: Tensor) -> Runs:
    """One causal prompt without anything cached."""
    runs: Runs = {}
    if (flash := _found("flash_attn")) is not None:
        runs["FlashAttention"] = lambda: flash.flash_attn_func(query[None], keys[None], values[None], causal=True)
    if (infer := _found("flashinfer")) is not None:
        runs["FlashInfer"] = lambda: infer.single_prefill_with_kv_cache(query, keys, values, causal=True)
    return runs


def _found(name: str) -> Any:
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _flash_decode(flash: Any, query: Tensor, caches: Tensor, positions: int) -> Callable[[], object]:
    sequences, per_sequence = len(query), positions // _FLASH_BLOCK
    keys, values = caches.view(2, -1, _FLASH_BLOCK, *caches.shape[3:])  # the same memory in larger blocks
    order = torch.randperm(sequences * per_sequence, device=query.device, dtype=torch.int32)
    lengths = torch.full((sequences,), positions, dtype=torch.int32, device=query.device)
    tables = order.view(sequences, per_sequence)
    return lambda: flash.flash_attn_with_kvcache(
        query[:, None], keys, values, cache_seqlens=lengths, block_table=tables, causal=True
    )


def _flashinfer_decode(
    infer: Any, query: Tensor, caches: Tensor, blocks: Tensor, positions: int
) -> Callable[[], object]:
    sequences, per_sequence = blocks.shape
    _, _, block_size, kv_heads, head_dim = caches.shape
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = infer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=query.device) * per_sequence
    last = torch.full_like(starts[1:], (positions - 1) % block_size + 1)
    wrapper.plan(starts, blocks.flatten(), last, query.shape[1], kv_heads, head_dim, block_size, data_type=caches.dtype)
    return lambda: wrapper.run(query, (caches[0], caches[1]))
