"""The operations a model is made of, as one value: an engine chooses it at its start, the model calls nothing else.

A faster kernel is put in by `dataclasses.replace(reference_ops(), rms_norm=…)`; it keeps the signature, and is judged
by the reference of its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.gelu_mul import gelu_mul
from kernels.linear import Linear, make_linear
from kernels.paged_attention import Span, paged_attention, plan_attention
from kernels.rms_norm import rms_norm
from kernels.rotary_kv_write import rotary_kv_write
from kernels.silu_mul import silu_mul

Tensor = torch.Tensor


class RmsNorm(Protocol):
    """See kernels.rms_norm."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    """See kernels.add_rms_norm."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...


class GateMul(Protocol):
    """See kernels.silu_mul and kernels.gelu_mul."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class MakeLinear(Protocol):
    """See kernels.linear."""

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear: ...


class PlanAttention(Protocol):
    """Works out, once a step, whatever its attention wants to know.

    Only that attention looks inside, but for `slots` (rows,): where each row's keys and values are written.
    """

    def __call__(self, spans: Sequence[Span], block_size: int, device: torch.device) -> Any: ...


class RotaryKvWrite(Protocol):
    """Turns queries and keys, and writes keys and values into one layer's caches; see kernels.rotary_kv_write."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class PagedAttention(Protocol):
    """Attends over one layer's caches, which hold the step's keys and values by now; see kernels.paged_attention."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Any,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of every operation; `name` is for the start-up report.

    `reads_beyond` says that attention multiplies what lies behind a sequence's end in its last block by 0, where a
    NaN would stay one: such places are cleared for it. `narrow_cache`: it reads caches of fp8 beside a wider step.
    """

    name: str
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    silu_mul: GateMul
    gelu_mul: GateMul
    make_linear: MakeLinear
    plan_attention: PlanAttention
    rotary_kv_write: RotaryKvWrite
    attention: PagedAttention
    reads_beyond: bool = True
    narrow_cache: bool = False


def reference_ops() -> Ops:
    """Plain PyTorch throughout: right on every device, and what faster kernels are compared with."""
    return Ops(
        name="torch",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        gelu_mul=gelu_mul,
        make_linear=make_linear,
        plan_attention=plan_attention,
        rotary_kv_write=rotary_kv_write,
        attention=paged_attention,
    )
