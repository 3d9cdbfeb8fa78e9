"""A Llama's shape, read from Hugging Face's `config.json`; a key that changes what is computed is known or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.scheduler.model.errors import UnsupportedModelError

_ARCHITECTURES = ("LlamaForCausalLM",)
_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor"},
}
_ROPE_OPTIONAL = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
_YARN_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "truncate"}

# Keys read below.
_READ = {
    *(
        "architectures",
        "model_type",
        "hidden_act",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
    ),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
    ),
    *("rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
# Keys that say nothing about inference with this architecture.
_IGNORED = {
    *(
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "is_llama_config",
    ),
    *("transformers.js_config", "unsloth_version", "unsloth_fixed", "output_attentions", "output_hidden_states"),
    *(
        "return_dict",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "is_encoder_decoder",
        "is_decoder",
    ),
    *("num_labels", "_attn_implementation_autoset", "auto_map", "task_specific_params", "finetuning_task"),
}
# Keys accepted with the one value that means "not used".
_FIXED: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "add_cross_attention": (False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes in values (`hidden_size`, `head_dim`), tokens (`vocab_size`, `context_length`) or counts.

    `rope_scaling` is None or a mapping with `rope_type` linear, llama3 or yarn and that scaling's parameters.
    `dtype` is the one the weights are stored in, as torch calls it ("float32").
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]


def read_config(folder: Path) -> LlamaConfig:
    """Reads `config.json` and, for the end-of-text ids, `generation_config.json`; raises UnsupportedModelError."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(raw if ends is None else {**raw, "eos_token_id": ends})


def parse_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Checks a parsed `config.json`; raises UnsupportedModelError naming the key."""
    architecture = _architecture(raw)
    _refuse_unknown(raw)
    heads, hidden = int(_required(raw, "num_attention_heads")), int(_required(raw, "hidden_size"))
    config = LlamaConfig(
        architecture=architecture,
        vocab_size=int(_required(raw, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(_required(raw, "intermediate_size")),
        layers=int(_required(raw, "num_hidden_layers")),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        context_length=int(raw.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(raw),
        rope_scaling=_rope_scaling(raw),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_ids(raw.get("eos_token_id")),
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise UnsupportedModelError(
            f"num_attention_heads {heads}, num_key_value_heads {config.kv_heads}, head_dim {config.head_dim} don't fit"
        )
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [raw.get("model_type")]
    if names == ["llama"]:
        return _ARCHITECTURES[0]
    for name in names:
        if name in _ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(f"architectures is {names}; supported: {', '.join(_ARCHITECTURES)}")


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    for key, value in raw.items():
        if key in _FIXED:
            if value not in _FIXED[key]:
                raise UnsupportedModelError(f"config.json: {key} = {value!r} isn't supported")
        elif key not in _READ and key not in _IGNORED:
            raise UnsupportedModelError(f"config.json: the key {key!r} (= {value!r}) isn't known for a Llama")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"config.json: hidden_act = {raw['hidden_act']!r} isn't supported, 'silu' is")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    parameters = raw.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _rope_scaling(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key)
    if not scaling:
        return None
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise UnsupportedModelError(
            f"config.json: {key}.rope_type = {kind!r}; supported: {', '.join(sorted(_ROPE_KEYS))}"
        )
    optional = _ROPE_OPTIONAL | (_YARN_OPTIONAL if kind == "yarn" else set())
    for name in scaling:
        if name not in _ROPE_KEYS[kind] and name not in optional:
            raise UnsupportedModelError(f"config.json: {key}.{name} isn't known for rope_type {kind!r}")
    for name in _ROPE_KEYS[kind]:
        if scaling.get(name) is None:
            raise UnsupportedModelError(f"config.json: {key}.{name} is missing; rope_type {kind!r} needs it")
    return None if kind == "default" else {**scaling, "rope_type": kind}


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise UnsupportedModelError(f"config.json: {key} is missing")
    return raw[key]


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error
    if not isinstance(parsed, dict):
        raise UnsupportedModelError(f"{path} doesn't hold a JSON object")
    return parsed
