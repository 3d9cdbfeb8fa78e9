"""The calls that need no engine: Tokenize, Detokenize, ListModels."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.protocol.model_card import ModelCard
from services.protocol.parse import parse_ids, parse_messages, parse_text_options
from services.protocol.request import TextOptions
from services.runtime.errors import InvalidRequest, NotFound, PreconditionFailed
from services.text.incremental import IncrementalDecoder
from services.text.vocabulary import UnsupportedTokenizer, Vocabulary, load_vocabulary
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.encoder import Encoder
from tailrace.v1 import generation_pb2

LONG_IDS = 10_000
"""From here on, ids are turned into text in a thread."""


class TextCalls:
    """Answers about text and ids. `created_unix_ms`: since when this process serves the model."""

    def __init__(
        self, directory: Path, card: ModelCard, encoder: Encoder, template: ChatTemplate, *, created_unix_ms: int
    ) -> None:
        self._path = directory / "tokenizer.json"
        self._card = card
        self._encoder = encoder
        self._template = template
        self._created_unix_ms = created_unix_ms
        self._vocabulary: Vocabulary | None = None
        self._loading = asyncio.Lock()

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """The ids of a text or a conversation, with the bytes of each. Raises InvalidRequest or NotFound."""
        self._check_model(request.model)
        ids = await self._ids(request)
        pieces = (await self._loaded()).pieces
        return generation_pb2.TokenizeResponse(token_ids=ids, token_bytes=[pieces[token_id] for token_id in ids])

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """The text of ids, as a text of its own. Raises InvalidRequest or NotFound."""
        self._check_model(request.model)
        vocabulary, options = await self._loaded(), parse_text_options(request.options)
        ids = parse_ids(request.token_ids, "token_ids", self._card.vocab_size)
        if len(ids) < LONG_IDS:
            text = _decode(vocabulary, ids, options)
        else:
            text = await asyncio.to_thread(_decode, vocabulary, ids, options)
        return generation_pb2.DetokenizeResponse(text=text)

    def list_models(self, context_length: int) -> generation_pb2.ListModelsResponse:
        """The one served model."""
        model = generation_pb2.Model(
            model_id=self._card.model_id,
            context_length=context_length,
            vocab_size=self._card.vocab_size,
            created_unix_ms=self._created_unix_ms,
        )
        return generation_pb2.ListModelsResponse(models=[model])

    async def _ids(self, request: generation_pb2.TokenizeRequest) -> list[int]:
        match request.WhichOneof("input"):
            case "text":
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                return await self._encoder.encode(request.text, add_special_tokens=special, field="text")
            case "conversation":
                field = "conversation.messages"
                messages = parse_messages(request.conversation.messages, field)
                text = await self._template.render(messages, field)
                return await self._encoder.encode(text, add_special_tokens=False, field=field)
            case _:
                raise InvalidRequest("input", "one of text and conversation is needed")

    async def _loaded(self) -> Vocabulary:
        """The vocabulary, read when it is first asked for: serving requests needs none here."""
        async with self._loading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = await asyncio.to_thread(load_vocabulary, self._path, size=self._card.vocab_size)
                except UnsupportedTokenizer as error:
                    raise PreconditionFailed(f"{self._path.name}: {error}") from error
        return self._vocabulary

    def _check_model(self, model: str) -> None:
        if model and model != self._card.model_id:
            raise NotFound(f"model {model!r}; served is {self._card.model_id!r}")


def _decode(vocabulary: Vocabulary, ids: tuple[int, ...], options: TextOptions) -> str:
    decoder = IncrementalDecoder(
        vocabulary,
        skip_special_tokens=options.skip_special_tokens,
        spaces_between_special_tokens=options.spaces_between_special_tokens,
        begins_text=True,
    )
    return "".join(map(decoder.push, ids)) + decoder.finish()
