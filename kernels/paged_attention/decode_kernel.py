"""Attention of single rows in Triton: each reads all that its sequence holds, so reading is what it costs.

The query heads that share a KV head are one small matrix, so keys and values are read once for all of them. Where there
are fewer sequences than processors, each sequence's positions are split over several programs whose parts a second
kernel joins (Flash-Decoding: Dao et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.paged_attention.reference import Scores
from kernels.paged_attention.tables import Tables
from kernels.paged_attention.tile_kernel import attend_tiles

_GROUP_MIN = 16  # rows that a tensor core multiplies at least


@triton.jit
def decode_kernel(
    query,
    key_cache,
    value_cache,
    first_rows,
    lengths,
    tables,
    out,
    parts,
    part_weights,
    table_width,
    kv_heads,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Split `program 2` of sequence `program 0` for the query heads of KV head `program 1`.

    Writes `out` (rows, heads, HEAD_DIM) or, with several SPLITS, `parts` (sequences, heads, SPLITS, HEAD_DIM), each
    normalised, and the base-2 logarithm of its total in `part_weights` (sequences, heads, SPLITS).
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    row = tl.load(first_rows + sequence).to(tl.int64)
    seen_from = tl.maximum(length - window, 0) if WINDOW else length * 0
    share = tl.cdiv(tl.cdiv(length - seen_from, SPLITS), TILE) * TILE
    begin = seen_from + split * share
    end = tl.minimum(begin + share, length)

    member, dim = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM)
    inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    heads = kv_heads * GROUP
    asked = tl.load(query + (row * heads + head[:, None]) * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    last = tl.zeros((PADDED_GROUP,), tl.int32) + (length - 1)
    best, total, sums = attend_tiles(
        asked,
        last,
        tl.full((PADDED_GROUP,), float("-inf"), tl.float32),
        tl.zeros((PADDED_GROUP,), tl.float32),
        tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32),
        key_cache,
        value_cache,
        tables + sequence.to(tl.int64) * table_width,
        begin,
        end,
        last * 0,
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
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        to = (row * heads + head[:, None]) * HEAD_DIM + dim[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = (sequence.to(tl.int64) * heads + head) * SPLITS + split
        tl.store(parts + part[:, None] * HEAD_DIM + dim[None, :], result, mask=inside)
        # The logarithm of no weight at all is -inf; one is put in its place beforehand, for numpy complains of 0.
        weight = tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(part_weights + part, weight, mask=member < GROUP)


@triton.jit
def join_kernel(
    parts,
    part_weights,
    first_rows,
    out,
    heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Joins the SPLITS parts of head `program 1` of sequence `program 0`, each by its share of the total."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    part = (sequence.to(tl.int64) * heads + head) * SPLITS + split
    weight = tl.load(part_weights + part)
    best = tl.max(weight, axis=0)
    share = tl.exp2(weight - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(share, axis=0)
    inside = (dim < HEAD_DIM)[None, :] & (split >= 0)[:, None]
    rows = tl.load(parts + part[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    joined = tl.sum(rows * share[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    to = (tl.load(first_rows + sequence).to(tl.int64) * heads + head) * HEAD_DIM + dim
    tl.store(out + to, joined.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def attend_decodes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: Tables,
    splits: int,
    scores: Scores,
    out: torch.Tensor,
) -> None:
    """Writes the rows of `out` (rows, heads, head_dim) that the tables name; query and caches are contiguous."""
    _, heads, head_dim = query.shape
    sequences, kv_heads, device = len(tables.lengths), key_cache.shape[2], query.device
    padded_dim = max(triton.next_power_of_2(head_dim), 16)
    parts = torch.empty((sequences, heads, splits, head_dim) if splits > 1 else (0,), device=device)
    weights = torch.empty((sequences, heads, splits) if splits > 1 else (0,), device=device)
    decode_kernel[(sequences, kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        tables.first_rows,
        tables.lengths,
        tables.blocks,
        out,
        parts,
        weights,
        tables.blocks.stride(0),
        kv_heads,
        scores.window or 0,
        scores.scale,
        scores.softcap or 1.0,
        GROUP=heads // kv_heads,
        PADDED_GROUP=max(triton.next_power_of_2(heads // kv_heads), _GROUP_MIN),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=key_cache.shape[1],
        TILE=decode_tile(padded_dim, query.dtype),
        SPLITS=splits,
        WINDOW=scores.window is not None,
        SOFTCAP=scores.softcap is not None,
        WIDEN=bool(triton.knobs.runtime.interpret),
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        join_kernel[(sequences, heads)](
            parts,
            weights,
            tables.first_rows,
            out,
            heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            SPLITS=splits,
            num_warps=2,
        )


def decode_tile(padded_dim: int, dtype: torch.dtype) -> int:
    """How many positions are read at once: 16 KiB of keys, in fp32 (which has no tensor cores here) a quarter."""
    return max((16384 if dtype.itemsize == 2 else 4096) // (padded_dim * dtype.itemsize), 16)
