"""The admin port's services: what a process remembers, and how to make it drain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc.aio

from services.protocol.hello import Hello, to_wire
from services.runtime.errors import InvalidRequest, answering
from tailrace.v1 import admin_pb2, admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_PAGE = 100
MAX_PAGE = 1000

ADMIN_SERVICES = ("tailrace.v1.InspectionService", "tailrace.v1.AdminService")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceView:
    """Where a choice stands in one process; tokens, code points, blocks and milliseconds."""

    choice: int
    log_token_offset: int = 0
    log_text_offset: int = 0
    cursor_token_offset: int = 0
    blocks: int = 0
    idle_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What one process remembers of one request. Never its prompt or output."""

    request_id: str = ""
    attempt_id: int = 0
    caller_phase: str = ""
    engine_phase: str = ""
    age_ms: int = 0
    choices: Sequence[ChoiceView] = ()


class InspectionServicer(admin_pb2_grpc.InspectionServiceServicer):
    """InspectionService over a function that walks what the process remembers, oldest first."""

    def __init__(
        self, hello: Callable[[], Hello], views: Callable[[], Iterable[RequestView]], total: Callable[[], int]
    ) -> None:
        self._hello = hello
        self._views = views
        self._total = total

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """One page of what the process remembers."""
        async with answering(context):
            start, size = _page(request)
            found = (v for v in self._views() if not request.request_id or v.request_id == request.request_id)
            views = list(islice(found, start, start + size + 1))
            return admin_pb2.ListRequestsResponse(
                hello=to_wire(self._hello()),
                requests=[_view_to_wire(view) for view in views[:size]],
                next_page_token=str(start + size) if len(views) > size else "",
                total=self._total(),
            )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService over the process's own drain."""

    def __init__(self, request_drain: Callable[[], None], open_requests: Callable[[], int]) -> None:
        self._request_drain = request_drain
        self._open_requests = open_requests

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Starts draining, and answers at once."""
        self._request_drain()
        return admin_pb2.DrainResponse(open_requests=self._open_requests())


def _page(request: admin_pb2.ListRequestsRequest) -> tuple[int, int]:
    size = request.page_size or DEFAULT_PAGE
    if size > MAX_PAGE:
        raise InvalidRequest("page_size", f"must be 1 to {MAX_PAGE}, not {size}")
    if request.page_token and not request.page_token.isdecimal():
        raise InvalidRequest("page_token", "must be the next_page_token of an earlier answer")
    return int(request.page_token or 0), size


def _view_to_wire(view: RequestView) -> admin_pb2.RequestView:
    return admin_pb2.RequestView(
        request_id=view.request_id,
        attempt_id=view.attempt_id,
        caller_phase=view.caller_phase,
        engine_phase=view.engine_phase,
        age_ms=view.age_ms,
        choices=[
            admin_pb2.ChoiceView(
                choice=choice.choice,
                log_token_offset=choice.log_token_offset,
                log_text_offset=choice.log_text_offset,
                cursor_token_offset=choice.cursor_token_offset,
                blocks=choice.blocks,
                idle_ms=choice.idle_ms,
            )
            for choice in view.choices
        ],
    )
