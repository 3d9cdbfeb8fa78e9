"""Reads Hugging Face's `config.json` into a `ModelConfig`; a key that changes what is computed is known or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.scheduler.model.config import Activation, LayerConfig, ModelConfig, Rope
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.families import FAMILIES, FULL, MODEL_TYPES, SLIDING, Family


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor"},
}
_ROPE_OPTIONAL = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
_YARN_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "truncate"}

_READ = _words(
    """architectures model_type hidden_act vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling
    rope_parameters attention_bias tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id pad_token_id"""
)
_SAYS_NOTHING = _words(
    """_name_or_path transformers_version transformers.js_config use_cache cache_implementation initializer_range
    attention_dropout is_llama_config unsloth_version unsloth_fixed output_attentions output_hidden_states return_dict
    chunk_size_feed_forward id2label label2id problem_type is_encoder_decoder is_decoder num_labels auto_map
    _attn_implementation_autoset task_specific_params finetuning_task"""
)
# Keys that every family accepts with the one value that means "not used".
_FIXED: Mapping[str, tuple[Any, ...]] = {"quantization_config": (None,), "add_cross_attention": (False, None)}
_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` and, for the end-of-text ids, `generation_config.json`; raises UnsupportedModelError."""
    return parse_config({**read_json(folder / "config.json"), "eos_token_id": list(end_ids(folder))})


def end_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: those of `generation_config.json` or, where it says none, of `config.json`."""
    generation = folder / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    return _ids(read_json(folder / "config.json").get("eos_token_id") if ends is None else ends)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises UnsupportedModelError."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error
    if not isinstance(parsed, dict):
        raise UnsupportedModelError(f"{path} doesn't hold a JSON object")
    return parsed


def architecture_of(raw: Mapping[str, Any]) -> str:
    """What a parsed `config.json` calls its model, whether or not that is known."""
    names = raw.get("architectures") or [MODEL_TYPES.get(str(raw.get("model_type")), str(raw.get("model_type")))]
    return str(names[0])


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Checks a parsed `config.json`; raises UnsupportedModelError naming the key and what would be right."""
    architecture = architecture_of(raw)
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModelError(f"config.json: architectures is {architecture}; native are {', '.join(FAMILIES)}")
    _refuse_unknown(raw, architecture, family)
    return _config({**_DEFAULTS, **family.defaults, **raw}, architecture, family)


def _config(raw: Mapping[str, Any], architecture: str, family: Family) -> ModelConfig:
    heads, hidden = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    head_dim = _count(raw, "head_dim", hidden // heads)
    kv_heads = _count(raw, "num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}, "
            f"and head_dim {head_dim} even"
        )
    attention_bias = bool(raw["attention_bias"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=_count(raw, "max_position_embeddings"),
        layers=_layers(raw, family),
        norm_eps=_number(raw, "rms_norm_eps"),
        norm_offset=family.norm_offset,
        sandwich_norms=family.sandwich_norms,
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        attention_out_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(raw["mlp_bias"]),
        activation=_activation(raw, family),
        attention_scale=(_positive_or_none(raw, "query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_soft_cap=_positive_or_none(raw, "attn_logit_softcapping"),
        logit_soft_cap=_positive_or_none(raw, "final_logit_softcapping"),
        embedding_scale=float(hidden) ** 0.5 if family.scaled_embedding else 1.0,
        tied_head=bool(raw["tie_word_embeddings"]),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_ids(raw.get("eos_token_id")),
    )


def _refuse_unknown(raw: Mapping[str, Any], architecture: str, family: Family) -> None:
    fixed = {**_FIXED, **family.fixed}
    for key, value in raw.items():
        if key in fixed:
            if value not in fixed[key]:
                raise UnsupportedModelError(
                    f"config.json: {key} = {value!r} isn't supported for {architecture}; {fixed[key][0]!r} is"
                )
        elif key not in _READ | family.keys | _SAYS_NOTHING:
            raise UnsupportedModelError(
                f"config.json: the key {key!r} (= {value!r}) isn't known for {architecture}, so what it changes would "
                f"be left out; if that is nothing, remove it"
            )


def _activation(raw: Mapping[str, Any], family: Family) -> Activation:
    key = "hidden_activation" if raw.get("hidden_activation") else "hidden_act"
    if raw[key] not in family.activations:
        supported = " or ".join(repr(name) for name in family.activations)
        raise UnsupportedModelError(f"config.json: {key} = {raw[key]!r} isn't supported; {supported} is")
    return family.activations[raw[key]]


def _layers(raw: Mapping[str, Any], family: Family) -> tuple[LayerConfig, ...]:
    count = _count(raw, "num_hidden_layers")
    kinds = raw.get("layer_types") or family.layer_kinds(raw, count)
    if len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"config.json: layer_types must name {FULL!r} or {SLIDING!r} for each of {count} layers; it is {kinds!r}"
        )
    layer = {kind: LayerConfig(window=_window(raw, kind), rope=_rope(raw, family, kind)) for kind in sorted(set(kinds))}
    return tuple(layer[kind] for kind in kinds)


def _window(raw: Mapping[str, Any], kind: str) -> int | None:
    """None also for a window that the context never fills."""
    if kind == FULL:
        return None
    window = _count(raw, "sliding_window")
    return window if window < _count(raw, "max_position_embeddings") else None


def _rope(raw: Mapping[str, Any], family: Family, kind: str) -> Rope:
    """Newer files say all in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`."""
    local = family.rope_per_kind and kind == SLIDING
    theta = _number(raw, "rope_local_base_freq" if local else "rope_theta")
    if raw.get("rope_parameters"):
        parameters, name = raw["rope_parameters"], "rope_parameters"
        if family.rope_per_kind:
            parameters, name = _mapping(parameters, name).get(kind) or {}, f"{name}.{kind}"
    else:
        parameters, name = ({} if local else raw.get("rope_scaling") or {}), "rope_scaling"
    parameters = _mapping(parameters, name)
    return Rope(
        theta=_positive_or_none(parameters, "rope_theta", name) or theta, scaling=_rope_scaling(parameters, name)
    )


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"config.json: {name} = {value!r}; it must be an object")
    return value


def _rope_scaling(scaling: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise UnsupportedModelError(f"config.json: {name}.rope_type = {kind!r}; supported: {', '.join(_ROPE_KEYS)}")
    optional = _ROPE_OPTIONAL | (_YARN_OPTIONAL if kind == "yarn" else set())
    for key in scaling:
        if key not in _ROPE_KEYS[kind] and key not in optional:
            raise UnsupportedModelError(f"config.json: {name}.{key} isn't known for rope_type {kind!r}")
    for key in _ROPE_KEYS[kind]:
        if scaling.get(key) is None:
            raise UnsupportedModelError(f"config.json: {name}.{key} is missing; rope_type {kind!r} needs it")
    return None if kind == "default" else {**scaling, "rope_type": kind}


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise UnsupportedModelError(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {key} = {value!r}; it must be a whole number, 1 or more")
    return value


def _positive_or_none(raw: Mapping[str, Any], key: str, within: str = "") -> float | None:
    return None if raw.get(key) is None else _number(raw, key, within)


def _number(raw: Mapping[str, Any], key: str, within: str = "") -> float:
    value = raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        named = f"{within}.{key}" if within else key
        raise UnsupportedModelError(f"config.json: {named} = {value!r}; it must be a number above 0")
    return float(value)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) for one in ids):
        raise UnsupportedModelError(f"config.json: eos_token_id = {value!r}; it must be an id, or a list of them")
    return tuple(ids)
