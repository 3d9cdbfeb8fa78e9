"""Rotation and the write into the paged cache in Triton: each key and value is read once and stored where it stays."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def stored(x, dtype: tl.constexpr):
    """fp32 `x` as the cache holds it: what is beyond fp8's largest number becomes that, and only NaN stays NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def rotary_kv_write_kernel(
    query,
    keys,
    values,
    cos,
    sin,
    key_cache,
    value_cache,
    slots,
    query_out,
    keys_out,
    query_stride,
    key_stride,
    value_stride,
    angle_stride,
    query_heads,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Heads [HEADS * program 1, …) of row `program 0`; query heads come first, then KV heads.

    HALF is a power of two from half of HEAD_DIM up. A head lies HEAD_DIM values after the one before; a slot below 0
    (a row that only pads a batch) is computed but not stored.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    low = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    inside = low < half
    cos_low = tl.load(cos + row * angle_stride + low, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + row * angle_stride + half + low, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + row * angle_stride + low, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + row * angle_stride + half + low, mask=inside, other=0.0).to(tl.float32)

    at = head[:, None] * HEAD_DIM + low[None, :]
    asks = (head < query_heads)[:, None] & inside[None, :]
    first = tl.load(query + row * query_stride + at, mask=asks, other=0.0).to(tl.float32)
    second = tl.load(query + row * query_stride + half + at, mask=asks, other=0.0).to(tl.float32)
    to = row * query_heads * HEAD_DIM + at
    dtype = query_out.dtype.element_ty
    tl.store(query_out + to, (first * cos_low + second * sin_low).to(dtype), mask=asks)
    tl.store(query_out + half + to, (second * cos_high + first * sin_high).to(dtype), mask=asks)

    kv_head = head - query_heads
    at = kv_head[:, None] * HEAD_DIM + low[None, :]
    holds = ((kv_head >= 0) & (kv_head < kv_heads))[:, None] & inside[None, :]
    first = tl.load(keys + row * key_stride + at, mask=holds, other=0.0).to(tl.float32)
    second = tl.load(keys + row * key_stride + half + at, mask=holds, other=0.0).to(tl.float32)
    turned_low = (first * cos_low + second * sin_low).to(dtype)
    turned_high = (second * cos_high + first * sin_high).to(dtype)
    to = row * kv_heads * HEAD_DIM + at
    tl.store(keys_out + to, turned_low, mask=holds)
    tl.store(keys_out + half + to, turned_high, mask=holds)

    slot = tl.load(slots + row).to(tl.int64) + tl.zeros((HEADS, 1), tl.int64)
    kept = holds & (slot >= 0)
    to = slot * kv_heads * HEAD_DIM + at
    cached = key_cache.dtype.element_ty
    tl.store(key_cache + to, stored(turned_low.to(tl.float32), cached), mask=kept)
    tl.store(key_cache + half + to, stored(turned_high.to(tl.float32), cached), mask=kept)
    first = tl.load(values + row * value_stride + at, mask=holds, other=0.0).to(tl.float32)
    second = tl.load(values + row * value_stride + half + at, mask=holds, other=0.0).to(tl.float32)
    tl.store(value_cache + to, stored(first, cached), mask=kept)
    tl.store(value_cache + half + to, stored(second, cached), mask=kept)


def rotary_kv_write_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in `rotary_kv_write`; fp32, bf16 and fp16, caches in the same or in fp8 (e4m3, from sm_89 on).

    Rows may lie apart; caches are contiguous.
    """
    rows, heads, head_dim = query.shape
    query, keys, values = (_heads_side_by_side(x) for x in (query, keys, values))
    kv_heads = keys.shape[1]
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    keys_out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    if rows:
        half = max(triton.next_power_of_2(head_dim // 2), 16)
        tile = max(min(triton.next_power_of_2(heads + kv_heads), 1024 // half), 1)
        rotary_kv_write_kernel[(rows, triton.cdiv(heads + kv_heads, tile))](
            query,
            keys,
            values,
            cos,
            sin,
            key_cache,
            value_cache,
            slots,
            query_out,
            keys_out,
            query.stride(0),
            keys.stride(0),
            values.stride(0),
            cos.stride(0),
            heads,
            kv_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            HEADS=tile,
            num_warps=4,
        )
    return query_out, keys_out


def _heads_side_by_side(x: torch.Tensor) -> torch.Tensor:
    """As the kernel reads a row: head after head; copied where they don't lie so."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
