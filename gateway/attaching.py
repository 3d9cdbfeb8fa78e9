"""Attach: has a request's events come from the tokenizer that has it, or from one that claims it at the schedulers.

Everybody is first asked for what it has itself, in an order that all gateways share; only then does one tokenizer claim
the request, for a claim takes it away from whoever else may serve it to other callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.core import Stream
from gateway.places import Place, Places
from gateway.releases import StreamEnd
from gateway.router import Router
from gateway.upstream import InDoubt, TokenizerLink
from services.protocol.answer import IntegrityError, Offsets
from services.protocol.wire import started_from_wire, trace_to_wire
from services.runtime.errors import InvalidRequest, NotFound, TailraceError, Unavailable
from tailrace.v1 import generation_pb2, tokenizer_pb2

ATTACH_TIMEOUT_S = 10.0
"""Longest wait for one tokenizer's answer; a claim asks the schedulers before it."""


class Attaching:
    """Attaches streams of one gateway. `next_number` gives stream ids that were never used before in its epoch."""

    def __init__(self, *, epoch: int, router: Router, places: Places, next_number: Callable[[], int]) -> None:
        self._epoch = epoch
        self._router = router
        self._places = places
        self._next_number = next_number

    async def attach(self, stream: Stream, resume_token: bytes, offsets: Offsets) -> None:
        """From these offsets on the stream's events come, whoever has or claims its request.

        Raises NotFound where nobody knows it, InvalidRequest for offsets beyond what can be rebuilt, and Unavailable
        while that can't be told.
        """
        resume = _resume_request(stream.request_id, resume_token, offsets)
        links = self._router.in_order(stream.tenant, stream.request_id)
        if not self._router.lone and await self._at_its_owner(stream, resume, links):
            return
        try:
            await self._at(self._router.first_ready(links), stream, resume, only_here=False)
        except NotFound:
            away = [link.address for link in links if not link.connected]
            if not away:
                raise
            why = f"{', '.join(away)} may have this request and can't be reached"
            raise Unavailable(why, reason="TOKENIZER_AWAY") from None

    async def _at_its_owner(
        self, stream: Stream, resume: generation_pb2.ResumeRequest, links: list[TokenizerLink]
    ) -> bool:
        """Whether a tokenizer has the request itself, and serves it now. One that can't be asked is passed over."""
        for link in links:
            if not link.connected:
                continue
            try:
                await self._at(link, stream, resume, only_here=True)
            except (NotFound, Unavailable):
                continue
            return True
        return False

    async def _at(
        self, link: TokenizerLink, stream: Stream, resume: generation_pb2.ResumeRequest, *, only_here: bool
    ) -> None:
        place = Place(link, self._next_number())
        request = tokenizer_pb2.AttachRequest(
            gateway_epoch=self._epoch,
            stream_id=place.stream_id,
            tenant=stream.tenant,
            resume=resume,
            only_here=only_here,
            trace=trace_to_wire(stream.trace),
        )
        link.streams.add(place.stream_id, stream)
        try:
            response = await link.attach(request, timeout_s=ATTACH_TIMEOUT_S)
            whole = response.delivery == generation_pb2.DELIVERY_WHOLE
            stream.attach(started_from_wire(response.started), response.epoch, n=response.n, whole=whole)
        except InDoubt as doubt:
            self._places.doubt(stream, place)
            raise doubt.error from doubt
        except asyncio.CancelledError:
            self._places.doubt(stream, place)
            raise
        except IntegrityError as error:
            place.leave(StreamEnd.CALLER_GONE)
            raise InvalidRequest("offsets", str(error)) from error
        except TailraceError:
            link.streams.discard(place.stream_id)
            raise
        self._places.settle(stream, place)


def _resume_request(request_id: str, resume_token: bytes, offsets: Offsets) -> generation_pb2.ResumeRequest:
    return generation_pb2.ResumeRequest(
        request_id=request_id,
        resume_token=resume_token,
        offsets=[
            generation_pb2.ChoiceOffset(choice=choice, token_offset=token_offset, text_offset=text_offset)
            for choice, (token_offset, text_offset) in offsets.items()
        ],
    )
