"""What both attention kernels do with a tile of keys and values: score, keep the running softmax, accumulate.

Softmax without a second pass, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; online normaliser: Milakov and
Gimelshein 2018, arXiv 1805.02867), in powers of two, which the hardware computes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(left, right, WIDEN: tl.constexpr):
    """`left @ right` summed in fp32; with WIDEN on fp32 copies, for the interpreter can't multiply bf16."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def attend_tiles(
    query,
    row_positions,
    best,
    total,
    sums,
    key_cache,
    value_cache,
    table,
    begin,
    end,
    seen_from,
    kv_head,
    kv_heads,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Takes positions [begin, end) tile by tile into (best, total, sums) of the rows of `query`.

    `scale` turns a product into a score; scores are multiplied by log2(e) where powers of two are taken. With MASKED
    row i sees positions [seen_from[i], row_positions[i]], and a tile may reach beyond `end`; without it every row sees
    whole tiles. Places beyond `end` aren't read, so what lies there can't matter, not even a NaN.
    """
    dim = tl.arange(0, PADDED_DIM)
    for first in range(begin, end, TILE):
        position = first + tl.arange(0, TILE)
        there = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + position % BLOCK_SIZE) * kv_heads + kv_head
        held = there[:, None] & (dim < HEAD_DIM)[None, :]
        at = slot[:, None] * HEAD_DIM + dim[None, :]
        keys = tl.load(key_cache + at, mask=held, other=0.0).to(query.dtype)
        scores = product(query, tl.trans(keys), WIDEN) * scale
        if SOFTCAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = scores * 1.4426950408889634
        if MASKED:
            sees = (position[None, :] <= row_positions[:, None]) & (position[None, :] >= seen_from[:, None])
            scores = tl.where(sees & there[None, :], scores, float("-inf"))
        grown = tl.maximum(best, tl.max(scores, axis=1))
        # A row that sees nothing yet has -inf here, and -inf less -inf is no number.
        base = tl.where(grown == float("-inf"), 0.0, grown)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(value_cache + at, mask=held, other=0.0).to(query.dtype)
        sums = sums * shrink[:, None] + product(weights.to(query.dtype), values, WIDEN)
        best = grown
    return best, total, sums
