"""One decoder for every native model: a function of rows of many sequences, prefills and decodes alike.

It computes what `ModelConfig` describes, and calls nothing but the operations of `kernels.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kernels.linear import Linear
from kernels.ops import Ops
from services.scheduler.model.checkpoint import LayerWeights, Projection, read_ends, read_layer
from services.scheduler.model.config import Activation, LayerConfig, ModelConfig
from services.scheduler.model.config_json import read_config
from services.scheduler.model.kv_cache import KvCache
from services.scheduler.model.rotation import Rotation
from services.scheduler.model.torch_weights import open_weights
from services.scheduler.model.weights import Weights

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's rows: `token_ids` and `positions` (rows,), what attention planned, and the rows that need logits."""

    token_ids: Tensor
    positions: Tensor
    attention_plan: Any
    logit_rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    window: int | None
    rotation: int
    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out: Linear
    attention_out_norm: Tensor | None
    feed_forward_norm: Tensor
    gate_up: Linear
    down: Linear
    feed_forward_out_norm: Tensor | None


class Decoder:
    """A loaded model; it holds weights and nothing that changes."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights[Tensor]) -> None:
        self.config = config
        self.operations = ops.name
        self._ops = ops
        self._gate = {Activation.SILU: ops.silu_mul, Activation.GELU_TANH: ops.gelu_mul}[config.activation]
        ends = read_ends(config, weights)
        self._embedding, self._norm = ends.embedding, ends.norm
        # The factor is rounded to the model's dtype first, as it was when the model was trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=ends.embedding.dtype).item()
        self._head = ops.make_linear(ends.head, None)
        ropes = [layer.rope for layer in config.layers]
        distinct = [rope for number, rope in enumerate(ropes) if rope not in ropes[:number]]
        self._rotations = [
            Rotation(rope, config.head_dim, config.context_length, ends.embedding.device) for rope in distinct
        ]
        self._layers = [
            _layer(ops, layer, distinct.index(layer.rope), read_layer(config, weights, number))
            for number, layer in enumerate(config.layers)
        ]
        self.parameters = weights.values_taken

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Computes all rows, writes their keys and values, and returns logits (logit rows, vocab_size)."""
        angles = [rotation.angles(batch.positions, self._embedding.dtype) for rotation in self._rotations]
        residual = self._embed(batch.token_ids)
        normed = self._ops.rms_norm(residual, self._layers[0].attention_norm, self.config.norm_eps)
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        for number, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            caches = cache.keys[number], cache.values[number]
            attended = self._attend(layer, normed, angles[layer.rotation], caches, batch.attention_plan)
            normed, residual = self._join(attended, layer.attention_out_norm, residual, layer.feed_forward_norm)
            fed_forward = layer.down(self._gate(layer.gate_up(normed)))
            normed, residual = self._join(fed_forward, layer.feed_forward_out_norm, residual, next_norm)
        return _soft_capped(self._head(normed.index_select(0, batch.logit_rows)), self.config.logit_soft_cap)

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded = functional.embedding(token_ids, self._embedding)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def _attend(
        self, layer: _Layer, normed: Tensor, angles: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], plan: Any
    ) -> Tensor:
        config, ops = self.config, self._ops
        heads, kv_heads = config.heads, config.kv_heads
        joined = layer.qkv(normed).view(-1, heads + 2 * kv_heads, config.head_dim)
        values = joined[:, -kv_heads:]
        query = self._normed_heads(joined[:, :heads], layer.query_norm)
        keys = self._normed_heads(joined[:, heads:-kv_heads], layer.key_norm)
        query, keys = ops.rotary_kv_write(query, keys, values, *angles, *caches, plan.slots)
        scale, softcap = config.attention_scale, config.attention_soft_cap
        attended = ops.attention(query, keys, values, *caches, plan, scale=scale, window=layer.window, softcap=softcap)
        return layer.attention_out(attended.reshape(-1, heads * config.head_dim))

    def _normed_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Each head of (rows, heads, head_dim) normalised by itself, where the model does so."""
        if weight is None:
            return x
        return self._ops.rms_norm(x.reshape(-1, x.shape[-1]), weight, self.config.norm_eps).view(x.shape)

    def _join(
        self, output: Tensor, out_norm: Tensor | None, residual: Tensor, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds a block's output to the residual stream, and normalises the sum for the next block."""
        eps = self.config.norm_eps
        if out_norm is not None:
            output = self._ops.rms_norm(output, out_norm, eps)
        return self._ops.add_rms_norm(output, residual, next_norm, eps)


def load_decoder(folder: Path, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Loads a folder; raises UnsupportedModelError naming the key, or the tensor missing, left over or misshapen."""
    config = read_config(folder)
    with open_weights(folder, dtype, device) as weights:
        model = Decoder(config, ops, weights)
        weights.finish()
    return model


def _layer(ops: Ops, config: LayerConfig, rotation: int, weights: LayerWeights[Tensor]) -> _Layer:
    return _Layer(
        window=config.window,
        rotation=rotation,
        attention_norm=weights.attention_norm,
        qkv=_linear(ops, weights.query, weights.key, weights.value),
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        attention_out=_linear(ops, weights.attention_out),
        attention_out_norm=weights.attention_out_norm,
        feed_forward_norm=weights.feed_forward_norm,
        gate_up=_linear(ops, weights.gate, weights.up),
        down=_linear(ops, weights.down),
        feed_forward_out_norm=weights.feed_forward_out_norm,
    )


def _linear(ops: Ops, *parts: Projection[Tensor]) -> Linear:
    """One layer out of several that share their input, so that each step makes one product of them."""
    if len(parts) == 1:
        return ops.make_linear(parts[0].weight, parts[0].bias)
    biases = [part.bias for part in parts if part.bias is not None]
    return ops.make_linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def _soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)
