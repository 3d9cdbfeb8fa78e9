"""A kernel that shows the random numbers of the sampling kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.kernel import exponentials


@triton.jit
def exponentials_kernel(out, key0, key1, SIZE: tl.constexpr):
    """out[i] is the exponential number of id i under a row's key words."""
    at = tl.arange(0, SIZE)
    zero = (at * 0).to(tl.uint32)
    tl.store(out + at, exponentials(at.to(tl.uint32), zero + key0, zero + key1))
