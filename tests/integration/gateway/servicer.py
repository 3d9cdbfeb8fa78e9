"""A tokenizer that speaks the contract over real gRPC and answers as a test's script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from services.protocol.events import FinishReason
from services.protocol.hello import PROTOCOL_VERSION
from services.runtime.errors import NotFound, TailraceError, abort, answering
from tailrace.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

MODEL = "scripted-1"
CREATED_UNIX_MS = 1_700_000_000_000
TOKEN = b"\x00\xffresume-token.."

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class ScriptedStream:
    """One opened or attached request; whatever is said is recorded, so that it can be replayed."""

    request: tokenizer_pb2.OpenRequest | tokenizer_pb2.AttachRequest
    publish: Callable[[tokenizer_pb2.EventBatch], None]
    released: asyncio.Event = field(default_factory=asyncio.Event)
    end: int = 0
    batches: list[tokenizer_pb2.EventBatch] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    text_length: dict[int, int] = field(default_factory=dict)

    @property
    def options(self) -> generation_pb2.GenerationOptions:
        """What the caller asked for."""
        return self.body.options

    @property
    def body(self) -> generation_pb2.GenerateRequest | generation_pb2.ChatRequest:
        """The request itself."""
        assert isinstance(self.request, tokenizer_pb2.OpenRequest)
        return self.request.chat if self.request.HasField("chat") else self.request.generate

    @property
    def n(self) -> int:
        """Number of choices."""
        return self.options.n or 1

    def say(
        self,
        text: str,
        *,
        choice: int = 0,
        ids: Sequence[int] | None = None,
        infos: Sequence[common_pb2.TokenInfo] = (),
        at: tuple[int, int] | None = None,
    ) -> None:
        """One delta; `at` overrides where it claims to stand."""
        token_ids = [100 + self.tokens.get(choice, 0)] if ids is None else list(ids)
        token_offset, text_offset = at or (self.tokens.get(choice, 0), self.text_length.get(choice, 0))
        self.tokens[choice] = token_offset + len(token_ids)
        self.text_length[choice] = text_offset + len(text)
        self._send(
            tokenizer_pb2.EventBatch(
                stream_ids=[self.request.stream_id],
                choices=[choice] if choice else [],
                token_offsets=[token_offset],
                token_counts=[] if len(token_ids) == 1 else [len(token_ids)],
                token_ids=token_ids,
                text_offsets=[text_offset],
                texts=[text],
                row_tokens=[common_pb2.RowTokens(row=0, tokens=infos)] if infos else [],
            )
        )

    def finish(self, reason: FinishReason = FinishReason.STOP, *, choice: int = 0, **more: Any) -> None:
        """A choice ends."""
        pb = generation_pb2.Finish(
            choice=choice,
            reason=reason.value,  # type: ignore[arg-type]  # the contract's own number
            output_tokens=self.tokens.get(choice, 0),
            **more,
        )
        stream_finish = tokenizer_pb2.StreamFinish(stream_id=self.request.stream_id, finish=pb)
        self._send(tokenizer_pb2.EventBatch(finishes=[stream_finish]))

    def complete(self, *, prompt_tokens: int = 7, cached: int = 2, prompt: Sequence[common_pb2.TokenInfo] = ()) -> None:
        """The request ends; `prompt` is told of its tokens."""
        usage = common_pb2.Usage(
            prompt_tokens=prompt_tokens, cached_prompt_tokens=cached, output_tokens=sum(self.tokens.values())
        )
        completed = tokenizer_pb2.StreamCompleted(
            stream_id=self.request.stream_id, completed=generation_pb2.Completed(usage=usage, prompt=prompt)
        )
        self._send(tokenizer_pb2.EventBatch(completions=[completed]))

    def _send(self, batch: tokenizer_pb2.EventBatch) -> None:
        self.batches.append(batch)
        self.publish(batch)

    def cut(self, reason: tokenizer_pb2.CutReason) -> None:
        """Nothing more of it comes from here."""
        cut = tokenizer_pb2.StreamCut(stream_id=self.request.stream_id, reason=reason)
        self._send(tokenizer_pb2.EventBatch(cuts=[cut]))


Script = Callable[[ScriptedStream], Coroutine[Any, Any, None]]


async def answer_hello(stream: ScriptedStream) -> None:
    """The default script: every choice says "Hello world" in three deltas, and stops."""
    for choice in range(stream.n):
        for text in ("Hel", "lo", " world"):
            stream.say(text, choice=choice)
        stream.finish(choice=choice)
    stream.complete()


class ScriptedModels(generation_pb2_grpc.GenerationServiceServicer):
    """The tokenizer's own GenerationService, as far as a gateway passes calls on to it."""

    def __init__(self, model: str) -> None:
        self.model = model

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Context
    ) -> generation_pb2.ListModelsResponse:
        model = generation_pb2.Model(
            model_id=self.model, context_length=2048, vocab_size=1000, created_unix_ms=CREATED_UNIX_MS
        )
        return generation_pb2.ListModelsResponse(models=[model])

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        return generation_pb2.TokenizeResponse(token_ids=[len(word) for word in request.text.split()])

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        async with answering(context):
            return generation_pb2.DetokenizeResponse(text=" ".join("x" * length for length in request.token_ids))


class ScriptedTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves both contracts on one port; `restart` gives it a new epoch and no memory."""

    def __init__(self, *, model: str = MODEL, protocol_version: int = PROTOCOL_VERSION) -> None:
        self.epoch = 1
        self.model = model
        self.protocol_version = protocol_version
        self.script: Script = answer_hello
        self.refuse: Callable[[tokenizer_pb2.OpenRequest], TailraceError | None] = lambda _: None
        self.before_open: Callable[[], Awaitable[None]] | None = None
        self.attach_script: Script | None = None  # without one nothing is known, and nothing can be claimed
        self.attach_n = 1
        self.before_attach_answer: Callable[[], Awaitable[None]] | None = None
        self.refuse_attach: Callable[[tokenizer_pb2.AttachRequest], TailraceError | None] = lambda _: None
        self.attaches: list[tokenizer_pb2.AttachRequest] = []
        self.before_abort: Callable[[], Awaitable[None]] | None = None
        self.heartbeats = True
        self.why_not = ""  # it has no route; told to the next event call
        self.streams: dict[int, ScriptedStream] = {}
        self.opened: list[ScriptedStream] = []
        self.attached: list[ScriptedStream] = []
        self.releases: list[tuple[int, int]] = []
        self.calls = 0
        self.port = 0
        self._outbox: asyncio.Queue[tokenizer_pb2.EventBatch | None] = asyncio.Queue()
        self._scripts: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Opens its port, the same one as before if there was one."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, self._server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            ScriptedModels(self.model),  # type: ignore[abstract]  # what it leaves out is answered UNIMPLEMENTED
            self._server,
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Closes it, cutting what is open."""
        for task in self._scripts:
            task.cancel()
        if self._server is not None:
            await self._server.stop(None)

    async def restart(self) -> None:
        """Another incarnation on the same port."""
        await self.stop()
        self.epoch += 1
        self.streams.clear()
        await self.start()

    def hang_up(self) -> None:
        """Ends the current event call; its streams live on."""
        self._outbox.put_nowait(None)

    async def Open(self, request: tokenizer_pb2.OpenRequest, context: Context) -> tokenizer_pb2.OpenResponse:
        if self.before_open is not None:
            await self.before_open()
        if error := self.refuse(request):
            await abort(context, error)
        stream = ScriptedStream(request, self.publish)
        if stream.body.model not in ("", self.model):
            await abort(context, NotFound(f"model {stream.body.model!r}; served is {self.model!r}"))
        self.streams[request.stream_id] = stream
        self.opened.append(stream)
        self._run(self.script, stream)
        request_id = stream.body.request_id or f"made-{request.stream_id}"
        started = self._started(request_id, stream.options.sampling.seed)
        return tokenizer_pb2.OpenResponse(epoch=self.epoch, started=started)

    async def Abort(
        self, request: tokenizer_pb2.TokenizerServiceAbortRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceAbortResponse:
        if self.before_abort is not None:
            await self.before_abort()
        for stream in self.streams.values():
            if stream.body.request_id == request.request_id and stream.request.tenant == request.tenant:
                for choice in range(stream.n):
                    stream.finish(FinishReason.ABORTED, choice=choice)
                stream.complete()
                return tokenizer_pb2.TokenizerServiceAbortResponse(outcome=generation_pb2.ABORT_OUTCOME_ABORTING)
        return tokenizer_pb2.TokenizerServiceAbortResponse(outcome=generation_pb2.ABORT_OUTCOME_NOT_FOUND)

    async def Release(
        self, request: tokenizer_pb2.TokenizerServiceReleaseRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceReleaseResponse:
        for ended in request.streams:
            self.releases.append((ended.stream_id, ended.end))
            if stream := self.streams.pop(ended.stream_id, None):
                stream.end = ended.end
                stream.released.set()
        return tokenizer_pb2.TokenizerServiceReleaseResponse(epoch=self.epoch)

    async def StreamEvents(
        self, request: tokenizer_pb2.StreamEventsRequest, context: Context
    ) -> AsyncIterator[tokenizer_pb2.StreamEventsResponse]:
        self.calls += 1
        outbox: asyncio.Queue[tokenizer_pb2.EventBatch | None] = asyncio.Queue()
        self._outbox = outbox
        hello = common_pb2.Hello(
            epoch=self.epoch, protocol_version=self.protocol_version, model_id=self.model, context_length=2048
        )
        yield tokenizer_pb2.StreamEventsResponse(hello=hello)
        yield tokenizer_pb2.StreamEventsResponse(readiness=self._readiness())
        for stream in self.streams.values():
            for batch in stream.batches:
                outbox.put_nowait(batch)
        while (news := await self._next(outbox)) is not None:
            yield tokenizer_pb2.StreamEventsResponse(batch=news)

    async def Attach(self, request: tokenizer_pb2.AttachRequest, context: Context) -> tokenizer_pb2.AttachResponse:
        self.attaches.append(request)
        if error := self.refuse_attach(request):
            await abort(context, error)
        if self.attach_script is None:
            await abort(context, NotFound(f"request {request.resume.request_id!r}"))
            raise AssertionError
        stream = ScriptedStream(request, self.publish)
        for offset in request.resume.offsets:
            stream.tokens[offset.choice] = offset.token_offset
            stream.text_length[offset.choice] = offset.text_offset
        self.streams[request.stream_id] = stream
        self.attached.append(stream)
        self._run(self.attach_script, stream)
        if self.before_attach_answer is not None:
            await self.before_attach_answer()
        return tokenizer_pb2.AttachResponse(
            epoch=self.epoch,
            started=self._started(request.resume.request_id),
            n=self.attach_n,
            delivery=generation_pb2.DELIVERY_STREAM,
        )

    def _run(self, script: Script, stream: ScriptedStream) -> None:
        task = asyncio.create_task(script(stream))
        self._scripts.add(task)
        task.add_done_callback(self._scripts.discard)

    def _started(self, request_id: str, seed: int = 0) -> generation_pb2.Started:
        return generation_pb2.Started(
            request_id=request_id,
            resume_token=TOKEN,
            model=self.model,
            created_unix_ms=CREATED_UNIX_MS,
            prompt_tokens=7,
            seed=seed,
        )

    def _readiness(self) -> tokenizer_pb2.Readiness:
        return tokenizer_pb2.Readiness(ready=not self.why_not, why_not=self.why_not)

    async def _next(self, outbox: asyncio.Queue[tokenizer_pb2.EventBatch | None]) -> tokenizer_pb2.EventBatch | None:
        while True:
            try:
                async with asyncio.timeout(0.5):
                    return await outbox.get()
            except TimeoutError:
                if self.heartbeats:
                    return tokenizer_pb2.EventBatch()

    def publish(self, batch: tokenizer_pb2.EventBatch) -> None:
        """Sends it on the current event call."""
        self._outbox.put_nowait(batch)


@asynccontextmanager
async def serving(tokenizer: ScriptedTokenizer) -> AsyncIterator[ScriptedTokenizer]:
    """A scripted tokenizer that listens until the block ends."""
    await tokenizer.start()
    try:
        yield tokenizer
    finally:
        await tokenizer.stop()
