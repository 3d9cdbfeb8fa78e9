"""Attention of chunks in Triton: many rows of many sequences in one launch, over what is cached and what is new.

A program takes BLOCK rows of one sequence for all query heads that share a KV head. Which sequence, it finds in the
sums of their rows, so that one grid fits any lengths: sequence i begins at program row_sums[i] // BLOCK + i, and the
few programs too many end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.paged_attention.reference import Scores
from kernels.paged_attention.tables import Tables
from kernels.paged_attention.tile_kernel import attend_tiles


@triton.jit
def prefill_kernel(
    query,
    key_cache,
    value_cache,
    first_rows,
    lengths,
    tables,
    row_sums,
    out,
    sequences,
    table_width,
    kv_heads,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Tile `program 0` for KV head `program 1`: ROWS, a power of two, holds BLOCK rows times GROUP heads."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    low = tile * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(row_sums + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    before = tl.load(row_sums + low)
    new = tl.load(row_sums + low + 1) - before
    first = (tile - before // BLOCK - low) * BLOCK
    if first < new:
        length = tl.load(lengths + low)
        start = length - new
        member = tl.arange(0, ROWS)
        row, head = first + member // GROUP, kv_head * GROUP + member % GROUP
        dim = tl.arange(0, PADDED_DIM)
        inside = ((member < BLOCK * GROUP) & (row < new))[:, None] & (dim < HEAD_DIM)[None, :]
        heads = kv_heads * GROUP
        at = ((tl.load(first_rows + low).to(tl.int64) + row) * heads + head)[:, None] * HEAD_DIM + dim[None, :]
        asked = tl.load(query + at, mask=inside, other=0.0)
        # Rows that only fill the tile see what the last one sees.
        position = start + tl.minimum(row, new - 1)
        seen_from = tl.maximum(position - window + 1, 0) if WINDOW else position * 0

        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, PADDED_DIM), tl.float32)
        table = tables + low.to(tl.int64) * table_width
        end = tl.minimum(start + first + BLOCK, length)
        begin = tl.maximum(start + first - window + 1, 0) // TILE * TILE if WINDOW else length * 0
        # Up to here every row sees whole tiles: no mask.
        whole = begin if WINDOW else (start + first) // TILE * TILE
        best, total, sums = attend_tiles(
            asked,
            position,
            best,
            total,
            sums,
            key_cache,
            value_cache,
            table,
            begin,
            whole,
            seen_from,
            kv_head,
            kv_heads,
            scale,
            softcap,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            TILE,
            False,
            SOFTCAP,
            WIDEN,
        )
        best, total, sums = attend_tiles(
            asked,
            position,
            best,
            total,
            sums,
            key_cache,
            value_cache,
            table,
            whole,
            end,
            seen_from,
            kv_head,
            kv_heads,
            scale,
            softcap,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            TILE,
            True,
            SOFTCAP,
            WIDEN,
        )
        tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


def attend_prefills(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: Tables,
    row_sums: torch.Tensor,
    rows: int,
    scores: Scores,
    out: torch.Tensor,
) -> None:
    """Writes the rows of `out` (rows, heads, head_dim) that the tables name, `rows` in all; inputs are contiguous."""
    _, heads, head_dim = query.shape
    sequences, kv_heads = len(tables.lengths), key_cache.shape[2]
    group, padded_dim = heads // kv_heads, max(triton.next_power_of_2(head_dim), 16)
    tile_rows, tile, warps = prefill_tile(group, padded_dim, query.dtype)
    block = tile_rows // group
    prefill_kernel[(rows // block + sequences, kv_heads)](
        query,
        key_cache,
        value_cache,
        tables.first_rows,
        tables.lengths,
        tables.blocks,
        row_sums,
        out,
        sequences,
        tables.blocks.stride(0),
        kv_heads,
        scores.window or 0,
        scores.scale,
        scores.softcap or 1.0,
        GROUP=group,
        BLOCK=block,
        ROWS=tile_rows,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=key_cache.shape[1],
        TILE=tile,
        WINDOW=scores.window is not None,
        SOFTCAP=scores.softcap is not None,
        WIDEN=bool(triton.knobs.runtime.interpret),
        num_warps=warps,
        num_stages=2,
    )


def prefill_tile(group: int, padded_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows (positions times heads of a group) and positions of a tile, and warps: what the registers hold."""
    if dtype.itemsize == 2:
        rows, positions = (128, 64) if padded_dim <= 128 else (64, 32)
    else:
        rows, positions = (32 if padded_dim <= 128 else 16), 16
    rows = max(rows, triton.next_power_of_2(group))
    return rows, positions, 8 if rows * padded_dim >= 8192 else 4
