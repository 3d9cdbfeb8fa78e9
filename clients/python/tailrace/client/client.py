"""A connection to a Tailrace server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc.aio

from tailrace.client.events import AbortOutcome, Model, Tokens
from tailrace.client.options import Message, Options, add_messages, chat_request, generate_request
from tailrace.client.stream import Stream
from tailrace.client.wire import read_error
from tailrace.v1 import generation_pb2, generation_pb2_grpc

MAX_MESSAGE_BYTES = 16 << 20

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A long prefill or a full queue is silence; pings tell it from a dead server.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Client:
    """Generates text on the server at `host:port`.

        async with Client("127.0.0.1:7000") as client:
            async for event in client.generate("Once upon a time", max_tokens=32):
                ...

    Calls that are no stream raise Unreachable when no answer comes within `timeout_s` seconds.
    """

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and with it every open stream."""
        await self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """The continuation of a text or of ids. Raises InvalidRequest for what the contract's types can't hold."""
        request = generate_request(prompt, options)
        return Stream(lambda: self._stub.Generate(request), options.get("n", 1))

    def chat(self, messages: Iterable[Message], **options: Unpack[Options]) -> Stream:
        """The next turn of a conversation, given as {"role": …, "content": …}. Raises like `generate`."""
        request = chat_request(messages, options)
        return Stream(lambda: self._stub.Chat(request), options.get("n", 1))

    async def abort(self, request_id: str, *, wait_until_released: bool = False) -> AbortOutcome:
        """Stops a request by the id told in Started, from wherever it was sent."""
        request = generation_pb2.AbortRequest(request_id=request_id, wait_until_released=wait_until_released)
        try:
            return AbortOutcome((await self._stub.Abort(request, timeout=self._timeout_s)).outcome)
        except grpc.aio.AioRpcError as error:
            raise read_error(error) from error

    async def tokenize(self, text: str | Iterable[Message], *, add_special_tokens: bool = True) -> Tokens:
        """The ids of a text, or of a conversation as the model's chat template writes it down."""
        request = generation_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        if isinstance(text, str):
            request.text = text
        else:
            add_messages(request.conversation.messages.add, text, "conversation.messages")
        try:
            answer = await self._stub.Tokenize(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise read_error(error) from error
        return Tokens(tuple(answer.token_ids), tuple(answer.token_bytes))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids: exactly what a stream of them would join to."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        request.options.skip_special_tokens = skip_special_tokens
        try:
            return (await self._stub.Detokenize(request, timeout=self._timeout_s)).text
        except grpc.aio.AioRpcError as error:
            raise read_error(error) from error

    async def list_models(self) -> list[Model]:
        """The models that can be named in a request."""
        try:
            answer = await self._stub.ListModels(generation_pb2.ListModelsRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise read_error(error) from error
        return [
            Model(model.model_id, model.context_length, model.vocab_size, model.created_unix_ms)
            for model in answer.models
        ]
