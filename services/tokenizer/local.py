"""This process's own GenerationService: the same requests, read straight from their logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

from services.protocol.answer import NO_OFFSETS, AnswerCursor, Offsets
from services.protocol.call_span import CallPb, CallSpan
from services.protocol.events import AbortOutcome, Completed, Delta, Finish, Started
from services.protocol.generation import OpenPb
from services.protocol.sender import Wakeup
from services.runtime.clock import Clock
from services.runtime.error_tree import TailraceError, Unavailable
from services.runtime.trace import TraceContext, Tracer
from services.tokenizer.entry import Cut, Entry
from services.tokenizer.shell import Shell
from services.tokenizer.text_calls import TextCalls
from tailrace.v1 import generation_pb2

CUT_BECAUSE = {
    Cut.CLAIMED: "another tokenizer has taken the request over; Resume goes on there",
    Cut.LEFT: "the tokenizer stops; the request can be resumed at another one",
    Cut.LOST: "what was generated of the answer was lost before it was taken over",
}


class LocalAnswer:
    """One direct caller's side of a request; a Reader of its entry."""

    def __init__(
        self,
        shell: Shell,
        entry: Entry,
        answers: dict[LocalAnswer, None],
        span: CallSpan,
        offsets: Offsets = NO_OFFSETS,
    ) -> None:
        """`answers` are all that are open; it takes itself out at its end."""
        self._shell = shell
        self._span = span
        self._answers = answers
        self._entry = entry
        self._cursor = AnswerCursor(entry.log, whole=entry.pinned.request.whole, offsets=offsets)
        self._wakeup = Wakeup()
        self.takes = 0
        self.writes = 0
        self.waiting = False
        self.evict: Callable[[], object] | None = None

    @property
    def request_id(self) -> str:
        """The caller's label or the one that was made."""
        return self._entry.request_id

    @property
    def started(self) -> Started:
        """The stream's first event."""
        return self._entry.started

    def mark(self) -> None:
        """The answer has something new."""
        self._wakeup.set()

    def token_offset(self, choice: int) -> int:
        """Tokens of a choice that were taken."""
        return self._cursor.offsets()[choice][0]

    def batches(self) -> AsyncIterator[Sequence[Delta | Finish | Completed]]:
        """What is new, merged since the last batch, until Completed. Raises Unavailable once the answer was cut."""
        return self._span.noting(self._batches())

    async def _batches(self) -> AsyncIterator[Sequence[Delta | Finish | Completed]]:
        while not self._cursor.done:
            if self._entry.cut is not None:
                raise Unavailable(CUT_BECAUSE[self._entry.cut], reason="STREAM_CUT")
            events = self._cursor.take()
            if events:
                self.takes += 1
                yield events
            else:
                self.waiting = True
                await self._wakeup.wait()
                self.waiting = False

    def close(self, *, delivered: bool) -> None:
        """The caller's side has ended."""
        self._answers.pop(self, None)
        self._entry.drop(self)
        cut = self._entry.cut
        outcome = "completed" if delivered else "cancelled" if cut is None else "failed"
        self._span.ended(outcome, self._entry.log, error="" if cut is None else "STREAM_CUT")
        self._shell.end(self._entry, delivered)


class LocalRequests:
    """`Requests` over this process's ledger."""

    def __init__(self, shell: Shell, text_calls: TextCalls, *, tracer: Tracer, clock: Clock) -> None:
        self._shell = shell
        self._text_calls = text_calls
        self._tracer = tracer
        self._clock = clock
        self._answers: dict[LocalAnswer, None] = {}

    def __iter__(self) -> Iterator[LocalAnswer]:
        return iter(list(self._answers))

    async def open(
        self, request: OpenPb, *, tenant: str, deadline_s: float | None, caller: TraceContext | None
    ) -> LocalAnswer:
        """Accepts a request."""
        with self._call(request, caller) as (span, answers):

            def add_reader(entry: Entry) -> LocalAnswer:
                answers.append(LocalAnswer(self._shell, entry, self._answers, span))
                entry.readers.append(answers[0])
                return answers[0]

            await self._shell.open(
                request, tenant=tenant, deadline_s=deadline_s, add_reader=add_reader, trace=span.context
            )
        return answers[0]

    async def resume(
        self, request: generation_pb2.ResumeRequest, *, tenant: str, caller: TraceContext | None
    ) -> LocalAnswer:
        """Takes up a request again."""
        with self._call(request, caller) as (span, answers):

            def add_reader(entry: Entry, offsets: Offsets) -> None:
                answers.append(LocalAnswer(self._shell, entry, self._answers, span, offsets))
                entry.readers.append(answers[0])

            await self._shell.resume(request, tenant=tenant, add_reader=add_reader, trace=span.context)
        return answers[0]

    @contextmanager
    def _call(self, call: CallPb, caller: TraceContext | None) -> Iterator[tuple[CallSpan, list[LocalAnswer]]]:
        """A call's span, and a place for its answer, which is open from then on; or the call has ended without one."""
        span, answers = CallSpan(self._tracer, self._clock, call, caller, "grpc"), list[LocalAnswer]()
        try:
            yield span, answers
        except TailraceError as error:
            span.ended("refused", error=error.reason)
            raise
        except asyncio.CancelledError:
            span.ended("cancelled")
            raise
        span.accepted(answers[0].started)
        self._answers[answers[0]] = None

    async def abort(self, request_id: str, *, tenant: str, wait_until_released: bool) -> AbortOutcome:
        """Stops a request."""
        return await self._shell.abort(tenant, request_id, wait_until_released=wait_until_released)

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """Text to ids."""
        return await self._text_calls.tokenize(request)

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """Ids to text."""
        return await self._text_calls.detokenize(request)

    async def list_models(self) -> generation_pb2.ListModelsResponse:
        """The served model."""
        return self._text_calls.list_models(self._shell.context_length)
