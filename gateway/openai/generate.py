"""Serves one generation over HTTP, streamed or not: opens it, writes its answer, and says once how the caller left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from aiohttp import web

from gateway.answer import RemoteAnswer
from gateway.openai.call import Call
from gateway.openai.chunks import DONE, AnswerChunks, envelope_of, error_event, usage_event, usage_object
from gateway.openai.errors import reply_of
from gateway.openai.form import Form
from gateway.openai.json_text import json_object
from gateway.openai.request_id import RequestName
from gateway.openai.sse import EventStream
from gateway.openai.whole import WholeAnswer
from gateway.requests import RemoteRequests
from services.runtime.errors import TailraceError


class Generation:
    """One call, from its opening to the end of its response."""

    def __init__(self, http: web.Request, form: Form, call: Call, name: RequestName) -> None:
        self._http = http
        self._form = form
        self._call = call
        self._name = name
        self._logprobs = call.requests[0].options.output.HasField("logprobs")
        self._answers: list[RemoteAnswer] = []
        self._told = False  # the transport has the end of the answer

    async def serve(self, requests: RemoteRequests, tenant: str) -> web.StreamResponse:
        """The response, written to its end. Raises a TailraceError only while nothing has been sent."""
        try:
            for request in self._call.requests:
                answer = await requests.open(request, tenant=tenant, deadline_s=None, named=self._name.named)
                answer.evict = self._abort_connection
                self._answers.append(answer)
            return await (self._stream() if self._call.stream else self._whole())
        finally:
            for answer in self._answers:
                answer.close(delivered=self._told and answer.stream.cursor.done)

    def _abort_connection(self) -> None:
        if self._http.transport is not None:
            self._http.transport.abort()

    async def _stream(self) -> web.StreamResponse:
        stream = EventStream()
        await stream.start(self._http)
        envelope = self._envelope(streamed=True)
        chunks = [
            AnswerChunks(
                self._form,
                envelope,
                first_choice=index * self._call.n,
                n=self._call.n,
                include_usage=self._call.include_usage,
                logprobs=self._logprobs,
            )
            for index in range(len(self._answers))
        ]
        try:
            await _together([_write(stream, *pair) for pair in zip(self._answers, chunks, strict=True)])
        except TailraceError as error:
            response = await stream.end(error_event(reply_of(error, self._call.names)), close_connection=True)
        else:
            response = await stream.end(self._ending(envelope, chunks) + DONE)
        self._told = True
        return response

    async def _whole(self) -> web.StreamResponse:
        parts = [
            WholeAnswer(self._form, first_choice=index * self._call.n, n=self._call.n, logprobs=self._logprobs)
            for index in range(len(self._answers))
        ]
        await _together([part.gather(answer) for part, answer in zip(parts, self._answers, strict=True)])
        usage = usage_object(part.usage for part in parts if part.usage)
        body = {
            **self._envelope(streamed=False),
            "choices": [choice for part in parts for choice in part.choices()],
            "usage": usage,
        }
        response = web.Response(body=json_object(body), content_type="application/json", charset="utf-8")
        await response.prepare(self._http)
        await response.write_eof()
        self._told = True
        return response

    def _envelope(self, *, streamed: bool) -> dict[str, Any]:
        return envelope_of(self._form, self._answers[0].started, self._name.request_id, streamed=streamed)

    def _ending(self, envelope: dict[str, Any], chunks: Sequence[AnswerChunks]) -> bytes:
        if not self._call.include_usage:
            return b""
        return usage_event(envelope, usage_object(part.usage for part in chunks if part.usage))


async def _write(stream: EventStream, answer: RemoteAnswer, chunks: AnswerChunks) -> None:
    """Writes one answer's chunks. Raises the failure that ended it, once what came before it is written."""
    await stream.write(chunks.opening())
    async for events in answer.batches():
        data, failure = chunks.encode(events)
        await stream.write(data)
        if failure is not None:
            raise failure


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs them side by side; the first failure ends the others and is raised as it is."""
    if len(jobs) == 1:
        await jobs[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(job)
    except ExceptionGroup as failures:
        expected, others = failures.split(TailraceError)
        if others is not None or expected is None:
            raise
        raise expected.exceptions[0] from None
