"""The families of models that are computed natively: what each means by its `config.json`, as a table.

Defaults are those of transformers' configuration class of the family: a file may leave them out. To add a family whose
layers `ModelConfig` can describe, add a row; its tests compare it with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.model.config import Activation

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers, as `layer_types` calls them."""

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family; fields that are bare facts stand for every model of it.

    `keys` are read beside those that all families have; `fixed` are accepted with these values alone. `defaults` fill
    what a file leaves out. `layer_kinds` tells the kind of each layer where `layer_types` doesn't.
    """

    defaults: Raw = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    layer_kinds: Callable[[Raw, int], list[str]] = lambda raw, layers: [FULL] * layers
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": Activation.SILU})
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: `attention_bias` says so for all four projections
    scaled_embedding: bool = False
    rope_per_kind: bool = False  # sliding layers turn by `rope_local_base_freq`, unscaled


def _all_sliding(raw: Raw, layers: int) -> list[str]:
    return [SLIDING if raw["sliding_window"] is not None else FULL] * layers


def _sliding_after_the_first(raw: Raw, layers: int) -> list[str]:
    if not raw["use_sliding_window"] or raw["sliding_window"] is None:
        return [FULL] * layers
    return [SLIDING if number >= raw["max_window_layers"] else FULL for number in range(layers)]


def _every_second_full(raw: Raw, layers: int) -> list[str]:
    return [FULL if number % 2 else SLIDING for number in range(layers)]


def _full_by_pattern(raw: Raw, layers: int) -> list[str]:
    every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    return [FULL if (number + 1) % every == 0 else SLIDING for number in range(layers)]


_QWEN = Family(
    defaults={
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    keys=frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    layer_kinds=_sliding_after_the_first,
)
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA_SLIDING_KEYS = frozenset(
    {"hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping"}
)
_GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": Activation.GELU_TANH}
_GEMMA_FIXED = {"use_bidirectional_attention": (False, None)}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        keys=frozenset({"mlp_bias"}),
        fixed={"pretraining_tp": (1, None), "rope_interleaved": (False, None), "sliding_window": (None,)},
    ),
    "MistralForCausalLM": Family(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        keys=frozenset({"sliding_window"}),
        fixed={"attention_bias": (False, None)},
        layer_kinds=_all_sliding,
    ),
    "Qwen2ForCausalLM": Family(
        defaults=_QWEN.defaults, keys=_QWEN.keys, layer_kinds=_QWEN.layer_kinds, qkv_bias=True,
        fixed={"attention_bias": (True, None)},
    ),
    "Qwen3ForCausalLM": Family(
        defaults={**_QWEN.defaults, "head_dim": 128}, keys=_QWEN.keys, layer_kinds=_QWEN.layer_kinds, qk_norm=True,
    ),
    "GemmaForCausalLM": Family(
        defaults=_GEMMA_DEFAULTS,
        keys=frozenset({"hidden_activation"}),
        fixed=_GEMMA_FIXED,
        activations={**_GEMMA_ACTIVATIONS, "gelu": Activation.GELU_TANH},  # early files mean the tanh form by it
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "Gemma2ForCausalLM": Family(
        defaults={
            **_GEMMA_DEFAULTS,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        keys=_GEMMA_SLIDING_KEYS | {"attn_logit_softcapping"},
        fixed=_GEMMA_FIXED,
        activations=_GEMMA_ACTIVATIONS,
        layer_kinds=_every_second_full,
        norm_offset=1.0,
        sandwich_norms=True,
        scaled_embedding=True,
    ),
    "Gemma3ForCausalLM": Family(
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        keys=_GEMMA_SLIDING_KEYS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
        fixed={**_GEMMA_FIXED, "attn_logit_softcapping": (None,)},
        activations=_GEMMA_ACTIVATIONS,
        layer_kinds=_full_by_pattern,
        norm_offset=1.0,
        sandwich_norms=True,
        qk_norm=True,
        scaled_embedding=True,
        rope_per_kind=True,
    ),
}  # fmt: skip

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""For files that name no architecture."""
