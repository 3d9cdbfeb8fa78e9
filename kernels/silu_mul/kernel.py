"""Gated activations in Triton: one read of gate and up, one write, for silu and for gelu's tanh form."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))`, which for a large -x is 1 / inf = 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate_mul_kernel(gate_up, out, columns, in_stride, out_stride, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of one row of gate_up (rows, 2 * columns): `activation(gate) * up`, rounded between the two."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    gate = tl.load(gate_up + row * in_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(z)) / 2 is sigmoid(2 z); √(2/π) = 0.7978845608
        activated = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * sigmoid(gate)
    dtype = out.dtype.element_ty
    tl.store(out + row * out_stride + column, (activated.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Shapes as in `silu_mul`; fp32, bf16 and fp16, with contiguous columns."""
    return gate_mul(gate_up, gelu=False)


def gate_mul(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """Launches the kernel with one activation or the other."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, columns), dtype=gate_up.dtype, device=gate_up.device)
    if rows and columns:
        tile = min(triton.next_power_of_2(columns), _COLUMNS)
        gate_mul_kernel[(rows, triton.cdiv(columns, tile))](
            gate_up, out, columns, gate_up.stride(0), out.stride(0), GELU=gelu, COLUMNS=tile, num_warps=4
        )
    return out
