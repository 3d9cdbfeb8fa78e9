"""A gateway's side of the contract, for tests: one event stream, and what each of its streams was told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tailrace.v1 import common_pb2, generation_pb2, tokenizer_pb2, tokenizer_pb2_grpc


@dataclass
class Stream:
    """What one stream was told since its call began; rows are compared with what an earlier call said."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: list[generation_pb2.Finish] = field(default_factory=list)
    completed: generation_pb2.Completed | None = None


class Gateway:
    """Reads a StreamEvents call into `streams`, with the checks that a real gateway makes."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub, epoch: int = 9) -> None:
        self.stub = stub
        self.epoch = epoch
        self.streams: dict[int, Stream] = {}
        self.cuts: dict[int, int] = {}
        self.batches: list[tokenizer_pb2.EventBatch] = []
        self.hello: common_pb2.Hello | None = None
        self.ended: BaseException | None = None
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Opens the event stream and waits for its hello."""
        self.streams, self.hello = {}, None
        self._task = asyncio.create_task(self._read())
        await self.until(lambda: self.hello)

    async def disconnect(self) -> None:
        """Drops the event stream."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def open(
        self, stream_id: int, *, deadline_in_ms: int = 0, fresh_id: bool = False, **request: Any
    ) -> tokenizer_pb2.OpenResponse:
        """Opens a Generate on a stream of its own."""
        request.setdefault("text", "abc")
        return await self.stub.Open(
            tokenizer_pb2.OpenRequest(
                gateway_epoch=self.epoch,
                stream_id=stream_id,
                generate=generation_pb2.GenerateRequest(**request),
                deadline_in_ms=deadline_in_ms,
                fresh_id=fresh_id,
            )
        )

    async def attach(
        self,
        stream_id: int,
        started: generation_pb2.Started,
        has: Stream | None = None,
        *,
        tenant: str = "",
        only_here: bool = False,
        resume_token: bytes | None = None,
    ) -> tokenizer_pb2.AttachResponse:
        """Takes a request up on a stream of its own, from what `has` has."""
        has = has or Stream()
        self.streams[stream_id] = Stream({c: list(ids) for c, ids in has.ids.items()}, dict(has.texts))
        offsets = [
            generation_pb2.ChoiceOffset(choice=choice, token_offset=len(ids), text_offset=len(has.texts[choice]))
            for choice, ids in has.ids.items()
        ]
        token = started.resume_token if resume_token is None else resume_token
        resume = generation_pb2.ResumeRequest(request_id=started.request_id, resume_token=token, offsets=offsets)
        return await self.stub.Attach(
            tokenizer_pb2.AttachRequest(
                gateway_epoch=self.epoch, stream_id=stream_id, tenant=tenant, resume=resume, only_here=only_here
            )
        )

    async def release(self, *stream_ids: int, delivered: bool = True) -> None:
        """Says that streams have ended on the caller's side."""
        end = tokenizer_pb2.STREAM_END_DELIVERED if delivered else tokenizer_pb2.STREAM_END_CALLER_GONE
        streams = [tokenizer_pb2.EndedStream(stream_id=stream_id, end=end) for stream_id in stream_ids]
        await self.stub.Release(tokenizer_pb2.TokenizerServiceReleaseRequest(gateway_epoch=self.epoch, streams=streams))

    async def completed(self, stream_id: int) -> Stream:
        """The stream, once its request has ended."""
        await self.until(lambda: stream_id in self.streams and self.streams[stream_id].completed)
        return self.streams[stream_id]

    async def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        """Waits until the condition holds; it is looked at after every message."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def _read(self) -> None:
        call = self.stub.StreamEvents(
            tokenizer_pb2.StreamEventsRequest(gateway=common_pb2.Hello(epoch=self.epoch, protocol_version=1))
        )
        try:
            async for response in call:
                if response.WhichOneof("payload") == "hello":
                    self.hello = response.hello
                else:
                    self._take(response.batch)
                await self._tell()
        except Exception as error:  # noqa: BLE001  # kept for the test to look at
            self.ended = error
            await self._tell()
        finally:
            call.cancel()

    def _take(self, batch: tokenizer_pb2.EventBatch) -> None:
        self.batches.append(batch)
        start = 0
        for row, stream_id in enumerate(batch.stream_ids):
            stream = self.streams.setdefault(stream_id, Stream())
            choice = batch.choices[row] if batch.choices else 0
            count = batch.token_counts[row] if batch.token_counts else 1
            ids, text = stream.ids.setdefault(choice, []), stream.texts.get(choice, "")
            assert batch.token_offsets[row] == len(ids), "a row that does not continue the choice"
            assert batch.text_offsets[row] == len(text)
            ids += batch.token_ids[start : start + count]
            stream.texts[choice] = text + batch.texts[row]
            start += count
        for finish in batch.finishes:
            stream = self.streams.setdefault(finish.stream_id, Stream())
            assert finish.finish.choice not in [known.choice for known in stream.finishes]
            stream.finishes.append(finish.finish)
        for cut in batch.cuts:
            assert cut.stream_id not in self.cuts
            self.cuts[cut.stream_id] = cut.reason
        for completion in batch.completions:
            stream = self.streams.setdefault(completion.stream_id, Stream())
            assert stream.completed is None
            stream.completed = completion.completed

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
