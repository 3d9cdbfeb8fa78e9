"""The tensors of a checkpoint by what they are for, whatever their family calls them.

One layer at a time, each tensor read when its layer is: whoever packs or joins weights holds no more than that twice.
Tensors of PyTorch or arrays of numpy: whatever the open weights give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from services.scheduler.model.config import ModelConfig
from services.scheduler.model.weights import N, Weights


@dataclass(frozen=True, slots=True)
class Projection(Generic[N]):
    """`x @ weightᵀ + bias`: weight (out, in), bias (out,) or none."""

    weight: N
    bias: N | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[N]):
    """One layer; norms are ready to multiply by, `norm_offset` included, and those that a model lacks are None."""

    attention_norm: N
    query: Projection[N]
    key: Projection[N]
    value: Projection[N]
    query_norm: N | None
    key_norm: N | None
    attention_out: Projection[N]
    attention_out_norm: N | None
    feed_forward_norm: N
    gate: Projection[N]
    up: Projection[N]
    down: Projection[N]
    feed_forward_out_norm: N | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWeights(Generic[N]):
    """What stands before and after the layers; `head` is the embedding itself where the two are tied."""

    embedding: N
    norm: N
    head: N


def read_layer(config: ModelConfig, weights: Weights[N], number: int) -> LayerWeights[N]:
    """Layer `number`, from 0; raises UnsupportedModelError naming what is missing or misshapen."""
    prefix, hidden, inner = f"model.layers.{number}.", config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def projection(name: str, outputs: int, inputs: int, biased: bool) -> Projection[N]:
        weight = weights.take(f"{prefix}{name}.weight", outputs, inputs)
        return Projection(weight, weights.take(f"{prefix}{name}.bias", outputs) if biased else None)

    def norm(name: str, size: int = hidden) -> N:
        return _norm(config, weights, f"{prefix}{name}.weight", size)

    sandwich, qk_norm = config.sandwich_norms, config.qk_norm
    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        query=projection("self_attn.q_proj", queries, hidden, config.qkv_bias),
        key=projection("self_attn.k_proj", keys, hidden, config.qkv_bias),
        value=projection("self_attn.v_proj", keys, hidden, config.qkv_bias),
        query_norm=norm("self_attn.q_norm", config.head_dim) if qk_norm else None,
        key_norm=norm("self_attn.k_norm", config.head_dim) if qk_norm else None,
        attention_out=projection("self_attn.o_proj", hidden, queries, config.attention_out_bias),
        # "post_attention" stands for two things: after the attention's output, or, for most, before the feed-forward.
        attention_out_norm=norm("post_attention_layernorm") if sandwich else None,
        feed_forward_norm=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        gate=projection("mlp.gate_proj", inner, hidden, config.mlp_bias),
        up=projection("mlp.up_proj", inner, hidden, config.mlp_bias),
        down=projection("mlp.down_proj", hidden, inner, config.mlp_bias),
        feed_forward_out_norm=norm("post_feedforward_layernorm") if sandwich else None,
    )


def read_ends(config: ModelConfig, weights: Weights[N]) -> EndWeights[N]:
    """Embedding, last norm and head; raises UnsupportedModelError naming what is missing or misshapen."""
    embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    if config.tied_head:
        weights.skip("lm_head.weight")  # some exports write the shared matrix twice
        head = embedding
    else:
        head = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
    return EndWeights(
        embedding=embedding, norm=_norm(config, weights, "model.norm.weight", config.hidden_size), head=head
    )


def _norm(config: ModelConfig, weights: Weights[N], name: str, size: int) -> N:
    """With an offset it stays fp32: 1 + w in 16 bits would lose most of a small w."""
    if not config.norm_offset:
        return weights.take(name, size)
    norm: N = weights.take(name, size, fp32=True) + config.norm_offset
    return norm
