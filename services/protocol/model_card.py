"""What every service must know of the served model, read from its directory without loading a weight."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.errors import PreconditionFailed

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The served model. `vocab_size` and `context_length` in tokens; the digest is SHA-256 of tokenizer.json."""

    model_id: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: bytes


def load_model_card(directory: Path, *, model_id: str = "") -> ModelCard:
    """Reads config.json, generation_config.json and tokenizer.json of a model directory.

    The model's name is `model_id`, or else the directory's own. Raises PreconditionFailed, naming the file, when the
    directory isn't a model.
    """
    config = _text_config(_read_json(directory / "config.json"))
    generation = _read_json(directory / "generation_config.json", optional=True)
    return ModelCard(
        model_id=model_id or directory.resolve().name,
        vocab_size=_positive(config, "vocab_size", directory),
        context_length=_positive(config, _context_key(config), directory),
        eos_token_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        tokenizer_digest=hashlib.sha256(_read(directory / "tokenizer.json")).digest(),
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model that also sees or hears keeps what concerns text in a part of its own."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _context_key(config: dict[str, Any]) -> str:
    """Older families have names of their own for it."""
    return next((key for key in _CONTEXT_KEYS if key in config), _CONTEXT_KEYS[0])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PreconditionFailed(f"{path} can't be read: {error.strerror}") from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise PreconditionFailed(f"{path} isn't JSON: {error}") from error
    if not isinstance(value, dict):
        raise PreconditionFailed(f"{path} must hold an object")
    return value


def _positive(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise PreconditionFailed(f"{directory / 'config.json'}: {key} must be a positive integer, not {value!r}")
    return value


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise PreconditionFailed(f"eos_token_id must be an id or a list of ids, not {value!r}")
