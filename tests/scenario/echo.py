"""All four services around a model that says what it is told: ids in, the same ids out, as a real client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from services.text.vocabulary import Vocabulary
from tailrace.client import Answer, Client
from tests.stack import Stack, in_process_stack

CONTEXT_LENGTH = 32768


@dataclass(frozen=True)
class Echo:
    """A running system and a client of it; `vocabulary` is read from the same tokenizer.json, to write outputs with."""

    stack: Stack
    client: Client
    vocabulary: Vocabulary

    async def say(self, ids: Sequence[int], **options: Any) -> Answer:
        """The answer whose output is these ids, one at a time, unless something ends it before."""
        return await self.client.generate(ids, **{"max_tokens": len(ids), "ignore_eos": True, **options}).whole()

    def byte_ids(self, data: str | bytes) -> list[int]:
        """One token per byte."""
        return [self._single[byte] for byte in (data.encode() if isinstance(data, str) else data)]

    def can_spell(self, data: bytes) -> bool:
        """Whether each of these bytes has a token of its own."""
        return all(byte in self._single for byte in data)

    def ids(self, *texts: str) -> list[int]:
        """One token per text."""
        pieces = self.vocabulary.pieces
        return [len(pieces) - 1 - pieces[::-1].index(text.encode()) for text in texts]

    @cached_property
    def _single(self) -> dict[int, int]:
        pieces = enumerate(self.vocabulary.pieces)
        return {piece[0]: token_id for token_id, piece in pieces if len(piece) == 1}


def write_model(
    directory: Path, tokenizer_json: bytes, vocabulary: Vocabulary, *, bos: str = "", eos: int = 0, template: str = ""
) -> Path:
    """A model directory without weights around a tokenizer.json; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_bytes(tokenizer_json)
    config = {
        "vocab_size": len(vocabulary.pieces),
        "max_position_embeddings": CONTEXT_LENGTH,
        "eos_token_id": eos,
    }
    (directory / "config.json").write_text(json.dumps(config))
    if template:
        (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
        (directory / "chat_template.jinja").write_text(template)
    return directory


@asynccontextmanager
async def running_echo(model: Path, vocabulary: Vocabulary, *, draft_tokens: int = 0) -> AsyncIterator[Echo]:
    """The system around such a directory. `vocabulary` is that of its tokenizer.json."""
    engine = {"fake_mode": "echo", "draft_tokens": draft_tokens}
    async with in_process_stack(model, scheduler=engine) as stack, Client(stack.grpc) as client:
        yield Echo(stack, client, vocabulary)
