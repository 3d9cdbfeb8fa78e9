"""GET /v1/requests/{id}/events: the rest of an answer, for a caller who has its beginning."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from gateway.openai.event_ids import LAST_EVENT_ID_HEADER, LAST_EVENT_ID_PARAMETER, Position, read_event_id
from gateway.openai.form import Form
from gateway.openai.generate import abort_connection, caller_of
from gateway.openai.streamed import Streamed
from gateway.requests import RemoteRequests
from services.protocol.answer import Offsets
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2


def read_position(http: web.Request) -> Position:
    """Where the caller stands. Raises InvalidRequest.

    A browser's EventSource sends the header when it reconnects by itself; the first time only the URL can say it.
    """
    event_id = http.headers.get(LAST_EVENT_ID_HEADER) or http.query.get(LAST_EVENT_ID_PARAMETER)
    if not event_id:
        why = (
            f"is needed: the id of the last event you have, or what X-Resume-From said (or ?{LAST_EVENT_ID_PARAMETER}=)"
        )
        raise InvalidRequest(LAST_EVENT_ID_HEADER, why)
    return read_event_id(event_id)


class Continuation:
    """One call, from its attachment to the end of its response. `forms` by their letters."""

    def __init__(self, http: web.Request, request_id: str, forms: Mapping[str, Form]) -> None:
        self._http = http
        self._request_id = request_id
        self._position = read_position(http)
        if self._position.form not in forms:
            raise InvalidRequest(LAST_EVENT_ID_HEADER, "is no id of an event of this API")
        self._form = forms[self._position.form]

    async def serve(self, requests: RemoteRequests, tenant: str) -> web.StreamResponse:
        """The response, written to its end. Raises a TailraceError only while nothing has been sent."""
        position = self._position
        if position.over:
            return web.Response(status=204)  # which tells an EventSource to stop coming back
        try:
            request = self._resume_request(position.offsets)
            answer = await requests.resume(request, tenant=tenant, caller=caller_of(self._http))
        except InvalidRequest as error:
            raise InvalidRequest(LAST_EVENT_ID_HEADER, error.reason_text) from error
        told = False
        try:
            if len(answer.stream.log.choices) != len(position.choices):
                raise InvalidRequest(LAST_EVENT_ID_HEADER, "belongs to an answer with another number of choices")
            answer.evict = lambda: abort_connection(self._http)
            response = await self._streamed().write(self._http, [answer])
            told = True
            return response
        finally:
            answer.close(delivered=told and answer.stream.cursor.done)

    def _resume_request(self, offsets: Offsets) -> generation_pb2.ResumeRequest:
        return generation_pb2.ResumeRequest(
            request_id=self._request_id,
            resume_token=self._position.resume_token,
            offsets=[
                generation_pb2.ChoiceOffset(choice=choice, token_offset=token_offset, text_offset=text_offset)
                for choice, (token_offset, text_offset) in offsets.items()
            ],
        )

    def _streamed(self) -> Streamed:
        return Streamed(
            form=self._form,
            request_id=self._request_id,
            n=len(self._position.choices),
            include_usage=self._position.include_usage,
            logprobs=self._position.logprobs,
            position=self._position,
            names={},
        )
