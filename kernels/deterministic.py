"""Operations whose result for a row depends on that row alone, bit for bit, whatever stands beside it in the step.

What varies otherwise is the order in which a sum is taken: a matrix product picks its kernel by the number of rows, and
attention its blocking by the number of queries and by the padding that a group of decodes shares. Here products are
made in tiles of always the same shape, and each row attends by itself, as a decode does. The other operations work row
by row as they are. That costs most in prefill, where attention is no longer one product for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from kernels.linear import Linear
from kernels.ops import Ops
from kernels.paged_attention import AttentionPlan, Span, plan_attention

TILE_ROWS = 16


def deterministic_ops(base: Ops) -> Ops:
    """`base` with its products and its attention replaced; its attention must be the reference's."""
    return replace(base, name=f"{base.name}, deterministic", make_linear=tile_linear, plan_attention=plan_single_rows)


def tile_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """As `make_linear`, in tiles of TILE_ROWS rows, the last one filled up with zeros."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -rows % TILE_ROWS))
        tiles = [functional.linear(tile, weight, bias) for tile in torch.split(padded, TILE_ROWS)]
        return torch.cat(tiles)[:rows] if tiles else x.new_empty((0, weight.shape[0]))

    return apply


def plan_single_rows(spans: Sequence[Span], block_size: int, device: torch.device) -> AttentionPlan:
    """As `plan_attention`, with every row a group of its own, as wide as its position says."""
    whole = plan_attention(spans, block_size, device)
    singles = [Span(span.start + n, 1, span.block_table) for span in spans for n in range(span.length)]
    groups = [
        replace(plan_attention([single], block_size, device).decodes[0], rows=torch.tensor([row], device=device))
        for row, single in enumerate(singles)
    ]
    return replace(whole, prefills=(), decodes=tuple(groups))
