"""A checkpoint as the CPU's step library takes it: one part after the other, packed into the library's own memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernels.cpu import HEAD_DIM_MAX, Activation, CpuModel, Format, Part, Rope, Shape
from services.scheduler.model.array_weights import Array, as_fp32, open_arrays
from services.scheduler.model.checkpoint import LayerWeights, Projection, read_ends, read_layer
from services.scheduler.model.config import Activation as ModelActivation
from services.scheduler.model.config import ModelConfig
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.rope import frequencies, scaled
from services.scheduler.model.weights import Weights

_ACTIVATIONS = {ModelActivation.SILU: Activation.SILU, ModelActivation.GELU_TANH: Activation.GELU_TANH}


def shape_of(config: ModelConfig, *, weights_format: Format, blocks: int, block_size: int) -> Shape:
    """What the library must know of a model; raises UnsupportedModelError for one that it can't compute."""
    if config.head_dim > HEAD_DIM_MAX:
        raise UnsupportedModelError(f"head_dim {config.head_dim} is above the step library's {HEAD_DIM_MAX}")
    ropes = [layer.rope for layer in config.layers]
    distinct = [rope for number, rope in enumerate(ropes) if rope not in ropes[:number]]
    turns = [scaled(frequencies(rope.theta, config.head_dim), rope, config.context_length) for rope in distinct]
    return Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        weights_format=weights_format,
        kv_format=weights_format.kv,
        blocks=blocks,
        block_size=block_size,
        norm_eps=config.norm_eps,
        attention_scale=config.attention_scale,
        ropes=[Rope(frequencies=turn, gain=gain) for turn, gain in turns],
        layer_ropes=[distinct.index(rope) for rope in ropes],
        layer_windows=[layer.window or 0 for layer in config.layers],
        embedding_scale=config.embedding_scale,
        attention_soft_cap=config.attention_soft_cap or 0.0,
        logit_soft_cap=config.logit_soft_cap or 0.0,
        activation=_ACTIVATIONS[config.activation],
        qkv_bias=config.qkv_bias,
        attention_out_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
        sandwich_norms=config.sandwich_norms,
    )


def pack_weights(folder: Path, config: ModelConfig, model: CpuModel) -> int:
    """Puts a folder's weights into a model of its shape; returns how many there are.

    No more than one layer of them, or the embedding, is held beside the packed ones: as bf16 if they are stored so,
    otherwise as fp32. Raises UnsupportedModelError naming what is missing, left over or misshapen.
    """
    with open_arrays(folder) as weights:
        _pack_ends(config, weights, model)
        for number in range(len(config.layers)):
            _pack_layer(model, number, read_layer(config, weights, number))
        weights.finish()
        return weights.values_taken


def _pack_ends(config: ModelConfig, weights: Weights[Array], model: CpuModel) -> None:
    ends = read_ends(config, weights)
    model.put(Part.EMBEDDING, _ready(ends.embedding))
    model.put(Part.FINAL_NORM, _ready(ends.norm))
    model.put(Part.HEAD, _ready(ends.head))


def _pack_layer(model: CpuModel, number: int, layer: LayerWeights[Array]) -> None:
    norms = {
        Part.ATTENTION_NORM: layer.attention_norm,
        Part.QUERY_NORM: layer.query_norm,
        Part.KEY_NORM: layer.key_norm,
        Part.ATTENTION_OUT_NORM: layer.attention_out_norm,
        Part.FEED_FORWARD_NORM: layer.feed_forward_norm,
        Part.FEED_FORWARD_OUT_NORM: layer.feed_forward_out_norm,
    }
    for part, norm in norms.items():
        if norm is not None:
            model.put(part, _ready(norm), number)
    for part, bias_part, *projections in (
        (Part.QKV, Part.QKV_BIAS, layer.query, layer.key, layer.value),
        (Part.ATTENTION_OUT, Part.ATTENTION_OUT_BIAS, layer.attention_out),
        (Part.GATE, Part.GATE_BIAS, layer.gate),
        (Part.UP, Part.UP_BIAS, layer.up),
        (Part.DOWN, Part.DOWN_BIAS, layer.down),
    ):
        _pack_projections(model, number, part, bias_part, projections)


def _pack_projections(
    model: CpuModel, number: int, part: Part, bias_part: Part, projections: list[Projection[Array]]
) -> None:
    """Those that share their input are one part, output after output."""
    model.put(part, _joined([each.weight for each in projections]), number)
    biases = [each.bias for each in projections if each.bias is not None]
    if biases:
        model.put(bias_part, _joined(biases), number)


def _joined(arrays: list[Array]) -> Array:
    if len(arrays) == 1:
        return _ready(arrays[0])
    alike = len({array.dtype for array in arrays}) == 1
    return np.concatenate(arrays if alike else [as_fp32(array) for array in arrays])


def _ready(array: Array) -> Array:
    """As the library reads it: row after row, at an address that suits the numbers."""
    return np.require(array, requirements=("C", "A"))
