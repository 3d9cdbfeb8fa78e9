"""RMSNorm in Triton: a program takes whole rows, so each value is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS_MAX = 32768
_TILE = 1024  # values a program works on at least: short rows (a head each) share a program


@triton.jit
def normed_rows(wide, weight, columns, eps, dtype: tl.constexpr):
    """`weight * round(x / √(mean(x²) + eps))` for fp32 rows whose padding is 0; rounds to `dtype`, then weighs."""
    mean_square = tl.sum(wide * wide, axis=1) / columns
    scaled = wide * (1.0 / tl.sqrt(mean_square + eps))[:, None]
    return scaled.to(dtype).to(tl.float32) * weight[None, :]


@triton.jit
def rms_norm_kernel(
    x, weight, out, rows, columns, x_stride, out_stride, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows [ROWS * program, …) of x (rows, columns), COLUMNS a power of two from `columns` up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    wide = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    normed = normed_rows(wide, gain, columns, eps, weight.dtype.element_ty)
    tl.store(out + row[:, None] * out_stride + column[None, :], normed.to(out.dtype.element_ty), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Shapes as in `rms_norm`; fp32, bf16 and fp16, up to 32,768 columns, x with contiguous columns."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, columns = x.shape
    if rows:
        tile, warps = row_tile(columns)
        rms_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            x, weight, out, rows, columns, x.stride(0), out.stride(0), eps, **tile, num_warps=warps
        )
    return out


def row_tile(columns: int) -> tuple[dict[str, int], int]:
    """How many rows and padded columns a program takes, and its warps: 8 to 32 values a thread."""
    if columns > COLUMNS_MAX:
        raise ValueError(f"rows of {columns} values; the kernel takes up to {COLUMNS_MAX}")
    padded = triton.next_power_of_2(columns)
    rows = max(_TILE // padded, 1)
    return {"ROWS": rows, "COLUMNS": padded}, min(max(rows * padded // 512, 1), 16)
