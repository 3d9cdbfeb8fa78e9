"""From a step's slices to logits: rows laid out, attention planned, one pass of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.ops import Ops
from kernels.paged_attention import Span
from services.scheduler.engine.api import Slice
from services.scheduler.model.decoder import ForwardBatch
from services.scheduler.model.kv_cache import KvCache
from services.scheduler.model.loading import Model

Forward = Callable[[Sequence[Slice]], torch.Tensor]
"""Computes all slices; returns logits (rows, vocab_size): of slices that sample, in their order, then of scored ids."""


class EagerForward:
    """Runs the model operation by operation, for slices of any kind."""

    def __init__(self, model: Model, cache: KvCache, ops: Ops) -> None:
        self._model = model
        self._cache = cache
        self._ops = ops

    def __call__(self, slices: Sequence[Slice]) -> torch.Tensor:
        """One forward pass over at least one slice."""
        if self._ops.reads_beyond:
            self._cache.clear(_begun_blocks(slices, self._cache.block_size))
        return self._model.forward(_batch(slices, self._ops, self._cache), self._cache)


def _batch(slices: Sequence[Slice], ops: Ops, cache: KvCache) -> ForwardBatch:
    """Lays the slices' ids out row after row."""
    device = cache.keys.device
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    scored_rows: list[int] = []
    for s in slices:
        scored_rows += range(len(token_ids), len(token_ids) + len(s.scored_ids))
        token_ids += s.token_ids
        positions += range(s.start, s.start + len(s.token_ids))
        if s.samples:
            logit_rows.append(len(token_ids) - 1)
    spans = [Span(s.start, len(s.token_ids), s.block_table) for s in slices]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        attention_plan=ops.plan_attention(spans, cache.block_size, device),
        logit_rows=torch.tensor(logit_rows + scored_rows, dtype=torch.int64, device=device),
    )


def _begun_blocks(slices: Sequence[Slice], block_size: int) -> list[int]:
    """The last block of each slice, where the slice begins it without filling it."""
    begun = []
    for s in slices:
        end = s.start + len(s.token_ids)
        first_of_block = end // block_size * block_size
        if s.start <= first_of_block < end:
            begun.append(s.block_table[first_of_block // block_size])
    return begun
