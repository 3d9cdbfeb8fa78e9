"""The Llama family as a function of a flat batch: rows of many sequences, prefills and decodes alike, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kernels.linear import Linear
from kernels.ops import Ops
from services.scheduler.model.config import LlamaConfig
from services.scheduler.model.kv_cache import KvCache
from services.scheduler.model.rope import scaled_frequencies
from services.scheduler.model.weights import Weights, open_weights

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's rows: `token_ids` and `positions` (rows,), what attention planned, and the rows that need logits."""

    token_ids: Tensor
    positions: Tensor
    attention_plan: Any
    logit_rows: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    attention_out: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A loaded model; it holds weights and nothing that changes."""

    def __init__(self, config: LlamaConfig, ops: Ops, weights: Weights) -> None:
        self.config = config
        self._ops = ops
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [_load_layer(config, ops, weights, f"model.layers.{n}.") for n in range(config.layers)]
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        self._head = ops.make_linear(_head_weight(config, weights, self._embedding), None)
        self._frequencies, self._rope_gain = scaled_frequencies(
            config.rope_theta, config.head_dim, config.rope_scaling, config.context_length
        )
        self._frequencies = self._frequencies.to(self._embedding.device)
        self.parameters = weights.values_taken

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Computes all rows, writes their keys and values, and returns logits (logit rows, vocab_size)."""
        ops, eps = self._ops, self.config.rms_norm_eps
        cos, sin = self._angles(batch.positions)
        residual = functional.embedding(batch.token_ids, self._embedding)
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for number, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = self._attend(layer, normed, cos, sin, cache, number, batch.attention_plan)
            normed, residual = ops.add_rms_norm(attended, residual, layer.post_attention_norm, eps)
            fed_forward = layer.down(ops.silu_mul(layer.gate_up(normed)))
            normed, residual = ops.add_rms_norm(fed_forward, residual, next_norm, eps)
        return self._head(normed.index_select(0, batch.logit_rows))

    def _attend(
        self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor, cache: KvCache, number: int, plan: Any
    ) -> Tensor:
        heads, kv_heads, head_dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        joined = layer.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)
        query, keys, values = joined[:, :heads], joined[:, heads:-kv_heads], joined[:, -kv_heads:]
        caches = cache.keys[number], cache.values[number]
        query, keys = self._ops.rotary_kv_write(query, keys, values, cos, sin, *caches, plan.slots)
        attended = self._ops.attention(query, keys, values, *caches, plan)
        return layer.attention_out(attended.reshape(-1, heads * head_dim))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines twice, and negated sines then sines, each (rows, head_dim): the form `kernels.rotary` asks for."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._rope_gain, angles.sin() * self._rope_gain
        dtype = self._embedding.dtype
        return torch.cat((cos, cos), dim=1).to(dtype), torch.cat((-sin, sin), dim=1).to(dtype)


def load_llama(folder: Path, config: LlamaConfig, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> Llama:
    """Loads the weights of a folder; raises UnsupportedModelError naming what is missing, left over or misshapen."""
    with open_weights(folder, dtype, device) as weights:
        model = Llama(config, ops, weights)
        weights.finish()
    return model


def _load_layer(config: LlamaConfig, ops: Ops, weights: Weights, prefix: str) -> _Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def linear(columns: int, bias: bool, *outputs: tuple[str, int]) -> Linear:
        """One layer out of several that share their input, so that each step makes one product of them."""
        parts = [weights.take(f"{prefix}{name}.weight", size, columns) for name, size in outputs]
        biases = [weights.take(f"{prefix}{name}.bias", size) for name, size in outputs if bias]
        return ops.make_linear(torch.cat(parts), torch.cat(biases) if biases else None)

    return _Layer(
        input_norm=weights.take(prefix + "input_layernorm.weight", hidden),
        qkv=linear(
            hidden,
            config.attention_bias,
            ("self_attn.q_proj", query),
            ("self_attn.k_proj", key_value),
            ("self_attn.v_proj", key_value),
        ),
        attention_out=linear(query, config.attention_bias, ("self_attn.o_proj", hidden)),
        post_attention_norm=weights.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=linear(hidden, config.mlp_bias, ("mlp.gate_proj", inner), ("mlp.up_proj", inner)),
        down=linear(inner, config.mlp_bias, ("mlp.down_proj", hidden)),
    )


def _head_weight(config: LlamaConfig, weights: Weights, embedding: Tensor) -> Tensor:
    if config.tied_embeddings:
        weights.skip("lm_head.weight")  # some exports write the shared matrix twice
        return embedding
    return weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
