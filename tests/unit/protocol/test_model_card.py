"""What a model directory says of its model, in the words of several families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.protocol.model_card import load_model_card
from services.runtime.errors import PreconditionFailed


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 96, "max_position_embeddings": 256},
        {"vocab_size": 96, "n_positions": 256},
        {"model_type": "gemma3", "text_config": {"vocab_size": 96, "max_position_embeddings": 256}},
    ],
)
def test_vocabulary_and_context_are_found_under_every_familys_names(tmp_path: Path, config: dict[str, Any]) -> None:
    card = load_model_card(write(tmp_path, config))
    assert (card.vocab_size, card.context_length) == (96, 256)


def test_a_missing_context_is_named_by_its_usual_key(tmp_path: Path) -> None:
    with pytest.raises(PreconditionFailed, match="max_position_embeddings"):
        load_model_card(write(tmp_path, {"vocab_size": 96}))
