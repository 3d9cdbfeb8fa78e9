"""The admin port's services: what a process remembers, how it stands, and how to make it drain."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import grpc.aio

from services.protocol.hello import Hello, to_wire
from services.protocol.views import Content, HopView, ProcessView, RequestView, SchedulerView
from services.protocol.views_wire import content_to_wire, process_to_wire, request_to_wire
from services.runtime.app import Runtime
from services.runtime.errors import InvalidRequest, NotFound, PermissionDenied, answering
from tailrace.v1 import admin_pb2, admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_PAGE = 100
MAX_PAGE = 1000

AT_ONCE = 32
"""Views made before other work gets its turn: a long list must not hold up what is being streamed."""

ENDED_MAX = 256
"""Requests that ended and are still shown."""

ADMIN_SERVICES = ("tailrace.v1.InspectionService", "tailrace.v1.AdminService")


class Inspected(Protocol):
    """What a process lets its operators see. Each method answers from memory, at once."""

    def hello(self) -> Hello:
        """Who it is."""
        ...

    def process(self) -> ProcessView:
        """How it stands."""
        ...

    def views(self, request_id: str = "", attempt_id: int = 0, *, brief: bool = False) -> Iterator[RequestView]:
        """What it holds, or what of it has this id, oldest first; `brief` leaves moments out.

        Each view is made when its turn comes, and entries may leave meanwhile.
        """
        ...

    def total(self) -> int:
        """How many that are."""
        ...

    def ended(self) -> Iterable[RequestView]:
        """What it held until lately, newest last."""
        ...

    def content(self, view: RequestView) -> Content | None:
        """A request's prompt and output; None where this process may not show them, or doesn't have them."""
        ...


class EndedRequests:
    """The last requests that a process has forgotten, as they stood then: labels, counts and times, no content."""

    def __init__(self) -> None:
        self._views: deque[RequestView] = deque(maxlen=ENDED_MAX)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(list(self._views))

    def add(self, view: RequestView) -> None:
        """One more; the oldest makes room."""
        self._views.append(view)


def process_view(
    runtime: Runtime, *, hops: Iterable[HopView] = (), output_tokens: int = 0, scheduler: SchedulerView | None = None
) -> ProcessView:
    """What every process tells of itself, and what only this one does."""
    return ProcessView(
        name=runtime.name,
        service=runtime.service,
        phase=runtime.phase.value,
        ready=runtime.ready,
        not_ready_why=runtime.not_ready_why,
        uptime_ms=round((runtime.clock.now() - runtime.started_at) * 1000),
        unix_us=runtime.clock.unix_ms() * 1000,
        hops=tuple(hops),
        output_tokens=output_tokens,
        scheduler=scheduler,
    )


class InspectionServicer(admin_pb2_grpc.InspectionServiceServicer):
    """InspectionService over what a process lets its operators see."""

    def __init__(self, inspected: Inspected) -> None:
        self._inspected = inspected

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """One page of what the process remembers."""
        async with answering(context):
            start, size = _page(request)
            page: list[admin_pb2.RequestView] = []
            more, matched = False, 0
            for seen, view in enumerate(self._candidates(request), 1):
                if not seen % AT_ONCE:
                    await asyncio.sleep(0)
                if not _asked_for(request, view):
                    continue
                matched += 1
                if matched > start + size:
                    more = True
                    break
                if matched > start:
                    page.append(request_to_wire(view))
            return admin_pb2.ListRequestsResponse(
                hello=to_wire(self._inspected.hello()),
                requests=page,
                next_page_token=str(start + size) if more else "",
                total=self._inspected.total(),
                process=process_to_wire(self._inspected.process()),
            )

    async def GetRequest(self, request: admin_pb2.GetRequestRequest, context: Context) -> admin_pb2.GetRequestResponse:
        """One request."""
        async with answering(context, request_id=request.request_id):
            if not request.request_id and not request.attempt_id:
                raise InvalidRequest("request_id", "or attempt_id must be set")
            view = self._find(request)
            response = admin_pb2.GetRequestResponse(
                hello=to_wire(self._inspected.hello()), request=request_to_wire(view)
            )
            if request.show_content:
                content = self._inspected.content(view)
                if content is None:
                    raise PermissionDenied("this process does not show prompts and outputs")
                response.content.CopyFrom(content_to_wire(content))
            return response

    def _candidates(self, request: admin_pb2.ListRequestsRequest) -> Iterable[RequestView]:
        held = self._inspected.views(request.request_id, request.attempt_id, brief=request.brief)
        return chain(held, self._ended(request.request_id, request.attempt_id)) if request.include_ended else held

    def _ended(self, request_id: str, attempt_id: int) -> list[RequestView]:
        return [
            view
            for view in self._inspected.ended()
            if request_id in ("", view.request_id) and attempt_id in (0, view.attempt_id)
        ]

    def _find(self, request: admin_pb2.GetRequestRequest) -> RequestView:
        """The latest of those held; failing these, of those that ended lately. Raises NotFound."""
        wanted = request.request_id, request.attempt_id
        found = list(self._inspected.views(*wanted)) or self._ended(*wanted)
        if not found:
            raise NotFound(f"request {request.request_id or hex(request.attempt_id)!r}")
        return found[-1]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService over the process's own drain."""

    def __init__(self, request_drain: Callable[[], None], open_requests: Callable[[], int]) -> None:
        self._request_drain = request_drain
        self._open_requests = open_requests

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Starts draining, and answers at once."""
        self._request_drain()
        return admin_pb2.DrainResponse(open_requests=self._open_requests())


def add_admin_services(
    server: grpc.aio.Server,
    inspected: Inspected,
    runtime: Runtime,
    open_requests: Callable[[], int],
    admin: AdminServicer | None = None,
) -> tuple[str, ...]:
    """Both services of the operators' port; returns their full names. `admin` where it can do more than drain."""
    admin_pb2_grpc.add_InspectionServiceServicer_to_server(InspectionServicer(inspected), server)
    admin = admin or AdminServicer(runtime.request_drain, open_requests)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    return ADMIN_SERVICES


def _page(request: admin_pb2.ListRequestsRequest) -> tuple[int, int]:
    size = request.page_size or DEFAULT_PAGE
    if size > MAX_PAGE:
        raise InvalidRequest("page_size", f"must be 1 to {MAX_PAGE}, not {size}")
    if request.page_token and not request.page_token.isdecimal():
        raise InvalidRequest("page_token", "must be the next_page_token of an earlier answer")
    return int(request.page_token or 0), size


def _asked_for(request: admin_pb2.ListRequestsRequest, view: RequestView) -> bool:
    phases = ("", view.caller_phase, view.engine_phase)
    return request.phase in phases and view.idle_ms >= request.idle_ms_min
