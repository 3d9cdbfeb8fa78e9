"""A scheduler and a detokenizer in one, speaking the contract over real gRPC, whose every word a test decides.

What it is told to produce it keeps per sequence, and replays on each new StreamText call from token 0 as real ones do.
"""

# ruff: noqa: N802  # the contract's method names are CamelCase
from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.runtime.errors import PreconditionFailed, Superseded, TailraceError, abort
from tailrace.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
HEARTBEAT_S = 0.5


@dataclass(eq=False)
class EngineSequence:
    """One choice of an attempt: its pieces (id, text), and its ends."""

    attempt_id: int
    choice: int
    pieces: list[tuple[int, str]] = field(default_factory=list)
    finish: detokenizer_pb2.TextFinish | None = None
    end: scheduler_pb2.SequenceEnd | None = None


@dataclass(eq=False)
class Call:
    """One StreamText call: a queue of messages, and the numbers of its sequences."""

    generation: int
    queue: asyncio.Queue[detokenizer_pb2.StreamTextResponse | None] = field(default_factory=asyncio.Queue)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    silent: bool = False


class Engine(scheduler_pb2_grpc.SchedulerServiceServicer, detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """`on_submit` is called with each accepted attempt; `refusal` refuses them all."""

    def __init__(self, hello: common_pb2.Hello) -> None:
        self.hello = hello
        self.submits: list[scheduler_pb2.SubmitRequest] = []
        self.sequences: dict[tuple[int, int], EngineSequence] = {}
        self.tombstones: set[int] = set()
        self.aborted: list[int] = []
        self.released: list[int] = []
        self.calls: list[Call] = []
        self.reconciles: list[scheduler_pb2.ReconcileRequest] = []
        self.leases = 0
        self.waiting_sequences = 0
        self.on_submit: Callable[[scheduler_pb2.SubmitRequest], None] = lambda request: None
        self.refusal: TailraceError | None = None
        self.hold_submit: asyncio.Event | None = None
        self.ends_on_abort = True
        self.marks_released = True
        self.changed = asyncio.Condition()

    # -- what tests say

    def tokens(self, attempt_id: int, pieces: Sequence[tuple[int, str]], choice: int = 0) -> None:
        """More output of a choice: ids with their texts, one row each."""
        sequence = self.sequences[attempt_id, choice]
        at = len(sequence.pieces)
        sequence.pieces += pieces
        for call in self.calls:
            self._put(call, _rows(call.numbers[attempt_id, choice], sequence, at))

    def finish(
        self,
        attempt_id: int,
        reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_STOP,
        choice: int = 0,
        *,
        engine_ended: bool = True,
        stop: common_pb2.StopMatch | None = None,
        cached: int = 0,
    ) -> None:
        """The end of a choice; without `engine_ended` it is a stop text's, and the engine goes on."""
        sequence = self.sequences[attempt_id, choice]
        text = "".join(text for _, text in sequence.pieces)
        sequence.finish = detokenizer_pb2.TextFinish(
            token_offset=len(sequence.pieces), text_offset=len(text), reason=reason, stop=stop
        )
        if engine_ended:
            sequence.end = scheduler_pb2.SequenceEnd(
                token_offset=len(sequence.pieces), reason=reason, cached_prompt_tokens=cached
            )
        for call in self.calls:
            self._put(call, _ends(call.numbers[attempt_id, choice], sequence))

    def answer(self, attempt_id: int, text: str, choice: int = 0) -> None:
        """A whole short answer, one token per character, stopped at end-of-text."""
        self.tokens(attempt_id, [(ord(char) % 250 + 2, char) for char in text], choice)
        self.finish(attempt_id, choice=choice)

    def batch(self, batch: detokenizer_pb2.TextBatch) -> None:
        """Exactly this, on every open call."""
        for call in self.calls:
            self._put(call, batch)

    def cut(self) -> None:
        """Ends every open call."""
        for call in self.calls:
            call.queue.put_nowait(None)

    def restart(self) -> None:
        """Dies and comes back with nothing: new epoch, no attempts; its calls are cut."""
        self.hello.epoch += 1
        self.sequences.clear()
        self.tombstones.clear()
        self.cut()

    def has_call(self, generation: int) -> bool:
        """Whether the route's call of this generation is open."""
        return any(call.generation == generation for call in self.calls)

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Waits until the condition holds; it is looked at after every call that came in."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: bool(condition()))

    # -- SchedulerService

    async def Submit(self, request: scheduler_pb2.SubmitRequest, context: Context) -> scheduler_pb2.SubmitResponse:
        if self.hold_submit is not None:
            await self.hold_submit.wait()
        if request.attempt_id in self.tombstones:
            await abort(context, PreconditionFailed("released before it came"))
        if self.refusal is not None:
            await abort(context, self.refusal)
        if (request.attempt_id, 0) not in self.sequences:
            self._accept(request)
        await self._tell()
        return scheduler_pb2.SubmitResponse(epoch=self.hello.epoch)

    async def Abort(
        self, request: scheduler_pb2.SchedulerServiceAbortRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceAbortResponse:
        for attempt_id in request.attempt_ids:
            self.aborted.append(attempt_id)
            mine = [sequence for (owner, _), sequence in self.sequences.items() if owner == attempt_id]
            if not mine:
                self.tombstones.add(attempt_id)
            for sequence in mine:
                if self.ends_on_abort and sequence.finish is None:
                    self.finish(attempt_id, common_pb2.FINISH_REASON_ABORTED, sequence.choice)
        await self._tell()
        return scheduler_pb2.SchedulerServiceAbortResponse(epoch=self.hello.epoch)

    async def Release(
        self, request: scheduler_pb2.SchedulerServiceReleaseRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceReleaseResponse:
        for attempt_id in request.attempt_ids:
            self.released.append(attempt_id)
            self.tombstones.add(attempt_id)
            for key in [key for key in self.sequences if key[0] == attempt_id]:
                del self.sequences[key]
        if self.marks_released and request.attempt_ids:
            self.batch(detokenizer_pb2.TextBatch(released_attempt_ids=request.attempt_ids))
        await self._tell()
        return scheduler_pb2.SchedulerServiceReleaseResponse(epoch=self.hello.epoch)

    async def Reconcile(
        self, request: scheduler_pb2.ReconcileRequest, context: Context
    ) -> scheduler_pb2.ReconcileResponse:
        self.reconciles.append(request)
        held = {attempt_id for attempt_id, _ in self.sequences}
        await self._tell()
        missing = [attempt_id for attempt_id in request.live_attempt_ids if attempt_id not in held]
        return scheduler_pb2.ReconcileResponse(epoch=self.hello.epoch, missing_attempt_ids=missing)

    async def StreamLoad(  # type: ignore[override]  # grpc.aio also takes a method that writes
        self, request: scheduler_pb2.StreamLoadRequest, context: Context
    ) -> None:
        self.leases += 1
        try:
            await context.write(scheduler_pb2.StreamLoadResponse(hello=self.hello))
            while True:
                load = scheduler_pb2.Load(waiting_sequences=self.waiting_sequences)
                await context.write(scheduler_pb2.StreamLoadResponse(load=load))
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            self.leases -= 1

    # -- DetokenizerService

    async def StreamText(  # type: ignore[override]  # grpc.aio also takes a method that writes
        self, request: detokenizer_pb2.StreamTextRequest, context: Context
    ) -> None:
        call = Call(request.route.generation)
        for older in self.calls:
            if older.generation > call.generation:
                await abort(context, Superseded("a newer call is open"))
            older.queue.put_nowait(None)
        self.calls = [call]
        hello = detokenizer_pb2.RouteHello(detokenizer=self.hello, scheduler=self.hello)
        call.queue.put_nowait(detokenizer_pb2.StreamTextResponse(hello=hello))
        for sequence in self.sequences.values():
            self._start(call, sequence)
            self._put(call, _rows(call.numbers[sequence.attempt_id, sequence.choice], sequence, 0))
            self._put(call, _ends(call.numbers[sequence.attempt_id, sequence.choice], sequence))
        await self._tell()
        try:
            await self._send(call, context)
        finally:
            if call in self.calls:
                self.calls.remove(call)

    async def _send(self, call: Call, context: Context) -> None:
        heartbeat = detokenizer_pb2.StreamTextResponse(batch=detokenizer_pb2.TextBatch())
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    message = await call.queue.get()
            except TimeoutError:
                message = heartbeat
            if message is None:
                return
            if not call.silent:
                await context.write(message)

    def _accept(self, request: scheduler_pb2.SubmitRequest) -> None:
        self.submits.append(request)
        for choice in request.choices:
            sequence = EngineSequence(request.attempt_id, choice.choice)
            self.sequences[request.attempt_id, choice.choice] = sequence
            for call in self.calls:
                self._start(call, sequence)
        self.on_submit(request)

    def _start(self, call: Call, sequence: EngineSequence) -> None:
        number = call.numbers[sequence.attempt_id, sequence.choice] = len(call.numbers) + 1
        start = detokenizer_pb2.TextStart(sequence=number, attempt_id=sequence.attempt_id, choice=sequence.choice)
        self._put(call, detokenizer_pb2.TextBatch(starts=[start]))

    def _put(self, call: Call, batch: detokenizer_pb2.TextBatch | None) -> None:
        if batch is not None:
            call.queue.put_nowait(detokenizer_pb2.StreamTextResponse(batch=batch))

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def _rows(number: int, sequence: EngineSequence, at: int) -> detokenizer_pb2.TextBatch | None:
    pieces = sequence.pieces[at:]
    if not pieces:
        return None
    text_offset = sum(len(text) for _, text in sequence.pieces[:at])
    batch = detokenizer_pb2.TextBatch()
    for offset, (token_id, text) in enumerate(pieces, at):
        batch.sequences.append(number)
        batch.token_offsets.append(offset)
        batch.token_ids.append(token_id)
        batch.text_offsets.append(text_offset)
        batch.texts.append(text)
        text_offset += len(text)
    return batch


def _ends(number: int, sequence: EngineSequence) -> detokenizer_pb2.TextBatch | None:
    batch = detokenizer_pb2.TextBatch()
    if sequence.finish is not None:
        finish = batch.finishes.add()
        finish.CopyFrom(sequence.finish)
        finish.sequence = number
    if sequence.end is not None:
        end = batch.engine_ends.add()
        end.CopyFrom(sequence.end)
        end.sequence = number
    return batch if batch.finishes or batch.engine_ends else None
