"""The calls that need no engine: Tokenize, Detokenize, ListModels."""

from __future__ import annotations

from services.protocol.model_card import ModelCard
from services.protocol.parse import parse_messages
from services.runtime.errors import InvalidRequest, NotFound, Unsupported
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.encoder import Encoder
from tailrace.v1 import generation_pb2


class TextCalls:
    """Answers about text and ids. `created_unix_ms`: since when this process serves the model."""

    def __init__(self, card: ModelCard, encoder: Encoder, template: ChatTemplate, *, created_unix_ms: int) -> None:
        self._card = card
        self._encoder = encoder
        self._template = template
        self._created_unix_ms = created_unix_ms

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """The ids of a text or a conversation. Raises InvalidRequest or NotFound."""
        self._check_model(request.model)
        ids = await self._ids(request)
        return generation_pb2.TokenizeResponse(token_ids=ids)

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """The text of ids."""
        raise Unsupported("Detokenize is not served by this version")

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

    def _check_model(self, model: str) -> None:
        if model and model != self._card.model_id:
            raise NotFound(f"model {model!r}; served is {self._card.model_id!r}")
