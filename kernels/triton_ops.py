"""The operations by our Triton kernels, as one value; matrix products stay with cuBLAS."""

from __future__ import annotations

from functools import partial

from kernels.add_rms_norm import add_rms_norm
from kernels.add_rms_norm.kernel import add_rms_norm_triton
from kernels.gelu_mul import gelu_mul
from kernels.gelu_mul.kernel import gelu_mul_triton
from kernels.linear import make_linear
from kernels.ops import Ops
from kernels.paged_attention import paged_attention
from kernels.paged_attention.kernel import paged_attention_triton
from kernels.paged_attention.tables import plan_tables
from kernels.rms_norm import rms_norm
from kernels.rms_norm.kernel import rms_norm_triton
from kernels.rotary_kv_write import rotary_kv_write
from kernels.rotary_kv_write.kernel import rotary_kv_write_triton
from kernels.silu_mul import silu_mul
from kernels.silu_mul.kernel import silu_mul_triton


def triton_ops() -> Ops:
    """Needs the package triton; on CPU tensors its interpreter, which is for tests."""
    return Ops(
        name="triton",
        rms_norm=partial(rms_norm, compute=rms_norm_triton),
        add_rms_norm=partial(add_rms_norm, compute=add_rms_norm_triton),
        silu_mul=partial(silu_mul, compute=silu_mul_triton),
        gelu_mul=partial(gelu_mul, compute=gelu_mul_triton),
        make_linear=make_linear,
        plan_attention=plan_tables,
        rotary_kv_write=partial(rotary_kv_write, compute=rotary_kv_write_triton),
        attention=partial(paged_attention, compute=paged_attention_triton),
        reads_beyond=False,
        narrow_cache=True,
    )
