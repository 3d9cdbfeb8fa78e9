"""/v1/chat/completions: reads the request, and says how pieces of its answer look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.openai import json_types as types
from gateway.openai.call import STRUCTURAL, Call, choices_of, deliver, read_model, read_stream
from gateway.openai.echo import NOTHING
from gateway.openai.logprobs import chat_logprobs
from gateway.openai.messages import read_messages
from gateway.openai.parameters import CHAT, Given, read_parameters, read_value
from services.protocol.events import TokenInfo
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2


class ChatForm:
    """Chat's shapes."""

    letter = "c"
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def read(self, body: Mapping[str, Any], request_id: str) -> Call:
        """A chat request. Raises InvalidRequest naming the parameter."""
        given = read_parameters(body, CHAT, STRUCTURAL | {"messages", "logprobs"})
        stream, include_usage = read_stream(body)
        _read_logprobs(body, given)
        deliver(given, stream=stream)
        request = generation_pb2.ChatRequest(
            request_id=request_id,
            model=read_model(body),
            messages=read_messages(body.get("messages")),
            options=given.options,
        )
        return Call(
            requests=[request],
            n=choices_of(given),
            stream=stream,
            include_usage=include_usage,
            names=given.names,
            echoes=[NOTHING],
        )

    def opening(self) -> Mapping[str, Any]:
        """The role, once per choice."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Mapping[str, Any]:
        """A delta; empty at the choice's end."""
        return {"delta": {"content": text} if text else {}}

    def whole(self, text: str) -> Mapping[str, Any]:
        """A message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, text_offset: int = 0) -> ChatLogprobs:
        """Writes one choice's token-level output."""
        return ChatLogprobs()


class ChatLogprobs:
    """Chat's form has no running state."""

    def more(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """The object for the next tokens."""
        return chat_logprobs(tokens)


def _read_logprobs(body: Mapping[str, Any], given: Given) -> None:
    """`logprobs` is a switch, `top_logprobs` the number of alternatives, which needs the switch."""
    wanted = body.get("logprobs") is not None and read_value("logprobs", types.boolean, body["logprobs"])
    if given.options.output.HasField("logprobs"):
        if not wanted:
            raise InvalidRequest("top_logprobs", "needs logprobs: true")
    elif wanted:
        given.options.output.logprobs = 0
