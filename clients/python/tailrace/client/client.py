"""A connection to a Tailrace server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio

from tailrace.client.errors import ClientError, Unreachable
from tailrace.client.events import AbortOutcome, Model, Tokens
from tailrace.client.handle import Handle
from tailrace.client.law import StreamLaw
from tailrace.client.options import Message, Options, add_messages, chat_request, generate_request
from tailrace.client.servers import Servers
from tailrace.client.stream import Start, Stream
from tailrace.client.wire import read_error
from tailrace.v1 import generation_pb2


class Client:
    """Generates text on the server at `host:port`; with several addresses, on the next one when one can't be reached.

        async with Client("127.0.0.1:7000") as client:
            async for event in client.generate("Once upon a time", max_tokens=32):
                ...

    A stream that is cut is taken up again where it stood, as long as something new comes every `resume_for_s` seconds;
    with 0 it isn't. Where there are several addresses, a server that says nothing for two seconds is asked whether it
    lives, and left for the next one when it doesn't answer within a third; with one address gRPC's keepalive notices,
    after half a minute. Calls that are no stream raise Unreachable when no answer comes within `timeout_s` seconds.
    """

    def __init__(
        self, *addresses: str, api_key: str | None = None, timeout_s: float = 10.0, resume_for_s: float = 30.0
    ) -> None:
        if not addresses:
            raise TypeError("a client needs the address of a server")
        self.addresses = addresses
        self._timeout_s = timeout_s
        self._resume_for_s = resume_for_s
        self._servers = Servers(addresses, api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and with it every open stream."""
        await self._servers.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """The continuation of a text or of ids. Raises InvalidRequest for what the contract's types can't hold."""
        request = generate_request(prompt, options)
        return self._stream(lambda stub: stub.Generate(request, metadata=self._servers.metadata), options)

    def chat(self, messages: Iterable[Message], **options: Unpack[Options]) -> Stream:
        """The next turn of a conversation, given as {"role": …, "content": …}. Raises like `generate`."""
        request = chat_request(messages, options)
        return self._stream(lambda stub: stub.Chat(request, metadata=self._servers.metadata), options)

    def resume(self, handle: Handle) -> Stream:
        """The rest of an answer after a stream's `handle`, which may have been stored by another process.

        Its first event is Started, and every choice has its Finish. Raises NotFound where nobody has the request.
        """
        request = handle.request()
        return self._new_stream(
            lambda stub: stub.Resume(request, metadata=self._servers.metadata), StreamLaw(handle.offsets)
        )

    async def abort(self, request_id: str, *, wait_until_released: bool = False) -> AbortOutcome:
        """Stops a request by the id told in Started, from wherever it was sent."""
        request = generation_pb2.AbortRequest(request_id=request_id, wait_until_released=wait_until_released)
        return AbortOutcome((await self._ask(lambda stub: stub.Abort, request)).outcome)

    async def tokenize(self, text: str | Iterable[Message], *, add_special_tokens: bool = True) -> Tokens:
        """The ids of a text, or of a conversation as the model's chat template writes it down."""
        request = generation_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        if isinstance(text, str):
            request.text = text
        else:
            add_messages(request.conversation.messages.add, text, "conversation.messages")
        answer = await self._ask(lambda stub: stub.Tokenize, request)
        return Tokens(tuple(answer.token_ids), tuple(answer.token_bytes))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids: exactly what a stream of them would join to."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        request.options.skip_special_tokens = skip_special_tokens
        return str((await self._ask(lambda stub: stub.Detokenize, request)).text)

    async def list_models(self) -> list[Model]:
        """The models that can be named in a request."""
        answer = await self._ask(lambda stub: stub.ListModels, generation_pb2.ListModelsRequest())
        return [
            Model(model.model_id, model.context_length, model.vocab_size, model.created_unix_ms)
            for model in answer.models
        ]

    async def _ask(self, method: Callable[[Any], Any], request: Any) -> Any:
        """A call that is no stream, at each server until one can be reached."""
        failure: ClientError | None = None
        for _ in self.addresses:
            stub = self._servers.stub
            try:
                return await method(stub)(request, timeout=self._timeout_s, metadata=self._servers.metadata)
            except grpc.aio.AioRpcError as error:
                failure = read_error(error)
                if not isinstance(failure, Unreachable):
                    raise failure from error
                self._servers.turn_from(stub)
        assert failure is not None
        raise failure

    def _stream(self, start: Start, options: Options) -> Stream:
        return self._new_stream(start, StreamLaw([(0, 0)] * options.get("n", 1)))

    def _new_stream(self, start: Start, law: StreamLaw) -> Stream:
        return Stream(self._servers, start, law, resume_for_s=self._resume_for_s)
