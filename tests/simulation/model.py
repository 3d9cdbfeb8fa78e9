"""The model directory of the simulation: a small vocabulary whose words, bytes and special tokens split characters."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from services.text.vocabulary import Vocabulary
from tests.unit.detokenizer.small_tokenizers import WORDS, byte_ids, byte_level, vocabulary_of

CONTEXT_LENGTH = 256
EOS = "</s>"


@cache
def directory() -> Path:
    """Written once per process; it is all that a service reads."""
    return _written(byte_level())


@cache
def another_directory() -> Path:
    """A model that must not be used beside it: its vocabulary is another one."""
    return _written(byte_level((*WORDS, " another")))


def _written(tokenizer: Tokenizer) -> Path:
    path = Path(tempfile.mkdtemp(prefix="tailrace-simulation-")) / "small"
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT_LENGTH,
        "eos_token_id": eos_id(),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def vocabulary() -> Vocabulary:
    """The bytes of each id."""
    return vocabulary_of(byte_level())


def eos_id() -> int:
    """The end-of-text id."""
    found = byte_level().token_to_id(EOS)
    assert found is not None
    return found


def ids_of(text: str) -> tuple[int, ...]:
    """A text as the ids of its bytes, so that a character of several bytes is several tokens."""
    return tuple(byte_ids(byte_level(), text.encode()))
