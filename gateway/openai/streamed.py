"""A call's answers as server-sent events, side by side on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.answer import RemoteAnswer
from gateway.openai.chunks import DONE, AnswerChunks, envelope_of, error_event, usage_event, usage_object
from gateway.openai.errors import reply_of
from gateway.openai.event_ids import EventIds, Position
from gateway.openai.form import Form
from gateway.openai.sse import EventStream
from services.runtime.errors import TailraceError

RESUME_FROM_HEADER = "X-Resume-From"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """How the answers are written. `position`: where the only answer's reader stands; None where there are several.

    Events carry ids only where one id can say everything: several answers have a resume token each.
    """

    form: Form
    request_id: str
    n: int
    include_usage: bool
    logprobs: bool
    position: Position | None
    names: Mapping[str, str]

    async def write(self, http: web.Request, answers: Sequence[RemoteAnswer]) -> web.StreamResponse:
        """The response, written to its end, which may be an error's event."""
        ids = None if self.position is None else EventIds(self.position)
        stream = EventStream({} if ids is None else {RESUME_FROM_HEADER: ids.first})
        await stream.start(http)
        envelope = envelope_of(self.form, answers[0].started, self.request_id, streamed=True)
        chunks = [self._chunks(envelope, index, ids) for index in range(len(answers))]
        try:
            await together([_write(stream, *pair) for pair in zip(answers, chunks, strict=True)])
        except TailraceError as error:
            return await stream.end(error_event(reply_of(error, self.names)), close_connection=True)
        return await stream.end(self._ending(envelope, chunks, ids))

    def _chunks(self, envelope: dict[str, Any], index: int, ids: EventIds | None) -> AnswerChunks:
        return AnswerChunks(
            self.form,
            envelope,
            first_choice=index * self.n,
            n=self.n,
            include_usage=self.include_usage,
            logprobs=self.logprobs,
            ids=ids,
            position=self.position,
        )

    def _ending(self, envelope: dict[str, Any], chunks: Sequence[AnswerChunks], ids: EventIds | None) -> bytes:
        told = self.position is not None and self.position.usage_told
        usage = b""
        if self.include_usage and not told:
            usage = usage_event(envelope, usage_object(part.usage for part in chunks if part.usage))
        if ids is None:
            return usage + DONE
        return (ids.usage_told() + usage if usage else b"") + ids.over() + DONE


async def _write(stream: EventStream, answer: RemoteAnswer, chunks: AnswerChunks) -> None:
    """Writes one answer's chunks. Raises the failure that ended it, once what came before it is written."""
    await stream.write(chunks.opening())
    async for events in answer.batches():
        data, failure = chunks.encode(events)
        await stream.write(data)
        if failure is not None:
            raise failure


async def together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs them side by side; the first failure ends the others and is raised as it is."""
    if len(jobs) == 1:
        await jobs[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(job)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
