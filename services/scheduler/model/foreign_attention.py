"""What transformers' models call in place of their own attention: the same paged attention that native models use.

transformers lets a function be registered under a name (its `AttentionInterface`). A layer then hands it queries, keys
and values, already turned by their positions; where they lie in blocks is known here alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from kernels.kv_write import kv_write
from kernels.ops import Ops
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.kv_cache import KvCache

Tensor = torch.Tensor

_NUMBERS = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    """What one layer hands over: its keys' heads, how long their vectors are, and how it scores."""

    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Step:
    cache: KvCache
    plan: Any
    slots: Tensor


class ForeignAttention:
    """The attention of one model, under a name of its own: transformers' registry is one for the whole process.

    A first forward pass, outside of any step, shows it which modules there are and what they hand over; then it serves
    steps.
    """

    def __init__(self, ops: Ops) -> None:
        self.name = f"tailrace_{next(_NUMBERS)}"
        self.layers: list[LayerHeads] = []
        self._ops = ops
        self._places: dict[int, int] = {}
        self._step: _Step | None = None
        AttentionInterface.register(self.name, self._attend)

    @contextmanager
    def over(self, cache: KvCache, plan: Any) -> Iterator[None]:
        """Within, the model's layers write into `cache` and attend over it."""
        self._step = _Step(cache, plan, plan.slots.long())  # kernels of our own take shorter ones
        try:
            yield
        finally:
            self._step = None

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **told: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: (1, heads, rows, head_dim) each; returns (1, rows, heads, value's head_dim)."""
        query, keys, values = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if self._step is None:
            _refuse_other_attention(module, attention_mask, told)
            self._places[id(module)] = len(self.layers)
            self.layers.append(_layer(query, keys, values, told))
            return value.new_zeros(1, *query.shape[:2], values.shape[2]), None  # only who calls and how matters now
        return self._attend_paged(self._places[id(module)], query, keys, values, self._step).unsqueeze(0), None

    def _attend_paged(self, place: int, query: Tensor, keys: Tensor, values: Tensor, step: _Step) -> Tensor:
        layer, width = self.layers[place], step.cache.keys.shape[-1]
        caches = step.cache.keys[place], step.cache.values[place]
        query, keys, values = (_padded(x, width) for x in (query, keys, values))
        kv_write(keys, values, *caches, step.slots)
        attended = self._ops.attention(
            query, keys, values, *caches, step.plan, scale=layer.scale, window=layer.window, softcap=layer.softcap
        )
        return attended[..., : layer.value_dim]


def _layer(query: Tensor, keys: Tensor, values: Tensor, told: dict[str, Any]) -> LayerHeads:
    scale = told.get("scaling")
    return LayerHeads(
        kv_heads=keys.shape[1],
        key_dim=keys.shape[2],
        value_dim=values.shape[2],
        scale=query.shape[2] ** -0.5 if scale is None else float(scale),
        window=told.get("sliding_window"),
        softcap=told.get("softcap"),
    )


def _refuse_other_attention(module: torch.nn.Module, mask: Tensor | None, told: dict[str, Any]) -> None:
    """What would change the result and isn't computed here; positions are in the queries and keys by now."""
    kind = type(module).__name__
    if mask is not None or not told.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedModelError(f"{kind} isn't plain causal attention")
    if told.get("dropout"):
        raise UnsupportedModelError(f"{kind} wants dropout")
    for name, value in told.items():
        if isinstance(value, Tensor) and name != "position_ids":
            raise UnsupportedModelError(f"{kind} wants {name!r} in its attention, which isn't supported")


def _padded(x: Tensor, width: int) -> Tensor:
    """Where keys and values differ in length both take the longer's place; zeros change no product."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))
