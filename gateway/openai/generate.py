"""Serves one generation over HTTP, streamed or not: opens it, writes its answer, and says once how the caller left."""

from __future__ import annotations

from aiohttp import web

from gateway.answer import RemoteAnswer
from gateway.openai.call import Call
from gateway.openai.chunks import envelope_of, usage_object
from gateway.openai.event_ids import ChoicePosition, Position
from gateway.openai.form import Form
from gateway.openai.json_text import json_object
from gateway.openai.request_id import RequestName
from gateway.openai.streamed import Streamed, together
from gateway.openai.whole import WholeAnswer
from gateway.requests import RemoteRequests
from services.runtime.trace import TRACEPARENT, TRACESTATE, TraceContext, read_headers


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
                answer = await requests.open(
                    request, tenant=tenant, deadline_s=None, caller=caller_of(self._http), named=self._name.named
                )
                answer.evict = lambda: abort_connection(self._http)
                self._answers.append(answer)
            response = await (self._stream() if self._call.stream else self._whole())
            self._told = True
            return response
        finally:
            for answer in self._answers:
                answer.close(delivered=self._told and answer.stream.cursor.done)

    async def _stream(self) -> web.StreamResponse:
        streamed = Streamed(
            form=self._form,
            request_id=self._name.request_id,
            n=self._call.n,
            include_usage=self._call.include_usage,
            logprobs=self._logprobs,
            position=self._position() if len(self._answers) == 1 else None,
            names=self._call.names,
        )
        return await streamed.write(self._http, self._answers)

    def _position(self) -> Position:
        return Position(
            form=self._form.letter,
            resume_token=self._answers[0].started.resume_token,
            include_usage=self._call.include_usage,
            logprobs=self._logprobs,
            choices=(ChoicePosition(),) * self._call.n,
        )

    async def _whole(self) -> web.StreamResponse:
        parts = [
            WholeAnswer(
                self._form, first_choice=index * self._call.n, n=self._call.n, logprobs=self._logprobs, echo=echo
            )
            for index, echo in enumerate(self._call.echoes)
        ]
        await together([part.gather(answer) for part, answer in zip(parts, self._answers, strict=True)])
        body = {
            **envelope_of(self._form, self._answers[0].started, self._name.request_id, streamed=False),
            "choices": [choice for part in parts for choice in part.choices()],
            "usage": usage_object(part.usage for part in parts if part.usage),
        }
        response = web.Response(body=json_object(body), content_type="application/json", charset="utf-8")
        await response.prepare(self._http)
        await response.write_eof()
        return response


def caller_of(http: web.Request) -> TraceContext | None:
    """Where the caller stands in a trace."""
    return read_headers(http.headers.getall(TRACEPARENT, ()), http.headers.getall(TRACESTATE, ()))


def abort_connection(http: web.Request) -> None:
    """Ends a caller who takes nothing; its handler is cancelled by that."""
    if http.transport is not None:
        http.transport.abort()
