"""Residual addition and RMSNorm in Triton: the sum stays in registers between the two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.rms_norm.kernel import normed_rows, row_tile


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    rows,
    columns,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows as in `rms_norm_kernel`; the sum is rounded before it is normalised, as it is when it is kept."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    added = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    kept = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    rounded = (added + kept).to(total.dtype.element_ty)
    at = row[:, None] * out_stride + column[None, :]
    tl.store(total + at, rounded, mask=inside)
    scaled = normed_rows(rounded.to(tl.float32), gain, columns, eps, weight.dtype.element_ty)
    tl.store(normed + at, scaled.to(normed.dtype.element_ty), mask=inside)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in `add_rms_norm`; fp32, bf16 and fp16, up to 32,768 columns, inputs with contiguous columns."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, columns = x.shape
    if rows:
        tile, warps = row_tile(columns)
        strides = x.stride(0), residual.stride(0), total.stride(0)
        add_rms_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            x, residual, weight, normed, total, rows, columns, *strides, eps, **tile, num_warps=warps
        )
    return normed, total
